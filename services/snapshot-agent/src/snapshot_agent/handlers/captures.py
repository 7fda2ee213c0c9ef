"""Captures: `prepare` opens one, `dump` writes the process part, `release` and `abort` end it."""

from __future__ import annotations

import asyncio
import contextlib
import os

import msgspec

from snapshot_agent.domain.gate import check_vector
from snapshot_agent.handlers.holds import UNCONFIRMED, Hold, Holds
from snapshot_agent.handlers.opening import Opening, facts_of
from snapshot_agent.handlers.pods import Pods
from snapshot_agent.ports import Machine, Orders, Place, ProcessDriver
from snapshot_shared.artifact import FileEntry, PartManifest
from snapshot_shared.courier import OrderContext, Result
from snapshot_shared.errors import Aborted, InvalidMessage, NotEligible
from snapshot_shared.ids import OrderId, Uid, order_id
from snapshot_shared.ledger import Entry
from snapshot_shared.orders import (
    AbortOrder,
    DumpOrder,
    PartResult,
    PrepareOrder,
    ReleaseOrder,
)
from snapshot_shared.runner import Step

PROCESS = "process"
TERMINATE_GRACE_S = 5.0
"""What a worker that is to end after its capture gets to do so, in seconds."""

LET_GO_S = 45.0
FREEZE_S = 15.0
THAW_S = 15.0
SLACK_S = 5.0
"""How much longer than its budget a step may keep the worker frozen before the guard acts."""


class Captures:
    """The orders of a capture that touch the worker."""

    def __init__(
        self, machine: Machine, orders: Orders, pods: Pods, holds: Holds, slots: asyncio.Semaphore
    ) -> None:
        """`slots` bounds how many parts are written at a time."""
        self._machine = machine
        self._orders = orders
        self._pods = pods
        self._holds = holds
        self._slots = slots

    async def prepare(self, order: PrepareOrder, ctx: OrderContext) -> Result:
        """Open a capture; the worker is held from here on."""
        opening = Opening(
            machine=self._machine,
            orders=self._orders,
            pods=self._pods,
            holds=self._holds,
            order=order,
            ctx=ctx,
        )
        await ctx.steps("prepare", opening.table())
        self._holds.keep(opening.hold)
        return {"vector": opening.vector}

    async def dump(self, order: DumpOrder, ctx: OrderContext) -> Result:
        """Write the process part of a held worker."""
        self._orders.require_current(f"capture-{order.content_uid}", order.attempt)
        hold = self._holds.of(order.content_uid, order.attempt)
        prepared = self._prepared(order)
        if hold is None or prepared is None or hold.attempt != order.attempt:
            raise NotEligible(
                f"attempt {order.attempt} of content {order.content_uid} is not held here",
                next_step="prepare the capture again",
            )
        check_vector(prepared.terminal.vector if prepared.terminal else [], order.vector)
        driver = self._machine.drivers.get(order.driver)
        if driver is None:
            raise NotEligible(
                f"driver {order.driver} is not on this node",
                next_step=f"use one of {', '.join(self._machine.drivers)}",
            )
        async with self._slots, contextlib.AsyncExitStack() as closing:
            staging = _Staging(self._machine, self._pods, self._holds, hold, driver, ctx, closing)
            with self._machine.metrics.moving("dump") as moved:
                await ctx.steps("dump", staging.table(prepared))
                moved(staging.result().bytes)
        return {"part": staging.result()}

    def _prepared(self, order: DumpOrder) -> Entry | None:
        name = order_id("prepare", Uid(order.content_uid))
        entry = self._orders.journal.ledger.entries.get(name)
        if entry is None or entry.attempt != order.attempt or entry.terminal is None:
            return None
        return entry if entry.terminal.kind == "prepared" else None

    async def release(self, order: ReleaseOrder, ctx: OrderContext) -> Result:
        """Let the worker go on, or end it. A worker that nobody holds is only ended."""
        content = Uid(order.content_uid)

        async def signal() -> None:
            names = [order_id(verb, content) for verb in ("prepare", "dump")]
            await self._cancel_all(names, order.attempt)
            if hold := self._holds.of(content, order.attempt):
                if order.outcome == "complete":
                    await self._holds.complete(hold)
                else:
                    why = Aborted("the capture was released as aborted").to_failure()
                    await self._holds.give_up(hold, why)
            if order.policy == "Terminate":
                await self._pods.end(order.pod.uid, TERMINATE_GRACE_S)

        await ctx.steps("release", [Step("signal", signal, LET_GO_S)])
        return {"unconfirmed": True} if ctx.entry.notes.get(UNCONFIRMED) else {}

    async def abort(self, order: AbortOrder, ctx: OrderContext) -> Result:
        """Make sure that no attempt up to this one begins or goes on, and undo what it did."""
        if order.content_uid is not None:
            verbs, owner, kind = ["prepare", "dump", "seal"], order.content_uid, "capture"
        elif order.pod is not None:
            verbs, owner, kind = ["restore"], order.pod.uid, "restore"
        else:
            raise InvalidMessage("an abort names a content or a pod")

        async def tombstone() -> None:
            await self._orders.tombstone(f"{kind}-{owner}", order.attempt)

        async def compensate() -> None:
            names = [order_id(verb, Uid(owner)) for verb in verbs]
            await self._cancel_all(names, order.attempt)
            if kind == "capture":
                await self._give_up(owner, order)

        # A full disk takes no tombstone, and the worker must not have to wait for room on it.
        table = [
            Step("tombstone", tombstone, 10.0, undo=compensate),
            Step("compensate", compensate, LET_GO_S),
        ]
        await ctx.steps("abort", table)
        return {}

    async def _cancel_all(self, names: list[OrderId], attempt: int) -> None:
        for name in names:
            await self._orders.cancel(name, attempt)

    async def _give_up(self, content: str, order: AbortOrder) -> None:
        if hold := self._holds.of(content, order.attempt):
            why = Aborted(order.why or "the capture was aborted").to_failure()
            await self._holds.give_up(hold, why)
        elif order.fence_token:
            await self._machine.gpu_memory.unfence(order.fence_token)


