"""The operator as a program with exactly the rights of its roles, as a pod would run it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec
import pytest
import yaml

from snapshot_operator.core.presence import LOST_AFTER_S
from snapshot_operator.kube import rbac
from snapshot_operator.kube.crds import PART_OF, definitions
from snapshot_operator.kube.definitions import PATH as DEFINITIONS
from snapshot_operator.runtime.presence import EVERY_S
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import NotFound
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, load_configuration
from snapshot_shared.objects.kubernetes import AGENT_LABEL
from tests.cluster.cluster import Cluster
from tests.cluster.lying_proxy import LyingProxy, lying_proxy
from tests.cluster.test_operator import _without_finalizers, operator_token, polled, worker
from tests.support.objects import presence

pytestmark = pytest.mark.cluster

RBAC = "/apis/rbac.authorization.k8s.io/v1"


class Rig(NamedTuple):
    """An API server as people see it, a proxy before it, and what the program is started with."""

    direct: KubeClient
    proxy: LyingProxy
    bus: Bus
    namespace: str
    environment: dict[str, str]

    async def get(self, path: str) -> Any:
        return msgspec.json.decode(await self.direct.request("GET", path))

    async def patch(self, path: str, metadata: dict[str, Any]) -> None:
        body = {"metadata": metadata}
        await self.direct.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    def path(self, plural: str, name: str = "") -> str:
        base = {"jobs": "/apis/batch/v1", "events": "/api/v1"}.get(
            plural, "/apis/nvidia.com/v1alpha1"
        )
        path = f"{base}/namespaces/{self.namespace}/{plural}"
        return f"{path}/{name}" if name else path

    async def apply(
        self, name: str, template: dict[str, Any], spec: dict[str, Any] | None = None, **job: Any
    ) -> None:
        identity = {"model": f"{self.namespace}/{name}", "backendFramework": "vllm"}
        document = {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "DynamoCheckpoint",
            "metadata": {"name": name, "namespace": self.namespace},
            "spec": {
                "identity": identity,
                "job": {"podTemplateSpec": template, **job},
                **(spec or {}),
            },
        }
        await self.direct.request("POST", self.path("dynamocheckpoints"), body=document)

    async def rows(self, name: str) -> dict[str, dict[str, Any]]:
        found = await self.get(self.path("dynamocheckpoints", name))
        return {row["type"]: row for row in found.get("status", {}).get("conditions", [])}

    async def reason(self, name: str, wanted: str) -> str:
        """Wait until a checkpoint is not Ready for a reason, and return the message."""

        async def found() -> str:
            row = (await self.rows(name)).get("Ready", {})
            return str(row["message"]) if row.get("reason") == wanted else ""

        return await polled(found)


class Program(NamedTuple):
    """A running operator."""

    process: asyncio.subprocess.Process
    address: str

    async def ready(self) -> tuple[int, str]:
        """Return how `/readyz` answers; 0 while nothing answers."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{self.address}/readyz") as response,
            ):
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            assert self.process.returncode is None, "the operator ended"
            return (await self.ready())[0] == 200

        await polled(is_ready)


@pytest.fixture
async def rig(kubeconfig: str, nats_url: str, tmp_path: Path) -> AsyncIterator[Rig]:
    configuration = await load_configuration(kubeconfig)
    namespace = f"program-{uuid.uuid4().hex[:8]}"
    async with contextlib.AsyncExitStack() as stack:
        direct = await stack.enter_async_context(KubeClient(configuration))
        proxy = await stack.enter_async_context(lying_proxy(configuration))
        await direct.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        token = await operator_token(direct, namespace)
        await _bind_lease_role(direct, namespace)
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(_kubeconfig(proxy.url, token)))
        bus = Bus(nats_url, "test")
        await bus.connect_and_ensure()
        stack.push_async_callback(bus.close)
        environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("SNAPBACK_")},
            "SNAPBACK_WORLD": "kubernetes",
            "SNAPBACK_KUBECONFIG": str(path),
            "SNAPBACK_NAMESPACE": namespace,
            "SNAPBACK_NATS_URL": nats_url,
            "SNAPBACK_STATE_DIR": str(tmp_path / "state"),
        }
        yield Rig(direct, proxy, bus, namespace, environment)
        await _without_finalizers(direct, namespace)
        await direct.request("DELETE", f"{RBAC}/clusterrolebindings/{rbac.NAME}-{namespace}")
        await direct.request("DELETE", f"/api/v1/namespaces/{namespace}")
        # A refused request is a right that is missing from a role.
        assert not proxy.refused


