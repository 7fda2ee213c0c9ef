"""The folder of a part while a save writes it, and the notes by which a killed save goes on.

The notes are a file beside the shards, removed when the part is whole. Their writer holds a lock
on them, so that two processes never write one part. Files that no note names were cut off
before any of their bytes could be relied upon, and are removed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from msgspec import UNSET

from gms.domain.resume import ChunksNote, KeyNote, SaveNote, Written, note_of, read_notes
from gms.domain.task_rules import path_of
from gms.domain.tasks import SaveTask
from snapshot_shared.artifact import PART_MANIFEST, Encryption
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import ArtifactExists, ArtifactMissing, SnapbackError
from snapshot_shared.files import (
    create_file,
    make_dir,
    names_in,
    open_dir,
    open_regular,
    opened,
    read_all,
    remove_tree,
    secure,
    write_all,
)
from snapshot_shared.object_storage import MARK as OBJECTS_MARK
from snapshot_shared.object_storage import ObjectStorage
from snapshot_shared.stripes import MARK as STRIPES_MARK
from snapshot_shared.stripes import StripeRoots, remove_stored

NOTES = ".notes"
"""No file of a part can have this name."""


class Staging:
    """A part that is being written. It is the `ChunkNotes` of the backend that writes it."""

    def __init__(
        self, folders: Mapping[str, int], notes: int, save: SaveNote, *, every_bytes: int
    ) -> None:
        """Resume an equal save that has notes here; else remove its files and start again.

        `folders` are those of the part by the names of stripe roots; `""` is in the artifact root.
        """
        self.folders = folders
        self.directory = folders[""]
        self.every_bytes = every_bytes
        self._notes = notes
        self._lock = threading.Lock()
        self._is_secure = False
        found = read_notes(read_all(notes), save)
        self._written, self._tags, self.encryption = found.written, found.tags, found.encryption
        self._tidy()
        os.ftruncate(notes, found.length)
        os.lseek(notes, 0, os.SEEK_END)
        if not found.length:
            self._append(save)

    def written(self, name: str) -> Mapping[int, str]:
        return self._written.get(name, {})

    def tags(self, name: str) -> Mapping[int, bytes]:
        return self._tags.get(name, {})

    def note_key(self, encryption: Encryption) -> None:
        """Note the key of all that will be noted."""
        self.encryption = encryption
        self._append(KeyNote(encryption=encryption))

    def note(self, chunks: Sequence[tuple[str, int, str]], tags: Sequence[bytes] = ()) -> None:
        with self._lock:
            self._append(ChunksNote(chunks=list(chunks), tags=list(tags) or UNSET))
            secure(self._notes, NOTES)
            if not self._is_secure:
                # The names of the files that are there by now, too. Another one, which a crash of
                # the machine may take away, is then written again.
                secure(self.directory, NOTES)
                self.secure_stripes()
                self._is_secure = True

    def secure_stripes(self) -> None:
        """Make the names of all files in stripe roots durable."""
        for stripe, folder in self.folders.items():
            if stripe:
                secure(folder, NOTES)

    def allocated(self, stripe: str) -> int:
        """Return the bytes on disk of files in one folder that are resumed."""
        folder = self.folders[stripe]
        names = self._written.keys() & set(names_in(folder))
        return sum(_stat(folder, name).st_blocks * 512 for name in names)

    def finish(self) -> None:
        """Remove the notes: the part has its manifest."""
        drop_notes(self.directory)

    def _append(self, note: msgspec.Struct) -> None:
        write_all(self._notes, encode_json(note) + b"\n")

    def _tidy(self) -> None:
        kept: Written = {}
        for folder in self.folders.values():
            for name in names_in(folder):
                found = _stat(folder, name)
                # A file with another name belongs to another artifact, too, and is not written to.
                is_ours = stat.S_ISREG(found.st_mode) and found.st_nlink == 1
                if name in self._written and is_ours:
                    kept[name] = self._written[name]
                elif stat.S_ISDIR(found.st_mode):
                    remove_tree(folder, name)
                elif name not in (NOTES, OBJECTS_MARK, STRIPES_MARK):
                    os.unlink(name, dir_fd=folder)
        self._written = kept


@contextlib.contextmanager
def staged(
    root: int,
    task: SaveTask,
    *,
    stripes: Iterable[str] = (),
) -> Iterator[Staging]:
    """Open the directory of a part to write it. ArtifactExists when it is of another save.

    Its files may be in `stripes` as well. What fails leaves none, and its bytes do not fill the
    disk; objects and files in stripe roots go first. A process that is killed leaves it without
    manifest, which makes it no part.
    """
    path, roots = path_of(task), StripeRoots(task.stripe_roots)
    with (
        opened(make_dir(root, path)) as directory,
        opened(_locked(directory, "/".join(path))) as notes,
    ):
        try:
            with roots.writing(root, directory, path, stripes) as folders:
                yield Staging(folders, notes, note_of(task), every_bytes=task.note_bytes)
        except BaseException:
            with (
                contextlib.suppress(OSError, SnapbackError),
                opened(open_dir(root, path[:-1])) as parent,
            ):
                remove_stored(parent, path, lambda: ObjectStorage(task.object_storage), roots)
            raise


def drop_notes(directory: int) -> None:
    """Remove the notes of a part that is whole, durably."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(NOTES, dir_fd=directory)
    secure(directory, NOTES)


def _stat(folder: int, name: str) -> os.stat_result:
    return os.stat(name, dir_fd=folder, follow_symlinks=False)


def _locked(directory: int, path: str) -> int:
    """Open the notes and take their lock, which the end of this process frees."""
    names = names_in(directory)
    if PART_MANIFEST in names or (names and NOTES not in names):
        raise ArtifactExists(f"{path} exists already, and is no save that was cut off", path=path)
    try:
        notes = open_regular(directory, NOTES, writable=True)
    except ArtifactMissing:
        notes = create_file(directory, NOTES)
    try:
        fcntl.flock(notes, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The earlier holder may have finished the part meanwhile, and removed its notes.
        is_free = os.fstat(notes).st_nlink == 1
    except BlockingIOError:
        is_free = False
    if not is_free:
        os.close(notes)
        raise ArtifactExists(f"{path} is being written by another process", path=path)
    return notes
