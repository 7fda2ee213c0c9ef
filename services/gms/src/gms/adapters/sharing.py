"""A save writes what changed: a file that an older artifact holds already is shared with it.

The file gets a second name, so that each artifact may be deleted and the other loses nothing. It is
shared only when every chunk in memory has the digest that the older manifest says, and the file,
read again, has it too. Objects are copied instead, one by one (`gms.adapters.objects`).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import starmap
from typing import NamedTuple

from gms.domain.tasks import OBJECT, SaveTask
from gms.domain.transfer import ChunkPlan, FilePlan, without_memory
from gms.ports import Advance, CopyingBackend, TransferBackend
from snapshot_shared.artifact import (
    PART_MANIFEST,
    ROOT_MANIFEST,
    FileEntry,
    PartManifest,
    check_part_manifest,
    generation_of,
    generation_path,
)
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json
from snapshot_shared.errors import NoSpace, SnapbackError
from snapshot_shared.files import open_dir, opened, read_bounded, translated
from snapshot_shared.stripes import StripeRoots, folder_of

DigestOf = Callable[[ChunkPlan], str]

LOOKED_AT = 16
"""How many sealed generations of a namespace are asked, the newest first."""


class Parent(NamedTuple):
    """A part to share with: its folders, by the names of stripe roots, and its manifest."""

    folders: Mapping[str, int]
    manifest: PartManifest


@contextlib.contextmanager
def parent_of(root: int, task: SaveTask) -> Iterator[Parent | None]:
    """Open the part to share with: that of the parent that is named, or else the newest that fits.

    It is sealed, of the same namespace, and its layout has the structure of the one that is saved.
    None when there is none.
    """
    for content, generation in _candidates(root, task):
        with contextlib.ExitStack() as stack:
            try:
                path = (task.namespace, content, generation, task.part)
                directory = stack.enter_context(opened(open_dir(root, path)))
                data = read_bounded(directory, PART_MANIFEST, MAX_MANIFEST_BYTES)
                manifest = check_part_manifest(
                    decode_json(data, PartManifest, limit=MAX_MANIFEST_BYTES)
                )
                roots = StripeRoots(task.stripe_roots)
                folders = stack.enter_context(roots.reading(directory, manifest))
            except (SnapbackError, OSError):
                # Whatever is wrong with it, it is of no use here.
                continue
            layout = manifest.layout
            is_near = bool(manifest.objects) is (task.backend == OBJECT)
            is_same = layout and layout.source.structure_hash == task.layout.structure_hash
            if is_near and is_same and bool(manifest.encryption) is task.encrypt:
                yield Parent(folders, manifest)
                return
    yield None


def share(
    parent: Parent,
    folders: Mapping[str, int],
    plans: Sequence[FilePlan],
    digest_of: DigestOf,
    backend: TransferBackend,
    *,
    threads: int,
    advance: Advance,
) -> dict[str, FileEntry]:
    """Return the files that are shared with the part in `folders`, by name, verified.

    A file stays in the stripe root where it is. `digest_of` gives the digest that a chunk of a plan
    has in memory now.
    What cannot be shared, for whatever reason, is not there and has to be written. NoSpace.
    """
    if objects := parent.manifest.objects:
        if isinstance(backend, CopyingBackend):
            backend.take_from(objects.prefix, parent.manifest.files)
        return {}
    known = {entry.name: entry for entry in parent.manifest.files}
    shared: dict[str, FileEntry] = {}
    for plan in plans:
        entry = known.get(plan.name)
        directory = folders.get(entry.stripe or "") if entry else None
        if entry is None or directory is None or not _is_same(plan, entry, digest_of):
            continue
        try:
            _link(folder_of(parent.folders, entry), directory, plan.name)
            backend.read_files(
                directory,
                [without_memory(plan)],
                [entry],
                [],
                threads=threads,
                advance=lambda _: None,
            )
        except NoSpace:
            raise
        except (SnapbackError, OSError):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(plan.name, dir_fd=directory)
        else:
            shared[plan.name] = entry
            advance(plan.size)
    return shared


def _link(older: int, directory: int, name: str) -> None:
    try:
        os.link(name, name, src_dir_fd=older, dst_dir_fd=directory, follow_symlinks=False)
    except OSError as error:
        raise translated(error, name) from error


def _is_same(plan: FilePlan, entry: FileEntry, digest_of: DigestOf) -> bool:
    if (plan.size, plan.chunk_bytes) != (entry.size, entry.chunk_bytes):
        return False
    pairs = zip(plan.chunks, entry.chunks, strict=True)
    return all(starmap(lambda chunk, wanted: digest_of(chunk) == wanted, pairs))


def _candidates(root: int, task: SaveTask) -> Iterator[tuple[str, str]]:
    """Yield content and folder of sealed generations, the named parent first."""
    parent = task.parent
    if parent is not None and parent.namespace == task.namespace:
        folder = generation_path(task.namespace, parent.content_uid, parent.generation)[-1]
        if _sealed_at(root, (task.namespace, parent.content_uid, folder)) is not None:
            yield parent.content_uid, folder
    yield from _sealed(root, task.namespace)[:LOOKED_AT]


def _sealed(root: int, namespace: str) -> list[tuple[str, str]]:
    """Return content and folder of every sealed generation of a namespace, the newest first."""
    found: list[tuple[int, int, str, str]] = []
    for content in _names(root, (namespace,)):
        for folder in _names(root, (namespace, content)):
            number = generation_of(namespace, content, folder)
            if number is None:
                continue
            at = _sealed_at(root, (namespace, content, folder))
            if at is not None:
                found.append((at, number, content, folder))
    return [(content, folder) for _, _, content, folder in sorted(found, reverse=True)]


def _sealed_at(root: int, path: Sequence[str]) -> int | None:
    """Return the time when a generation was sealed, in nanoseconds, else None."""
    try:
        with opened(open_dir(root, path)) as directory:
            return os.stat(ROOT_MANIFEST, dir_fd=directory, follow_symlinks=False).st_mtime_ns
    except (SnapbackError, OSError):
        return None


def _names(root: int, path: Sequence[str]) -> list[str]:
    try:
        with opened(open_dir(root, path)) as directory:
            return os.listdir(directory)  # noqa: PTH208 - of a descriptor
    except (SnapbackError, OSError):
        # No directory, or one that cannot be read, which is of no use here.
        return []