class _Staging:
    """The steps of one dump order."""

    def __init__(
        self,
        machine: Machine,
        pods: Pods,
        holds: Holds,
        hold: Hold,
        driver: ProcessDriver,
        ctx: OrderContext,
        closing: contextlib.AsyncExitStack,
    ) -> None:
        self._machine = machine
        self._pods = pods
        self._holds = holds
        self._hold = hold
        self._worker = hold.worker
        self._driver = driver
        self._order: DumpOrder = ctx.order
        self._ctx = ctx
        self._closing = closing
        self._files: list[FileEntry] = []
        self._directory = -1
        self._digest = ""

    def table(self, prepared: Entry) -> list[Step]:
        async def stage() -> None:
            await self._stage(prepared)

        budget = self._order.deadline_s
        return [
            Step("freeze", self._freeze, FREEZE_S, undo=self._thaw),
            Step("copy-state", self._copy, budget, replayable=False),
            Step("thaw", self._thaw, THAW_S),
            Step("stage", stage, 60.0, replayable=False),
        ]

    async def _freeze(self) -> None:
        self._holds.may_freeze(self._hold, FREEZE_S + SLACK_S)
        await self._pods.while_alive(self._worker, self._holds.freeze(self._hold, self._driver))

    async def _thaw(self) -> None:
        await self._holds.thaw(self._hold, self._driver)
        self._holds.may_freeze(self._hold)

    async def _copy(self) -> None:
        await self._ctx.note("no-replay", value=True)
        order = self._order
        self._holds.may_freeze(self._hold, order.deadline_s + SLACK_S)
        place = Place(order.pod.namespace, order.content_uid, order.attempt)
        self._directory = self._machine.artifacts.new_part(place, PROCESS)
        self._closing.callback(os.close, self._directory)
        total = await self._driver.size(self._worker)

        async def tell(done: int) -> None:
            await self._ctx.progress(PROCESS, "copy-state", done, total)

        async def dump() -> None:
            self._files = await self._driver.dump(self._worker, self._directory, tell)

        await self._pods.while_alive(self._worker, dump())
        if self._holds.is_let_go(self._worker, order.attempt):
            # It ran again while its state was read.
            raise Aborted("the worker was let go while it was dumped")

    async def _stage(self, prepared: Entry) -> None:
        order = self._order
        facts = msgspec.structs.replace(facts_of(prepared.notes), driver=self._driver.name)
        manifest = PartManifest(
            kind="process",
            part=PROCESS,
            namespace=order.pod.namespace,
            content_uid=order.content_uid,
            generation=order.attempt,
            order=order.order,
            bytes=sum(entry.size for entry in self._files),
            files=self._files,
            vector=order.vector,
            facts=facts,
        )
        self._digest = await self._machine.artifacts.finish_part(self._directory, manifest)

    def result(self) -> PartResult:
        size = sum(entry.size for entry in self._files)
        return PartResult(part=PROCESS, bytes=size, digest=self._digest)
