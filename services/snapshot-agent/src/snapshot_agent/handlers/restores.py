"""The orders `place` and `restore`: a worker gets the saved state, then serves; and their abort."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from msgspec.structs import replace

from snapshot_agent.domain import control
from snapshot_agent.domain.driving import device_map
from snapshot_agent.domain.gate import COMPATIBILITY_CHECKS, RESTORE_CHECKS, Target, refuse
from snapshot_agent.handlers.artifacts import naming, proven_parts
from snapshot_agent.handlers.background import compensated, while_alive
from snapshot_agent.handlers.prepare import devices_of
from snapshot_agent.ports import (
    GenerationRef,
    Machine,
    Orders,
    RestoreSource,
    SetProcess,
    Worker,
    Workers,
)
from snapshot_shared.artifact import PROCESS, PartManifest, RootManifest, part_path
from snapshot_shared.compatibility import WAITS
from snapshot_shared.courier import OrderContext, Result
from snapshot_shared.encrypting import PartCipher
from snapshot_shared.errors import (
    Aborted,
    DeadlineExceeded,
    Failure,
    Internal,
    InvalidMessage,
)
from snapshot_shared.ids import OrderId, order_id, owner_of
from snapshot_shared.orders import (
    PLACEHOLDER_DRIVERS,
    AbortOrder,
    DeviceRef,
    PlaceOrder,
    RestoreOrder,
)
from snapshot_shared.runner import UNDO_S, Step

CHECK_S = 60.0
GIVE_UP_S = UNDO_S + 10.0

BringOrder = PlaceOrder | RestoreOrder
"""What brings the state of a process part to a worker."""


class Restores:
    """The orders `place` and `restore`, and their abort."""

    def __init__(self, machine: Machine, orders: Orders, workers: Workers) -> None:
        """Use the parts of the node."""
        self._machine = machine
        self._orders = orders
        self._workers = workers

    async def place(self, order: PlaceOrder, ctx: OrderContext) -> Result:
        """Bring the process of a process part into its placeholder, where it waits on."""
        steps = _RestoreSteps(self._machine, self._orders, self._workers, order, ctx)
        return await self._carried_out("place", steps, steps.placing(), ctx)

    async def restore(self, order: RestoreOrder, ctx: OrderContext) -> Result:
        """Load a worker in standby with the state of the process part, and wait until it serves."""
        steps = _RestoreSteps(self._machine, self._orders, self._workers, order, ctx)
        return await self._carried_out("restore", steps, steps.restoring(order.ready_s), ctx)

    async def _carried_out(
        self, verb: str, steps: _RestoreSteps, table: Sequence[Step], ctx: OrderContext
    ) -> Result:
        with self._machine.metrics.moving(verb) as moved:
            await ctx.steps(verb, table)
            moved(steps.read)
        return {"bytes": steps.part.bytes}

    async def abort(self, order: AbortOrder, ctx: OrderContext) -> Result:
        """Make sure that no attempt up to this one begins or goes on, and say so to the worker.

        One that was restored, or waits for nothing any more, is left alone.
        """
        pod = order.pod
        if pod is None:
            raise InvalidMessage("an abort names a content or a pod")

        async def tombstone() -> None:
            await self._orders.tombstone(subject_of(order), order.attempt)

        async def compensate() -> None:
            for verb in ("place", "restore"):
                name = order_id(verb, owner_of(OrderId(order.order)))
                await self._orders.cancel(name, order.attempt, UNDO_S)
            found = await self._workers.resolve(pod)
            control_of = self._machine.control
            if found.worker is not None and not any(
                control_of.get(found.worker.paths, name) is not None
                for name in (control.RESTORED, control.RESTORE_FAILED)
            ):
                why = Aborted(order.why or "the restore was aborted").to_failure()
                await _say_failed(self._machine, found.worker, order.attempt, why)

        # `undo`: on a full disk the tombstone fails, and the worker waits for nothing all the same.
        table = [
            Step("tombstone", tombstone, 10.0, undo=compensate),
            Step("compensate", compensate, GIVE_UP_S),
        ]
        await ctx.steps("abort", table)
        return {}


def subject_of(order: BringOrder | AbortOrder) -> str:
    """Return the name of a restore in tombstones.

    It has the owner of the order, because a ledger keeps tombstones as long as orders of their
    owner. In a cluster no order belongs to a pod.
    """
    return f"restore-{owner_of(OrderId(order.order))}"


async def _say_failed(machine: Machine, worker: Worker, attempt: int, why: Failure) -> None:
    """Say to a worker in standby that its restore has failed, and take away what it was given."""
    await machine.control.clear(worker.paths, control.RESTORE_COMPLETE, control.STATE)
    machine.control.put(worker.paths, control.RESTORE_FAILED, control.body(attempt, why))


async def with_uuids(machine: Machine, order: BringOrder) -> BringOrder:
    """Return an order with the devices of the pod's memory server where it names them by part."""
    if not any(device.uuid == f"gpu-{device.ordinal}" for device in order.devices):
        return order
    listed = await machine.gpu_memory.at(order.pod).devices(wait_s=0.0)
    found = [DeviceRef(ordinal=device.index, uuid=device.uuid) for device in listed]
    return replace(order, devices=found)


