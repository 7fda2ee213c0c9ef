"""The TransferBackend port: what every backend has to do, ours or of another package."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import importlib
import mmap
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from gms.adapters import buffers, syscalls
from gms.adapters.backends import GROUP, find_backend
from gms.domain.transfer import PAGE, FilePlan, place, plan_files
from gms.ports import Moved, ResumableBackend, TransferBackend
from snapback_client.frames import AllocationInfo
from snapshot_shared import files
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactExists,
    ArtifactMissing,
    DeviceError,
    InvalidInput,
    NoSpace,
)
from snapshot_shared.files import open_root, opened
from snapshot_shared.object_storage import ObjectStorage, object_key, stored_chunks
from tests.scenario.disk import SimDisk
from tests.support.s3_server import s3_server

MIB = 1024 * 1024
CHUNK = 2 * PAGE
POSIX = ("posix-direct", "posix-buffered")
PINNED = "pinned-host"
IN_PLACE = "posix-direct in place"
NAMES = (*POSIX, PINNED, "example")
IN_FILES = (*NAMES, IN_PLACE)
OBJECTS = ("object in s3", "object in a folder")
PREFIX = "default/11111111-2222-3333-4444-555555555555/gen-1/gpu-0"
EXAMPLE = Path(__file__).parents[1] / "support" / "example_backend.py"


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """A folder in which the example package is installed, and which Python looks into."""
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        shutil.copy(EXAMPLE, folder)
        info = Path(folder) / "example_backend-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: example-backend\nVersion: 1\n")
        (info / "entry_points.txt").write_text(
            f"[{GROUP}]\n"
            "example = example_backend:ExampleBackend\n"
            "broken = example_backend:Missing\n"
            "other = example_backend:Moved.__class__\n"
        )
        sys.path.insert(0, folder)
        yield Path(folder)
        sys.path.remove(folder)
        sys.modules.pop("example_backend", None)


class InFiles:
    """The bytes of a part as a backend leaves them: in files, which a test can damage."""

    def read(self, folder: Path, plan: FilePlan, moved: Moved) -> bytes:
        return (folder / plan.name).read_bytes()

    def flip(self, folder: Path, plan: FilePlan, where: int) -> None:
        with (folder / plan.name).open("r+b") as shard:
            shard.seek(where)
            byte = shard.read(1)[0]
            shard.seek(where)
            shard.write(bytes([byte ^ 4]))

    def resize(self, folder: Path, plan: FilePlan, change: int) -> None:
        os.truncate(folder / plan.name, plan.size + change)

    def remove(self, folder: Path, plan: FilePlan) -> None:
        (folder / plan.name).unlink()

    def swap(self, folder: Path, one: FilePlan, other: FilePlan) -> None:
        aside = folder / "aside"
        (folder / one.name).rename(aside)
        (folder / other.name).rename(folder / one.name)
        aside.rename(folder / other.name)


class InObjects(InFiles):
    """The same in object storage: every chunk is an object."""

    def __init__(self, url: str) -> None:
        self.storage = ObjectStorage(url)

    def read(self, folder: Path, plan: FilePlan, moved: Moved) -> bytes:
        (entry,) = (each for each in moved.files if each.name == plan.name)
        stored = {index for index, _, _ in stored_chunks(entry)}
        return b"".join(
            self._get(plan, c.index, c.size) if c.index in stored else bytes(c.size)
            for c in plan.chunks
        )

    def flip(self, folder: Path, plan: FilePlan, where: int) -> None:
        chunk = plan.chunks[where // plan.chunk_bytes]
        data = bytearray(self._get(plan, chunk.index, chunk.size))
        data[where - chunk.offset] ^= 4
        self._put(plan, chunk.index, data)

    def resize(self, folder: Path, plan: FilePlan, change: int) -> None:
        chunk = plan.chunks[-1]
        data = self._get(plan, chunk.index, chunk.size)
        self._put(plan, chunk.index, data[:change] if change < 0 else data + bytes(change))

    def remove(self, folder: Path, plan: FilePlan) -> None:
        self.storage.remove(f"{PREFIX}/{plan.name}")

    def swap(self, folder: Path, one: FilePlan, other: FilePlan) -> None:
        first = self._get(one, 0, one.chunks[0].size)
        self._put(one, 0, self._get(other, 0, other.chunks[0].size))
        self._put(other, 0, first)

    def _get(self, plan: FilePlan, index: int, size: int) -> bytes:
        return b"".join(self.storage.read(object_key(PREFIX, plan.name, index), size))

    def _put(self, plan: FilePlan, index: int, data: bytes | bytearray) -> None:
        self.storage.put(object_key(PREFIX, plan.name, index), memoryview(data))


class Subject(NamedTuple):
    name: str
    backend: TransferBackend
    module: types.ModuleType
    bodies: InFiles


@pytest.fixture(scope="module")
def s3(request: pytest.FixtureRequest) -> Iterator[str]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield "s3://bucket/some/prefix"


@pytest.fixture(params=[*IN_FILES, *OBJECTS], scope="module")
def subject(
    request: pytest.FixtureRequest,
    site: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Subject]:
    bodies = InFiles()
    if request.param in OBJECTS:
        url = (
            request.getfixturevalue("s3")
            if request.param.endswith("s3")
            else tmp_path_factory.mktemp("store").as_uri()
        )
        bodies = InObjects(url)
        backend = find_backend("object", storage=url, prefix=PREFIX)
    elif request.param == IN_PLACE:
        backend = find_backend("posix-direct", in_place=True)
    else:
        backend = find_backend(request.param)
    module = importlib.import_module(type(backend).__module__)
    with pytest.MonkeyPatch.context() as patch:
        # The allocations of most cases are short.
        patch.setattr(buffers, "_IN_PLACE_BYTES", PAGE)
        yield Subject(request.param, backend, module, bodies)


class Memory:
    """Allocations side by side in mapped memory, `shift` bytes past the beginning of a page."""

    def __init__(self, sizes: Sequence[int], *, shift: int = 0) -> None:
        self.sizes = sizes
        starts, end = [], shift
        for size in sizes:
            starts.append(end)
            end += -(-size // PAGE) * PAGE
        self.map = mmap.mmap(-1, end + PAGE)
        self.views = [
            memoryview(self.map)[at : at + size] for at, size in zip(starts, sizes, strict=True)
        ]

    def fill(self, seed: int) -> Memory:
        rng = Random(seed)
        for view in self.views:
            view[:] = rng.randbytes(len(view))
        return self

    def bytes(self) -> list[bytes]:
        return [bytes(view) for view in self.views]


def plans_of(sizes: Sequence[int], *, shard: int = 4 * PAGE, chunk: int = CHUNK) -> list[FilePlan]:
    infos = [
        AllocationInfo(id=f"a{slot}", size=size, aligned=size, tag="", slot=slot)
        for slot, size in enumerate(sizes)
    ]
    entries, lengths = place(infos, shard_bytes=shard)
    return plan_files(entries, lengths, chunk_bytes=[chunk] * len(lengths))


in_files = pytest.mark.parametrize("subject", IN_FILES, indirect=True)


def ignored(_: int) -> None:
    pass


def write(
    subject: Subject, folder: int, plans: list[FilePlan], memory: Memory, threads: int = 1
) -> Moved:
    return subject.backend.write_files(
        folder, plans, memory.views, threads=threads, advance=ignored
    )


def read(
    subject: Subject, folder: int, plans: list[FilePlan], moved: Moved, memory: Memory
) -> Moved:
    return subject.backend.read_files(
        folder, plans, moved.files, memory.views, threads=2, advance=ignored
    )


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    with opened(open_root(tmp_path)) as fd:
        yield fd


@pytest.fixture
def disk(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> SimDisk:
    """A simulated disk below the backend."""
    disk = SimDisk()
    for module in (subject.module, syscalls, files):
        monkeypatch.setattr(module, "os", disk.os)
        if hasattr(module, "fcntl"):
            monkeypatch.setattr(module, "fcntl", disk.fcntl)
    return disk


SIZES = [PAGE + 5, 1, 3 * PAGE + 5, 4 * PAGE, PAGE - 1, 9 * PAGE]


@given(
    sizes=st.lists(st.integers(1, 9 * PAGE), min_size=1, max_size=8),
    shard=st.integers(1, 6),
    chunk=st.integers(1, 5),
    threads=st.integers(1, 4),
    shift=st.sampled_from([0, 0, 1, 512]),
    zeros=st.booleans(),
)
@settings(max_examples=15, deadline=None)
def test_what_is_written_is_read_again_byte_for_byte(
    subject: Subject,
    sizes: list[int],
    shard: int,
    chunk: int,
    threads: int,
    shift: int,
    zeros: bool,
) -> None:
    plans = plans_of(sizes, shard=shard * PAGE, chunk=chunk * PAGE)
    memory = Memory(sizes, shift=shift).fill(len(sizes))
    if zeros:
        memory.views[-1][:] = bytes(sizes[-1])
    before = memory.bytes()
    with tempfile.TemporaryDirectory() as path, opened(open_root(path)) as folder:
        moved = write(subject, folder, plans, memory, threads)
        assert memory.bytes() == before
        for plan, entry in zip(plans, moved.files, strict=True):
            data = subject.bodies.read(Path(path), plan, moved)
            assert (entry.name, entry.size, len(data)) == (plan.name, plan.size, plan.size)
            starts = range(0, plan.size, plan.chunk_bytes)
            pieces = [data[at : at + plan.chunk_bytes] for at in starts]
            assert [xxhash.xxh3_128_hexdigest(piece) for piece in pieces] == entry.chunks
        again = Memory(sizes, shift=shift)
        read(subject, folder, plans, moved, again)
    assert again.bytes() == before


@pytest.mark.parametrize("damaged", [False, True])
def test_a_long_chunk_comes_whole_into_memory_that_is_not_mapped_yet(
    subject: Subject, folder: int, tmp_path: Path, damaged: bool
) -> None:
    sizes = [9 * MIB + 5, 3 * MIB, 5 * MIB + 1]
    plans = plans_of(sizes, shard=32 * MIB, chunk=16 * MIB)
    memory = Memory(sizes).fill(14)
    moved = write(subject, folder, plans, memory)
    if damaged:
        subject.bodies.flip(tmp_path, plans[0], 7 * MIB)
    if subject.name not in OBJECTS:
        with opened(os.open(tmp_path / plans[0].name, os.O_RDWR)) as shard:
            os.fsync(shard)
            os.posix_fadvise(shard, 0, 0, os.POSIX_FADV_DONTNEED)
    again = Memory(sizes)
    if damaged:
        with pytest.raises(ArtifactCorrupt, match="chunk 0"):
            read(subject, folder, plans, moved, again)
        return
    read(subject, folder, plans, moved, again)
    assert again.bytes() == memory.bytes()


def test_every_byte_is_reported_once(subject: Subject, folder: int) -> None:
    plans, done = plans_of(SIZES), []
    memory = Memory(SIZES).fill(1)
    moved = subject.backend.write_files(folder, plans, memory.views, threads=3, advance=done.append)
    assert sum(done) == sum(plan.size for plan in plans)
    done.clear()
    again = Memory(SIZES)
    subject.backend.read_files(
        folder, plans, moved.files, again.views, threads=3, advance=done.append
    )
    assert sum(done) == sum(plan.size for plan in plans)


@pytest.mark.parametrize("where", [0, PAGE + 4, PAGE + 6, CHUNK - 1, CHUNK])
def test_a_flipped_bit_is_found_with_its_file_and_chunk(
    subject: Subject, folder: int, tmp_path: Path, where: int
) -> None:
    plans = plans_of(SIZES)
    moved = write(subject, folder, plans, Memory(SIZES).fill(2))
    subject.bodies.flip(tmp_path, plans[0], where)
    with pytest.raises(ArtifactCorrupt) as caught:
        read(subject, folder, plans, moved, Memory(SIZES))
    assert caught.value.values["file"] == plans[0].name
    assert caught.value.values["chunk"] == where // CHUNK


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("subject", ["posix-buffered", IN_PLACE], indirect=True)
def test_memory_that_another_process_writes_to_is_no_damage_of_the_artifact(
    subject: Subject,
    folder: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damaged: bool,
) -> None:
    plans = plans_of(SIZES)
    saved = Memory(SIZES).fill(2)
    moved = write(subject, folder, plans, saved)
    if damaged:
        subject.bodies.flip(tmp_path, plans[0], 1)
    shared = Memory(SIZES)
    real = os.preadv

    def preadv(*arguments: Any) -> int:
        done = real(*arguments)
        # Other chunks are read at the same time, and must not put the byte right again.
        shared.views[0][0] = saved.views[0][0] ^ 4
        return done

    monkeypatch.setattr(os, "preadv", preadv)
    with pytest.raises(ArtifactCorrupt if damaged else DeviceError, match="chunk 0") as caught:
        read(subject, folder, plans, moved, shared)
    assert (caught.value.values["file"], caught.value.values["chunk"]) == (plans[0].name, 0)


@pytest.mark.parametrize("change", [-1, 1, -PAGE])
def test_a_file_of_another_length_is_refused(
    subject: Subject, folder: int, tmp_path: Path, change: int
) -> None:
    plans = plans_of(SIZES)
    moved = write(subject, folder, plans, Memory(SIZES).fill(3))
    subject.bodies.resize(tmp_path, plans[1], change)
    with pytest.raises(ArtifactCorrupt):
        read(subject, folder, plans, moved, Memory(SIZES))


def test_a_missing_file_is_refused_as_missing(
    subject: Subject, folder: int, tmp_path: Path
) -> None:
    plans = plans_of(SIZES)
    moved = write(subject, folder, plans, Memory(SIZES).fill(4))
    subject.bodies.remove(tmp_path, plans[1])
    with pytest.raises(ArtifactMissing, match=plans[1].name):
        read(subject, folder, plans, moved, Memory(SIZES))


def test_bodies_that_changed_places_are_found(
    subject: Subject, folder: int, tmp_path: Path
) -> None:
    plans = plans_of(SIZES)
    assert plans[0].size == plans[1].size
    moved = write(subject, folder, plans, Memory(SIZES).fill(4))
    subject.bodies.swap(tmp_path, plans[0], plans[1])
    with pytest.raises(ArtifactCorrupt, match="damaged"):
        read(subject, folder, plans, moved, Memory(SIZES))


@in_files
def test_a_link_is_not_followed_and_a_file_is_not_written_over(
    subject: Subject, folder: int, tmp_path: Path
) -> None:
    plans = plans_of(SIZES)
    (tmp_path / plans[1].name).write_bytes(b"mine")
    with pytest.raises(ArtifactExists):
        write(subject, folder, plans, Memory(SIZES).fill(5))
    assert (tmp_path / plans[1].name).read_bytes() == b"mine"
    (tmp_path / plans[0].name).unlink()
    (tmp_path / plans[0].name).symlink_to(plans[1].name)
    with pytest.raises((ArtifactCorrupt, ArtifactExists)):
        write(subject, folder, plans, Memory(SIZES).fill(5))
    assert (tmp_path / plans[1].name).read_bytes() == b"mine"


@pytest.mark.parametrize("threads", [1, 4])
def test_what_advance_raises_ends_a_transfer_and_leaves_nothing_open(
    subject: Subject, folder: int, tmp_path: Path, threads: int
) -> None:
    plans = plans_of(SIZES * 20)
    memory = Memory(SIZES * 20).fill(6)
    reported: list[int] = []

    class Cancelled(Exception):
        pass

    def stop(size: int) -> None:
        reported.append(size)
        raise Cancelled

    subject.backend.write_files(folder, plans, memory.views, threads=threads, advance=ignored)
    for plan in plans:
        (tmp_path / plan.name).unlink(missing_ok=True)
    before = open_files()
    with pytest.raises(Cancelled):
        subject.backend.write_files(folder, plans, memory.views, threads=threads, advance=stop)
    for plan in plans:
        (tmp_path / plan.name).unlink(missing_ok=True)
    moved = write(subject, folder, plans, memory, threads)
    with pytest.raises(Cancelled):
        subject.backend.read_files(
            folder, plans, moved.files, Memory(SIZES * 20).views, threads=threads, advance=stop
        )
    assert open_files() <= before
    assert len(reported) < sum(len(plan.chunks) for plan in plans)


def open_files() -> set[str]:
    """What is open here but connections, which a client keeps for the next request."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            found.add(f"{entry.name} {entry.readlink()}")
    return {each for each in found if " socket:" not in each and "/proc/" not in each}


