"""Who may hold the memory of one (device, domain), as tables.

A writer builds a new layout beside the committed one, so readers and one writer can coexist. Only
a writer that replaces (its device is too small for two layouts) needs the readers gone, and only
such a writer holds new readers back.
"""

from __future__ import annotations

from enum import StrEnum

from snapback_client.frames import LockMode
from snapshot_shared.transitions import TransitionTable


class Lock(StrEnum):
    """What holds a domain: a committed layout or none, one writer or none, readers or none."""

    EMPTY = "empty"
    WRITING = "writing"
    COMMITTED = "committed"
    READING = "reading"
    UPDATING = "updating"
    UPDATING_READ = "updating-read"


class LockEvent(StrEnum):
    """What happens to a domain."""

    WRITE = "write"
    REPLACE = "replace"
    READ = "read"
    COMMIT = "commit"
    WRITER_GONE = "writer-gone"
    READER_GONE = "reader-gone"
    LAST_READER_GONE = "last-reader-gone"
    PUBLISH = "publish"
    DROP = "drop"


LOCKS = TransitionTable[Lock, LockEvent](
    "lock",
    {
        (Lock.EMPTY, LockEvent.WRITE): Lock.WRITING,
        (Lock.EMPTY, LockEvent.REPLACE): Lock.WRITING,
        (Lock.EMPTY, LockEvent.PUBLISH): Lock.COMMITTED,
        (Lock.WRITING, LockEvent.COMMIT): Lock.READING,
        (Lock.WRITING, LockEvent.WRITER_GONE): Lock.EMPTY,
        (Lock.COMMITTED, LockEvent.WRITE): Lock.UPDATING,
        (Lock.COMMITTED, LockEvent.REPLACE): Lock.WRITING,
        (Lock.COMMITTED, LockEvent.READ): Lock.READING,
        (Lock.COMMITTED, LockEvent.PUBLISH): Lock.COMMITTED,
        (Lock.COMMITTED, LockEvent.DROP): Lock.EMPTY,
        (Lock.READING, LockEvent.WRITE): Lock.UPDATING_READ,
        (Lock.READING, LockEvent.READ): Lock.READING,
        (Lock.READING, LockEvent.READER_GONE): Lock.READING,
        (Lock.READING, LockEvent.LAST_READER_GONE): Lock.COMMITTED,
        (Lock.READING, LockEvent.PUBLISH): Lock.READING,
        (Lock.UPDATING, LockEvent.READ): Lock.UPDATING_READ,
        (Lock.UPDATING, LockEvent.COMMIT): Lock.READING,
        (Lock.UPDATING, LockEvent.WRITER_GONE): Lock.COMMITTED,
        (Lock.UPDATING_READ, LockEvent.READ): Lock.UPDATING_READ,
        (Lock.UPDATING_READ, LockEvent.READER_GONE): Lock.UPDATING_READ,
        (Lock.UPDATING_READ, LockEvent.LAST_READER_GONE): Lock.UPDATING,
        (Lock.UPDATING_READ, LockEvent.COMMIT): Lock.READING,
        (Lock.UPDATING_READ, LockEvent.WRITER_GONE): Lock.READING,
    },
)


class LockRequest(StrEnum):
    """What a client that attaches requests of a lock."""

    WRITE = "write"
    REPLACE = "replace"
    READ = "read"
    EITHER = "either"


class LockDecision(StrEnum):
    """The answer of a domain to a request."""

    WRITE = "write"
    READ = "read"
    WAIT = "wait"


