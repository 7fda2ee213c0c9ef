"""The agent beside real kubelets: workers in pods are captured and restored, by orders on NATS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from pathlib import Path

import pytest

from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube import restoring
from tests.cluster import agents
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.rig import Rig, polled
from tests.cluster.simulated import GPU, container, pod, template
from tests.support.waiting import until
from tests.support.weights import flip

pytestmark = pytest.mark.cluster


async def is_quiet(nodes: Kubectl, job: str) -> bool:
    """Whether the worker of a Job has become quiet."""
    # There is no pod yet.
    with contextlib.suppress(ValueError):
        return "quiesced 1" in await agents.events_of(nodes, await agents.running(nodes, job))
    return False


async def test_a_worker_is_captured_on_one_node_and_restored_on_the_other(
    rig: Rig, nodes: Kubectl, artifacts: Path
) -> None:
    await rig.captured("llm", agents.source("--answer", "42", "--child"))
    assert list(artifacts.glob("*/*/gen-1/process/weights.bin"))
    events = await agents.events_of(nodes, await agents.running(nodes, "llm"))
    assert events[-2:] == ["quiesced 1", "snapshot-complete 1"]
    nodes.apply(agents.placeholder("again", "llm", "node-2"))
    await rig.restored("again")
    assert (await agents.events_of(nodes, "again"))[-1] == "restored 42 1024"


async def test_a_worker_whose_restore_fails_serves_cold(
    rig: Rig, nodes: Kubectl, artifacts: Path
) -> None:
    await rig.captured("llm", agents.source("--answer", "42"))
    [weights] = artifacts.glob("*/*/gen-1/process/weights.bin")
    # It is found only while they are copied into the folder of the worker.
    flip(weights, 100)
    again = agents.placeholder("again", "llm", "node-2")
    [main] = again["spec"]["containers"]
    main["startupProbe"] = restoring.startup_probe(main)
    nodes.apply(again)
    await asyncio.to_thread(nodes.wait, "pod/again", until="condition=Ready", within_s=60)
    assert await agents.events_of(nodes, "again") == ["started ", "cold"]
    found = await asyncio.to_thread(nodes.get, "pod", "again")
    # A worker that starts slowly finds the failure already, and is not started again.
    assert found["status"]["containerStatuses"][0]["restartCount"] in (0, 1)
    [row] = [row for row in found["status"]["conditions"] if row["type"] == RESTORED]
    assert (row["status"], row["reason"][:8]) == ("False", "Artifact")


async def test_weights_on_claimed_devices_are_restored_elsewhere_when_their_node_is_lost(
    rig: Rig, memory: Kubectl, artifacts: Path, own_cluster: Cluster
) -> None:
    await rig.captured("llm", agents.with_weights("node-1")["spec"], gms={})
    assert len(list(artifacts.glob("*/*/gen-1/gpu-0"))) == 1
    own_cluster.kill("node-1")
    memory.apply(agents.standby_with_weights("again", "llm", "node-2"))
    await rig.restored("again")
    words = ("exec", "again", "--container", "main", "--", sys.executable, "-c", agents.READER)
    assert await asyncio.to_thread(memory.run, *words) == "1.5 1.5 (1024, 1024)\n"
    await asyncio.to_thread(own_cluster.start, "node-1")


@pytest.mark.turns
async def test_the_gpus_of_a_worker_without_a_memory_server_are_those_of_its_kubelet(
    rig: Rig, memory: Kubectl, artifacts: Path
) -> None:
    memory.apply(template("one-gpu"))
    main = {**agents.worker("--answer", "42"), "resources": GPU}
    source = pod("source", main, claim="one-gpu", nodeSelector={"kubernetes.io/hostname": "node-1"})
    await rig.captured("llm", source["spec"])
    [root] = artifacts.glob("*/*/gen-1/root.json")
    assert json.loads(root.read_text())["facts"]["devices"] == 1
    memory.apply(agents.placeholder("without", "llm", "node-2"))
    rows = await polled(
        lambda: rig.rows("pods", "without"),
        lambda rows: rows.get(RESTORED, {}).get("status") == "False",
    )
    assert "the source had 1 GPUs, the pod has 0" in rows[RESTORED]["message"]


@pytest.mark.turns
async def test_the_fence_in_a_pod_ends_when_the_agent_that_took_it_was_killed(
    rig: Rig, memory: Kubectl, artifacts: Path
) -> None:
    await agents.arm(rig, "node-1", "facts", "crash")
    await rig.captured("llm", agents.with_weights("node-1")["spec"], gms={})
    assert [path.name for path in artifacts.glob("*/*/*")] == ["gen-2"]


@pytest.mark.turns
async def test_a_worker_goes_on_while_its_killed_agent_stays_away(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster
) -> None:
    await agents.arm(rig, "node-1", "copy-state", "stall")
    await rig.apply("llm", {"spec": agents.source("--child")})
    node = own_cluster.machine("node-1")
    folders = node.home / "kubelet" / "pods"

    def written(name: str) -> list[Path]:
        where = "*/volumes/kubernetes.io~empty-dir/snapshot-control/main"
        return list(folders.glob(f"{where}/{name}"))

    def states() -> str:
        script = (
            f"for each in $(pgrep -f {agents.TINY_WORKER}); do cut -d' ' -f3 /proc/$each/stat; done"
        )
        return node.run("sh", "-c", script)

    async def is_frozen() -> bool:
        return bool(written("quiesced")) and "T" in await asyncio.to_thread(states)

    await polled(is_frozen)
    # Without its kubelet no container is started again.
    node.send("kubelet", signal.SIGSTOP)
    try:
        [agent] = node.run("pgrep", "-f", " -m snapshot_agent.main$").split()
        node.run("kill", "-KILL", agent)
        await until(lambda: written("snapshot-aborted"), "the worker is let go", within_s=15)
        assert "T" not in await asyncio.to_thread(states)
    finally:
        node.send("kubelet", signal.SIGCONT)


@pytest.mark.turns
@pytest.mark.parametrize("component", ["kubelet", "containerd"])
async def test_a_capture_under_way_needs_neither_the_kubelet_nor_the_runtime_of_its_node(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster, component: str
) -> None:
    # It takes a moment to copy so much.
    much = ("--answer", "42", "--state-bytes", str(256 * 2**20))
    await rig.apply("llm", {"spec": agents.source(*much)})
    node = own_cluster.machine("node-1")

    async def is_quiet() -> bool:
        # By its uid: workers of other tests have left such a file, too.
        pods = await asyncio.to_thread(nodes.list, "pods", "--selector=job-name=llm")
        where = "volumes/kubernetes.io~empty-dir/snapshot-control/main/quiesced"
        folders = [node.home / "kubelet" / "pods" / each["metadata"]["uid"] for each in pods]
        return any((folder / where).exists() for folder in folders)

    await polled(is_quiet)
    await asyncio.to_thread(node.stop, component)
    try:
        await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
        nodes.apply(agents.placeholder("again", "llm", "node-2"))
        await rig.restored("again")
    finally:
        node.start_again(component)
    events = await agents.events_of(nodes, await agents.running(nodes, "llm"))
    assert events[-2:] == ["quiesced 1", "snapshot-complete 1"]


FAILS = "import os, time\nwhile not os.path.exists('/fail'): time.sleep(0.1)\nraise SystemExit(3)"


@pytest.mark.turns
async def test_a_worker_beside_a_failed_container_is_ended_if_it_is_there_to_be_captured_alone(
    rig: Rig, nodes: Kubectl
) -> None:
    await agents.arm(rig, "node-1", "facts", "stall")
    side = container("side", sys.executable, "-c", FAILS)
    source = pod("source", agents.worker("--answer", "42"), side, nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]}, sourcePolicy="Terminate")
    await polled(lambda: is_quiet(nodes, "llm"))
    words = ("exec", await agents.running(nodes, "llm"), "--container=side", "--", "touch", "/fail")
    await asyncio.to_thread(nodes.run, *words)
    failed = await rig.condition("dynamocheckpoints", "llm", "Failed", "True")
    assert failed["reason"] == "CheckpointContainerFailed"
    assert "container side" in failed["message"]
    await rig.phase("llm", "Failed")
