"""A simulated node: the real agent and GPU memory service over simulated processes.

Control directories, guards and clocks are simulated, too. Files are those of the world's disk.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import random
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gms.handlers.control import GmsControl
from gms.handlers.orders import GmsOrders
from gms.ports import Memory
from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_agent.adapters.cooperative import Cooperative
from snapshot_agent.adapters.guard import RETURN_S
from snapshot_agent.adapters.guards import ANSWERS_WITHIN_S, MARGIN_S
from snapshot_agent.adapters.library import ArtifactLibrary
from snapshot_agent.adapters.operator import OperatorClient
from snapshot_agent.adapters.presence import PresencePublisher
from snapshot_agent.domain import control
from snapshot_agent.domain.control import ContainerPaths
from snapshot_agent.domain.driving import Release
from snapshot_agent.domain.spec import NodeEnvironment, ProcessSpec
from snapshot_agent.handlers.agent import Agent, routes
from snapshot_agent.handlers.inventory import Inventory, PodInventory
from snapshot_agent.ports import Dump, GuardSpec, RestoreSource, Worker
from snapshot_agent.ports import Machine as AgentMachine
from snapshot_agent.ports import Process as ProcessId
from snapshot_shared import files
from snapshot_shared.artifact import Facts
from snapshot_shared.clocks import Clocks
from snapshot_shared.courier import Courier
from snapshot_shared.errors import Failure, NoSpace, SourceExited
from snapshot_shared.ids import check_node
from snapshot_shared.journal import MIN_BYTES, Journal
from snapshot_shared.keys import ArtifactKeys
from snapshot_shared.order_book import OrderBook
from snapshot_shared.orders import PodRef, Presence, PresenceDevice
from snapshot_shared.runner import Runner
from snapshot_shared.service import until_stopped
from snapshot_shared.telemetry import Telemetry
from tests.scenario.builds import NEWER, NEXT, Build
from tests.scenario.disk import Owner
from tests.scenario.gpu import SimGms, SimGpuMemory, SimTransfers
from tests.scenario.loop import Machine, Process, VirtualLoop, current
from tests.scenario.worker import SimWorker, terminate

if TYPE_CHECKING:
    from tests.scenario.world import World

MOUNT = Path("/sim")
SHARED = MOUNT / "shared"
SLOTS = 2
INVENTORY_EVERY_S = 30.0
AGAIN_S = 0.5
"""How long a service that ended stays away, at least, in seconds."""


class SimNode:
    """One node: its machine, what runs on it and what lies on its disk."""

    def __init__(self, world: World, name: str, *, rate: float, build: Build) -> None:
        self.world = world
        self.loop: VirtualLoop = world.loop
        self.rng: random.Random = world.rng
        self.name = name
        self.build = build
        self.machine = Machine(name, rate=rate)
        self.state = MOUNT / name
        self.control = SimControl(self)
        self.workers: dict[int, SimWorker] = {}
        self.guards: dict[str, SimGuard] = {}
        self.locks: dict[Path, Process] = {}
        self.gms: SimGms | None = None
        self.gms_is_up = asyncio.Event()
        self.agent: Process | None = None
        self.running: dict[Process, None] = {}
        self.is_retired = False

    def process(self, name: str) -> Process:
        """Start a process of this node, with nothing to do yet."""
        process = Process(self.loop, self.machine, f"{self.name}/{name}")
        self.running[process] = None
        process.at_exit(self, lambda: self._gone(process))
        return process

    def _gone(self, process: Process) -> None:
        self.world.note(f"{process} ended with {process.ended.result()}")
        self.running.pop(process, None)
        self.world.disk.process_died(owner_of(process))

    async def work(self) -> None:
        """Take a little time, in which anything may happen."""
        await asyncio.sleep(self.rng.random() * 0.01)

    # The power switch.

    def boot(self) -> None:
        self.machine.is_on = True
        self.start("gms")
        self.start("agent")

    def lose_power(self) -> None:
        """End everything at once; what was not made durable is in doubt."""
        self.machine.is_on = False
        self.machine.boots += 1
        for process in list(self.running):
            process.kill()
        self.workers.clear()
        self.guards.clear()
        self.world.disk.power_lost(self.name, self.rng)

    def become(self, build: Build) -> None:
        """Replace the services by those of another build, which find the journals of this one."""
        for process in (self.gms and self.gms.process, self.agent):
            if process is not None:
                process.kill()
        for service in ("agent", "gms"):
            with contextlib.suppress(OSError, NoSpace):
                journal = self.world.read(str(self.state / service / "journal"))
                with files.opened(files.open_root(str(self.state / service))) as folder:
                    files.write_replacing(folder, "journal", self.build.written(journal))
        self.build = build

    def heal(self) -> None:
        """Go on with whatever was away, in a build that the operator can speak to."""
        for process in list(self.running):
            if not any(process is worker.process for worker in self.workers.values()):
                process.resume()
            process.fuse = None
        if self.build is NEXT:
            self.become(NEWER)
        if not self.machine.is_on and not self.is_retired:
            self.boot()

    def start(self, which: str) -> None:
        """Start a service; it is started again whenever it ends."""
        process = self.process(which)
        if which == "agent":
            self.agent = process
        process.at_exit("again", lambda: self._again(which))
        main = _agent_main if which == "agent" else _gms_main
        task = process.spawn(main(self, process), which)
        task.add_done_callback(lambda done: self.world.ended(process, done))

    def _again(self, which: str) -> None:
        if which == "gms":
            self.gms_is_up.clear()
            self.gms = None
        if self.machine.is_on:
            delay = AGAIN_S + self.rng.random() * self.world.settings.restart_s
            boots = self.machine.boots
            self.loop.in_world(
                delay, lambda: self.start(which) if boots == self.machine.boots else None
            )

    def clocks(self) -> Clocks:
        """Give the clocks of this machine, and its boot id of now."""
        boot = self.machine.boots
        return Clocks(
            lambda: self.loop.now * self.machine.rate + boot,
            lambda: self.world.epoch + self.loop.now * self.machine.rate + self.machine.jump,
            self.machine.boot_id,
        )

    def living(self, process: ProcessId) -> Process | None:
        """Give the process of a worker while it lives."""
        found = self.workers.get(process.pid)
        return found.process if found and found.process.is_alive else None

    # Files of workers.

    def save_state(self, places: ContainerPaths, name: str, data: bytes) -> None:
        with files.opened(
            files.open_root(str(places.control / control.STATE), create=True)
        ) as folder:
            files.write_replacing(folder, name, data)

    def read_state(self, places: ContainerPaths, name: str) -> bytes:
        with files.opened(files.open_root(str(places.control / control.STATE))) as folder:
            return files.read_bounded(folder, name, 65536)

    def empty(self, folder: Path) -> None:
        with files.opened(files.open_root(str(folder.parent), create=True)) as parent:
            files.remove_tree(parent, folder.name)
            files.os.close(files.make_dir(parent, [folder.name]))  # type: ignore[attr-defined]


@functools.cache
def _tracer(service: str, node: str) -> Telemetry:
    """Give a tracer: to make one takes longer than many steps of a world."""
    return Telemetry(service, node, "0")


class _Service(NamedTuple):
    """What both services of a node are made of."""

    clocks: Clocks
    telemetry: Telemetry
    journal: Journal
    bus: Any
    book: OrderBook

    def courier(self, node: SimNode, handlers: Any) -> Courier:
        runner = Runner(self.journal, self.telemetry)
        made = Courier(
            self.book, self.bus, telemetry=self.telemetry, runner=runner, handlers=handlers
        )
        made.schemas = node.build.schemas
        return made


def _service(node: SimNode, process: Process, name: str) -> _Service:
    clocks = node.clocks()
    # In every other world finished orders leave the memory soon.
    min_bytes = MIN_BYTES if node.world.seed % 2 else 16 * 1024
    journal = Journal.open(node.state / name, wall=clocks.wall, min_bytes=min_bytes)
    node.world.rules.journals[f"{name}@{node.name}"] = journal
    bus = node.world.bus(f"{name}-{node.name}", process, node.build)
    book = OrderBook(node=check_node(node.name), service=name, journal=journal, clocks=clocks)
    return _Service(clocks, _tracer(f"snap-{name}", node.name), journal, bus, book)


async def _gms_main(node: SimNode, process: Process) -> None:
    server = SimGms(node, process)
    service = _service(node, process, "gms")

    async def own(_pod: PodRef | None) -> Memory:
        return Memory(GmsControl(server.gms), Path("/run"))

    orders = GmsOrders(own, SimTransfers(node), service.telemetry, service.book, root=SHARED)
    courier = service.courier(node, orders.routes())
    node.gms = server
    node.gms_is_up.set()
    main = asyncio.current_task()
    assert main is not None
    process.on_term = functools.partial(asyncio.Task.cancel, main)
    try:
        await service.bus.connect()
        await courier.serve()
    except asyncio.CancelledError:
        main.uncancel()
        await service.book.drain()
        await _close(node, process, service.journal)


async def _agent_main(node: SimNode, process: Process) -> None:
    service = _service(node, process, "agent")
    clocks, bus = service.clocks, service.bus
    root = ArtifactRoot(SHARED)
    gpu_memory = SimGpuMemory(node)
    operator = OperatorClient(bus, node.name)
    machine = AgentMachine(
        launcher=SimLauncher(node, process),
        control=node.control,
        drivers={Cooperative.name: SimDriver(node)},
        gpu_memory=gpu_memory,
        guards=SimGuards(node),
        artifacts=root,
        keys=ArtifactKeys(None),
        operator=operator,
        locks=SimLocks(node),
        clocks=clocks,
        facts=Facts(arch="x86_64", kernel="sim", python="3"),
    )
    around = NodeEnvironment(node.name, "sim", Path("/run"), Path("/"), "/bin", "/", Path("/"))
    agent = Agent(machine, service.book, around, node.state, SLOTS)
    courier = service.courier(node, routes(agent))
    build, every_s = node.build, INVENTORY_EVERY_S
    inventory = Inventory(
        ArtifactLibrary(SHARED), operator, node.name, clocks.wall, every_s=every_s
    )
    pods = PodInventory(agent.pods, operator, every_s=every_s)

    async def presence(devices: list[PresenceDevice]) -> Presence:
        return Presence(
            node=node.name,
            boot_id=clocks.boot_id,
            version=build.name,
            schemas=list(build.schemas),
            devices=devices,
            drivers=[Cooperative.name],
            artifact_root=str(SHARED),
            free_bytes=await root.free_bytes(),
            slots=SLOTS,
            unknown=inventory.counts.unknown,
            quarantined=inventory.counts.quarantined,
            at=clocks.wall(),
        )

    stop = asyncio.Event()
    process.on_term = stop.set
    await agent.recover()
    await bus.connect()
    await until_stopped(
        stop,
        courier.serve(),
        PresencePublisher(
            bus,  # type: ignore[arg-type]
            node.name,
            gpu_memory,
            presence,
            stop,
            pods.is_known,
            doubt=pods.doubt,
        ).run(),
        inventory.run(stop),
        pods.run(stop),
    )
    if stop.is_set():
        await service.book.drain()
        await agent.close()
        await _close(node, process, service.journal)


async def _close(node: SimNode, process: Process, journal: Journal) -> None:
    """End as the `main` of a service does, and leave nothing open."""
    await journal.settled()
    journal.close()
    node.world.rules.closed(process)


class SimLauncher:
    """The `Launcher` port: workers are processes of the node and outlive the agent."""

    def __init__(self, node: SimNode, agent: Process) -> None:
        self._node = node
        self._agent = agent
        self._own: set[int] = set()

    async def spawn(self, spec: ProcessSpec) -> ProcessId:
        process = self._node.process("worker")
        worker = SimWorker(self._node, process, spec, self._node.world.habits_of(spec))
        self._node.workers[process.pid] = worker
        self._own.add(process.pid)
        task = process.spawn(worker.main(), "worker")
        task.add_done_callback(self._node.world.defect)
        return ProcessId(process.pid, 1)

    def _living(self) -> list[SimWorker]:
        return [each for each in self._node.workers.values() if each.process.is_alive]

    def adopt(self, process: ProcessId) -> bool:
        return self._node.living(process) is not None

    async def ended(self, process: ProcessId) -> int | None:
        worker = self._node.workers.get(process.pid)
        if worker is None:
            return None
        code = await asyncio.shield(worker.process.ended)
        return code if process.pid in self._own else None

    async def terminate(
        self, process: ProcessId | None, where: ContainerPaths | None, grace_s: float
    ) -> None:
        for worker in self._living():
            is_meant = process is not None and worker.process.pid == process.pid
            if is_meant or worker.paths == where:
                terminate(worker, grace_s)
                await asyncio.shield(worker.process.ended)

    async def find(self, where: ContainerPaths) -> ProcessId | None:
        found = (worker.process.pid for worker in self._living() if worker.paths == where)
        return next((ProcessId(pid, 1) for pid in found), None)

    async def running(self, where: Path) -> list[str]:
        homes = [worker.paths.home for worker in self._living()]
        return sorted(home.name for home in homes if home.parent == where)

    async def folders(self, where: Path) -> list[str]:
        try:
            with files.opened(files.open_root(str(where))) as folder:
                return sorted(files.names_in(folder))
        except FileNotFoundError:
            return []

    async def remove(self, where: Path) -> None:
        if not where.is_relative_to(MOUNT):
            return  # Sockets of a pod are not simulated.
        with (
            contextlib.suppress(FileNotFoundError),
            files.opened(files.open_root(str(where.parent))) as parent,
        ):
            files.remove_tree(parent, where.name)


class SimControl:
    """The `ControlDirectory` port, and the workers' half of it. It outlives every process."""

    def __init__(self, node: SimNode) -> None:
        self._node = node
        self._files: dict[Path, dict[str, tuple[int, bytes]]] = {}
        self._seen: dict[tuple[int, str], int] = {}
        self._changed: dict[Path, list[asyncio.Future[None]]] = {}
        self._versions = 0

    def create(self, where: ContainerPaths) -> None:
        self._files.setdefault(where.control, {})
        files.os.close(files.open_root(str(where.control / control.STATE), create=True))

    def put(self, where: ContainerPaths, name: str, data: bytes) -> None:
        self.write(where.control, name, data)

    def write(self, folder: Path, name: str, data: bytes) -> None:
        """Put a file into a control directory, if that is there."""
        if folder in self._files:
            self._versions += 1
            self._files[folder][name] = (self._versions, data)
            for future in self._changed.pop(folder, ()):
                if not future.done():
                    future.set_result(None)

    def get(self, where: ContainerPaths, name: str) -> bytes | None:
        return self.read(where.control, name)

    def read(self, folder: Path, name: str) -> bytes | None:
        found = self._files.get(folder, {}).get(name)
        return found[1] if found else None

    def remove(self, where: ContainerPaths, name: str) -> None:
        self._files.get(where.control, {}).pop(name, None)

    async def clear(self, where: ContainerPaths, *names: str) -> None:
        for name in names:
            self._files.get(where.control, {}).pop(name, None)
        if control.STATE in names:
            self._node.empty(where.control / control.STATE)

    def drop(self, where: Path, name: str) -> None:
        """Have a worker take a file of its own away."""
        self._files.get(where, {}).pop(name, None)

    async def appears(
        self, where: ContainerPaths, name: str, accepts: Callable[[bytes], bool]
    ) -> None:
        while True:
            data = self.get(where, name)
            if data is not None and accepts(data):
                return
            await self._change(where.control)

    async def news(self, worker: SimWorker, where: Path, names: tuple[str, ...]) -> tuple[str, int]:
        """Wait for a file that this worker has not seen yet: its name and its attempt."""
        while True:
            for name in names:
                found = self._files.get(where, {}).get(name)
                if found and self._seen.get((worker.process.pid, name), 0) < found[0]:
                    self._seen[worker.process.pid, name] = found[0]
                    return name, _attempt_of(found[1])
            await self._change(where)

    async def _change(self, where: Path) -> None:
        future = self._node.loop.create_future()
        self._changed.setdefault(where, []).append(future)
        await future


