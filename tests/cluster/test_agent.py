"""The agent beside real kubelets: workers in pods are captured and restored, by orders on NATS."""

from __future__ import annotations

import asyncio
import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube import restoring, shaping
from snapshot_shared import subjects
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import NotFound
from snapshot_shared.ids import NodeName
from tests.cluster.agents import TINY_WORKER, agents, worker
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.simulated import GPU, ROOT, Driver, container, pod, template
from tests.cluster.test_operator import Rig, polled, rig
from tests.support.nats_server import nats_server

__all__ = ["rig"]
pytestmark = pytest.mark.cluster

Variable = dict[str, Any]
ON_THE_FIRST = {"kubernetes.io/hostname": "node-1"}
EXAMPLE = ROOT / "deploy/examples/worker_template.py"
READER = """
import snapback_client as client
with client.connect(0, lock="RO", deadline_s=60) as pool:
    print(pool["table"].min(), pool["table"].max(), pool["table"].shape)
"""


@pytest.fixture
def nats_url(own_cluster: Cluster, tmp_path: Path) -> Iterator[str]:
    """Where a nats-server listens that pods and this host reach."""
    with nats_server(tmp_path / "nats", address=own_cluster.host_address) as server:
        yield server.url


@pytest.fixture
def artifacts(tmp_path: Path) -> Path:
    """The artifact root of all nodes."""
    (tmp_path / "artifacts").mkdir()
    return tmp_path / "artifacts"


@pytest.fixture
def nodes(own_cluster: Cluster, nats_url: str, artifacts: Path, rig: Rig) -> Kubectl:
    """Commands in the namespace of the rig, with an agent on every node."""
    kubectl = own_cluster.kubectl.within(rig.namespace)
    kubectl.apply(agents(nats_url, artifacts))
    kubectl.run("rollout", "status", "daemonset/snapback-node", "--timeout=60s")
    return kubectl


def placeholder(name: str, source: str, node: str, **spec: Any) -> dict[str, Any]:
    """Return a pod that waits to be restored, as the webhook makes it."""
    document = pod(name, worker(standby=True), nodeName=node, **spec)
    document["metadata"]["annotations"] = {"nvidia.com/restore-from": source}
    shaping.with_control_directory(document["spec"], document["spec"]["containers"][0])
    return document


async def arm(rig: Rig, node: str, step: str, action: Any) -> None:
    """Have the agent of a node do something else at a step."""
    request = encode_json(SimRequest(arm=Fault(step=step, action=action)))
    answer = await rig.bus.request(
        subjects.rpc(NodeName(node), "agent", "sim"), request, timeout_s=10.0
    )
    assert decode_json(answer, SimReply).armed


async def running(nodes: Kubectl, job: str) -> str:
    """Return the name of the pod of a Job."""
    [found] = await asyncio.to_thread(nodes.list, "pods", f"--selector=job-name={job}")
    return str(found["metadata"]["name"])


async def events_of(nodes: Kubectl, name: str) -> list[str]:
    """Return what a worker has written of itself."""
    said = await asyncio.to_thread(nodes.run, "exec", name, "--", "cat", "/events")
    return said.splitlines()


async def restored(rig: Rig, name: str) -> None:
    """Wait until the pod says that it is restored."""

    async def is_true() -> bool:
        with contextlib.suppress(NotFound):
            rows = (await rig.get("pods", name)).get("status", {}).get("conditions", [])
            return any((row["type"], row["status"]) == (RESTORED, "True") for row in rows)
        return False

    await polled(is_true)


