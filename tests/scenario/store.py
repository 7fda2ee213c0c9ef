"""The object store as one simulated operator reaches it: over a network, and with late events.

What is written and read by name goes to the store that all share, and takes a moment. Events come
later, as those of the caches of the Kubernetes API: each kind by its own time, an object's changes
in their order, several of them as one, those of the process itself among them.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from snapshot_operator.local.pods import holds_devices
from snapshot_operator.ports import Event
from snapshot_shared.errors import Conflict, StoreBusy
from snapshot_shared.objects.kinds import AnyObject, kind_of
from snapshot_shared.objects.kubernetes import Pod
from tests.scenario.loop import CURRENT

if TYPE_CHECKING:
    from tests.scenario.loop import Process
    from tests.scenario.world import World

T = TypeVar("T")

TRIP_S = 0.002
"""The longest way to the store, or back from it, in seconds."""
TIMEOUT_S = 2.0
"""How long a call waits for a store that is out of reach, in seconds."""
TOUCHED = "example.com/touched"
"""The annotation that somebody else writes, so that the operator's next write is a conflict."""


class SimStore:
    """The `Store` port of one operator process."""

    def __init__(self, world: World, process: Process) -> None:
        """Use the store of a world; nothing is heard of it once the process has ended."""
        self._world = world
        self._process = process
        self._listeners: list[Callable[[Event], None]] = []
        self._late: dict[str, dict[str, Event]] = {}
        """By kind, the last event of each uid that is not reported yet."""
        self._touches = 0
        world.stores[process] = self
        process.at_exit(self, lambda: world.stores.pop(process))

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        self._listeners.append(listener)

    def stored(self, event: Event) -> None:
        """Take note of a change of the shared store, and report it later."""
        kind = kind_of(event.value).name
        is_first = kind not in self._late
        self._late.setdefault(kind, {})[event.value.metadata.uid] = event
        if is_first:
            self._report_after(self._lag(), kind)

    def _lag(self) -> float:
        return self._world.rng.random() ** 2 * self._world.settings.stale_s

    def _report_after(self, delay_s: float, kind: str) -> None:
        context = contextvars.Context()
        context.run(CURRENT.set, self._process)
        context.run(self._world.loop.call_later, delay_s, self._report, kind)

    def _report(self, kind: str) -> None:
        if self._is_apart:
            self._report_after(TIMEOUT_S, kind)
            return
        for event in self._late.pop(kind).values():
            for listener in self._listeners:
                listener(event)

    @property
    def _is_apart(self) -> bool:
        return self._process.name in self._world.apart

    async def _trip(self) -> None:
        """Take the time of one way; half of them take none that is worth a turn of the loop."""
        chance = self._world.rng.random()
        if chance < 0.5:
            await asyncio.sleep(chance * 2 * TRIP_S)

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Do something in the shared store, a moment later. StoreBusy: it was not done."""
        world = self._world
        try:
            await self._trip()
            if self._is_apart:
                await asyncio.sleep(TIMEOUT_S)
                raise StoreBusy("the store is out of reach")
            if not world.is_healed and world.rng.random() < world.settings.store_errors:
                raise StoreBusy("another process writes")
            result = await work
        finally:
            work.close()
        await self._trip()
        return result

    async def list(self, kind: str) -> list[AnyObject]:
        return await self._call(self._world.store.list(kind))

    async def read(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        return await self._call(self._world.store.read(kind, namespace, name))

    async def find(self, uid: str) -> AnyObject | None:
        return await self._call(self._world.store.find(uid))

    async def create(self, value: AnyObject) -> AnyObject:
        return await self._call(self._world.store.create(value))

    async def update_status(self, value: AnyObject) -> AnyObject:
        await self._meddle(value)
        return await self._call(self._update_status(value))

    async def _update_status(self, value: AnyObject) -> AnyObject:
        if self._world.settings.lease == "lease" and isinstance(value, Pod):
            await self._check_placement(value)
        return await self._world.store.update_status(value)

    async def _check_placement(self, pod: Pod) -> None:
        """Refuse a second pod on a device, as one scheduler for a whole cluster does.

        Under a lease two operators may place for a moment; in a cluster neither of them does.
        """
        found = await self._world.store.find(pod.metadata.uid)
        if not isinstance(found, Pod) or found.status.node_name:
            return
        wanted = {device.uuid for device in pod.status.devices}
        for other in await self._world.store.list("Pod") if wanted else []:
            if not isinstance(other, Pod) or not holds_devices(other):
                continue
            if wanted & {device.uuid for device in other.status.devices}:
                raise Conflict(f"{other.metadata.name} has a device of {pod.metadata.name}")

    async def _meddle(self, value: AnyObject) -> None:
        """Have somebody else annotate the object first, by chance."""
        world = self._world
        if world.is_healed or world.rng.random() >= world.settings.conflicts:
            return
        self._touches += 1
        found = await world.store.find(value.metadata.uid)
        if found is not None:
            text = f"{self._process}-{self._touches}"
            await world.store.annotate(found, TOUCHED, text)

    async def update_spec(self, value: AnyObject) -> AnyObject:
        return await self._call(self._world.store.update_spec(value))

    async def annotate(self, value: AnyObject, key: str, text: str) -> AnyObject:
        return await self._call(self._world.store.annotate(value, key, text))

    async def label(self, value: AnyObject, key: str, text: str | None) -> AnyObject:
        return await self._call(self._world.store.label(value, key, text))

    async def add_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject:
        return await self._call(self._world.store.add_finalizer(value, finalizer))

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject | None:
        return await self._call(self._world.store.remove_finalizer(value, finalizer))

    async def delete(self, value: AnyObject) -> AnyObject | None:
        return await self._call(self._world.store.delete(value))
