"""The GPU memory service on a simulated node, over memory that is a few kilobytes.

The memory server, the sessions and the orders are real; clients reach them as over the socket.

The lock, the fence, generations, hidden loads, turns and shares are the product's own. What is
simulated is the memory, the sockets and the process that moves the bytes. Each piece of work keeps
the server's process busy.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections import Counter
from collections.abc import AsyncGenerator, Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from msgspec.structs import replace

from gms.adapters.backends import find_backend
from gms.adapters.turns import Turns
from gms.domain import task_rules
from gms.domain.sessions import Peer, Session
from gms.domain.shares import Shares, TooManySessions
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent, TransferLeased
from gms.domain.transfer import check_loadable, metadata_of, plan_files
from gms.handlers.control import GmsControl
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from gms.ports import DeviceInfo
from gms.transfer_child.load import read_manifest
from gms.transfer_child.save import saved_before, write_part
from snapback_client import frames
from snapshot_shared import errors
from snapshot_shared.artifact import part_path
from snapshot_shared.files import open_dir, open_root, opened
from snapshot_shared.frames import FenceRequest, StatusRequest, UnfenceRequest
from snapshot_shared.orders import LayoutRef, PodRef, PresenceDevice
from tests.scenario.loop import CURRENT, Process, ask, current

if TYPE_CHECKING:
    from tests.scenario.node import SimNode
    from tests.scenario.world import World

GRANULARITY = 4096
CAPACITY = 64 * GRANULARITY
GPUS = 2
"""How many devices a node has."""
HOSTILE = "hostile"
"""The pod of the clients that take more than their share."""
LIMITS = {"all": 64, "user": 48, "pod": 24, "process": 12}
PIECE_S, TURN_S = 0.0002, 0.001
PIECES_A_TURN = round(TURN_S / PIECE_S)
FLOODERS, FRAMES = 2, 50
"""How many processes send how many frames ahead, on each connection."""
PROCESSES, SESSIONS = 3, 20
"""How many processes open how many sessions each."""
LOCK_S = 2.0


class SimDevice:
    """The `Device` port: memory by handles, with what was written there."""

    def __init__(self, node: str, index: int) -> None:
        self.info = DeviceInfo(
            kind="simulated",
            uuid=f"GPU-{node}-{index}",
            index=index,
            product="sim",
            capacity=CAPACITY,
            granularity=GRANULARITY,
        )
        self.bytes: dict[int, bytearray] = {}
        self._handles = itertools.count(1)

    @property
    def used(self) -> int:
        return sum(map(len, self.bytes.values()))

    def free(self) -> int:
        return CAPACITY - self.used

    def holders(self) -> dict[str, int]:
        return {}

    def create(self, size: int) -> int:
        if size > self.free():
            raise errors.OutOfDeviceMemory(f"{size} bytes are needed on {self.info.uuid}")
        handle = next(self._handles)
        self.bytes[handle] = bytearray(size)
        return handle

    def export(self, handle: int, access: frames.Access) -> int:
        raise NotImplementedError

    def seal(self, handle: int) -> None:
        """Nobody maps it."""

    def release(self, handle: int) -> None:
        del self.bytes[handle]

    def close(self) -> None:
        self.bytes.clear()


class Door:
    """What is between the clients of a server and its sessions, and what must hold there."""

    def __init__(self, world: World, process: Process) -> None:
        self._world = world
        self._process = process
        self._shares = Shares(LIMITS, "clients")
        self._turns = Turns(TURN_S, lambda: self.pieces * PIECE_S)
        self.pieces = 0
        """How many pieces of work there have been."""
        self._turn = self._in_turn = 0
        self._waiting: Counter[Hashable] = Counter()

    @contextlib.contextmanager
    def entering(self, peer: Peer) -> Iterator[None]:
        """Count a client in, unless it is refused within the block."""
        try:
            self._shares.check(peer)
            self._shares.add(peer)
            try:
                yield
            except BaseException:
                self._shares.remove(peer)
                raise
        except TooManySessions as error:
            if peer.pod != HOSTILE:
                self._world.rules.fail("lost", f"{CURRENT.get()} was refused {peer}: {error}")
            else:
                self._world.refused += 1
            raise

    def leave(self, peer: Peer) -> None:
        self._shares.remove(peer)

    async def turn(self, owner: Hashable) -> None:
        """Wait until a client may have its next piece of work done.

        An owner that asks for one waits for no more than what is left of a turn and one piece of
        each owner that waits already; and one turn of the loop has no more pieces than two budgets.
        """
        asked_at, ahead = self.pieces, len(+self._waiting)
        is_first = not self._waiting[owner]
        self._waiting[owner] += 1
        try:
            await self._turns.take(owner)
        finally:
            self._waiting[owner] -= 1
        others = self.pieces - asked_at
        if is_first and others > PIECES_A_TURN + ahead + 1:
            self._world.rules.fail("lost", f"{owner} waited while others did {others} pieces")
        self.pieces += 1
        self._process.use(PIECE_S)
        turn = self._world.loop.turns
        self._in_turn = self._in_turn + 1 if turn == self._turn else 1
        self._turn = turn
        if self._in_turn > 2 * PIECES_A_TURN:
            self._world.rules.fail("lost", f"{self._in_turn} pieces in one turn of the loop")


class SimGms:
    """One process of the GPU memory service of a node, without its orders."""

    def __init__(self, node: SimNode, process: Process) -> None:
        self.node = node
        self.process = process
        self.devices = [SimDevice(node.name, index) for index in range(GPUS)]
        self.gms = MemoryServer(
            node=node.name, incarnation=f"{node.name}-{process.pid}", devices=self.devices
        )
        self.control = GmsControl(self.gms)
        self.sessions = LeaseSessions(self.gms)
        self.live: dict[int, tuple[Session, Process]] = {}
        self.door = Door(node.world, process) if node.world.is_crowded else None

    @contextlib.contextmanager
    def entering(self, client: Process) -> Iterator[Peer]:
        """Take note of a client; it does not count when the block fails."""
        service = client.name.rpartition("/")[2]
        pod = HOSTILE if service == HOSTILE else ""
        peer = Peer(pid=client.pid, uid=0, pod=pod, is_ours=service == "transfer")
        with self.door.entering(peer) if self.door else contextlib.nullcontext():
            yield peer

    def leave(self, session: Session) -> bool:
        """Whether a session was live, which it is no more."""
        was_live = self.live.pop(session.id, None) is not None
        if was_live and self.door:
            self.door.leave(session.peer)
        return was_live

    async def turn(self, session: Session) -> None:
        if self.door:
            await self.door.turn(session.peer.owner)

    def memory(self, session: Session) -> dict[str, bytearray]:
        """Give the mapped bytes of a session's layout, by allocation."""
        device = self.gms.devices[session.request.device]
        assert isinstance(device, SimDevice) and session.layout is not None  # noqa: PT018
        return {
            key: device.bytes[value.handle] for key, value in session.layout.allocations.items()
        }


