"""The agent beside real kubelets: workers in pods are captured and restored, by orders on NATS."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_operator.kube import shaping
from snapshot_shared.errors import NotFound
from tests.cluster.agents import agents, worker
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.simulated import pod
from tests.cluster.test_operator import Rig, polled, rig
from tests.support.nats_server import nats_server

__all__ = ["rig"]
pytestmark = pytest.mark.cluster


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


async def test_a_worker_is_captured_on_one_node_and_restored_on_the_other(
    rig: Rig, nodes: Kubectl, artifacts: Path
) -> None:
    source = pod("source", worker("--answer", "42", "--child"), nodeName="node-1")
    await rig.apply("llm", {"spec": source["spec"]})
    await rig.condition("dynamocheckpoints", "llm", "Ready", "True")
    assert list(artifacts.glob("*/*/gen-1/process/weights.bin"))
    [captured] = nodes.list("pods", "--selector=job-name=llm")
    name = captured["metadata"]["name"]
    events = nodes.run("exec", name, "--", "cat", "/events").splitlines()
    assert events[-2:] == ["quiesced 1", "snapshot-complete 1"]
    nodes.apply(placeholder("again", "llm", "node-2"))

    async def restored() -> bool:
        with contextlib.suppress(NotFound):
            status = (await rig.get("pods", "again")).get("status", {})
            rows = status.get("conditions", [])
            return any(
                (row["type"], row["status"]) == ("nvidia.com/Restored", "True") for row in rows
            )
        return False

    await polled(restored)
    events = (
        await asyncio.to_thread(nodes.run, "exec", "again", "--", "cat", "/events")
    ).splitlines()
    assert events[-1] == "restored 42 1024"
