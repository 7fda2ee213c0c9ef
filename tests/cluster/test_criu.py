"""CRIU between real pods: a process that does nothing for it goes on in another pod."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from snapshot_api.facts import SECCOMP_LABEL
from tests.cluster.agents import CRIU, INIT, running, waiting, with_agents
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.machine import ComponentError
from tests.cluster.rig import SECCOMP_PROFILE, Rig, polled
from tests.cluster.simulated import ROOT, container, pod

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(not (CRIU.exists() and INIT.exists()), reason="run make criu init first"),
]

WORKER = ROOT / "tests/support/full_worker.py"
HEAP_MIB = 32


@pytest.fixture
def nodes(own_cluster: Cluster, nats_url: str, artifacts: Path, rig: Rig) -> Kubectl:
    """Commands in the namespace of the rig, with an agent and its helper on every node."""
    kubectl = own_cluster.kubectl.within(rig.namespace)
    return with_agents(kubectl, nats_url, artifacts, helper=True)


def worker(*arguments: str) -> dict[str, Any]:
    """Return a container with a worker that holds all that CRIU has to carry."""
    words = ("--heap-mib", str(HEAP_MIB), *arguments)
    return container(
        "main",
        *(sys.executable, str(WORKER), *words),
        volumeMounts=[{"name": "data", "mountPath": "/data"}],
        env=[{"name": "POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
    )


def source(*arguments: str) -> dict[str, Any]:
    """Return the pod of a worker."""
    return pod("source", worker(*arguments), nodeName="node-1", volumes=DATA)


DATA: list[dict[str, Any]] = [{"name": "data", "emptyDir": {}}]


def placeholder(name: str, node: str, profile: str = "") -> dict[str, Any]:
    """Return a pod that waits for its process, as admission makes it."""
    return waiting(pod(name, worker(), nodeName=node, volumes=DATA), "llm", profile)


async def said_by(nodes: Kubectl, name: str) -> list[dict[str, Any]]:
    """Return the lines that a worker has printed."""
    text = await asyncio.to_thread(nodes.run, "logs", name, "--container=main")
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]


async def did(nodes: Kubectl, name: str, what: str) -> None:
    """Wait until a worker says that it has done something."""

    async def is_done() -> bool:
        with contextlib.suppress(KubectlError, json.JSONDecodeError):
            return any(line["did"] == what for line in await said_by(nodes, name))
        return False

    await polled(is_done)


async def test_a_process_goes_on_in_a_pod_of_the_other_node_when_its_own_was_lost(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster
) -> None:
    name = await captured(rig, nodes)
    await did(nodes, name, "snapshot-complete")
    [quiet] = [line for line in await said_by(nodes, name) if line["did"].startswith("quiesced")]
    own_cluster.kill("node-1")
    try:
        nodes.apply(placeholder("again", "node-2"))
        await rig.restored("again")
        await did(nodes, "again", "restored 1")
        lines = await polled(
            lambda: said_by(nodes, "again"), lambda said: any(line["heap"] for line in said[1:])
        )
    finally:
        await asyncio.to_thread(own_cluster.start, "node-1")
    first, last = lines[0], lines[-1]
    assert first["count"] > quiet["count"]
    assert [line["count"] for line in lines] == list(range(first["count"], last["count"] + 1))
    for line in lines:
        count = line["count"]
        for way in ("child", "tcp", "named", "anonymous", "watched"):
            assert line[way] == count, way
        assert line["heap"] in (True, None)
        assert (line["ghost"], line["renamed"]) == ("still here", True)
    # The dump may have come between the question for the name of the host and the first line.
    assert {line["host"] for line in lines[1:]} == {"again"}
    assert last["threads"] > quiet["threads"]
    assert last["alarms"] > quiet["alarms"]


async def captured(rig: Rig, nodes: Kubectl, *arguments: str) -> str:
    """Capture a worker on node-1; return the name of its pod."""
    await rig.captured("llm", source(*arguments)["spec"], driver="criu")
    return await running(nodes, "llm")


@pytest.mark.turns
async def test_a_restored_process_gets_the_signals_of_its_container_and_ends_it(
    rig: Rig, nodes: Kubectl
) -> None:
    await captured(rig, nodes)
    nodes.apply(placeholder("again", "node-2"))
    await rig.restored("again")
    await did(nodes, "again", "restored 1")
    inside = ("exec", "again", "--container=main", "--")
    found = await asyncio.to_thread(nodes.run, *inside, "/usr/bin/ls", "/data")
    assert {"counts", "lock"} <= set(found.split())
    # Its own environment is that of its source.
    path = "/snapshot-control/restore-context.json"
    context = json.loads(await asyncio.to_thread(nodes.run, *inside, "/usr/bin/cat", path))
    assert context["env"]["POD_NAME"] == "again"
    end = "import os, signal; os.kill(1, signal.SIGTERM)"
    # The end of the container may kill the command: how it ends says nothing.
    await asyncio.to_thread(nodes.try_, *inside, sys.executable, "-c", end)

    async def exit_code() -> int | None:
        pod = await asyncio.to_thread(nodes.get, "pod", "again")
        [status] = pod["status"]["containerStatuses"]
        ended = status["lastState"].get("terminated") or status["state"].get("terminated")
        return int(ended["exitCode"]) if ended else None

    assert await polled(exit_code) == 7


@pytest.mark.turns
async def test_a_worker_that_only_waits_from_when_it_is_ready_is_asked_for_nothing(
    rig: Rig, nodes: Kubectl
) -> None:
    name = await captured(rig, nodes, "--waits")
    await did(nodes, name, "snapshot-complete")
    assert all("quiesced" not in line["did"] for line in await said_by(nodes, name))
    nodes.apply(placeholder("again", "node-2"))
    await rig.restored("again")
    await did(nodes, "again", "restore-complete")


async def announced(nodes: Kubectl) -> None:
    """Wait until both nodes have the label of the profile that their helpers have installed."""
    label = f"--selector={SECCOMP_LABEL}=profiles_block-iouring.json"
    await polled(
        lambda: asyncio.to_thread(nodes.list, "nodes", label), lambda found: len(found) == 2
    )


async def filters(nodes: Kubectl, name: str) -> str:
    """Return the mode of seccomp of the worker in a pod."""
    words = ("exec", name, "--container=main", "--", "/usr/bin/cat", "/proc/1/status")
    text = await asyncio.to_thread(nodes.run, *words)
    return next(line for line in text.splitlines() if line.startswith("Seccomp:"))


@pytest.mark.turns
async def test_a_worker_that_makes_an_io_uring_at_its_start_is_captured_with_no_change_by_its_user(
    rig: Rig, nodes: Kubectl
) -> None:
    await announced(nodes)
    name = await captured(rig, nodes, "--ring")
    assert await filters(nodes, name) == "Seccomp:\t2"
    # With the profile and without: what is restored has its own filter in both.
    for restored, node, profile in (
        ("again", "node-2", SECCOMP_PROFILE),
        ("unconfined", "node-1", ""),
    ):
        nodes.apply(placeholder(restored, node, profile))
        await rig.restored(restored)
        await did(nodes, restored, "restored 1")


@pytest.mark.turns
async def test_a_worker_whose_own_profile_allows_io_uring_is_refused_by_its_name_and_the_fix(
    rig: Rig, nodes: Kubectl
) -> None:
    await announced(nodes)
    spec = source("--ring")["spec"]
    spec["securityContext"] = {"seccompProfile": {"type": "Unconfined"}}
    await rig.apply("llm", {"spec": spec}, driver="criu")
    failed = await rig.condition("dynamocheckpoints", "llm", "Failed", "True")
    assert failed["reason"] == "NotEligible"
    assert "holds 1 of anon_inode:[io_uring]" in failed["message"]
    assert "seccompProfile Unconfined of the pod allows io_uring_setup" in failed["message"]
    assert f"localhostProfile: {SECCOMP_PROFILE}" in failed["message"]


async def stopped(cluster: Cluster, verb: str) -> Callable[[], Awaitable[str]]:
    """Stop CRIU while it works on node-1; return what lets it go on."""
    node = cluster.machine("node-1")

    async def signalled(name: str) -> str:
        return await asyncio.to_thread(node.run, "pkill", f"-{name}", "-f", f"[c]riu.bin {verb}")

    async def is_stopped() -> bool:
        with contextlib.suppress(ComponentError):
            await signalled("STOP")
            return True
        return False

    await polled(is_stopped)
    return lambda: signalled("CONT")


async def replaced(nodes: Kubectl, go_on: Callable[[], Awaitable[str]]) -> None:
    """Replace the services of the nodes; CRIU goes on when those of node-1 are being stopped."""
    await asyncio.to_thread(nodes.run, "rollout", "restart", "daemonset/snapback-node")
    await polled(
        lambda: asyncio.to_thread(nodes.list, "pods", "--selector=app=snapback-node"),
        lambda pods: any(
            pod["spec"]["nodeName"] == "node-1" and "deletionTimestamp" in pod["metadata"]
            for pod in pods
        ),
    )
    await go_on()
    await asyncio.to_thread(
        nodes.run, "rollout", "status", "daemonset/snapback-node", "--timeout=90s"
    )


async def dumping(cluster: Cluster) -> None:
    """Wait until a helper of node-1 has CRIU dump a worker."""
    records = cluster.machine("node-1").home / "snapback" / "helper" / "dumps"

    async with asyncio.timeout(60):
        # The folder is made by a helper that starts.
        while not any(records.glob("*")):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.002)


@pytest.mark.turns
async def test_agents_that_are_replaced_while_criu_dumps_lose_no_worker_and_leave_nothing(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster, artifacts: Path
) -> None:
    await rig.apply("llm", {"spec": source("--heap-mib", "256")["spec"]}, driver="criu")
    await dumping(own_cluster)
    node = own_cluster.machine("node-1")
    await replaced(nodes, await stopped(own_cluster, "dump"))
    # Another attempt is made once the agent is there again, for the first was undone.
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    (content,) = await asyncio.to_thread(nodes.list, "snapshotcontents")
    assert content["status"]["attempt"] > 1
    name = await running(nodes, "llm")
    await did(nodes, name, "snapshot-aborted")
    lines = await polled(lambda: said_by(nodes, name), lambda said: not said[-1]["did"])
    assert all(line["child"] == line["tcp"] == line["count"] for line in lines)
    generations = [path.name for path in artifacts.rglob("gen-*") if path.is_dir()]
    assert generations == [f"gen-{content['status']['attempt']}"]
    assert not list((node.home / "snapback" / "helper" / "dumps").iterdir())
    assert node.run("sh", "-c", "pgrep -f [c]riu.bin || true") == ""
    worker_pid = node.run("pgrep", "-o", "-f", "full_worker.py").strip()
    network = f"--net=/proc/{worker_pid}/ns/net"
    tables = node.run("nsenter", network, str(CRIU.with_name("nft")), "list", "tables")
    assert "CRIU" not in tables
    assert "/criu-" not in node.run("cat", "/proc/self/mountinfo")


@pytest.mark.turns
async def test_agents_that_are_replaced_while_criu_restores_end_no_restore(
    rig: Rig, nodes: Kubectl, own_cluster: Cluster
) -> None:
    await captured(rig, nodes, "--heap-mib", "256")
    nodes.apply(placeholder("again", "node-1"))
    await replaced(nodes, await stopped(own_cluster, "restore"))
    await rig.restored("again")
    await did(nodes, "again", "restored 1")
    (restore,) = await asyncio.to_thread(nodes.list, "snapshotrestores")
    assert restore["status"]["attempt"] == 1


COPIES = 8
ROUNDS = int(os.environ.get("ROUNDS", "1"))
"""How often all copies are restored at once."""


@pytest.mark.turns
async def test_copies_that_are_restored_at_once_go_on_all(rig: Rig, nodes: Kubectl) -> None:
    await captured(rig, nodes)
    for number in range(ROUNDS):
        names = [f"copy-{number}-{copy}" for copy in range(COPIES)]
        for copy, name in enumerate(names):
            nodes.apply(placeholder(name, f"node-{copy % 2 + 1}"))
        await asyncio.gather(*map(rig.restored, names))
        for name in names:
            await did(nodes, name, "restored 1")
        await asyncio.to_thread(nodes.run, "delete", "pod", *names, "--grace-period=1")