async def _bind_lease_role(direct: KubeClient, namespace: str) -> None:
    base = f"{RBAC}/namespaces/{namespace}"
    await direct.request("POST", f"{base}/roles", body=rbac.lease_role(namespace))
    subject = {"kind": "ServiceAccount", "name": rbac.NAME, "namespace": namespace}
    binding = {
        "metadata": {"name": rbac.NAME},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": rbac.NAME},
        "subjects": [subject],
    }
    await direct.request("POST", f"{base}/rolebindings", body=binding)


def _kubeconfig(server: str, token: str) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": token}}],
    }


async def started(rig: Rig, **settings: str) -> Program:
    """Start the operator."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = "{}:{}".format(*free.getsockname())
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "snapshot_operator.main"),
        env=rig.environment | {"SNAPBACK_HTTP_ADDRESS": address} | settings,
    )
    return Program(process, address)


@contextlib.asynccontextmanager
async def program(rig: Rig, **settings: str) -> AsyncIterator[Program]:
    """Run the operator until it is asked to end; it ends well."""
    operator = await started(rig, **settings)
    process = operator.process
    try:
        yield operator
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20.0):
            await process.wait()
    assert process.returncode == 0


async def test_it_serves_selected_namespaces_alone(rig: Rig) -> None:
    async with program(rig, SNAPBACK_NAMESPACE_SELECTOR=f"test={rig.namespace}") as it:
        await it.until_ready()
        lease = f"/apis/coordination.k8s.io/v1/namespaces/{rig.namespace}/leases/{rbac.NAME}"
        assert (await rig.get(lease))["spec"]["holderIdentity"]
        crd = await rig.get(f"{DEFINITIONS}/{definitions()[0]['metadata']['name']}")
        assert rbac.NAME in {row["manager"] for row in crd["metadata"]["managedFields"]}
        await rig.apply("llm", worker("sleep 600"))
        await asyncio.sleep(2.0)
        left = await rig.get(rig.path("dynamocheckpoints", "llm"))
        assert "finalizers" not in left["metadata"]
        assert "status" not in left
        labels = {"labels": {"test": rig.namespace}}
        await rig.patch(f"/api/v1/namespaces/{rig.namespace}", labels)
        await polled(lambda: _exists(rig, rig.path("jobs", "llm")))


async def test_a_pod_is_placed_by_the_label_of_nodes_with_an_agent(
    rig: Rig, own_cluster: Cluster, shell_image: str
) -> None:
    nodes = [item["metadata"]["name"] for item in (await rig.get("/api/v1/nodes"))["items"]]
    for name in nodes:
        await rig.patch(f"/api/v1/nodes/{name}", {"labels": {AGENT_LABEL: None}})
    first, second = sorted(nodes)[:2]
    async with program(rig) as it:
        await it.until_ready()
        template = worker()
        await rig.apply("anywhere", template, backoffLimit=2)
        message = await rig.reason("anywhere", "NoAgentOnNode")
        assert "no node has a snapshot agent" in message
        template["spec"]["nodeName"] = second
        await rig.apply("placed", template)
        assert second in await rig.reason("placed", "NoAgentOnNode")
        rows = await rig.rows("anywhere")
        assert "spec.job.backoffLimit" in rows["DeprecatedFieldSet"]["message"]
        job = await rig.get(rig.path("jobs", "anywhere"))
        assert job["spec"]["backoffLimit"] == 0
        await rig.bus.put(subjects.NODES_BUCKET, first, encode_json(presence(first)))

        async def is_captured() -> bool:
            return await _exists(rig, rig.path("snapshots", "anywhere"))

        await polled(is_captured)
        labels = (await rig.get(f"/api/v1/nodes/{first}"))["metadata"]["labels"]
        assert labels[AGENT_LABEL] == "true"
        assert not await _exists(rig, rig.path("snapshots", "placed"))


async def test_what_happens_to_a_checkpoint_is_in_its_events(rig: Rig) -> None:
    async with program(rig, SNAPBACK_ALLOW_GMS_SNAPSHOT="false") as it:
        await it.until_ready()
        await rig.apply("plain", worker("sleep 600"))
        asking = {"gpuMemoryService": {"enabled": True}}
        await rig.apply("asking", worker("sleep 600"), spec=asking)
        assert "gpuMemoryService" in await rig.reason("asking", "GMSSnapshotDisabled")
        assert not await _exists(rig, rig.path("jobs", "asking"))

        async def events(name: str) -> list[tuple[str, str]]:
            found = [
                item
                for item in (await rig.get(rig.path("events")))["items"]
                if item["involvedObject"].get("kind") == "DynamoCheckpoint"
                and item["involvedObject"]["name"] == name
            ]
            return [(item["type"], item["reason"]) for item in found]

        async def are_said() -> bool:
            return bool(await events("asking")) and bool(await events("plain"))

        await polled(are_said)
        assert {type_ for type_, _ in await events("plain")} == {"Normal"}
        assert await events("asking") == [("Warning", "GMSSnapshotDisabled")]


@pytest.mark.slow
async def test_a_node_whose_agent_stays_away_loses_the_label_and_not_before_it_is_lost(
    rig: Rig, own_cluster: Cluster
) -> None:
    nodes = [item["metadata"]["name"] for item in (await rig.get("/api/v1/nodes"))["items"]]
    for name in nodes:
        labels = {AGENT_LABEL: "true" if name == nodes[0] else None}
        await rig.patch(f"/api/v1/nodes/{name}", {"labels": labels})

    async def is_labelled() -> bool:
        found = await rig.get(f"/api/v1/nodes/{nodes[0]}")
        return AGENT_LABEL in found["metadata"]["labels"]

    async with program(rig) as it:
        await it.until_ready()
        await asyncio.sleep(LOST_AFTER_S - 20.0)
        assert await is_labelled()
        async with asyncio.timeout(60.0 + EVERY_S):
            while await is_labelled():  # noqa: ASYNC110 - no event reports it
                await asyncio.sleep(1.0)
        assert rig.proxy.requests["PATCH", "nodes"] == 1


async def test_it_is_not_ready_while_a_definition_belongs_to_another_product(
    rig: Rig, own_cluster: Cluster
) -> None:
    name = definitions()[1]["metadata"]["name"]
    await rig.patch(f"{DEFINITIONS}/{name}", {"labels": {PART_OF[0]: "other"}})
    try:
        async with program(rig) as it:

            async def says_so() -> bool:
                code, text = await it.ready()
                return code == 503 and f"CRDsOwnedByOther: {name} (of other)" in text

            await polled(says_so)

            async def events() -> list[Any]:
                items = (await rig.get(rig.path("events")))["items"]
                return [item for item in items if item["reason"] == "CRDsOwnedByOther"]

            (event,) = await polled(events)
            assert name in event["message"]
            assert event["involvedObject"]["name"] == rbac.NAME
            await rig.apply("llm", worker("sleep 600"))
            await asyncio.sleep(1.0)
            left = await rig.get(rig.path("dynamocheckpoints", "llm"))
            assert "finalizers" not in left["metadata"]
            await rig.patch(f"{DEFINITIONS}/{name}", {"labels": dict([PART_OF])})
            await it.until_ready()
            await polled(lambda: _exists(rig, rig.path("jobs", "llm")))
    finally:
        await rig.patch(f"{DEFINITIONS}/{name}", {"labels": dict([PART_OF])})


async def _exists(rig: Rig, path: str) -> bool:
    with contextlib.suppress(NotFound):
        await rig.get(path)
        return True
    return False
