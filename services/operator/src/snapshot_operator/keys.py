"""Makes the keys of all users of NATS in a cluster and the accounts of its server, and ends.

The chart runs it before each install and upgrade. Each seed is in a Secret and nowhere else; one
that exists is never replaced, so every client stays who it is. Secrets by their names, where
`<prefix>` is that of the settings:

    <prefix>-operator, -snapshotctl, -viewer    `seed.nk`
    <prefix>-agents, -gms                       a seed for each node, by the node's name
    <prefix>-accounts                           `accounts.conf`, for the server
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import msgspec

from snapshot_operator.kube.client import KubeClient, decoded, load_configuration
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import AlreadyExists, Conflict, InvalidInput, InvalidName, NotFound
from snapshot_shared.ids import NodeName, check_node
from snapshot_shared.nkey import new_seed, public_key
from snapshot_shared.orders import Label
from snapshot_shared.permissions import Role, User, server_accounts
from snapshot_shared.service import run, until_stopped
from snapshot_shared.settings import load
from snapshot_shared.telemetry import log_to_stderr

log = logging.getLogger(__name__)

SERVICE = "snap-keys"
SEED = "seed.nk"
ACCOUNTS = "accounts.conf"
LABELS = {"app.kubernetes.io/part-of": "snapback", "app.kubernetes.io/component": "nats-keys"}
PAGE = 500
TRIES = 5
"""How often a Secret is read again that another writer has changed meanwhile."""

_METADATA = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

Data = Mapping[str, bytes]
Change = Callable[[Data], dict[str, bytes]]


class KeysSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where the keys are: in Secrets of `namespace` whose names begin with `keys_prefix`."""

    namespace: Label = "snapback-system"
    keys_prefix: Label = "snapback-nats"
    kubeconfig: str | None = None
    log_level: str = "INFO"


class _Metadata(msgspec.Struct, frozen=True):
    name: str


class _Object(msgspec.Struct, frozen=True):
    metadata: _Metadata


class _Page(msgspec.Struct, frozen=True, rename={"next": "continue"}):
    next: str = ""


class _Objects(msgspec.Struct, frozen=True):
    items: list[_Object]
    metadata: _Page = _Page()


_OBJECTS = msgspec.json.Decoder(_Objects)
_SECRET = msgspec.json.Decoder(dict[str, Any])


def users_by_secret(prefix: str, nodes: Iterable[NodeName]) -> dict[str, dict[str, User]]:
    """Return the user of each seed, by the names of its Secret and of its key there."""
    names = sorted(nodes)
    people: tuple[Role, ...] = ("operator", "snapshotctl", "viewer")
    return {
        **{f"{prefix}-{role}": {SEED: User(role)} for role in people},
        f"{prefix}-agents": {name: User("agent", name) for name in names},
        f"{prefix}-gms": {name: User("gms", name) for name in names},
    }


def with_missing(found: Data, wanted: Iterable[str]) -> dict[str, bytes]:
    """Return the data of a Secret with a new seed for each key that it lacks."""
    return {**found, **{key: new_seed() for key in wanted if key not in found}}


def accounts(seeds: Sequence[tuple[User, str, bytes]]) -> bytes:
    """Return the accounts of the server from users, the place of each seed, and the seed.

    InvalidInput names the place of what is no seed.
    """
    keys = []
    for user, place, seed in seeds:
        try:
            keys.append((user, public_key(seed.strip())))
        except ValueError as error:
            raise InvalidInput(
                f"{place} holds no nkey seed of a user",
                next_step="remove this key, and run helm upgrade, which makes another seed",
            ) from error
    return b"accounts: " + encode_json(server_accounts(keys)) + b"\n"


class Secrets:
    """The Secrets of one namespace."""

    def __init__(self, client: KubeClient, namespace: str) -> None:
        """Use `client` for Secrets of `namespace`."""
        self._client = client
        self._path = f"/api/v1/namespaces/{namespace}/secrets"

    async def complete(self, name: str, wanted: Iterable[str]) -> dict[str, bytes]:
        """Return the seeds in a Secret, after those that it lacks were made."""
        keys = list(wanted)
        return await self._settle(name, lambda found: with_missing(found, keys))

    async def put(self, name: str, data: Data) -> None:
        """Write a Secret that has this data and no other."""
        await self._settle(name, lambda _: dict(data))

    async def _settle(self, name: str, change: Change) -> dict[str, bytes]:
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
            log.info("made the Secret %s with %d keys", name, len(data))
            return data
        secret = decoded(_SECRET, answer)
        found = _decoded(name, secret.get("data") or {})
        data = change(found)
        if data != found:
            # With the resourceVersion that was read: a write in between is a Conflict.
            body = {**secret, "data": _encoded(data)}
            await self._client.request("PUT", f"{self._path}/{name}", body=body)
            log.info("wrote the Secret %s: %d keys instead of %d", name, len(data), len(found))
        return data


def _encoded(data: Data) -> dict[str, str]:
    return {key: base64.b64encode(value).decode() for key, value in data.items()}


def _decoded(name: str, data: Mapping[str, str]) -> dict[str, bytes]:
    try:
        return {key: base64.b64decode(value, validate=True) for key, value in data.items()}
    except (binascii.Error, AttributeError, TypeError) as error:
        raise InvalidInput(f"the Secret {name} cannot be read: {error}") from error


async def node_names(client: KubeClient) -> list[NodeName]:
    """Return the names of all Nodes but those that cannot be a part of a subject of NATS."""
    found: list[NodeName] = []
    params = {"limit": str(PAGE)}
    while True:
        answer = await client.request("GET", "/api/v1/nodes", params=params, accept=_METADATA)
        page = decoded(_OBJECTS, answer)
        for each in page.items:
            try:
                found.append(check_node(each.metadata.name))
            except InvalidName as error:
                log.warning("a node without keys: %s", error)
        if not page.metadata.next:
            return found
        params["continue"] = page.metadata.next


async def make_keys(client: KubeClient, namespace: str, prefix: str) -> None:
    """Make the seeds that are missing, and the accounts from all of them."""
    secrets = Secrets(client, namespace)
    seeds = []
    for name, users in users_by_secret(prefix, await node_names(client)).items():
        data = await secrets.complete(name, users)
        seeds += [(user, f"{name}/{key}", data[key]) for key, user in users.items()]
    await secrets.put(f"{prefix}-accounts", {ACCOUNTS: accounts(seeds)})
    log.info("NATS has %d users", len(seeds))


async def serve(stop: asyncio.Event) -> None:
    """Make the keys, unless `stop` is set before."""
    settings = load(KeysSettings)
    log_to_stderr(SERVICE, "operator", settings.log_level)
    async with KubeClient(await load_configuration(settings.kubeconfig)) as client:
        await until_stopped(stop, make_keys(client, settings.namespace, settings.keys_prefix))


def main() -> int:
    """Make the keys and end."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
