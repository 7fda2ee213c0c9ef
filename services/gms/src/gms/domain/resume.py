"""What a save notes down while it writes, so that one that was killed goes on where it was.

Notes are hints: a chunk is taken over only when memory and file both have the digest that they say.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from gms.domain.tasks import SaveTask
from gms.domain.transfer import CHUNK_BYTES
from snapback_client.frames import Token
from snapshot_shared.artifact import MAX_CHUNKS, ChunkDigest, FileName
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


class ChunksNote(_Note, frozen=True, kw_only=True, tag="chunks"):
    """File, index and digest of chunks that were fsynced before this was written."""

    chunks: list[tuple[FileName, ChunkIndex, ChunkDigest]]


_DECODER: msgspec.json.Decoder[SaveNote | ChunksNote] = msgspec.json.Decoder(SaveNote | ChunksNote)


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
    )


def read_notes(data: bytes, wanted: SaveNote) -> tuple[Written, int]:
    """Return the chunks that the notes of this save name, and the length of valid notes.

    What follows is torn and counts for nothing. All of it, when it is the notes of another save.
    """
    written: Written = {}
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
        elif note != wanted:
            break
        length += len(line)
    return written, length
