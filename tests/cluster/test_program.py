"""The operator as a program with exactly the rights of its roles, as a pod would run it."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from snapshot_operator.kube import rbac
from snapshot_operator.kube.crds import PART_OF, definitions
from snapshot_operator.kube.definitions import PATH as DEFINITIONS
from snapshot_shared import subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.objects.kubernetes import AGENT_LABEL
from tests.cluster.cluster import Cluster
from tests.cluster.rig import Rig, polled, program, sleeper
from tests.support.objects import presence

pytestmark = pytest.mark.cluster

NODES = "/api/v1/nodes"


@pytest.fixture
def rig(site: Rig) -> Rig:
    return site


async def named_nodes(rig: Rig) -> list[str]:
    return sorted(item["metadata"]["name"] for item in await rig.items(NODES))


async def label(rig: Rig, path: str, key: str, value: str | None) -> None:
    await rig.patch(path, metadata={"labels": {key: value}})


async def test_it_serves_selected_namespaces_alone(rig: Rig) -> None:
    async with program(rig, SNAPBACK_NAMESPACE_SELECTOR=f"test={rig.namespace}") as it:
        await it.until_ready()
        assert (await rig.get("leases", rbac.NAME))["spec"]["holderIdentity"]
        crd = await rig.get(DEFINITIONS, definitions()[0]["metadata"]["name"])
        assert rbac.NAME in {row["manager"] for row in crd["metadata"]["managedFields"]}
        await rig.apply("llm", sleeper("sleep 600"))
        await asyncio.sleep(2.0)
        left = await rig.get("dynamocheckpoints", "llm")
        assert "finalizers" not in left["metadata"]
        assert "status" not in left
        await label(rig, f"/api/v1/namespaces/{rig.namespace}", "test", rig.namespace)
        await polled(lambda: rig.exists("jobs", "llm"))


async def test_a_pod_is_placed_by_the_label_of_nodes_with_an_agent(
    rig: Rig, own_cluster: Cluster, shell_image: str
) -> None:
    first, second = await named_nodes(rig)
    for name in (first, second):
        await label(rig, f"{NODES}/{name}", AGENT_LABEL, None)
    async with program(rig) as it:
        await it.until_ready()
        template = sleeper()
        await rig.apply("anywhere", template, backoffLimit=2)
        message = await rig.reason("anywhere", "NoAgentOnNode")
        assert "no node has a snapshot agent" in message
        template["spec"]["nodeName"] = second
        await rig.apply("placed", template)
        assert second in await rig.reason("placed", "NoAgentOnNode")
        rows = await rig.rows("dynamocheckpoints", "anywhere")
        assert "spec.job.backoffLimit" in rows["DeprecatedFieldSet"]["message"]
        job = await rig.get("jobs", "anywhere")
        assert job["spec"]["backoffLimit"] == 0
        await rig.bus.put(subjects.NODES_BUCKET, first, encode_json(presence(first)))
        await polled(lambda: rig.exists("snapshots", "anywhere"))
        labels = (await rig.get(NODES, first))["metadata"]["labels"]
        assert labels[AGENT_LABEL] == "true"
        assert not await rig.exists("snapshots", "placed")


async def test_what_happens_to_a_checkpoint_is_in_its_events(rig: Rig) -> None:
    async with program(rig, SNAPBACK_ALLOW_GMS_SNAPSHOT="false") as it:
        await it.until_ready()
        await rig.apply("plain", sleeper("sleep 600"))
        await rig.apply("asking", sleeper("sleep 600"), gms={"enabled": True})
        assert "gpuMemoryService" in await rig.reason("asking", "GMSSnapshotDisabled")
        assert not await rig.exists("jobs", "asking")

        async def events(name: str) -> list[tuple[str, str]]:
            found = [
                item
                for item in await rig.items("events")
                if item["involvedObject"].get("kind") == "DynamoCheckpoint"
                and item["involvedObject"]["name"] == name
            ]
            return [(item["type"], item["reason"]) for item in found]

        async def are_said() -> bool:
            return bool(await events("asking")) and bool(await events("plain"))

        await polled(are_said)
        assert {type_ for type_, _ in await events("plain")} == {"Normal"}
        assert await events("asking") == [("Warning", "GMSSnapshotDisabled")]


async def test_it_is_not_ready_while_a_definition_belongs_to_another_product(
    rig: Rig, own_cluster: Cluster
) -> None:
    name = definitions()[1]["metadata"]["name"]
    await label(rig, f"{DEFINITIONS}/{name}", PART_OF[0], "other")
    try:
        async with program(rig) as it:
            why = f"CRDsOwnedByOther: {name} (of other)"
            await polled(lambda: it.ask("/readyz"), lambda said: said[0] == 503 and why in said[1])

            async def events() -> list[Any]:
                found = await rig.items("events")
                return [item for item in found if item["reason"] == "CRDsOwnedByOther"]

            (event,) = await polled(events)
            assert name in event["message"]
            assert event["involvedObject"]["name"] == rbac.NAME
            await rig.apply("llm", sleeper("sleep 600"))
            await asyncio.sleep(1.0)
            left = await rig.get("dynamocheckpoints", "llm")
            assert "finalizers" not in left["metadata"]
            await label(rig, f"{DEFINITIONS}/{name}", *PART_OF)
            await it.until_ready()
            await polled(lambda: rig.exists("jobs", "llm"))
    finally:
        await label(rig, f"{DEFINITIONS}/{name}", *PART_OF)
