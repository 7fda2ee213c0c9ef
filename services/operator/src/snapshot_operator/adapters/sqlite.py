"""The object store of standalone mode: one SQLite file with the rules of the Kubernetes API.

WAL with synchronous=FULL: a write that returned survives a power loss. In memory it is the
simulated store, for there is no other. Several operators may work on one file: versions are given
by the file, every change is one transaction that reads what it changes, and a decision that is
older than what another operator wrote is refused.
"""

from __future__ import annotations

import contextlib
import sqlite3
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_operator.ports import Change, Listener
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import (
    AlreadyExists,
    Conflict,
    Internal,
    NoSpace,
    NotFound,
    StorageFailed,
    StoreBusy,
)
from snapshot_shared.objects import KINDS, AnyObject, ObjectMeta, kind_of

_SCHEMA = """
CREATE TABLE IF NOT EXISTS objects (
    kind TEXT NOT NULL,
    namespace TEXT NOT NULL,
    name TEXT NOT NULL,
    uid TEXT NOT NULL UNIQUE,
    body BLOB NOT NULL,
    PRIMARY KEY (kind, namespace, name)
) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS versions (one INTEGER PRIMARY KEY CHECK (one = 1), last INTEGER);
INSERT OR IGNORE INTO versions VALUES (1, 0);
"""

BUSY_S = 0.25
"""How long a write waits for another operator's, in seconds; it takes milliseconds."""

_DECODERS = {name: msgspec.json.Decoder(kind.type) for name, kind in KINDS.items()}


