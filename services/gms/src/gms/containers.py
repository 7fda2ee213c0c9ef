"""`gms-saver` and `gms-loader`: saves and loads of a pod's devices, in a container of its own.

In: the environment (`Settings`) and an order file, a JSON list of the same `save` or `load` orders
that travel over NATS, one a device. Out: parts in `GMS_CHECKPOINT_DIR`, and beside the order file
`done` or `failed`, JSON, put in place whole. There is no NATS here.

`GMS_CHECKPOINT_DIR` is the directory of the generation that the orders name:
`<root>/<namespace>/<content uid>/gen-<attempt>`. With `GMS_ORDER_DIR` they run until a signal: the
GMS of the node puts a folder there for each order, `order.json` in it, and takes it away when the
order is over, one way or the other. The parts stand in the same folder as below an artifact root.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from asyncinotify import Inotify, Mask
from msgspec import Meta

from gms.adapters.grpc_client import GmsCaller, fresh_token
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.containers import (
    DONE,
    EVENT,
    FAILED,
    ORDER_FILE,
    Outcome,
    PartOutcome,
    Settings,
    container_load,
    container_save,
    in_order_folder,
    read_settings,
)
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent
from gms.handlers.transfers import whole_or_nothing
from gms.ports import Transfers
from snapback_client.frames import MemoryDomain
from snapshot_shared.codec import MAX_MESSAGE_BYTES, decode_json, encode_pretty
from snapshot_shared.errors import (
    Aborted,
    Internal,
    InvalidInput,
    SnapbackError,
    failure_of,
)
from snapshot_shared.files import open_root, opened, read_bounded, write_replacing
from snapshot_shared.frames import StatusReply
from snapshot_shared.orders import LayoutRef, LoadOrder, SaveOrder
from snapshot_shared.tasks import any_set, end_all

MAX_DEVICES = 64
AGAIN_S = 1.0
"""The rest before a service that did not answer is asked again which GPUs it has, in seconds."""

T = TypeVar("T")
SaveOrders = Annotated[list[SaveOrder], Meta(min_length=1, max_length=MAX_DEVICES)]
LoadOrders = Annotated[list[LoadOrder], Meta(min_length=1, max_length=MAX_DEVICES)]


Notice = Callable[[TransferEvent], None]
"""Called with every event of every transfer."""


def _unnoticed(_event: TransferEvent) -> None:
    pass


async def save_all(
    settings: Settings,
    orders: Sequence[SaveOrder],
    processes: Transfers,
    notice: Notice = _unnoticed,
) -> list[PartOutcome]:
    """Write every device's part, all at a time. When one fails the unfinished ones are removed."""
    tasks = [container_save(settings, order) for order in orders]
    found = await _all(processes, tasks, notice)
    return [_outcome(task, done) for task, done in zip(tasks, found, strict=True)]


async def load_all(
    settings: Settings, orders: Sequence[LoadOrder], processes: Transfers
) -> list[PartOutcome]:
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
            found = await _all(processes, tasks)
            for task, done in zip(tasks, found, strict=True):
                layout = await gms.publish(task.device, task.load_token)
                published[task.part] = _outcome(task, done, layout)
        except BaseException:
            # Those that are published, too: ranks of one model are there together or not at all.
            await asyncio.shield(_forget(gms, tasks))
            raise
    return [published.get(order.part) or _left_alone(order, there[order.part]) for order in orders]


async def load_hidden(
    settings: Settings, orders: Sequence[LoadOrder], processes: Transfers, notice: Notice
) -> list[PartOutcome]:
    """Load every device, and leave the layouts hidden under the load tokens of the orders."""
    tasks = [container_load(settings, order, load_token=order.load_token) for order in orders]
    found = await _all(processes, tasks, notice)
    return [_outcome(task, done) for task, done in zip(tasks, found, strict=True)]


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


async def _transfer(
    processes: Transfers, task: SaveTask | LoadTask, notice: Notice
) -> TransferDone:
    async with aclosing(whole_or_nothing(processes, task)) as events:
        async for event in events:
            if isinstance(event, TransferDone):
                return event
            notice(event)
    raise Internal("the transfer ended without a result")


async def _all(
    processes: Transfers, tasks: Sequence[SaveTask | LoadTask], notice: Notice = _unnoticed
) -> list[TransferDone]:
    """Run all at a time; the first failure ends the others, and is raised by itself."""
    running = [asyncio.ensure_future(_transfer(processes, task, notice)) for task in tasks]
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
    if settings.order_dir:
        return asyncio.run(_following(verb, settings))
    folder = Path(settings.order_file).parent
    return asyncio.run(_reported(verb, folder, _with_signals(_carry_out(verb, settings))))


