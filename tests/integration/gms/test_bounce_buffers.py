"""Memory that only a device addresses moves through bounce buffers, with every backend."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from gms.adapters import bounce_buffers
from gms.adapters.backends import find_backend
from gms.adapters.bounce_buffers import BounceBuffered
from gms.adapters.cuda import CudaDevice
from gms.adapters.objects import Objects
from gms.adapters.striping import in_folders
from gms.domain.transfer import PAGE, FilePlan, place, plan_files, without_memory
from gms.ports import TransferBackend
from snapback_client.cuda import CudaDriver, CudaRange
from snapback_client.frames import Access, AllocationInfo
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import (
    Aborted,
    ArtifactCorrupt,
    ArtifactExists,
    DeviceError,
    InvalidInput,
)
from snapshot_shared.files import open_root, opened
from snapshot_shared.object_storage import ObjectStorage
from tests.support.cuda_rig import CudaNode, ThisProcess
from tests.support.direct_backend import DirectExample

FAKE_KVIKIO = Path(__file__).parents[2] / "support" / "fake_kvikio"
GRANULE = 2 * 1024 * 1024
BUFFER = 8 * PAGE
CHUNK = 2 * PAGE
SIZES = [GRANULE, 3 * PAGE + 17, 100, 11 * PAGE]


class Layout:
    """Allocations on a fake GPU."""

    def __init__(self, device: CudaDevice) -> None:
        self.places = [index * GRANULE for index in range(len(SIZES))]
        size = GRANULE * len(SIZES)
        self.range = CudaRange(CudaDriver(), device.info.uuid, size, address=None, exact=False)
        for at in self.places:
            handle = device.create(GRANULE)
            descriptor = device.export(handle, Access.RW)
            device.release(handle)
            self.range.map(descriptor, at, GRANULE, writable=True)
            os.close(descriptor)

    def fill(self, values: list[bytes]) -> Layout:
        for at, data in zip(self.places, values, strict=True):
            self.range.write(at, memoryview(bytearray(data)))
        return self

    def values(self) -> list[bytes]:
        found = []
        for at, size in zip(self.places, SIZES, strict=True):
            data = bytearray(size)
            self.range.read(at, memoryview(data))
            found.append(bytes(data))
        return found

    def moved_by(self, backend: str) -> BounceBuffered:
        return self.through(find_backend(backend, in_place=True))

    def through(self, backend: TransferBackend) -> BounceBuffered:
        return BounceBuffered(backend, self.range, self.places, self.range.size)


@pytest.fixture
def device(cuda_node: CudaNode, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaDevice]:
    monkeypatch.setattr(bounce_buffers, "BUFFER_BYTES", BUFFER)
    device = CudaDevice(CudaDriver(), 0)
    yield device
    device.close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "parts").mkdir()
    with opened(open_root(tmp_path / "parts")) as directory:
        yield directory


def plans(shard: int = BUFFER) -> list[FilePlan]:
    infos = [
        AllocationInfo(id=f"a{slot}", size=size, aligned=GRANULE, tag="", slot=slot)
        for slot, size in enumerate(SIZES)
    ]
    entries, lengths = place(infos, shard_bytes=shard)
    return plan_files(entries, lengths, chunk_bytes=[CHUNK] * len(lengths))


def values() -> list[bytes]:
    found = [Random(size).randbytes(size) for size in SIZES]
    # Whole chunks of zeros, which no backend hands on.
    found[0] = found[0][: 5 * PAGE] + bytes(20 * PAGE) + found[0][25 * PAGE :]
    return found


@pytest.mark.parametrize("backend", ["posix-direct", "posix-buffered"])
@pytest.mark.parametrize("threads", [1, 5])
def test_what_was_saved_through_bounce_buffers_is_loaded_through_them(
    device: CudaDevice, folder: int, backend: str, threads: int
) -> None:
    reported: list[int] = []
    source = Layout(device).fill(values())
    with source.moved_by(backend) as bounced:
        moved = bounced.write_files(folder, plans(), [], threads=threads, advance=reported.append)
    assert [entry.name for entry in moved.files] == [plan.name for plan in plans()]
    assert sum(reported) == sum(plan.size for plan in plans())
    target = Layout(device)
    with target.moved_by(backend) as bounced:
        bounced.read_files(
            folder, plans(), moved.files, [], threads=threads, advance=lambda _: None
        )
    # To show how so many bytes differ would take minutes.
    is_same = target.values() == values()
    assert is_same
    source.range.release()
    target.range.release()


@pytest.mark.parametrize("threads", [1, 2, 8])
def test_files_in_several_folders_move_through_bounce_buffers_at_once(
    device: CudaDevice, folder: int, tmp_path: Path, threads: int
) -> None:
    (tmp_path / "other").mkdir()
    spread = [replace(plan, stripe="other" if at % 2 else "") for at, plan in enumerate(plans())]
    source, target = Layout(device).fill(values()), Layout(device)
    with opened(open_root(tmp_path / "other")) as other:
        folders = {"": folder, "other": other}
        with source.moved_by("posix-direct") as bounced:
            moved = in_folders(
                folders,
                spread,
                threads,
                lambda place, indices, few, advance: bounced.write_files(
                    place, [spread[at] for at in indices], [], threads=few, advance=advance
                ),
                lambda _: None,
            )
        assert len(os.listdir(folder)) > 1
        assert len(os.listdir(other)) > 1  # noqa: PTH208 - of a descriptor
        files = {entry.name: entry for entry in moved.files}
        entries = [files[plan.name] for plan in spread]
        with target.moved_by("posix-direct") as bounced:
            in_folders(
                folders,
                spread,
                threads,
                lambda place, indices, few, advance: bounced.read_files(
                    place,
                    [spread[at] for at in indices],
                    [entries[at] for at in indices],
                    [],
                    threads=few,
                    advance=advance,
                ),
                lambda _: None,
            )
    is_same = target.values() == values()
    assert is_same
    source.range.release()
    target.range.release()


def test_objects_of_several_buffers_at_once_make_one_part(
    device: CudaDevice, folder: int, tmp_path: Path
) -> None:
    class Slow(ObjectStorage):
        """Lets the others go first."""

        def remove(self, prefix: str) -> None:
            time.sleep(0.05)
            super().remove(prefix)

    source, storage = Layout(device).fill(values()), Slow(f"file://{tmp_path}/objects")
    with source.through(Objects(storage, "a/b")) as out:
        moved = out.write_files(folder, plans(), [], threads=5, advance=lambda _: None)
    target = Layout(device)
    with target.through(Objects(storage, "a/b")) as back:
        back.read_files(folder, plans(), moved.files, [], threads=5, advance=lambda _: None)
    assert target.values() == values()
    source.range.release()
    target.range.release()


def test_objects_of_an_older_part_are_copied_and_not_sent(
    device: CudaDevice, folder: int, tmp_path: Path
) -> None:
    source, storage = Layout(device).fill(values()), ObjectStorage(f"file://{tmp_path}/objects")
    found = []
    for part in ("a", "b"):
        objects = Objects(storage, part)
        with source.through(objects) as out:
            if found:
                out.take_from("a", found[0].files)
            found.append(out.write_files(folder, plans(), [], threads=2, advance=lambda _: None))
    older, newer = found
    assert older.bytes > newer.bytes == 0
    assert newer.files == older.files
    storage.remove("a")
    target = Layout(device)
    with target.through(Objects(storage, "b")) as back:
        back.read_files(folder, plans(), newer.files, [], threads=2, advance=lambda _: None)
    assert target.values() == values()
    source.range.release()
    target.range.release()


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


class Noted:
    """What a killed save has noted: every chunk of the files that it wrote."""

    every_bytes = CHUNK

    def __init__(self, files: Sequence[FileEntry]) -> None:
        self._files = {entry.name: dict(enumerate(entry.chunks)) for entry in files}

    def written(self, name: str) -> dict[int, str]:
        return self._files.get(name, {})

    def note(self, chunks: Sequence[tuple[str, int, str]]) -> None:
        for name, index, found in chunks:
            self._files.setdefault(name, {})[index] = found


def test_a_killed_save_goes_on_through_bounce_buffers(device: CudaDevice, folder: int) -> None:
    first, *others = plans()
    layout = Layout(device).fill(values())
    with layout.moved_by("posix-direct") as bounced:
        cut_off = bounced.write_files(folder, [first], [], threads=2, advance=lambda _: None)
        moved = bounced.write_missing(
            folder, plans(), [], threads=2, advance=lambda _: None, notes=Noted(cut_off.files)
        )
    assert moved.bytes <= sum(plan.size for plan in others)
    target = Layout(device)
    with target.moved_by("posix-direct") as bounced:
        bounced.read_files(folder, plans(), moved.files, [], threads=2, advance=lambda _: None)
    assert target.values() == values()
    layout.range.release()
    target.range.release()


def test_the_digest_in_memory_is_that_of_the_file(device: CudaDevice, folder: int) -> None:
    layout = Layout(device).fill(values())
    with layout.moved_by("posix-direct") as bounced:
        moved = bounced.write_files(folder, plans(), [], threads=2, advance=lambda _: None)
        for plan, entry in zip(plans(), moved.files, strict=True):
            assert [bounced.digest_of(chunk) for chunk in plan.chunks] == entry.chunks
    layout.range.release()


def test_files_that_are_longer_than_a_buffer_are_read_and_not_written(
    device: CudaDevice, folder: int
) -> None:
    layout = Layout(device).fill(values())
    with layout.moved_by("posix-direct") as bounced:
        with pytest.raises(InvalidInput, match="a buffer has"):
            bounced.write_files(folder, plans(4 * BUFFER), [], threads=2, advance=lambda _: None)
        assert os.listdir(folder) == []
    layout.range.release()


def test_a_damaged_chunk_ends_the_load_and_leaves_no_thread_and_no_pinned_memory(
    device: CudaDevice, folder: int, tmp_path: Path, cuda_node: CudaNode
) -> None:
    layout = Layout(device).fill(values())
    with layout.moved_by("posix-direct") as bounced:
        moved = bounced.write_files(folder, plans(), [], threads=2, advance=lambda _: None)
    damaged = tmp_path / "parts" / plans()[3].name
    data = bytearray(damaged.read_bytes())
    data[0] ^= 1
    damaged.write_bytes(data)
    before = threading.active_count()
    with layout.moved_by("posix-direct") as bounced, pytest.raises(ArtifactCorrupt) as caught:
        bounced.read_files(folder, plans(), moved.files, [], threads=2, advance=lambda _: None)
    assert caught.value.values["file"] == plans()[3].name
    assert threading.active_count() == before
    assert cuda_node.here.pinned == []
    assert cuda_node.here.streams == 0
    layout.range.release()


def test_a_transfer_that_is_cancelled_ends(device: CudaDevice, folder: int) -> None:
    reported: list[int] = []

    def end(size: int) -> None:
        reported.append(size)
        if len(reported) == 3:
            raise Aborted("enough")

    layout = Layout(device).fill(values())
    with layout.moved_by("posix-direct") as bounced:
        with pytest.raises(Aborted, match="enough"):
            bounced.write_files(folder, plans(), [], threads=1, advance=end)
        assert len(os.listdir(folder)) < len(plans())
        with pytest.raises(ArtifactExists):
            bounced.write_files(folder, plans(), [], threads=1, advance=lambda _: None)
    layout.range.release()


def test_a_manifest_whose_chunks_are_longer_than_the_memory_is_not_read(
    device: CudaDevice, folder: int
) -> None:
    layout = Layout(device).fill(values())
    with layout.moved_by("posix-direct") as bounced:
        moved = bounced.write_files(folder, plans(), [], threads=2, advance=lambda _: None)
    with (
        BounceBuffered(find_backend("posix-direct"), layout.range, layout.places, PAGE) as small,
        pytest.raises(ArtifactCorrupt, match="longer than all of the memory"),
    ):
        small.read_files(folder, plans(), moved.files, [], threads=2, advance=lambda _: None)
    layout.range.release()


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
                    raise DeviceError("no more")
                read(*where)

            file.read = limited
            before = self._here.called("cuStreamSynchronize")
            try:
                yield file
            finally:
                self.waits = self._here.called("cuStreamSynchronize") - before


@pytest.fixture
def saved(device: CudaDevice, folder: int) -> list[FileEntry]:
    layout = Layout(device).fill(values())
    with layout.moved_by("posix-direct") as bounced:
        moved = bounced.write_files(folder, plans(), [], threads=2, advance=lambda _: None)
    layout.range.release()
    return moved.files


@pytest.mark.parametrize("threads", [1, 5])
def test_what_the_device_has_read_itself_is_in_its_place_and_zeros_are_not_read(
    device: CudaDevice, folder: int, saved: list[FileEntry], threads: int
) -> None:
    target, reported = Layout(device), list[int]()
    with target.through(DirectExample()) as direct:
        moved = direct.read_files(
            folder, plans(), saved, [], threads=threads, advance=reported.append
        )
    is_same = target.values() == values()
    assert is_same
    assert moved.backend == "direct-example"
    assert sum(reported) == sum(plan.size for plan in plans())
    assert moved.bytes <= sum(reported) - 18 * PAGE
    target.range.release()


def test_a_damaged_file_is_named_though_the_device_has_read_it(
    device: CudaDevice, folder: int, saved: list[FileEntry], tmp_path: Path, cuda_node: CudaNode
) -> None:
    damaged = tmp_path / "parts" / plans()[3].name
    data = bytearray(damaged.read_bytes())
    data[0] ^= 1
    damaged.write_bytes(data)
    target, before = Layout(device), threading.active_count()
    with target.through(DirectExample()) as direct, pytest.raises(ArtifactCorrupt) as caught:
        direct.read_files(folder, plans(), saved, [], threads=2, advance=lambda _: None)
    assert caught.value.values["file"] == plans()[3].name
    assert caught.value.values["chunk"] == 0
    assert threading.active_count() == before
    assert (cuda_node.here.pinned, cuda_node.here.streams) == ([], 0)
    target.range.release()


def test_a_file_that_is_as_it_was_is_not_called_damaged_when_the_device_has_other_bytes(
    device: CudaDevice, folder: int, saved: list[FileEntry]
) -> None:
    target, last = Layout(device), plans()[-1:]
    with target.through(Faulty()) as direct, pytest.raises(DeviceError, match="chunk 1") as caught:
        direct.read_files(folder, last, saved[-1:], [], threads=2, advance=lambda _: None)
    assert not isinstance(caught.value, ArtifactCorrupt)
    assert "posix-direct" in caught.value.next_step
    target.range.release()


def test_a_read_that_fails_ends_the_load_once_those_on_the_stream_are_done(
    device: CudaDevice, folder: int, saved: list[FileEntry], cuda_node: CudaNode
) -> None:
    target, last, failing = Layout(device), plans()[-1:], Failing(cuda_node.here)
    with target.through(failing) as direct, pytest.raises(DeviceError, match="no more"):
        direct.read_files(folder, last, saved[-1:], [], threads=1, advance=lambda _: None)
    assert failing.waits == 1
    assert (cuda_node.here.pinned, cuda_node.here.streams) == ([], 0)
    target.range.release()


def test_files_whose_bytes_fill_no_memory_are_verified_through_the_host(
    device: CudaDevice, folder: int, saved: list[FileEntry]
) -> None:
    layout, alone = Layout(device), [without_memory(plan) for plan in plans()]
    with layout.through(DirectExample()) as direct:
        moved = direct.read_files(folder, alone, saved, [], threads=2, advance=lambda _: None)
    assert moved.backend == "posix-buffered"
    layout.range.release()


def test_a_backend_that_reads_into_devices_saves_through_the_host(
    device: CudaDevice, folder: int
) -> None:
    layout = Layout(device).fill(values())
    with layout.through(DirectExample()) as direct:
        moved = direct.write_files(folder, plans(), [], threads=2, advance=lambda _: None)
    assert moved.backend == "posix-buffered"
    layout.range.release()


# KvikIO, by a fake of it that has GPUDirect Storage. The real one is met in test_cuda.py.


@pytest.fixture
def kvikio(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(FAKE_KVIKIO)
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "kvikio"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    ("what", "way"), [("gds", "gds"), ("compat", "gds-compat"), ("", "gds-compat")]
)
def test_kvikio_reads_into_the_device_and_only_gpudirect_storage_is_called_so(
    device: CudaDevice,
    folder: int,
    saved: list[FileEntry],
    kvikio: None,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    way: str,
) -> None:
    monkeypatch.setenv("FAKE_KVIKIO", what)
    target, before = Layout(device), len(list(Path("/proc/self/fd").iterdir()))
    with target.moved_by("gds") as direct:
        moved = direct.read_files(folder, plans(), saved, [], threads=5, advance=lambda _: None)
    is_same = target.values() == values()
    assert is_same
    assert moved.backend == way
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    target.range.release()


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("open", "KvikIO cannot be used: cuFile error at: /src 5030: GPUDirect"),
        ("read", "KvikIO cannot read into the device: cuFile error: device pointer"),
        ("empty", "KvikIO cannot read into the device: the file ends before"),
    ],
)
def test_what_kvikio_cannot_read_is_refused_with_the_way_through_the_host(
    device: CudaDevice,
    folder: int,
    saved: list[FileEntry],
    kvikio: None,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    why: str,
) -> None:
    monkeypatch.setenv("FAKE_KVIKIO", what)
    target = Layout(device)
    with target.moved_by("gds") as direct, pytest.raises(DeviceError, match=why) as caught:
        direct.read_files(folder, plans(), saved, [], threads=2, advance=lambda _: None)
    assert "SNAPBACK_TRANSFER_BACKEND=posix-direct" in caught.value.next_step
    target.range.release()


def test_a_kvikio_that_cannot_be_imported_is_refused_when_a_part_is_loaded(
    device: CudaDevice,
    folder: int,
    saved: list[FileEntry],
    tmp_path: Path,
    kvikio: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "kvikio.py").write_text("raise ImportError('libcufile.so.0 is missing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    target = Layout(device)
    with target.moved_by("gds") as direct, pytest.raises(DeviceError, match=r"libcufile\.so\.0"):
        direct.read_files(folder, plans(), saved, [], threads=2, advance=lambda _: None)
    target.range.release()


def test_memory_of_the_host_is_moved_as_by_posix_direct(folder: int, kvikio: None) -> None:
    memory = [memoryview(bytearray(value)) for value in values()]
    backend = find_backend("gds")
    moved = backend.write_files(folder, plans(), memory, threads=2, advance=lambda _: None)
    into = [memoryview(bytearray(size)) for size in SIZES]
    backend.read_files(folder, plans(), moved.files, into, threads=2, advance=lambda _: None)
    assert [bytes(view) for view in into] == values()
    assert moved.backend.startswith("posix-")
