"""The object store of standalone mode: one SQLite file with the rules of the Kubernetes API.

WAL with synchronous=FULL: a write that returned survives a power loss. In memory it is the
simulated store, for there is no other. Every change is one transaction that reads what it changes.
"""

from __future__ import annotations

import contextlib
import sqlite3
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.meta import ObjectMeta
from snapshot_operator.ports import Document, Event
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
from snapshot_shared.reserve import Reserve

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

_READ = "SELECT body FROM objects WHERE kind=? AND namespace=? AND name=?"

RESERVE_BYTES = 8 * 1024 * 1024
"""A transaction of SQLite writes whole pages, and its log beside them."""

BUSY_S = 0.25
"""How long a write waits for another process that has the file, in seconds."""

_DECODERS = {name: msgspec.json.Decoder(kind.type) for name, kind in KINDS.items()}


class SqliteStore:
    """The `Store` port over SQLite. Calls are short and run in the event loop's thread."""

    def __init__(
        self,
        path: Path | None,
        *,
        timestamp: Callable[[], str],
        new_uid: Callable[[], str] = lambda: str(uuid.uuid4()),
        busy_s: float = BUSY_S,
    ) -> None:
        """Use a file, or memory where there is none; `open` comes before everything else.

        `timestamp` returns the time for creation and deletion, as Kubernetes writes it. A write
        that has waited `busy_s` seconds for another process is StoreBusy, and one that the disk
        has no room for is NoSpace. What leads to the end of an object uses a reserve then.
        """
        self._path = path
        self._reserve = (
            Reserve(path.with_name("reserve"), RESERVE_BYTES) if path is not None else None
        )
        self._timestamp = timestamp
        self._new_uid = new_uid
        self._busy_s = busy_s
        self._listeners: list[Callable[[Event], None]] = []
        self._opened: sqlite3.Connection | None = None

    def open(self) -> SqliteStore:
        """Open the file, or create it. StorageFailed when it cannot be used."""
        with _opening(self._path), _translated():
            self._opened = sqlite3.connect(
                str(self._path) if self._path else ":memory:",
                isolation_level=None,
                timeout=self._busy_s,
            )
            self._opened.execute("PRAGMA journal_mode=WAL")
            self._opened.execute("PRAGMA synchronous=FULL")
            self._opened.execute("PRAGMA temp_store=MEMORY")
            self._opened.executescript(_SCHEMA)
        if self._reserve is not None:
            self._reserve.keep()
        return self

    @property
    def _db(self) -> sqlite3.Connection:
        if self._opened is None:
            raise Internal("the object store is not open")
        return self._opened

    def close(self) -> None:
        """Close the file, if it is open."""
        if self._opened is not None:
            self._opened.close()
            self._opened = None

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Report every change after it is durable."""
        self._listeners.append(listener)

    async def list(self, kind: str) -> list[AnyObject]:
        """Return all objects of a kind, in the order of their keys."""
        rows = self._rows("SELECT body FROM objects WHERE kind=? ORDER BY namespace, name", kind)
        return [_DECODERS[kind].decode(row[0]) for row in rows]

    async def read(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        """Return an object."""
        rows = self._rows(_READ, kind, namespace or "", name)
        return _DECODERS[kind].decode(rows[0][0]) if rows else None

    async def find(self, uid: str) -> AnyObject | None:
        """Return the object with a uid."""
        rows = self._rows("SELECT kind, body FROM objects WHERE uid=?", uid)
        return _DECODERS[rows[0][0]].decode(rows[0][1]) if rows else None

    async def spec_of(self, pod: Pod) -> dict[str, Any] | None:
        """Return the spec of a pod as it is stored; None if the pod is gone."""
        found = self._found(pod)
        return None if found is None else msgspec.to_builtins(found.spec)

    async def read_document(self, named: Document) -> Document | None:
        """Return the object of the kind and name of a document; None if there is none."""
        meta = named["metadata"]
        rows = self._rows(_READ, named["kind"], meta.get("namespace") or "", meta["name"])
        return msgspec.json.decode(rows[0][0]) if rows else None

    async def create_document(self, document: Document) -> AnyObject:
        """Store a new object. AlreadyExists when the name is taken."""
        return await self.create(msgspec.convert(document, KINDS[document["kind"]].type))

    def _rows(self, sql: str, *values: str) -> Sequence[Any]:
        """Return what a query finds. StorageFailed when the file is damaged."""
        with _translated():
            return self._db.execute(sql, values).fetchall()

    async def create(self, value: AnyObject) -> AnyObject:
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

        def write(version: str) -> Event:
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
            return Event("ADDED", final)

        self._transact(write)
        return final

    async def update_status(self, value: AnyObject) -> AnyObject:
        """Replace the status of an object that has not changed since it was read."""
        final = value

        def write(version: str) -> Event:
            nonlocal final
            found = self._current(value)
            final = _with_version(replace(found, status=value.status), version)
            return Event("MODIFIED", self._store(final))

        self._transact(write, is_end=value.metadata.deletion_timestamp is not None)
        return final

    async def update_spec(self, value: AnyObject) -> AnyObject:
        """Replace the spec of an object that has not changed since it was read."""
        final = value

        def write(version: str) -> Event:
            nonlocal final
            found: Any = self._current(value)
            meta = replace(found.metadata, generation=found.metadata.generation + 1)
            final = _with_version(replace(found, spec=value.spec, metadata=meta), version)
            return Event("MODIFIED", self._store(final))

        self._transact(write)
        return final

    async def annotate(self, value: AnyObject, key: str, text: str) -> AnyObject:
        """Set an annotation of an object that has not changed since it was read."""
        return self._set_meta(
            value, lambda meta: replace(meta, annotations={**meta.annotations, key: text})
        )

    async def label(self, value: AnyObject, key: str, text: str | None) -> AnyObject:
        """Set or remove a label of an object that has not changed since it was read."""

        def labelled(meta: ObjectMeta) -> ObjectMeta:
            others = {name: kept for name, kept in meta.labels.items() if name != key}
            return replace(meta, labels=others if text is None else {**others, key: text})

        return self._set_meta(value, labelled)

    async def add_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject:
        """Put a finalizer on an object that has not changed since it was read."""

        def added(meta: ObjectMeta) -> ObjectMeta:
            if meta.deletion_timestamp is not None:
                raise Conflict(f"{meta.name} is being deleted")
            return replace(meta, finalizers=[*meta.finalizers, finalizer])

        return self._set_meta(value, added)

    def _set_meta(self, value: AnyObject, change: Callable[[ObjectMeta], ObjectMeta]) -> AnyObject:
        final = value

        def write(version: str) -> Event:
            nonlocal final
            found = self._current(value)
            final = _with_version(_with_meta(found, change(found.metadata)), version)
            return Event("MODIFIED", self._store(final))

        self._transact(write)
        return final

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject | None:
        """Take a finalizer off; a deleted object without finalizers is gone."""

        def write(version: str) -> Event:
            found = self._current(value)
            left = [name for name in found.metadata.finalizers if name != finalizer]
            changed = _with_meta(found, replace(found.metadata, finalizers=left))
            if changed.metadata.deletion_timestamp and not left:
                return self._remove(changed)
            return Event("MODIFIED", self._store(_with_version(changed, version)))

        self._transact(write, is_end=True)
        return self._found(value)

    async def delete(self, value: AnyObject) -> AnyObject | None:
        """Mark for deletion; without finalizers the object is gone at once."""
        stamp = self._timestamp()

        def write(version: str) -> Event | None:
            found = self._found(value)
            if found is None:
                return None
            if not found.metadata.finalizers:
                return self._remove(found)
            if found.metadata.deletion_timestamp is not None:
                return None
            stamped = _with_meta(found, replace(found.metadata, deletion_timestamp=stamp))
            return Event("MODIFIED", self._store(_with_version(stamped, version)))

        self._transact(write, is_end=True)
        return self._found(value)

    def _found(self, value: AnyObject) -> AnyObject | None:
        """Read what is stored under a uid now."""
        rows = self._rows("SELECT body FROM objects WHERE uid=?", value.metadata.uid)
        return _DECODERS[kind_of(value).name].decode(rows[0][0]) if rows else None

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

    def _remove(self, value: AnyObject) -> Event:
        self._db.execute("DELETE FROM objects WHERE uid=?", (value.metadata.uid,))
        return Event("DELETED", value)

    def _transact(self, write: Callable[[str], Event | None], *, is_end: bool = False) -> None:
        """Change one object in one transaction, then report it. Nothing is written for None.

        A change that leads to the end of an object may use the reserve.
        """
        try:
            done = self._committed(write)
        except NoSpace:
            if not (is_end and self._reserve is not None and self._reserve.give_up()):
                raise
            done = self._committed(write)
        if done:
            if done.change == "DELETED" and self._reserve is not None:
                self._reserve.keep()
            for listener in self._listeners:
                listener(done)

    def _committed(self, write: Callable[[str], Event | None]) -> Event | None:
        with _translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                last = self._db.execute("SELECT last FROM versions").fetchone()[0]
                version = int(last) + 1
                self._db.execute("UPDATE versions SET last = ?", (version,))
                done = write(str(version))
                self._db.execute("COMMIT" if done else "ROLLBACK")
            except BaseException:
                # SQLite has done it already when the disk is full.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        return done


@contextlib.contextmanager
def _opening(path: Path | None) -> Iterator[None]:
    """Return what is wrong with a file that cannot be opened as a store."""
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
    """Raise the errors of SQLite that are no defects of ours as errors of our own."""
    try:
        yield
    except sqlite3.OperationalError as error:
        # The low byte is the kind; the rest is the extended code.
        match error.sqlite_errorcode & 0xFF:
            case sqlite3.SQLITE_BUSY:
                raise StoreBusy("another process has the object store open and writes") from error
            case sqlite3.SQLITE_FULL:
                raise NoSpace(
                    "no space left for the object store",
                    next_step="free space where the operator keeps its state",
                ) from error
            case _:
                raise
    except sqlite3.DatabaseError as error:
        # A file is opened without a look at most of its pages.
        if getattr(error, "sqlite_errorcode", 0) & 0xFF != sqlite3.SQLITE_CORRUPT:
            raise
        raise StorageFailed(
            f"the object store is damaged: {error}",
            next_step="end the operator and restore the file from a copy; or move it aside, start "
            "again, and import artifacts: docs/how-to/keep-and-import.md",
        ) from error


def _readable(value: AnyObject) -> bytes:
    """Encode what can be read again; anything else would make the store unreadable."""
    try:
        body = encode_json(value)
        _DECODERS[kind_of(value).name].decode(body)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Internal(f"{kind_of(value).name} {value.metadata.name}: {error}") from error
    return body


def _with_meta(value: AnyObject, meta: ObjectMeta) -> AnyObject:
    changed: Any = replace(value, metadata=meta)
    return changed  # type: ignore[no-any-return]


def _with_version(value: AnyObject, version: str) -> AnyObject:
    return _with_meta(value, replace(value.metadata, resource_version=version))
