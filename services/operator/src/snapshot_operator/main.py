"""Runs the operator of standalone mode: settings, the lock, the store, the HTTP port."""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
import uuid
from typing import Annotated, Literal

from msgspec import Meta

from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.inventory import Policy
from snapshot_operator.core.retention import DAY_S, Limits
from snapshot_operator.local.controllers import INDEXES
from snapshot_operator.local.lock import FileLock
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.wiring import NODE, SERVICE, Environment
from snapshot_operator.wiring import serve as serve_active
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.http import http_port
from snapshot_shared.metrics import Metrics
from snapshot_shared.permissions import User
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import Common, load
from snapshot_shared.telemetry import Telemetry, log_to_stderr


class OperatorSettings(Common, frozen=True, kw_only=True):
    """What an operator needs to know. `nats_replicas` is how many servers keep each stream.

    `keep_*` bound what a namespace keeps of captured artifacts; unset, nothing is let go.
    `quarantine` says what is moved aside below an artifact root when no content knows it and it
    has not changed for `quarantine_days`: nothing (`off`), generations without a root manifest
    (`incomplete`), or everything (`all`).
    """

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
    clocks = system_clocks()
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
    settings.state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
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
        clocks=clocks,
        jitter=random.random,
        new_id=lambda: str(uuid.uuid4()),
        limits=settings.limits,
        policy=settings.policy,
        metrics=metrics,
    )
    store = SqliteStore(
        settings.state_dir / "objects.sqlite", timestamp=lambda: timestamp(clocks.wall())
    )
    cluster = Cluster(store, INDEXES)
    lock = FileLock(settings.state_dir / "operator.lock")
    try:
        async with (
            http_port(settings.http_address, bus.not_ready, metrics.routes()),
            metrics.running(),
        ):
            await until_stopped(stop, _active(lock, store, cluster, environment))
    finally:
        with contextlib.suppress(BusUnavailable):
            await telemetry.flush(bus)
        telemetry.shutdown()
        await bus.close()
        store.close()


async def _active(
    lock: FileLock, store: SqliteStore, cluster: Cluster, environment: Environment
) -> None:
    """Wait to be the active operator, and serve for as long as this one is."""
    async with lock.held() as lost:
        store.open()
        await environment.bus.connect_and_ensure()
        await serve_active(lost, cluster, environment)


def main() -> int:
    """Run the operator."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
