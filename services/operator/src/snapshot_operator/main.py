"""Runs the operator: settings, which world it is in, and the HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import socket
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from msgspec import Meta
from msgspec.structs import replace

from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.inventory import Policy
from snapshot_operator.core.retention import DAY_S, Limits
from snapshot_operator.local import garbage
from snapshot_operator.local.controllers import CONTROLLERS, INDEXES
from snapshot_operator.local.lock import FileLock
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.world import Readiness, World
from snapshot_operator.wiring import NODE, SERVICE, Environment, steady
from snapshot_operator.wiring import serve as serve_active
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable, Failure, StoreBusy
from snapshot_shared.http import http_ports
from snapshot_shared.metrics import Metrics
from snapshot_shared.orders import Label, ProfileName
from snapshot_shared.permissions import User
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import Common, load
from snapshot_shared.telemetry import Telemetry, log_to_stderr

log = logging.getLogger(__name__)
if TYPE_CHECKING:
    from snapshot_operator.kube.webhooks import Endpoint
    from snapshot_shared.kube_client import KubeClient


class OperatorSettings(Common, frozen=True, kw_only=True):
    """What an operator needs to know. `nats_replicas` is how many servers keep each stream.

    `world` says where its objects are: in a file below `state_dir`, or in the API server that
    `kubeconfig` names, else that of the cluster in which the operator is a pod. `namespace` is
    where the Lease of a cluster's operators is. `crds` says what a cluster's operator does with
    the CustomResourceDefinitions of our kinds: apply them unless they belong to another product
    (`apply`), even then (`adopt`), or leave them to others (`keep`). `namespace_selector` is a
    label selector of the namespaces whose objects it reconciles: all of them where it is empty.
    `gms_image` is that of the memory servers in pods; unless `allow_gms_snapshot`, checkpoints
    that ask for one fail. `agent_image` is that of the first process of containers into which a
    process is restored. `seccomp_profile` is the one that the agents of nodes have for workers of
    CRIU; empty if none has.
    `webhook_address` (host:port) is where admission is served in a cluster; unset, nowhere. API
    servers reach it at the Service `webhook_service`, or at `webhook_url` if they cannot. Its
    certificate is in `webhook_certificate_dir`, or is made by the operators.
    `keep_*` bound what a namespace keeps of captured artifacts; unset, nothing is let go.
    `quarantine` says what is moved aside below an artifact root when no content knows it and it
    has not changed for `quarantine_days`: nothing (`off`), generations without a root manifest
    (`incomplete`), or everything (`all`).
    """

    world: Literal["standalone", "kubernetes"] = "standalone"
    kubeconfig: str | None = None
    namespace: Label = "snapback-system"
    crds: Literal["apply", "adopt", "keep"] = "apply"
    namespace_selector: str = ""
    webhook_address: str | None = None
    webhook_service: Label = "snapback-webhook"
    webhook_url: str = ""
    webhook_certificate_dir: Path | None = None
    gms_image: str = "snapback/gms:dev"
    agent_image: str = "snapback/snapshot-agent:dev"
    seccomp_profile: ProfileName = ""
    allow_gms_snapshot: bool = True
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
        ca=settings.nats_ca,
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
    readiness = Readiness()
    active = _standalone if settings.world == "standalone" else _in_cluster
    try:
        async with (
            http_ports(settings, lambda: readiness.why or bus.not_ready(), metrics.routes()),
            metrics.running(),
        ):
            await until_stopped(stop, active(settings, environment, readiness))
    finally:
        with contextlib.suppress(BusUnavailable):
            await telemetry.flush(bus)
        telemetry.shutdown()
        await bus.close()


async def _standalone(
    settings: OperatorSettings, environment: Environment, _readiness: Readiness
) -> None:
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


async def _in_cluster(
    settings: OperatorSettings, environment: Environment, readiness: Readiness
) -> None:
    """Wait for the Lease of the cluster, and serve the objects of its API server."""
    # Standalone mode does without the client of Kubernetes: 40 MiB and a quarter of a second.
    from snapshot_shared.kube_client import KubeClient, load_configuration

    configuration = await load_configuration(settings.kubeconfig)
    async with KubeClient(configuration, environment.metrics) as client:
        environment = await _as_server(client, environment)
        # Before the Lease: every replica answers the API server, and has to before it is ready.
        async with _admission(settings, environment, client):
            await _in_turn(settings, environment, readiness, client)


async def _in_turn(
    settings: OperatorSettings, environment: Environment, readiness: Readiness, client: KubeClient
) -> None:
    """Wait for the Lease, and serve."""
    from snapshot_api.schema.definitions import definitions
    from snapshot_operator.kube import controllers
    from snapshot_operator.kube.definitions import Definitions
    from snapshot_operator.kube.events import EventRecorder, warn_of
    from snapshot_operator.kube.lease import KubeLease
    from snapshot_operator.kube.namespaces import SelectedNamespaces, selecting
    from snapshot_operator.kube.rbac import NAME
    from snapshot_operator.kube.shaping import JobShape
    from snapshot_operator.kube.store import KubeStore

    hostname, namespace = socket.gethostname(), settings.namespace
    clocks, jitter = environment.clocks, environment.jitter

    async def waits(failure: Failure | None) -> None:
        why = str(failure or "")
        if failure is not None and why != readiness.why:
            log.error("the operator waits: %s", why)
            await warn_of(client, namespace, hostname, failure, clocks.wall())
        readiness.why = why

    store = KubeStore(client, jitter)
    job = JobShape(settings.gms_image, settings.allow_gms_snapshot, settings.seccomp_profile)
    webhook = _endpoint(settings).client_config
    crds = Definitions(client, definitions(webhook=webhook), settings.crds, jitter, waits)
    identity = f"{hostname}-{environment.new_id()}"
    lease = KubeLease(client, (namespace, NAME), identity, clocks, jitter)
    # Before the Lease: an operator without it is ready, or a rolling update would wait for it.
    await environment.bus.connect_and_ensure()
    async with lease.held() as lost:
        readiness.why = "the definitions of the operator's kinds are not there yet"
        events = EventRecorder(client, clocks.wall)
        world = World(
            controllers.CONTROLLERS,
            prepare=crds.ensure,
            follow=lambda: until_stopped(asyncio.Event(), store.run(), events.run()),
            changed=events.changed,
            warned=events.warned,
            is_cluster=True,
            shapes={"Job": job},
        )
        if settings.namespace_selector:
            selected = SelectedNamespaces(client, settings.namespace_selector, jitter)
            world = selecting(world, selected)
        await serve_active(lost, Cluster(store, controllers.INDEXES), world, environment)


async def _as_server(client: KubeClient, environment: Environment) -> Environment:
    """Return the environment with the time of the API server, which stamps the objects.

    Deadlines count from these stamps, also if an operator with another clock began the work.
    """
    from snapshot_shared.kube_client import back_off

    clocks, failures = environment.clocks, 0
    ahead_s: float | None = None
    while ahead_s is None:
        try:
            ahead_s = await client.ahead(clocks.wall)
        except StoreBusy as error:
            log.warning("the operator waits for the API server: %s", error)
            failures += 1
            await back_off(failures, environment.jitter())
    if not ahead_s:
        return environment
    way = "ahead of" if ahead_s > 0 else "behind"
    log.warning(
        "the clock of this machine is %.0f s %s that of the API server, which counts; set it",
        abs(ahead_s),
        way,
    )
    # Steady: once the clock of the machine is set, the difference is no longer that of now.
    wall = steady(replace(clocks, wall=lambda: clocks.wall() - ahead_s))
    return replace(environment, clocks=replace(clocks, wall=wall), ahead_s=ahead_s)


def _endpoint(settings: OperatorSettings) -> Endpoint:
    """Return where the API server reaches the webhooks."""
    from snapshot_operator.kube.webhooks import Endpoint

    return Endpoint(settings.namespace, settings.webhook_service, url=settings.webhook_url)


@contextlib.asynccontextmanager
async def _admission(
    settings: OperatorSettings, environment: Environment, client: KubeClient
) -> AsyncIterator[None]:
    """Answer what the API server asks, where there is an address for it, while the block runs."""
    from snapshot_api.schema.definitions import converted
    from snapshot_operator.kube.admission import Admission, serving
    from snapshot_operator.kube.restoring import Images
    from snapshot_operator.kube.webhook_tls import Introduction, MountedCertificate

    if settings.webhook_address is None:
        yield
        return
    folder = settings.webhook_certificate_dir
    introduction = Introduction(
        client,
        _endpoint(settings),
        environment.clocks,
        environment.jitter,
        makes_certificate=folder is None,
        converted=converted(),
    )
    admission = Admission(
        client,
        environment.metrics,
        Images(settings.gms_image, settings.agent_image),
        allows_gms=settings.allow_gms_snapshot,
        selector=settings.namespace_selector,
        seccomp_profile=settings.seccomp_profile,
    )
    async with contextlib.AsyncExitStack() as stack:
        context = await stack.enter_async_context(introduction.kept())
        if folder is not None:
            context = await stack.enter_async_context(MountedCertificate(folder).kept())
        await stack.enter_async_context(
            serving(admission, introduction.knows, settings.webhook_address, context)
        )
        yield


def main() -> int:
    """Run the operator."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