@in_files
def test_a_disk_that_is_full_is_named_and_nothing_stays_open(
    subject: Subject, disk: SimDisk
) -> None:
    plans = plans_of(SIZES)
    with closing(Descriptor(disk)) as folder:
        disk.capacity = sum(plan.size for plan in plans) // 2
        with pytest.raises(NoSpace):
            write(subject, folder.fd, plans, Memory(SIZES).fill(7))
        assert disk.os.open_descriptors() == [folder.fd]


class Descriptor:
    """The root of a simulated disk, open."""

    def __init__(self, disk: SimDisk) -> None:
        self.disk = disk
        self.fd = disk.os.open(disk.mount, os.O_RDONLY | os.O_DIRECTORY)

    def close(self) -> None:
        self.disk.os.close(self.fd)


@in_files
@pytest.mark.parametrize("size", [1, PAGE, 2 * PAGE, 3 * PAGE + 5])
def test_what_is_written_outlives_a_power_loss_wherever_its_name_does(
    subject: Subject, disk: SimDisk, size: int
) -> None:
    plans = plans_of([size])
    memory = Memory([size]).fill(8)
    with closing(Descriptor(disk)) as folder:
        write(subject, folder.fd, plans, memory)
    left = [dict(state.tree()) for state in disk.legal_states()]
    assert any(left), "a state in which the name is there"
    for tree in left:
        assert all(bytes(data) == memory.bytes()[0] for data in tree.values())


