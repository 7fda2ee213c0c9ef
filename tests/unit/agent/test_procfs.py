"""What the agent makes of /proc/<pid>/stat."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_shared.errors import ProcMalformed


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
