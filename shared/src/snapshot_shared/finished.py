"""The finished orders of a service, in a file of SQLite instead of in memory.

A journal is read whole at every start and its fold is in memory, which suits the orders that are
under way. A finished order is needed only to answer a repeat of it, so the journal moves it
here when it is compacted: first it is committed here, then the journal is written without it. A
crash between the two leaves it in both, and the journal counts.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

from snapshot_shared.errors import NoSpace, StorageFailed
from snapshot_shared.files import create_file, open_root, opened

_SCHEMA = """
CREATE TABLE IF NOT EXISTS orders (
    id TEXT PRIMARY KEY, owner TEXT NOT NULL, accepted_at REAL NOT NULL, records BLOB NOT NULL
);
CREATE INDEX IF NOT EXISTS by_owner ON orders (owner);
CREATE INDEX IF NOT EXISTS by_age ON orders (accepted_at);
"""


class Row(NamedTuple):
    """A finished order. `accepted_at` is in seconds since the epoch."""

    id: str
    owner: str
    accepted_at: float
    records: bytes


class FinishedOrders:
    """The file `finished.sqlite` of a journal's folder. It is created by the first `put`.

    `find` runs in the event loop and the others in threads. `find` has a connection of its own, so
    that the loop waits for neither the disk of a writer nor a long list.
    """

    def __init__(self, folder: Path) -> None:
        """Open the file if it exists. StorageFailed."""
        self._folder = folder
        self._path = folder / "finished.sqlite"
        self._reader: sqlite3.Connection | None = None
        with contextlib.suppress(FileNotFoundError):
            os.close(os.open(self._path, os.O_RDONLY | os.O_CLOEXEC))
            self._reader = self._connected()

    def _created(self) -> sqlite3.Connection:
        """Create the file, with a name that a power loss does not take, and open it."""
        with opened(open_root(self._folder)) as directory:
            os.close(create_file(directory, self._path.name))
            os.fsync(directory)
        return self._connected()

    def _connected(self) -> sqlite3.Connection:
        with self._translated():
            connection = sqlite3.connect(self._path, isolation_level=None, check_same_thread=False)
            connection.execute("PRAGMA journal_mode=WAL")
            connection.execute("PRAGMA synchronous=FULL")
            connection.executescript(_SCHEMA)
            return connection

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        """Raise the errors of SQLite as NoSpace or StorageFailed."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            code = getattr(error, "sqlite_errorcode", 0) & 0xFF
            if code == sqlite3.SQLITE_FULL:
                raise NoSpace(f"no space left for {self._path}") from error
            raise StorageFailed(
                f"{self._path} cannot be used: {error}",
                next_step="end the service, move the file aside and start it again; a repeat of "
                "an order in it is then carried out as a new order",
                errno=errno.EIO,
            ) from error

    def find(self, order: str) -> bytes | None:
        """Return the records of an order, or None if it is not here. StorageFailed."""
        if self._reader is None:
            return None
        with self._translated():
            sql = "SELECT records FROM orders WHERE id = ?"
            row = self._reader.execute(sql, (order,)).fetchone()
        return row[0] if row else None

    def of_verb(self, verb: str) -> list[bytes]:
        """Return the records of each order with a verb. StorageFailed."""
        if self._reader is None:
            return []
        # The names of orders begin with the verb and "-", and "." is the next character in ASCII.
        sql = "SELECT records FROM orders WHERE id > ? AND id < ?"
        with self._translated(), contextlib.closing(self._connected()) as reader:
            return [row[0] for row in reader.execute(sql, (f"{verb}-", f"{verb}."))]

    def put(self, rows: Iterable[Row], *, older_than: float) -> set[str]:
        """Add or replace orders, drop what was accepted before a time, return the owners left.

        One transaction, on the disk when this returns. NoSpace and StorageFailed: nothing changed.
        """
        rows = list(rows)
        if self._reader is None:
            if not rows:
                return set()
            self._reader = self._created()
        with self._translated(), contextlib.closing(self._connected()) as writer:
            writer.execute("BEGIN IMMEDIATE")
            try:
                writer.executemany("INSERT OR REPLACE INTO orders VALUES (?, ?, ?, ?)", rows)
                writer.execute("DELETE FROM orders WHERE accepted_at < ?", (older_than,))
                owners = {row[0] for row in writer.execute("SELECT DISTINCT owner FROM orders")}
                writer.execute("COMMIT")
            except BaseException:
                if writer.in_transaction:
                    writer.execute("ROLLBACK")
                raise
            return owners

    def close(self) -> None:
        """Close the file. Whatever is asked after it is StorageFailed."""
        if self._reader is not None:
            self._reader.close()