async def test_a_worker_is_captured_on_one_node_and_restored_on_the_other(
    rig: Rig, nodes: Kubectl, artifacts: Path
) -> None:
    source = pod("source", worker("--answer", "42", "--child"), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    assert list(artifacts.glob("*/*/gen-1/process/weights.bin"))
    events = await events_of(nodes, await running(nodes, "llm"))
    assert events[-2:] == ["quiesced 1", "snapshot-complete 1"]
    nodes.apply(placeholder("again", "llm", "node-2"))
    await restored(rig, "again")
    assert (await events_of(nodes, "again"))[-1] == "restored 42 1024"


def flip_a_byte(generation: Path) -> None:
    """Damage what is found only while it is copied into the worker's folder."""
    with (generation / "process" / "weights.bin").open("r+b") as file:
        file.seek(100)
        file.write(b"!")


def remove_the_root(generation: Path) -> None:
    """Damage what is found before the worker is touched."""
    (generation / "root.json").unlink()


@pytest.mark.parametrize("damage", [flip_a_byte, remove_the_root])
async def test_a_worker_whose_restore_fails_is_started_again_and_serves_cold(
    rig: Rig, nodes: Kubectl, artifacts: Path, damage: Callable[[Path], None]
) -> None:
    source = pod("source", worker("--answer", "42"), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    [generation] = artifacts.glob("*/*/gen-1")
    damage(generation)
    again = placeholder("again", "llm", "node-2")
    [main] = again["spec"]["containers"]
    main["startupProbe"] = restoring.startup_probe(main)
    nodes.apply(again)
    await asyncio.to_thread(nodes.wait, "pod/again", until="condition=Ready", within_s=60)
    assert await events_of(nodes, "again") == ["started ", "cold"]
    found = await asyncio.to_thread(nodes.get, "pod", "again")
    assert found["status"]["containerStatuses"][0]["restartCount"] == 1
    [row] = [row for row in found["status"]["conditions"] if row["type"] == RESTORED]
    assert (row["status"], row["reason"][:8]) == ("False", "Artifact")


@pytest.fixture
def memory(
    own_cluster: Cluster,
    nodes: Kubectl,
    nats_url: str,
    artifacts: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Kubectl]:
    """As `nodes`, with the GMS of every node, which has simulated devices for claims."""
    kubectl = own_cluster.kubectl
    kubectl.run("apply", "--filename", str(ROOT / "deploy/helm/snapback/files/device-class.yaml"))
    settings = {
        "SNAPBACK_WORLD": "kubernetes",
        "SNAPBACK_NATS_URL": nats_url,
        "SNAPBACK_ARTIFACT_ROOT": str(artifacts),
    }
    # A short name, for the path of a unix socket has at most 107 bytes.
    state = tmp_path_factory.mktemp("g")
    drivers = [
        Driver(node.name, node.home, state, kubectl, **settings) for node in own_cluster.nodes
    ]
    try:
        for driver in drivers:
            driver.start()
        yield nodes
        # The devices of a claim are given back by the drivers.
        nodes.run("delete", "jobs,pods", "--selector=app!=snapback-node")
    finally:
        for driver in drivers:
            driver.end()


def with_weights(node: str, program: Path = EXAMPLE, **main: Any) -> dict[str, Any]:
    """Return a pod of a worker that has its weights on the devices of a claim."""
    # Not by `nodeName`, as only the scheduler gives a claim its devices.
    where = {"kubernetes.io/hostname": node}
    worker = container("main", sys.executable, str(program), **main)
    server = container("gms-server", sys.executable, "-m", "gms.main")
    return pod("source", worker, initContainers=[server], nodeSelector=where)


def standby_with_weights(
    name: str, source: str, node: str, program: Path = EXAMPLE, env: Sequence[Variable] = ()
) -> dict[str, Any]:
    """Return such a pod that waits to be restored, as the webhook makes it."""
    standby = {"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"}
    document = with_weights(node, program, env=[*env, standby])
    document["metadata"] = {"name": name, "annotations": {"nvidia.com/restore-from": source}}
    [main] = document["spec"]["containers"]
    shaping.with_control_directory(document["spec"], main)
    shaping.with_devices(document["spec"], main, shaping.devices_name(source))
    shaping.with_memory_server(document["spec"], main, "none")
    return document


async def test_weights_on_claimed_devices_are_restored_elsewhere_when_their_node_is_lost(
    rig: Rig, memory: Kubectl, artifacts: Path, own_cluster: Cluster
) -> None:
    source = with_weights("node-1")["spec"]
    await rig.apply("llm", {"spec": source}, gms={})
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    assert len(list(artifacts.glob("*/*/gen-1/gpu-0"))) == 1
    own_cluster.kill("node-1")
    memory.apply(standby_with_weights("again", "llm", "node-2"))
    await restored(rig, "again")
    words = ("exec", "again", "--container", "main", "--", sys.executable, "-c", READER)
    assert await asyncio.to_thread(memory.run, *words) == "1.5 1.5 (1024, 1024)\n"
    await asyncio.to_thread(own_cluster.start, "node-1")


async def test_the_gpus_of_a_worker_without_a_memory_server_are_those_of_its_kubelet(
    rig: Rig, memory: Kubectl, artifacts: Path
) -> None:
    memory.apply(template("one-gpu"))
    main = {**worker("--answer", "42"), "resources": GPU}
    source = pod("source", main, claim="one-gpu", nodeSelector=ON_THE_FIRST)
    await rig.apply("llm", {"spec": source["spec"]})
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    [root] = artifacts.glob("*/*/gen-1/root.json")
    assert json.loads(root.read_text())["facts"]["devices"] == 1
    memory.apply(placeholder("without", "llm", "node-2"))

    async def why() -> str:
        with contextlib.suppress(NotFound):
            rows = (await rig.get("pods", "without")).get("status", {}).get("conditions", [])
            return next((row["message"] for row in rows if row["type"] == RESTORED), "")
        return ""

    assert "the source had 1 GPUs, the pod has 0" in await polled(why)


async def test_the_fence_in_a_pod_ends_when_the_agent_that_took_it_was_killed(
    rig: Rig, memory: Kubectl, artifacts: Path
) -> None:
    await arm(rig, "node-1", "facts", "crash")
    await rig.apply("llm", {"spec": with_weights("node-1")["spec"]}, gms={})
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    assert [path.name for path in artifacts.glob("*/*/*")] == ["gen-2"]


async def test_a_worker_goes_on_when_its_agent_is_killed_while_it_is_frozen(
    rig: Rig, nodes: Kubectl
) -> None:
    await arm(rig, "node-1", "copy-state", "crash")
    source = pod("source", worker("--child"), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})
    failed = await rig.condition("dynamocheckpoints", "llm", "Failed", "True")
    assert failed["reason"] == "AgentRestarted"
    name = await running(nodes, "llm")
    assert (await events_of(nodes, name))[-1] == "snapshot-aborted 1"
    states = "for each in /proc/[0-9]*/stat; do cut -d' ' -f3 $each; done"
    said = await asyncio.to_thread(nodes.run, "exec", name, "--", "sh", "-c", states)
    assert "T" not in said


async def test_a_worker_goes_on_while_its_killed_agent_stays_away(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster
) -> None:
    await arm(rig, "node-1", "copy-state", "stall")
    source = pod("source", worker("--child"), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})
    node = own_cluster.machine("node-1")
    folders = node.home / "kubelet" / "pods"

    def written(name: str) -> list[Path]:
        where = "*/volumes/kubernetes.io~empty-dir/snapshot-control/main"
        return list(folders.glob(f"{where}/{name}"))

    def states() -> str:
        script = f"for each in $(pgrep -f {TINY_WORKER}); do cut -d' ' -f3 /proc/$each/stat; done"
        return node.run("sh", "-c", script)

    async def is_frozen() -> bool:
        return bool(written("quiesced")) and "T" in await asyncio.to_thread(states)

    await polled(is_frozen)
    # Without its kubelet no container is started again.
    node.send("kubelet", signal.SIGSTOP)
    try:
        [agent] = node.run("pgrep", "-f", " -m snapshot_agent.main$").split()
        node.run("kill", "-KILL", agent)
        async with asyncio.timeout(15):

            async def is_let_go() -> bool:
                return bool(written("snapshot-aborted"))

            await polled(is_let_go)
        assert "T" not in await asyncio.to_thread(states)
    finally:
        node.send("kubelet", signal.SIGCONT)


