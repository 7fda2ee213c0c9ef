"""What a test has of an API server: a namespace, a proxy that lies, an operator with its rights.

A `Rig` is one test's view. `opened` makes its namespace and the clients, and the operator is run
beside it: in this process by `serving`, or as a program by `program`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
import msgspec
import yaml

from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube import rbac
from snapshot_operator.kube.controllers import CONTROLLERS, INDEXES
from snapshot_operator.kube.shaping import JobShape
from snapshot_operator.kube.store import KubeStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.world import World
from snapshot_operator.wiring import Environment, serve
from snapshot_shared.bus import Bus
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import AlreadyExists, NotFound, StoreBusy
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, load_configuration
from snapshot_shared.telemetry import Telemetry
from tests.cluster.lying_proxy import LyingProxy, lying_proxy
from tests.support.objects import checkpoint_document
from tests.support.ports import free_port

SECONDS = 120.0
SHELL = "snapback.local/shell:1"
RBAC = "/apis/rbac.authorization.k8s.io/v1"
OURS = "/apis/nvidia.com/v1alpha1"
BASES = {"jobs": "/apis/batch/v1", "leases": "/apis/coordination.k8s.io/v1"} | dict.fromkeys(
    ("configmaps", "events", "pods", "resourcequotas", "secrets"), "/api/v1"
)
"""The APIs of kinds that are not ours."""
T = TypeVar("T")


async def polled(look: Callable[[], Awaitable[T]], holds: Callable[[T], object] = bool) -> T:
    """Return the first answer of which something holds, which is not empty if nothing is given.

    The API server is asked as people ask it.
    """
    async with asyncio.timeout(SECONDS):
        while not holds(found := await look()):  # noqa: ASYNC110 - no event reports it
            await asyncio.sleep(0.2)
    return found


SECCOMP_PROFILE = "profiles/block-iouring.json"


@dataclass(frozen=True)
class Rig:
    """The API server as people see it, and a proxy before it, for one namespace."""

    direct: KubeClient
    proxy: LyingProxy
    client: KubeClient
    """Asks the proxy, with the rights that the test has given."""
    namespace: str
    token: str = ""
    bus: Any = None
    """The bus as the agent of a node has it, if an operator runs."""
    others: list[str] = field(default_factory=list)
    """Other namespaces whose objects the operator has put its finalizer on."""
    environment: dict[str, str] = field(default_factory=dict)
    """What an operator is started with as a program."""

    def path(self, plural: str, name: str = "") -> str:
        """Return the path of the objects of a kind in the namespace, or of one; a path stays."""
        if not plural.startswith("/"):
            plural = f"{BASES.get(plural, OURS)}/namespaces/{self.namespace}/{plural}"
        return f"{plural}/{name}" if name else plural

    async def get(self, plural: str, name: str = "") -> Any:
        return msgspec.json.decode(await self.direct.request("GET", self.path(plural, name)))

    async def items(self, plural: str) -> list[Any]:
        return list((await self.get(plural))["items"])

    async def post(self, plural: str, body: object) -> Any:
        return msgspec.json.decode(await self.direct.request("POST", self.path(plural), body=body))

    async def patch(self, path: str, **body: Any) -> None:
        """Merge fields into an object."""
        await self.direct.request("PATCH", path, body=body, content_type=MERGE_PATCH)

    async def delete(self, plural: str, name: str = "", body: object = None) -> None:
        """Delete an object, if it is there."""
        with contextlib.suppress(NotFound):
            await self.direct.request("DELETE", self.path(plural, name), body=body)

    async def exists(self, plural: str, name: str = "") -> bool:
        with contextlib.suppress(NotFound):
            await self.get(plural, name)
            return True
        return False

    async def apply(
        self, name: str, template: dict[str, Any], *, gms: dict[str, Any] | None = None, **job: Any
    ) -> None:
        """Create a checkpoint, once its definition is served."""
        model = f"example/{self.namespace}-{name}"
        document = checkpoint_document(name, model=model, podTemplateSpec=template, **job)
        document["metadata"]["namespace"] = self.namespace
        document["spec"] |= {} if gms is None else {"gpuMemoryService": gms}

        async def is_posted() -> bool:
            # An operator that starts applies the definitions of its kinds.
            with contextlib.suppress(StoreBusy):
                await self.post("dynamocheckpoints", document)
                return True
            return False

        await polled(is_posted)

    async def rows(self, plural: str, name: str) -> dict[str, dict[str, Any]]:
        """Return the conditions of an object by their types; none if it is not there."""
        with contextlib.suppress(NotFound):
            found = await self.get(plural, name)
            return {row["type"]: row for row in found.get("status", {}).get("conditions") or ()}
        return {}

    async def condition(self, plural: str, name: str, type_: str, status: str) -> Any:
        """Wait for a condition and return it."""

        async def found() -> dict[str, Any]:
            rows = await self.rows(plural, name)
            ended = rows.get("Failed", {})
            assert type_ == "Failed" or ended.get("status") != "True", f"{name} failed: {ended}"
            row = rows.get(type_, {})
            return row if row.get("status") == status else {}

        try:
            return await polled(found)
        except TimeoutError:
            shown = msgspec.json.encode((await self.get(plural, name)).get("status")).decode()
            raise AssertionError(f"{name} is not {type_} {status}: {shown}") from None

    async def reason(self, name: str, wanted: str) -> str:
        """Wait until a checkpoint is not Ready for a reason, and return the message."""
        found = await polled(
            lambda: self.rows("dynamocheckpoints", name),
            lambda rows: rows.get("Ready", {}).get("reason") == wanted,
        )
        return str(found["Ready"]["message"])

    async def captured(self, name: str, spec: dict[str, Any], **options: Any) -> None:
        """Apply a checkpoint of a pod of this spec, and wait until it is ready."""
        await self.apply(name, {"spec": spec}, **options)
        await self.condition("dynamocheckpoints", name, "Ready", "True")

    async def restored(self, name: str) -> None:
        """Wait until a pod says that it is restored."""
        await self.condition("pods", name, RESTORED, "True")

    async def phase(self, job: str, phase: str) -> None:
        """Wait until the pod of a Job is in a phase."""

        async def is_there() -> bool:
            return any(
                pod["metadata"]["name"].startswith(job) and pod["status"]["phase"] == phase
                for pod in await self.items("pods")
            )

        await polled(is_there)

    async def let_go(self) -> None:
        """Let objects go for which no operator is there any more."""
        for plural in ("dynamocheckpoints", "snapshots", "snapshotrestores", "snapshotcontents"):
            for item in await self.items(f"{OURS}/{plural}"):
                meta = item["metadata"]
                space = meta.get("namespace", item["spec"].get("snapshotRef", {}).get("namespace"))
                if space in (self.namespace, *self.others):
                    where = f"/namespaces/{space}" if "namespace" in meta else ""
                    path = f"{OURS}{where}/{plural}/{meta['name']}"
                    with contextlib.suppress(NotFound):
                        await self.patch(path, metadata={"finalizers": None})
                        await self.delete(path)


@contextlib.asynccontextmanager
async def opened(
    kubeconfig: str, what: str, role: dict[str, Any] | None = None
) -> AsyncIterator[Rig]:
    """Make a namespace of a test alone, and a client that has this role of the cluster there.

    Without a role it has all rights. With one, a request that is refused fails the test, unless the
    test takes it out of `proxy.refused`.
    """
    configuration = await load_configuration(kubeconfig)
    namespace = f"{what}-{uuid.uuid4().hex[:8]}"
    async with (
        KubeClient(configuration) as direct,
        lying_proxy(configuration) as proxy,
        AsyncExitStack() as stack,
    ):
        await direct.request("POST", "/api/v1/namespaces", body={"metadata": {"name": namespace}})
        through, token = proxy.configuration, ""
        if role is not None:
            token = await _token(direct, namespace, role)
            through.api_key["BearerToken"] = token
            through.api_key_prefix["BearerToken"] = "Bearer"
        client = await stack.enter_async_context(KubeClient(through))
        rig = Rig(direct, proxy, client, namespace, token)
        try:
            yield rig
        finally:
            if role is not None:
                await rig.let_go()
                await rig.delete(f"{RBAC}/clusterrolebindings/{namespace}")
            await rig.delete(f"/api/v1/namespaces/{namespace}")
        # A refused request is a right that is missing from the role.
        assert role is None or not proxy.refused, proxy.refused


async def _token(direct: KubeClient, namespace: str, role: dict[str, Any]) -> str:
    """Return a token of a service account that has the rights of a role and no others."""
    accounts = f"/api/v1/namespaces/{namespace}/serviceaccounts"
    await direct.request("POST", accounts, body={"metadata": {"name": rbac.NAME}})
    with contextlib.suppress(AlreadyExists):
        await direct.request("POST", f"{RBAC}/clusterroles", body=role)
    body = binding(namespace, "ClusterRole", role["metadata"]["name"], namespace)
    await direct.request("POST", f"{RBAC}/clusterrolebindings", body=body)
    request = {"spec": {"expirationSeconds": 3600}}
    answer = await direct.request("POST", f"{accounts}/{rbac.NAME}/token", body=request)
    return str(msgspec.json.decode(answer)["status"]["token"])


def binding(name: str, kind: str, role: str, namespace: str) -> dict[str, Any]:
    """Give a role to the service account of the operator in a namespace."""
    return {
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": role},
        "subjects": [{"kind": "ServiceAccount", "name": rbac.NAME, "namespace": namespace}],
    }


async def serving(stop: asyncio.Event, client: KubeClient, nats_url: str) -> None:
    """Be the operator until it is to stop."""
    bus = Bus(nats_url, "operator")
    environment = Environment(
        bus=bus,
        telemetry=Telemetry("snap-operator", "operator", "0"),
        clocks=Clocks(time.monotonic, time.time, "boot"),
        jitter=random.random,
        new_id=lambda: str(uuid.uuid4()),
        is_mirrored=False,
    )
    await bus.connect_and_ensure()
    store = KubeStore(client, random.random)
    shapes = {"Job": JobShape(seccomp_profile=SECCOMP_PROFILE)}
    world = World(CONTROLLERS, is_cluster=True, follow=store.run, shapes=shapes)
    try:
        await serve(stop, Cluster(store, INDEXES), world, environment)
    finally:
        await bus.close()


async def environment_of(rig: Rig, folder: Path, nats_url: str) -> dict[str, str]:
    """Return what the operator is started with as a program that has the rights of the rig."""
    base = f"{RBAC}/namespaces/{rig.namespace}"
    await rig.post(f"{base}/roles", rbac.lease_role(rig.namespace))
    await rig.post(f"{base}/rolebindings", binding(rbac.NAME, "Role", rbac.NAME, rig.namespace))
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        "clusters": [{"name": "test", "cluster": {"server": rig.proxy.url}}],
        "users": [{"name": "test", "user": {"token": rig.token}}],
    }
    path = folder / "kubeconfig"
    path.write_text(yaml.safe_dump(config))
    return {
        **{k: v for k, v in os.environ.items() if not k.startswith("SNAPBACK_")},
        "SNAPBACK_WORLD": "kubernetes",
        "SNAPBACK_KUBECONFIG": str(path),
        "SNAPBACK_NAMESPACE": rig.namespace,
        "SNAPBACK_NATS_URL": nats_url,
        "SNAPBACK_STATE_DIR": str(folder / "state"),
    }


class Program(NamedTuple):
    """A running operator."""

    process: asyncio.subprocess.Process
    address: str

    async def ask(self, path: str) -> tuple[int, str]:
        """Return how its HTTP server answers; 0 while nothing answers."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(f"http://{self.address}{path}") as response,
            ):
                return response.status, await response.text()
        except aiohttp.ClientError:
            return 0, ""

    async def until_ready(self) -> None:
        async def is_ready() -> bool:
            assert self.process.returncode is None, "the operator ended"
            return (await self.ask("/readyz"))[0] == 200

        await polled(is_ready)


