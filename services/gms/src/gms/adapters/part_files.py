"""Parts on disk: their manifests, and every digest of their bytes."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import xxhash

from gms.domain.parts import chunk_sizes
from snapshot_shared.artifact import PART_MANIFEST, FileEntry, PartManifest, check_part_manifest
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, digest
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing, InvalidMessage
from snapshot_shared.files import (
    create_file,
    open_regular,
    open_root,
    opened,
    read_bounded,
    secure,
    translated,
    write_all,
)
from snapshot_shared.object_storage import VARIABLE, ObjectStorage, verify_objects, zeros_digest
from snapshot_shared.stripes import VARIABLE as STRIPES_VARIABLE
from snapshot_shared.stripes import StripeRoots, folder_of, parse_stripes


def part_folders(path: Path) -> list[Path]:
    """Return the parts at a path: itself, or all of a generation. ArtifactMissing."""
    path = path.absolute()
    if (path / PART_MANIFEST).exists():
        return [path]
    found = sorted(each.parent for each in path.glob(f"*/{PART_MANIFEST}"))
    if not found:
        raise ArtifactMissing(
            f"there is no part at {path}",
            next_step=f"name the folder of a part, which has a {PART_MANIFEST}, or of a generation",
            path=str(path),
        )
    return found


def read_part(path: Path) -> tuple[PartManifest, str]:
    """Return the checked manifest of a part, and its digest. ArtifactCorrupt."""
    try:
        with opened(open_root(path)) as directory:
            data = read_bounded(directory, PART_MANIFEST, MAX_MANIFEST_BYTES)
    except FileNotFoundError as error:
        raise ArtifactMissing(f"{path} does not exist", path=str(path)) from error
    except OSError as error:
        raise translated(error, str(path)) from error
    try:
        manifest = decode_json(data, PartManifest, limit=MAX_MANIFEST_BYTES)
    except InvalidMessage as error:
        raise ArtifactCorrupt(f"{path / PART_MANIFEST}: {error.message}", path=str(path)) from error
    return check_part_manifest(manifest), digest(data)


def verify_part(path: Path, manifest: PartManifest, advance: Callable[[int], None]) -> None:
    """Read every byte of a part and compare every digest. ArtifactCorrupt names file and chunk."""
    if manifest.objects:
        storage = ObjectStorage(os.environ.get(VARIABLE, ""))
        for size in verify_objects(storage, manifest):
            advance(size)
        return
    roots = StripeRoots(parse_stripes(os.environ.get(STRIPES_VARIABLE, "")))
    with opened(open_root(path)) as directory, roots.reading(directory, manifest) as folders:
        for _, _, chunk in checked_chunks(folders, manifest, f"{path}/"):
            advance(len(chunk))


def checked_chunks(
    folders: Mapping[str, int], manifest: PartManifest, where: str = ""
) -> Iterator[tuple[FileEntry, int, memoryview]]:
    """Read every chunk of a part whose bytes are in files: the file, the offset, the bytes.

    `folders` are those of the part by the names of stripe roots. The bytes are good until the next.
    ArtifactCorrupt names chunk and file, below `where`.
    """
    buffer = memoryview(bytearray(max((e.chunk_bytes for e in manifest.files), default=0)))
    shared = manifest.kind == "gms"
    for entry in manifest.files:
        folder = folder_of(folders, entry)
        with opened(open_regular(folder, entry.name, size=entry.size, shared=shared)) as fd:
            for index, (offset, size) in enumerate(chunk_sizes(entry)):
                _read(fd, buffer[:size], offset, entry.name)
                found = xxhash.xxh3_128_hexdigest(buffer[:size])
                if found != entry.chunks[index]:
                    raise ArtifactCorrupt(
                        f"chunk {index} of {where}{entry.name} is damaged",
                        next_step="do not load this part; capture the worker again",
                        file=entry.name,
                        chunk=index,
                        expected=entry.chunks[index],
                        found=found,
                    )
                yield entry, offset, buffer[:size]


def copy_files(
    source: int,
    target: int,
    manifest: PartManifest,
    advance: Callable[[int], None],
    at_target: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext,
) -> None:
    """Copy the files of a part into an empty directory, each byte verified, and make them durable.

    None of them is in a stripe root. What is done in the directory is done within `at_target`.
    Chunks of zeros become holes. ArtifactCorrupt, NoSpace.
    """
    for entry in manifest.files:
        with at_target(), opened(create_file(target, entry.name)) as fd:
            os.ftruncate(fd, entry.size)
    for entry, offset, chunk in checked_chunks({"": source}, manifest):
        if entry.chunks[offset // entry.chunk_bytes] != zeros_digest(len(chunk)):
            with at_target(), opened(open_regular(target, entry.name, writable=True)) as fd:
                os.lseek(fd, offset, os.SEEK_SET)
                write_all(fd, chunk)
        advance(len(chunk))
    for entry in manifest.files:
        with at_target(), opened(open_regular(target, entry.name)) as fd:
            secure(fd, entry.name)


def _read(fd: int, into: memoryview, offset: int, name: str) -> None:
    done = 0
    while done < len(into):
        count = os.preadv(fd, [into[done:]], offset + done)
        if not count:
            raise ArtifactCorrupt(f"{name} became shorter while it was read", file=name)
        done += count
