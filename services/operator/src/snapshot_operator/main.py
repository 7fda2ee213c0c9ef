"""Runs the operator: settings, which world it is in, and the HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import sys
import uuid
from typing import Annotated, Literal

from msgspec import Meta

from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.inventory import Policy
from snapshot_operator.core.retention import DAY_S, Limits
from snapshot_operator.local import garbage
from snapshot_operator.local.controllers import CONTROLLERS, INDEXES
from snapshot_operator.local.lock import FileLock
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.world import World
from snapshot_operator.wiring import NODE, SERVICE, Environment
from snapshot_operator.wiring import serve as serve_active
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.http import http_port
from snapshot_shared.metrics import Metrics
from snapshot_shared.orders import Label
from snapshot_shared.permissions import User
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import Common, load
from snapshot_shared.telemetry import Telemetry, log_to_stderr


class OperatorSettings(Common, frozen=True, kw_only=True):
    """What an operator needs to know. `nats_replicas` is how many servers keep each stream.

    `world` says where its objects are: in a file below `state_dir`, or in the API server that
    `kubeconfig` names, else that of the cluster in which the operator is a pod. `namespace` is
    where the Lease of a cluster's operators is; `gms_image` is that of the memory servers in pods.
    `keep_*` bound what a namespace keeps of captured artifacts; unset, nothing is let go.
    `quarantine` says what is moved aside below an artifact root when no content knows it and it
    has not changed for `quarantine_days`: nothing (`off`), generations without a root manifest
    (`incomplete`), or everything (`all`).
    """

    world: Literal["standalone", "kubernetes"] = "standalone"
    kubeconfig: str | None = None
    namespace: Label = "snapback-system"
    gms_image: str = "snapback/gms:dev"
    nats_replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    keep_count: Annotated[int, Meta(ge=1)] | None = None
    keep_days: Annotated[float, Meta(gt=0)] | None = None
    keep_bytes: Annotated[int, Meta(ge=1)] | None = None
    quarantine: Literal["off", "incomplete", "all"] = "incomplete"
    quarantine_days: Annotated[float, Meta(gt=0)] = 7.0

    @property
    def limits(self) -> Limits:
        """What a namespace may keep."""
        return Limits(self.keep_count, self.keep_days, self.keep_bytes)

    @property
    def policy(self) -> Policy:
        """What happens to unknown directories."""
        return Policy(self.quarantine, self.quarantine_days * DAY_S)


async def serve(stop: asyncio.Event) -> None:
    """Run until `stop` is set."""
    settings = load(OperatorSettings)
    log_to_stderr(SERVICE, NODE, settings.log_level)
    metrics = Metrics(
        SERVICE,
        NODE,
        VERSION,
        scraped=settings.http_address is not None,
        otlp_endpoint=settings.otlp_endpoint,
    )
    telemetry = Telemetry(
        SERVICE, NODE, VERSION, otlp_endpoint=settings.otlp_endpoint, metrics=metrics
    )
    bus = Bus(
        settings.nats_url,
        SERVICE,
        credentials=settings.nats_credentials,
        replicas=settings.nats_replicas,
        inbox=User("operator").inbox,
        metrics=metrics,
    )
    environment = Environment(
        bus=bus,
        telemetry=telemetry,
        clocks=system_clocks(),
        jitter=random.random,
        new_id=lambda: str(uuid.uuid4()),
        limits=settings.limits,
        policy=settings.policy,
        metrics=metrics,
        is_mirrored=settings.world == "standalone",
    )
    active = _standalone if settings.world == "standalone" else _in_cluster
    try:
        async with (
            http_port(settings.http_address, bus.not_ready, metrics.routes()),
            metrics.running(),
        ):
            await until_stopped(stop, active(settings, environment))
    finally:
        with contextlib.suppress(BusUnavailable):
            await telemetry.flush(bus)
        telemetry.shutdown()
        await bus.close()


async def _standalone(settings: OperatorSettings, environment: Environment) -> None:
    """Wait for the lock of this host, and serve the objects of the file beside it."""
    clocks = environment.clocks
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    store = SqliteStore(
        settings.state_dir / "objects.sqlite", timestamp=lambda: timestamp(clocks.wall())
    )
    async with FileLock(settings.state_dir / "operator.lock").held() as lost:
        with contextlib.closing(store.open()):
            await environment.bus.connect_and_ensure()
            world = World(CONTROLLERS, garbage.collect)
            await serve_active(lost, Cluster(store, INDEXES), world, environment)


async def _in_cluster(settings: OperatorSettings, environment: Environment) -> None:
    """Wait for the Lease of the cluster, and serve the objects of its API server."""
    # Standalone mode does without the client of Kubernetes: 40 MiB and a quarter of a second.
    from snapshot_operator.kube import controllers
    from snapshot_operator.kube.client import KubeClient, load_configuration
    from snapshot_operator.kube.lease import KubeLease
    from snapshot_operator.kube.store import KubeStore

    identity = f"{socket.gethostname()}-{environment.new_id()}"
    place = (settings.namespace, "snapback-operator")
    async with KubeClient(
        await load_configuration(settings.kubeconfig), environment.metrics
    ) as client:
        store = KubeStore(client, environment.jitter, settings.gms_image)
        lease = KubeLease(client, place, identity, environment.clocks, environment.jitter)
        # Before the Lease: one that stands by is ready, or a rolling update would wait for it.
        await environment.bus.connect_and_ensure()
        async with lease.held() as lost:
            world = World(controllers.CONTROLLERS, follow=store.run)
            await serve_active(lost, Cluster(store, controllers.INDEXES), world, environment)


def main() -> int:
    """Run the operator."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
