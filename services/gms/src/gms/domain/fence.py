"""Fences: a capture keeps every session off its devices, then lets one save and readers in.

PENDING waits for the present sessions to leave and admits no client. HELD admits only the save that
carries the token. LEASED means that this save reads: the fenced layout cannot go away any more, so
readers may come back while writers still may not. A fence is held on all its devices or on none,
and ends for each device by itself: at once if nothing is committed there, for no save will come.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from enum import StrEnum

from gms.domain.locks import LockRequest
from snapback_client.frames import MemoryDomain
from snapshot_shared.errors import LayoutConflict, Superseded
from snapshot_shared.orders import LayoutRef
from snapshot_shared.transitions import TransitionTable

_REMEMBERED = 4096
"""Tokens of ended fences that are still known, so that a late request does not fence again."""


class FencePhase(StrEnum):
    """How far a fence is on one device."""

    PENDING = "pending"
    HELD = "held"
    LEASED = "leased"
    ENDED = "ended"


class FenceEvent(StrEnum):
    """What happens to a fence on one device."""

    DRAINED = "drained"
    LEASED = "leased"
    SAVED = "saved"
    SAVE_LOST = "save-lost"
    OVER = "over"


FENCES = TransitionTable[FencePhase, FenceEvent](
    "fence",
    {
        (FencePhase.PENDING, FenceEvent.DRAINED): FencePhase.HELD,
        (FencePhase.PENDING, FenceEvent.OVER): FencePhase.ENDED,
        (FencePhase.HELD, FenceEvent.LEASED): FencePhase.LEASED,
        (FencePhase.HELD, FenceEvent.OVER): FencePhase.ENDED,
        (FencePhase.LEASED, FenceEvent.LEASED): FencePhase.LEASED,
        (FencePhase.LEASED, FenceEvent.SAVED): FencePhase.ENDED,
        (FencePhase.LEASED, FenceEvent.SAVE_LOST): FencePhase.LEASED,
        (FencePhase.LEASED, FenceEvent.OVER): FencePhase.ENDED,
    },
)

_ALL = frozenset(LockRequest)
_NONE: frozenset[LockRequest] = frozenset()

ADMITTED: dict[tuple[FencePhase, MemoryDomain], frozenset[LockRequest]] = {
    (FencePhase.PENDING, MemoryDomain.WEIGHTS): _NONE,
    (FencePhase.PENDING, MemoryDomain.KV): _NONE,
    (FencePhase.HELD, MemoryDomain.WEIGHTS): _NONE,
    (FencePhase.HELD, MemoryDomain.KV): _NONE,
    (FencePhase.LEASED, MemoryDomain.WEIGHTS): frozenset({LockRequest.READ, LockRequest.EITHER}),
    # A worker that serves again needs its cache, and no save reads it.
    (FencePhase.LEASED, MemoryDomain.KV): _ALL,
}


@dataclass(eq=False, slots=True)
class Fence:
    """One fence over some devices. `savers` are the sessions that save under it."""

    token: str
    devices: tuple[str, ...]
    phases: dict[str, FencePhase]
    vector: list[LayoutRef] = field(default_factory=list)
    savers: dict[str, int] = field(default_factory=dict)

    @classmethod
    def wanted(cls, token: str, devices: tuple[str, ...]) -> Fence:
        """Begin a fence, pending everywhere."""
        return cls(token, devices, dict.fromkeys(devices, FencePhase.PENDING))

    def move(self, device: str, event: FenceEvent) -> None:
        """Take one step on one device."""
        self.phases[device] = FENCES.next(self.phases[device], event)

    @property
    def is_pending(self) -> bool:
        """Whether sessions are still being waited for."""
        return FencePhase.PENDING in self.phases.values()

    @property
    def is_over(self) -> bool:
        """Whether it has ended on every device."""
        return set(self.phases.values()) == {FencePhase.ENDED}


class FenceBook:
    """All fences of a server, and the tokens of those that have ended."""

    def __init__(self) -> None:
        """Start without fences."""
        self.active: dict[str, Fence] = {}
        self._ended: OrderedDict[str, None] = OrderedDict()

    def on(self, device: str) -> Fence | None:
        """Return the fence that covers a device now."""
        for fence in self.active.values():
            if fence.phases.get(device, FencePhase.ENDED) is not FencePhase.ENDED:
                return fence
        return None

    def phase(self, device: str) -> FencePhase:
        """Return the phase of the fence on a device; ENDED when there is none."""
        fence = self.on(device)
        return FencePhase.ENDED if fence is None else fence.phases[device]

    def admits(self, device: str, domain: MemoryDomain, request: LockRequest) -> bool:
        """Whether the fence on a device, if any, admits a request for a lock."""
        phase = self.phase(device)
        return phase is FencePhase.ENDED or request in ADMITTED[phase, domain]

    def begin(self, token: str, devices: tuple[str, ...]) -> Fence:
        """Return the fence with this token, begun if it is new. LayoutConflict, Superseded."""
        if token in self._ended:
            raise Superseded("this fence has ended already and cannot begin again")
        if known := self.active.get(token):
            if known.devices != devices:
                raise LayoutConflict(
                    "this fence token is in use for other devices", devices=list(known.devices)
                )
            return known
        for device in devices:
            if self.on(device):
                raise LayoutConflict(
                    f"another capture holds {device}",
                    next_step="wait until that capture has ended, or abort it",
                    device=device,
                )
        fence = self.active[token] = Fence.wanted(token, devices)
        return fence

    def end(self, token: str) -> Fence | None:
        """End a fence on every device; an unknown token can never begin."""
        # An abort may come before the capture has asked for its fence.
        self._remember(token)
        fence = self.active.pop(token, None)
        if fence is not None:
            for device, phase in fence.phases.items():
                if phase is not FencePhase.ENDED:
                    fence.move(device, FenceEvent.OVER)
        return fence

    def finish(self, fence: Fence) -> bool:
        """Remove a fence that has ended on every device. Return whether it has."""
        if not fence.is_over:
            return False
        self._remember(fence.token)
        self.active.pop(fence.token, None)
        return True

    def _remember(self, token: str) -> None:
        self._ended[token] = None
        while len(self._ended) > _REMEMBERED:
            self._ended.popitem(last=False)
