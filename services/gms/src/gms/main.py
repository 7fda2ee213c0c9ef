"""Wires the GPU memory service of one node: devices, the two sockets, the orders from NATS."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gms.adapters.admission import LeasePolicy
from gms.adapters.backends import find_backend
from gms.adapters.grpc_api import GrpcServer
from gms.adapters.lease_socket import LeaseServer
from gms.adapters.simulated import SimulatedDevice, allow_many_descriptors
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import TransferOptions
from gms.handlers.control import GmsControl
from gms.handlers.memory_server import MemoryServer
from gms.handlers.orders import GmsOrders
from gms.handlers.sessions import LeaseSessions
from gms.handlers.transfers import GmsTransfers
from gms.ports import Device
from snapshot_shared import subjects
from snapshot_shared.bus import Bus, Handler
from snapshot_shared.codec import encode_json
from snapshot_shared.courier import Courier
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.faults import FaultPlan
from snapshot_shared.frames import MAX_EVENTS, StatusRequest
from snapshot_shared.http import http_port
from snapshot_shared.ids import check_node
from snapshot_shared.journal import Journal
from snapshot_shared.metrics import Metrics
from snapshot_shared.order_book import OrderBook
from snapshot_shared.permissions import User
from snapshot_shared.runner import Runner
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import NodeSettings, load
from snapshot_shared.tasks import in_thread
from snapshot_shared.telemetry import Telemetry, log_to_stderr

log = logging.getLogger(__name__)

SERVICE = "snap-gms"
TRANSFER_SERVICE = "snap-transfer"
FLUSH_S = 2.0
"""How long the last spans may hold up the end, in seconds."""


class GmsSettings(NodeSettings, frozen=True, kw_only=True):
    """What GMS needs to know.

    `gms_device` says what kind of devices it serves: every GPU that CUDA shows, or `devices`
    simulated ones of `device_bytes` each, in huge pages of the host with `device_huge_pages`.
    Workers of other users reach the lease socket when they are of `lease_group` (a gid), and no
    other socket.
    """

    gms_device: Literal["simulated", "cuda"] = "simulated"
    devices: Annotated[int, Meta(ge=0, le=64)] = 2
    device_bytes: Annotated[int, Meta(ge=2**21, le=2**50)] = 4 * 2**30
    device_huge_pages: bool = False
    lease_group: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None


async def serve(stop: asyncio.Event) -> None:
    """Run until `stop` is set. Workers are served from the start, NATS when it answers."""
    settings = load(GmsSettings)
    log_to_stderr(SERVICE, settings.node, settings.log_level)
    check_node(settings.node)
    find_backend(settings.transfer_backend, storage=settings.object_storage)
    allow_many_descriptors()
    devices = _open_devices(settings)
    metrics = Metrics(
        SERVICE,
        settings.node,
        VERSION,
        scraped=settings.http_address is not None,
        otlp_endpoint=settings.otlp_endpoint,
    )
    gms = MemoryServer(
        node=settings.node, incarnation=str(uuid.uuid4()), devices=devices, metrics=metrics
    )
    telemetry = _telemetry(settings, SERVICE, metrics)
    _make_socket_folder(settings)
    control = GmsControl(gms)
    policy = LeasePolicy(group=settings.lease_group)
    lease = LeaseServer(settings.socket_dir, LeaseSessions(gms, telemetry), policy, metrics)
    processes = TransferProcesses(spares=len(devices))
    transfers = GmsTransfers(
        gms,
        processes,
        socket_dir=settings.socket_dir,
        root=settings.artifact_root,
        options=TransferOptions(settings.transfer_backend, settings.object_storage),
    )
    grpc = GrpcServer(settings.socket_dir, control, transfers, telemetry)
    lease.start()
    try:
        await grpc.start()
        log.info("GMS serves %d devices", len(devices))
        async with processes:
            await _serve_orders(stop, settings, gms, processes, control, telemetry, metrics)
    finally:
        await grpc.close()
        await lease.close()
        await gms.drained()
        for device in devices:
            device.close()


def _open_devices(settings: GmsSettings) -> Sequence[Device]:
    if settings.gms_device == "cuda":
        # Only here: a node without a GPU needs nothing of it.
        from gms.adapters.cuda import open_devices  # noqa: PLC0415

        return open_devices()
    return [
        SimulatedDevice(
            node=settings.node,
            index=index,
            capacity=settings.device_bytes,
            huge_pages=settings.device_huge_pages,
        )
        for index in range(settings.devices)
    ]


def _make_socket_folder(settings: GmsSettings) -> None:
    folder = settings.socket_dir
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if settings.lease_group is not None:
        os.chown(folder, -1, settings.lease_group)
        folder.chmod(0o750)


def _open_folders(settings: GmsSettings, wall: Callable[[], float], metrics: Metrics) -> Journal:
    settings.artifact_root.mkdir(mode=0o700, parents=True, exist_ok=True)
    return Journal.open(settings.state_dir, wall=wall, metrics=metrics)


def _telemetry(settings: GmsSettings, service: str, metrics: Metrics) -> Telemetry:
    return Telemetry(
        service, settings.node, VERSION, otlp_endpoint=settings.otlp_endpoint, metrics=metrics
    )


async def _serve_orders(
    stop: asyncio.Event,
    settings: GmsSettings,
    gms: MemoryServer,
    processes: TransferProcesses,
    control: GmsControl,
    telemetry: Telemetry,
    metrics: Metrics,
) -> None:
    clocks = system_clocks()
    node = check_node(settings.node)
    transfers = _telemetry(settings, TRANSFER_SERVICE, metrics)
    # In a thread: workers are served already, and a disk may take its time to answer.
    journal = await in_thread(_open_folders, settings, clocks.wall, metrics)
    bus = Bus(
        settings.nats_url,
        SERVICE,
        credentials=settings.nats_credentials,
        inbox=User("gms", node).inbox,
        metrics=metrics,
    )
    book = OrderBook(node=node, service="gms", journal=journal, clocks=clocks, metrics=metrics)
    orders = GmsOrders(
        gms,
        processes,
        transfers,
        book,
        socket_dir=Path(settings.socket_dir),
        root=settings.artifact_root,
        options=TransferOptions(settings.transfer_backend, settings.object_storage),
        metrics=metrics,
    )
    faults = FaultPlan("gms", settings.node) if settings.sim else None
    courier = Courier(
        book,
        bus,
        telemetry=telemetry,
        runner=Runner(journal, telemetry, faults, metrics),
        handlers=orders.routes(),
    )

    async def answer(_data: bytes, _headers: Mapping[str, str]) -> bytes:
        status = msgspec.to_builtins(await control.status(StatusRequest(events=MAX_EVENTS)))
        return encode_json({**status, "version": VERSION})

    async def connected() -> None:
        await bus.connect()
        questions: dict[str, Handler] = {subjects.rpc(node, "gms", "status"): answer}
        if faults is not None:
            questions[subjects.rpc(node, "gms", "sim")] = faults.answer
        await bus.serve(SERVICE, VERSION, {"node": settings.node}, questions)

    try:
        async with (
            http_port(settings.http_address, bus.not_ready, metrics.routes()),
            metrics.running(),
        ):
            await until_stopped(stop, connected())
            if not stop.is_set():
                await until_stopped(
                    stop,
                    courier.serve(),
                    telemetry.publish_to(bus),
                    transfers.publish_to(bus),
                )
    finally:
        await book.drain()
        if bus.is_connected:
            with contextlib.suppress(BusUnavailable, TimeoutError):
                async with asyncio.timeout(FLUSH_S):
                    await telemetry.flush(bus)
                    await transfers.flush(bus)
        telemetry.shutdown()
        transfers.shutdown()
        await bus.close()
        await journal.settled()
        journal.close()


def main() -> int:
    """Run GMS."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