LOCK_DECISIONS: dict[tuple[Lock, LockRequest], LockDecision] = {
    (Lock.EMPTY, LockRequest.WRITE): LockDecision.WRITE,
    (Lock.EMPTY, LockRequest.REPLACE): LockDecision.WRITE,
    (Lock.EMPTY, LockRequest.READ): LockDecision.WAIT,
    (Lock.EMPTY, LockRequest.EITHER): LockDecision.WRITE,
    (Lock.WRITING, LockRequest.WRITE): LockDecision.WAIT,
    (Lock.WRITING, LockRequest.REPLACE): LockDecision.WAIT,
    (Lock.WRITING, LockRequest.READ): LockDecision.WAIT,
    (Lock.WRITING, LockRequest.EITHER): LockDecision.WAIT,
    (Lock.COMMITTED, LockRequest.WRITE): LockDecision.WRITE,
    (Lock.COMMITTED, LockRequest.REPLACE): LockDecision.WRITE,
    (Lock.COMMITTED, LockRequest.READ): LockDecision.READ,
    (Lock.COMMITTED, LockRequest.EITHER): LockDecision.READ,
    (Lock.READING, LockRequest.WRITE): LockDecision.WRITE,
    (Lock.READING, LockRequest.REPLACE): LockDecision.WAIT,
    (Lock.READING, LockRequest.READ): LockDecision.READ,
    (Lock.READING, LockRequest.EITHER): LockDecision.READ,
    (Lock.UPDATING, LockRequest.WRITE): LockDecision.WAIT,
    (Lock.UPDATING, LockRequest.REPLACE): LockDecision.WAIT,
    (Lock.UPDATING, LockRequest.READ): LockDecision.READ,
    (Lock.UPDATING, LockRequest.EITHER): LockDecision.READ,
    (Lock.UPDATING_READ, LockRequest.WRITE): LockDecision.WAIT,
    (Lock.UPDATING_READ, LockRequest.REPLACE): LockDecision.WAIT,
    (Lock.UPDATING_READ, LockRequest.READ): LockDecision.READ,
    (Lock.UPDATING_READ, LockRequest.EITHER): LockDecision.READ,
}


def lock_request_of(lock: LockMode, *, replace: bool) -> LockRequest:
    """Return what an Attach requests."""
    match lock:
        case LockMode.RW:
            return LockRequest.REPLACE if replace else LockRequest.WRITE
        case LockMode.RO:
            return LockRequest.READ
        case LockMode.RW_OR_RO:
            return LockRequest.EITHER


def decide(lock: Lock, request: LockRequest, *, replacer_waits: bool) -> LockDecision:
    """Return the decision on a request. `replacer_waits`: a REPLACE is in the queue."""
    answer = LOCK_DECISIONS[lock, request]
    if answer is LockDecision.READ and lock is Lock.READING and replacer_waits:
        # Without this, steady readers would keep the writer out indefinitely.
        return LockDecision.WAIT
    return answer


class Use(StrEnum):
    """How a session uses its layout. SPENT: its layout waits hidden under a load token."""

    WRITING = "writing"
    READING = "reading"
    SPENT = "spent"


class Operation(StrEnum):
    """What a session asks for."""

    ALLOCATE = "allocate"
    EXPORT_RW = "export-rw"
    EXPORT_RO = "export-ro"
    FREE = "free"
    METADATA_PUT = "metadata-put"
    METADATA_GET = "metadata-get"
    LIST = "list"
    COMMIT = "commit"
    COMMIT_HIDDEN = "commit-hidden"


USES = TransitionTable[Use, Operation](
    "session",
    {
        (Use.WRITING, Operation.ALLOCATE): Use.WRITING,
        (Use.WRITING, Operation.EXPORT_RW): Use.WRITING,
        (Use.WRITING, Operation.EXPORT_RO): Use.WRITING,
        (Use.WRITING, Operation.FREE): Use.WRITING,
        (Use.WRITING, Operation.METADATA_PUT): Use.WRITING,
        (Use.WRITING, Operation.METADATA_GET): Use.WRITING,
        (Use.WRITING, Operation.LIST): Use.WRITING,
        (Use.WRITING, Operation.COMMIT): Use.READING,
        (Use.WRITING, Operation.COMMIT_HIDDEN): Use.SPENT,
        (Use.READING, Operation.EXPORT_RO): Use.READING,
        (Use.READING, Operation.METADATA_GET): Use.READING,
        (Use.READING, Operation.LIST): Use.READING,
    },
)