class SimLease:
    """A client's connection to the lease socket; it ends with the client's process."""

    def __init__(
        self, server: SimGms, client: Process, session: Session, told: frames.Attached
    ) -> None:
        self._server = server
        self._client = client
        self.session = session
        self.attached = told

    @classmethod
    async def attach(cls, node: SimNode, request: frames.Attach) -> SimLease:
        client, server = current(), node.gms
        if server is None or not server.process.is_alive:
            raise _lost()

        async def admit() -> tuple[Session, frames.Attached]:
            with server.entering(client) as peer:
                session = await server.sessions.attach(request, peer)
                if not client.is_alive:
                    _end(server, session)
                    raise _lost()
            server.live[session.id] = (session, client)
            client.at_exit(session, lambda: _hang_up(server, session))
            return session, await server.sessions.describe(session)

        session, told = await ask(server.process, admit, _lost)
        return cls(server, client, session, told)

    async def call(self, *requests: Any) -> list[Any]:
        """Send requests and collect the frames of their answers."""

        async def answer() -> list[Any]:
            return [frame for request in requests async for frame in self._answers(request)]

        return await ask(self._server.process, answer, _lost)

    async def _answers(self, request: Any) -> AsyncGenerator[Any, None]:
        await self._server.turn(self.session)
        if self.session.id not in self._server.live:
            raise _lost()
        if isinstance(request, frames.AllocateMany):
            found = await self._server.sessions.allocate(self.session, request)
        else:
            found = self._server.sessions.call(self.session, request)
        for message in found:
            if message is None:
                await self._server.turn(self.session)
            else:
                yield message.frame

    async def allocations(self) -> list[frames.AllocationInfo]:
        answers = await self.call(frames.ListAllocations())
        return [info for frame in answers for info in frame.allocations]

    async def metadata(self) -> list[frames.MetadataItem]:
        return [entry for frame in await self.call(frames.MetadataGet()) for entry in frame.entries]

    async def allocate(self, sizes: dict[str, int]) -> list[frames.AllocationInfo]:
        specs = [frames.AllocationSpec(id=key, size=size) for key, size in sizes.items()]
        answers = await self.call(frames.AllocateMany(allocations=specs, wait_s=5.0))
        return [info for frame in answers for info in frame.allocations]

    async def commit(self, **fields: Any) -> frames.Committed:
        (done,) = await self.call(frames.Commit(**fields))
        assert isinstance(done, frames.Committed)
        return done

    def memory(self) -> dict[str, bytearray]:
        """Give the mapped bytes. A server that is gone leaves none."""
        if not self._server.process.is_alive:
            raise _lost()
        return self._server.memory(self.session)

    async def detach(self) -> None:
        async def leave() -> None:
            if self._server.leave(self.session):
                self._server.sessions.end(self.session, unmapped=True)

        await ask(self._server.process, leave, _lost)
        self._client.forget(self.session)

    def close(self) -> None:
        """Hang up without a word, as a process that ends does."""
        self._client.forget(self.session)
        _hang_up(self._server, self.session)


