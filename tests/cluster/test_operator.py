"""The operator on a real API server: from an applied checkpoint to the first order."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, NamedTuple, TypeVar

import msgspec
import pytest

from snapshot_operator.kube import rbac
from snapshot_operator.kube.controllers import CONTROLLERS, INDEXES
from snapshot_operator.kube.store import KubeStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.world import World
from snapshot_operator.wiring import Environment, serve
from snapshot_shared import subjects
from snapshot_shared.api import DeleteReply, DeleteRequest
from snapshot_shared.bus import Bus
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import AlreadyExists, NotFound
from snapshot_shared.kube_client import KubeClient, load_configuration
from snapshot_shared.orders import Presence
from snapshot_shared.telemetry import Telemetry
from tests.cluster.conftest import SHELL
from tests.cluster.lying_proxy import Lie, LyingProxy, lying_proxy

pytestmark = pytest.mark.cluster

SECONDS = 120.0
LONGEST = f"{'a' * 62}.{'b' * 190}"
"""As long as Kubernetes lets the name of an object be."""
T = TypeVar("T")


async def polled(look: Callable[[], Awaitable[T]]) -> T:
    """Return the first answer that is not empty: the API server is asked as people ask it."""
    async with asyncio.timeout(SECONDS):
        while not (found := await look()):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.2)
    return found


class Rig(NamedTuple):
    """A running operator, the API server as people see it, and a bus as a node's agent has it."""

    direct: KubeClient
    proxy: LyingProxy
    bus: Bus
    namespace: str

    def path(self, plural: str, name: str = "") -> str:
        base = {
            "pods": "/api/v1",
            "jobs": "/apis/batch/v1",
        }.get(plural, "/apis/nvidia.com/v1alpha1")
        path = f"{base}/namespaces/{self.namespace}/{plural}"
        return f"{path}/{name}" if name else path

    async def get(self, plural: str, name: str) -> Any:
        return msgspec.json.decode(await self.direct.request("GET", self.path(plural, name)))

    async def apply(
        self, name: str, template: dict[str, Any], *, gms: dict[str, Any] | None = None, **job: Any
    ) -> None:
        document: dict[str, Any] = {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoCheckpoint",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "identity": {
                    "model": f"example/{self.namespace}-{name}",
                    "backendFramework": "vllm",
                },
                "job": {"podTemplateSpec": template, "sourcePolicy": "Resume", **job},
            },
        }
        if gms is not None:
            document["spec"] |= {"gpuMemoryService": gms}
        await self.direct.request("POST", self.path("dynamocheckpoints"), body=document)

    async def condition(self, plural: str, name: str, type_: str, status: str) -> Any:
        """Wait for a condition and return it."""

        async def found() -> dict[str, Any] | None:
            rows = (await self.get(plural, name)).get("status", {}).get("conditions", [])
            by_type = {row["type"]: row for row in rows}
            row = by_type.get(type_)
            if row is not None and row["status"] == status:
                return dict(row)
            ended = by_type.get("Failed", {})
            assert type_ == "Failed" or ended.get("status") != "True", f"{name} failed: {ended}"
            return None

        try:
            return await polled(found)
        except TimeoutError:
            shown = msgspec.json.encode((await self.get(plural, name)).get("status")).decode()
            raise AssertionError(f"{name} is not {type_} {status}: {shown}") from None

    async def phase(self, job: str, phase: str) -> None:
        """Wait until the pod of a Job is in a phase."""

        async def is_there() -> bool:
            pods = msgspec.json.decode(await self.direct.request("GET", self.path("pods")))
            return any(
                pod["metadata"]["name"].startswith(job) and pod["status"]["phase"] == phase
                for pod in pods["items"]
            )

        await polled(is_there)


