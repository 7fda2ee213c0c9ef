"""The files of a control directory: their names, their bodies, and which belong to what.

A worker and the agent talk by these files alone. Each is put in place whole, by a rename; its body
is JSON with the attempt that it belongs to. Whatever a worker writes there is hostile input.
"""

from __future__ import annotations

import msgspec

from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import Failure, InvalidMessage

READY = "ready-for-snapshot"
QUIESCE = "quiesce"
QUIESCED = "quiesced"
COMPLETE = "snapshot-complete"
ABORTED = "snapshot-aborted"
RESTORE_COMPLETE = "restore-complete"
RESTORE_FAILED = "restore-failed"
RESTORED = "restored"

STATE = "state"
"""The folder in which a worker saves its own state, and finds it again after a restore."""

OUTCOMES = {COMPLETE: "complete", ABORTED: "aborted"}
"""How a capture ended, by the file that reports it to the worker."""

CAPTURE_FILES = (QUIESCE, QUIESCED, COMPLETE, ABORTED)
RESTORE_FILES = (RESTORE_COMPLETE, RESTORE_FAILED, RESTORED)

MAX_BODY_BYTES = 64 * 1024


class Signal(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The body of a control file; `reason` and `message` say why something failed.

    In `quiesce`, `capture` is the uid of the content, and `previous` names how the capture before
    this one ended, for a worker that has not seen its end: `complete` or `aborted`.
    """

    attempt: int
    reason: str = ""
    message: str = ""
    capture: str = ""
    previous: str = ""


def body(attempt: int, failure: Failure | None = None) -> bytes:
    """Write the body of a control file."""
    if failure is None:
        return encode_json(Signal(attempt=attempt))
    return encode_json(
        Signal(attempt=attempt, reason=failure.reason, message=failure.message[:4096])
    )


def request(attempt: int, capture: str, previous: str) -> bytes:
    """Write the body of `quiesce`."""
    return encode_json(Signal(attempt=attempt, capture=capture, previous=previous))


def is_of(data: bytes, attempt: int) -> bool:
    """Say whether a body belongs to this attempt; what does not decode belongs to none."""
    try:
        return decode_json(data, Signal, limit=MAX_BODY_BYTES).attempt == attempt
    except InvalidMessage:
        return False