def _attempt_of(data: bytes) -> int:
    return control.decode_json(data, control.Signal).attempt  # type: ignore[attr-defined,no-any-return]


class SimDriver(Cooperative):
    """The cooperative driver, with stops and starts of simulated processes."""

    def __init__(self, node: SimNode) -> None:
        super().__init__()
        self._node = node

    async def freeze(self, dump: Dump) -> None:
        await self._node.work()
        process = self._node.living(dump.worker.process)
        if process is None:
            raise SourceExited("the worker ended while it was frozen")
        process.stop()
        await self._node.work()

    async def thaw(self, dump: Dump) -> None:
        if process := self._node.living(dump.worker.process):
            process.resume()

    async def copy(self, dump: Dump) -> None:
        with self._node.world.rules.dumping(self._node, dump.worker):
            await self._node.work()
            await super().copy(dump)
            await self._node.work()

    async def restore(self, placeholder: Worker, restoring: RestoreSource) -> ProcessId:
        await self._node.work()
        return await super().restore(placeholder, restoring)


class SimLocks:
    """The `Locks` port: a lock ends with the process that has it."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def take(self, path: Path) -> Callable[[], None] | None:
        process = current()
        holder = self._node.locks.get(path)
        if holder is not None and holder.is_alive:
            return None
        self._node.locks[path] = process

        def give_back() -> None:
            if self._node.locks.get(path) is process:
                del self._node.locks[path]

        return give_back


class SimGuard:
    """A guard: a process of the node that waits as the real one does, and acts as it does."""

    def __init__(self, node: SimNode, spec: GuardSpec, agent: Process, worker: SimWorker) -> None:
        self.node = node
        self.spec = spec
        self.worker = worker
        self.process = node.process("guard")
        self.has_decided = False
        self.thaw_by = float("inf")
        self._dismissed: asyncio.Future[None] = node.loop.create_future()
        self._link_changed = asyncio.Event()
        self._agent: Process | None = None
        self.link(agent)
        self.process.spawn(self._main(), "guard")

    def link(self, agent: Process) -> None:
        """Let an agent hold the connection."""
        self._agent = agent
        agent.at_exit(self, self.unlink)
        self._link_changed.set()

    def unlink(self) -> None:
        self._agent = None
        self._link_changed.set()

    def allow(self, thaw_by: float) -> None:
        """Take note until when the worker may be frozen."""
        self.thaw_by = thaw_by
        self._link_changed.set()

    def dismiss(self) -> None:
        """Have it go without action."""
        if not self._dismissed.done():
            self._dismissed.set_result(None)

    async def _main(self) -> None:
        must_act = await self._until_over()
        self.has_decided = True
        self.node.guards.pop(self.spec.name, None)
        if must_act:
            await self.node.work()
            self._free()
        self.process.kill(0)

    async def _until_over(self) -> bool:
        deadline = self.node.clocks().monotonic
        returns_by = float("inf")
        while True:
            left = min(self.spec.deadline + MARGIN_S, returns_by, self.thaw_by) - deadline()
            if left <= 0:
                return True
            self._link_changed.clear()
            changed = asyncio.ensure_future(self._link_changed.wait())
            await asyncio.wait(
                [changed, self._dismissed, self.worker.process.ended],
                timeout=left,
                return_when=asyncio.FIRST_COMPLETED,
            )
            changed.cancel()
            if self._dismissed.done() or self.worker.process.ended.done():
                return False
            if self._agent is None and returns_by == float("inf"):
                returns_by = deadline() + RETURN_S
            elif self._agent is not None:
                returns_by = float("inf")

    def _free(self) -> None:
        where = self.spec.control
        is_over = self.node.control.read(where, control.COMPLETE) is not None
        if not is_over:
            failure = Failure(reason="AgentLost", message="the capture was given up by its guard")
            body = control.body(self.spec.attempt, failure)
            self.node.control.write(where, control.ABORTED, body)
        if self.spec.on_failure == "Kill" and not is_over:
            self.worker.process.kill()
        self.worker.process.resume()
        if not is_over:
            self.node.control.drop(where, control.QUIESCE)


class SimGuards:
    """The `Guard` port."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    async def start(self, spec: GuardSpec) -> SimLink:
        await self._node.work()
        worker = self._node.workers.get(spec.process.pid)
        if worker is None or not worker.process.is_alive:
            raise SourceExited("the worker ended before its guard was armed")
        guard = self._node.guards[spec.name] = SimGuard(self._node, spec, current(), worker)
        return SimLink(guard)

    async def adopt(self, spec: GuardSpec) -> SimLink | None:
        await self._node.work()
        guard = self._node.guards.get(spec.name)
        if guard is None or guard.has_decided or not guard.process.is_alive:
            return None
        guard.link(current())
        return SimLink(guard)

    async def release(self, process: ProcessId, release: Release) -> bool:
        assert release == Release()
        if worker := self._node.living(process):
            worker.resume()
        return False


class SimLink:
    """The `GuardLink` port."""

    def __init__(self, guard: SimGuard) -> None:
        self._guard = guard
        self._agent = current()

    async def lost(self) -> None:
        await asyncio.shield(self._guard.process.ended)

    def release_by(self, release: Release) -> None:
        raise AssertionError(f"no driver of a simulated node needs {release}")

    def follow(self, process: ProcessId) -> None:
        raise AssertionError(f"no driver of a simulated node starts {process}")

    def thaw_by(self, deadline: float) -> None:
        self._guard.allow(deadline + MARGIN_S)

    async def confirm(self) -> None:
        process = self._guard.process
        if process.is_alive and (self._guard.has_decided or process.is_stopped):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(ANSWERS_WITHIN_S):
                    await self.lost()
            process.kill()

    async def dismiss(self) -> None:
        self._guard.dismiss()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(2.0):
                await self.lost()
        self.close()

    def close(self) -> None:
        self._agent.forget(self._guard)
        self._guard.unlink()


def owner_of(process: Process | None) -> Owner:
    """Say which machine and process touches the disk."""
    if process is None:
        return Owner("world", "")
    return Owner(process.machine.name, repr(process))
