"""The orders of a capture: `prepare`, `dump`, `release` and `abort`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import msgspec

from snapshot_agent.domain.driving import PHASE_NOTE, Phase
from snapshot_agent.domain.gate import DUMP_CHECKS, DumpRequest, refuse
from snapshot_agent.handlers.background import HANGS_S, Slots, compensated, while_alive
from snapshot_agent.handlers.holds import UNCONFIRMED, Hold, Holds
from snapshot_agent.handlers.prepare import Prepare, facts_of
from snapshot_agent.ports import Dump, GenerationRef, Machine, Orders, Stage, Workers
from snapshot_shared.artifact import PROCESS, PartManifest
from snapshot_shared.courier import OrderContext, Result
from snapshot_shared.encrypting import PartCipher
from snapshot_shared.errors import Aborted, Internal, InvalidMessage, NodeBusy
from snapshot_shared.ids import OrderId, Uid, order_id, verb_of
from snapshot_shared.ledger import Entry
from snapshot_shared.orders import (
    AbortOrder,
    DumpOrder,
    PartResult,
    PrepareOrder,
    ReleaseOrder,
)
from snapshot_shared.runner import UNDO_S, Step

TERMINATE_GRACE_S = 5.0
"""The grace period of a worker that ends after its capture, in seconds."""

LET_GO_S = 45.0
"""How long it may take to let a worker go, in seconds, besides what its driver needs for it."""

BUSY_S = 120.0
"""How long a capture waits for others of its node before its worker is quiet, in seconds."""

SLACK_S = 5.0
"""How many seconds after the budget of a step the guard thaws the worker."""


class Captures:
    """The orders of a capture that touch the worker."""

    def __init__(
        self,
        machine: Machine,
        orders: Orders,
        workers: Workers,
        holds: Holds,
        slots: Slots,
    ) -> None:
        """Write at most as many workers at a time as `slots` allows."""
        self._machine = machine
        self._orders = orders
        self._workers = workers
        self._holds = holds
        self._slots = slots

    async def prepare(self, order: PrepareOrder, ctx: OrderContext) -> Result:
        """Open a capture; the worker is held from here on."""
        steps = Prepare(
            machine=self._machine,
            orders=self._orders,
            workers=self._workers,
            holds=self._holds,
            order=order,
            ctx=ctx,
        )
        await steps.give_up_older()
        # Before the worker is quiet, which otherwise would wait for the workers before it.
        free_slot = await self._slot(ctx)
        try:
            await ctx.steps("prepare", steps.table())
        except BaseException:
            free_slot()
            raise
        steps.hold.free_slot = free_slot
        self._holds.watch(steps.hold, order.dump_within_s)
        return {"vector": steps.vector}

    async def _slot(self, ctx: OrderContext) -> Callable[[], None]:
        """Wait for a slot; return what frees it. NodeBusy."""
        if self._slots.locked():
            busy = f"{self._slots.limit} captures under way on this node"
            await ctx.progress(PROCESS, "quiesce", 0, 0, busy)
        try:
            return await self._slots.turn(BUSY_S)
        except TimeoutError:
            raise NodeBusy(
                f"{self._slots.limit} captures are under way on this node",
                limit=self._slots.limit,
            ) from None

    async def dump(self, order: DumpOrder, ctx: OrderContext) -> Result:
        """Write the process part of a held worker."""
        self._orders.require_current(f"capture-{order.content_uid}", order.attempt)
        hold = self._holds.of(order.content_uid, order.attempt)
        if hold is not None and self._holds.is_let_go(hold.worker, hold.attempt):
            # An agent that was stopped finds this order beside the end of the guard.
            hold = None
        prepared = self._prepared(order)
        vector = prepared.terminal.vector if prepared and prepared.terminal else None
        held = hold.attempt if hold else None
        driver = hold.driver.name if hold else ""
        refuse(DUMP_CHECKS, DumpRequest(order, held, driver, vector))
        if hold is None or prepared is None:
            raise Internal("the gate has been passed with no hold")
        with self._holds.busy(hold, order.release_within_s):
            async with contextlib.AsyncExitStack() as closing:
                closing.callback(hold.free_slot)
                # If this dump fails, a second dump of the attempt must not encrypt by the same key.
                cipher, hold.cipher = hold.cipher, None
                if cipher is None:
                    place = GenerationRef(order.pod.namespace, order.content_uid, order.attempt)
                    cipher = await self._machine.keys.new_cipher(place, PROCESS)
                steps = _DumpSteps(
                    self._machine, self._workers, self._holds, hold, ctx, closing, cipher
                )
                with self._machine.metrics.moving("dump") as moved:
                    await ctx.steps("dump", steps.table(prepared))
                    moved(steps.result().bytes)
        return {"part": steps.result()}

    def _prepared(self, order: DumpOrder) -> Entry | None:
        entry = self._entry("prepare", Uid(order.content_uid), order.attempt)
        if entry is None or entry.terminal is None:
            return None
        return entry if entry.terminal.kind == "prepared" else None

    def _entry(self, verb: str, content: Uid, attempt: int) -> Entry | None:
        entry = self._orders.journal.ledger.entry(order_id(verb, content))
        return entry if entry is not None and entry.attempt == attempt else None

    async def release(self, order: ReleaseOrder, ctx: OrderContext) -> Result:
        """Let a held worker go on, and end its pod where the policy is Terminate."""
        content = Uid(order.content_uid)
        result: dict[str, float | bool] = {}

        async def signal() -> None:
            # No step of the capture may touch the worker once it runs again.
            names = [order_id(verb, content) for verb in ("prepare", "dump")]
            await self._cancel_all(names, order.attempt)
            if hold := self._holds.of(content, order.attempt):
                if order.outcome == "complete":
                    if not await self._holds.complete(hold):
                        result["unconfirmed"] = True
                    elif hold.paused_s and order.policy == "Resume":
                        result["paused_s"] = hold.paused_s
                else:
                    why = Aborted("the capture was released as aborted").to_failure()
                    await self._holds.give_up(hold, why)
            if order.policy == "Terminate":
                await self._workers.end_pod(order.pod.uid, TERMINATE_GRACE_S)

        budget = LET_GO_S + self._holds.let_go_s(content, order.attempt)
        await ctx.steps("release", [Step("signal", signal, budget)])
        prepare = self._entry("prepare", content, order.attempt)
        if prepare and prepare.notes.get(UNCONFIRMED):
            result["unconfirmed"] = True
        return result

    async def abort(self, order: AbortOrder, ctx: OrderContext) -> Result:
        """Make sure that no attempt up to this one begins or goes on, and undo what it did."""
        if order.content_uid is None:
            raise InvalidMessage("an abort names a content or a pod")
        content = Uid(order.content_uid)

        async def tombstone() -> None:
            await self._orders.tombstone(f"capture-{content}", order.attempt)

        async def compensate() -> None:
            names = [order_id(verb, content) for verb in ("prepare", "dump", "seal")]
            await self._cancel_all(names, order.attempt)
            await self._give_up(content, order)
            if order.on_failure == "Kill" and order.pod is not None:
                # They wait for a container that has failed, and nothing else would end them.
                await self._workers.end_pod(order.pod.uid, 0.0)

        budget = LET_GO_S + self._holds.let_go_s(content, order.attempt)
        # `undo`: on a full disk the tombstone fails, and the worker must be let go all the same.
        table = [
            Step("tombstone", tombstone, 10.0, undo=compensate, undo_s=budget),
            Step("compensate", compensate, budget),
        ]
        await ctx.steps("abort", table)
        return {}

    async def _cancel_all(self, names: list[OrderId], attempt: int) -> None:
        for name in names:
            # What a prepare undoes concerns the worker; the others may hang on the artifact root.
            within_s = None if verb_of(name) == "prepare" else HANGS_S
            await self._orders.cancel(name, attempt, within_s)

    async def _give_up(self, content: str, order: AbortOrder) -> None:
        if hold := self._holds.of(content, order.attempt):
            why = Aborted(order.why or "the capture was aborted").to_failure()
            await self._holds.give_up(hold, why)
        elif order.fence_token:
            memory = self._machine.gpu_memory
            await (memory.at(order.pod) if order.pod else memory).unfence(order.fence_token)


class _DumpSteps:
    """The steps of one dump order: those of the driver, then `stage`."""

    def __init__(
        self,
        machine: Machine,
        workers: Workers,
        holds: Holds,
        hold: Hold,
        ctx: OrderContext,
        closing: contextlib.AsyncExitStack,
        cipher: PartCipher | None,
    ) -> None:
        self._machine = machine
        self._workers = workers
        self._holds = holds
        self._hold = hold
        self._order: DumpOrder = ctx.order
        self._ctx = ctx
        self._closing = closing
        self._total = 0
        self._digest = ""
        self._dump = Dump(
            worker=hold.worker,
            attempt=hold.attempt,
            deadline=machine.clocks.monotonic() + ctx.remaining_s(),
            progress=self._progress,
            cipher=cipher,
            goes_on=self._goes_on,
        )
        self._running = hold.driver.stages[0]

    def table(self, prepared: Entry) -> list[Step]:
        async def stage() -> None:
            await self._stage(prepared)

        steps = [self._step(stage) for stage in self._hold.driver.stages]
        return [*steps, Step("stage", stage, 60.0, replayable=False)]

    def _step(self, stage: Stage) -> Step:
        stages = self._hold.driver.stages
        budget = self._order.deadline_s if stage.budget_s is None else stage.budget_s

        async def run() -> None:
            if stage is stages[0]:
                self._holds.begin_pause(self._hold)
            self._holds.may_freeze(self._hold, budget + SLACK_S)
            await compensated(self._run(stage), self._let_go)
            if stage is stages[-1]:
                self._holds.end_pause(self._hold, self._dump.frozen_s)
                self._holds.may_freeze(self._hold)

        undo = self._let_go if stage is stages[0] else None
        undo_s = UNDO_S + self._holds.let_go_s(self._hold.content, self._hold.attempt)
        return Step(stage.name, run, budget, undo=undo, undo_s=undo_s, replayable=not stage.writes)

    async def _let_go(self) -> None:
        # Work that hung may end when the next capture already holds the worker.
        if self._holds.holder_of(self._order.pod) in (None, self._hold.content):
            before = self._hold.phase
            await self._holds.let_go(self._hold)
            self._holds.may_freeze(self._hold)
            if self._hold.phase is not before:
                await self._ctx.note(PHASE_NOTE, self._hold.phase)

    async def _run(self, stage: Stage) -> None:
        self._running = stage
        if stage.writes and self._dump.part < 0:
            await self._open()
        await self._enter(stage.phases.during)
        if stage.replaces:
            await self._replace(stage)
        else:
            await while_alive(self._workers, self._dump.worker, stage.run(self._dump))
        await self._goes_on()
        if stage.writes:
            # If the worker ran while its state was copied, the copy may be inconsistent.
            await self._holds.confirm(self._hold)

    async def _goes_on(self) -> None:
        await self._enter(self._running.phases.after)

    async def _enter(self, phase: Phase) -> None:
        """Set how the worker is let go: first in the journal, then at the guard."""
        if phase is not self._hold.phase:
            await self._ctx.note(PHASE_NOTE, phase)
            self._holds.enter(self._hold, phase)

    async def _open(self) -> None:
        """Create the part. After this no step is run a second time."""
        await self._ctx.note("no-replay", value=True)
        order = self._order
        place = GenerationRef(order.pod.namespace, order.content_uid, order.attempt)
        new_part = self._machine.artifacts.new_part(place, PROCESS)
        self._dump.part = await self._closing.enter_async_context(new_part)
        self._total = await self._hold.driver.inspect(self._dump.worker, quiet=True)

    async def _replace(self, stage: Stage) -> None:
        async with self._workers.replacing(self._dump.worker) as set_process:
            await stage.run(self._dump)
            worker = await set_process(self._dump.worker.process)
        self._holds.follow(self._hold, worker)

    async def _progress(self, done: int) -> None:
        await self._ctx.progress(PROCESS, self._running.name, done, self._total)

    async def _stage(self, prepared: Entry) -> None:
        order = self._order
        manifest = PartManifest(
            kind="process",
            part=PROCESS,
            namespace=order.pod.namespace,
            content_uid=order.content_uid,
            generation=order.attempt,
            order=order.order,
            bytes=self._size,
            files=list(self._dump.files),
            vector=order.vector,
            facts=msgspec.structs.replace(facts_of(prepared.notes), driver=self._hold.driver.name),
            encryption=self._dump.cipher.encryption if self._dump.cipher else msgspec.UNSET,
        )
        self._digest = await self._machine.artifacts.finish_part(self._dump.part, manifest)

    @property
    def _size(self) -> int:
        return sum(entry.size for entry in self._dump.files)

    def result(self) -> PartResult:
        return PartResult(part=PROCESS, bytes=self._size, digest=self._digest)
