"""The namespaces whose objects are reconciled, where a label selector limits them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from snapshot_operator.kube.store import WATCH_S, watch_error
from snapshot_operator.runtime.world import Selection, World
from snapshot_shared.errors import InvalidInput, InvalidManifest, SnapbackError
from snapshot_shared.kube_client import KubeClient, ResourceExpired, back_off, decoded
from snapshot_shared.service import until_stopped

log = logging.getLogger(__name__)

PATH = "/api/v1/namespaces"


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Namespace(msgspec.Struct, frozen=True):
    metadata: _Meta


class _List(msgspec.Struct, frozen=True):
    metadata: _Meta
    items: list[_Namespace] | None = None


class _Change(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


_LIST = msgspec.json.Decoder(_List)
_CHANGE = msgspec.json.Decoder(_Change)
_NAMESPACE = msgspec.json.Decoder(_Namespace)


async def is_selected(client: KubeClient, selector: str, namespace: str) -> bool:
    """Whether a label selector matches a namespace, as the API server sees it now."""
    params = {"labelSelector": selector, "fieldSelector": f"metadata.name={namespace}"}
    return bool(decoded(_LIST, await client.request("GET", PATH, params=params)).items)


class SelectedNamespaces(Selection):
    """Those that a selector matches, as the API server sees it."""

    def __init__(self, client: KubeClient, selector: str, jitter: Callable[[], float]) -> None:
        """Use a label selector as kubectl writes it, such as `team in (a, b),tier!=dev`."""
        self._client = client
        self._selector = selector
        self._jitter = jitter
        self._names: set[str] = set()
        self._version = ""
        self._listeners: list[Callable[[str], None]] = []

    def has(self, namespace: str) -> bool:
        """Whether a namespace is selected now."""
        return namespace in self._names

    def subscribe(self, listener: Callable[[str], None]) -> None:
        """Report each namespace that is selected from now on."""
        self._listeners.append(listener)

    async def sync(self) -> None:
        """Read which are selected now; wait for an API server that is away. InvalidInput."""
        failures = 0
        while not self._version:
            try:
                await self._list()
            except InvalidManifest as error:
                raise InvalidInput(
                    f"SNAPBACK_NAMESPACE_SELECTOR={self._selector!r}: {error}",
                    next_step="write a label selector as kubectl takes it, such as team=a",
                ) from error
            except SnapbackError as error:
                log.warning("the namespaces are not listed: %s", error)
                failures += 1
                await back_off(failures, self._jitter())
        log.info("%d namespaces are selected by %s", len(self._names), self._selector)

    async def run(self) -> None:
        """Follow changes of the labels of namespaces, until it is cancelled."""
        failures = 0
        while True:
            before = self._version
            try:
                await self._watch()
            except ResourceExpired:
                with contextlib.suppress(SnapbackError):
                    await self._list()
            except SnapbackError as error:
                log.warning("the namespaces are not watched: %s", error)
            failures = 0 if self._version != before else failures + 1
            await back_off(failures, self._jitter())

    async def _list(self) -> None:
        params = {"labelSelector": self._selector}
        page = decoded(_LIST, await self._client.request("GET", PATH, params=params))
        names = {item.metadata.name for item in page.items or ()}
        added, self._names = names - self._names, names
        self._version = page.metadata.resource_version
        for name in added:
            self._report(name)

    async def _watch(self) -> None:
        params = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "labelSelector": self._selector,
            "resourceVersion": self._version,
            "timeoutSeconds": str(int(WATCH_S * (1 + self._jitter()))),
        }
        async with contextlib.aclosing(self._client.watch(PATH, params)) as lines:
            async for line in lines:
                change = decoded(_CHANGE, line)
                if change.type == "ERROR":
                    raise watch_error(bytes(change.object))
                meta = _NAMESPACE.decode(change.object).metadata
                self._version = meta.resource_version
                if change.type == "DELETED":
                    # So the API server says, too, that its labels do not match any more.
                    self._names.discard(meta.name)
                elif change.type != "BOOKMARK" and meta.name not in self._names:
                    self._names.add(meta.name)
                    self._report(meta.name)

    def _report(self, name: str) -> None:
        for listener in self._listeners:
            listener(name)


def selecting(world: World, selected: SelectedNamespaces) -> World:
    """Return a world in which only the objects of selected namespaces are reconciled."""

    async def prepare() -> None:
        await world.prepare()
        await selected.sync()

    async def follow() -> None:
        await until_stopped(asyncio.Event(), world.follow(), selected.run())

    return world._replace(namespaces=selected, prepare=prepare, follow=follow)
