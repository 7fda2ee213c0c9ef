"""Restores: a worker that was started in standby gets the saved state and goes on."""

from __future__ import annotations

import asyncio
import os

from msgspec.structs import replace

from snapshot_agent.domain import control
from snapshot_agent.domain.gate import COMPATIBILITY_CHECKS, RESTORE_CHECKS, Target, refuse
from snapshot_agent.handlers.artifacts import naming, proven_parts
from snapshot_agent.handlers.opening import device_product
from snapshot_agent.handlers.pods import Pods
from snapshot_agent.ports import Machine, Orders, Place, Worker
from snapshot_shared.artifact import PartManifest
from snapshot_shared.courier import OrderContext, Result
from snapshot_shared.errors import Aborted, DeadlineExceeded, Internal
from snapshot_shared.orders import RestoreOrder
from snapshot_shared.runner import Step

PROCESS = "process"
CHECK_S = 60.0


class Restores:
    """The order `restore`."""

    def __init__(self, machine: Machine, orders: Orders, pods: Pods) -> None:
        """Use the node's parts."""
        self._machine = machine
        self._orders = orders
        self._pods = pods

    async def restore(self, order: RestoreOrder, ctx: OrderContext) -> Result:
        """Fill the waiting worker with the process part and let it go."""
        filling = _Filling(self._machine, self._orders, self._pods, order, ctx)
        with self._machine.metrics.moving("restore") as moved:
            await ctx.steps("restore", filling.table())
            moved(filling.part.bytes)
        return {"bytes": filling.part.bytes}


class _Filling:
    """The steps of one restore order. After a restart each goes on where it was."""

    def __init__(
        self,
        machine: Machine,
        orders: Orders,
        pods: Pods,
        order: RestoreOrder,
        ctx: OrderContext,
    ) -> None:
        self._machine = machine
        self._orders = orders
        self._pods = pods
        self._order = order
        self._ctx = ctx
        self._part: PartManifest | None = None
        self._worker: Worker | None = None

    def table(self) -> list[Step]:
        order = self._order
        return [
            Step("check", self._check, CHECK_S),
            Step("fill-state", self._fill, order.deadline_s, undo=self._fail),
            Step("signal", self._signal, 10.0),
            Step("await-restored", self._await, order.ready_s + 5.0),
        ]

    @property
    def part(self) -> PartManifest:
        """The process part, once it was checked."""
        if self._part is None:
            raise Internal("the artifact was not checked")
        return self._part

    @property
    def worker(self) -> Worker:
        """The waiting worker, once it was checked."""
        if self._worker is None:
            raise Internal("the worker was not checked")
        return self._worker

    async def _check(self) -> None:
        """Refuse before anything is touched."""
        order = self._order
        self._orders.require_current(f"restore-{order.pod.uid}", order.attempt)
        refuse(RESTORE_CHECKS, self._pods.seen(order.pod))
        root = await self._machine.generations.read_root(order.artifact)
        product = ""
        if root.facts.device_product:
            product = await device_product(self._machine, order.devices)
        here = replace(self._machine.facts, device_product=product)
        target = Target(
            order.artifact, root, root.facts, here, order.devices, tuple(self._machine.drivers)
        )
        refuse(COMPATIBILITY_CHECKS, target)
        parts = await proven_parts(self._machine, order.artifact, root)
        self._part = next(part for part in parts if part.part == PROCESS)
        self._driver = self._machine.drivers[root.facts.driver]
        self._worker = self._pods.worker(order.pod)

    def _is_told(self) -> bool:
        where = self.worker.places.control
        data = self._machine.control.get(where, control.RESTORE_COMPLETE)
        return data is not None and control.is_of(data, self._order.attempt)

    async def _fill(self) -> None:
        if self._is_told():
            return
        ref, part = self._order.artifact, self.part
        self._machine.control.remove(self.worker.places.control, *control.RESTORE_FILES)
        place = Place(ref.namespace, ref.content_uid, ref.generation)
        directory = self._machine.artifacts.open_part(place, PROCESS)

        async def tell(done: int) -> None:
            await self._ctx.progress(PROCESS, "fill-state", done, part.bytes)

        try:
            with naming(PROCESS):
                await self._pods.while_alive(
                    self.worker, self._driver.fill(self.worker, directory, part.files, tell)
                )
        finally:
            os.close(directory)

    async def _signal(self) -> None:
        if not self._is_told():
            body = control.body(self._order.attempt)
            self._machine.control.put(self.worker.places.control, control.RESTORE_COMPLETE, body)

    async def _await(self) -> None:
        order, where = self._order, self.worker.places.control
        restored = self._machine.control.appears(
            where, control.RESTORED, lambda data: control.is_of(data, order.attempt)
        )
        try:
            async with asyncio.timeout(order.ready_s):
                await self._pods.while_alive(self.worker, restored)
        except TimeoutError:
            raise DeadlineExceeded(
                f"the worker did not serve again within {order.ready_s:g} s",
                next_step=f"the worker answers {control.RESTORE_COMPLETE} by {control.RESTORED}",
                budget_s=order.ready_s,
            ) from None

    async def _fail(self) -> None:
        where = self.worker.places.control
        self._machine.control.remove(where, control.RESTORE_COMPLETE, control.STATE)
        why = Aborted("the restore failed").to_failure()
        body = control.body(self._order.attempt, why)
        self._machine.control.put(where, control.RESTORE_FAILED, body)
