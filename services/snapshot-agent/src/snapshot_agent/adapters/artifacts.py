"""The artifact root on a file system that all nodes share: generations, parts, manifests."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import NamedTuple, TypeVar

from snapshot_agent.adapters.copying import ROOT, ByteCounter, read_checked
from snapshot_agent.ports import GenerationRef, Progress
from snapshot_shared.artifact import (
    MAX_SIGNATURE_BYTES,
    PART_MANIFEST,
    ROOT_MANIFEST,
    SIGNATURE,
    PartManifest,
    RootManifest,
    Signature,
    check_part_manifest,
    generation_path,
    part_path,
)
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, digest, encode_pretty
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactMissing,
    InvalidInput,
    InvalidMessage,
    InvalidName,
    SnapbackError,
)
from snapshot_shared.files import (
    check_space,
    free_bytes,
    make_dir,
    names_in,
    open_artifact,
    open_dir,
    open_root,
    opened,
    read_bounded,
    remove_tree,
    secure,
    write_new,
    write_replacing,
)
from snapshot_shared.ids import check_part
from snapshot_shared.object_storage import MARK as OBJECTS_MARK
from snapshot_shared.object_storage import ObjectStorage, check_objects, verify_objects
from snapshot_shared.orders import ArtifactRef
from snapshot_shared.signing import NO_SIGNATURES, Signing
from snapshot_shared.stripes import MARK as STRIPES_MARK
from snapshot_shared.stripes import (
    NO_STRIPES,
    StripeMissing,
    StripeRoots,
    check_apart,
    check_files,
    folder_of,
    remove_stored,
)

log = logging.getLogger(__name__)

T = TypeVar("T")


SPARE_BYTES = 64 * 1024 * 1024
"""What a capture leaves free on a disk, in bytes: journals, stores and NATS may lie there, too.