@pytest.mark.parametrize("component", ["kubelet", "containerd"])
async def test_a_capture_under_way_needs_neither_the_kubelet_nor_the_runtime_of_its_node(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster, component: str
) -> None:
    # It takes a moment to copy so much.
    much = ("--answer", "42", "--state-bytes", str(256 * 2**20))
    source = pod("source", worker(*much), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})
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
        nodes.apply(placeholder("again", "llm", "node-2"))
        await restored(rig, "again")
    finally:
        node.start_again(component)

    async def events() -> list[str]:
        with contextlib.suppress(KubectlError, ValueError):
            return await events_of(nodes, await running(nodes, "llm"))
        return []

    assert (await polled(events))[-2:] == ["quiesced 1", "snapshot-complete 1"]


async def test_the_drain_of_a_node_ends_a_capture_with_its_reason_and_work_goes_on_elsewhere(
    rig: Rig, nodes: Kubectl
) -> None:
    await arm(rig, "node-1", "facts", "stall")
    source = pod("source", worker("--answer", "42"), nodeSelector=ON_THE_FIRST)
    await rig.apply("drained", {"spec": source["spec"]})

    async def is_quiet() -> bool:
        with contextlib.suppress(KubectlError, ValueError):
            return "quiesced 1" in await events_of(nodes, await running(nodes, "drained"))
        return False

    await polled(is_quiet)
    words = ("--ignore-daemonsets", "--force", "--delete-emptydir-data", "--timeout=60s")
    try:
        await asyncio.to_thread(nodes.run, "drain", "node-1", *words)
        failed = await rig.condition("dynamocheckpoints", "drained", "Failed", "True")
        assert failed["reason"] in (
            "SourceExited",
            "JobFailed",
            "SourcePodGone",
            "StalePodReference",
        )
        del source["spec"]["nodeSelector"]
        await rig.apply("moved", {"spec": source["spec"]})
        await rig.condition("dynamocheckpoints", "moved", "Ready", "True")
    finally:
        await asyncio.to_thread(nodes.run, "uncordon", "node-1")