@in_files
def test_a_failing_fsync_is_no_success(subject: Subject, disk: SimDisk) -> None:
    with closing(Descriptor(disk)) as folder:
        disk.fail("fsync")
        with pytest.raises(OSError, match="Input/output error"):
            write(subject, folder.fd, plans_of([PAGE]), Memory([PAGE]).fill(9))


@in_files
def test_requests_that_end_early_leave_nothing_out(subject: Subject, disk: SimDisk) -> None:
    plans, memory = plans_of(SIZES), Memory(SIZES).fill(10)
    with closing(Descriptor(disk)) as folder:
        disk.fail("write", 1, 0, times=10_000)
        moved = write(subject, folder.fd, plans, memory)
        again = Memory(SIZES)
        read(subject, folder.fd, plans, moved, again)
    assert again.bytes() == memory.bytes()


def test_memory_for_a_transfer_is_bounded(subject: Subject, folder: int) -> None:
    chunk, threads, is_in_place = MIB, 4, subject.name == IN_PLACE
    sizes = [3 * MIB + 5] * 30
    fd = os.memfd_create("region")
    os.ftruncate(fd, 4 * MIB * len(sizes))
    region = memoryview(mmap.mmap(fd, 0))
    views = [region[i * 4 * MIB :][: sizes[i]] for i in range(len(sizes))]
    for i, view in enumerate(views):
        view[:] = bytes([i + 1]) * len(view)
    plans = plans_of(sizes, shard=64 * MIB, chunk=chunk)
    highest, before = 0, private_bytes()

    def look(_: int) -> None:
        nonlocal highest
        highest = max(highest, private_bytes())

    moved = subject.backend.write_files(folder, plans, views, threads=threads, advance=look)
    region[:] = bytes(len(region))
    subject.backend.read_files(folder, plans, moved.files, views, threads=threads, advance=look)
    os.close(fd)
    assert highest - before <= (2 * MIB if is_in_place else threads * chunk + 32 * MIB)
    assert all(view[-1] == i + 1 for i, view in enumerate(views))