def _lost() -> Exception:
    return errors.ConnectionLost("the GPU memory service closed the connection")


def _hang_up(server: SimGms, session: Session) -> None:
    """Have the server notice that a client is gone."""
    if server.process.is_alive and server.leave(session):

        async def notice() -> None:
            _end(server, session)

        server.process.spawn(notice(), "lease")


def _end(server: SimGms, session: Session) -> None:
    if server.sessions.end(session, unmapped=False):
        server.sessions.process_ended(session)


class SimGpuMemory:
    """The agent's `GpuMemory` port: calls into the node's service."""

    def __init__(self, node: SimNode) -> None:
        self._node = node

    def at(self, _pod: PodRef) -> SimGpuMemory:
        return self

    def unfencing(self, _token: str) -> tuple[str, ...]:
        """No guard of a simulated node starts a program."""
        return ()

    async def fence(
        self, token: str, devices: Sequence[str], *, wait_s: float, deadline_s: float
    ) -> list[LayoutRef]:
        request = FenceRequest(
            token=token, devices=list(devices), wait_s=wait_s, deadline_s=deadline_s
        )
        return (await self._ask(lambda gms: gms.control.fence(request))).vector

    async def unfence(self, token: str) -> None:
        with contextlib.suppress(errors.GmsUnavailable):
            await self._ask(lambda gms: gms.control.unfence(UnfenceRequest(token=token)))

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(wait_s):
                    await self._node.gms_is_up.wait()
        status = await self._ask(lambda gms: gms.control.status(StatusRequest()))
        return [
            PresenceDevice(
                index=device.index,
                uuid=device.uuid,
                product=device.product,
                capacity_bytes=device.capacity,
            )
            for device in status.devices
        ]

    async def _ask(self, call: Any) -> Any:
        server = self._node.gms
        process = server.process if server else None
        return await ask(process, lambda: call(server), _unavailable)


def _unavailable() -> Exception:
    return errors.GmsUnavailable("the GPU memory service does not answer")


class SimTransfers:
    """The `Transfers` port: each transfer is a process, a client of the lease socket.

    Files are written and read through the product's own functions, chunk by chunk, and it may be
    killed between any two.
    """

    def __init__(self, node: SimNode) -> None:
        self._node = node

    async def run(self, task: SaveTask | LoadTask) -> AsyncGenerator[TransferEvent, None]:
        parent = current()
        child = self._node.process("transfer")
        parent.at_exit(child, child.kill)
        events: asyncio.Queue[TransferEvent | BaseException] = asyncio.Queue()
        work = _save if isinstance(task, SaveTask) else _load
        # Threads would not be of this world.
        task = replace(task, threads=1)

        async def main() -> None:
            try:
                events.put_nowait(await work(self._node, task, events))  # type: ignore[arg-type]
            except Exception as error:  # noqa: BLE001 - it is the last event
                events.put_nowait(error)

        child.at_exit(events, lambda: events.put_nowait(errors.TransferKilled("killed")))
        child.spawn(main(), "transfer")
        try:
            while True:
                event = await events.get()
                if isinstance(event, BaseException):
                    raise event
                yield event
                if isinstance(event, TransferDone):
                    return
        finally:
            child.forget(events)
            parent.forget(child)
            child.kill(0)


