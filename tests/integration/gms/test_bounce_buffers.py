"""Memory that only a device addresses moves through bounce buffers, with every backend."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest

from gms.adapters import bounce_buffers
from gms.adapters.backends import find_backend
from gms.adapters.bounce_buffers import BounceBuffered
from gms.adapters.cuda import CudaDevice
from gms.adapters.encrypted import Ciphers, Encrypted
from gms.adapters.objects import Objects
from gms.adapters.parallel import STREAMS
from gms.adapters.staging import Staging, staged
from gms.adapters.striping import in_folders
from gms.conformance.transfers import CHUNK, Memory, Notes, ignored, plans_of, read, write
from gms.domain.resume import note_of, read_notes
from gms.domain.task_rules import part_manifest, path_of
from gms.domain.tasks import SaveTask
from gms.domain.transfer import PAGE, FilePlan, place, plan_files, without_memory
from gms.ports import Advance, Buffers, Moved, TransferBackend
from snapback_client.cuda import CudaDriver, CudaRange
from snapback_client.frames import Access, AllocationInfo
from snapshot_shared import errors
from snapshot_shared.artifact import FileEntry, check_part_manifest
from snapshot_shared.files import open_root, opened
from snapshot_shared.keys import ArtifactKeys
from snapshot_shared.object_storage import ObjectStorage, zeros_digest
from tests.support import builders
from tests.support.artifact_keys import put_encryption
from tests.support.cuda_rig import CudaNode, ThisProcess
from tests.support.direct_backend import DirectExample
from tests.support.gms_rig import open_descriptors
from tests.support.weights import flip, saving

FAKE_KVIKIO = Path(__file__).parents[2] / "support" / "fake_kvikio"
GRANULE = 2 * 1024 * 1024
BUFFER = 8 * PAGE
SIZES = [GRANULE, 3 * PAGE + 17, 100, 11 * PAGE]
PLACES = [index * GRANULE for index in range(len(SIZES))]
DEFAULTS: dict[str, Any] = {"threads": 2, "advance": ignored}
"""How files are moved, where a test says nothing else."""


class Layout:
    """Allocations on a fake GPU, and the folder of their files."""

    def __init__(self, device: CudaDevice, folder: int) -> None:
        self.folder = folder
        size = GRANULE * len(SIZES)
        self.range = CudaRange(CudaDriver(), device.info.uuid, size, address=None, exact=False)
        for at in PLACES:
            handle = device.create(GRANULE)
            descriptor = device.export(handle, Access.RW)
            device.release(handle)
            self.range.map(descriptor, at, GRANULE, writable=True)
            os.close(descriptor)

    def fill(self) -> Layout:
        for at, data in zip(PLACES, values(), strict=True):
            self.range.write(at, memoryview(bytearray(data)))
        return self

    def is_filled(self) -> bool:
        """Whether it has the values. To show how so many bytes differ would take minutes."""
        found = []
        for at, size in zip(PLACES, SIZES, strict=True):
            data = bytearray(size)
            self.range.read(at, memoryview(data))
            found.append(bytes(data))
        return found == values()

    def through(self, backend: TransferBackend | str) -> BounceBuffered:
        if isinstance(backend, str):
            backend = find_backend(backend, in_place=True)
        return BounceBuffered(backend, self.range, PLACES, self.range.size)

    def save(self, backend: TransferBackend | str = "posix-direct", **how: Any) -> Moved:
        with self.through(backend) as bounced:
            return bounced.write_files(self.folder, plans(), [], **DEFAULTS | how)

    def load(
        self,
        files: Sequence[FileEntry],
        backend: TransferBackend | str = "posix-direct",
        *,
        only: Sequence[FilePlan] = (),
        **how: Any,
    ) -> Moved:
        with self.through(backend) as bounced:
            return bounced.read_files(self.folder, only or plans(), files, [], **DEFAULTS | how)


@pytest.fixture
def device(cuda_node: CudaNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    monkeypatch.setattr(bounce_buffers, "BUFFER_BYTES", BUFFER)
    with contextlib.closing(CudaDevice(CudaDriver(), 0)) as device:
        yield device


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "parts").mkdir()
    with opened(open_root(tmp_path / "parts")) as directory:
        yield directory


@pytest.fixture
def source(device: CudaDevice, folder: int) -> Iterator[Layout]:
    layout = Layout(device, folder).fill()
    yield layout
    layout.range.release()


@pytest.fixture
def target(device: CudaDevice, folder: int) -> Iterator[Layout]:
    layout = Layout(device, folder)
    yield layout
    layout.range.release()


@pytest.fixture
def saved(source: Layout) -> list[FileEntry]:
    return source.save().files


def plans(shard: int = BUFFER) -> list[FilePlan]:
    return plans_of(SIZES, shard=shard)


def values() -> list[bytes]:
    found = [Random(size).randbytes(size) for size in SIZES]
    # Whole chunks of zeros, which no backend hands on.
    found[0] = found[0][: 5 * PAGE] + bytes(20 * PAGE) + found[0][25 * PAGE :]
    return found


@pytest.mark.parametrize("backend", ["posix-direct", "posix-buffered"])
@pytest.mark.parametrize("threads", [1, 5])
def test_what_was_saved_through_bounce_buffers_is_loaded_through_them(
    source: Layout, target: Layout, backend: str, threads: int
) -> None:
    reported: list[int] = []
    moved = source.save(backend, threads=threads, advance=reported.append)
    assert [entry.name for entry in moved.files] == [plan.name for plan in plans()]
    assert sum(reported) == sum(plan.size for plan in plans())
    target.load(moved.files, backend, threads=threads)
    assert target.is_filled()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_files_in_several_folders_move_through_bounce_buffers_at_once(
    source: Layout, target: Layout, folder: int, tmp_path: Path, threads: int
) -> None:
    (tmp_path / "other").mkdir()
    spread = [replace(plan, stripe="other" if at % 2 else "") for at, plan in enumerate(plans())]

    def move(how: Callable[..., Moved], *lists: Sequence[Any]) -> Moved:
        def move_some(place: int, indices: Sequence[int], few: int, advance: Advance) -> Moved:
            some = [[each[at] for at in indices] for each in lists]
            return how(place, *some, [], threads=few, advance=advance)

        return in_folders({"": folder, "other": other}, spread, threads, move_some, ignored)

    with opened(open_root(tmp_path / "other")) as other:
        with source.through("posix-direct") as bounced:
            moved = move(bounced.write_files, spread)
        assert len(os.listdir(folder)) > 1
        assert len(os.listdir(other)) > 1  # noqa: PTH208 - of a descriptor
        files = {entry.name: entry for entry in moved.files}
        with target.through("posix-direct") as bounced:
            move(bounced.read_files, spread, [files[plan.name] for plan in spread])
    assert target.is_filled()


def test_objects_of_several_buffers_at_once_make_one_part(
    source: Layout, target: Layout, tmp_path: Path
) -> None:
    class Slow(ObjectStorage):
        """Lets the others go first."""

        def remove(self, prefix: str) -> None:
            time.sleep(0.05)
            super().remove(prefix)

    objects = Objects(Slow(f"file://{tmp_path}/objects"), "a/b")
    target.load(source.save(objects, threads=5).files, objects, threads=5)
    assert target.is_filled()


def test_objects_of_an_older_part_are_copied_and_not_sent(
    source: Layout, target: Layout, tmp_path: Path
) -> None:
    storage = ObjectStorage(f"file://{tmp_path}/objects")
    older = source.save(Objects(storage, "a"))
    objects = Objects(storage, "b")
    with source.through(objects) as out:
        out.take_from("a", older.files)
    newer = source.save(objects)
    assert older.bytes > newer.bytes == 0
    assert newer.files == older.files
    storage.remove("a")
    target.load(newer.files, objects)
    assert target.is_filled()


def test_a_file_is_secured_without_those_that_others_are_writing(
    folder: int, tmp_path: Path
) -> None:
    first, second, *_ = plans(shard=GRANULE)
    storage = ObjectStorage(f"file://{tmp_path}/objects")
    memory = [memoryview(bytearray(GRANULE)) for _ in SIZES]
    memory[0][:] = Random(1).randbytes(GRANULE)
    theirs = tmp_path / "objects" / "a" / second.name

    def write_another(_: int) -> None:
        # A copy of an object is written beside its place and may vanish from there at any time.
        theirs.mkdir(exist_ok=True)
        (theirs / "000000#1").unlink(missing_ok=True)
        (theirs / "000000#1").symlink_to("gone")

    moved = Objects(storage, "a").write_files(
        folder, [first], memory, threads=1, advance=write_another
    )
    assert (theirs / "000000#1").is_symlink()
    assert moved.bytes > 0


def test_a_killed_save_goes_on_through_bounce_buffers(
    source: Layout, target: Layout, folder: int
) -> None:
    first, *others = plans()
    with source.through("posix-direct") as bounced:
        cut_off = bounced.write_files(folder, [first], [], **DEFAULTS)
        notes = Notes({entry.name: dict(enumerate(entry.chunks)) for entry in cut_off.files})
        moved = bounced.write_missing(folder, plans(), [], notes=notes, **DEFAULTS)
    assert moved.bytes <= sum(plan.size for plan in others)
    target.load(moved.files)
    assert target.is_filled()


def test_the_digest_in_memory_is_that_of_the_file(source: Layout, saved: list[FileEntry]) -> None:
    with source.through("posix-direct") as bounced:
        for plan, entry in zip(plans(), saved, strict=True):
            assert [bounced.digest_of(chunk) for chunk in plan.chunks] == entry.chunks


def test_files_that_are_longer_than_a_buffer_are_read_and_not_written(
    source: Layout, folder: int
) -> None:
    with source.through("posix-direct") as bounced:
        with pytest.raises(errors.InvalidInput, match="a buffer has"):
            bounced.write_files(folder, plans(4 * BUFFER), [], **DEFAULTS)
        assert os.listdir(folder) == []


@pytest.mark.parametrize("is_direct", [False, True])
def test_a_damaged_file_is_named_though_the_device_has_read_it(
    target: Layout,
    saved: list[FileEntry],
    tmp_path: Path,
    cuda_node: CudaNode,
    is_direct: bool,
) -> None:
    flip(tmp_path / "parts" / plans()[3].name)
    before = {*threading.enumerate()}
    with pytest.raises(errors.ArtifactCorrupt) as caught:
        target.load(saved, DirectExample() if is_direct else "posix-direct")
    assert caught.value.values["file"] == plans()[3].name
    assert caught.value.values["chunk"] == 0
    # Threads of earlier tests may end meanwhile.
    assert {*threading.enumerate()} <= before
    assert (cuda_node.here.pinned, cuda_node.here.streams) == ([], 0)


def test_a_transfer_that_is_cancelled_ends(source: Layout, folder: int) -> None:
    reported: list[int] = []

    def end(size: int) -> None:
        reported.append(size)
        if len(reported) == 3:
            raise errors.Aborted("enough")

    with pytest.raises(errors.Aborted, match="enough"):
        source.save(threads=1, advance=end)
    assert len(os.listdir(folder)) < len(plans())
    with pytest.raises(errors.ArtifactExists):
        source.save(threads=1)


def test_a_manifest_whose_chunks_are_longer_than_the_memory_is_not_read(
    source: Layout, folder: int, saved: list[FileEntry]
) -> None:
    with (
        BounceBuffered(find_backend("posix-direct"), source.range, PLACES, PAGE) as small,
        pytest.raises(errors.ArtifactCorrupt, match="longer than all of the memory"),
    ):
        small.read_files(folder, plans(), saved, [], **DEFAULTS)


# What a backend reads into the device itself is copied back and compared.


class Faulty(DirectExample):
    """Reads other bytes than are in the file, as broken hardware would."""

    @contextlib.contextmanager
    def direct(self, descriptor: int) -> Iterator[Any]:
        with super().direct(descriptor) as file, tempfile.TemporaryFile() as other:
            data = bytearray(os.pread(descriptor, os.fstat(descriptor).st_size, 0))
            data[CHUNK] ^= 1
            other.write(data)
            other.flush()
            file._descriptor = other.fileno()
            yield file


class Failing(DirectExample):
    """Puts one read on the stream and refuses the next; knows what was waited for at its end."""

    def __init__(self, here: ThisProcess) -> None:
        super().__init__()
        self._here = here
        self.waits = 0

    @contextlib.contextmanager
    def direct(self, descriptor: int) -> Iterator[Any]:
        with super().direct(descriptor) as file:
            read, count = file.read, itertools.count()

            def limited(*where: int) -> None:
                if next(count):
                    raise errors.DeviceError("no more")
                read(*where)

            file.read = limited
            before = self._here.called("cuStreamSynchronize")
            try:
                yield file
            finally:
                self.waits = self._here.called("cuStreamSynchronize") - before


@pytest.mark.parametrize("threads", [1, 5])
def test_what_the_device_has_read_itself_is_in_its_place_and_zeros_are_not_read(
    target: Layout, saved: list[FileEntry], threads: int
) -> None:
    reported: list[int] = []
    moved = target.load(saved, DirectExample(), threads=threads, advance=reported.append)
    assert target.is_filled()
    assert moved.backend == "direct-example"
    assert sum(reported) == sum(plan.size for plan in plans())
    assert moved.bytes <= sum(reported) - 18 * PAGE


def test_a_file_that_is_as_it_was_is_not_called_damaged_when_the_device_has_other_bytes(
    target: Layout, saved: list[FileEntry]
) -> None:
    with pytest.raises(errors.DeviceError, match="chunk 1") as caught:
        target.load(saved[-1:], Faulty(), only=plans()[-1:])
    assert not isinstance(caught.value, errors.ArtifactCorrupt)
    assert "posix-direct" in caught.value.next_step


def test_a_read_that_fails_ends_the_load_once_those_on_the_stream_are_done(
    target: Layout, saved: list[FileEntry], cuda_node: CudaNode
) -> None:
    failing = Failing(cuda_node.here)
    with pytest.raises(errors.DeviceError, match="no more"):
        target.load(saved[-1:], failing, only=plans()[-1:], threads=1)
    assert failing.waits == 1
    assert (cuda_node.here.pinned, cuda_node.here.streams) == ([], 0)


def test_what_a_device_does_not_read_goes_through_the_host(source: Layout, target: Layout) -> None:
    moved = source.save(DirectExample())
    assert moved.backend == "posix-buffered"
    # Files whose bytes fill no memory are only verified.
    alone = [without_memory(plan) for plan in plans()]
    assert target.load(moved.files, DirectExample(), only=alone).backend == "posix-buffered"


# KvikIO, by a fake of it that has GPUDirect Storage. The real one is met in test_cuda.py.


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[None]:
    """The fake, which does what the parameter says."""
    monkeypatch.syspath_prepend(FAKE_KVIKIO)
    monkeypatch.setenv("FAKE_KVIKIO", getattr(request, "param", ""))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "kvikio"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("kvikio", "way"),
    [("gds", "gds"), ("compat", "gds-compat"), ("", "gds-compat")],
    indirect=["kvikio"],
)
def test_kvikio_reads_into_the_device_and_only_gpudirect_storage_is_called_so(
    target: Layout, saved: list[FileEntry], kvikio: None, way: str
) -> None:
    before = open_descriptors()
    assert target.load(saved, "gds", threads=5).backend == way
    assert target.is_filled()
    assert open_descriptors() == before


@pytest.mark.parametrize(
    ("kvikio", "why"),
    [
        ("open", "KvikIO cannot be used: cuFile error at: /src 5030: GPUDirect"),
        ("read", "KvikIO cannot read into the device: cuFile error: device pointer"),
        ("empty", "KvikIO cannot read into the device: the file ends before"),
    ],
    indirect=["kvikio"],
)
def test_what_kvikio_cannot_read_is_refused_with_the_way_through_the_host(
    target: Layout, saved: list[FileEntry], kvikio: None, why: str
) -> None:
    with pytest.raises(errors.DeviceError, match=why) as caught:
        target.load(saved, "gds")
    assert "SNAPBACK_TRANSFER_BACKEND=posix-direct" in caught.value.next_step


def test_a_kvikio_that_cannot_be_imported_is_refused_when_a_part_is_loaded(
    target: Layout,
    saved: list[FileEntry],
    tmp_path: Path,
    kvikio: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "kvikio.py").write_text("raise ImportError('libcufile.so.0 is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(errors.DeviceError, match=r"libcufile\.so\.0"):
        target.load(saved, "gds")


def test_memory_of_the_host_is_moved_as_by_posix_direct(folder: int, kvikio: None) -> None:
    memory = Memory(SIZES).fill(1)
    backend = find_backend("gds")
    moved = write(backend, folder, plans(), memory)
    into = Memory(SIZES)
    read(backend, folder, plans(), moved, into)
    assert into.bytes() == memory.bytes()
    assert moved.backend.startswith("posix-")


# What is encrypted between the buffers and the files.

SHARD = 64 * PAGE
INFOS = [
    AllocationInfo(id=f"a{slot}", size=size, aligned=GRANULE, tag="", slot=slot)
    for slot, size in enumerate(SIZES)
]
ENTRIES, LENGTHS = place(INFOS, shard_bytes=SHARD)
PLANS = plan_files(ENTRIES, LENGTHS, chunk_bytes=[8 * PAGE] * len(LENGTHS))


class HostDevice:
    """The `DeviceMemory` port over memory of the host, and its own `Copier`."""

    def __init__(self) -> None:
        self.memory = bytearray(GRANULE * len(SIZES))

    def copier(self, size: int) -> HostCopier:
        return HostCopier(memoryview(self.memory), size)

    def values(self) -> list[bytes]:
        return [bytes(self.memory[at:][:size]) for at, size in zip(PLACES, SIZES, strict=True)]


class HostCopier:
    def __init__(self, memory: memoryview, size: int) -> None:
        self._memory = memory
        self.buffer = memoryview(bytearray(size))

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._memory[offset:][: len(into)]

    def write(self, offset: int, source: memoryview) -> None:
        self._memory[offset:][: len(source)] = source

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def task(tmp_path: Path) -> SaveTask:
    put_encryption(tmp_path / "keys")
    layout = builders.layout(device="d")
    keys = {"artifact_keys": str(tmp_path / "keys"), "encrypt": True}
    return saving(Path("/"), tmp_path / "artifacts", layout, **keys)


def filled() -> HostDevice:
    device = HostDevice()
    for at, data in zip(PLACES, values(), strict=True):
        device.memory[at : at + len(data)] = data
    return device


@contextlib.contextmanager
def encrypting(
    task: SaveTask, device: HostDevice, inner: Any = None
) -> Iterator[tuple[Ciphers, BounceBuffered]]:
    ciphers = Ciphers(ArtifactKeys(Path(task.artifact_keys)), task)
    backend = Encrypted(inner or find_backend("posix-direct", in_place=True), ciphers)
    with BounceBuffered(backend, device, PLACES, len(device.memory)) as bounced:
        yield ciphers, bounced


def there_and_back(task: SaveTask, inner: Any) -> Moved:
    """Save, clear the memory and load it again."""
    device = filled()
    with (
        opened(open_root(task.root, create=True)) as root,
        staged(root, msgspec.structs.replace(task, note_bytes=SHARD)) as staging,
        encrypting(task, device, inner) as (ciphers, bounced),
    ):
        ciphers.begin(staging)
        moved = bounced.write_files(staging.directory, PLANS, [], **DEFAULTS)
        written = [ciphers.finished(entry) for entry in moved.files]
        before = device.values()
        device.memory[:] = bytes(len(device.memory))
        bounced.read_files(staging.directory, PLANS, written, [], **DEFAULTS)
    assert device.values() == before
    return moved


def test_what_is_encrypted_is_not_read_into_a_device_past_the_host(task: SaveTask) -> None:
    # Its copies of the host have no address of a device to lend.
    there_and_back(task, DirectExample())


class Watched:
    """A backend that keeps every buffer that it is given, so that none has the place of another."""

    def __init__(self) -> None:
        self._backend = find_backend("posix-direct")
        self.buffers: list[Any] = []
        self.writes = 0

    def write_files(self, directory: int, plans: Any, buffers: Buffers, **how: Any) -> Moved:
        self.buffers += buffers
        self.writes += len(buffers)
        return self._backend.write_files(directory, plans, buffers, **how)

    def read_files(
        self, directory: int, plans: Any, entries: Any, buffers: Buffers, **how: Any
    ) -> Moved:
        self.buffers += buffers
        return self._backend.read_files(directory, plans, entries, buffers, **how)


def test_files_that_come_one_at_a_time_share_the_buffers_of_their_streams(task: SaveTask) -> None:
    watched = Watched()
    moved = there_and_back(task, watched)
    assert [entry.name for entry in moved.files] == [plan.name for plan in PLANS]
    assert watched.writes == len(PLANS) > STREAMS
    places = {ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in watched.buffers}
    assert len(places) <= STREAMS


def write_missing(
    task: SaveTask, device: HostDevice, staging: Staging, plans: list[FilePlan]
) -> tuple[Ciphers, Moved]:
    with encrypting(task, device) as (ciphers, bounced):
        ciphers.begin(staging)
        how = {"notes": staging, **DEFAULTS}
        return ciphers, bounced.write_missing(staging.directory, plans, [], **how)


def test_a_save_that_was_cut_off_goes_on_and_is_loaded_again(task: SaveTask) -> None:
    device = filled()
    task = msgspec.structs.replace(task, note_bytes=2 * SHARD)
    with opened(open_root(task.root, create=True)) as root:
        path = path_of(task)
        try:
            with staged(root, task) as staging:
                write_missing(task, device, staging, PLANS[:5])
                notes = Path(task.root, *path, ".notes").read_bytes()
                kept = {
                    name: data.read_bytes()
                    for name in (".notes", *(plan.name for plan in PLANS[:5]))
                    if (data := Path(task.root, *path, name)).exists()
                }
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            # What a killed process leaves; one that fails removes it.
            folder = Path(task.root, *path)
            folder.mkdir(mode=0o700)
            for name, data in kept.items():
                (folder / name).write_bytes(data)
        noted = read_notes(notes, note_of(task))
        assert len(noted.written) == 4, "two files at a time are noted"
        with staged(root, task) as staging:
            ciphers, moved = write_missing(task, device, staging, PLANS)
            assert ciphers.cipher.encryption == noted.encryption
            files = {entry.name: ciphers.finished(entry) for entry in moved.files}
            in_order = [files[plan.name] for plan in PLANS]
            manifest = part_manifest(task, ENTRIES, in_order, [], ciphers.cipher.encryption)
            check_part_manifest(manifest)
            for name, tags in noted.tags.items():
                entry = files[name]
                assert entry.encryption
                for index, tag in tags.items():
                    is_hole = entry.chunks[index] == zeros_digest(8 * PAGE)
                    assert is_hole or entry.encryption.tags[index] == tag
            assert moved.bytes < sum(plan.size for plan in PLANS[4:]) + PAGE
            loaded = HostDevice()
            with encrypting(task, loaded) as (opening, bounced):
                opening.open(manifest)
                bounced.read_files(staging.directory, PLANS, manifest.files, [], **DEFAULTS)
            assert loaded.values() == device.values()
