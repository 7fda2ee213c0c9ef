"""Makes the keys of NATS in a cluster and the accounts of its server, and ends.

The chart runs it before each install and upgrade. Seeds of people and of the operator are in a
Secret each, and one that exists is never replaced. The seeds of a node never leave it: a DaemonSet
makes them, and its pods report the public keys as the message with which they end. No Secret of a
cluster could hold them, as an agent can read every volume of the pods of its node. Secrets by their
names, where `<prefix>` is that of the settings:

    <prefix>-operator, -snapshotctl, -viewer    `seed.nk`
    <prefix>-accounts                           `accounts.conf`, for the server; `nodes.json`
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from snapshot_shared.codec import encode_json
from snapshot_shared.errors import AlreadyExists, Conflict, InvalidInput, InvalidName, NotFound
from snapshot_shared.ids import NodeName, check_node
from snapshot_shared.kube_client import KubeClient, decoded, load_configuration
from snapshot_shared.kube_watch import WatchEvent, changes
from snapshot_shared.nkey import SEED, is_public, new_seed, public_half
from snapshot_shared.orders import Label
from snapshot_shared.permissions import Role, User, server_accounts
from snapshot_shared.service import run, until_stopped
from snapshot_shared.settings import load
from snapshot_shared.telemetry import log_to_stderr

log = logging.getLogger(__name__)

SERVICE = "snap-keys"
ACCOUNTS = "accounts.conf"
NODES = "nodes.json"
CLUSTERS_OWN: tuple[Role, ...] = ("operator", "snapshotctl", "viewer")
NODES_OWN: tuple[Role, ...] = ("agent", "gms")
LABELS = {"app.kubernetes.io/part-of": "snapback", "app.kubernetes.io/component": "nats-keys"}
PAGE = 500
TRIES = 5
"""How often a Secret is read again that another writer has changed meanwhile."""

Data = Mapping[str, bytes]
Change = Callable[[Data], dict[str, bytes]]
PublicKeys = dict[str, dict[str, str]]
"""The public key of each service of each node."""


class KeysSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where keys are: in Secrets of `namespace`, and in reports of the pods of `keys_daemon_set`.

    Nodes have `keys_deadline_s` seconds to report; those that are not ready are not awaited.
    """

    namespace: Label = "snapback-system"
    keys_prefix: Label = "snapback-nats"
    keys_daemon_set: Label = "snapback-node-keys"
    keys_deadline_s: Annotated[float, Meta(gt=0)] = 240.0
    kubeconfig: str | None = None
    log_level: str = "INFO"