def private_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


# What only ours promise.


@pytest.mark.parametrize("name", [*POSIX, PINNED])
def test_a_chunk_of_zeros_takes_no_room_and_is_not_read(
    name: str, folder: int, tmp_path: Path
) -> None:
    backend = find_backend(name)
    sizes = [4 * MIB, 4 * MIB]
    memory = Memory(sizes)
    memory.views[1][:] = Random(1).randbytes(4 * MIB)
    plans = plans_of(sizes, shard=16 * MIB, chunk=MIB)
    moved = backend.write_files(folder, plans, memory.views, threads=2, advance=ignored)
    assert moved.bytes == 4 * MIB
    assert moved.files[0].chunks[:4] == [xxhash.xxh3_128_hexdigest(bytes(MIB))] * 4
    found = (tmp_path / plans[0].name).stat()
    assert (found.st_size, found.st_blocks * 512 < 5 * MIB) == (8 * MIB, True)
    again = Memory(sizes)
    loaded = backend.read_files(folder, plans, moved.files, again.views, threads=2, advance=ignored)
    assert loaded.bytes == 4 * MIB
    assert again.bytes() == memory.bytes()


@pytest.mark.parametrize("subject", ["posix-direct"], indirect=True)
def test_a_file_system_without_direct_io_gets_buffered_requests_and_it_is_said(
    subject: Subject, disk: SimDisk
) -> None:
    plans, memory = plans_of(SIZES), Memory(SIZES).fill(11)
    with closing(Descriptor(disk)) as folder:
        assert write(subject, folder.fd, plans, memory).backend == "posix-direct"
        for plan in plans:
            disk.os.unlink(plan.name, dir_fd=folder.fd)
        disk.os.takes_direct = False
        moved = write(subject, folder.fd, plans, memory)
        again = Memory(SIZES)
        assert read(subject, folder.fd, plans, moved, again).backend == "posix-buffered"
    assert moved.backend == "posix-buffered"
    assert again.bytes() == memory.bytes()


