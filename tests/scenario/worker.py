"""A worker as the agent and the GPU memory service see one.

It follows the control directory, keeps weights in GPU memory and a state of its own, and says what
it finds after a restore.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import msgspec

from snapback_client.frames import Attach, LockMode, MemoryDomain
from snapshot_agent.domain import control
from snapshot_agent.domain.spec import ProcessSpec
from snapshot_shared.errors import SnapbackError
from tests.scenario.gpu import GRANULARITY, SimLease
from tests.scenario.loop import Process

if TYPE_CHECKING:
    from tests.scenario.node import SimNode

STATE_FILE = "worker.json"
LOCK_S = 60.0


class Saved(msgspec.Struct, frozen=True):
    """What a worker saves: who it is, what it has heard, and the digest of all weights."""

    origin: str
    turns: int
    weights: str
    layouts: tuple[str, ...]


class Habits(msgspec.Struct, frozen=True):
    """How a worker behaves: seconds it takes, and what it does not do."""

    warm_s: float = 0.5
    quiet_s: float = 0.05
    never_ready: bool = False
    never_quiet: bool = False
    refuses: bool = False
    ends_when_asked: bool = False
    ignores_term: bool = False


class SimWorker:
    """One container's process."""

    def __init__(self, node: SimNode, process: Process, spec: ProcessSpec, habits: Habits) -> None:
        self.node = node
        self.process = process
        self.paths = spec.paths
        self.habits = habits
        self.turns = 0
        self.origin = spec.env["POD_UID"]
        self.pod = spec.env["POD_UID"]
        self.devices = [name for name in spec.env["NVIDIA_VISIBLE_DEVICES"].split(",") if name]
        self.is_standby = spec.env.get("SNAPSHOT_RESTORE_STANDBY") == "1"
        self.leases: list[SimLease] = []
        self.serves = False
        self.weights = ""

    async def main(self) -> None:
        """Live. A worker that cannot go on ends with status 1."""
        try:
            if self.is_standby:
                await self._come_back()
            else:
                await self._build()
            await self._serve()
        except (SnapbackError, OSError) as error:
            self.node.world.note(f"{self.process} ends: {error}")
            self.process.kill(1)

    async def _build(self) -> None:
        await asyncio.sleep(self.habits.warm_s)
        for index, device in enumerate(self.devices):
            lease = await self._attach(device, LockMode.RW)
            await lease.allocate({f"layer-{i}": GRANULARITY for i in range(2)})
            for key, memory in lease.memory().items():
                seed = f"{self.pod}/{index}/{key}".encode()
                memory[:] = hashlib.shake_128(seed).digest(len(memory))
            await lease.commit()
            self.leases.append(lease)
        self.weights = self._digest()
        self.serves = True

    async def _serve(self) -> None:
        if not self.habits.never_ready:
            self._say(control.READY, 0)
        while True:
            attempt = await self._news(control.QUIESCE)
            await self._quiesce(attempt)

    async def _refuse(self, attempt: int) -> None:
        """Say that the worker cannot be captured, and go on when the agent has heard it."""
        self.serves = False
        self._say(control.QUIESCE_FAILED, attempt)
        await self._end(attempt)
        self.serves = True
        self._say(control.READY, 0)

    async def _end(self, attempt: int) -> str:
        """Wait for the end of a capture; return the name of its file."""
        while True:
            # An answer to this attempt; what lies there of an older one is not.
            name, of = await self._either(control.COMPLETE, control.ABORTED)
            if of >= attempt:
                return name

    async def _quiesce(self, attempt: int) -> None:
        if self.habits.ends_when_asked:
            self.process.kill(0)
        if self.habits.never_quiet:
            await asyncio.get_running_loop().create_future()
        self.node.control.drop(self.paths.control, control.READY)
        await asyncio.sleep(self.habits.quiet_s)
        if self.habits.refuses:
            await self._refuse(attempt)
            return
        layouts = [lease.attached.layout_id or self._layout(lease) for lease in self.leases]
        self.serves = False
        for lease in self.leases:
            await lease.detach()
        self.leases.clear()
        saved = Saved(self.origin, self.turns, self.weights, tuple(layouts))
        self.node.save_state(self.paths, STATE_FILE, msgspec.json.encode(saved))
        self.node.world.rules.quiesced(self, saved)
        self._say(control.QUIESCED, attempt)
        self.node.world.rules.let_go(self, await self._end(attempt))
        await self._map(layouts)
        self.serves = True
        self.turns += 1
        self._say(control.READY, 0)

    async def _come_back(self) -> None:
        name, attempt = await self._either(control.RESTORE_COMPLETE, control.RESTORE_FAILED)
        if name == control.RESTORE_FAILED:
            self.process.kill(1)
            await asyncio.get_running_loop().create_future()
        data = self.node.read_state(self.paths, STATE_FILE)
        saved = msgspec.json.decode(data, type=Saved)
        self.origin, self.turns, self.weights = saved.origin, saved.turns, saved.weights
        await self._map(saved.layouts)
        self.node.world.rules.restored(self, saved, self._digest())
        self.serves = True
        self._say(control.RESTORED, attempt)

    async def _map(self, layouts: Sequence[str]) -> None:
        for device, layout in zip(self.devices, layouts, strict=True):
            lease = await self._attach(device, LockMode.RO)
            if lease.attached.layout_id != layout:
                self.node.world.note(f"{self.process} lost its layout")
                self.process.kill(1)
                await asyncio.get_running_loop().create_future()
            self.leases.append(lease)

    def _layout(self, lease: SimLease) -> str:
        layout = lease.session.layout
        assert layout is not None and layout.ref is not None  # noqa: PT018
        return layout.ref.layout_id

    async def _attach(self, device: str, lock: LockMode) -> SimLease:
        request = Attach(
            device=device,
            domain=MemoryDomain.WEIGHTS,
            lock=lock,
            deadline_s=LOCK_S,
            client="worker",
        )
        return await SimLease.attach(self.node, request)

    def _digest(self) -> str:
        state = hashlib.sha256()
        for data in self._bytes():
            state.update(data)
        return state.hexdigest()

    def _bytes(self) -> Iterator[bytearray]:
        for lease in self.leases:
            yield from lease.memory().values()

    def _say(self, name: str, attempt: int) -> None:
        self.node.control.put(self.paths, name, control.body(attempt))

    async def _news(self, name: str) -> int:
        return (await self._either(name))[1]

    async def _either(self, *names: str) -> tuple[str, int]:
        """Wait for a file that was not there when this worker last looked."""
        return await self.node.control.news(self, self.paths.control, names)


def terminate(worker: SimWorker, grace_s: float) -> None:
    """Ask a worker to end, as SIGTERM and later SIGKILL do."""
    process = worker.process
    process.resume()
    if worker.habits.ignores_term:
        process.loop.in_world(grace_s, process.kill, 137)
    else:
        process.loop.in_world(min(grace_s, 0.05), process.kill, 143)
