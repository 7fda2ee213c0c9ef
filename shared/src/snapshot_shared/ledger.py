"""The records of a service's journal and what they add up to. Pure; `journal` does the writing.

The journal is also the outbox: a report is recorded before it is published and stays pending
until NATS has acknowledged it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from snapshot_shared.ids import OrderId, Uid, order_id, owner_of
from snapshot_shared.orders import Report


class Accepted(msgspec.Struct, frozen=True, kw_only=True, tag="accepted"):
    """An order became ours. `deadline_s` counts from `monotonic` within boot `boot_id`."""

    order: str
    attempt: int
    payload: msgspec.Raw
    boot_id: str
    monotonic: float
    wall: float
    deadline_s: float


class Began(msgspec.Struct, frozen=True, kw_only=True, tag="began"):
    """A step is about to begin."""

    order: str
    attempt: int
    step: str


class Ended(msgspec.Struct, frozen=True, kw_only=True, tag="ended"):
    """A step is over."""

    order: str
    attempt: int
    step: str


class Noted(msgspec.Struct, frozen=True, kw_only=True, tag="noted"):
    """A fact that recovery will need: a pid with its start time, a path, a token."""

    order: str
    attempt: int
    key: str
    value: Any


class Reported(msgspec.Struct, frozen=True, kw_only=True, tag="reported"):
    """A report that has to reach the operator."""

    report: Report


class Delivered(msgspec.Struct, frozen=True, kw_only=True, tag="delivered"):
    """A report reached the stream."""

    order: str
    attempt: int
    n: int


class Tombstoned(msgspec.Struct, frozen=True, kw_only=True, tag="tombstoned"):
    """No attempt up to `attempt` of the work named `subject` may begin or go on."""

    subject: str
    attempt: int


Record = Accepted | Began | Ended | Noted | Reported | Delivered | Tombstoned

_OF_CAPTURES = ("prepare", "dump", "seal", "release", "abort")


class Entry:
    """All that is known of the highest attempt of one order."""

    def __init__(self, accepted: Accepted) -> None:
        """Begin with the acceptance."""
        self.order = accepted.order
        self.attempt = accepted.attempt
        self.accepted = accepted
        self.began: list[str] = []
        self.ended: list[str] = []
        self.notes: dict[str, Any] = {}
        self.reports: list[Report] = []
        self.delivered: set[int] = set()

    @property
    def terminal(self) -> Report | None:
        """Return the report that ended the order, if it has ended."""
        return next((report for report in self.reports if report.is_terminal), None)

    @property
    def open_step(self) -> str | None:
        """Return the step that began and has no end on record."""
        return self.began[-1] if len(self.began) > len(self.ended) else None

    @property
    def undelivered(self) -> list[Report]:
        """Return the reports that still have to be published, in order."""
        return [report for report in self.reports if report.n not in self.delivered]

    @property
    def is_live(self) -> bool:
        """Whether more reports can follow: a pod that runs has yet to end."""
        kinds = {report.kind for report in self.reports}
        is_running = "started" in kinds and "exited" not in kinds
        return self.terminal is None or is_running or bool(self.undelivered)

    def records(self) -> list[Record]:
        """Return the records that rebuild this entry, for compaction."""
        order, attempt = self.order, self.attempt
        records: list[Record] = [self.accepted]
        records += [
            Noted(key=name, value=value, order=order, attempt=attempt)
            for name, value in self.notes.items()
        ]
        for index, step in enumerate(self.began):
            records.append(Began(step=step, order=order, attempt=attempt))
            if index < len(self.ended):
                records.append(Ended(step=step, order=order, attempt=attempt))
        records += [Reported(report=report) for report in self.reports]
        records += [Delivered(n=n, order=order, attempt=attempt) for n in sorted(self.delivered)]
        return records


class Ledger:
    """The fold of a journal: the highest attempt of every order, and the tombstones."""

    def __init__(self) -> None:
        """Begin empty."""
        self.entries: dict[str, Entry] = {}
        self.tombstones: dict[str, int] = {}

    def apply(self, record: Record) -> None:
        """Fold one record. Records of an attempt that was superseded are ignored."""
        match record:
            case Accepted():
                known = self.entries.get(record.order)
                if known is None or record.attempt > known.attempt:
                    self.entries[record.order] = Entry(record)
            case Tombstoned():
                if not self.is_tombstoned(record.subject, record.attempt):
                    self.tombstones[record.subject] = record.attempt
            case Reported():
                if entry := self._entry(record.report.order, record.report.attempt):
                    entry.reports.append(record.report)
                    if record.report.kind == "deleted":
                        self._forget_capture(owner_of(OrderId(entry.order)))
            case _:
                if entry := self._entry(record.order, record.attempt):
                    _apply_detail(entry, record)

    def _entry(self, order: str, attempt: int) -> Entry | None:
        entry = self.entries.get(order)
        return entry if entry is not None and entry.attempt == attempt else None

    def _forget_capture(self, content: Uid) -> None:
        """Drop what led to an artifact that is deleted: its tombstone refuses every repeat."""
        deleted = self.tombstones.get(f"capture-{content}", 0)
        for verb in _OF_CAPTURES:
            entry = self.entries.get(order_id(verb, content))
            if entry is not None and entry.attempt <= deleted and not entry.is_live:
                del self.entries[entry.order]

    def unfinished(self) -> list[Entry]:
        """Return the orders that were accepted and have no terminal report, oldest first."""
        return [entry for entry in self.entries.values() if entry.terminal is None]

    def pending_reports(self) -> list[Report]:
        """Return every report that has not been acknowledged by NATS."""
        return [report for entry in self.entries.values() for report in entry.undelivered]

    def is_tombstoned(self, subject: str, attempt: int) -> bool:
        """Whether work named `subject` was aborted at this attempt or a later one."""
        return attempt <= self.tombstones.get(subject, 0)

    def forget(self, *, older_than: float) -> None:
        """Drop what is not worth keeping: entries from before then from which nothing can come.

        The tombstones of an owner go with its last entry.
        """
        for order, entry in list(self.entries.items()):
            if not entry.is_live and entry.accepted.wall < older_than:
                del self.entries[order]
        owners = {owner_of(OrderId(order)) for order in self.entries}
        for subject in list(self.tombstones):
            if subject.partition("-")[2] not in owners:
                del self.tombstones[subject]

    def records(self) -> list[Record]:
        """Return the records that rebuild the ledger."""
        records: list[Record] = [
            Tombstoned(subject=subject, attempt=attempt)
            for subject, attempt in self.tombstones.items()
        ]
        for entry in self.entries.values():
            records += entry.records()
        return records


def _apply_detail(entry: Entry, record: Began | Ended | Noted | Delivered) -> None:
    match record:
        case Began():
            # A step without an end was cut off by a restart; the table began again after it.
            entry.began[len(entry.ended) :] = [record.step]
        case Ended():
            entry.ended.append(record.step)
        case Noted():
            entry.notes[record.key] = record.value
        case Delivered():
            entry.delivered.add(record.n)