FAILS = "import os, time\nwhile not os.path.exists('/fail'): time.sleep(0.1)\nraise SystemExit(3)"


@pytest.mark.parametrize(("policy", "phase"), [("Terminate", "Failed"), ("Resume", "Running")])
async def test_a_worker_beside_a_failed_container_is_ended_if_it_is_there_to_be_captured_alone(
    rig: Rig, nodes: Kubectl, policy: str, phase: str
) -> None:
    await arm(rig, "node-1", "facts", "stall")
    side = container("side", sys.executable, "-c", FAILS)
    source = pod("source", worker("--answer", "42"), side, nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]}, sourcePolicy=policy)

    async def is_quiet() -> bool:
        with contextlib.suppress(KubectlError, ValueError):
            words = ("exec", await running(nodes, "llm"), "--container=main", "--", "cat")
            return "quiesced 1" in await asyncio.to_thread(nodes.run, *words, "/events")
        return False

    await polled(is_quiet)
    name = await running(nodes, "llm")
    words = ("exec", name, "--container=side", "--", "touch", "/fail")
    await asyncio.to_thread(nodes.run, *words)
    failed = await rig.condition("dynamocheckpoints", "llm", "Failed", "True")
    assert failed["reason"] == "CheckpointContainerFailed"
    assert "container side" in failed["message"]
    await rig.phase("llm", phase)
    if phase == "Running":
        inside = ("exec", name, "--container=main", "--", "cat", "/events")
        said = await asyncio.to_thread(nodes.run, *inside)
        assert said.splitlines()[-1] == "snapshot-aborted 1"


async def test_agents_that_are_replaced_in_the_middle_of_a_capture_lose_none(
    rig: Rig, nodes: Kubectl
) -> None:
    await arm(rig, "node-1", "facts", "stall")
    source = pod("source", worker("--answer", "42"), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})

    async def is_quiet() -> bool:
        with contextlib.suppress(KubectlError, ValueError):
            return "quiesced 1" in await events_of(nodes, await running(nodes, "llm"))
        return False

    await polled(is_quiet)
    await asyncio.to_thread(nodes.run, "rollout", "restart", "daemonset/snapback-node")
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    events = await events_of(nodes, await running(nodes, "llm"))
    assert [event.split()[0] for event in events[1:]] == [
        "quiesced",
        "snapshot-aborted",
        "quiesced",
        "snapshot-complete",
    ]


async def test_a_second_agent_of_a_node_waits_for_the_end_of_the_first(
    rig: Rig, nodes: Kubectl, nats_url: str, artifacts: Path
) -> None:
    other = agents(nats_url, artifacts)
    other["metadata"]["name"] = "other"
    labels = other["spec"]["selector"]["matchLabels"] = {"app": "other"}
    other["spec"]["template"]["metadata"]["labels"] = labels
    nodes.apply(other)

    async def says_why() -> bool:
        with contextlib.suppress(KubectlError):
            words = ("logs", "daemonset/other", "--previous")
            return "another process works" in await asyncio.to_thread(nodes.run, *words)
        return False

    await polled(says_why)
    await asyncio.to_thread(nodes.run, "delete", "daemonset/snapback-node")
    words = ("rollout", "status", "daemonset/other", "--timeout=90s")
    await asyncio.to_thread(nodes.run, *words)
    source = pod("source", worker(), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