@pytest.fixture
async def rig(kubeconfig: str, shell_image: str, nats_url: str) -> AsyncIterator[Rig]:
    configuration = await load_configuration(kubeconfig)
    namespace = f"operator-{uuid.uuid4().hex[:8]}"
    async with contextlib.AsyncExitStack() as stack:
        direct = await stack.enter_async_context(KubeClient(configuration))
        proxy = await stack.enter_async_context(lying_proxy(configuration))
        body = {"metadata": {"name": namespace}}
        await direct.request("POST", "/api/v1/namespaces", body=body)
        with_rights = proxy.configuration
        with_rights.api_key["BearerToken"] = await operator_token(direct, namespace)
        with_rights.api_key_prefix["BearerToken"] = "Bearer"
        client = await stack.enter_async_context(KubeClient(with_rights))
        bus = Bus(nats_url, "test")
        await bus.connect_and_ensure()
        stack.push_async_callback(bus.close)
        presence = Presence(node="node-1", boot_id="boot", version="0.1.0", at=0.0)
        await bus.put(subjects.NODES_BUCKET, "node-1", encode_json(presence))
        stop = asyncio.Event()
        serving = asyncio.ensure_future(_operator(stop, client, nats_url))
        try:
            yield Rig(direct, proxy, bus, namespace)
        finally:
            stop.set()
            await serving
            await _without_finalizers(direct, namespace)
            bindings = "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings"
            await direct.request("DELETE", f"{bindings}/{rbac.NAME}-{namespace}")
            await direct.request("DELETE", f"/api/v1/namespaces/{namespace}")
            # A refused request is a right that is missing from the role.
            assert not proxy.refused


async def operator_token(direct: KubeClient, namespace: str) -> str:
    """Return a token of a service account that has the rights of the operator and no others."""
    rbac_api = "/apis/rbac.authorization.k8s.io/v1"
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    subject = {"kind": "ServiceAccount", "name": rbac.NAME, "namespace": namespace}
    await direct.request("POST", accounts, body={"metadata": {"name": rbac.NAME}})
    with contextlib.suppress(AlreadyExists):
        await direct.request("POST", f"{rbac_api}/clusterroles", body=rbac.cluster_role())
    binding = {
        "metadata": {"name": f"{rbac.NAME}-{namespace}"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": rbac.NAME,
        },
        "subjects": [subject],
    }
    await direct.request("POST", f"{rbac_api}/clusterrolebindings", body=binding)
    request = {"spec": {"expirationSeconds": 3600}}
    answer = await direct.request("POST", f"{accounts}/{rbac.NAME}/token", body=request)
    return str(msgspec.json.decode(answer)["status"]["token"])


async def _operator(stop: asyncio.Event, client: KubeClient, nats_url: str) -> None:
    clocks = Clocks(time.monotonic, time.time, "boot")
    bus = Bus(nats_url, "operator")
    environment = Environment(
        bus=bus,
        telemetry=Telemetry("snap-operator", "operator", "0"),
        clocks=clocks,
        jitter=random.random,
        new_id=lambda: str(uuid.uuid4()),
        is_mirrored=False,
    )
    await bus.connect_and_ensure()
    store = KubeStore(client, random.random)
    world = World(CONTROLLERS, is_cluster=True, follow=store.run)
    try:
        await serve(stop, Cluster(store, INDEXES), world, environment)
    finally:
        await bus.close()


async def _without_finalizers(direct: KubeClient, namespace: str) -> None:
    """Let objects go for which no operator is there any more."""
    base = "/apis/nvidia.com/v1alpha1"
    for plural in ("dynamocheckpoints", "snapshots", "snapshotrestores", "snapshotcontents"):
        found = msgspec.json.decode(await direct.request("GET", f"{base}/{plural}"))
        for item in found["items"]:
            meta = item["metadata"]
            space = meta.get("namespace", item["spec"].get("snapshotRef", {}).get("namespace"))
            if space == namespace:
                where = f"/namespaces/{namespace}" if "namespace" in meta else ""
                path = f"{base}{where}/{plural}/{meta['name']}"
                body = {"metadata": {"finalizers": None}}
                kind = "application/merge-patch+json"
                with contextlib.suppress(NotFound):
                    await direct.request("PATCH", path, body=body, content_type=kind)
                    await direct.request("DELETE", path)


