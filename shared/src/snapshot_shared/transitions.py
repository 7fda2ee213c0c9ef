"""State machines as tables: (state, event) -> state. What is not in the table is refused."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Generic, TypeVar

from snapshot_shared.errors import InvalidTransition

S = TypeVar("S", bound=StrEnum)
E = TypeVar("E", bound=StrEnum)


class TransitionTable(Generic[S, E]):
    """A table of allowed steps. `terminal` states have no way out."""

    def __init__(self, name: str, rows: Mapping[tuple[S, E], S]) -> None:
        """Keep the rows; `name` appears in errors and in the generated page."""
        self.name = name
        self.rows = dict(rows)
        left = {state for state, _ in rows}
        self._terminal = frozenset(target for target in rows.values() if target not in left)

    def next(self, state: S, event: E) -> S:
        """Return the state after `event`. InvalidTransition with both when there is none."""
        try:
            return self.rows[(state, event)]
        except KeyError:
            raise InvalidTransition(
                f"{self.name}: {event.value!r} is not possible in state {state.value!r}",
                state=state.value,
                event=event.value,
            ) from None

    def allows(self, state: S, event: E) -> bool:
        """Whether `event` has a row for `state`."""
        return (state, event) in self.rows

    def terminal(self) -> frozenset[S]:
        """Return the states that are reached and never left."""
        return self._terminal


class Capture(StrEnum):
    """Where the capture of one SnapshotContent stands."""

    PENDING = "Pending"
    PREPARING = "Preparing"
    STAGING = "Staging"
    SEALING = "Sealing"
    READY = "Ready"
    ABORTING = "Aborting"
    FAILED = "Failed"


class CaptureEvent(StrEnum):
    """What moves a capture on."""

    BEGIN = "begin"
    PREPARED = "prepared"
    STAGED = "staged"
    SEALED = "sealed"
    FAILED = "failed"
    ABORTED = "aborted"
    RETRY = "retry"
    IMPORTED = "imported"


CAPTURE = TransitionTable[Capture, CaptureEvent](
    "capture",
    {
        (Capture.PENDING, CaptureEvent.BEGIN): Capture.PREPARING,
        (Capture.PENDING, CaptureEvent.FAILED): Capture.FAILED,
        (Capture.PENDING, CaptureEvent.IMPORTED): Capture.READY,
        (Capture.PREPARING, CaptureEvent.PREPARED): Capture.STAGING,
        (Capture.PREPARING, CaptureEvent.FAILED): Capture.ABORTING,
        (Capture.STAGING, CaptureEvent.STAGED): Capture.SEALING,
        (Capture.STAGING, CaptureEvent.FAILED): Capture.ABORTING,
        (Capture.SEALING, CaptureEvent.SEALED): Capture.READY,
        (Capture.SEALING, CaptureEvent.FAILED): Capture.ABORTING,
        (Capture.ABORTING, CaptureEvent.ABORTED): Capture.FAILED,
        (Capture.ABORTING, CaptureEvent.RETRY): Capture.PENDING,
    },
)


class Restore(StrEnum):
    """Where a SnapshotRestore stands."""

    PENDING = "Pending"
    LOADING = "Loading"
    COMMITTING = "Committing"
    RESTORING = "Restoring"
    RESTORED = "Restored"
    DROPPING = "Dropping"
    FAILED = "Failed"


class RestoreEvent(StrEnum):
    """What moves a restore on."""

    BEGIN = "begin"
    LOADED = "loaded"
    COMMITTED = "committed"
    RESTORED = "restored"
    FAILED = "failed"
    DROPPED = "dropped"
    RETRY = "retry"


RESTORE = TransitionTable[Restore, RestoreEvent](
    "restore",
    {
        (Restore.PENDING, RestoreEvent.BEGIN): Restore.LOADING,
        (Restore.PENDING, RestoreEvent.FAILED): Restore.FAILED,
        (Restore.LOADING, RestoreEvent.LOADED): Restore.COMMITTING,
        (Restore.LOADING, RestoreEvent.FAILED): Restore.DROPPING,
        (Restore.COMMITTING, RestoreEvent.COMMITTED): Restore.RESTORING,
        (Restore.COMMITTING, RestoreEvent.FAILED): Restore.DROPPING,
        (Restore.RESTORING, RestoreEvent.RESTORED): Restore.RESTORED,
        (Restore.RESTORING, RestoreEvent.FAILED): Restore.DROPPING,
        (Restore.DROPPING, RestoreEvent.DROPPED): Restore.FAILED,
        (Restore.DROPPING, RestoreEvent.RETRY): Restore.PENDING,
    },
)