class _RestoreSteps:
    """The steps of one order. Each may be replayed after a restart."""

    def __init__(
        self,
        machine: Machine,
        orders: Orders,
        workers: Workers,
        order: BringOrder,
        ctx: OrderContext,
    ) -> None:
        self.read = 0
        self._machine = machine
        self._orders = orders
        self._workers = workers
        self._order = order
        self._ctx = ctx
        self._driver = machine.driver(order.driver)
        self._root: RootManifest | None = None
        self._part: PartManifest | None = None
        self._cipher: PartCipher | None = None
        self._worker: Worker | None = None
        self._may_be_cut = asyncio.Event()

    def placing(self) -> list[Step]:
        # What fails is not said to the worker, which may be placed by the next attempt.
        return [
            Step("check", self._check, CHECK_S),
            Step(self._driver.restore_step, self._bring_back, self._order.deadline_s),
        ]

    def restoring(self, ready_s: float) -> list[Step]:
        async def bring_back() -> None:
            await compensated(self._bring_back(), self._fail)

        async def serves() -> None:
            self._may_be_cut.set()
            await self._await(ready_s)

        return [
            Step("check", self._check, CHECK_S),
            Step(self._driver.restore_step, bring_back, self._order.deadline_s, undo=self._fail),
            Step("signal", self._signal, 10.0),
            Step("await-restored", serves, ready_s + 5.0),
        ]

    @property
    def part(self) -> PartManifest:
        """The manifest of the process part. Internal before the check."""
        if self._part is None:
            raise Internal("the artifact was not checked")
        return self._part

    @property
    def worker(self) -> Worker:
        """The worker in standby. Internal before the check."""
        if self._worker is None:
            raise Internal("the worker was not checked")
        return self._worker

    async def _check(self) -> None:
        """Raise before any side effect unless the restore is possible."""
        order = self._order
        self._orders.require_current(subject_of(order), order.attempt)
        found = await self._workers.resolve(order.pod)
        refuse(RESTORE_CHECKS, found.pod)
        self._root = root = await self._machine.artifacts.read_root(order.artifact)
        await self._machine.artifacts.check_signature(order.artifact)
        order = self._order = await with_uuids(self._machine, order)
        found_devices = None
        if root.facts.devices:
            found_devices = await devices_of(self._machine, order.pod, order.devices)
        product = found_devices[0].product if found_devices else ""
        here = replace(await self._machine.facts_with(self._driver), device_product=product)
        given = None if found_devices is None else len(found_devices)
        target = Target(order.artifact, root, root.facts, here, order.devices, given)
        refuse(COMPATIBILITY_CHECKS, target)
        parts = await proven_parts(self._machine, order.artifact, root)
        self._part = next(part for part in parts if part.part == PROCESS)
        self._cipher = await self._machine.keys.cipher_of(self._part)
        self._worker = found.running()

    def _is_signalled(self) -> bool:
        where = self.worker.paths
        data = self._machine.control.get(where, control.RESTORE_COMPLETE)
        return data is not None and control.is_of(data, self._order.attempt)

    async def _bring_back(self) -> None:
        if self._order.driver in PLACEHOLDER_DRIVERS:
            # A placeholder whose restore is cut ends, and its pod with it.
            self._may_be_cut = self._ctx.uncut()
        if self._is_signalled():
            return
        ref = self._order.artifact
        await self._machine.control.clear(self.worker.paths, *control.RESTORE_FILES)
        place = GenerationRef(ref.namespace, ref.content_uid, ref.generation)
        with naming(PROCESS):
            async with (
                self._machine.artifacts.open_part(place, PROCESS) as directory,
                self._workers.replacing(self.worker) as set_process,
            ):
                await self._restore(self._source(place, directory), set_process)

    @property
    def _manifest(self) -> RootManifest:
        if self._root is None:
            raise Internal("the artifact was not checked")
        return self._root

    @property
    def _devices(self) -> dict[str, str]:
        return device_map(self._manifest, self._order.devices)

    def _source(self, place: GenerationRef, directory: int) -> RestoreSource:
        part, driver = self.part, self._driver

        async def report(done: int) -> None:
            self.read = done
            await self._ctx.progress(PROCESS, driver.restore_step, done, part.bytes)

        return RestoreSource(
            part=directory,
            folder=part_path(*place, PROCESS),
            files=part.files,
            devices=self._devices,
            deadline=self._machine.clocks.monotonic() + self._ctx.remaining_s(),
            progress=report,
            cipher=self._cipher,
        )

    async def _restore(self, source: RestoreSource, set_process: SetProcess) -> None:
        placeholder = self.worker

        async def restore() -> None:
            process = await self._driver.restore(placeholder, source)
            self._worker = await set_process(process)

        if self._driver.replaces:
            await restore()
        else:
            await while_alive(self._workers, placeholder, restore())

    async def _signal(self) -> None:
        if not self._is_signalled():
            body = control.restored(self._order, self._devices)
            self._machine.control.put(self.worker.paths, control.RESTORE_COMPLETE, body)
        if self._manifest.facts.protocol == WAITS:
            # The worker does not write it, and an abort leaves a worker alone that has it.
            self._machine.control.put(
                self.worker.paths, control.RESTORED, control.body(self._order.attempt)
            )

    async def _await(self, ready_s: float) -> None:
        order, where = self._order, self.worker.paths
        restored = self._machine.control.appears(
            where, control.RESTORED, lambda data: control.is_of(data, order.attempt)
        )
        try:
            async with asyncio.timeout(ready_s):
                await while_alive(self._workers, self.worker, restored)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the worker did not serve again within {ready_s:g} s",
                next_step=f"the worker answers {control.RESTORE_COMPLETE} by {control.RESTORED}",
                budget_s=ready_s,
            ) from None

    async def _fail(self) -> None:
        if self._ctx.is_handed_on:
            # The worker waits, and the agent that follows brings its process back.
            return
        why = Aborted("the restore failed").to_failure()
        await _say_failed(self._machine, self.worker, self._order.attempt, why)
