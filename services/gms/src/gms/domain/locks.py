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


class Wish(StrEnum):
    """What a client that attaches wants to do."""

    WRITE = "write"
    REPLACE = "replace"
    READ = "read"
    EITHER = "either"


class Verdict(StrEnum):
    """What a domain answers to a wish."""

    WRITE = "write"
    READ = "read"
    WAIT = "wait"


VERDICTS: dict[tuple[Lock, Wish], Verdict] = {
    (Lock.EMPTY, Wish.WRITE): Verdict.WRITE,
    (Lock.EMPTY, Wish.REPLACE): Verdict.WRITE,
    (Lock.EMPTY, Wish.READ): Verdict.WAIT,
    (Lock.EMPTY, Wish.EITHER): Verdict.WRITE,
    (Lock.WRITING, Wish.WRITE): Verdict.WAIT,
    (Lock.WRITING, Wish.REPLACE): Verdict.WAIT,
    (Lock.WRITING, Wish.READ): Verdict.WAIT,
    (Lock.WRITING, Wish.EITHER): Verdict.WAIT,
    (Lock.COMMITTED, Wish.WRITE): Verdict.WRITE,
    (Lock.COMMITTED, Wish.REPLACE): Verdict.WRITE,
    (Lock.COMMITTED, Wish.READ): Verdict.READ,
    (Lock.COMMITTED, Wish.EITHER): Verdict.READ,
    (Lock.READING, Wish.WRITE): Verdict.WRITE,
    (Lock.READING, Wish.REPLACE): Verdict.WAIT,
    (Lock.READING, Wish.READ): Verdict.READ,
    (Lock.READING, Wish.EITHER): Verdict.READ,
    (Lock.UPDATING, Wish.WRITE): Verdict.WAIT,
    (Lock.UPDATING, Wish.REPLACE): Verdict.WAIT,
    (Lock.UPDATING, Wish.READ): Verdict.READ,
    (Lock.UPDATING, Wish.EITHER): Verdict.READ,
    (Lock.UPDATING_READ, Wish.WRITE): Verdict.WAIT,
    (Lock.UPDATING_READ, Wish.REPLACE): Verdict.WAIT,
    (Lock.UPDATING_READ, Wish.READ): Verdict.READ,
    (Lock.UPDATING_READ, Wish.EITHER): Verdict.READ,
}


def wish_of(lock: LockMode, *, replace: bool) -> Wish:
    """Name what an Attach wants."""
    match lock:
        case LockMode.RW:
            return Wish.REPLACE if replace else Wish.WRITE
        case LockMode.RO:
            return Wish.READ
        case LockMode.RW_OR_RO:
            return Wish.EITHER


def verdict(lock: Lock, wish: Wish, *, replacer_waits: bool) -> Verdict:
    """Decide whether a wish is granted now. `replacer_waits`: a REPLACE stands in the queue."""
    answer = VERDICTS[lock, wish]
    if answer is Verdict.READ and lock is Lock.READING and replacer_waits:
        # Without this a stream of readers would keep the writer out for ever.
        return Verdict.WAIT
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