async def _following(verb: Literal["save", "load"], settings: Settings) -> int:
    """Carry out the orders of a folder until a signal; status 1 where there is no such folder."""
    try:
        await _with_signals(follow(verb, settings))
    except Aborted:
        return 0
    except OSError as error:
        sys.stderr.write(f"gms-{verb}r: GMS_ORDER_DIR {settings.order_dir}: {error}\n")
    return 1


async def follow(verb: Literal["save", "load"], settings: Settings) -> None:
    """Carry out every order that stands in the order folder, until cancelled.

    One whose folder is taken away ends at once, and leaves nothing.
    """
    root = Path(settings.order_dir)
    running: dict[str, asyncio.Task[int]] = {}
    async with TransferProcesses() as processes:
        warming = asyncio.create_task(_warm(processes, settings), name="warming")
        try:
            await _follow(verb, settings, root, processes, running)
        finally:
            await end_all(warming, *running.values())


async def _follow(
    verb: Literal["save", "load"],
    settings: Settings,
    root: Path,
    processes: Transfers,
    running: dict[str, asyncio.Task[int]],
) -> None:
    with Inotify() as inotify:
        inotify.add_watch(root, Mask.MOVED_TO | Mask.MOVED_FROM | Mask.DELETE | Mask.ONLYDIR)
        sys.stderr.write(f"gms-{verb}r: waiting for orders in {root}\n")
        while True:
            wanted = _unanswered(root, verb)
            for name in running.keys() - wanted:
                await end_all(running.pop(name))
            for name in wanted - running.keys():
                folder = root / name
                work = _reported(verb, folder, _ordered(verb, settings, folder, processes))
                running[name] = asyncio.create_task(work, name=name)
            await inotify.get()


async def _warm(processes: TransferProcesses, settings: Settings) -> None:
    """Have a process wait for each GPU, once the service says which it has."""
    while True:
        try:
            return processes.expect(await _gpus(settings))
        except SnapbackError:
            # It starts beside this container, and an order that comes meanwhile says what is wrong.
            await any_set(AGAIN_S)


async def _processes(settings: Settings) -> TransferProcesses:
    """Return the processes of one order; each is shown its GPU alone where the service names them.

    Its gRPC socket is for its own user, and another one may move bytes: by the lease socket.
    """
    try:
        return TransferProcesses(gpus=await _gpus(settings))
    except SnapbackError:
        return TransferProcesses()


async def _gpus(settings: Settings) -> list[str]:
    """Return the uuids of the devices of the service that are GPUs. GmsUnavailable."""
    async with GmsCaller(Path(settings.socket_dir), traceparent=settings.traceparent) as gms:
        devices = (await gms.status(events=0)).devices
    return [device.uuid for device in devices if device.kind == "cuda"]


def _unanswered(root: Path, verb: str) -> set[str]:
    return {
        path.name
        for path in root.glob(f"{verb}-*")
        if not any((path / name).exists() for name in (DONE, FAILED))
    }


async def _ordered(
    verb: Literal["save", "load"], settings: Settings, folder: Path, processes: Transfers
) -> Outcome:
    """Carry out what the order file of a folder says."""

    def notice(event: TransferEvent) -> None:
        _write(folder, EVENT, event)

    path = folder / ORDER_FILE
    if verb == "save":
        saves: list[SaveOrder] = _orders(path, SaveOrders)
        here = in_order_folder(settings, str(folder), saves[0])
        return Outcome(verb=verb, parts=await save_all(here, saves, processes, notice))
    loads: list[LoadOrder] = _orders(path, LoadOrders)
    here = in_order_folder(settings, str(folder), loads[0])
    return Outcome(verb=verb, parts=await load_hidden(here, loads, processes, notice))


async def _reported(
    verb: Literal["save", "load"], folder: Path, work: Coroutine[Any, Any, Outcome]
) -> int:
    """Leave the result of the work in a folder; return 0 when it is `done`, 1 when `failed`."""
    try:
        for name in (DONE, FAILED):
            (folder / name).unlink(missing_ok=True)
        outcome = await work
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
        saves: list[SaveOrder] = _orders(path, SaveOrders)
        processes = await _processes(settings)
        return Outcome(verb=verb, parts=await save_all(settings, saves, processes))
    loads: list[LoadOrder] = _orders(path, LoadOrders)
    processes = await _processes(settings)
    return Outcome(verb=verb, parts=await load_all(settings, loads, processes))


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


async def _with_signals(work: Coroutine[Any, Any, T]) -> T:
    task = asyncio.ensure_future(work)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    try:
        return await task
    except asyncio.CancelledError:
        raise Aborted("a signal ended it before it was done") from None


def _write(folder: Path, name: str, found: Outcome | TransferEvent) -> None:
    try:
        with opened(open_root(folder)) as directory:
            write_replacing(directory, name, encode_pretty(found), durable=name != EVENT)
    except (OSError, SnapbackError) as error:
        sys.stderr.write(f"{folder / name} cannot be written: {error}\n")
