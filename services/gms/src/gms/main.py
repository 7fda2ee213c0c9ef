"""Wires the GPU memory service of one node: devices, the two sockets, the orders from NATS."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import random
import socket
import stat
import sys
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from gms.adapters.admission import LeasePolicy
from gms.adapters.backends import find_backend
from gms.adapters.claim_files import ClaimFiles
from gms.adapters.device_memory import DeviceSockets, claimed_devices
from gms.adapters.device_processes import DeviceProcesses
from gms.adapters.grpc_api import GrpcServer
from gms.adapters.kubelet_plugin import (
    ClaimPlugin,
    DevicePlugin,
    KubeletPlugin,
    plugin_folder,
)
from gms.adapters.lease_router import Intake, LeaseRouter
from gms.adapters.lease_socket import LeaseServer
from gms.adapters.pod_memory import PodMemories
from gms.adapters.simulated import PRODUCT, SimulatedDevice, allow_many_descriptors
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.claims import DEVICE_DIR, DRIVER, ClaimableDevice
from gms.domain.tasks import LOAD_THREADS, SAVE_THREADS, Threads, TransferOptions
from gms.handlers.claims import Claims, patiently
from gms.handlers.control import GmsControl
from gms.handlers.memory_server import MemoryServer
from gms.handlers.orders import GmsOrders
from gms.handlers.sessions import LeaseSessions
from gms.handlers.slices import publish_slices
from gms.handlers.split import SplitControl
from gms.handlers.transfers import GmsTransfers
from gms.ports import ClusterApi, Control, Device, DeviceInfo, Memory
from snapshot_shared import pod_logs, subjects
from snapshot_shared.bus import Bus, Handler
from snapshot_shared.codec import encode_json
from snapshot_shared.courier import Courier
from snapshot_shared.errors import BusUnavailable, InvalidInput, UnknownDevice
from snapshot_shared.faults import FaultPlan
from snapshot_shared.frames import MAX_EVENTS, StatusRequest
from snapshot_shared.http import http_ports
from snapshot_shared.ids import check_node
from snapshot_shared.journal import Journal
from snapshot_shared.metrics import Metrics
from snapshot_shared.order_book import OrderBook
from snapshot_shared.orders import PodRef
from snapshot_shared.permissions import User
from snapshot_shared.runner import Runner
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import NodeSettings, load
from snapshot_shared.stripes import parse_stripes
from snapshot_shared.tasks import end_all, in_thread
from snapshot_shared.telemetry import Telemetry, log_to_stderr

log = logging.getLogger(__name__)

SERVICE = "snap-gms"
TRANSFER_SERVICE = "snap-transfer"
FLUSH_S = 2.0
"""How long the last spans may hold up the end, in seconds."""


class GmsSettings(NodeSettings, frozen=True, kw_only=True):
    """What GMS needs to know.

    `world` says where the memory is that orders are about: here, or in the memory servers of the
    pods of this node. Without `nats_url` there are no orders: so is the memory server of a pod.
    `gms_device` says what kind of devices it serves: every GPU that CUDA shows; `devices`
    simulated ones of `device_bytes` each, in huge pages of the host with `device_huge_pages`; or
    those that a pod has claimed of such a GMS, which are in `device_dir`. With `kubelet_plugin`
    the pods of a node can have its simulated devices: `dra` by resource claims, `device-plugin` by
    limits of nvidia.com/gpu, `auto` by claims where the cluster has them.
    With `fabric_handles` memory of a GPU can be exported as a fabric handle, too, where granted.
    A save has `save_threads` and a load `load_threads` for each device.
    With `process_per_device` a process of its own serves each device, so that a crash loses the
    memory of one alone.
    Workers of other users reach the lease socket when they are of `lease_group` (a gid), and no
    other socket.
    With `encrypt_memory` what is saved is encrypted by the keys of artifacts. What is encrypted is
    decrypted in any case.
    """

    world: Literal["standalone", "kubernetes"] = "standalone"
    gms_device: Literal["simulated", "claimed", "cuda"] = "simulated"
    devices: Annotated[int, Meta(ge=0, le=64)] = 2
    device_bytes: Annotated[int, Meta(ge=2**21, le=2**50)] = 4 * 2**30
    device_huge_pages: bool = False
    # An attribute of a device in a cluster has at most 64 characters.
    device_product: Annotated[str, Meta(min_length=1, max_length=64)] = PRODUCT
    device_dir: Path = Path(DEVICE_DIR)
    kubelet_plugin: Literal["off", "auto", "dra", "device-plugin"] = "off"
    kubelet_dir: Path = Path("/var/lib/kubelet")
    pod_logs_dir: Path = pod_logs.USUAL
    cdi_dir: Path = Path("/var/run/cdi")
    kubeconfig: Path | None = None
    process_per_device: bool = False
    save_threads: Threads = SAVE_THREADS
    load_threads: Threads = LOAD_THREADS
    fabric_handles: bool = False
    lease_group: Annotated[int, Meta(ge=0, le=2**31 - 1)] | None = None
    encrypt_memory: bool = False


async def serve(stop: asyncio.Event) -> None:
    """Run until `stop` is set. Workers are served from the start, NATS when it answers."""
    settings, options, metrics = await _begun()
    devices = _open_devices(settings)
    _make_socket_folder(settings)
    if settings.process_per_device:
        for device in devices:
            device.close()
        infos = [device.info for device in devices]
        await _serve_by_processes(stop, settings, infos, options, metrics)
    else:
        await _serve_devices(stop, settings, devices, options, metrics)


async def serve_device(stop: asyncio.Event, index: int) -> None:
    """Run as the process of one device, which another process of GMS has started."""
    settings, options, metrics = await _begun()
    own = _open_devices(settings, only=index)
    if not own:
        raise UnknownDevice(f"there is no device {index} any more", index=index)
    _make_socket_folder(settings)
    channel = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    await _serve_devices(stop, settings, own, options, metrics, channel)


async def _begun() -> tuple[GmsSettings, TransferOptions, Metrics]:
    settings = load(GmsSettings)
    log_to_stderr(SERVICE, settings.node, settings.log_level)
    check_node(settings.node)
    find_backend(settings.transfer_backend, storage=settings.object_storage)
    if settings.process_per_device and settings.kubelet_plugin != "off":
        raise InvalidInput(
            "SNAPBACK_PROCESS_PER_DEVICE and SNAPBACK_KUBELET_PLUGIN exclude each other: the "
            "devices of the plugin are in the memory of one process",
            next_step="leave one of them out",
        )
    options = await in_thread(transfer_options, settings)
    allow_many_descriptors()
    metrics = Metrics(
        SERVICE,
        settings.node,
        VERSION,
        scraped=settings.http_address is not None,
        otlp_endpoint=settings.otlp_endpoint,
    )
    return settings, options, metrics


async def _serve_devices(
    stop: asyncio.Event,
    settings: GmsSettings,
    devices: Sequence[Device],
    options: TransferOptions,
    metrics: Metrics,
    channel: socket.socket | None = None,
) -> None:
    """Serve devices in this process; clients come by `channel` as well, until it is closed."""
    gms = MemoryServer(
        node=settings.node, incarnation=str(uuid.uuid4()), devices=devices, metrics=metrics
    )
    telemetry = _telemetry(settings, SERVICE, metrics)
    control = GmsControl(gms)
    # Transfers of orders are children of the process that has the channel's other end.
    parents = (os.getppid(),) if channel else ()
    policy = LeasePolicy(group=settings.lease_group, parents=parents)
    lease = LeaseServer(settings.socket_dir, LeaseSessions(gms, telemetry), policy, metrics)
    intake = Intake(channel, lease.adopt, stop.set) if channel else None
    processes = _processes(settings, [device.info for device in devices])
    transfers = GmsTransfers(
        gms,
        processes,
        socket_dir=settings.socket_dir,
        root=settings.artifact_root,
        options=options,
    )
    grpc = GrpcServer(settings.socket_dir, control, transfers, telemetry)
    lease.start()
    try:
        await grpc.start()
        if intake is not None:
            intake.start()
        log.info("GMS serves %d devices", len(devices))
        async with processes, _kubelet_plugin(stop, settings, devices):
            await _serve_orders(stop, settings, options, processes, control, telemetry, metrics)
    finally:
        if intake is not None:
            intake.close()
        await grpc.close()
        await lease.close()
        await gms.drained()
        for device in devices:
            device.close()


async def _serve_by_processes(
    stop: asyncio.Event,
    settings: GmsSettings,
    infos: Sequence[DeviceInfo],
    options: TransferOptions,
    metrics: Metrics,
) -> None:
    """Serve each device by a process of its own."""
    telemetry = _telemetry(settings, SERVICE, metrics)
    processes = _processes(settings, infos)
    devices = DeviceProcesses(infos, settings.socket_dir)
    control = SplitControl(settings.node, str(uuid.uuid4()), devices)
    policy = LeasePolicy(group=settings.lease_group)
    indices = {info.uuid: info.index for info in infos}
    lease = LeaseRouter(settings.socket_dir, indices, devices.hand_over, policy, metrics)
    grpc = GrpcServer(settings.socket_dir, control, devices, telemetry)
    # First, for it says whether another service has the folder.
    lease.start()
    try:
        async with devices, control.following(), processes:
            try:
                await grpc.start()
                log.info("GMS serves %d devices by a process each", len(infos))
                await _serve_orders(stop, settings, options, processes, control, telemetry, metrics)
            finally:
                await grpc.close()
    finally:
        await lease.close()


def _processes(settings: GmsSettings, infos: Sequence[DeviceInfo]) -> TransferProcesses:
    # The bytes of a memory server in a pod are moved by processes of its node.
    return TransferProcesses(
        spares=len(infos) if settings.nats_url else 0,
        gpus=[info.uuid for info in infos if info.kind == "cuda"],
    )


def transfer_options(settings: GmsSettings) -> TransferOptions:
    """Return how bytes are moved. InvalidInput when the keys are not as they should be."""
    has_keys = settings.artifact_keys or settings.kms_command
    if has_keys or settings.encrypt_memory or settings.require_signature:
        # Few have keys, and all would wait for it.
        from snapshot_shared.keys import ArtifactKeys  # noqa: PLC0415

        keys = ArtifactKeys(
            settings.artifact_keys,
            settings.kms_command,
            require_signature=settings.require_signature,
        )
        if settings.encrypt_memory:
            keys.require_encryption("SNAPBACK_ENCRYPT_MEMORY")
    return TransferOptions(
        backend=settings.transfer_backend,
        object_storage=settings.object_storage,
        stripe_roots=parse_stripes(settings.stripe_roots, settings.artifact_root),
        save_threads=settings.save_threads,
        load_threads=settings.load_threads,
        artifact_keys=str(settings.artifact_keys or ""),
        kms_command=settings.kms_command,
        encrypt=settings.encrypt_memory,
        require_signature=settings.require_signature,
    )


def _open_devices(settings: GmsSettings, only: int | None = None) -> Sequence[Device]:
    """Open all devices, or only the one with this index."""
    if settings.gms_device == "simulated":
        indices = range(settings.devices)
        return [_simulated(settings, index) for index in indices if only in (None, index)]
    found = _opened(settings)
    if only is None:
        return found
    for device in found:
        if device.info.index != only:
            device.close()
    return [device for device in found if device.info.index == only]


def _opened(settings: GmsSettings) -> Sequence[Device]:
    if settings.gms_device == "claimed":
        return claimed_devices(settings.device_dir)
    # Only here: a node without a GPU needs nothing of it.
    from gms.adapters.cuda import open_devices  # noqa: PLC0415

    return open_devices(fabric_handles=settings.fabric_handles)


def _simulated(settings: GmsSettings, index: int) -> SimulatedDevice:
    return SimulatedDevice(
        node=settings.node,
        index=index,
        capacity=settings.device_bytes,
        huge_pages=settings.device_huge_pages,
        product=settings.device_product,
        is_shared=settings.kubelet_plugin != "off",
    )


@contextlib.asynccontextmanager
async def _kubelet_plugin(
    stop: asyncio.Event, settings: GmsSettings, devices: Sequence[Device]
) -> AsyncIterator[None]:
    """Have pods get simulated devices for the length of the block; its failure ends the service."""
    if settings.kubelet_plugin == "off":
        yield
        return
    served = [device for device in devices if isinstance(device, SimulatedDevice)]
    if len(served) < len(devices):
        raise InvalidInput(
            f"SNAPBACK_KUBELET_PLUGIN={settings.kubelet_plugin!r} needs simulated devices",
            next_step="leave it out, or set SNAPBACK_GMS_DEVICE=simulated",
        )
    serving = asyncio.create_task(_serve_pods(settings, served), name="kubelet-plugin")
    serving.add_done_callback(lambda _: stop.set())
    try:
        yield
    finally:
        is_failed = serving.done()
        await end_all(serving)
        if is_failed:
            serving.result()


async def _serve_pods(settings: GmsSettings, devices: Sequence[SimulatedDevice]) -> None:
    infos = [device.info for device in devices]
    claimable = [
        ClaimableDevice(
            index=info.index, uuid=info.uuid, product=info.product, capacity=info.capacity
        )
        for info in infos
    ]
    sockets = DeviceSockets({device.info.uuid: device for device in devices})
    try:
        if settings.kubelet_plugin != "device-plugin":
            # Takes most of a second and 36 MiB, and is for simulated devices alone.
            from gms.adapters.cluster_api import cluster_api  # noqa: PLC0415

            async with cluster_api(settings.kubeconfig) as api:
                if settings.kubelet_plugin == "dra" or await patiently(api.has_claims):
                    await _serve_claims(settings, api, sockets, claimable)
        await _serve_device_plugin(settings, sockets, claimable)
    finally:
        await sockets.aclose()


async def _serve_claims(
    settings: GmsSettings,
    api: ClusterApi,
    sockets: DeviceSockets,
    devices: Sequence[ClaimableDevice],
) -> None:
    files = ClaimFiles(plugin_folder(settings.kubelet_dir, DRIVER), settings.cdi_dir, devices)
    claims = Claims(api, files, sockets, settings.node, devices)
    await claims.restore()
    async with KubeletPlugin(settings.kubelet_dir, ClaimPlugin(claims)):
        await publish_slices(api, settings.node, devices, jitter=random.random)


async def _serve_device_plugin(
    settings: GmsSettings, sockets: DeviceSockets, devices: Sequence[ClaimableDevice]
) -> None:
    folder = plugin_folder(settings.kubelet_dir, DRIVER) / "devices"
    for device in devices:
        await sockets.serve(folder / device.uuid, device)
    async with KubeletPlugin(settings.kubelet_dir, DevicePlugin(devices, folder)):
        await asyncio.Event().wait()


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
    options: TransferOptions,
    processes: TransferProcesses,
    control: Control,
    telemetry: Telemetry,
    metrics: Metrics,
) -> None:
    """Carry out orders until `stop` is set; without NATS there are none."""
    if not settings.nats_url:
        await stop.wait()
        return
    clocks = system_clocks()
    node = check_node(settings.node)
    transfers = _telemetry(settings, TRANSFER_SERVICE, metrics)
    # In a thread: workers are served already, and a disk may take its time to answer.
    journal = await in_thread(_open_folders, settings, clocks.wall, metrics)
    bus = Bus(
        settings.nats_url,
        SERVICE,
        credentials=settings.nats_credentials,
        ca=settings.nats_ca,
        inbox=User("gms", node).inbox,
        metrics=metrics,
    )
    book = OrderBook(node=node, service="gms", journal=journal, clocks=clocks, metrics=metrics)

    async def own(_pod: PodRef | None) -> Memory:
        return Memory(control, settings.socket_dir)

    in_pods = PodMemories(settings.kubelet_dir, settings.pod_logs_dir, processes)
    orders = GmsOrders(
        in_pods.find if settings.world == "kubernetes" else own,
        processes,
        transfers,
        book,
        root=settings.artifact_root,
        options=options,
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
            http_ports(settings, bus.not_ready, metrics.routes()),
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


def main(arguments: Sequence[str] = ()) -> int:
    """Run GMS; with `--device <index>` the process of that device, as GMS starts it itself."""
    match arguments:
        case []:
            return run(serve)
        case ["--device", index] if index.isdecimal() and stat.S_ISSOCK(os.fstat(0).st_mode):
            return run(functools.partial(serve_device, index=int(index)))
    sys.stderr.write("gms takes no arguments: set SNAPBACK_ variables\n")
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