@pytest.mark.parametrize("subject", ["posix-direct"], indirect=True)
def test_a_refusal_for_another_reason_than_direct_io_is_an_error(
    subject: Subject, disk: SimDisk
) -> None:
    with closing(Descriptor(disk)) as folder:
        disk.fail("write", 1, errno.EIO)
        with pytest.raises(OSError, match="Input/output error"):
            write(subject, folder.fd, plans_of([PAGE]), Memory([PAGE]).fill(12))


@pytest.mark.parametrize("cached", [True, False])
def test_direct_reads_are_for_what_the_page_cache_does_not_hold(
    folder: int, tmp_path: Path, cached: bool
) -> None:
    memory = Memory([4 * MIB]).fill(13)
    plans = plans_of([4 * MIB], shard=16 * MIB, chunk=MIB)
    moved = find_backend("posix-buffered").write_files(
        folder, plans, memory.views, threads=1, advance=ignored
    )
    with opened(os.open(tmp_path / plans[0].name, os.O_RDONLY)) as fd:
        if not cached:
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        resident = {syscalls.is_resident(fd, chunk) for chunk in plans[0].chunks}
    assert resident == {cached}
    again = Memory([4 * MIB])
    find_backend("posix-direct").read_files(
        folder, plans, moved.files, again.views, threads=1, advance=ignored
    )
    assert again.bytes() == memory.bytes()


