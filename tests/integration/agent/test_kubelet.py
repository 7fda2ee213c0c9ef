"""The workers of a kubelet, as an agent finds and ends them without it."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from snapshot_agent.adapters.kubelet import KubeletPods
from snapshot_agent.adapters.processes import LocalProcesses
from snapshot_shared.orders import PodRef
from snapshot_shared.volumes import CONTROL_VOLUME, folder_of
from tests.support.agent_rig import fresh_uid, is_gone
from tests.support.hanging import HangingRoot
from tests.support.waiting import until

SOON_S = 8.0
GROUPS = Path("/sys/fs/cgroup")
CONTAINER = """
echo $$ >"$1/cgroup.procs" && mount --bind "$2" "$2" && exec sleep 600
"""

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or not os.access(GROUPS, os.W_OK) or not shutil.which("unshare"),
    reason="needs root, a cgroup file system that can be written, and unshare of util-linux",
)


class Container(NamedTuple):
    """A process in the cgroup of a pod, with the mount that a kubelet makes."""

    pod: PodRef
    process: subprocess.Popen[bytes]
    kubelet: Path


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    pod = PodRef(namespace="default", name="worker", uid=fresh_uid(), container="main")
    kubelet = tmp_path / "kubelet"
    said = kubelet / "pods" / pod.uid / "containers" / "main" / "log"
    for folder in (said.parent, Path(folder_of(kubelet, pod.uid, CONTROL_VOLUME), "main")):
        folder.mkdir(parents=True)
    said.touch()
    memory = GROUPS / "memory"
    top = (memory if memory.is_dir() else GROUPS) / f"snapback-{uuid.uuid4()}"
    group = top / f"pod{pod.uid}" / "main"
    group.mkdir(parents=True)
    command = ["unshare", "--mount", "sh", "-c", CONTAINER, "sh", group, said]
    process = subprocess.Popen(command, start_new_session=True)
    try:
        yield Container(pod, process, kubelet)
    finally:
        process.kill()
        process.wait()
        for folder in (group, group.parent, top):
            folder.rmdir()


async def begun(container: Container) -> None:
    program = Path(f"/proc/{container.process.pid}/comm")
    await until(lambda: program.read_text() == "sleep\n", "the start of the container")


async def test_a_worker_whose_arguments_cannot_be_read_is_found_without_them(
    container: Container, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(container)
    memory = HangingRoot(Path(f"/proc/{container.process.pid}/cmdline"), monkeypatch)
    pods = KubeletPods(LocalProcesses(), container.kubelet, tmp_path / "state")
    memory.hang()
    try:
        for _ in range(2):
            found = await asyncio.wait_for(pods.resolve(container.pod), SOON_S)
            assert found.running().process.pid == container.process.pid
            assert found.command == ()
        # A thread for the process, not for each look at it.
        assert memory.waiting == 1
    finally:
        memory.answer()
    await until(lambda: not memory.waiting, "the end of the read")
    assert (await pods.resolve(container.pod)).command == ["sleep", "600"]
    assert memory.in_the_loop == []


async def test_a_pod_is_ended_without_a_look_at_the_environment_of_any_process(
    container: Container, bystander: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begun(container)
    pids = (bystander, container.process.pid)
    memories = [HangingRoot(Path(f"/proc/{pid}/environ"), monkeypatch) for pid in pids]
    launcher = LocalProcesses()
    pods = KubeletPods(launcher, container.kubelet, tmp_path / "state")
    try:
        await asyncio.wait_for(pods.end_pod(container.pod.uid, 5.0), SOON_S)
    finally:
        launcher.close()
    assert is_gone(container.process.pid)
    assert [memory.calls for memory in memories] == [0, 0]
