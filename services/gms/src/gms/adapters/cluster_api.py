"""The few calls to the API server that a driver of devices makes."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from gms.domain.claims import DRIVER, ResourceClaim
from gms.domain.slices import API, FoundSlice
from snapshot_shared.errors import NotFound
from snapshot_shared.kube_client import (
    KubeClient,
    decoded,
    load_configuration,
)
from snapshot_shared.kube_watch import Bare, Listed, WatchEvent, changes

WATCH_S = 120
"""How long one watch lasts, in seconds; then the slices are listed again."""

_SLICES = f"/apis/{API}/resourceslices"


@contextlib.asynccontextmanager
async def cluster_api(kubeconfig: Path | None) -> AsyncIterator[KubeApi]:
    """Yield the API of a kubeconfig, or of the cluster of this pod. InvalidInput."""
    found = await load_configuration(str(kubeconfig) if kubeconfig else None)
    async with KubeClient(found) as client:
        yield KubeApi(client)


class KubeApi:
    """The `ClusterApi` port."""

    def __init__(self, client: KubeClient) -> None:
        """Ask by a client, which its owner closes."""
        self._client = client

    async def has_claims(self) -> bool:
        try:
            await self._client.request("GET", f"/apis/{API}")
        except NotFound:
            return False
        return True

    async def node_uid(self, node: str) -> str:
        answer = await self._client.request("GET", f"/api/v1/nodes/{node}")
        return decoded(_OBJECT, answer).metadata.uid

    async def claim(self, namespace: str, name: str) -> ResourceClaim:
        path = f"/apis/{API}/namespaces/{namespace}/resourceclaims/{name}"
        return decoded(_CLAIM, await self._client.request("GET", path))

    async def slices(self, node: str) -> tuple[list[FoundSlice], str]:
        answer = await self._client.request("GET", _SLICES, params=_selector(node))
        found = decoded(_LIST, answer)
        return found.items or [], found.metadata.resource_version

    async def create_slice(self, body: Mapping[str, Any]) -> None:
        await self._client.request("POST", _SLICES, body=body)

    async def replace_slice(self, name: str, body: Mapping[str, Any]) -> None:
        await self._client.request("PUT", f"{_SLICES}/{name}", body=body)

    async def delete_slice(self, name: str) -> None:
        with contextlib.suppress(NotFound):
            await self._client.request("DELETE", f"{_SLICES}/{name}")

    async def slices_changed(self, node: str, version: str) -> None:
        found = changes(self._client, _SLICES, _CHANGE, version, _selector(node), within_s=WATCH_S)
        async with contextlib.aclosing(found):
            async for change, _ in found:
                if change is not None:
                    return


class _ObjectMetadata(msgspec.Struct, frozen=True):
    uid: str


class _Object(msgspec.Struct, frozen=True):
    metadata: _ObjectMetadata


def _selector(node: str) -> dict[str, str]:
    return {"fieldSelector": f"spec.nodeName={node},spec.driver={DRIVER}"}


_OBJECT = msgspec.json.Decoder(_Object)
_CLAIM = msgspec.json.Decoder(ResourceClaim)
_LIST = msgspec.json.Decoder(Listed[FoundSlice])
_CHANGE = msgspec.json.Decoder(WatchEvent[Bare])