def worker(script: str = "touch $SNAPSHOT_CONTROL_DIR/ready-for-snapshot; sleep 600") -> Any:
    container = {
        "name": "main",
        "image": SHELL,
        "command": ["sh", "-c", script],
        "env": [{"name": "MINE", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}],
        "livenessProbe": {"exec": {"command": ["false"]}},
    }
    return {
        "metadata": {"labels": {"mine": "kept"}},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }


@pytest.mark.parametrize("name", ["llm", LONGEST], ids=["short", "longest"])
async def test_a_checkpoint_leads_to_a_job_a_ready_pod_and_the_order_to_prepare_it(
    rig: Rig, name: str
) -> None:
    template = worker()
    # Another node may have the label of an agent still, and has no presence here.
    template["spec"]["nodeSelector"] = {"kubernetes.io/hostname": "node-1"}
    await rig.apply(name, template)

    async def bound() -> str:
        with contextlib.suppress(NotFound):
            status = (await rig.get("snapshots", name)).get("status", {})
            return str(status.get("boundSnapshotContentName", ""))
        return ""

    path = f"/apis/nvidia.com/v1alpha1/snapshotcontents/{await polled(bound)}"
    content = msgspec.json.decode(await rig.direct.request("GET", path))
    wanted = f"snap.order.node-1.agent.prepare-{content['metadata']['uid']}"
    await polled(lambda: rig.bus.subjects_in(subjects.ORDERS, wanted))
    job = await rig.get("jobs", (await rig.get("dynamocheckpoints", name))["status"]["jobName"])
    (container,) = job["spec"]["template"]["spec"]["containers"]
    assert container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"] == "metadata.name"
    assert "livenessProbe" not in container
    assert job["spec"]["template"]["metadata"]["labels"]["mine"] == "kept"


async def test_a_template_that_kubernetes_refuses_fails_the_checkpoint_with_the_path(
    rig: Rig,
) -> None:
    template = worker()
    template["spec"]["containers"][0]["image"] = ""
    await rig.apply("wrong", template)
    failed = await rig.condition("dynamocheckpoints", "wrong", "Failed", "True")
    assert failed["reason"] == "PodTemplateInvalid"
    assert "containers[0].image" in failed["message"]


async def test_a_secret_that_is_missing_is_named_and_waited_for(rig: Rig) -> None:
    template = worker("sleep 600")
    secret = {"secretRef": {"name": "credentials"}}
    template["spec"]["containers"][0]["envFrom"] = [secret]
    await rig.apply("lacks", template)

    async def waits_for() -> str:
        row = await rig.condition("dynamocheckpoints", "lacks", "Ready", "False")
        return str(row["message"]) if row["reason"] == "PodTemplateInvalid" else ""

    message = await polled(waits_for)
    assert 'container main: secret "credentials" not found' in message
    assert "Next: " in message
    body = {"metadata": {"name": "credentials"}}
    await rig.direct.request("POST", f"/api/v1/namespaces/{rig.namespace}/secrets", body=body)
    await rig.phase("lacks", "Running")


async def test_quantities_may_be_fractions_and_what_is_null_is_nothing(rig: Rig) -> None:
    template = worker("sleep 600")
    main = template["spec"]["containers"][0]
    main["resources"] = {"limits": {"cpu": 0.5, "memory": 2e8}, "requests": None}
    beside = {"name": "beside", "image": SHELL, "command": ["sleep", "600"], "resources": None}
    template["spec"]["containers"] = [main, beside]
    await rig.apply("fraction", template)
    await rig.phase("fraction", "Running")
    main, _ = (await rig.get("jobs", "fraction"))["spec"]["template"]["spec"]["containers"]
    assert main["resources"]["limits"]["cpu"] == "500m"


