"""What a save notes down while it writes, so that one that was killed goes on where it was.

Notes are hints: a chunk is taken over only when memory and file both have the digest that they say.
"""

from __future__ import annotations

from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from gms.domain.task_rules import stripes_of
from gms.domain.tasks import SaveTask
from gms.domain.transfer import CHUNK_BYTES
from snapback_client.frames import Token
from snapshot_shared.artifact import (
    MAX_CHUNKS,
    ChunkDigest,
    ChunkTag,
    Encryption,
    FileName,
    StripeName,
)
from snapshot_shared.orders import Attempt, LayoutRef, OrderIdStr, ShortText

ChunkIndex = Annotated[int, Meta(ge=0, le=MAX_CHUNKS)]

Written = dict[str, dict[int, str]]
"""The digests of chunks that are on the disk, by file and index."""


class _Note(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="is"):
    pass


class SaveNote(_Note, frozen=True, kw_only=True, tag="save"):
    """Which save this is: the fenced layout, and how it is cut into files and chunks."""

    order: OrderIdStr
    generation: Attempt
    fence_token: Token | None
    layout: LayoutRef
    backend: ShortText
    shard_bytes: int
    chunk_bytes: int
    encrypted: bool | UnsetType = UNSET
    stripes: list[StripeName] | UnsetType = UNSET


class KeyNote(_Note, frozen=True, kw_only=True, tag="key"):
    """The key by which all chunks are encrypted that are noted after this."""

    encryption: Encryption


class ChunksNote(_Note, frozen=True, kw_only=True, tag="chunks"):
    """File, index and digest of chunks that were fsynced before this was written.

    `tags` has the nonce and tag of each, where they are encrypted.
    """

    chunks: list[tuple[FileName, ChunkIndex, ChunkDigest]]
    tags: list[ChunkTag] | UnsetType = UNSET


class Noted(NamedTuple):
    """What the notes of a save say, and the length of those that are valid."""

    written: Written
    length: int
    tags: dict[str, dict[int, bytes]]
    encryption: Encryption | None


_DECODER: msgspec.json.Decoder[SaveNote | KeyNote | ChunksNote] = msgspec.json.Decoder(
    SaveNote | KeyNote | ChunksNote
)


def note_of(task: SaveTask) -> SaveNote:
    """Return the note that identifies a save. Only an equal save may resume it."""
    return SaveNote(
        order=task.order,
        generation=task.generation,
        fence_token=task.fence_token,
        layout=task.layout,
        backend=task.backend,
        shard_bytes=task.shard_bytes,
        chunk_bytes=CHUNK_BYTES,
        encrypted=task.encrypt or UNSET,
        stripes=stripes_of(task) or UNSET,
    )


def read_notes(data: bytes, wanted: SaveNote) -> Noted:
    """Return what the notes of this save name.

    What follows is torn and counts for nothing. All of it, when it is the notes of another save.
    """
    written: Written = {}
    tags: dict[str, dict[int, bytes]] = {}
    encryption: Encryption | None = None
    length = 0
    for line in data.splitlines(keepends=True):
        try:
            note = _DECODER.decode(line)
        except (msgspec.MsgspecError, UnicodeDecodeError):
            break
        if not line.endswith(b"\n") or isinstance(note, SaveNote) is not (length == 0):
            break
        if isinstance(note, ChunksNote):
            for name, index, digest in note.chunks:
                written.setdefault(name, {})[index] = digest
            for (name, index, _), tag in zip(note.chunks, note.tags or (), strict=False):
                tags.setdefault(name, {})[index] = tag
        elif isinstance(note, KeyNote):
            encryption = note.encryption
        elif note != wanted:
            break
        length += len(line)
    return Noted(written, length, tags, encryption)
