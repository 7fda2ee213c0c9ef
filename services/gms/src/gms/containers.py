"""`gms-saver` and `gms-loader`: one save or load of a pod's devices, in a container of its own.

In: the environment (`Settings`) and an order file, a JSON list of the same `save` or `load` orders
that travel over NATS, one a device. Out: parts in `GMS_CHECKPOINT_DIR`, and beside the order file
`done` or `failed`, JSON, put in place whole. There is no NATS here.

`GMS_CHECKPOINT_DIR` is the directory of the generation that the orders name:
`<root>/<namespace>/<content uid>/gen-<attempt>`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from gms.adapters.grpc_client import GmsCaller, fresh_token
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.containers import Settings, container_load, container_save, read_settings
from gms.domain.tasks import LoadTask, SaveTask, TransferDone
from gms.handlers.transfers import whole_or_nothing
from snapback_client.frames import MemoryDomain
from snapshot_shared.codec import MAX_MESSAGE_BYTES, decode_json, encode_pretty
from snapshot_shared.errors import (
    Aborted,
    Failure,
    Internal,
    InvalidInput,
    SnapbackError,
    failure_of,
)
from snapshot_shared.files import open_root, opened, read_bounded, write_replacing
from snapshot_shared.frames import StatusReply
from snapshot_shared.orders import Bytes, LayoutRef, LoadOrder, PartStr, SaveOrder

DONE = "done"
FAILED = "failed"
MAX_DEVICES = 64

SaveOrders = Annotated[list[SaveOrder], Meta(min_length=1, max_length=MAX_DEVICES)]
LoadOrders = Annotated[list[LoadOrder], Meta(min_length=1, max_length=MAX_DEVICES)]


class PartOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One part that is on disk or in memory. `was_there`: the device had this layout already."""

    part: PartStr
    device: str
    bytes: Bytes
    digest: str
    layout: LayoutRef
    was_there: bool = False


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """What stands in `done` (all parts) or in `failed` (why)."""

    verb: Literal["save", "load"]
    parts: list[PartOutcome] = []
    failure: Failure | None = None


async def save_all(settings: Settings, orders: Sequence[SaveOrder]) -> list[PartOutcome]:
    """Write every device's part, all at a time. When one fails the unfinished ones are removed."""
    tasks = [container_save(settings, order) for order in orders]
    found = await _all(tasks)
    return [_outcome(task, done) for task, done in zip(tasks, found, strict=True)]


async def load_all(settings: Settings, orders: Sequence[LoadOrder]) -> list[PartOutcome]:
    """Load every device hidden, then publish all. What is committed already is left alone.

    When one fails all are forgotten.
    """
    async with GmsCaller(Path(settings.socket_dir), traceparent=settings.traceparent) as gms:
        status = await gms.status(events=0)
        there = {order.part: _committed(status, order) for order in orders}
        tasks = [
            container_load(settings, order, load_token=fresh_token("load"))
            for order in orders
            if there[order.part] is None
        ]
        published: dict[str, PartOutcome] = {}
        try:
            found = await _all(tasks)
            for task, done in zip(tasks, found, strict=True):
                layout = await gms.publish(task.device, task.load_token)
                published[task.part] = _outcome(task, done, layout)
        except BaseException:
            # Those that are published, too: ranks of one model are there together or not at all.
            await asyncio.shield(_forget(gms, tasks))
            raise
    return [published.get(order.part) or _left_alone(order, there[order.part]) for order in orders]


async def _forget(gms: GmsCaller, tasks: Sequence[LoadTask]) -> None:
    for task in tasks:
        try:
            await gms.forget(task.device, task.load_token)
        except SnapbackError as error:
            sys.stderr.write(f"the load into {task.device} could not be forgotten: {error}\n")


