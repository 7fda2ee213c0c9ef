"""A node of a real cluster is drained: its labelled worker goes on on the other node."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapshot_operator.kube import shaping
from snapshot_shared import subjects
from snapshot_shared.api import Fault, SimReply, SimRequest
from snapshot_shared.bus import Bus
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.ids import NodeName
from tests.cluster.agents import with_agents, worker
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl
from tests.cluster.operators import Operator
from tests.cluster.simulated import pod, until

pytestmark = [pytest.mark.cluster, pytest.mark.turns, pytest.mark.waits]

DRAIN = ("drain", "node-1", "--capture")


class Drained(NamedTuple):
    """A namespace with a worker on node-1, and how snapshotctl reaches the cluster."""

    kubectl: Kubectl
    url: str

    def snapshotctl(self, *words: str) -> subprocess.CompletedProcess[str]:
        where = ("--server", self.url, "--kubeconfig", str(self.kubectl.kubeconfig))
        return self.kubectl.snapshotctl(*where, *words)

    def events(self, name: str) -> list[str]:
        """Return what a worker has written of itself."""
        return self.kubectl.run("exec", name, "--", "cat", "/events").splitlines()

    def stall(self, **request: Any) -> None:
        """Switch a fault of the agent of node-1 on or off."""

        async def ask() -> bytes:
            bus = Bus(self.url, "test")
            await bus.connect()
            try:
                subject = subjects.rpc(NodeName("node-1"), "agent", "sim")
                data = encode_json(SimRequest(**request))
                return await bus.request(subject, data, timeout_s=10.0)
            finally:
                await bus.close()

        assert decode_json(asyncio.run(ask()), SimReply).failure is None


@pytest.fixture
def rig(
    own_cluster: Cluster,
    operator: Operator,
    nats_url_session: str,
    namespace: Kubectl,
    artifacts: Path,
) -> Iterator[Drained]:
    """An agent on every node, and a worker on node-1 that is captured when that is drained."""
    with_agents(namespace, nats_url_session, artifacts)
    source = pod("llm", worker("--answer", "42"), nodeSelector={"kubernetes.io/hostname": "node-1"})
    source["metadata"]["labels"] = {"app": "llm", "nvidia.com/capture-on-drain": "true"}
    shaping.with_control_directory(source["spec"], source["spec"]["containers"][0])
    namespace.apply(source)
    namespace.wait("pod/llm", until="condition=Ready")
    yield Drained(namespace, nats_url_session)
    namespace.run("uncordon", "node-1")
    # While operator and agents are there: nobody else lets the namespace of a snapshot go. The
    # artifact is kept for a pod that was restored from it.
    namespace.run("delete", "pods", "--selector=app=llm")
    namespace.run("delete", "snapshots", "--all", "--timeout=90s")


def test_a_labelled_worker_goes_on_where_it_is_until_a_drain_has_the_time_to_move_it(
    rig: Drained,
) -> None:
    rig.stall(arm=Fault(step="copy-state", action="stall"))
    late = rig.snapshotctl(*DRAIN, "--deadline", "10s", "-o", "json")
    assert late.returncode == 6, late
    rows = [json.loads(line) for line in late.stdout.splitlines()]
    states = {row["pod"]: row for row in rows if "state" in row}
    assert states["llm"]["state"] == "late"
    until(lambda: "snapshot-aborted 1" in rig.events("llm"), "the worker goes on")
    assert rig.kubectl.get("node", "node-1")["spec"]["unschedulable"]
    rig.stall(clear=True)
    done = rig.snapshotctl(*DRAIN, "--timeout", "3m")
    assert "pod/llm -n " in done.stdout, done
    found = rig.kubectl.list("pods", "--selector=app=llm")
    [moved] = [each for each in found if not each["metadata"].get("deletionTimestamp")]
    name = moved["metadata"]["name"]
    assert f"goes on as pod/{name} on node-2" in done.stdout, done
    assert moved["spec"]["nodeName"] == "node-2"
    assert rig.events(name)[-1].startswith("restored 42")
    again = rig.snapshotctl(*DRAIN)
    assert "pod/llm" not in again.stdout
