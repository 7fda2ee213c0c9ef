"""What happened to the memory of a server: a bounded history, oldest first."""

from __future__ import annotations

from collections import deque

from msgspec.structs import replace

from gms.domain.sessions import Session, Waiter
from snapback_client.frames import MemoryDomain
from snapshot_shared.frames import MAX_EVENTS, EventKind, EventRecord


class History:
    """The latest `MAX_EVENTS` events, and how many older ones a reader has missed."""

    def __init__(self) -> None:
        """Start empty."""
        self.last = 0
        self._records: deque[EventRecord] = deque(maxlen=MAX_EVENTS)

    def add(
        self,
        kind: EventKind,
        at_s: float,
        device: str,
        *,
        reason: str = "",
        generation: int = 0,
        size: int = 0,
    ) -> None:
        """Record what happened to a device."""
        self._keep(
            EventRecord(
                seq=self.last + 1,
                at_s=at_s,
                kind=kind,
                device=device,
                reason=reason,
                generation=generation,
                bytes=size,
            )
        )

    def add_of(
        self,
        who: Session | Waiter,
        kind: EventKind,
        at_s: float,
        *,
        reason: str = "",
        generation: int = 0,
        size: int = 0,
    ) -> None:
        """Record what a client did, or what was done to it."""
        domain: MemoryDomain = who.request.domain
        self._keep(
            EventRecord(
                seq=self.last + 1,
                at_s=at_s,
                kind=kind,
                device=who.request.device,
                domain=domain,
                session=who.id if isinstance(who, Session) else who.ticket,
                client=who.request.client,
                pid=who.peer.pid,
                reason=reason,
                generation=generation,
                bytes=size,
            )
        )

    def take(self, record: EventRecord) -> None:
        """Add an event of another history; it gets a number of this one."""
        self._keep(replace(record, seq=self.last + 1))

    def since(self, seq: int) -> tuple[list[EventRecord], int]:
        """Return the events after `seq`, and how many of them are forgotten already."""
        found = [record for record in self._records if record.seq > seq]
        return found, max(0, self.last - seq - len(found))

    def latest(self, count: int) -> list[EventRecord]:
        """Return the latest events, at most `count`."""
        return list(self._records)[-count:] if count else []

    def _keep(self, record: EventRecord) -> None:
        self._records.append(record)
        self.last = record.seq
