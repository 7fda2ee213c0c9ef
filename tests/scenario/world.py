"""One simulated world, with the faults that a seed decides.

Nodes, a bus, operators, a store, a disk, and people who ask for things. The operator, the agents
and the GPU memory services are the product's own.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import random
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec

from snapshot_agent.domain.spec import Launch
from snapshot_operator.adapters.sqlite import SqliteCluster
from snapshot_operator.domain.conditions import timestamp
from snapshot_operator.main import _serve as serve_operator
from snapshot_operator.ports import Change, Listener
from snapshot_shared import subjects
from snapshot_shared.api import (
    ApplyReply,
    ApplyRequest,
    DeleteReply,
    DeleteRequest,
    VerifyReply,
    VerifyRequest,
)
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.courier import Clocks
from snapshot_shared.errors import Conflict, SnapbackError, StoreBusy
from snapshot_shared.objects import AnyObject, Pod
from snapshot_shared.telemetry import Telemetry
from tests.scenario.bus import SeededFaults, SimBus, SimServer
from tests.scenario.crash_rig import mounted
from tests.scenario.disk import SimDisk
from tests.scenario.faults import Fault, Settings, act
from tests.scenario.loop import CURRENT, Machine, Process, Quiet, VirtualLoop
from tests.scenario.node import MOUNT, SimNode, owner_of
from tests.scenario.rules import Kind, Rules
from tests.scenario.worker import Habits, SimWorker

log = logging.getLogger(__name__)

KINDS = ("DynamoCheckpoint", "Job", "Snapshot", "SnapshotContent", "Pod")
EPOCH = 1_800_000_000.0
SETTLE_S = 1800.0
"""How long after the last fault everything must be settled, in seconds of virtual time."""
LOOK_S = 1.0
READS_THAT_TAKE_TIME = 0.1
AGAIN_S = 15.0
"""How often to look when nothing has changed, in seconds."""


class World:
    """Everything, for one seed."""

    def __init__(self, seed: int, settings: Settings, faults: list[Fault]) -> None:
        self.seed = seed
        self.settings = settings
        self.faults = faults
        self.rng = random.Random(seed)
        self.loop = VirtualLoop(self.rng)
        self.loop.set_exception_handler(self._unhandled)
        self.epoch = EPOCH
        self.restart_s = settings.restart_s
        self.disk = SimDisk(lambda: owner_of(CURRENT.get()), mount=str(MOUNT))
        self.rules = Rules(self)
        self.notes: list[str] = []
        self.has_flipped_bits = False
        self.is_over = False
        self.is_healed = False
        self.network = SeededFaults(self.rng, slowest_s=settings.latency_s)
        self.network.repeated = settings.duplicates
        self.network.postponed = settings.duplicates
        self.network.lost_answers = settings.lost_answers
        self.network.lost_requests = settings.lost_answers
        self.network.lost_announcements = settings.lost_news
        self.server = _Server(self.rules, settings.room)
        self.buses: dict[str, SimBus] = {}
        self.store = SqliteCluster(
            None, timestamp=lambda: timestamp(EPOCH + self.loop.now), new_uid=self.new_uid
        )
        self.store.subscribe(self._stored)
        self.views: dict[StoreView, None] = {}
        self.version = 0
        self.operators: list[Process | None] = [None] * settings.operators
        self.nodes = [
            SimNode(self, f"node-{index}", rate=settings.rate(index))
            for index in range(settings.nodes)
        ]
        self._worker_habits: dict[str, Habits] = {}

    def node(self, name: str) -> SimNode:
        """Find a node."""
        return next(node for node in self.nodes if node.name == name)

    def read(self, path: str) -> bytes:
        """Read a file of the disk as it is. OSError."""
        content = self.disk.image[self.disk.os.find(path)]
        return bytes(content) if isinstance(content, bytearray) else b""

    def note(self, line: str) -> None:
        """Write a line of the world's diary."""
        self.notes.append(f"{self.loop.now:9.3f} {line}")

    def new_uid(self) -> str:
        return str(uuid.UUID(int=self.rng.getrandbits(128), version=4))

    def _stored(self, change: Change, value: AnyObject) -> None:
        self.version += 1
        self.rules.changed(change, value)
        for view in list(self.views):
            view.stored(change, value, CURRENT.get())

    def bus(self, name: str, process: Process) -> Any:
        """Connect a process; the server learns of its end."""
        bus = self.buses[process.name] = SimBus(self.server, name, faults=self.network)
        process.at_exit(bus, lambda: self.server.drop_client(bus))
        return bus

    def partition(self, name: str, seconds: float) -> None:
        """Part a process from the bus for a while."""
        if bus := self.buses.get(name):
            with contextlib.suppress(KeyError):
                self.server.cut(bus)
                self.loop.in_world(seconds, self.server.heal, bus)

    def habits_of(self, launch: Launch) -> Habits:
        """Give how the worker of a pod behaves."""
        return self.settings.habits.get(launch.env["POD_NAME"], Habits())

    def workers(self) -> Iterator[SimWorker]:
        """Give every worker that lives."""
        for node in self.nodes:
            for worker in node.workers.values():
                if worker.process.is_alive:
                    yield worker

    def may_wait(self, pod: Pod) -> bool:
        """Say whether a pod may stay Pending for ever: nothing in the world can start it."""
        return not pod.status.node_name

    def ended(self, process: Process, task: asyncio.Task[None]) -> None:
        """Note how a service's main task ended; it is a crash, and it is started again."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.note(f"{process} ended: {error!r}")
        process.kill(1)

    def defect(self, task: asyncio.Task[None]) -> None:
        """Note that a part of the world itself is broken."""
        if not task.cancelled() and (error := task.exception()) is not None:
            self.rules.fail("defect", f"{task.get_name()}: {error!r}")

    def _unhandled(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if not self.is_over and error is not None:
            self.rules.fail("defect", f"{context['message']}: {error!r}")

    def stop(self) -> None:
        """End the run."""
        self.is_over = True
        self.loop.call_soon(self.loop.stop)

    # Operators.

    def start_operator(self, index: int) -> None:
        """Start one operator; it is started again whenever it ends."""
        machine = Machine(f"operator-{index}", rate=1.0)
        process = Process(self.loop, machine, f"operator-{index}")
        self.operators[index] = process
        delay = 0.5 + self.rng.random() * self.restart_s
        process.at_exit("again", lambda: self.loop.in_world(delay, self.start_operator, index))
        task = process.spawn(self._operator(process), "operator")
        task.add_done_callback(lambda done: self.ended(process, done))

    async def _operator(self, process: Process) -> None:
        clocks = Clocks(
            lambda: self.loop.now,
            lambda: EPOCH + self.loop.now + process.machine.jump,
            process.machine.boot_id,
        )
        bus = self.bus(process.name, process)
        view = StoreView(self, process)
        self.views[view] = None
        process.at_exit(view, lambda: self.views.pop(view, None))
        await bus.connect()
        await bus.ensure_assets()
        telemetry = Telemetry("snap-operator", "operator", "0")
        await serve_operator(asyncio.Event(), view, bus, telemetry, clocks)  # type: ignore[arg-type]

    # People.

    async def ask_for(self, verb: str, request: Any, reply: Any) -> Any:
        """Ask the operator until it answers."""
        while True:
            try:
                data = await self.user.request(subjects.api(verb), encode_json(request))
                return decode_json(data, reply)
            except SnapbackError:
                await asyncio.sleep(1.0)

    async def apply(self, document: dict[str, Any]) -> None:
        """Apply one manifest."""
        request = ApplyRequest(documents=[msgspec.Raw(json.dumps(document).encode())])
        reply = await self.ask_for("apply", request, ApplyReply)
        if reply.failure is not None:
            self.note(f"apply {document['metadata']['name']}: {reply.failure}")

    async def delete(self, kind: str, name: str) -> None:
        """Delete one object; a node may be deleted only when it has been away for long."""
        space = None if kind == "Node" else "default"
        request = DeleteRequest(kind=kind, namespace=space, name=name)
        again = ("StoreBusy", "Conflict", "Forbidden")
        reply = await self.ask_for("delete", request, DeleteReply)
        while reply.failure is not None and reply.failure.reason in again:
            await asyncio.sleep(20.0)
            reply = await self.ask_for("delete", request, DeleteReply)
        self.note(f"delete {kind} {name}: {reply.failure or 'ok'}")

    async def verify(self, kind: str, name: str) -> None:
        """Ask for a verification."""
        request = VerifyRequest(kind=kind, namespace="default", name=name)
        reply = await self.ask_for("verify", request, VerifyReply)
        self.note(f"verify {kind} {name}: {reply.failure or reply.verification}")

    # The run.

    def run(self) -> list[str]:
        """Live through it all; the broken rules."""
        asyncio.set_event_loop(None)
        try:
            self.loop.run_until_complete(self._main())
        except Quiet:
            self.rules.fail("lost", "nothing can happen any more")
        except RuntimeError as error:
            if not self.is_over:
                raise
            log.debug("%s", error)
        finally:
            self.is_over = True
            with mounted(self.disk):
                self.loop.bury()
            self.store.close()
            self.loop.close()
        return self.rules.broken

    async def _main(self) -> None:
        with mounted(self.disk):
            for index in range(self.settings.operators):
                self.start_operator(index)
            for node in self.nodes:
                node.boot()
            self.people = Process(self.loop, Machine("desk"), "people")
            self.user = self.bus("people", self.people)
            await self.people.spawn(self.user.connect())
            for at, document in self.settings.applied:
                self._later(at, lambda d=document: self.apply(d))
            for at, kind, name in self.settings.deleted:
                self.ask_to_delete(at, kind, name)
            for at, kind, name in self.settings.verified:
                self._later(at, lambda k=kind, n=name: self.verify(k, n))
            for fault in self.faults:
                self.loop.in_world(fault.at, act, self, fault)
            await self._until(self.settings.fault_s)
            self.heal()
            await self._settle()

    def _later(self, delay_s: float, make: Callable[[], Any]) -> None:
        self.loop.in_world(delay_s, lambda: self.people.spawn(make()))

    def ask_to_delete(self, delay_s: float, kind: str, name: str) -> None:
        """Have somebody delete an object later."""
        self._later(delay_s, lambda: self.delete(kind, name))

    async def _until(self, end: float) -> None:
        while self.loop.now < end:
            await asyncio.sleep(LOOK_S)
            self.rules.look()

    def heal(self) -> None:
        """End every fault: what was away comes back, and nothing more breaks."""
        self.note("healed")
        self.network.repeated = self.network.postponed = 0.0
        self.network.lost_answers = self.network.lost_requests = 0.0
        self.network.lost_announcements = 0.0
        if not self.server.is_up:
            self.server.restart()
        for bus in self.buses.values():
            self.server.heal(bus)
        self.disk.heal()
        self.is_healed = True
        for node in self.nodes:
            for process in list(node.running):
                if not any(process is worker.process for worker in node.workers.values()):
                    process.resume()
                process.fuse = None
            if not node.machine.is_on and not node.is_retired:
                node.boot()
        for operator in self.operators:
            if operator is not None:
                operator.resume()
                operator.fuse = None

    async def _settle(self) -> None:
        """Wait until nothing is left to do, and nothing is left behind."""
        end = self.loop.now + SETTLE_S
        left: list[tuple[Kind, str]] = [("lost", "nothing was looked at")]
        seen, again_at = -1, 0.0
        while left and not self.is_over:
            await asyncio.sleep(LOOK_S)
            self.rules.look()
            if seen == self.version and self.loop.now < again_at:
                continue
            seen, again_at = self.version, self.loop.now + AGAIN_S
            values = await self.everything()
            left = [("lost", line) for line in self.rules.unsettled(values)]
            left = left or list(self.rules.left_behind(values))
            if self.loop.now > end:
                for kind, line in left:
                    self.rules.fail(kind, f"{SETTLE_S} s after the last fault: {line}")

    async def everything(self) -> list[AnyObject]:
        """Read the whole store."""
        return [value for kind in KINDS for value in await self.store.list(kind)]


class StoreView:
    """The `Cluster` port as one operator sees it: over a network."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._listeners: list[Listener] = []
        self._others = world.store.as_of()

    def subscribe(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def stored(self, change: Change, value: AnyObject, writer: Process | None) -> None:
        """Take note of a write. An operator is told of its own; those of others it may miss."""
        if writer is self._process:
            for listener in self._listeners:
                listener(change, value)
        else:
            self._others = self._world.store.as_of()

    def as_of(self) -> int:
        return self._world.store.as_of()

    def others_since(self, as_of: int) -> bool:
        return self._others > as_of

    async def _look(self) -> None:
        """Reading takes no time worth a turn of the loop, most of the time."""
        if self._world.rng.random() < READS_THAT_TAKE_TIME:
            await self._delay()

    async def _delay(self) -> None:
        world = self._world
        await asyncio.sleep(world.rng.random() * 0.002)
        if not world.is_healed and world.rng.random() < world.settings.store_errors:
            raise StoreBusy("another operator writes")

    async def get(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        await self._look()
        return await self._world.store.get(kind, namespace, name)

    async def by_uid(self, uid: str) -> AnyObject | None:
        await self._look()
        return await self._world.store.by_uid(uid)

    async def list(
        self, kind: str, namespace: str | None = None, *, after: str = "", limit: int = 100_000
    ) -> list[AnyObject]:
        await self._look()
        return await self._world.store.list(kind, namespace, after=after, limit=limit)

    async def create(self, value: AnyObject) -> AnyObject:
        await self._delay()
        return await self._world.store.create(value)

    async def update_status(self, value: AnyObject, *, as_of: int | None = None) -> AnyObject:
        await self._delay()
        if as_of is not None and self._others > as_of:
            raise Conflict("another operator wrote since this was decided")
        world = self._world
        if not world.is_healed and world.rng.random() < world.settings.conflicts:
            raise Conflict("somebody else wrote first")
        return await self._world.store.update_status(value)

    async def update_spec(self, value: AnyObject) -> AnyObject:
        await self._delay()
        return await self._world.store.update_spec(value)

    async def delete(self, value: AnyObject) -> bool:
        await self._delay()
        return await self._world.store.delete(value)

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> None:
        await self._delay()
        await self._world.store.remove_finalizer(value, finalizer)


class _Server(SimServer):
    """A server whose streams are looked at."""

    def __init__(self, rules: Rules, room: int) -> None:
        super().__init__()
        self._rules = rules
        self._room = room

    def ensure(self) -> None:
        super().ensure()
        if self._room:
            orders = self.streams[subjects.ORDERS]
            orders.config = orders.config.evolve(max_msgs=self._room)

    def publish(self, subject: str, data: bytes, headers: Mapping[str, str]) -> int:
        sequence = super().publish(subject, data, headers)
        self._rules.published(subject, data)
        return sequence

    def ack(self, name: str, durable: str, sequence: int) -> None:
        super().ack(name, durable, sequence)
        if message := self.stream(name).messages.get(sequence):
            self._rules.acked(message.subject, message.data)
