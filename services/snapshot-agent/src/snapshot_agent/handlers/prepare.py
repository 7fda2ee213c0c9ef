"""The steps of `prepare`: gate, guard, quiesce, fence, facts, each with its compensation."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any, NoReturn

import msgspec

from snapshot_agent.domain import control
from snapshot_agent.domain.gate import CAPTURE_CHECKS, refuse
from snapshot_agent.handlers.background import first, pause, while_alive
from snapshot_agent.handlers.holds import BEAT_S, Hold, Holds
from snapshot_agent.ports import (
    GenerationRef,
    Machine,
    Orders,
    ProcessDriver,
    ResolvedContainer,
    Worker,
    Workers,
)
from snapshot_shared.artifact import PROCESS, Facts
from snapshot_shared.compatibility import ANSWERS, WAITS
from snapshot_shared.courier import OrderContext
from snapshot_shared.errors import (
    Aborted,
    DeadlineExceeded,
    Failure,
    GmsUnavailable,
    Internal,
    NotEligible,
    SnapbackError,
    WorkerRefused,
)
from snapshot_shared.ids import Uid
from snapshot_shared.orders import (
    DEVICE_DRIVERS,
    DeviceRef,
    LayoutRef,
    PodRef,
    PrepareOrder,
    PresenceDevice,
    VectorEntry,
)
from snapshot_shared.runner import Step

GUARD_S = 10.0
FENCE_WAIT_S = 3.0
"""How long the GMS sessions of a quiesced worker may take to end, in seconds."""

ANSWER_S = 4.0
"""How long GMS may take to answer, in seconds: the worker is quiet for as long."""

GMS_STARTS_S = 20.0
"""How long GMS may take to start before a worker is made quiet, in seconds, as in an upgrade."""

MARGIN_S = 5.0

DEADLINE_NOTE = "hold-deadline"
"""The note with the deadline of the hold, in seconds of the monotonic clock."""

FACTS_NOTE = "facts"
DEVICES_NOTE = "devices"
"""The note with the devices of a memory server in the pod, which the order does not name."""

_GIVEN_UP = Aborted("the capture could not be opened").to_failure()


class Prepare:
    """One prepare order under way."""

    def __init__(
        self,
        *,
        machine: Machine,
        orders: Orders,
        workers: Workers,
        holds: Holds,
        order: PrepareOrder,
        ctx: OrderContext,
    ) -> None:
        """Use the parts of the node for one order."""
        self._machine = machine
        self._orders = orders
        self._workers = workers
        self._holds = holds
        self._order = order
        self._ctx = ctx
        self._found: ResolvedContainer | None = None
        self._hold: Hold | None = None
        self._layouts: list[LayoutRef] = []
        self._facts_here = Facts()
        self._previous = ""
        self._why = _GIVEN_UP

    def table(self) -> list[Step]:
        """Return the steps in their order."""
        order = self._order
        return [
            Step("gate", self._gate, order.ready_s + MARGIN_S, undo=self._leave),
            Step("guard", self._guard, GUARD_S, undo=self._dismiss),
            Step(
                "quiesce",
                lambda: self._explained(self._quiesce()),
                order.quiesce_s + MARGIN_S,
                undo=self._resume,
            ),
            Step(
                "fence",
                lambda: self._explained(self._fence()),
                ANSWER_S,
                undo=self._unfence,
            ),
            Step("facts", lambda: self._explained(self._facts()), 60.0),
        ]

    async def _explained(self, work: Coroutine[Any, Any, None]) -> None:
        """Do a step; if it fails, the worker gets its error."""
        try:
            await work
        except SnapbackError as error:
            self._why = error.to_failure()
            raise

    @property
    def found(self) -> ResolvedContainer:
        """The container. Internal before the gate."""
        if self._found is None:
            raise Internal("the gate has not been passed")
        return self._found

    @property
    def hold(self) -> Hold:
        """The hold. Internal before the gate."""
        if self._hold is None:
            raise Internal("the gate has not been passed")
        return self._hold

    @property
    def vector(self) -> list[VectorEntry]:
        """The vector of the parts: the process, then the devices by their ordinals."""
        devices = sorted(self._order.devices, key=lambda device: device.ordinal)
        layouts = {layout.device: layout for layout in self._layouts}
        gpus = [
            VectorEntry(part=f"gpu-{device.ordinal}", ordinal=device.ordinal, layout=layout)
            for device in devices
            if (layout := layouts.get(device.uuid))
        ]
        return [VectorEntry(part=PROCESS), *gpus]

    async def give_up_older(self) -> None:
        """Let the worker of an earlier attempt go. Superseded if this attempt was aborted."""
        order, content = self._order, Uid(self._order.content_uid)
        self._orders.require_current(f"capture-{content}", order.attempt)
        if older := self._holds.of(content, order.attempt):
            await self._holds.give_up(older, _superseded(older, order))

    async def _gate(self) -> None:
        order, content = self._order, Uid(self._order.content_uid)
        self._orders.require_current(f"capture-{content}", order.attempt)
        driver = self._machine.driver(order.driver)
        self._found = found = await self._workers.resolve(order.pod)
        holder = self._holds.holder_of(order.pod)
        # The lock file decides between processes; this check only names the holder.
        refuse(CAPTURE_CHECKS, found.pod._replace(captured_by=holder))
        worker = replace(found.running(), seccomp_profile=order.seccomp_profile)
        order = await self._of_the_pod(order)
        unlock = self._machine.locks.take(worker.paths.lock)
        if unlock is None:
            raise NotEligible(f"another process captures container {order.pod.container}")
        now = self._machine.clocks.monotonic()
        self._hold = Hold(order, worker, driver, now + order.hold_s, unlock)
        self._holds.by_content[content] = self._hold
        await self._within(
            order.ready_s,
            worker,
            self._machine.control.appears(worker.paths, control.READY, lambda _: True),
            "the worker was not ready for a snapshot",
            f"the worker writes {control.READY} into $SNAPSHOT_CONTROL_DIR when it is warm",
        )
        await driver.inspect(worker, quiet=False)
        # Before the worker is quiet: a GMS, a helper, a CUDA driver or a KMS may take its time.
        self._facts_here = await self._facts_with(driver)
        place = GenerationRef(order.pod.namespace, order.content_uid, order.attempt)
        self._hold.cipher = await self._machine.keys.new_cipher(place, PROCESS)
        # A worker that polls may miss the end of its last capture, so `quiesce` repeats it.
        self._previous = self._outcome_left(worker)
        stale = [*control.CAPTURE_FILES, control.STATE]
        if worker.paths.placeholder is not None:
            # A restored process would take its capture for another restore. One that is started
            # again in its container starts cold, and does not look for these.
            stale += (*control.RESTORE_FILES, control.CONTEXT)
        await self._machine.control.clear(worker.paths, *stale)

    async def _facts_with(self, driver: ProcessDriver) -> Facts:
        order = self._order
        devices = await devices_of(self._machine, order.pod, order.devices) or []
        return msgspec.structs.replace(
            await self._machine.facts_with(driver),
            device_product=devices[0].product if devices else "",
            devices=len(devices),
            image=self.found.image[:256],
            image_digest=order.image_digest,
            command=list(self.found.command),
            protocol=WAITS if self._only_waits() else ANSWERS,
        )

    def _only_waits(self) -> bool:
        ready = self._machine.control.get(self.hold.worker.paths, control.READY)
        return not self.hold.driver.needs_help and not control.is_signal(ready or b"")

    async def _of_the_pod(self, order: PrepareOrder) -> PrepareOrder:
        """Return the order with the devices that the memory server of the pod serves."""
        if not order.memory_server:
            return order
        listed = await self._machine.gpu_memory.at(order.pod).devices(wait_s=GMS_STARTS_S)
        devices = [DeviceRef(ordinal=device.index, uuid=device.uuid) for device in listed]
        await self._ctx.note(DEVICES_NOTE, msgspec.to_builtins(devices))
        self._order = msgspec.structs.replace(order, devices=devices)
        return self._order

    def _outcome_left(self, worker: Worker) -> str:
        for name, outcome in control.OUTCOMES.items():
            if self._machine.control.get(worker.paths, name) is not None:
                return outcome
        return ""

    async def _leave(self) -> None:
        if self._hold is not None:
            self._holds.drop(self._hold)

    async def _guard(self) -> None:
        hold = self.hold
        # The wait for the worker took its time, so the deadline counts from here.
        hold.deadline = self._machine.clocks.monotonic() + self._order.hold_s
        await self._ctx.note(DEADLINE_NOTE, hold.deadline)
        await self._holds.arm(hold)

    async def _dismiss(self) -> None:
        await self._holds.dismiss(self.hold)

    async def _quiesce(self) -> None:
        order, worker = self._order, self.hold.worker
        where = worker.paths
        self.hold.quiet_since = self._machine.clocks.monotonic()
        if self._facts_here.protocol == WAITS:
            return
        self._machine.control.put(
            where,
            control.QUIESCE,
            control.request(order.attempt, order.content_uid, self._previous),
        )
        try:
            await self._within(
                min(order.quiesce_s, order.hold_s),
                worker,
                self._while_memory_answers(self._answer()),
                "the worker did not become quiet",
                "see in its log what `on_quiesce` waits for; without snapback_client a worker "
                f"answers {control.QUIESCE} by {control.QUIESCED} with the same attempt",
            )
        except DeadlineExceeded as error:
            if awaited := control.message_of(self._machine.control.get(where, control.QUIESCING)):
                error.message += f": {awaited}"
            raise

    async def _answer(self) -> None:
        """Wait until the worker is quiet. WorkerRefused if it cannot be captured."""
        await first(self._written(control.QUIESCED), self._refusal(), self._announce_waiting())

    async def _written(self, name: str, last: bytes = b"") -> bytes:
        """Wait for a control file of this attempt with another body than `last`; return it."""
        where, attempt = self.hold.worker.paths, self._order.attempt
        found = b""

        def accepts(data: bytes) -> bool:
            nonlocal found
            found = data
            return data != last and control.is_of(data, attempt)

        await self._machine.control.appears(where, name, accepts)
        return found

    async def _refusal(self) -> NoReturn:
        said = control.message_of(await self._written(control.QUIESCE_FAILED))
        raise WorkerRefused(f"the worker cannot be captured: {said or 'it does not say why'}")

    async def _announce_waiting(self) -> NoReturn:
        """Announce what the worker still waits for, each time that it writes something else."""
        last = b""
        while True:
            last = await self._written(control.QUIESCING, last)
            await self._ctx.progress(PROCESS, "quiesce", 0, 0, control.message_of(last))
            # However often the worker writes.
            await pause(BEAT_S)

    async def _while_memory_answers(self, work: Coroutine[Any, Any, None]) -> None:
        """Wait for a worker that gives up its memory, for which GMS has to answer it.

        GmsUnavailable if GMS does not answer the agent either.
        """
        await first(work, self._memory_is_silent()) if self._order.devices else await work

    async def _memory_is_silent(self) -> None:
        memory = self._machine.gpu_memory.at(self._order.pod)
        while True:
            try:
                async with asyncio.timeout(ANSWER_S):
                    await memory.devices(wait_s=0.0)
            except TimeoutError:
                raise GmsUnavailable(
                    f"the GPU memory service did not answer for {ANSWER_S:g} s"
                ) from None
            await pause(BEAT_S)

    async def _resume(self) -> None:
        await self._holds.free(self.hold, self._why)

    async def _fence(self) -> None:
        order = self._order
        if not order.devices:
            return
        devices = sorted(order.devices, key=lambda device: device.ordinal)
        self._layouts = await self._machine.gpu_memory.at(order.pod).fence(
            order.fence_token,
            [device.uuid for device in devices],
            wait_s=FENCE_WAIT_S,
            deadline_s=max(1.0, self.hold.deadline - self._machine.clocks.monotonic()),
        )
        committed = {layout.device for layout in self._layouts}
        empty = [device.uuid for device in devices if device.uuid not in committed]
        if empty and order.driver not in DEVICE_DRIVERS:
            raise NotEligible(
                f"nothing is committed on {empty[0]}",
                next_step="commit the weights in a pool of snapback_client, or capture with the "
                "driver criu+cuda, which brings what a process has on devices itself",
                device=empty[0],
            )

    async def _unfence(self) -> None:
        await self._holds.end_fence(self._order, self.hold.deadline)

    async def _facts(self) -> None:
        """Note the facts of the source. NoSpace when the capture would not fit."""
        hold = self.hold
        weights = sum(layout.bytes for layout in self._layouts)
        own = await hold.driver.inspect(hold.worker, quiet=True)
        await self._machine.artifacts.require_space(own, weights)
        await self._ctx.note(FACTS_NOTE, msgspec.to_builtins(self._facts_here))
        await self._holds.confirm(hold)

    async def _within(
        self,
        budget_s: float,
        worker: Worker,
        work: Coroutine[Any, Any, None],
        what: str,
        next_step: str,
    ) -> None:
        try:
            async with asyncio.timeout(budget_s):
                await while_alive(self._workers, worker, work)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{what} within {budget_s:g} s", next_step=next_step, budget_s=budget_s
            ) from None


async def devices_of(
    machine: Machine, pod: PodRef, devices: Sequence[DeviceRef]
) -> list[PresenceDevice] | None:
    """Return what is known of a pod's devices, those that the order names; None where nothing is.

    Without any in the order they are those that its kubelet gave to it.
    """
    if not devices:
        return await machine.pod_devices.of(pod) if machine.pod_devices is not None else None
    listed = await machine.gpu_memory.at(pod).devices(wait_s=GMS_STARTS_S)
    found = {device.uuid: device for device in listed}
    unknown = PresenceDevice(index=0, uuid="", product="", capacity_bytes=0)
    return [found.get(device.uuid, unknown) for device in devices]


def with_devices(order: PrepareOrder, notes: dict[str, Any]) -> PrepareOrder:
    """Return an order with the devices that were noted for it, if any were."""
    if DEVICES_NOTE not in notes:
        return order
    found = msgspec.convert(notes[DEVICES_NOTE], list[DeviceRef])
    return msgspec.structs.replace(order, devices=found)


def facts_of(notes: dict[str, Any]) -> Facts:
    """Return the facts that `prepare` noted."""
    return msgspec.convert(notes.get(FACTS_NOTE, {}), Facts)


def _superseded(older: Hold, order: PrepareOrder) -> Failure:
    return Aborted(
        f"attempt {older.attempt} of the capture gives way to attempt {order.attempt}"
    ).to_failure()