async def test_a_quota_that_refuses_a_job_is_said_and_waited_for(rig: Rig) -> None:
    quotas = f"/api/v1/namespaces/{rig.namespace}/resourcequotas"
    body = {"metadata": {"name": "jobs"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
    await rig.direct.request("POST", quotas, body=body)

    async def counts() -> bool:
        quota = msgspec.json.decode(await rig.direct.request("GET", f"{quotas}/jobs"))
        return bool(quota["status"].get("hard"))

    await polled(counts)
    await rig.apply("many", worker("sleep 600"))

    async def refused() -> str:
        row = await rig.condition("dynamocheckpoints", "many", "Ready", "False")
        return str(row["message"]) if row["reason"] == "Refused" else ""

    assert "exceeded quota: jobs" in await polled(refused)
    await rig.direct.request("DELETE", f"{quotas}/jobs")
    await rig.phase("many", "Running")
    # The quota refused this, and nothing else was refused.
    assert {*rig.proxy.refused} == {f"POST {rig.path('jobs')}"}
    rig.proxy.refused.clear()


async def test_a_cluster_without_claims_fails_a_checkpoint_with_a_memory_server_at_once(
    rig: Rig,
) -> None:
    with rig.proxy.lying(Lie(404, "POST", "resourceclaimtemplates")):
        await rig.apply("claims", worker("sleep 600"), gms={})
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
            serving = asyncio.ensure_future(_operator(lost, client, nats_url))
            await asyncio.sleep(2.0)
            assert not serving.done()
            lost.set()
            async with asyncio.timeout(10.0):
                await serving


async def test_a_job_is_not_deleted_with_the_rights_of_the_operator(rig: Rig) -> None:
    await rig.apply("mine", worker("sleep 600"))
    await rig.phase("mine", "Running")
    request = encode_json(DeleteRequest(kind="job", name="mine", namespace=rig.namespace))
    answer = await rig.bus.request(subjects.api("delete"), request)
    reply = msgspec.json.decode(answer, type=DeleteReply)
    assert reply.failure is not None
    assert reply.failure.next_step == f"kubectl delete job mine --namespace {rig.namespace}"
    assert (await rig.get("jobs", "mine"))["metadata"].get("deletionTimestamp") is None


async def test_objects_that_do_not_change_cost_no_request(rig: Rig) -> None:
    await rig.apply("still", worker("sleep 600"))
    await rig.condition("dynamocheckpoints", "still", "Ready", "False")
    await rig.phase("still", "Running")
    await asyncio.sleep(3.0)
    rig.proxy.requests.clear()
    await asyncio.sleep(5.0)
    assert not [key for key in rig.proxy.requests if key[0] != "WATCH"]


@pytest.mark.parametrize("pod_name", ["again", LONGEST], ids=["short", "longest"])
async def test_a_pod_that_asks_for_a_restore_gets_one_that_goes_with_it(
    rig: Rig, pod_name: str
) -> None:
    pod: dict[str, Any] = {
        "metadata": {"name": pod_name, "annotations": {"nvidia.com/restore-from": LONGEST}}
    }
    pod["spec"] = worker("sleep 600")["spec"]
    # As the webhook for pods has it, which does not run here.
    pod["spec"]["containers"][0]["env"] += [{"name": "SNAPSHOT_RESTORE_STANDBY", "value": "1"}]
    created = msgspec.json.decode(await rig.direct.request("POST", rig.path("pods"), body=pod))
    name = f"restore-{created['metadata']['uid']}"

    async def waits() -> str:
        with contextlib.suppress(NotFound):
            return str((await rig.condition("snapshotrestores", name, "Ready", "False"))["reason"])
        return ""

    assert await polled(waits) == "WaitingForSnapshot"
    body = {"gracePeriodSeconds": 0}
    await rig.direct.request("DELETE", rig.path("pods", pod_name), body=body)

    async def is_gone() -> bool:
        try:
            await rig.get("snapshotrestores", name)
        except NotFound:
            return True
        return False

    assert await polled(is_gone)