AHEAD = """
import runpy, time
wall, ahead_s = time.time, {ahead_s}
time.time = lambda: wall() + ahead_s
runpy.run_module("snapshot_operator.main", run_name="__main__", alter_sys=True)
"""


async def started(rig: Rig, *, ahead_s: float = 0.0, **settings: str) -> Program:
    """Start the operator, whose wall clock may be ahead."""
    address = f"127.0.0.1:{free_port()}"
    late = ("-c", AHEAD.format(ahead_s=ahead_s))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, *(late if ahead_s else ("-m", "snapshot_operator.main"))),
        env=rig.environment | {"SNAPBACK_HTTP_ADDRESS": address} | settings,
    )
    return Program(process, address)


@contextlib.asynccontextmanager
async def program(
    rig: Rig, *, until_ready: bool = True, ahead_s: float = 0.0, **settings: str
) -> AsyncIterator[Program]:
    """Run the operator, which is ready then, until it is asked to end; it ends well."""
    operator = await started(rig, ahead_s=ahead_s, **settings)
    process = operator.process
    try:
        if until_ready:
            await operator.until_ready()
        yield operator
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20.0):
            await process.wait()
    assert process.returncode == 0


def sleeper(script: str = "touch $SNAPSHOT_CONTROL_DIR/ready-for-snapshot; sleep 600") -> Any:
    """Return the template of a pod that runs a script of sh."""
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
