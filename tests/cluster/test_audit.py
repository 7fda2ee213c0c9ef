"""What the API server has written down of a whole capture and restore: who has asked for what."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from snapshot_operator.kube import rbac
from snapshot_operator.kube.controllers import CONTROLLERS
from snapshot_operator.kube.store import RESOURCES
from tests.cluster.captures import CONTENTS, Captures
from tests.cluster.cluster import Cluster
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import Program, Rig, polled, program

pytestmark = pytest.mark.cluster


@pytest.fixture
def rig(site: Rig) -> Rig:
    return site


CONTROLLERS_OF_CLUSTER = ("system:serviceaccount:kube-system:", "system:kube-controller-manager")


class AuditLog:
    """What the API server has answered since this was made, or since `forget`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = 0
        self.forget()

    def forget(self) -> None:
        self._start = self._path.stat().st_size

    def read(self) -> list[Any]:
        with self._path.open("rb") as file:
            file.seek(self._start)
            return [json.loads(line) for line in file if line.endswith(b"\n")]

    def of(self, rig: Rig) -> list[Any]:
        """Return the requests of the operator."""
        return [event for event in self.read() if event["user"]["username"] == operator_of(rig)]


@pytest.fixture
def audit(own_cluster: Cluster) -> AuditLog:
    return AuditLog(own_cluster.audit_log)


def operator_of(rig: Rig) -> str:
    return f"system:serviceaccount:{rig.namespace}:{rbac.NAME}"


async def test_a_status_has_one_writer_and_agents_do_not_ask_the_api_server(
    captures: Captures, rig: Rig, audit: AuditLog
) -> None:
    async with program(rig) as operator:
        await operator.until_ready()
        await captures.apply("llm")
        await captures.ended("llm")
    requests = audit.read()
    assert not [request for request in requests if request["responseStatus"]["code"] in (401, 403)]
    writers = defaultdict(set)
    for request in requests:
        object_ = request.get("objectRef", {})
        is_write = request["verb"] in ("create", "update", "patch", "delete")
        if is_write and object_.get("subresource") == "status":
            key = (object_["resource"], object_["name"])
            writers[key].add(request["user"]["username"])
    assert {resource for resource, _ in writers} == {
        *("dynamocheckpoints", "snapshots", "snapshotcontents", "snapshotrestores", "pods")
    }
    assert {user for users in writers.values() for user in users} == {operator_of(rig)}
    # An agent has no credentials; what asks without any is anonymous. The controllers of the
    # cluster remove what goes with the namespace of an earlier test.
    accounts = {request["user"]["username"] for request in requests}
    accounts = {name for name in accounts if not name.startswith(CONTROLLERS_OF_CLUSTER)}
    assert accounts <= {operator_of(rig), "admin"}
    asked = {(each["verb"], each["objectRef"]["resource"]) for each in audit.of(rig)}
    assert not {resource for _, resource in asked} & {"secrets", "configmaps"}
    assert not {("update", "pods"), ("delete", "pods"), ("update", "nodes")} & asked


async def values(operator: Program) -> dict[str, float]:
    """Return the metrics of an operator, each by its name and labels."""
    _, text = await operator.ask("/metrics")
    rows = [line.rpartition(" ") for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, _, value in rows}


async def unchanged(operator: Program) -> dict[str, float]:
    """Return how many decisions about objects of each kind were to change nothing."""
    found = await values(operator)
    return {
        controller.kind: sum(
            value
            for name, value in found.items()
            if "reconcile_duration" in name
            and "_count{" in name
            and all(f'"{word}"' in name for word in (controller.kind, "unchanged"))
        )
        for controller in CONTROLLERS
    }


async def test_objects_that_are_looked_at_again_without_a_change_cost_no_request(
    captures: Captures, rig: Rig, audit: AuditLog
) -> None:
    async with program(rig) as operator:
        await operator.until_ready()
        await captures.apply("llm")
        await captures.ended("llm")
        before, began = await unchanged(operator), time.monotonic()
        audit.forget()
        rig.proxy.requests.clear()
        ours = ("dynamocheckpoints", "snapshots", "snapshotrestores")
        note = {"annotations": {"nvidia.com/note": f"nothing for {rig.namespace}"}}
        for path in (*map(rig.path, (*ours, "pods")), CONTENTS, "/api/v1/nodes"):
            for item in await rig.items(path):
                await rig.patch(f"{path}/{item['metadata']['name']}", metadata=note)

        async def is_all_seen_again() -> bool:
            plurals = [resource.plural for resource in RESOURCES.values()]
            now = await unchanged(operator)
            [age] = [v for name, v in (await values(operator)).items() if "sweep_age" in name]
            return (
                all(now[kind] > before[kind] for kind in before)
                and all(rig.proxy.requests["WATCH", plural] > 1 for plural in plurals)
                # The stream of orders is compared with the objects every 30 s.
                and age < time.monotonic() - began
            )

        with rig.proxy.lying(Lie(410, "WATCH", reason="Expired", times=len(RESOURCES))):
            rig.proxy.cut_watches()
            await polled(is_all_seen_again)
        asked = {(each["verb"], each["objectRef"]["resource"]) for each in audit.of(rig)}
    reads = {(verb, each.plural) for verb in ("list", "watch") for each in RESOURCES.values()}
    assert asked == reads | {("update", "leases")}