class _Metadata(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    generation: int = 0
    resource_version: str = ""


class _Condition(msgspec.Struct, frozen=True):
    type: str
    status: str


class _NodeStatus(msgspec.Struct, frozen=True):
    conditions: list[_Condition] = []


class ClusterNode(msgspec.Struct, frozen=True):
    """What is read of a Node."""

    metadata: _Metadata
    status: _NodeStatus = _NodeStatus()

    @property
    def is_ready(self) -> bool:
        """Whether its kubelet says so, and has done so lately."""
        return any((c.type, c.status) == ("Ready", "True") for c in self.status.conditions)


class _Terminated(msgspec.Struct, frozen=True):
    message: str = ""


class _State(msgspec.Struct, frozen=True):
    terminated: _Terminated | None = None


class _ContainerStatus(msgspec.Struct, frozen=True):
    name: str
    state: _State = _State()


class _PodSpec(msgspec.Struct, frozen=True, rename="camel"):
    node_name: str = ""


class _PodStatus(msgspec.Struct, frozen=True, rename="camel"):
    init_container_statuses: list[_ContainerStatus] = []


class KeyPod(msgspec.Struct, frozen=True):
    """What is read of a pod that makes the keys of its node."""

    spec: _PodSpec = _PodSpec()
    status: _PodStatus = _PodStatus()


class _Selector(msgspec.Struct, frozen=True, rename="camel"):
    match_labels: dict[str, str] = {}


class _DaemonSetSpec(msgspec.Struct, frozen=True):
    selector: _Selector = _Selector()


class _DaemonSetStatus(msgspec.Struct, frozen=True, rename="camel"):
    observed_generation: int = 0
    desired_number_scheduled: int = 0


class DaemonSet(msgspec.Struct, frozen=True):
    """What is read of the DaemonSet whose pods make keys."""

    metadata: _Metadata
    spec: _DaemonSetSpec = _DaemonSetSpec()
    status: _DaemonSetStatus = _DaemonSetStatus()


class _Page(msgspec.Struct, frozen=True, rename={"next": "continue"}):
    next: str = ""


class _Nodes(msgspec.Struct, frozen=True):
    items: list[ClusterNode]
    metadata: _Page = _Page()


class _Pods(msgspec.Struct, frozen=True):
    items: list[KeyPod]


_NODES = msgspec.json.Decoder(_Nodes)
_PODS = msgspec.json.Decoder(_Pods)
_CHANGE = msgspec.json.Decoder(WatchEvent[DaemonSet])
_SECRET = msgspec.json.Decoder(dict[str, Any])
_REPORT = msgspec.json.Decoder(dict[str, str])
_KEPT = msgspec.json.Decoder(PublicKeys)


class Progress(NamedTuple):
    """The public keys that were reported, and whether there is anything to wait for."""

    keys: PublicKeys
    is_complete: bool


def progress(daemon_set: DaemonSet, pods: Iterable[KeyPod], ready: Iterable[str]) -> Progress:
    """Return what pods of a DaemonSet have reported; those on nodes that are not `ready` may not.

    A report that is none is as if there were none: its node is not admitted, and logged.
    """
    waits_for = set(ready)
    keys: PublicKeys = {}
    scheduled = 0
    is_waiting = False
    for pod in pods:
        node = pod.spec.node_name
        scheduled += bool(node)
        if report := _report_of(pod):
            keys[node] = report
        elif node in waits_for:
            is_waiting = True
    seen = daemon_set.status.observed_generation >= max(1, daemon_set.metadata.generation)
    is_there = seen and scheduled >= daemon_set.status.desired_number_scheduled
    return Progress(keys, is_there and not is_waiting)


def _report_of(pod: KeyPod) -> dict[str, str]:
    for container in pod.status.init_container_statuses:
        if container.state.terminated is not None:
            with contextlib.suppress(msgspec.MsgspecError):
                report = _REPORT.decode(container.state.terminated.message)
                if set(report) == set(NODES_OWN) and all(map(is_public, report.values())):
                    return report
    return {}


def admitted(kept: Data, reported: PublicKeys, nodes: Iterable[NodeName]) -> PublicKeys:
    """Return the public keys of these nodes: as reported, else as the Secret of accounts has them.

    A node that is down now is admitted still when it comes back.
    """
    before: PublicKeys = {}
    if NODES in kept:
        with contextlib.suppress(msgspec.MsgspecError):
            before = _KEPT.decode(kept[NODES])
    known = {**before, **reported}
    return {node: known[node] for node in sorted(nodes) if node in known}


def accounts(own: Mapping[Role, str], nodes: PublicKeys) -> dict[str, bytes]:
    """Return the Secret of accounts from the public keys of roles, and of the services of nodes."""
    keys = [(User(role), key) for role, key in own.items()]
    for name, services in nodes.items():
        keys += [(User(role, check_node(name)), services[role]) for role in NODES_OWN]
    text = b"accounts: " + encode_json(server_accounts(keys)) + b"\n"
    return {ACCOUNTS: text, NODES: encode_json(nodes)}


class Secrets:
    """The Secrets of one namespace."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        """Use `client` for Secrets of `namespace`."""
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"

    async def public_key(self, name: str) -> str:
        """Return the public key of the seed in a Secret, which is made if there is none."""
        data = await self.change(name, lambda found: {SEED: new_seed(), **found})
        try:
            return public_half(data[SEED].strip())
        except ValueError as error:
            raise InvalidInput(
                f"{SEED} of the Secret {name} is no nkey seed of a user",
                next_step="delete the Secret and run helm upgrade, which makes another one",
            ) from error

    async def change(self, name: str, change: Change) -> dict[str, bytes]:
        """Write what `change` makes of the data, and return it; no other writer's is lost."""
        for _ in range(TRIES):
            try:
                return await self._write(name, change)
            except (AlreadyExists, Conflict):
                continue
        raise Conflict(f"the Secret {name} is changed by another writer all the time")

    async def _write(self, name: str, change: Change) -> dict[str, bytes]:
        try:
            answer = await self._client.request("GET", f"{self._path}/{name}")
        except NotFound:
            data = change({})
            metadata = {"name": name, "labels": LABELS}
            body = {"metadata": metadata, "type": "Opaque", "data": _encoded(data)}
            await self._client.request("POST", self._path, body=body)
            log.info("made the Secret %s", name)
            return data
        secret = decoded(_SECRET, answer)
        found = _decoded(name, secret.get("data") or {})
        data = change(found)
        if data != found:
            # With the resourceVersion that was read: a write in between is a Conflict.
            body = {**secret, "data": _encoded(data)}
            await self._client.request("PUT", f"{self._path}/{name}", body=body)
            log.info("wrote the Secret %s", name)
        return data


def _encoded(data: Data) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _decoded(name: str, data: Mapping[str, str]) -> dict[str, bytes]:
    try:
        return {key: base64.b64decode(value, validate=True) for key, value in data.items()}
    except (binascii.Error, AttributeError, TypeError) as error:
        raise InvalidInput(f"the Secret {name} cannot be read: {error}") from error


async def cluster_nodes(client: KubeClient) -> dict[NodeName, ClusterNode]:
    """Return all Nodes but those whose names cannot be a part of a subject of NATS."""
    found: dict[NodeName, ClusterNode] = {}
    params = {"limit": str(PAGE)}
    while True:
        page = decoded(_NODES, await client.request("GET", "/api/v1/nodes", params=params))
        for node in page.items:
            try:
                found[check_node(node.metadata.name)] = node
            except InvalidName as error:
                log.warning("a node without keys: %s", error)
        if not page.metadata.next:
            return found
        params["continue"] = page.metadata.next


class Reports:
    """What the pods of the DaemonSet report."""

    def __init__(self, client: KubeClient, settings: KeysSettings, ready: Iterable[str]) -> None:
        """Wait for reports of the nodes that are `ready`."""
        self._client = client
        self._namespace = settings.namespace
        self._name = settings.keys_daemon_set
        self._deadline_s = settings.keys_deadline_s
        self._ready = set(ready)
        self._keys: PublicKeys = {}

    async def gathered(self) -> PublicKeys:
        """Return the public keys of all nodes that report before the deadline."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._deadline_s):
                while not await self._watched():
                    pass
                return self._keys
        log.warning("after %g s not all nodes have reported keys", self._deadline_s)
        return self._keys

    async def _watched(self) -> bool:
        """Follow the DaemonSet while one watch lasts; return whether there is nothing to wait for.

        Its status changes whenever one of its pods becomes ready.
        """
        path = f"/apis/apps/v1/namespaces/{self._namespace}/daemonsets"
        named = {"fieldSelector": f"metadata.name={self._name}"}
        found = changes(self._client, path, _CHANGE, params=named)
        async with contextlib.aclosing(found):
            async for change, _ in found:
                if change is None:
                    continue
                pods = await self._pods(change.object)
                self._keys, is_complete = progress(change.object, pods, self._ready)
                if is_complete:
                    return True
        return False

    async def _pods(self, daemon_set: DaemonSet) -> list[KeyPod]:
        labels = daemon_set.spec.selector.match_labels
        params = {"labelSelector": ",".join(f"{key}={value}" for key, value in labels.items())}
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        return decoded(_PODS, await self._client.request("GET", path, params=params)).items


async def make_keys(client: KubeClient, settings: KeysSettings) -> None:
    """Make the seeds that are missing, and the accounts from the public keys of all."""
    secrets = Secrets(client, settings.namespace)
    prefix = settings.keys_prefix
    own = {role: await secrets.public_key(f"{prefix}-{role}") for role in CLUSTERS_OWN}
    nodes = await cluster_nodes(client)
    ready = [name for name, node in nodes.items() if node.is_ready]
    reported = await Reports(client, settings, ready).gathered()
    data = await secrets.change(
        f"{prefix}-accounts", lambda kept: accounts(own, admitted(kept, reported, nodes))
    )
    let_in = _KEPT.decode(data[NODES])
    log.info("NATS lets in the nodes %s", ", ".join(let_in) or "(none)")
    if absent := sorted(set(nodes) - set(let_in)):
        log.warning("no keys of the nodes %s", ", ".join(absent))


async def serve(stop: asyncio.Event) -> None:
    """Make the keys, unless `stop` is set before."""
    settings = load(KeysSettings)
    log_to_stderr(SERVICE, "operator", settings.log_level)
    async with KubeClient(await load_configuration(settings.kubeconfig)) as client:
        await until_stopped(stop, make_keys(client, settings))


def main() -> int:
    """Make the keys and end."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
