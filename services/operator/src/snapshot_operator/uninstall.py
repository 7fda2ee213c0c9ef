"""Ends Snapback in a cluster in order: `python -m snapshot_operator.uninstall begin|finish`.

The chart runs `begin` before its release is deleted, while operator and agents are there: captures
under way are aborted, so that their workers go on, and with the policy `Delete` all checkpoints and
snapshots are deleted, with the artifacts that their own policies do not retain. It runs `finish`
when operator and agents are gone: finalizers, which nothing else takes off, the labels of
nodes, the Lease and the certificate are removed, and with `Delete` the definitions as well.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from snapshot_api.facts import AGENT_LABEL, SECCOMP_LABEL
from snapshot_api.kind import Kind
from snapshot_api.kinds import KINDS
from snapshot_api.well_known import ABORT, GROUP
from snapshot_operator.core.plan import FINALIZER
from snapshot_operator.kube.rbac import CERTIFICATE_SECRET, NAME
from snapshot_shared.errors import InvalidInput, NotFound
from snapshot_shared.kube_client import MERGE_PATCH, KubeClient, load_configuration
from snapshot_shared.orders import Label
from snapshot_shared.service import run, until_stopped
from snapshot_shared.settings import load
from snapshot_shared.tasks import any_set
from snapshot_shared.telemetry import log_to_stderr
from snapshot_shared.transitions import CAPTURE

log = logging.getLogger(__name__)

SERVICE = "snap-uninstall"
AGAIN_S = 1.0
PAGE = 500
OURS = [kind for kind in KINDS.values() if kind.is_ours]
GIVEN = [kind for kind in OURS if kind.name in ("DynamoCheckpoint", "Snapshot")]
"""What people apply; all else follows from it."""

Document = dict[str, Any]


class UninstallSettings(msgspec.Struct, frozen=True, kw_only=True):
    """`uninstall_deadline_s` is how long captures may take to end; then they are left."""

    namespace: Label = "snapback-system"
    uninstall_policy: Literal["Keep", "Delete"] = "Keep"
    uninstall_deadline_s: Annotated[float, Meta(gt=0)] = 120.0
    kubeconfig: str | None = None
    log_level: str = "INFO"


class Uninstall:
    """One cluster, as it is left."""

    def __init__(self, client: KubeClient, settings: UninstallSettings) -> None:
        """Use the rights of `client`."""
        self._client = client
        self._settings = settings

    async def begin(self) -> None:
        """End what is under way, while operator and agents are there."""
        if self._settings.uninstall_policy == "Delete":
            for kind in GIVEN:
                async for item in self._items(kind):
                    await self._delete(_path_of(kind, item))
        else:
            async for item in self._items(KINDS["SnapshotContent"]):
                if _is_under_way(item):
                    body = {"metadata": {"annotations": {ABORT: "the uninstall of Snapback"}}}
                    await self._patch(_path_of(KINDS["SnapshotContent"], item), body)
        try:
            async with asyncio.timeout(self._settings.uninstall_deadline_s):
                while left := await self._unfinished():
                    log.info("waiting for the end of %s", ", ".join(left[:5]))
                    await any_set(AGAIN_S)
        except TimeoutError:
            log.warning("not ended within %g s, and left", self._settings.uninstall_deadline_s)

    async def finish(self) -> None:
        """Remove what the release does not own and its programs have made."""
        for kind in OURS:
            async for item in self._items(kind):
                found = item["metadata"].get("finalizers", [])
                if FINALIZER in found:
                    rest = [each for each in found if each != FINALIZER] or None
                    await self._patch(_path_of(kind, item), {"metadata": {"finalizers": rest}})
        nodes = f"/api/v1/nodes?labelSelector={AGENT_LABEL.replace('/', '%2F')}"
        for node in await self._page(nodes):
            body = {"metadata": {"labels": {AGENT_LABEL: None, SECCOMP_LABEL: None}}}
            await self._patch(f"/api/v1/nodes/{node['metadata']['name']}", body)
        space = f"namespaces/{self._settings.namespace}"
        await self._delete(f"/apis/coordination.k8s.io/v1/{space}/leases/{NAME}")
        await self._delete(f"/api/v1/{space}/secrets/{CERTIFICATE_SECRET}")
        if self._settings.uninstall_policy == "Delete":
            for kind in OURS:
                name = f"{kind.plural}.{kind.group}"
                await self._delete(
                    f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{name}"
                )

    async def _unfinished(self) -> list[str]:
        if self._settings.uninstall_policy == "Delete":
            kinds = [*GIVEN, KINDS["SnapshotContent"]]
            return [_name_of(kind, item) for kind in kinds async for item in self._items(kind)]
        kind = KINDS["SnapshotContent"]
        return [_name_of(kind, item) async for item in self._items(kind) if _is_under_way(item)]

    async def _items(self, kind: Kind) -> AsyncIterator[Document]:
        """Yield the objects of a kind, in all namespaces; none where it is not defined."""
        with contextlib.suppress(NotFound):
            for item in await self._page(f"/apis/{GROUP}/{kind.plural}"):
                yield item

    async def _page(self, path: str) -> list[Document]:
        """Return all items of a list, page after page."""
        items: list[Document] = []
        params = {"limit": str(PAGE)}
        while True:
            found = msgspec.json.decode(await self._client.request("GET", path, params=params))
            items += found["items"]
            if not (following := found["metadata"].get("continue")):
                return items
            params["continue"] = following

    async def _patch(self, path: str, body: Document) -> None:
        with contextlib.suppress(NotFound):
            await self._client.request("PATCH", path, body=body, content_type=MERGE_PATCH)
            log.info("changed %s", path)

    async def _delete(self, path: str) -> None:
        with contextlib.suppress(NotFound):
            await self._client.request("DELETE", path)
            log.info("deleted %s", path)


def _is_under_way(item: Document) -> bool:
    status = item.get("status", {})
    is_over = status.get("capture", "Pending") in CAPTURE.terminal()
    return not is_over or bool(status.get("obligations"))


def _path_of(kind: Kind, item: Document) -> str:
    meta = item["metadata"]
    where = f"namespaces/{meta['namespace']}/" if "namespace" in meta else ""
    return f"/apis/{GROUP}/{where}{kind.plural}/{meta['name']}"


def _name_of(kind: Kind, item: Document) -> str:
    return f"{kind.name.lower()}/{item['metadata']['name']}"


async def uninstall(stop: asyncio.Event) -> None:
    """Carry out the part that the argument names, or until `stop` is set."""
    if sys.argv[1:] not in (["begin"], ["finish"]):
        raise InvalidInput("usage: python -m snapshot_operator.uninstall begin|finish")
    settings = load(UninstallSettings)
    log_to_stderr(SERVICE, "operator", settings.log_level)
    async with KubeClient(await load_configuration(settings.kubeconfig)) as client:
        work = Uninstall(client, settings)
        await until_stopped(stop, work.begin() if sys.argv[1] == "begin" else work.finish())


if __name__ == "__main__":
    sys.exit(run(uninstall))
