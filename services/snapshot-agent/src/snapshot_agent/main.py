"""Wires the agent of one node, and runs it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import platform
import sys
from collections.abc import Mapping
from functools import cached_property, partial
from pathlib import Path
from typing import Literal

import msgspec

from snapshot_agent.adapters import confined, worker_logs
from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_agent.adapters.control_dir import ControlDirectories, FileLocks
from snapshot_agent.adapters.cooperative import Cooperative
from snapshot_agent.adapters.criu import Criu, PlainCriu
from snapshot_agent.adapters.criu_cuda import CriuCuda, PlainCriuCuda
from snapshot_agent.adapters.gms_grpc import GmsClient, PodGms
from snapshot_agent.adapters.guards import Guards
from snapshot_agent.adapters.kubelet import KubeletPods
from snapshot_agent.adapters.library import ArtifactLibrary
from snapshot_agent.adapters.node_gpus import NodeGpus
from snapshot_agent.adapters.operator import OperatorClient
from snapshot_agent.adapters.presence import PresencePublisher
from snapshot_agent.adapters.processes import LocalProcesses
from snapshot_agent.adapters.respawn import Respawn
from snapshot_agent.adapters.scratch import Scratch
from snapshot_agent.adapters.worker_logs import WorkerLogs
from snapshot_agent.domain.criu_seen import extensions
from snapshot_agent.domain.spec import NodeEnvironment
from snapshot_agent.handlers.agent import Agent, routes
from snapshot_agent.handlers.background import repeated
from snapshot_agent.handlers.inventory import Inventory, PodInventory
from snapshot_agent.ports import DriverState, Machine, ProcessDriver
from snapshot_shared import pod_logs, subjects
from snapshot_shared.artifact import Facts
from snapshot_shared.bus import Bus, Handler
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.courier import Courier
from snapshot_shared.errors import BusUnavailable, InvalidInput, SnapbackError, failure_of
from snapshot_shared.faults import FaultPlan
from snapshot_shared.http import http_ports
from snapshot_shared.ids import check_node
from snapshot_shared.journal import Journal
from snapshot_shared.keys import ArtifactKeys
from snapshot_shared.metrics import Metrics
from snapshot_shared.order_book import OrderBook
from snapshot_shared.orders import ArtifactRef, Driver, Presence, PresenceDevice, UnreadyDriver
from snapshot_shared.permissions import User
from snapshot_shared.runner import Runner
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import NodeSettings, load
from snapshot_shared.steps import AGENT_VERBS
from snapshot_shared.tasks import in_thread
from snapshot_shared.telemetry import Telemetry, log_to_stderr

log = logging.getLogger(__name__)

SERVICE = "snap-agent"
FLUSH_S = 2.0
"""How long the last spans may delay the end, in seconds."""

DRAIN_S = 5.0
"""How long orders that are undone may delay the end, in seconds. With all else it is less than the
10 s that container engines wait after SIGTERM; guards let go workers whose orders take longer."""

FINISH_S = 20.0
"""How long restores by CRIU may delay the end before they are undone, in seconds. With DRAIN_S that
is less than the `terminationGracePeriodSeconds` of the chart, 30 s."""


class AgentSettings(NodeSettings, frozen=True, kw_only=True):
    """The settings of an agent. It captures at most `slots` workers at a time.

    `world` says what starts the workers: the agent itself, by orders, or the kubelet of its node,
    whose folder is `kubelet_dir`, with the logs of pods in `pod_logs_dir`. `guard_starter` is the
    socket of what starts guards for it, and `helper` that of what dumps and restores processes;
    without it there are no drivers `criu` and `criu+cuda`. `init` is the program that waits for a
    restore by them in workers that the agent starts itself. Those see the GPUs that they are given
    and no others where `gms_device` is `cuda`, as it is for the GMS of the node. The log of a
    worker takes `worker_log_bytes` of the disk, after which its beginning goes; 0 is without limit.

    CRIU works in `scratch_dir`, a folder that the helper has as well, where artifacts are encrypted
    or on NFS; `scratch=always` has it work there in any case.
    """

    world: Literal["standalone", "kubernetes"] = "standalone"
    kubelet_dir: Path = Path("/var/lib/kubelet")
    pod_logs_dir: Path = pod_logs.USUAL
    workdir: Path | None = None
    slots: int = 2
    worker_log_bytes: int = 64 * 2**20
    guard_starter: Path | None = None
    helper: Path | None = None
    init: Path = Path("/opt/snapback/snapback-init")
    gms_device: Literal["simulated", "claimed", "cuda"] = "simulated"
    scratch_dir: Path | None = None
    scratch: Literal["auto", "always"] = "auto"


class _Node:
    """The parts of one agent, built in the order in which they need each other."""

    programs = DriverState()
    """What process drivers said last of the programs that they use."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.name = check_node(settings.node)
        self.clocks = system_clocks()
        self.metrics = Metrics(
            SERVICE,
            settings.node,
            VERSION,
            scraped=settings.http_address is not None,
            otlp_endpoint=settings.otlp_endpoint,
        )
        self.telemetry = Telemetry(
            SERVICE,
            settings.node,
            VERSION,
            otlp_endpoint=settings.otlp_endpoint,
            metrics=self.metrics,
        )
        self.journal = Journal.open(settings.state_dir, wall=self.clocks.wall, metrics=self.metrics)
        self.bus = Bus(
            settings.nats_url,
            SERVICE,
            credentials=settings.nats_credentials,
            ca=settings.nats_ca,
            inbox=User("agent", self.name).inbox,
            metrics=self.metrics,
        )
        self.keys = ArtifactKeys(
            settings.artifact_keys,
            settings.kms_command,
            require_signature=settings.require_signature,
        )
        self.root = ArtifactRoot(
            settings.artifact_root,
            settings.object_storage,
            stripes=settings.stripes(),
            weights_in_objects=settings.transfer_backend == "object",
            signing=self.keys.signing,
        )
        self.operator = OperatorClient(self.bus, settings.node)
        self.launcher = LocalProcesses()
        self.control = ControlDirectories()
        self.drivers: dict[Driver, ProcessDriver] = {Cooperative.name: Cooperative()}
        kubelets = None
        self.gms = GmsClient(settings.socket_dir)
        self.node_gpus: NodeGpus | None = None
        if settings.world == "kubernetes":
            self.gms = PodGms(settings.socket_dir, settings.kubelet_dir)
            self.node_gpus = NodeGpus(self.gms, settings.kubelet_dir)
            kubelets = KubeletPods(
                self.launcher, settings.kubelet_dir, settings.pod_logs_dir, settings.state_dir
            )
        else:
            # A container ends with its first process, so in a cluster none can be replaced.
            self.drivers[Respawn.name] = Respawn(self.launcher, self.control, self.clocks.monotonic)
        if settings.helper is not None:
            self.drivers |= self._by_criu(settings.helper)
        self.faults = FaultPlan("agent", settings.node) if settings.sim else None
        self.book = OrderBook(
            node=self.name,
            service="agent",
            journal=self.journal,
            clocks=self.clocks,
            metrics=self.metrics,
        )
        self.agent = Agent(
            self._machine(),
            self.book,
            self._environment(),
            settings.state_dir,
            settings.slots,
            kubelets,
        )
        self.courier = Courier(
            self.book,
            self.bus,
            telemetry=self.telemetry,
            runner=Runner(self.journal, self.telemetry, self.faults, self.metrics),
            handlers=routes(self.agent),
        )
        self.inventory = Inventory(
            ArtifactLibrary(settings.artifact_root),
            self.operator,
            settings.node,
            self.clocks.wall,
        )
        pods = self.agent.pods
        self.pod_inventory = PodInventory(pods, self.operator) if pods else None
        self.worker_logs = WorkerLogs(settings.state_dir, settings.worker_log_bytes)
        self.may_offer = asyncio.Event()
        if self.pod_inventory is not None:
            self.may_offer = self.pod_inventory.is_known
        else:
            # In a cluster the kubelet ends the pods that have no object any more.
            self.may_offer.set()

    def _by_criu(self, helper: Path) -> dict[Driver, ProcessDriver]:
        """Return the drivers over the helper of the node."""
        monotonic, more = self.clocks.monotonic, (self._scratch(), self.telemetry.span)
        if self.node_gpus is None:
            plain = PlainCriu, PlainCriuCuda
            return {kind.name: kind(helper, monotonic, *more) for kind in plain}
        with_cuda = CriuCuda(helper, monotonic, self.node_gpus, *more)
        return {Criu.name: Criu(helper, monotonic, *more), with_cuda.name: with_cuda}

    def _scratch(self) -> Scratch | None:
        """Return the scratch folder, if the node has one. InvalidInput when it has to have one."""
        settings = self.settings
        always = settings.scratch == "always" or self.keys.encrypts
        if settings.scratch_dir is not None:
            return Scratch(settings.scratch_dir, settings.artifact_root, always=always)
        if always:
            raise InvalidInput(
                "SNAPBACK_SCRATCH_DIR is not set, and CRIU needs it where artifacts are encrypted "
                "or SNAPBACK_SCRATCH=always",
                next_step="set it, for the helper too, to a folder that both have, best in memory",
            )
        return None

    @cached_property
    def facts(self) -> Facts:
        """The facts of the node that stay as they are."""
        return Facts(
            arch=platform.machine(),
            kernel=platform.release(),
            python=platform.python_version(),
            cpu=extensions(Path("/proc/cpuinfo").read_text()),
        )

    def _machine(self) -> Machine:
        return Machine(
            launcher=self.launcher,
            control=self.control,
            drivers=self.drivers,
            gpu_memory=self.gms,
            guards=Guards(
                self.settings.state_dir / "guards",
                self.settings.run,
                node=self.settings.node,
                starter=self.settings.guard_starter,
            ),
            artifacts=self.root,
            keys=self.keys,
            operator=self.operator,
            locks=FileLocks(),
            clocks=self.clocks,
            facts=self.facts,
            metrics=self.metrics,
            pod_devices=self.node_gpus,
        )

    def _environment(self) -> NodeEnvironment:
        own = str(Path(sys.executable).parent)
        return NodeEnvironment(
            node=self.settings.node,
            run=self.settings.run,
            socket_dir=self.settings.socket_dir,
            workdir=self.settings.workdir or Path.cwd(),
            path=f"{own}:{os.environ.get('PATH', os.defpath)}",
            home=os.environ.get("HOME", "/"),
            init=self.settings.init,
            confined=(sys.executable, "-I", "-S", confined.__file__),
            cuda=self.settings.gms_device == "cuda",
        )

    async def presence(self, devices: list[PresenceDevice]) -> Presence:
        """Return the presence of the node with these devices."""
        states = {name: await each.state() for name, each in self.drivers.items()}
        # Those of all drivers are of one helper.
        self.programs = max(states.values(), key=lambda state: (state.criu, state.cuda_driver))
        return Presence(
            node=self.settings.node,
            boot_id=self.clocks.boot_id,
            version=VERSION,
            devices=devices,
            drivers=[name for name, state in states.items() if state.failure is None],
            criu=self.programs.criu,
            unready=[
                UnreadyDriver(driver=name, why=state.failure)
                for name, state in states.items()
                if state.failure
            ],
            verbs=list(AGENT_VERBS),
            seccomp_profile=max(state.seccomp_profile for state in states.values()),
            artifact_root=str(self.settings.artifact_root),
            free_bytes=await self.root.free_bytes(),
            slots=self.settings.slots,
            unknown=self.inventory.counts.unknown,
            quarantined=self.inventory.counts.quarantined,
            at=self.clocks.wall(),
        )

    async def status(self, data: bytes, _headers: Mapping[str, str]) -> bytes:
        """Answer a request for the status of the node, and with an `ArtifactRef` for its facts."""
        programs = {"criu": self.programs.criu, "cuda_driver": self.programs.cuda_driver}
        answer = {
            "node": self.settings.node,
            **self.agent.status(),
            "facts": msgspec.structs.replace(self.facts, **programs),
        }
        if data:
            try:
                ref = decode_json(data, ArtifactRef)
                answer["source"] = (await self.root.read_root(ref)).facts
            except (SnapbackError, OSError) as error:
                answer["failure"] = failure_of(error)
        return encode_json(answer)

    async def close(self) -> None:
        """Finish, hand on or undo the orders under way, and close everything; containers run on."""
        await self.book.drain(DRAIN_S, finish_s=FINISH_S)
        await self.agent.close()
        await self.control.close()
        self.launcher.close()
        await self.gms.close()
        if self.bus.is_connected:
            with contextlib.suppress(BusUnavailable, TimeoutError):
                await asyncio.wait_for(self.telemetry.flush(self.bus), FLUSH_S)
        self.telemetry.shutdown()
        await self.bus.close()
        await self.journal.settled()
        self.journal.close()


