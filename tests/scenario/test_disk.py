"""The simulated disk behaves as Linux does, and forgets what a power loss may take."""

from __future__ import annotations

import errno
import fcntl
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.scenario.disk import Owner, SimDisk
from tests.unit.tables import each

RW = os.O_RDWR | os.O_CREAT
A, B = Owner("a", "agent"), Owner("b", "agent")


class _World:
    """A disk whose caller a test chooses."""

    def __init__(self) -> None:
        self.who = A
        self.disk = SimDisk(lambda: self.who)
        self.os = self.disk.os

    def put(self, path: str, data: bytes, *, fsync: bool = True) -> None:
        fd = self.os.open(f"/sim/{path}", RW)
        self.os.write(fd, data)
        if fsync:
            self.os.fsync(fd)
        self.os.close(fd)

    def secure(self, path: str, data: bytes) -> None:
        """Put a file into the root that no power loss takes."""
        self.put(path, data)
        self.sync_folder()

    def sync_folder(self) -> None:
        fd = self.os.open("/sim", os.O_RDONLY | os.O_DIRECTORY)
        self.os.fsync(fd)
        self.os.close(fd)

    def states(self, path: str) -> set[bytes | None]:
        """Give what may stand at a path after a power loss."""
        found = (state.tree().get(f"/{path}") for state in self.disk.legal_states())
        return {None if data is None else bytes(data) for data in found}  # type: ignore[arg-type]


def _within(os_: Any, path: str, flags: int, *actions: Callable[[int], object]) -> object:
    """Open a file and give what the last of the actions on it gives."""
    fd = os_.open(path, flags)
    try:
        return [action(fd) for action in actions][-1:]
    finally:
        os_.close(fd)


def _sparse(os_: Any, base: str) -> object:
    buffer = bytearray(4)
    pieces = [memoryview(buffer)[:1], memoryview(buffer)[1:]]
    return (
        _within(
            os_,
            f"{base}/f",
            os.O_RDWR,
            lambda fd: os_.ftruncate(fd, 6),
            lambda fd: os_.pwritev(fd, [b"ab", memoryview(b"c")], 8),
            lambda fd: os_.preadv(fd, pieces, 5),
            lambda fd: os_.pread(fd, 99, 0),
        ),
        bytes(buffer),
    )


def _append(os_: Any, base: str) -> object:
    return _within(
        os_,
        f"{base}/f",
        os.O_WRONLY | os.O_APPEND,
        lambda fd: os_.write(fd, b"more"),
        lambda fd: os_.pwritev(fd, [b"!"], 0),
        lambda fd: os_.fstat(fd).st_size,
    )


def _duplicate(os_: Any, base: str) -> object:
    def rest(fd: int) -> object:
        other = os_.dup(fd)
        os_.read(fd, 2)
        try:
            return os_.read(other, 99)
        finally:
            os_.close(other)

    return _within(os_, f"{base}/f", os.O_RDONLY, rest)


def _unlinked_open(os_: Any, base: str) -> object:
    def look(fd: int) -> object:
        os_.unlink(f"{base}/f")
        return os_.read(fd, 9), os_.fstat(fd).st_nlink, os_.path.exists(f"{base}/f")

    return _within(os_, f"{base}/f", os.O_RDONLY, look)


def _from_a_folder(os_: Any, base: str) -> object:
    def look(fd: int) -> object:
        os_.mkdir("in", 0o700, dir_fd=fd)
        os_.link("g", "in/x", src_dir_fd=fd, dst_dir_fd=fd, follow_symlinks=False)
        names = sorted(os_.listdir(fd))
        modes = [os_.stat(name, dir_fd=fd, follow_symlinks=False).st_mode for name in names]
        return names, [oct(mode)[:4] for mode in modes], os_.stat("../f", dir_fd=fd).st_size

    return _within(os_, f"{base}/d", os.O_RDONLY | os.O_DIRECTORY, look)


def _hard_links(os_: Any, base: str) -> object:
    os_.link(f"{base}/f", f"{base}/h")
    return os_.stat(f"{base}/h").st_nlink