def locked_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("VmLck:")]
    return int(line.split()[1]) * 1024


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("subject", [PINNED], indirect=True)
def test_bytes_go_through_locked_memory_with_direct_io_and_without(
    subject: Subject, disk: SimDisk, direct: bool
) -> None:
    plans, memory = plans_of(SIZES), Memory(SIZES).fill(14)
    disk.os.takes_direct = direct
    before, seen = locked_bytes(), []

    def look(_: int) -> None:
        seen.append(locked_bytes())

    with closing(Descriptor(disk)) as folder:
        moved = subject.backend.write_files(folder.fd, plans, memory.views, threads=1, advance=look)
        again = Memory(SIZES)
        subject.backend.read_files(
            folder.fd, plans, moved.files, again.views, threads=1, advance=look
        )
    assert moved.backend == PINNED
    assert again.bytes() == memory.bytes()
    (held,) = set(seen)
    assert held - before >= CHUNK, "the one thread has its buffer all the time"
    assert locked_bytes() == before


REFUSED = """
import os, resource, sys
from gms.adapters.pinned import page_locked
from snapshot_shared.errors import SnapbackError
soft, hard = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_MEMLOCK, (soft, hard))
if os.getuid() == 0:
    os.setresuid(65534, 65534, 65534)  # Root may lock what it likes.
try:
    print(len(page_locked(1 << 20)))
except SnapbackError as error:
    print(error.to_failure())
"""


def refusal(soft: int, hard: int) -> str:
    command = [sys.executable, "-c", REFUSED, str(soft), str(hard)]
    return subprocess.run(command, capture_output=True, check=True, text=True).stdout


def test_memory_that_may_not_be_locked_is_refused_with_the_limit_and_what_to_do() -> None:
    found = refusal(65536, 65536)
    assert found.startswith("MemoryLockRefused: 1048576 more bytes")
    assert "RLIMIT_MEMLOCK is 65536 bytes, 0 are locked" in found
    assert "ulimit -l" in found


def test_a_soft_limit_is_raised_as_far_as_it_may_be() -> None:
    assert refusal(65536, 2 << 20) == "1048576\n"


# How a backend is found.


def test_an_unknown_backend_is_refused_with_those_that_there_are(site: Path) -> None:
    with pytest.raises(InvalidInput, match=r"SNAPBACK_TRANSFER_BACKEND='nixl'") as caught:
        find_backend("nixl")
    expected = caught.value.values["expected"]
    assert set(expected) >= {*NAMES, "gds", "object"}


@pytest.mark.skipif(find_spec("kvikio") is not None, reason="KvikIO is installed")
def test_gds_without_kvikio_is_refused_with_what_to_install() -> None:
    with pytest.raises(InvalidInput, match="KvikIO is not installed") as caught:
        find_backend("gds")
    assert "snapback-gms[gds]" in caught.value.next_step


