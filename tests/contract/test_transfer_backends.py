"""The TransferBackend port: what every backend has to do, ours or of another package."""

from __future__ import annotations

import errno
import importlib
import os
import shutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pytest
import xxhash

from gms.adapters import buffers, syscalls
from gms.adapters.backends import GROUP, find_backend
from gms.conformance.transfers import (
    CHUNK,
    MIB,
    SIZES,
    Bodies,
    FileBackendContract,
    Memory,
    TransferBackendContract,
    ignored,
    plans_of,
    read,
    write,
)
from gms.domain.transfer import PAGE, FilePlan
from gms.ports import Moved, TransferBackend
from snapshot_shared import files, holes
from snapshot_shared.errors import ArtifactCorrupt, DeviceError, InvalidInput, NoSpace
from snapshot_shared.files import open_root, opened
from snapshot_shared.object_storage import ObjectStorage, object_key, stored_chunks
from tests.scenario.disk import SimDisk
from tests.support.s3_server import s3_server

# The tests of each backend start processes, which `make test-fast` has no time for.
pytestmark = pytest.mark.waits

POSIX = ("posix-direct", "posix-buffered")
PINNED = "pinned-host"
IN_PLACE = "posix-direct in place"
NAMES = (*POSIX, PINNED, "example")
IN_FILES = (*NAMES, IN_PLACE)
OBJECTS = ("object in s3", "object in a folder")
PREFIX = "default/11111111-2222-3333-4444-555555555555/gen-1/gpu-0"
EXAMPLE = Path(__file__).parents[2] / "deploy" / "examples" / "transfer_backend"


@pytest.fixture(scope="module")
def site() -> Iterator[Path]:
    """A folder in which the example package is installed, and which Python looks into."""
    with tempfile.TemporaryDirectory(prefix="site-") as folder:
        shutil.copy(EXAMPLE / "example_backend.py", folder)
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


class InObjects(Bodies):
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
    bodies: Bodies


@pytest.fixture(scope="module")
def s3(request: pytest.FixtureRequest) -> Iterator[str]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield "s3://bucket/some/prefix"


@pytest.fixture(params=[*IN_FILES, *OBJECTS], scope="module")
def subject(
    request: pytest.FixtureRequest, site: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Subject]:
    bodies: Bodies = Bodies()
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


in_files = pytest.mark.parametrize("subject", IN_FILES, indirect=True)


class Given:
    """The fixtures of the contract, from the parameter of `subject`."""

    @pytest.fixture(scope="module")
    def backend(self, subject: Subject) -> TransferBackend:
        return subject.backend

    @pytest.fixture(scope="module")
    def bodies(self, subject: Subject) -> Bodies:
        return subject.bodies

    @pytest.fixture(scope="module")
    def in_place(self, subject: Subject) -> bool:
        return subject.name == IN_PLACE


@in_files
class TestInFiles(Given, FileBackendContract):
    pass


@pytest.mark.parametrize("subject", OBJECTS, indirect=True)
class TestInObjects(Given, TransferBackendContract):
    pass


def test_a_package_tests_its_own_backend_with_the_contract(tmp_path: Path) -> None:
    """Run the tests of the example as its authors do, with their files alone."""
    shutil.copytree(EXAMPLE, tmp_path / "package")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "package",
        env={k: v for k, v in os.environ.items() if not k.startswith("PYTEST")},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert " passed, 1 skipped" in done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    with opened(open_root(tmp_path)) as fd:
        yield fd


@pytest.fixture
def disk(subject: Subject, monkeypatch: pytest.MonkeyPatch) -> SimDisk:
    """A simulated disk below the backend."""
    disk = SimDisk()
    for module in (subject.module, syscalls, files, holes):
        monkeypatch.setattr(module, "os", disk.os)
        if hasattr(module, "fcntl"):
            monkeypatch.setattr(module, "fcntl", disk.fcntl)
    return disk


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("subject", ["posix-buffered", IN_PLACE], indirect=True)
def test_memory_that_another_process_writes_to_is_no_damage_of_the_artifact(
    subject: Subject, folder: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, damaged: bool
) -> None:
    plans = plans_of(SIZES)
    saved = Memory(SIZES).fill(2)
    moved = write(subject.backend, folder, plans, saved)
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
        read(subject.backend, folder, plans, moved, shared)
    assert (caught.value.values["file"], caught.value.values["chunk"]) == (plans[0].name, 0)