class SqliteCluster:
    """The `Cluster` port over SQLite. Calls are short and run in the event loop's thread."""

    def __init__(
        self,
        path: Path | None,
        *,
        timestamp: Callable[[], str],
        new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
        busy_s: float = BUSY_S,
    ) -> None:
        """Open or create the file; None keeps everything in memory.

        `timestamp` gives the time for creation and deletion, as Kubernetes writes it. A write
        that has waited `busy_s` seconds for another operator's is StoreBusy, and one that the disk
        has no room for is NoSpace. StorageFailed when the file cannot be used.
        """
        self._timestamp = timestamp
        self._new_uid = new_uid
        self._listeners: list[Listener] = []
        with _opening(path), _translated():
            self._db = sqlite3.connect(
                str(path) if path else ":memory:", isolation_level=None, timeout=busy_s
            )
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute("PRAGMA temp_store=MEMORY")
            self._db.executescript(_SCHEMA)
        self._seen = self._last()
        self._others = self._seen

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def subscribe(self, listener: Listener) -> None:
        """Have every change told after it is durable."""
        self._listeners.append(listener)

    def _last(self) -> int:
        return int(self._db.execute("SELECT last FROM versions").fetchone()[0])

    def as_of(self) -> int:
        """Give the version of the store now."""
        last = self._last()
        if last != self._seen:
            self._seen = self._others = last
        return last

    async def catch_up(self) -> None:
        """Do nothing: a file is always read as it is."""

    def others_since(self, as_of: int) -> bool:
        """Say whether another operator has written since that version."""
        self.as_of()
        return self._others > as_of

    async def get(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        """Read one object."""
        row = self._db.execute(
            "SELECT body FROM objects WHERE kind=? AND namespace=? AND name=?",
            (kind, namespace or "", name),
        ).fetchone()
        return _DECODERS[kind].decode(row[0]) if row else None

    async def by_uid(self, uid: str) -> AnyObject | None:
        """Read the object with this uid."""
        row = self._db.execute("SELECT kind, body FROM objects WHERE uid=?", (uid,)).fetchone()
        return _DECODERS[row[0]].decode(row[1]) if row else None

    async def list(
        self, kind: str, namespace: str | None = None, *, after: str = "", limit: int = 100_000
    ) -> list[AnyObject]:
        """Read the objects of a kind in the order of `namespace/name`, those after a key only."""
        rows = self._db.execute(
            "SELECT body FROM objects WHERE kind=? AND (? IS NULL OR namespace=?) "
            "AND namespace || '/' || name > ? ORDER BY namespace || '/' || name LIMIT ?",
            (kind, namespace, namespace, after, limit),
        ).fetchall()
        return [_DECODERS[kind].decode(row[0]) for row in rows]

    async def create(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        """Store a new object. AlreadyExists when the name is taken."""
        kind = kind_of(value)
        meta = value.metadata
        final = stored = _with_meta(
            value,
            replace(
                meta,
                uid=self._new_uid(),
                generation=1,
                creation_timestamp=self._timestamp(),
                deletion_timestamp=None,
            ),
        )

        def write(version: str) -> tuple[Change, AnyObject]:
            nonlocal final
            final = _with_version(stored, version)
            try:
                self._db.execute(
                    "INSERT INTO objects VALUES (?,?,?,?,?)",
                    (
                        kind.name,
                        meta.namespace or "",
                        meta.name,
                        final.metadata.uid,
                        _readable(final),
                    ),
                )
            except sqlite3.IntegrityError:
                raise AlreadyExists(
                    f"{kind.name} {meta.name} exists already", kind=kind.name, name=meta.name
                ) from None
            return "ADDED", final

        self._transact(write, as_of)
        return final

    async def update_status(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        """Replace the status of an object that has not changed since it was read."""
        final = value

        def write(version: str) -> tuple[Change, AnyObject]:
            nonlocal final
            found = self._current(value)
            final = _with_version(replace(found, status=value.status), version)
            return "MODIFIED", self._store(final)

        self._transact(write, as_of)
        return final

    async def update_spec(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        """Replace the spec of an object that has not changed since it was read."""
        final = value

        def write(version: str) -> tuple[Change, AnyObject]:
            nonlocal final
            found: Any = self._current(value)
            meta = replace(found.metadata, generation=found.metadata.generation + 1)
            final = _with_version(replace(found, spec=value.spec, metadata=meta), version)
            return "MODIFIED", self._store(final)

        self._transact(write, as_of)
        return final

    async def delete(self, value: AnyObject, *, as_of: int | None = None) -> bool:
        """Mark for deletion; without finalizers the object is gone at once."""
        stamp = self._timestamp()

        def write(version: str) -> tuple[Change, AnyObject] | None:
            found = self._found(value)
            if found is None:
                return None
            if not found.metadata.finalizers:
                return self._remove(found)
            if found.metadata.deletion_timestamp is not None:
                return None
            stamped = _with_meta(found, replace(found.metadata, deletion_timestamp=stamp))
            return "MODIFIED", self._store(_with_version(stamped, version))

        self._transact(write, as_of)
        return self._found(value) is None

    async def remove_finalizer(
        self, value: AnyObject, finalizer: str, *, as_of: int | None = None
    ) -> None:
        """Take one finalizer off; a deleted object without finalizers is gone."""

        def write(version: str) -> tuple[Change, AnyObject]:
            found = self._current(value)
            left = [name for name in found.metadata.finalizers if name != finalizer]
            changed = _with_meta(found, replace(found.metadata, finalizers=left))
            if changed.metadata.deletion_timestamp and not left:
                return self._remove(changed)
            return "MODIFIED", self._store(_with_version(changed, version))

        self._transact(write, as_of)

    def _found(self, value: AnyObject) -> AnyObject | None:
        """Read what is stored under a uid now."""
        row = self._db.execute(
            "SELECT body FROM objects WHERE uid=?", (value.metadata.uid,)
        ).fetchone()
        return _DECODERS[kind_of(value).name].decode(row[0]) if row else None

    def _current(self, value: AnyObject) -> AnyObject:
        """Read what is stored now. NotFound or Conflict unless it is what the caller read."""
        kind, meta = kind_of(value), value.metadata
        found = self._found(value)
        if found is None:
            raise NotFound(f"{kind.name} {meta.name} is gone", kind=kind.name, name=meta.name)
        if found.metadata.resource_version != meta.resource_version:
            raise Conflict(
                f"{kind.name} {meta.name} changed since it was read",
                expected=meta.resource_version,
                found=found.metadata.resource_version,
            )
        return found

    def _store(self, value: AnyObject) -> AnyObject:
        self._db.execute(
            "UPDATE objects SET body=? WHERE uid=?", (_readable(value), value.metadata.uid)
        )
        return value

    def _remove(self, value: AnyObject) -> tuple[Change, AnyObject]:
        self._db.execute("DELETE FROM objects WHERE uid=?", (value.metadata.uid,))
        return "DELETED", value

    def _transact(
        self, write: Callable[[str], tuple[Change, AnyObject] | None], as_of: int | None
    ) -> None:
        """Change one object in one transaction, then tell. Nothing is written for None.

        Conflict when another operator wrote since `as_of`.
        """
        with _translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                version = self.as_of() + 1
                if as_of is not None and self._others > as_of:
                    raise Conflict("another operator wrote since this was decided", as_of=as_of)
                self._db.execute("UPDATE versions SET last = ?", (version,))
                done = write(str(version))
                self._db.execute("COMMIT" if done else "ROLLBACK")
            except BaseException:
                # SQLite has done it already when the disk is full.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        if done:
            self._seen = version
            for listener in self._listeners:
                listener(*done)


@contextlib.contextmanager
def _opening(path: Path | None) -> Iterator[None]:
    """Say what is wrong with a file that cannot be opened as a store."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise StorageFailed(
            f"the object store {path} cannot be opened: {error}",
            next_step="check the file and its rights; restore a damaged one from a copy of it",
            path=str(path),
        ) from error


@contextlib.contextmanager
def _translated() -> Iterator[None]:
    """Give the errors of SQLite that are not our defects their names."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # The low byte is the kind; the rest tells more of it.
        match error.sqlite_errorcode & 0xFF:
            case sqlite3.SQLITE_BUSY:
                raise StoreBusy(
                    "another operator is writing, or was stopped while it wrote"
                ) from error
            case sqlite3.SQLITE_FULL:
                raise NoSpace(
                    "no space left for the object store",
                    next_step="free space where the operator keeps its state",
                ) from error
            case _:
                raise


def _readable(value: AnyObject) -> bytes:
    """Encode what can be read again; anything else would close the store for ever."""
    body = encode_json(value)
    try:
        _DECODERS[kind_of(value).name].decode(body)
    except msgspec.ValidationError as error:
        raise Internal(f"{kind_of(value).name} {value.metadata.name}: {error}") from error
    return body


def _with_meta(value: AnyObject, meta: ObjectMeta) -> AnyObject:
    changed: Any = replace(value, metadata=meta)
    return changed  # type: ignore[no-any-return]


def _with_version(value: AnyObject, version: str) -> AnyObject:
    return _with_meta(value, replace(value.metadata, resource_version=version))