@pytest.mark.parametrize(("name", "why"), [("broken", "Missing"), ("other", "takes|no transfer")])
def test_a_backend_that_cannot_be_used_is_refused_with_its_entry_point(
    site: Path, name: str, why: str
) -> None:
    with pytest.raises(InvalidInput, match=why) as caught:
        find_backend(name)
    assert "example_backend:" in caught.value.message


class Notes:
    """What a killed process has noted, and what is noted now."""

    every_bytes = CHUNK

    def __init__(self, known: dict[str, dict[int, str]] | None = None) -> None:
        self.known = known or {}
        self.new: dict[str, dict[int, str]] = {}

    def written(self, name: str) -> dict[int, str]:
        return self.known.get(name, {})

    def note(self, chunks: Sequence[tuple[str, int, str]]) -> None:
        for name, index, found in chunks:
            self.new.setdefault(name, {})[index] = found


@given(
    sizes=st.lists(st.integers(1, 9 * PAGE), min_size=1, max_size=6),
    chunk=st.integers(1, 3),
    threads=st.integers(1, 3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=40, deadline=None)
def test_a_backend_that_goes_on_writes_what_was_not_proven_to_be_there(
    subject: Subject, sizes: list[int], chunk: int, threads: int, seed: int
) -> None:
    if not isinstance(subject.backend, ResumableBackend):
        pytest.skip(f"{subject.name} cannot go on")
    chance = Random(seed)
    plans = plans_of(sizes, chunk=chunk * PAGE)
    memory = Memory(sizes).fill(len(sizes))
    with tempfile.TemporaryDirectory() as path, opened(open_root(path)) as folder:

        def write_missing(notes: Notes) -> Moved:
            assert isinstance(subject.backend, ResumableBackend)
            return subject.backend.write_missing(
                folder, plans, memory.views, threads=threads, advance=ignored, notes=notes
            )

        first = Notes()
        moved = write_missing(first)
        entries = {entry.name: entry for entry in moved.files}
        for name, chunks in first.new.items():
            assert all(entries[name].chunks[index] == found for index, found in chunks.items())
        # Memory may have become another, even empty, where no fence held it.
        for view in memory.views:
            if chance.random() < 0.3:
                view[:] = bytes(len(view)) if chance.random() < 0.5 else chance.randbytes(len(view))
        known: dict[str, dict[int, str]] = {}
        missing = 0
        for plan in plans:
            file = Path(path) / plan.name
            digests = dict(enumerate(entries[plan.name].chunks))
            kept = {i: d for i, d in digests.items() if chance.random() < 0.7}
            if not kept:
                file.unlink()
            else:
                known[plan.name] = kept
                if chance.random() < 0.3:
                    os.truncate(file, chance.randrange(plan.size + 1))
            # What was cut off is zeros when the file has its size again.
            data = (file.read_bytes() if kept else b"").ljust(plan.size, b"\0")
            for piece in plan.chunks:
                wanted = buffers.digest_in_memory(piece, memory.views)
                there = data[piece.offset : piece.offset + piece.size]
                stands = kept.get(piece.index) == wanted == xxhash.xxh3_128_hexdigest(there)
                is_hole = not kept and wanted == xxhash.xxh3_128_hexdigest(bytes(piece.size))
                missing += 0 if stands or is_hole else piece.size
        again = write_missing(Notes(known))
        assert again.bytes == missing
        read_again = Memory(sizes)
        read(subject, folder, plans, again, read_again)
        assert read_again.bytes() == memory.bytes()


def test_some_chunks_of_a_file_are_read_without_the_others(subject: Subject, folder: int) -> None:
    sizes = [3 * CHUNK + 100]
    plans = plans_of(sizes, shard=8 * PAGE)
    moved = write(subject, folder, plans, Memory(sizes).fill(1))
    (plan,) = plans
    some = dataclasses.replace(plan, chunks=plan.chunks[1:3])
    found = Memory(sizes)
    subject.backend.read_files(folder, [some], moved.files, found.views, threads=2, advance=ignored)
    whole = Memory(sizes).fill(1).bytes()[0]
    wanted = bytes(CHUNK) + whole[CHUNK : 3 * CHUNK] + bytes(100)
    assert found.bytes() == [wanted]
