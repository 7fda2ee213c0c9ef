"""The object store and the lease as one simulated operator reaches them.

What is written and read by name goes to the store that all share, and takes a moment. Events come
later, as those of the caches of the Kubernetes API: each kind by its own time, an object's changes
in their order, several of them as one, those of the process itself among them.

Which operator is the active one a lock of a file decides, or a lease. The lock goes with its
holder's process, and a holder that is stopped keeps it. The lease has to be renewed: whoever is
stopped or cut off for too long loses it, and learns that when it looks again.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_operator.local.pods import holds_devices
from snapshot_operator.ports import Event
from snapshot_shared.errors import Conflict, StoreBusy
from tests.scenario.loop import CURRENT

if TYPE_CHECKING:
    from tests.scenario.loop import Process
    from tests.scenario.world import World

T = TypeVar("T")

LASTS_S = 15.0
"""How long a lease is held without a renewal, in seconds."""
RENEW_S = 4.0
GIVE_UP_S = 10.0
"""How long its holder goes on without a renewal that succeeded, in seconds."""
ENDING_S = 0.01
"""How long a write may take that was under way when the loss was noticed, in seconds."""
LOOK_S = 0.5
"""The longest time that a look at the lease takes, in seconds."""
TRIP_S = 0.002
"""The longest way to the store, or back from it, in seconds."""
TIMEOUT_S = 2.0
"""How long a call waits for a store that is out of reach, in seconds."""
TOUCHED = "example.com/touched"
"""The annotation that somebody else writes, so that the operator's next write is a conflict."""


def _passed_on(name: str) -> Callable[..., Any]:
    async def call(self: SimStore, *arguments: Any) -> Any:
        return await self._call(getattr(self._world.store, name)(*arguments))

    return call


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
        if self._world.is_apart(self._process):
            self._report_after(TIMEOUT_S, kind)
            return
        for event in self._late.pop(kind).values():
            for listener in self._listeners:
                listener(event)

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
            if self._world.is_apart(self._process):
                await asyncio.sleep(TIMEOUT_S)
                raise StoreBusy("the store is out of reach")
            if not world.is_healed and world.rng.random() < world.settings.store_errors:
                raise StoreBusy("another process writes")
            result = await work
        finally:
            work.close()
        await self._trip()
        return result

    list, read, find, create = map(_passed_on, ("list", "read", "find", "create"))
    spec_of = _passed_on("spec_of")
    read_document, create_document = map(_passed_on, ("read_document", "create_document"))
    update_spec, annotate, label = map(_passed_on, ("update_spec", "annotate", "label"))
    add_finalizer, remove_finalizer = map(_passed_on, ("add_finalizer", "remove_finalizer"))
    delete = _passed_on("delete")

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


class Lease:
    """The lock or the lease of one world. It is no process: whoever holds it may end."""

    def __init__(self, world: World) -> None:
        """`Settings.lease` decides which of the two it is."""
        self._world = world
        self.is_file = world.settings.lease == "file"
        self.holder: Process | None = None
        self.active: dict[Process, int] = {}
        """The processes that work as the active one, each with the number of its term."""
        self._noticed: dict[Process, float] = {}
        self._terms = 0
        self._renewed_at = 0.0
        self._waiting: dict[Process, asyncio.Future[None]] = {}

    def take(self, process: Process) -> bool:
        """Give a process the lease if it is free."""
        if not self._is_free:
            return False
        self.holder, self._renewed_at = process, self._world.loop.now
        self._terms += 1
        self.active[process] = self._terms
        process.at_exit(self, lambda: self._ended(process))
        self._world.note(f"{process} is the active operator")
        return True

    @property
    def _is_free(self) -> bool:
        if self.holder is None:
            return True
        return not self.is_file and self._world.loop.now >= self._expires_at

    @property
    def _expires_at(self) -> float:
        return self._renewed_at + LASTS_S

    def renew(self, process: Process) -> bool:
        """Renew the lease; False when another has it."""
        if self.holder is not process:
            return False
        self._renewed_at = self._world.loop.now
        return True

    def is_noticed(self, process: Process) -> bool:
        """Whether a process has had the time to end its work since it learned of its loss."""
        at = self._noticed.get(process)
        return at is not None and self._world.loop.now > at + ENDING_S

    def notice(self, process: Process) -> None:
        """Note that a process has learned that the lease is lost."""
        self._noticed[process] = self._world.loop.now
        self._world.note(f"{process} has lost the lease")

    def leave(self, process: Process) -> None:
        """Note that a process does not work as the active one any more."""
        self.active.pop(process, None)

    def _ended(self, process: Process) -> None:
        self.leave(process)
        if self.is_file and self.holder is process:
            self.holder = None
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(None)

    async def is_free_again(self, process: Process) -> None:
        """Wait until the lease may be free."""
        if not self.is_file:
            await asyncio.sleep(max(self._expires_at - self._world.loop.now, 0.0))
            return
        future = self._waiting[process] = asyncio.get_running_loop().create_future()
        process.at_exit(future, lambda: self._waiting.pop(process, None))
        await future


class Candidate:
    """The `Leadership` port of one operator process."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._lease = world.lease
        self._process = process

    @contextlib.asynccontextmanager
    async def held(self) -> AsyncIterator[asyncio.Event]:
        """Wait for the lease; the event is set when it was lost, or cannot be renewed."""
        lease, process, lost = self._lease, self._process, asyncio.Event()
        while self._world.is_apart(self._process) or not lease.take(process):
            await lease.is_free_again(process)
            await self._look()
        keeping = asyncio.ensure_future(self._keep(lost))
        try:
            yield lost
        finally:
            keeping.cancel()
            lease.leave(process)

    async def _look(self) -> None:
        await asyncio.sleep(self._world.rng.random() * LOOK_S)

    async def _keep(self, lost: asyncio.Event) -> None:
        if self._lease.is_file:
            return
        renewed_at = asked_at = self._world.loop.now
        while asked_at - renewed_at < GIVE_UP_S:
            await asyncio.sleep(RENEW_S)
            asked_at = self._world.loop.now
            await self._look()
            if self._world.is_apart(self._process):
                continue
            if not self._lease.renew(self._process):
                break
            renewed_at = asked_at
        self._lease.notice(self._process)
        lost.set()


def at_once(work: Coroutine[Any, Any, T]) -> T:
    """Return what a coroutine returns that waits for nothing."""
    try:
        work.send(None)
    except StopIteration as done:
        result: T = done.value
        return result
    raise AssertionError(f"{work} waits")
