"""The object store of standalone mode: one SQLite file with the rules of the Kubernetes API.

WAL with synchronous=FULL: a write that returned survives a power loss. In memory it is the
simulated store, for there is no other.
"""

from __future__ import annotations

import sqlite3
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_operator.ports import Change, Listener
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import AlreadyExists, Conflict, Internal, NotFound
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

_DECODERS = {name: msgspec.json.Decoder(kind.type) for name, kind in KINDS.items()}


class SqliteCluster:
    """The `Cluster` port over SQLite. Calls are short and run in the event loop's thread."""

    def __init__(
        self,
        path: Path | None,
        *,
        timestamp: Callable[[], str],
        new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
    ) -> None:
        """Open or create the file; None keeps everything in memory.

        `timestamp` gives the time for creation and deletion, as Kubernetes writes it.
        """
        self._timestamp = timestamp
        self._new_uid = new_uid
        self._listeners: list[Listener] = []
        self._db = sqlite3.connect(str(path) if path else ":memory:", isolation_level=None)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE" if path else "PRAGMA temp_store=MEMORY")
        self._db.executescript(_SCHEMA)

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def subscribe(self, listener: Listener) -> None:
        """Have every change told after it is durable."""
        self._listeners.append(listener)

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

    async def create(self, value: AnyObject) -> AnyObject:
        """Store a new object. AlreadyExists when the name is taken."""
        kind = kind_of(value)
        meta = value.metadata
        stored = _with_meta(
            value,
            replace(
                meta,
                uid=self._new_uid(),
                generation=1,
                creation_timestamp=self._timestamp(),
                deletion_timestamp=None,
            ),
        )

        def write(version: str) -> AnyObject:
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
            return final

        return self._transact("ADDED", write)

    async def update_status(self, value: AnyObject) -> AnyObject:
        """Replace the status of an object that has not changed since it was read."""

        def write(version: str) -> AnyObject:
            found = self._current(value)
            final = _with_version(replace(found, status=value.status), version)
            self._store(final)
            return final

        return self._transact("MODIFIED", write)

    async def delete(self, value: AnyObject) -> bool:
        """Mark for deletion; without finalizers the object is gone at once."""
        found = await self.get(kind_of(value).name, value.metadata.namespace, value.metadata.name)
        if found is None or found.metadata.uid != value.metadata.uid:
            return True
        if not found.metadata.finalizers:
            self._remove(found)
            return True
        if found.metadata.deletion_timestamp is None:
            stamped = _with_meta(
                found, replace(found.metadata, deletion_timestamp=self._timestamp())
            )
            self._transact("MODIFIED", lambda version: self._store(_with_version(stamped, version)))
        return False

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> None:
        """Take one finalizer off; a deleted object without finalizers is gone."""
        found = self._current(value)
        left = [name for name in found.metadata.finalizers if name != finalizer]
        changed = _with_meta(found, replace(found.metadata, finalizers=left))
        if changed.metadata.deletion_timestamp and not left:
            self._remove(changed)
        else:
            self._transact("MODIFIED", lambda version: self._store(_with_version(changed, version)))

    def _current(self, value: AnyObject) -> AnyObject:
        """Read what is stored now. NotFound or Conflict unless it is what the caller read."""
        kind, meta = kind_of(value), value.metadata
        row = self._db.execute("SELECT body FROM objects WHERE uid=?", (meta.uid,)).fetchone()
        if row is None:
            raise NotFound(f"{kind.name} {meta.name} is gone", kind=kind.name, name=meta.name)
        found: AnyObject = _DECODERS[kind.name].decode(row[0])
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

    def _remove(self, value: AnyObject) -> None:
        def write(_version: str) -> AnyObject:
            self._db.execute("DELETE FROM objects WHERE uid=?", (value.metadata.uid,))
            return value

        self._transact("DELETED", write)

    def _transact(self, change: Change, write: Callable[[str], AnyObject]) -> AnyObject:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            self._db.execute("UPDATE versions SET last = last + 1")
            version = self._db.execute("SELECT last FROM versions").fetchone()[0]
            stored = write(str(version))
            self._db.execute("COMMIT")
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        for listener in self._listeners:
            listener(change, stored)
        return stored


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
