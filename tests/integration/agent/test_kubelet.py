"""The workers of a kubelet, as an agent finds and ends them, and their folders of placeholders."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.kubelet import KubeletPods, is_restored, restored_below
from snapshot_agent.adapters.processes import LocalProcesses
from snapshot_agent.domain.helping import RESTORED
from snapshot_agent.ports import Process
from snapshot_shared.orders import PodRef
from snapshot_shared.volumes import CONTROL_VOLUME, folder_of
from tests.support.agent_rig import fresh_uid, is_gone, stat_of
from tests.support.hanging import HangingRoot
from tests.support.waiting import until

SOON_S = 8.0
GROUPS = Path("/sys/fs/cgroup")
CONTAINER = """
echo $$ >"$1/cgroup.procs" && mount --bind "$2" "$2" && exec sleep 600
"""

needs_groups = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(GROUPS, os.W_OK) or not shutil.which("unshare"),
    reason="needs root, a cgroup file system that can be written, and unshare of util-linux",
)


class Container(NamedTuple):
    """A process in the cgroup of a pod, with the mount that a kubelet makes."""

    pod: PodRef
    process: subprocess.Popen[bytes]
    kubelet: Path
    logs: Path


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    pod = PodRef(namespace="default", name="worker", uid=fresh_uid(), container="main")
    kubelet = tmp_path / "kubelet"
    said = kubelet / "pods" / pod.uid / "containers" / "main" / "log"
    for folder in (said.parent, Path(folder_of(kubelet, pod.uid, CONTROL_VOLUME), "main")):
        folder.mkdir(parents=True)
    said.touch()
    logs = tmp_path / "logs"
    (logs / f"default_worker_{pod.uid}").mkdir(parents=True)
    memory = GROUPS / "memory"
    top = (memory if memory.is_dir() else GROUPS) / f"snapback-{uuid.uuid4()}"
    group = top / f"pod{pod.uid}" / "main"
    group.mkdir(parents=True)
    command = ["unshare", "--mount", "sh", "-c", CONTAINER, "sh", group, said]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield Container(pod, process, kubelet, logs)
    finally:
        process.kill()
        process.wait()
        for folder in (group, group.parent, top):
            folder.rmdir()


async def begun(container: Container) -> None:
    program = Path(f"/proc/{container.process.pid}/comm")
    await until(lambda: program.read_text() == "sleep\n", "the start of the container")


@needs_groups
async def test_a_worker_whose_arguments_cannot_be_read_is_found_without_them(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(container)
    memory = HangingRoot(Path(f"/proc/{container.process.pid}/cmdline"), monkeypatch)
    pods = KubeletPods(LocalProcesses(), container.kubelet, container.logs, tmp_path / "state")
    with memory.hanging():
        for _ in range(2):
            found = await asyncio.wait_for(pods.resolve(container.pod), SOON_S)
            assert found.running().process.pid == container.process.pid
            assert found.command == ()
        # A thread for the process, not for each look at it.
        assert memory.waiting == 1
    await until(lambda: not memory.waiting, "the end of the read")
    assert (await pods.resolve(container.pod)).command == ["sleep", "600"]
    assert memory.in_the_loop == []


@needs_groups
async def test_a_pod_is_ended_without_a_look_at_the_environment_of_any_process(
    container: Container, bystander: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(container)
    pids = (bystander, container.process.pid)
    memories = [HangingRoot(Path(f"/proc/{pid}/environ"), monkeypatch) for pid in pids]
    launcher = LocalProcesses()
    pods = KubeletPods(launcher, container.kubelet, container.logs, tmp_path / "state")
    try:
        await asyncio.wait_for(pods.end_pod(container.pod.uid, 5.0), SOON_S)
    finally:
        launcher.close()
    assert is_gone(container.process.pid)
    assert [memory.calls for memory in memories] == [0, 0]


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
    restore(request, -1, node, Caller(socket.socketpair()[0]))
except ControlFolderBroken as error:
    print(error.message, error.next_step)
"""


@pytest.fixture
def first() -> Iterator[Process]:
    """A process with a child."""
    with subprocess.Popen(["sh", "-c", "sleep 600 & echo; wait"], stdout=subprocess.PIPE) as shell:
        found = stat_of(shell.pid)
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