async def serve(stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    settings = load(AgentSettings)
    log_to_stderr(SERVICE, settings.node, settings.log_level)
    node = _Node(settings)
    try:
        async with (
            http_ports(settings, node.bus.not_ready, node.metrics.routes()),
            node.metrics.running(),
        ):
            # Before NATS, which may be away: workers may be frozen.
            await node.agent.recover()
            await until_stopped(stop, _connect(node))
            if not stop.is_set():
                log.info("the agent serves")
                await until_stopped(
                    stop,
                    node.courier.serve(),
                    node.telemetry.publish_to(node.bus),
                    _announcer(node, stop).run(),
                    node.inventory.run(stop),
                    *([node.pod_inventory.run(stop)] if node.pod_inventory else []),
                    repeated(
                        partial(in_thread, node.worker_logs.cut),
                        stop,
                        "logs of workers are cut",
                        worker_logs.LOOK_S,
                        (worker_logs.LOOK_S,),
                    ),
                )
    finally:
        await node.close()


def _announcer(node: _Node, stop: asyncio.Event) -> PresencePublisher:
    devices = node.node_gpus or node.gms
    return PresencePublisher(
        node.bus,
        node.name,
        devices,
        node.presence,
        stop,
        node.may_offer,
        doubt=node.pod_inventory.doubt if node.pod_inventory else lambda: None,
    )


async def _connect(node: _Node) -> None:
    """Connect to NATS, waiting without limit, and serve requests."""
    await node.bus.connect()
    questions: dict[str, Handler] = {subjects.rpc(node.name, "agent", "status"): node.status}
    if node.faults is not None:
        questions[subjects.rpc(node.name, "agent", "sim")] = node.faults.answer
    await node.bus.serve(SERVICE, VERSION, {"node": node.settings.node}, questions)


def main() -> int:
    """Run the agent."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
