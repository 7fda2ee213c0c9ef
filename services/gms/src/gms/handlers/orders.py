"""What GMS does for each order that arrives over NATS: save, load, commit, drop, abort.

The bytes move in child processes (`ports.Transfers`); here an order becomes their task, and their
events become reports and progress.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gms.domain.tasks import (
    DEFAULT_OPTIONS,
    TransferDone,
    TransferEvent,
    TransferLeased,
    TransferOptions,
    TransferProgress,
    load_task,
    save_task,
)
from gms.handlers.transfers import persistent
from gms.ports import FindMemory, Memory, NoMemoryServer, Tracer, Transfers
from snapback_client.frames import error_of
from snapshot_shared.courier import Handler, OrderContext, Result
from snapshot_shared.errors import Internal, NotFound, SnapbackError, UnknownDevice, pods_own
from snapshot_shared.frames import (
    DeviceStatus,
    ForgetRequest,
    PublishRequest,
    StatusRequest,
    UnfenceRequest,
)
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.order_book import OrderBook
from snapshot_shared.orders import (
    AbortOrder,
    CommitOrder,
    DropOrder,
    LoadOrder,
    Order,
    PartResult,
    SaveOrder,
)
from snapshot_shared.runner import Step
from snapshot_shared.telemetry import current_traceparent

log = logging.getLogger(__name__)

LEASE_S = 60.0
"""How long a transfer may take until it holds its lock, in seconds."""
BYTES_S = 3600.0
"""How long the bytes of one part may take; the order's own budget is usually shorter."""
UNUSED_S = 30.0
"""How long a drop waits for the sessions of a layout to end, in seconds."""


