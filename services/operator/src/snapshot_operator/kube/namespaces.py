"""The namespaces whose objects are reconciled, where a label selector limits them."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

import msgspec

from snapshot_operator.runtime.world import Selection, World
from snapshot_shared.errors import InvalidInput, InvalidManifest, SnapbackError
from snapshot_shared.kube_client import KubeClient, back_off, decoded
from snapshot_shared.kube_watch import WATCH_S, Listed, WatchEvent, changes, follow, pages
from snapshot_shared.service import until_stopped

log = logging.getLogger(__name__)

PATH = "/api/v1/namespaces"


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str = ""
    resource_version: str = ""


class _Namespace(msgspec.Struct, frozen=True):
    metadata: _Meta


_LIST = msgspec.json.Decoder(Listed[_Namespace])
_CHANGE = msgspec.json.Decoder(WatchEvent[_Namespace])


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
        await follow("namespaces", lambda: self._version, self._watch, self._list, self._jitter)

    async def _list(self) -> None:
        names, version = set[str](), ""
        async for page in pages(self._client, PATH, _LIST, {"labelSelector": self._selector}):
            names |= {item.metadata.name for item in page.items or ()}
            version = page.metadata.resource_version
        added, self._names = names - self._names, names
        self._version = version
        for name in added:
            self._report(name)

    async def _watch(self) -> None:
        selected, lasts_s = {"labelSelector": self._selector}, WATCH_S * (1 + self._jitter())
        found = changes(self._client, PATH, _CHANGE, self._version, selected, within_s=lasts_s)
        async with contextlib.aclosing(found):
            async for change, self._version in found:
                name = change.object.metadata.name if change is not None else ""
                if change is not None and change.type == "DELETED":
                    # So the API server says, too, that its labels do not match any more.
                    self._names.discard(name)
                elif change is not None and name not in self._names:
                    self._names.add(name)
                    self._report(name)

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
