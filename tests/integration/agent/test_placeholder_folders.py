"""The folder of a placeholder's first program, which any container of its pod may replace."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.kubelet import is_restored, restored_below
from snapshot_agent.domain.helping import RESTORED
from snapshot_agent.ports import Process

# As the child of a helper does that carries out the request.
RESTORES = """
import socket, sys
from pathlib import Path
from snapshot_agent.domain.helping import RestoreRequest
from snapshot_agent.helper.caller import Caller
from snapshot_agent.helper.dumping import Node
from snapshot_agent.helper.restoring import restore
from snapshot_agent.helper.settling import Records
from snapshot_shared.errors import ControlFolderBroken
here = Path(sys.argv[1])
node = Node(here / "criu", here / "artifacts", here / "cgroups", Records(here / "dumps", here))
request = RestoreRequest(pid=2, start=1, within_s=60.0, folder=["part"], init=sys.argv[2])
try:
    restore(request, node, Caller(socket.socketpair()[0]))
except ControlFolderBroken as error:
    print(error.message, error.next_step)
"""


@pytest.fixture
def first() -> Iterator[Process]:
    """A process with a child."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE) as shell:
        found = procfs.read(shell.pid)
        assert found is not None
        assert shell.stdout is not None
        shell.stdout.readline()
        yield Process(*found.key)
        for each in procfs.family_of(*found.key):
            procfs.send(each, signal.SIGKILL)


def test_the_process_of_a_placeholder_is_not_read_from_behind_a_link(
    first: Process, tmp_path: Path
) -> None:
    child = procfs.child_of(first.pid)
    assert child is not None
    folder, link = tmp_path / "other-pod", tmp_path / "main"
    folder.mkdir()
    (folder / RESTORED).write_text(f"{child.pid}\n")
    link.symlink_to(folder)
    assert (restored_below(first, folder), is_restored(folder)) == (child.key, True)
    assert (restored_below(first, link), is_restored(link)) == (None, False)


@pytest.mark.parametrize("kind", ["link", "file", "nothing"])
def test_a_placeholder_without_its_folder_is_not_restored_into(tmp_path: Path, kind: str) -> None:
    (tmp_path / "artifacts" / "part").mkdir(parents=True)
    init = tmp_path / "main"
    if kind == "link":
        init.symlink_to(tmp_path / "artifacts")
    elif kind == "file":
        init.touch()
    command = [sys.executable, "-c", RESTORES, str(tmp_path), str(init)]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith(f"{init}, where")
    assert "snapback-init" in said