A nats-server whose disk was full once takes no writes before it is started again.
"""

MEASURED_WITHIN_S = 1.0
"""How long to wait for a measurement of the free space before the last one is used, in seconds."""


class Room(NamedTuple):
    """The free bytes of a file system, on which `shares` of `of` shares of the weights go."""

    path: Path
    free: int
    shares: int
    of: int

    def share_of(self, weights: int) -> int:
        """Return the bytes of its shares, rounded up; 0 where weights go elsewhere."""
        return -(-weights * self.shares // self.of) if self.of else 0

    @property
    def for_weights(self) -> int:
        """How long weights fit, if the other file systems have room enough."""
        return self.free * self.of // self.shares if self.of else self.free


class Measured(NamedTuple):
    """The file systems that could be measured, and why a capture would fail on the others."""

    rooms: list[Room]
    problem: SnapbackError | None


class ArtifactRoot:
    """The `Artifacts` port over one directory."""

    def __init__(
        self,
        root: Path,
        object_storage: str = "",
        *,
        stripes: StripeRoots = NO_STRIPES,
        weights_in_objects: bool = False,
        signing: Signing = NO_SIGNATURES,
    ) -> None:
        """Use the directory `root`, which is created when it is missing.

        `object_storage` is the URL below which parts keep bytes as objects, and
        `weights_in_objects` whether the weights of the next capture go there; else they are spread
        over the artifact root and `stripes`. `signing` has the keys that sign and those that are
        trusted.
        """
        self._root = root
        self._object_storage = object_storage
        self._stripes = stripes
        self._weights_in_objects = weights_in_objects
        self._signing = signing
        self._measuring: asyncio.Future[Measured] | None = None
        self._free = 0
        self._problem = ""

    @functools.cached_property
    def _objects(self) -> ObjectStorage:
        return ObjectStorage(self._object_storage)

    def _open(self) -> int:
        try:
            return open_root(self._root)
        except FileNotFoundError:
            return open_root(self._root, create=True)

    async def free_bytes(self) -> int:
        """Return the free bytes, as measured last when the file system hangs; 0 at first.

        A stripe root that is missing does not count: no capture begins without it.
        """
        measuring = self._measured()
        await asyncio.wait([measuring], timeout=MEASURED_WITHIN_S)
        if measuring.done():
            problem: Exception | None
            try:
                rooms, problem = measuring.result()
                self._free = min(room.for_weights for room in rooms)
            except (SnapbackError, OSError) as error:
                problem = error
            self._warn(str(problem or ""))
        return self._free

    def _warn(self, problem: str) -> None:
        """Log what is wrong with the free space once, for it is measured every few seconds."""
        if problem and problem != self._problem:
            log.warning("the free space below %s is not all known: %s", self._root, problem)
        self._problem = problem

    async def require_space(self, own: int, weights: int) -> None:
        # Shielded: a caller that is cancelled need not wait, for the thread uses nothing of it.
        rooms, problem = await asyncio.shield(self._measured())
        if problem is not None:
            raise problem
        for room in rooms:
            needed = room.share_of(weights) + (own if room.path == self._root else 0)
            what = f"the capture, below {room.path}, with {SPARE_BYTES >> 20} MiB to spare,"
            check_space(room.free, needed + SPARE_BYTES, what)

    def _measured(self) -> asyncio.Future[Measured]:
        """Return the measurement under way, or a new one.

        One at a time: each that hangs takes a thread.
        """
        if self._measuring is None or self._measuring.done():
            self._measuring = ROOT.begin(self._measure)
            self._measuring.add_done_callback(lambda done: done.cancelled() or done.exception())
        return self._measuring

    def _measure(self) -> Measured:
        roots = [("", self._root)]
        if not self._weights_in_objects:
            roots += [(name, Path(path)) for name, path in self._stripes.folders.items()]
        found: dict[int, tuple[Path, int, int]] = {}
        folders: dict[str, os.stat_result] = {}
        problem: SnapbackError | None = None
        for name, path in roots:
            try:
                fd = self._stripes.open(name) if name else self._open()
            except StripeMissing as error:
                problem = problem or error
                continue
            with opened(fd) as root:
                folders[name] = os.fstat(root)
                disk = folders[name].st_dev
                first, free, shares = found.get(disk, (path, free_bytes(root), 0))
                found[disk] = (first, free, shares + 1)
        try:
            check_apart(folders)
        except InvalidInput as error:
            problem = problem or error
        of = 0 if self._weights_in_objects else len(roots)
        rooms = [Room(path, free, shares, of) for path, free, shares in found.values()]
        return Measured(rooms, problem)

    def new_part(self, place: GenerationRef, part: str) -> AbstractAsyncContextManager[int]:
        return ROOT.opened(self._new_part, place, part)

    def _new_part(self, place: GenerationRef, part: str) -> int:
        with opened(open_root(self._root, create=True)) as root:
            return make_dir(root, part_path(*place, part), exclusive=True)

    def open_part(self, place: GenerationRef, part: str) -> AbstractAsyncContextManager[int]:
        return ROOT.opened(self._open_part, place, part)

    def _open_part(self, place: GenerationRef, part: str) -> int:
        with opened(self._open()) as root:
            return open_artifact(root, part_path(*place, part))

    async def finish_part(self, directory: int, manifest: PartManifest) -> str:
        data = encode_pretty(check_part_manifest(manifest))
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidName(
                f"the part manifest has {len(data)} bytes, the limit is {MAX_MANIFEST_BYTES}"
            )
        await ROOT.run(write_new, directory, PART_MANIFEST, data)
        return digest(data)

    async def read_part(self, place: GenerationRef, part: str) -> tuple[PartManifest, str]:
        return await ROOT.run(self._read_part, place, part)

    def _read_part(self, place: GenerationRef, part: str) -> tuple[PartManifest, str]:
        with opened(self._open_part(place, part)) as directory:
            data = read_bounded(directory, PART_MANIFEST, MAX_MANIFEST_BYTES)
            manifest = check_part_manifest(_decoded(data, PartManifest, f"{part}/{PART_MANIFEST}"))
            if manifest.objects:
                check_objects(self._objects, manifest)
            with self._stripes.reading(directory, manifest) as folders:
                if not manifest.objects:
                    check_files(folders, manifest)
                _check_nothing_else(folders, manifest)
        return manifest, digest(data)

    async def check_bytes(
        self, place: GenerationRef, manifest: PartManifest, progress: Progress
    ) -> None:
        if manifest.objects:
            counter = ByteCounter(progress)
            sizes = verify_objects(self._objects, manifest)
            while size := await ROOT.run(next, sizes, 0):
                await counter.add(size)
            return
        counter, shared = ByteCounter(progress), manifest.kind == "gms"
        async with self.open_part(place, manifest.part) as directory:
            with contextlib.ExitStack() as stack:
                reading = self._stripes.reading(directory, manifest)
                folders = await ROOT.run(stack.enter_context, reading)
                for entry in manifest.files:
                    folder = folder_of(folders, entry)
                    await read_checked(folder, [entry], counter, shared=shared)

    async def parts(self, place: GenerationRef) -> list[str]:
        return await ROOT.run(self._parts, place)

    def _parts(self, place: GenerationRef) -> list[str]:
        with opened(self._open()) as root, opened(open_dir(root, generation_path(*place))) as fd:
            return sorted(filter(_is_part, names_in(fd)))

    async def seal(self, manifest: RootManifest) -> str:
        place = GenerationRef(manifest.namespace, manifest.content_uid, manifest.generation)
        data = encode_pretty(manifest)
        await ROOT.run(self._write_root, place, data)
        return digest(data)

    def _write_root(self, place: GenerationRef, data: bytes) -> None:
        with opened(self._open()) as root, opened(open_dir(root, generation_path(*place))) as fd:
            if signature := self._signing.sign(digest(data)):
                # Of a seal that was killed there may be one by another key.
                write_replacing(fd, SIGNATURE, encode_pretty(signature))
            write_new(fd, ROOT_MANIFEST, data)

    async def check_signature(self, ref: ArtifactRef) -> None:
        self._signing.check(await ROOT.run(self._read_signature, ref), ref.root_digest)

    def _read_signature(self, ref: ArtifactRef) -> Signature | None:
        path = generation_path(ref.namespace, ref.content_uid, ref.generation)
        with opened(self._open()) as root, opened(open_artifact(root, path)) as directory:
            try:
                data = read_bounded(directory, SIGNATURE, MAX_SIGNATURE_BYTES)
            except ArtifactMissing:
                return None
        return _decoded(data, Signature, SIGNATURE)

    async def read_root(self, ref: ArtifactRef) -> RootManifest:
        return await ROOT.run(self._read_root, ref)

    def _read_root(self, ref: ArtifactRef) -> RootManifest:
        path = generation_path(ref.namespace, ref.content_uid, ref.generation)
        with opened(self._open()) as root, opened(open_artifact(root, path)) as directory:
            data = read_bounded(directory, ROOT_MANIFEST, MAX_MANIFEST_BYTES)
        if digest(data) != ref.root_digest:
            raise ArtifactCorrupt(
                f"the root manifest has digest {digest(data)}, wanted {ref.root_digest}",
                next_step="restore another snapshot; this one is damaged",
                file=ROOT_MANIFEST,
                found=digest(data),
                expected=ref.root_digest,
            )
        return _decoded(data, RootManifest, ROOT_MANIFEST)

    async def remove(self, place: GenerationRef) -> None:
        await ROOT.run(self._remove, place)

    def _remove(self, place: GenerationRef) -> None:
        namespace, content, generation = generation_path(*place)
        with contextlib.suppress(ArtifactMissing), opened(self._open()) as root:
            with opened(open_dir(root, (namespace, content))) as parent:
                with contextlib.suppress(ArtifactMissing):
                    _unlink_root(parent, generation)
                path = (namespace, content, generation)
                remove_stored(parent, path, lambda: self._objects, self._stripes)
            # Fails while other generations of the content are there.
            with contextlib.suppress(OSError), opened(open_dir(root, (namespace,))) as folder:
                os.rmdir(content, dir_fd=folder)


def _unlink_root(parent: int, generation: str) -> None:
    """Remove the root manifest first, so that no reader takes a generation that is half removed."""
    with opened(open_dir(parent, (generation,))) as directory:
        try:
            os.unlink(ROOT_MANIFEST, dir_fd=directory)
        except FileNotFoundError:
            pass
        except IsADirectoryError:
            remove_tree(directory, ROOT_MANIFEST)
        secure(directory, ROOT_MANIFEST)


def _decoded(data: bytes, type_: type[T], name: str) -> T:
    try:
        return decode_json(data, type_, limit=MAX_MANIFEST_BYTES)
    except InvalidMessage as error:
        raise ArtifactCorrupt(f"{name}: {error.message}", file=name) from error


_OPEN_ON_NFS = ".nfs"
"""How a client of NFS names a file that is removed while it is open; a crash leaves it there."""


def _check_nothing_else(folders: Mapping[str, int], manifest: PartManifest) -> None:
    known: dict[str, set[str]] = {stripe: set() for stripe in folders}
    known[""] = {PART_MANIFEST, *([OBJECTS_MARK] if manifest.objects else [])}
    if manifest.kind == "gms":
        # Also where all files that were to be in stripe roots are shared with an older part.
        known[""].add(STRIPES_MARK)
    for entry in manifest.files if not manifest.objects else ():
        known[entry.stripe or ""].add(entry.name)
    for stripe, folder in folders.items():
        names = (each for each in names_in(folder) if not each.startswith(_OPEN_ON_NFS))
        if extra := sorted(set(names) - known[stripe]):
            raise ArtifactCorrupt(
                f"part {manifest.part} holds {extra[0]!r}, which its manifest does not name",
                file=extra[0],
                found=len(extra),
            )


def _is_part(name: str) -> bool:
    try:
        check_part(name)
    except InvalidName:
        return False
    return True
