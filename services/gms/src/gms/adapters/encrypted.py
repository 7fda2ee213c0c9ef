"""GPU memory that is encrypted on its way to its files: any backend, between it and its buffers.

A file of a part passes through a buffer of ours, encrypted, and the backend moves that as it would
move memory: digests, holes, direct requests and notes are of what is on the disk. `Ciphers` holds
the keys of the part that is moved, and the nonces and tags of its chunks.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import msgspec

from gms.adapters.buffers import buffer_pages, digest_in_memory, digest_of, pieces_of
from gms.adapters.parallel import results_of, share
from gms.adapters.staging import Staging
from gms.domain.tasks import LoadTask, SaveTask
from gms.domain.transfer import (
    ENCRYPTED_SHARD_BYTES,
    PADDING,
    ChunkPlan,
    FilePlan,
    in_one,
    runs_of,
    shard_name,
)
from gms.ports import (
    Advance,
    Buffers,
    ChunkNotes,
    CopyingBackend,
    Moved,
    ResumableBackend,
    TransferBackend,
)
from snapshot_shared.artifact import Encryption, FileEncryption, FileEntry, PartManifest
from snapshot_shared.encrypting import NONCE_BYTES, ChunkCipher, PartCipher
from snapshot_shared.errors import ArtifactCorrupt, KeyUnavailable
from snapshot_shared.keys import ArtifactKeys
from snapshot_shared.object_storage import zeros_digest

_NEVER = 2**62


class _Older(NamedTuple):
    """A file that an older part has: how the part and its chunks are encrypted."""

    part: PartCipher
    entry: FileEntry
    cipher: ChunkCipher

    @property
    def tags(self) -> Sequence[bytes]:
        return self.entry.encryption.tags if self.entry.encryption else ()


class Ciphers:
    """The keys of a part that is saved or loaded, and what is known of its chunks."""

    def __init__(self, keys: ArtifactKeys, task: SaveTask | LoadTask) -> None:
        """Use the keys of this node for the part of a task. Nothing is asked of a KMS yet."""
        self._keys = keys
        self._place = (task.namespace, task.content_uid, task.generation)
        self._part = task.part
        self._cipher: PartCipher | None = None
        self._older: dict[str, _Older] = {}
        self._tags: dict[str, list[bytes]] = {}

    # A save.

    def begin(self, staging: Staging) -> Encryption:
        """Make and note the key of the part, or take up that of a killed save which goes on.

        Return what the manifest says of it. KeyUnavailable.
        """
        if (noted := staging.encryption) is not None:
            self._cipher = asyncio.run(self._keys.cipher_at(self._place, self._part, noted))
        else:
            self._cipher = asyncio.run(self._keys.new_cipher(self._place, self._part))
            staging.note_key(self.cipher.encryption)
        return self.cipher.encryption

    def follow(self, older: PartManifest) -> bool:
        """Have files of an older part shared. False where this node lacks the key of that part."""
        with contextlib.suppress(KeyUnavailable, ArtifactCorrupt):
            part = asyncio.run(self._keys.cipher_of(older))
            if part is not None:
                self._older = {
                    entry.name: _Older(part, entry, part.chunks_in(entry)) for entry in older.files
                }
        return bool(self._older)

    def older_digest(self, chunk: ChunkPlan, buffers: Buffers) -> str:
        """Return the digest that a chunk would have in the older part; none when it has no place.

        What is encrypted here is compared and dropped, for its nonce is that of the older chunk.
        """
        found = self._older.get(shard_name(chunk.file))
        if found is None or chunk.index >= len(found.tags):
            return ""
        if (digest := _zeros_in(chunk, buffers)) is not None:
            return digest
        pages = memoryview(bytearray(chunk.size))
        pieces = pieces_of(chunk, buffers)
        nonce = found.tags[chunk.index][:NONCE_BYTES]
        found.cipher.encrypt(chunk.index, pieces, pages, nonce)
        return digest_of([pages], chunk.size)

    def older(self, plan: FilePlan) -> _Older | None:
        """Return the file of the older part that has the same name, length and chunks."""
        found = self._older.get(plan.name)
        if found is None:
            return None
        is_same = (found.entry.size, found.entry.chunk_bytes) == (plan.size, plan.chunk_bytes)
        return found if is_same else None

    def wrote(self, name: str, tags: Sequence[bytes]) -> None:
        """Remember the nonces and tags of a file that is written. From any thread."""
        self._tags[name] = list(tags)

    def finished(self, entry: FileEntry) -> FileEntry:
        """Return what the manifest says of a file that was written or is shared."""
        tags = self._tags.get(entry.name)
        if tags is not None:
            return msgspec.structs.replace(entry, encryption=FileEncryption(tags))
        older = self._older[entry.name]
        return self.cipher.shared_from(older.part, older.entry, os.urandom(NONCE_BYTES))

    # A load.

    def open(self, manifest: PartManifest) -> None:
        """Find the key of the part that is loaded. KeyUnavailable names it."""
        self._cipher = asyncio.run(self._keys.cipher_of(manifest))

    @property
    def cipher(self) -> PartCipher:
        """The cipher of the part."""
        assert self._cipher is not None  # noqa: S101 - a save has begun, a load is open
        return self._cipher


def ciphers_for_save(task: SaveTask) -> Ciphers | None:
    """Return the keys by which a part is to be encrypted; None where it is not."""
    if not task.encrypt:
        return None
    keys = _keys_of(task)
    keys.require_encryption("SNAPBACK_ENCRYPT_MEMORY")
    return Ciphers(keys, task)


def ciphers_for_load(task: LoadTask, manifest: PartManifest) -> Ciphers | None:
    """Return the keys of a part that is encrypted; None where it is not. KeyUnavailable."""
    if not manifest.encryption:
        return None
    ciphers = Ciphers(_keys_of(task), task)
    ciphers.open(manifest)
    return ciphers


def _keys_of(task: SaveTask | LoadTask) -> ArtifactKeys:
    folder = Path(task.artifact_keys) if task.artifact_keys else None
    return ArtifactKeys(folder, task.kms_command)


class Encrypted:
    """A transfer backend that encrypts what another one writes, and decrypts what it reads.

    Besides what the other one takes, each call takes up to STREAMS buffers at a time, which later
    calls use again. One is as long as the longest file, at most ENCRYPTED_SHARD_BYTES, or as a
    longer chunk.
    """

    def __init__(self, backend: TransferBackend, ciphers: Ciphers) -> None:
        """Move encrypted bytes by `backend`; they have the keys of `ciphers`."""
        self._backend = backend
        self._ciphers = ciphers
        self._copies = False
        self._beginning = threading.Lock()
        self._noting = _Noting(None)
        self._idle: list[memoryview] = []

    def take_from(self, prefix: str, files: Sequence[FileEntry]) -> None:
        """Let later writes copy whole files of an older part within the storage, if it can."""
        if isinstance(self._backend, CopyingBackend):
            self._backend.take_from(prefix, files)
            self._copies = True

    def write_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        return self.write_missing(
            directory, plans, buffers, threads=threads, advance=advance, notes=None
        )

    def write_missing(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
        notes: ChunkNotes | None,
    ) -> Moved:
        streams, each = share(threads)
        length = _buffer_length(plans)
        noting = self._noting_of(notes)

        def write(plan: FilePlan) -> Moved:
            with self._buffer(length) as pages:
                tags = self._encrypt(plan, buffers, pages, noting)
                moved = self._written(directory, plan, pages, each, advance, noting)
            if tags is not None:
                self._ciphers.wrote(plan.name, tags)
                noting.add(plan, moved.files[0], tags)
            return moved

        return Moved.of(results_of(plans, write, streams))

    @contextlib.contextmanager
    def _buffer(self, length: int) -> Iterator[memoryview]:
        """Lend a buffer of at least this length: an idle one, or a new one in its place."""
        # A thread holds one at most, so that there are never more of them than threads.
        try:
            pages = self._idle.pop()
        except IndexError:
            pages = memoryview(b"")
        if len(pages) < length:
            pages = memoryview(buffer_pages(length))
        try:
            yield pages
        finally:
            self._idle.append(pages)

    def _noting_of(self, notes: ChunkNotes | None) -> _Noting:
        """Return what notes files; bounce buffers bring one file at a time, for the same notes."""
        with self._beginning:
            if self._noting.notes is not notes:
                self._noting = _Noting(notes)
            return self._noting

    def _written(
        self,
        directory: int,
        plan: FilePlan,
        pages: memoryview,
        threads: int,
        advance: Advance,
        noting: _Noting,
    ) -> Moved:
        single = [replace(plan, chunks=in_one(plan.chunks))]
        if isinstance(self._backend, ResumableBackend):
            return self._backend.write_missing(
                directory, single, [pages], threads=threads, advance=advance, notes=noting
            )
        return self._backend.write_files(
            directory, single, [pages], threads=threads, advance=advance
        )

    def _encrypt(
        self, plan: FilePlan, buffers: Buffers, pages: memoryview, noting: _Noting
    ) -> list[bytes] | None:
        """Encrypt a file. Return its nonces and tags; None when it is that of the older part."""
        if self._copies and self._encrypt_as_older(plan, buffers, pages):
            return None
        cipher = self._ciphers.cipher.chunks_of(plan.name, plan.size)
        known = noting.tags(plan.name)
        return [
            _encrypted(cipher, chunk, buffers, _pages_of(chunk, pages), known.get(chunk.index))
            for chunk in plan.chunks
        ]

    def _encrypt_as_older(self, plan: FilePlan, buffers: Buffers, pages: memoryview) -> bool:
        """Encrypt a file as the older part has it, if that is of the same content."""
        older = self._ciphers.older(plan)
        if older is None:
            return False
        for chunk, tag, wanted in zip(plan.chunks, older.tags, older.entry.chunks, strict=True):
            view = _pages_of(chunk, pages)
            _encrypted(older.cipher, chunk, buffers, view, tag)
            if digest_of([view], chunk.size) != wanted:
                return False
        return True

    def read_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        entries: Sequence[FileEntry],
        buffers: Buffers,
        *,
        threads: int,
        advance: Advance,
    ) -> Moved:
        streams, each = share(threads)
        length = _buffer_length(plans)

        def read(item: tuple[FilePlan, FileEntry, Sequence[ChunkPlan]]) -> Moved:
            plan, entry, chunks = item
            with self._buffer(length) as pages:
                single = [replace(plan, chunks=in_one(chunks))]
                moved = self._backend.read_files(
                    directory, single, [entry], [pages], threads=each, advance=advance
                )
                # What fills no memory is read for its digests alone, and needs no key.
                if any(piece.allocation != PADDING for chunk in chunks for piece in chunk.pieces):
                    self._decrypt(entry, chunks, buffers, pages)
            return moved

        items = [
            (plan, entry, run)
            for plan, entry in zip(plans, entries, strict=True)
            for run in runs_of(plan.chunks, length)
        ]
        return Moved.of(results_of(items, read, streams))

    def _decrypt(
        self, entry: FileEntry, chunks: Sequence[ChunkPlan], buffers: Buffers, pages: memoryview
    ) -> None:
        cipher = self._ciphers.cipher.chunks_in(entry)
        tags = entry.encryption.tags if entry.encryption else []
        for chunk in chunks:
            tag = tags[chunk.index]
            if entry.chunks[chunk.index] == zeros_digest(chunk.size):
                cipher.check_zeros(chunk.index, chunk.size, tag)
                continue
            data = pages[chunk.offset - chunks[0].offset :][: chunk.size]
            cipher.decrypt(chunk.index, data, pieces_of(chunk, buffers), tag)


class _Noting:
    """Notes files once they are on the disk; the backend itself notes nothing.

    A chunk means nothing without its nonce, which the backend does not know.
    """

    every_bytes = _NEVER

    def __init__(self, notes: ChunkNotes | None) -> None:
        self.notes = notes
        self._adding = threading.Lock()
        self._rows: list[tuple[str, int, str]] = []
        self._tags: list[bytes] = []
        self._bytes = 0

    def written(self, name: str) -> Mapping[int, str]:
        return self.notes.written(name) if self.notes else {}

    def tags(self, name: str) -> Mapping[int, bytes]:
        return self.notes.tags(name) if self.notes else {}

    def note(self, chunks: Sequence[tuple[str, int, str]], tags: Sequence[bytes] = ()) -> None:
        pass

    def add(self, plan: FilePlan, entry: FileEntry, tags: Sequence[bytes]) -> None:
        """Note a file that was written and fsynced, with others if it is a short one."""
        if self.notes is None:
            return
        with self._adding:
            self._rows += [(plan.name, index, found) for index, found in enumerate(entry.chunks)]
            self._tags += tags
            self._bytes += plan.size
            if self._bytes >= self.notes.every_bytes:
                self.notes.note(self._rows, self._tags)
                self._rows, self._tags, self._bytes = [], [], 0


def _buffer_length(plans: Sequence[FilePlan]) -> int:
    """Return the bytes of a buffer for any of these files, or for a run of chunks of a long one."""
    longest = max((chunk.size for plan in plans for chunk in plan.chunks), default=0)
    whole = max((plan.size for plan in plans), default=0)
    return max(longest, min(whole, ENCRYPTED_SHARD_BYTES), 1)


def _encrypted(
    cipher: ChunkCipher, chunk: ChunkPlan, buffers: Buffers, pages: memoryview, tag: bytes | None
) -> bytes:
    """Encrypt a chunk into pages; return its nonce and tag, which are `tag` if that is of it."""
    if _zeros_in(chunk, buffers) is not None:
        pages[:] = bytes(chunk.size)
        return cipher.zeros(chunk.index, chunk.size, os.urandom(NONCE_BYTES))
    pieces = pieces_of(chunk, buffers)
    if tag is not None and tag == cipher.encrypt(chunk.index, pieces, pages, tag[:NONCE_BYTES]):
        return tag
    # What was encrypted with a nonce that another content has had is overwritten here.
    return cipher.encrypt(chunk.index, pieces, pages, os.urandom(NONCE_BYTES))


def _zeros_in(chunk: ChunkPlan, buffers: Buffers) -> str | None:
    """Return the digest of a chunk of zeros, None when it is none."""
    found = digest_in_memory(chunk, buffers)
    return found if found == zeros_digest(chunk.size) else None


def _pages_of(chunk: ChunkPlan, pages: memoryview) -> memoryview:
    return pages[chunk.offset :][: chunk.size]