class GmsOrders:
    """The handlers of one node's GMS."""

    def __init__(
        self,
        memory: FindMemory,
        transfers: Transfers,
        tracer: Tracer,
        book: OrderBook,
        *,
        root: Path,
        metrics: Metrics = OFF,
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Work on the `memory` of a pod, with parts below the artifact root, moved in this way."""
        self._memory = memory
        self._transfers = transfers
        self._tracer = tracer
        self._root = str(root)
        self._book = book
        self._metrics = metrics
        self._options = options

    def routes(self) -> dict[type[Order], Handler]:
        """Return the handler of each type of order."""
        return {
            SaveOrder: self.save,
            LoadOrder: self.load,
            CommitOrder: self.commit,
            DropOrder: self.drop,
            AbortOrder: self.abort,
        }

    async def save(self, order: SaveOrder, context: OrderContext) -> Result:
        """Write one device's fenced layout as a part: `leased`, then `staged`."""
        memory = await self._memory(order.pod)
        device = await _device(memory, order.layout.device)
        self._book.require_current(f"capture-{order.content_uid}", order.attempt)
        task = save_task(
            order,
            self._options,
            socket_dir=str(memory.socket_dir),
            root=self._root,
            deadline_s=max(context.remaining_s(), 0.001),
            traceparent=current_traceparent(),
            attempt=order.attempt,
            fence_token=order.fence_token,
            product=device.product,
        )
        events = persistent(self._transfers, task)
        if memory.saver is not None:
            events = memory.saver.run(replace(order, deadline_s=task.deadline_s), task)
        transfer = _Transfer(context, order.part, events)

        async def lease() -> None:
            await transfer.until_leased()
            await context.report("leased")

        table = [
            Step("lease", lease, deadline_s=LEASE_S, undo=transfer.end),
            Step("write", lambda: transfer.until_done("write"), deadline_s=BYTES_S),
        ]
        with self._metrics.moving("save") as moved, self._tracer.span("transfer"):
            await context.steps("save", table)
            moved(transfer.result().bytes)
        # The worker may have its weights again, while those of other devices are written. What is
        # on the disk stays there when its memory server is gone: the fence has a deadline.
        try:
            request = UnfenceRequest(token=order.fence_token, device=device.uuid)
            await memory.control.unfence(request)
        except SnapbackError as error:
            log.warning("the fence of %s goes on: %s", order.part, error)
        done = transfer.result()
        _log_moved("save", order.part, done)
        return {"part": PartResult(part=order.part, bytes=done.bytes, digest=done.digest)}

    async def load(self, order: LoadOrder, context: OrderContext) -> Result:
        """Read one part into a device, verified, and leave it hidden: `loaded`."""
        memory = await self._memory(order.pod)
        device = await _device(memory, order.device)
        task = load_task(
            order,
            self._options,
            device=device.uuid,
            socket_dir=str(memory.socket_dir),
            root=self._root,
            deadline_s=max(context.remaining_s(), 0.001),
            traceparent=current_traceparent(),
            order=order.order,
            attempt=order.attempt,
            load_token=order.load_token,
        )
        events = self._transfers.run(task)
        if memory.loader is not None:
            given = replace(order, device=device.uuid, deadline_s=task.deadline_s)
            events = memory.loader.run(given, task)
        transfer = _Transfer(context, order.part, events)

        async def forget() -> None:
            await transfer.end()
            request = ForgetRequest(device=device.uuid, load_token=order.load_token)
            await memory.control.forget(request)

        table = [
            Step("check", transfer.until_leased, deadline_s=LEASE_S, undo=forget),
            Step("read", lambda: transfer.until_done("read"), deadline_s=BYTES_S),
        ]
        with self._metrics.moving("load") as moved, self._tracer.span("transfer"):
            await context.steps("load", table)
            done = transfer.result()
            moved(done.bytes)
        _log_moved("load", order.part, done)
        return {"bytes": done.bytes}

    async def commit(self, order: CommitOrder, context: OrderContext) -> Result:
        """Publish the layout that a load left hidden: `committed`."""
        memory = await self._memory(order.pod)
        device = await _device(memory, order.device)
        generations: list[int] = []

        async def publish() -> None:
            request = PublishRequest(device=device.uuid, load_token=order.load_token)
            ref = (await memory.control.publish(request)).layout
            if ref.layout_id != order.layout_id:
                raise NotFound(
                    f"the load left layout {ref.layout_id}, the order names {order.layout_id}",
                    expected=order.layout_id,
                    found=ref.layout_id,
                )
            generations.append(ref.generation)

        await context.steps("commit", [Step("publish", publish, deadline_s=10.0)])
        return {"generation": generations[0]}

    async def drop(self, order: DropOrder, context: OrderContext) -> Result:
        """Forget a load, or all that a pod that has ended left on the device: `dropped`."""

        async def forget() -> None:
            if order.load_token:
                await self._book.cancel(order.order.replace("drop-", "load-", 1), order.attempt)
            try:
                memory = await self._memory(order.pod)
                device = await _device(memory, order.device)
            except (NoMemoryServer, UnknownDevice) as error:
                # A server has forgotten all when its pod ended, and a device that is served no
                # more, as after `snapshotctl up` with fewer of them, has no memory.
                log.info("nothing to drop: %s", error)
                return
            request = ForgetRequest(
                device=device.uuid, load_token=order.load_token, wait_s=UNUSED_S
            )
            await memory.control.forget(request)
            # Its answer comes when the memory is free.
            await memory.control.status(StatusRequest())

        await context.steps("drop", [Step("forget", forget, deadline_s=UNUSED_S + 10.0)])
        return {}

    async def abort(self, order: AbortOrder, context: OrderContext) -> Result:
        """Tombstone a capture's attempts, end its saves, end its fence: `aborted`."""
        book = self._book

        async def tombstone() -> None:
            if order.content_uid:
                await book.tombstone(f"capture-{order.content_uid}", order.attempt)

        async def compensate() -> None:
            prefix = f"save-{order.content_uid}-"
            saves = [name for name in book.journal.ledger.entries if name.startswith(prefix)]
            await asyncio.gather(*(book.cancel(name, order.attempt) for name in saves))
            if order.fence_token:
                await self._unfence(order)

        table = [
            # A full disk takes no tombstone, and an abort must not wait for room on it.
            Step("tombstone", tombstone, deadline_s=10.0, undo=compensate),
            Step("compensate", compensate, deadline_s=30.0),
        ]
        await context.steps("abort", table)
        return {}

    async def _unfence(self, order: AbortOrder) -> None:
        try:
            memory = await self._memory(order.pod)
            await memory.control.unfence(UnfenceRequest(token=order.fence_token or ""))
        except NotFound as error:
            # Fences are in the memory of a server, so they have ended with it.
            log.info("no fence to end: %s", error)


async def _device(memory: Memory, name: str) -> DeviceStatus:
    """Return a device by its uuid, or by the part of a worker that it holds, as `gpu-0`.

    UnknownDevice, and what is wrong with a device that does not answer.
    """
    with pods_own():
        status = await memory.control.status(StatusRequest())
    devices = status.devices
    for device in devices:
        if name in (device.uuid, f"gpu-{device.index}"):
            return device
    for missing in status.missing or ():
        if name in (missing.uuid, f"gpu-{missing.index}"):
            with pods_own():
                raise error_of(missing.failure)
    raise UnknownDevice(
        f"device {name} is not served here",
        found=name,
        expected=sorted(device.uuid for device in devices),
    )


def _log_moved(verb: str, part: str, done: TransferDone) -> None:
    how = f", {done.moved} of them moved by {done.backend}" if done.backend else ""
    log.info("%s of %s: %d bytes%s", verb, part, done.bytes, how)


class _Transfer:
    """The events of a transfer process, in two steps: until it is leased, until it is done.

    The process begins with the first event that is asked for.
    """

    def __init__(
        self, context: OrderContext, part: str, events: AsyncIterator[TransferEvent]
    ) -> None:
        self._context = context
        self._part = part
        self._events: Any = events
        self._done: TransferDone | None = None

    async def until_leased(self) -> None:
        async for event in self._events:
            if isinstance(event, TransferLeased):
                return
            if isinstance(event, TransferDone):
                # It was saved by an earlier process, which could not report it any more.
                self._done = event
                return
        raise Internal("the transfer ended before it held its lock")

    async def until_done(self, step: str) -> None:
        async with aclosing(self._events) as events:
            async for event in events:
                match event:
                    case TransferProgress():
                        await self._context.progress(self._part, step, event.done, event.total)
                    case TransferDone():
                        self._done = event
                    case _:
                        continue

    def result(self) -> TransferDone:
        if self._done is None:
            raise Internal("the transfer ended without a result")
        return self._done

    async def end(self) -> None:
        """End the process, if it still runs."""
        await self._events.aclose()
