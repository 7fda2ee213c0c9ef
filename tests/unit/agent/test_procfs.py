"""What the agent makes of /proc/<pid>/stat and mountinfo."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.mounts import mounts_in
from snapshot_shared.errors import ProcMalformed

HUGE = """
import ctypes, mmap, struct, sys
words = open("/proc/self/stat").read().rpartition(")")[2].split()
field = lambda number: int(words[number - 3])
huge = mmap.mmap(-1, int(sys.argv[1]), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
begin = ctypes.addressof(ctypes.c_char.from_buffer(huge))
spans = [field(number) for number in (26, 27, 45, 46, 47, 47, 28)] + [begin, begin + len(huge)] * 2
given = ctypes.create_string_buffer(struct.pack("<12QIi", *spans, 0, 0, -1))
PR_SET_MM, PR_SET_MM_MAP = 35, 14
libc = ctypes.CDLL(None, use_errno=True)
libc.prctl.argtypes = [ctypes.c_int] + [ctypes.c_ulong] * 4
size = ctypes.c_ulong(len(given) - 1).value
done = libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.addressof(given), size, 0)
print(ctypes.get_errno() if done else 0, flush=True)
sys.stdin.read()
"""
"""A program whose arguments and environment become as large as it is told, in bytes."""


@pytest.mark.parametrize(
    "line", ["", "\n", "42 (a", "42 (a)", "42 (a) S 7", "42 (a) S" + " x" * 30, "42 (a) \udcff"]
)
def test_a_line_that_is_malformed_is_an_error_with_its_path(tmp_path: Path, line: str) -> None:
    path = tmp_path / "stat"
    path.write_bytes(os.fsencode(line))
    with pytest.raises(ProcMalformed, match="stat"):
        procfs._stat(str(path), 42)


def test_the_line_of_a_process_is_read() -> None:
    found = procfs.read(os.getpid())
    assert found is not None
    assert (found.parent, found.session, found.is_running) == (os.getppid(), os.getsid(0), True)


def test_a_process_that_has_left_its_namespaces_is_gone() -> None:
    process = subprocess.Popen(["true"])
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    try:
        with pytest.raises(ProcessLookupError):
            procfs.contents(process.pid, "mountinfo")
    finally:
        process.wait()


@pytest.mark.parametrize("name", ["cmdline", "environ"])
def test_no_more_of_the_memory_of_a_process_is_read_than_the_kernel_gives_to_a_program(
    name: str,
) -> None:
    command = [sys.executable, "-c", HUGE, str(2 * procfs.MEMORY_BYTES)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        if error := int(process.stdout.readline()):
            pytest.skip(f"PR_SET_MM_MAP: {os.strerror(error)}")
        data = procfs.memory(process.pid, name)
        assert process.stdin is not None
        process.stdin.close()
    assert len(data) == procfs.MEMORY_BYTES


LINE = "36 35 98:0 /mnt1 /mnt\\0402 rw,noatime master:1 shared:2 - ext3 /dev/root rw,errors=remount"


def test_a_mount_of_others_may_have_any_name() -> None:
    odd = "/media/a\u2028b\x85\udce9"
    mounts = mounts_in(f"{LINE}\n{LINE.replace('/mnt', odd)}\n")
    assert [each.path for each in mounts] == ["/mnt 2", f"{odd} 2"]
    assert mounts_in("") == [], "a process that has ended has none"


def test_a_mount_has_its_words_without_escapes() -> None:
    (mount,) = mounts_in(LINE + "\n")
    assert (mount.id, mount.parent, mount.path, mount.fs_type) == (36, 35, "/mnt 2", "ext3")


@pytest.mark.parametrize(
    "line",
    ["", "36", LINE.partition(" - ")[0], LINE.replace("36 35", "x 35"), "36 35 98:0 / - a b c"],
)
def test_a_malformed_line_is_an_error_that_shows_it(line: str) -> None:
    with pytest.raises(ProcMalformed, match="mountinfo"):
        mounts_in(f"{LINE}\n{line}\n")