async def _save(node: SimNode, task: SaveTask, events: asyncio.Queue[Any]) -> TransferDone:
    await node.work()
    with opened(open_root(task.root, create=True)) as root:
        if (known := saved_before(root, task)) is not None:
            return known
        lease = await SimLease.attach(node, task_rules.save_request(task))
        try:
            task_rules.check_fenced(task.layout, lease.attached)
            events.put_nowait(TransferLeased())
            infos, metadata = await lease.allocations(), await lease.metadata()
            task_rules.check_shape(infos, metadata, task.layout)
            memory = lease.memory()
            buffers = [memoryview(memory[info.id])[: info.size] for info in infos]
            await node.work()
            done = write_part(root, task, infos, metadata, buffers, events.put_nowait)
            await node.work()
        except BaseException:
            lease.close()
            raise
        await lease.detach()
    return done


async def _load(node: SimNode, task: LoadTask, events: asyncio.Queue[Any]) -> TransferDone:
    path = part_path(task.namespace, task.content_uid, task.generation, task.part)
    await node.work()
    with opened(open_root(task.root)) as root, opened(open_dir(root, path)) as directory:
        manifest = read_manifest(root, directory, task)
        layout = check_loadable(manifest, layout_id=task.layout_id, wanted_hash=task.structure_hash)
        plans = plan_files(
            layout.allocations,
            [entry.size for entry in manifest.files],
            names=[entry.name for entry in manifest.files],
            chunk_bytes=[entry.chunk_bytes for entry in manifest.files],
        )
        lease = await SimLease.attach(node, task_rules.load_request(task))
        try:
            task_rules.check_room(layout.allocations, lease.attached)
            events.put_nowait(TransferLeased())
            infos = await lease.allocate({entry.id: entry.size for entry in layout.allocations})
            memory = lease.memory()
            buffers = [memoryview(memory[info.id])[: info.size] for info in infos]
            await node.work()
            find_backend(task.backend).read_files(
                directory,
                plans,
                manifest.files,
                buffers,
                threads=task.threads,
                advance=lambda _: None,
            )
            await node.work()
            if layout.metadata:
                await lease.call(frames.MetadataPut(entries=metadata_of(layout.metadata)))
            done = await lease.commit(if_match=task.if_match, hidden=True, layout_id=task.layout_id)
        except BaseException:
            lease.close()
            raise
        await lease.detach()
    ref = LayoutRef(
        device=task.device,
        incarnation=done.incarnation,
        generation=0,
        layout_id=done.layout_id,
        structure_hash=done.structure_hash,
        bytes=done.bytes,
    )
    return TransferDone(bytes=manifest.bytes, digest=task.part_digest, layout=ref)


# Clients that take more than their share.


def begin_flood(node: SimNode, connections: int) -> None:
    """Have processes send frames on several connections as fast as the service takes them."""
    for _ in range(FLOODERS):
        process = node.process(HOSTILE)
        process.spawn(_flood(node, process, connections))


def begin_crowd(node: SimNode, hold_s: float) -> None:
    """Have processes open many sessions, and end with what they have of them."""
    for _ in range(PROCESSES):
        process = node.process(HOSTILE)
        for index in range(SESSIONS):
            process.spawn(_held(node, index, hold_s))
        node.loop.in_world(hold_s, process.kill, 0)


async def _flood(node: SimNode, process: Process, connections: int) -> None:
    await asyncio.gather(*(_sent(node, index) for index in range(connections)))
    process.kill(0)


async def _sent(node: SimNode, index: int) -> None:
    with contextlib.suppress(errors.SnapbackError):
        lease = await _attached(node, index, LOCK_S)
        await lease.call(*[frames.ListAllocations()] * FRAMES)


async def _held(node: SimNode, index: int, hold_s: float) -> None:
    with contextlib.suppress(errors.SnapbackError):
        await _attached(node, index, hold_s)


async def _attached(node: SimNode, index: int, deadline_s: float) -> SimLease:
    request = frames.Attach(
        device=f"GPU-{node.name}-{index % GPUS}",
        domain=frames.MemoryDomain.WEIGHTS,
        lock=frames.LockMode.RO,
        deadline_s=deadline_s,
        client=HOSTILE,
    )
    return await SimLease.attach(node, request)