def _committed(status: StatusReply, order: LoadOrder) -> LayoutRef | None:
    wanted = (order.device, order.layout_id, order.structure_hash)
    for device in status.devices:
        for domain in device.domains:
            found = domain.layout
            if domain.domain is not MemoryDomain.WEIGHTS or found is None:
                continue
            if (found.device, found.layout_id, found.structure_hash) == wanted:
                return found
    return None


def _left_alone(order: LoadOrder, layout: LayoutRef | None) -> PartOutcome:
    if layout is None:
        raise Internal(f"part {order.part} was neither loaded nor there")
    return PartOutcome(
        part=order.part,
        device=order.device,
        bytes=layout.bytes,
        digest=order.part_digest,
        layout=layout,
        was_there=True,
    )


def _outcome(
    task: SaveTask | LoadTask, done: TransferDone, published: LayoutRef | None = None
) -> PartOutcome:
    return PartOutcome(
        part=task.part,
        device=task.device,
        bytes=done.bytes,
        digest=done.digest,
        layout=published or done.layout,
    )


async def _transfer(task: SaveTask | LoadTask) -> TransferDone:
    async with aclosing(whole_or_nothing(TransferProcesses(), task)) as events:
        async for event in events:
            if isinstance(event, TransferDone):
                return event
    raise Internal("the transfer ended without a result")


async def _all(tasks: Sequence[SaveTask | LoadTask]) -> list[TransferDone]:
    """Run all at a time; the first failure ends the others, and is raised by itself."""
    running = [asyncio.ensure_future(_transfer(task)) for task in tasks]
    try:
        return await asyncio.gather(*running)
    except BaseException:
        for each in running:
            each.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        raise


def saver() -> None:
    """Run `gms-saver`."""
    sys.exit(_run("save", os.environ))


def loader() -> None:
    """Run `gms-loader`."""
    sys.exit(_run("load", os.environ))


def _run(verb: Literal["save", "load"], environment: Mapping[str, str]) -> int:
    """Carry out the orders; status 0 when `done` stands there, 1 when not."""
    os.umask(0o077)
    try:
        settings = read_settings(environment)
    except SnapbackError as error:
        # Without settings there is no folder for the result file.
        sys.stderr.write(f"gms-{verb}r: {error.to_failure()}\n")
        return 1
    folder = Path(settings.order_file).parent
    try:
        for name in (DONE, FAILED):
            (folder / name).unlink(missing_ok=True)
        outcome = asyncio.run(_with_signals(_carry_out(verb, settings)))
    except Exception as error:  # noqa: BLE001 - here every error becomes the file `failed`
        failure = failure_of(error)
        sys.stderr.write(f"gms {verb}: {failure}\n")
        _write(folder, FAILED, Outcome(verb=verb, failure=failure))
        return 1
    _write(folder, DONE, outcome)
    return 0


async def _carry_out(verb: Literal["save", "load"], settings: Settings) -> Outcome:
    path = Path(settings.order_file)
    if verb == "save":
        return Outcome(verb=verb, parts=await save_all(settings, _orders(path, SaveOrders)))
    return Outcome(verb=verb, parts=await load_all(settings, _orders(path, LoadOrders)))


def _orders(path: Path, kind: Any) -> Any:
    try:
        with opened(open_root(path.parent)) as folder:
            data = read_bounded(folder, path.name, MAX_MESSAGE_BYTES)
    except (OSError, SnapbackError) as error:
        raise InvalidInput(
            f"the order file {path} cannot be read: {error}",
            next_step="name a JSON list of orders with GMS_ORDER_FILE",
            path=str(path),
        ) from error
    return decode_json(data, kind)


async def _with_signals(work: Coroutine[Any, Any, Outcome]) -> Outcome:
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise Aborted("a signal ended it before it was done") from None


def _write(folder: Path, name: str, outcome: Outcome) -> None:
    try:
        with opened(open_root(folder)) as directory:
            write_replacing(directory, name, encode_pretty(outcome))
    except (OSError, SnapbackError) as error:
        sys.stderr.write(f"{folder / name} cannot be written: {error}\n")