def _rename_over(os_: Any, base: str) -> object:
    os_.rename(f"{base}/f", f"{base}/d/g")
    return sorted(os_.listdir(base)), os_.stat(f"{base}/d/g").st_size


def _rename_folder_over_full(os_: Any, base: str) -> object:
    os_.mkdir(f"{base}/e")
    return os_.rename(f"{base}/e", f"{base}/d")


# Each is done in a folder with the files f and d/g.
CALLS: dict[str, Callable[[Any, str], object]] = {
    "exclusive": lambda os_, base: os_.open(f"{base}/f", RW | os.O_EXCL),
    "folder for writing": lambda os_, base: os_.open(f"{base}/d", os.O_RDWR),
    "file as folder": lambda os_, base: os_.open(f"{base}/f", os.O_RDONLY | os.O_DIRECTORY),
    "through a file": lambda os_, base: os_.open(f"{base}/f/x", os.O_RDONLY),
    "long name": lambda os_, base: os_.mkdir(f"{base}/{'x' * 256}"),
    "mkdir twice": lambda os_, base: os_.mkdir(f"{base}/d"),
    "rmdir of a full one": lambda os_, base: os_.rmdir(f"{base}/d"),
    "unlink of a folder": lambda os_, base: os_.unlink(f"{base}/d"),
    "link over": lambda os_, base: os_.link(f"{base}/f", f"{base}/d/g"),
    "hard links": _hard_links,
    "rename over": _rename_over,
    "rename file over folder": lambda os_, base: os_.rename(f"{base}/f", f"{base}/d"),
    "rename folder over full": _rename_folder_over_full,
    "append": _append,
    "sparse": _sparse,
    "write to read-only": lambda os_, base: _within(
        os_, f"{base}/f", os.O_RDONLY, lambda fd: os_.write(fd, b"x")
    ),
    "duplicate": _duplicate,
    "unlinked while open": _unlinked_open,
    "from a folder": _from_a_folder,
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_each_call_ends_as_on_the_real_file_system(
    call: Callable[[Any, str], object], tmp_path: Path
) -> None:
    found: list[object] = []
    for module, base in ((os, str(tmp_path)), (SimDisk().os, "/sim")):
        module.mkdir(f"{base}/d")
        for name in ("f", "d/g"):
            fd = module.open(f"{base}/{name}", RW, 0o600)
            module.write(fd, b"old " + name.encode())
            module.close(fd)
        try:
            found.append(call(module, base))
        except OSError as error:
            found.append(error.errno)
    assert found[0] == found[1]


@each(
    ("old", "new", "states"),
    [
        (b"", b"data", {b"", b"d", b"da", b"dat", b"data", bytes(4)}),
        # Only what was not there before can read as zeros.
        (b"old!", b"new", {b"old!", b"nld!", b"ned!", b"new!"}),
        # Its blocks are kept apart.
        (
            b"",
            b"x" * 8192,
            {b"x" * kept for kept in (0, 1, 4096, 8191, 8192)}
            | {bytes(8192), bytes(4096) + b"x" * 4096, b"x" * 4096 + bytes(4096)},
        ),
    ],
)
def test_an_unsynced_write_may_be_lost_cut_or_zeroed(
    old: bytes, new: bytes, states: set[bytes]
) -> None:
    world = _World()
    world.secure("f", old)
    world.put("f", new, fsync=False)
    assert world.states("f") == states


def test_a_rename_is_one_change_and_may_come_before_the_data() -> None:
    world = _World()
    world.secure("f", b"old")
    world.put("t", b"new", fsync=False)
    world.os.rename("/sim/t", "/sim/f")
    pairs = {
        (tree.get("/t") is None, bytes(tree["/f"]))  # type: ignore[arg-type]
        for tree in (state.tree() for state in world.disk.legal_states())
    }
    assert {(True, b"old"), (True, b""), (True, b"new"), (False, b"old")} <= pairs
    assert (False, b"new") not in pairs


def test_a_random_loss_is_one_of_the_legal_states_and_leaves_nothing_in_doubt() -> None:
    seen = set()
    for seed in range(60):
        world = _World()
        world.put("f", b"ab", fsync=False)
        world.put("g", b"", fsync=False)
        legal = {state.key() for state in world.disk.legal_states()}
        world.disk.power_lost("a", random.Random(seed))
        assert world.disk.key() in legal
        assert [state.key() for state in world.disk.legal_states()] == [world.disk.key()]
        seen.add(world.disk.key())
    assert len(seen) > 5


def test_only_what_the_lost_machine_did_is_in_doubt() -> None:
    for seed in range(40):
        world = _World()
        world.put("f", b"", fsync=False)
        world.sync_folder()
        world.put("f", b"aa", fsync=False)
        world.who = B
        fd = world.os.open("/sim/f", os.O_RDWR)
        world.os.pwritev(fd, [b"bb"], 2)
        world.disk.power_lost("a", random.Random(seed))
        assert world.os.pread(fd, 9, 0)[2:] == b"bb"
        assert len(world.states("f")) > 1


def test_the_descriptors_and_locks_of_a_dead_process_are_gone_its_data_is_not() -> None:
    world = _World()
    world.put("f", b"data", fsync=False)
    fd = world.os.open("/sim/f", RW)
    world.disk.fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    world.who = B
    mine = world.os.open("/sim/f", RW)
    with pytest.raises(BlockingIOError):
        world.disk.fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    world.disk.process_died(A)
    world.disk.fcntl.flock(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
    with pytest.raises(OSError, match="Bad file"):
        world.os.read(fd, 1)
    world.os.close(fd)
    assert world.os.read(mine, 9) == b"data"
    assert world.os.open_descriptors() == [mine]


def test_a_full_disk_takes_what_fits_and_gives_back_what_is_freed() -> None:
    world = _World()
    world.disk.capacity = 6
    world.put("f", b"data")
    fd = world.os.open("/sim/g", RW)
    world.os.ftruncate(fd, 100)
    assert world.os.pwritev(fd, [b"xyz"], 50) == 2
    with pytest.raises(OSError, match="No space") as caught:
        world.os.pwritev(fd, [b"z"], 52)
    assert caught.value.errno == errno.ENOSPC
    assert world.os.fstatvfs(fd).f_bavail == 0
    world.os.unlink("/sim/f")
    assert world.os.pwritev(fd, [b"zzzzz"], 52) == 4


def test_one_machine_can_be_out_of_space_alone() -> None:
    world = _World()
    world.disk.limits["a"] = 2
    world.put("g", b"12")
    with pytest.raises(OSError, match="No space"):
        world.put("h", b"3")
    world.who = B
    world.put("i", b"plenty")


@each("operation", ["write", "fsync", "open", "mkdir"])
def test_the_chosen_call_fails_once(operation: str) -> None:
    world = _World()

    def call_each() -> None:
        world.os.mkdir(f"/sim/d{world.disk.operations}")
        world.put("f", b"data")

    world.disk.fail(operation, 2)
    call_each()
    with pytest.raises(OSError, match="Input/output"):
        call_each()
    call_each()


def test_a_short_write_transfers_half() -> None:
    world = _World()
    world.disk.fail("write", 1, 0)
    world.put("f", b"data")
    assert world.os.stat("/sim/f").st_size == 2


def test_data_of_a_failed_fsync_is_not_saved_by_the_next_that_succeeds() -> None:
    world = _World()
    world.secure("f", b"")
    fd = world.os.open("/sim/f", RW)
    world.os.write(fd, b"data")
    world.disk.fail("fsync")
    with pytest.raises(OSError, match="Input/output"):
        world.os.fsync(fd)
    world.os.fsync(fd)
    assert world.states("f") == {b"data", bytes(4)}
    world.os.pwritev(fd, [b"DATA"], 0)
    world.os.fsync(fd)
    assert world.states("f") == {b"DATA"}
