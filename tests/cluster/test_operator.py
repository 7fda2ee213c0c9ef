"""The operator on a real API server: from an applied checkpoint to the first order."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from snapshot_shared import subjects
from snapshot_shared.errors import NotFound
from snapshot_shared.kube_client import KubeClient
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import OURS, SHELL, Rig, polled, serving, sleeper

pytestmark = pytest.mark.cluster

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
