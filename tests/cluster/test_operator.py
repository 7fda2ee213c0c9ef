"""The operator on a real API server: from an applied checkpoint to the first order.

`rig` has it in this process, `site` as a program with exactly the rights of its roles.
"""

from __future__ import annotations

import asyncio
from datetime import datetime, timedelta
from typing import Any

import pytest

from snapshot_api.facts import AGENT_LABEL
from snapshot_api.schema.definitions import PART_OF, definitions
from snapshot_operator.kube import rbac
from snapshot_operator.kube.definitions import PATH as DEFINITIONS
from snapshot_shared import subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import NotFound
from snapshot_shared.kube_client import KubeClient
from tests.cluster.cluster import Cluster
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import OURS, SHELL, Rig, polled, program, serving, sleeper
from tests.support.objects import presence

pytestmark = pytest.mark.cluster

NODES = "/api/v1/nodes"
DAY_S = 86_400.0
LONGEST = f"{'a' * 62}.{'b' * 190}"
"""As long as Kubernetes lets the name of an object be."""


@pytest.mark.parametrize("name", ["llm", LONGEST], ids=["short", "longest"])
async def test_a_checkpoint_leads_to_a_job_a_ready_pod_and_the_order_to_prepare_it(
    rig: Rig, name: str
) -> None:
    template = sleeper()
    # Another node may have the label of an agent still, and has no presence here.
    template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node-1"}
    await rig.apply(name, template)

    async def bound() -> str:
        for found in await rig.items("snapshots"):
            return str(found.get("status", {}).get("boundSnapshotContentName", ""))
        return ""

    content = await rig.get(f"{OURS}/snapshotcontents", await polled(bound))
    wanted = f"snap.order.node-1.agent.prepare-{content['metadata']['uid']}"
    await polled(lambda: rig.bus.subjects_in(subjects.ORDERS, wanted))
    job = await rig.get("jobs", (await rig.get("dynamocheckpoints", name))["status"]["jobName"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert "livenessProbe" not in container
    assert job["spec"]["template"]["metadata"]["labels"]["mine"] == "kept"


@pytest.mark.parametrize("ahead_s", [2 * DAY_S, -2 * DAY_S], ids=["ahead", "behind"])
async def test_an_operator_with_a_wrong_clock_goes_by_that_of_the_api_server(
    site: Rig, ahead_s: float
) -> None:
    """An operator with another clock may have begun the capture."""
    async with program(site, ahead_s=ahead_s):
        await site.apply("llm", sleeper("sleep 600"))

        async def seen() -> Any:
            found = await site.get("dynamocheckpoints", "llm")
            return found.get("status", {}).get("conditions") and found

        found = await polled(seen)
    created = datetime.fromisoformat(found["metadata"]["creationTimestamp"])
    for row in found["status"]["conditions"]:
        written = datetime.fromisoformat(row["lastTransitionTime"])
        assert abs(written - created) < timedelta(minutes=2), row
        assert row["reason"] != "DeadlineExceeded"


async def test_quantities_may_be_fractions_and_what_is_null_is_nothing(rig: Rig) -> None:
    template = sleeper("sleep 600")
    main = template["spec"]["containers"][0]
    main["resources"] = {"limits": {"cpu": 0.5, "memory": 2e8}, "requests": None}
    beside = {"name": "beside", "image": SHELL, "command": ["sleep", "600"], "resources": None}
    template["spec"]["containers"] = [main, beside]
    await rig.apply("fraction", template)
    await rig.phase("fraction", "Running")
    main, _ = (await rig.get("jobs", "fraction"))["spec"]["template"]["spec"]["containers"]
    assert main["resources"]["limits"]["cpu"] == "500m"


async def test_a_quota_that_refuses_a_job_is_said_and_waited_for(rig: Rig) -> None:
    hard = {"hard": {"count/jobs.batch": "0"}}
    await rig.post("resourcequotas", {"metadata": {"name": "jobs"}, "spec": hard})
    quota = ("resourcequotas", "jobs")
    await polled(lambda: rig.get(*quota), lambda found: found["status"].get("hard"))
    await rig.apply("many", sleeper("sleep 600"))
    assert "exceeded quota: jobs" in await rig.reason("many", "Refused")
    await rig.delete("resourcequotas", "jobs")
    await rig.phase("many", "Running")
    # The quota refused this, and nothing else was refused.
    assert {*rig.proxy.refused} == {f"POST {rig.path('jobs')}"}
    rig.proxy.refused.clear()


async def test_a_cluster_without_claims_fails_a_checkpoint_with_a_memory_server_at_once(
    rig: Rig,
) -> None:
    with rig.proxy.lying(Lie(404, "POST", "resourceclaimtemplates")):
        await rig.apply("claims", sleeper("sleep 600"), gms={})
        failed = await rig.condition("dynamocheckpoints", "claims", "Failed", "True")
    assert failed["reason"] == "DRAUnavailable"
    assert "resource.k8s.io/v1" in failed["message"]
    with pytest.raises(NotFound):
        await rig.get("jobs", "claims")


async def test_an_operator_that_loses_its_lease_during_its_first_lists_ends(
    rig: Rig, nats_url: str
) -> None:
    lost = asyncio.Event()
    async with KubeClient(rig.proxy.configuration) as client:
        with rig.proxy.lying(Lie(500, "GET")):
            operator = asyncio.ensure_future(serving(lost, client, nats_url))
            await asyncio.sleep(2.0)
            assert not operator.done()
            lost.set()
            async with asyncio.timeout(10.0):
                await operator


@pytest.mark.parametrize("pod_name", ["again", LONGEST], ids=["short", "longest"])
async def test_a_pod_that_asks_for_a_restore_gets_one_that_goes_with_it(
    rig: Rig, pod_name: str
) -> None:
    pod: dict[str, Any] = {
        "metadata": {"name": pod_name, "annotations": {"nvidia.com/restore-from": LONGEST}}
    }
    pod["spec"] = sleeper("sleep 600")["spec"]
    # As the webhook for pods has it, which does not run here.
    pod["spec"]["containers"][0]["env"] += [{"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"}]
    created = await rig.post("pods", pod)
    name = f"restore-{created['metadata']['uid']}"
    waits = await rig.condition("snapshotrestores", name, "Ready", "False")
    assert waits["reason"] == "WaitingForSnapshot"
    await rig.delete("pods", pod_name, {"gracePeriodSeconds": 0})
    await polled(lambda: rig.exists("snapshotrestores", name), lambda is_there: not is_there)


async def named_nodes(site: Rig) -> list[str]:
    return sorted(item["metadata"]["name"] for item in await site.items(NODES))


async def label(site: Rig, path: str, key: str, value: str | None) -> None:
    await site.patch(path, metadata={"labels": {key: value}})


async def test_it_serves_selected_namespaces_alone(site: Rig) -> None:
    async with program(site, SNAPBACK_NAMESPACE_SELECTOR=f"test={site.namespace}"):
        # An operator is ready before it is active.
        await polled(lambda: site.exists("leases", rbac.NAME))
        assert (await site.get("leases", rbac.NAME))["spec"]["holderIdentity"]
        crd = await site.get(DEFINITIONS, definitions()[0]["metadata"]["name"])
        assert rbac.NAME in {row["manager"] for row in crd["metadata"]["managedFields"]}
        await site.apply("llm", sleeper("sleep 600"))
        await asyncio.sleep(2.0)
        left = await site.get("dynamocheckpoints", "llm")
        assert "finalizers" not in left["metadata"]
        assert "status" not in left
        await label(site, f"/api/v1/namespaces/{site.namespace}", "test", site.namespace)
        await polled(lambda: site.exists("jobs", "llm"))


async def test_a_pod_is_placed_by_the_label_of_nodes_with_an_agent(
    site: Rig, own_cluster: Cluster, shell_image: str
) -> None:
    first, second = await named_nodes(site)
    for name in (first, second):
        await label(site, f"{NODES}/{name}", AGENT_LABEL, None)
    async with program(site):
        template = sleeper()
        await site.apply("anywhere", template, backoffLimit=2)
        message = await site.reason("anywhere", "NoAgentOnNode")
        assert "no node has a snapshot agent" in message
        template["spec"]["nodeName"] = second
        await site.apply("placed", template)
        assert second in await site.reason("placed", "NoAgentOnNode")
        rows = await site.rows("dynamocheckpoints", "anywhere")
        assert "spec.job.backoffLimit" in rows["DeprecatedFieldSet"]["message"]
        job = await site.get("jobs", "anywhere")
        assert job["spec"]["backoffLimit"] == 0
        await site.bus.put(subjects.NODES_BUCKET, first, encode_json(presence(first)))
        await polled(lambda: site.exists("snapshots", "anywhere"))
        labels = (await site.get(NODES, first))["metadata"]["labels"]
        assert labels[AGENT_LABEL] == "true"
        assert not await site.exists("snapshots", "placed")


async def test_what_happens_to_a_checkpoint_is_in_its_events(site: Rig) -> None:
    async with program(site, SNAPBACK_ALLOW_GMS_SNAPSHOT="false"):
        await site.apply("plain", sleeper("sleep 600"))
        await site.apply("asking", sleeper("sleep 600"), gms={"enabled": True})
        assert "gpuMemoryService" in await site.reason("asking", "GMSSnapshotDisabled")
        assert not await site.exists("jobs", "asking")

        async def events(name: str) -> list[tuple[str, str]]:
            found = [
                item
                for item in await site.items("events")
                if item["involvedObject"].get("kind") == "DynamoCheckpoint"
                and item["involvedObject"]["name"] == name
            ]
            return [(item["type"], item["reason"]) for item in found]

        async def are_said() -> bool:
            return bool(await events("asking")) and bool(await events("plain"))

        await polled(are_said)
        assert [each for each in await events("plain") if each[0] != "Normal"] == []
        assert await events("asking") == [("Warning", "GMSSnapshotDisabled")]
        await site.apply("replaced", sleeper("sleep 600"), driver="respawn")
        assert "spec.job.driver" in await site.reason("replaced", "DriverNotInCluster")
        assert not await site.exists("jobs", "replaced")


async def test_it_is_not_ready_while_a_definition_belongs_to_another_product(
    site: Rig, own_cluster: Cluster
) -> None:
    name = definitions()[1]["metadata"]["name"]
    await label(site, f"{DEFINITIONS}/{name}", PART_OF[0], "other")
    try:
        async with program(site, until_ready=False) as it:
            why = f"CRDsOwnedByOther: {name} (of other)"
            await polled(lambda: it.ask("/readyz"), lambda said: said[0] == 503 and why in said[1])

            async def events() -> list[Any]:
                found = await site.items("events")
                return [item for item in found if item["reason"] == "CRDsOwnedByOther"]

            (event,) = await polled(events)
            assert name in event["message"]
            assert event["involvedObject"]["name"] == rbac.NAME
            await site.apply("llm", sleeper("sleep 600"))
            await asyncio.sleep(1.0)
            left = await site.get("dynamocheckpoints", "llm")
            assert "finalizers" not in left["metadata"]
            await label(site, f"{DEFINITIONS}/{name}", *PART_OF)
            await it.until_ready()
            await polled(lambda: site.exists("jobs", "llm"))
    finally:
        await label(site, f"{DEFINITIONS}/{name}", *PART_OF)