def root_of(disk: SimDisk) -> AbstractContextManager[int]:
    """Open the root of a simulated disk."""
    return opened(disk.os.open(disk.mount, os.O_RDONLY | os.O_DIRECTORY))


@in_files
def test_a_disk_that_is_full_is_named_and_nothing_stays_open(
    subject: Subject, disk: SimDisk
) -> None:
    plans = plans_of(SIZES)
    with root_of(disk) as folder:
        disk.capacity = sum(plan.size for plan in plans) // 2
        with pytest.raises(NoSpace):
            write(subject.backend, folder, plans, Memory(SIZES).fill(7))
        assert disk.os.open_descriptors() == [folder]


@in_files
@pytest.mark.parametrize("size", [1, PAGE, 2 * PAGE, 3 * PAGE + 5])
def test_what_is_written_outlives_a_power_loss_wherever_its_name_does(
    subject: Subject, disk: SimDisk, size: int
) -> None:
    plans = plans_of([size])
    memory = Memory([size]).fill(8)
    with root_of(disk) as folder:
        write(subject.backend, folder, plans, memory)
    left = [dict(state.tree()) for state in disk.legal_states()]
    assert any(left), "a state in which the name is there"
    for tree in left:
        assert all(bytes(data) == memory.bytes()[0] for data in tree.values())


@in_files
@pytest.mark.parametrize("fault", [("fsync",), ("write", 1, errno.EIO)])
def test_a_failing_fsync_or_write_is_no_success(
    subject: Subject, disk: SimDisk, fault: tuple[Any, ...]
) -> None:
    with root_of(disk) as folder:
        disk.fail(*fault)
        with pytest.raises(OSError, match="Input/output error"):
            write(subject.backend, folder, plans_of([PAGE]), Memory([PAGE]).fill(9))


@in_files
def test_requests_that_end_early_leave_nothing_out(subject: Subject, disk: SimDisk) -> None:
    plans, memory = plans_of(SIZES), Memory(SIZES).fill(10)
    with root_of(disk) as folder:
        disk.fail("write", 1, 0, times=10_000)
        moved = write(subject.backend, folder, plans, memory)
        again = Memory(SIZES)
        read(subject.backend, folder, plans, moved, again)
    assert again.bytes() == memory.bytes()


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
    moved = write(backend, folder, plans, memory, threads=2)
    assert moved.bytes == 4 * MIB
    assert moved.files[0].chunks[:4] == [xxhash.xxh3_128_hexdigest(bytes(MIB))] * 4
    found = (tmp_path / plans[0].name).stat()
    assert (found.st_size, found.st_blocks * 512 < 5 * MIB) == (8 * MIB, True)
    again = Memory(sizes)
    loaded = read(backend, folder, plans, moved, again)
    assert loaded.bytes == 4 * MIB
    assert again.bytes() == memory.bytes()


@pytest.mark.parametrize("subject", ["posix-direct"], indirect=True)
def test_a_file_system_without_direct_io_gets_buffered_requests_and_it_is_said(
    subject: Subject, disk: SimDisk
) -> None:
    plans, memory = plans_of(SIZES), Memory(SIZES).fill(11)
    with root_of(disk) as folder:
        assert write(subject.backend, folder, plans, memory).backend == "posix-direct"
        for plan in plans:
            disk.os.unlink(plan.name, dir_fd=folder)
        disk.os.takes_direct = False
        moved = write(subject.backend, folder, plans, memory)
        again = Memory(SIZES)
        assert read(subject.backend, folder, plans, moved, again).backend == "posix-buffered"
    assert moved.backend == "posix-buffered"
    assert again.bytes() == memory.bytes()


@pytest.mark.parametrize("cached", [True, False])
def test_direct_reads_are_for_what_the_page_cache_does_not_hold(
    folder: int, tmp_path: Path, cached: bool
) -> None:
    memory = Memory([4 * MIB]).fill(13)
    plans = plans_of([4 * MIB], shard=16 * MIB, chunk=MIB)
    moved = write(find_backend("posix-buffered"), folder, plans, memory)
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

    with root_of(disk) as folder:
        moved = subject.backend.write_files(folder, plans, memory.views, threads=1, advance=look)
        again = Memory(SIZES)
        subject.backend.read_files(folder, plans, moved.files, again.views, threads=1, advance=look)
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
    # A soft limit is raised as far as it may be.
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
