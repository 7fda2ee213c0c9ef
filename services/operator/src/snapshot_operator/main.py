"""Wires the operator of standalone mode: the object store, NATS, the controller."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import sys
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta

from snapshot_operator.adapters.live_view import LiveView
from snapshot_operator.adapters.nats_bus import Announcer, NatsNodes, NatsOrders
from snapshot_operator.adapters.sqlite import SqliteCluster
from snapshot_operator.controller import Controller, Interpreter, Key
from snapshot_operator.domain.conditions import timestamp
from snapshot_operator.domain.inventory import Policy
from snapshot_operator.domain.retention import DAY_S, Limits
from snapshot_operator.handlers import (
    Api,
    Retention,
    fold_one_presence,
    fold_presence,
    fold_report,
)
from snapshot_operator.handlers.operations import Operations, Sweeping
from snapshot_operator.ports import Cluster, Nodes
from snapshot_shared import instruments, subjects
from snapshot_shared.api import MAX_EVENT_BYTES, ObjectNews
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import BusUnavailable, InvalidMessage, InvalidName, NoSpace, StoreBusy
from snapshot_shared.http import http_port
from snapshot_shared.ids import NodeName, OrderId, token, verb_of
from snapshot_shared.manifests import message_schemas
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import Presence, Report
from snapshot_shared.permissions import User
from snapshot_shared.service import VERSION, run, system_clocks, until_stopped
from snapshot_shared.settings import Common, load
from snapshot_shared.telemetry import Telemetry, log_to_stderr, working_on

log = logging.getLogger(__name__)

SERVICE = "snap-operator"
NODE = "operator"
REPORTS_DURABLE = "operator"
REPORT_ACK_S = 5.0
"""A report is folded in milliseconds; one that an operator took with it comes again after this."""
PRESENCE_EVERY_S = 30.0


class OperatorSettings(Common, frozen=True, kw_only=True):
    """What an operator needs to know. `nats_replicas` is how many servers keep each stream.

    `keep_*` bound what a namespace keeps of captured artifacts; unset, nothing is let go.
    `quarantine` says what is moved aside below an artifact root when no content knows it and it
    has not changed for `quarantine_days`: nothing (`off`), generations without a root manifest
    (`incomplete`), or everything (`all`).

    With an HTTP address there is a page to look at: `page_hosts` are the host names, with commas
    between them, that it answers to beside localhost and addresses, `nats_context` is the context
    in the commands that it shows, and `page_file` is where its address is written.
    """

    nats_replicas: Annotated[int, Meta(ge=1, le=5)] = 1
    keep_count: Annotated[int, Meta(ge=1)] | None = None
    keep_days: Annotated[float, Meta(gt=0)] | None = None
    keep_bytes: Annotated[int, Meta(ge=1)] | None = None
    quarantine: Literal["off", "incomplete", "all"] = "incomplete"
    quarantine_days: Annotated[float, Meta(gt=0)] = 7.0
    page_hosts: str = ""
    page_file: Path | None = None
    nats_context: str = ""

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
    cluster = SqliteCluster(
        settings.state_dir / "objects.sqlite", timestamp=lambda: timestamp(clocks.wall())
    )
    bus = Bus(
        settings.nats_url,
        SERVICE,
        credentials=settings.nats_credentials,
        replicas=settings.nats_replicas,
        inbox=User("operator").inbox,
        metrics=metrics,
    )
    try:
        async with _http(settings, cluster, bus, clocks, metrics), metrics.running():
            await until_stopped(stop, _connected(bus))
            if not stop.is_set():
                await _serve(
                    stop, cluster, bus, telemetry, clocks, settings.limits, settings.policy, metrics
                )
    finally:
        with contextlib.suppress(BusUnavailable):
            await telemetry.flush(bus)
        telemetry.shutdown()
        await bus.close()
        cluster.close()


@contextlib.asynccontextmanager
async def _http(
    settings: OperatorSettings, cluster: Cluster, bus: Bus, clocks: Clocks, metrics: Metrics
) -> AsyncIterator[None]:
    """Serve health, metrics and the page for the length of the block, if there is an address."""
    if settings.http_address is None:
        yield
        return
    from snapshot_operator.adapters.page import Page  # noqa: PLC0415 - costs start-up time

    view = LiveView(cluster, bus, clocks, uuid.uuid4().hex[:12], settings.nats_context)
    page = Page(view, filter(None, settings.page_hosts.replace(" ", "").split(",")))
    async with http_port(
        settings.http_address, bus.not_ready, [*page.routes(), *metrics.routes()]
    ) as port:
        if settings.page_file is not None and port is not None:
            host = settings.http_address.rpartition(":")[0]
            settings.page_file.write_text(f"http://{host}:{port}/\n", "ascii")
        try:
            yield
        finally:
            page.close()


async def _connected(bus: Bus) -> None:
    """Wait until NATS answers and streams and buckets are there, however long that takes."""
    await bus.connect()
    again = bus.reconnections()
    while True:
        try:
            return await bus.ensure_assets()
        except BusUnavailable as error:
            log.warning("cannot ensure streams and buckets: %s", error)
            await bus.pause(again)


async def _serve(
    stop: asyncio.Event,
    cluster: SqliteCluster,
    bus: Bus,
    telemetry: Telemetry,
    clocks: Clocks,
    limits: Limits = Limits(),  # noqa: B008 - an immutable value
    policy: Policy = Policy(),  # noqa: B008 - an immutable value
    metrics: Metrics = OFF,
) -> None:
    source = str(uuid.uuid4())
    announcer = Announcer(bus, source)
    cluster.subscribe(announcer.listener)
    orders = NatsOrders(bus, telemetry)
    interpreter = Interpreter(cluster, orders, telemetry, clocks.wall, metrics)
    controller = Controller(cluster, orders, interpreter, clocks.wall, limits, metrics)
    operations = Operations(cluster, orders, lambda: Sweeping(controller.swept_at, controller.fill))
    api = Api(cluster, Retention(limits, controller.judged, controller.retain), policy)
    answers = api.endpoints() | operations.endpoints()
    endpoints = {subjects.api(verb): handler for verb, handler in answers.items()}
    await bus.serve(SERVICE, VERSION, {"node": NODE}, endpoints)
    log.info("the operator serves")
    await until_stopped(
        stop,
        bus.keep_assets(),
        telemetry.publish_to(bus),
        announcer.run(),
        controller.run(),
        controller.sweep(bus.reconnections()),
        controller.take_stock(),
        _follow_others(bus, controller, source),
        _take_reports(bus, cluster, interpreter, clocks, metrics),
        _follow_presence(bus, cluster, NatsNodes(bus), clocks),
        _publish_schemas(bus),
    )


async def _take_reports(
    bus: Bus, cluster: Cluster, interpreter: Interpreter, clocks: Clocks, metrics: Metrics
) -> None:
    """Fold reports in the order of the stream; ack each when its effect is in the store."""
    async for delivery in bus.consume(
        subjects.REPORTS, REPORTS_DURABLE, "snap.report.>", ack_wait_s=REPORT_ACK_S
    ):
        try:
            report = decode_json(delivery.data, Report)
            expected = subjects.report(NodeName(report.node), OrderId(report.order), report.kind)
            if delivery.subject != expected:
                raise InvalidMessage(f"it says {expected}, and came on {delivery.subject}")
            with (
                working_on(report.order, report.attempt),
                metrics.timed(
                    instruments.PROCESS_DURATION,
                    subjects.family(expected),
                    verb_of(OrderId(report.order)),
                ),
            ):
                if changed := await fold_report(cluster, report, clocks.wall()):
                    interpreter.trace(*changed)
        except (NoSpace, StoreBusy) as error:
            log.warning("report will come again: %s", error)
            continue
        except (InvalidMessage, InvalidName) as error:
            log.warning("report on %s is ignored: %s", delivery.subject, error)
        try:
            await delivery.ack()
        except BusUnavailable as error:
            log.info("report will come again: %s", error)


async def _follow_others(bus: Bus, controller: Controller, source: str) -> None:
    """Look at what other operators on this store change, as soon as they tell of it."""
    async with bus.listening(f"{subjects.EVENTS}.>") as changes:
        while True:
            delivery = await changes.get()
            try:
                event = decode_json(delivery.data, ObjectNews, limit=MAX_EVENT_BYTES)
            except InvalidMessage:
                continue
            if event.source != source:
                meta = event.object.metadata
                await controller.notice(Key(event.object.kind, meta.namespace, meta.name))


async def _follow_presence(bus: Bus, cluster: Cluster, nodes: Nodes, clocks: Clocks) -> None:
    """Follow the bucket as it is written, and read all of it every 30 s to see who is missing.

    Absence counts from the last time that a node was seen on a healthy bus, or from our start.
    """
    last_seen: dict[str, float] = {}
    again = bus.reconnections()
    async with bus.listening(f"$KV.{subjects.NODES_BUCKET}.>") as changes:
        while True:
            if again.is_set():
                again.clear()
                last_seen.clear()
            try:
                present = await nodes.present()
            except BusUnavailable as error:
                log.info("presence is unknown: %s", error)
                last_seen.clear()
            else:
                monotonic = clocks.monotonic()
                for node in await cluster.list("Node"):
                    last_seen.setdefault(node.metadata.name, monotonic)
                last_seen.update(dict.fromkeys(present, monotonic))
                await fold_presence(
                    cluster, present, last_seen, now=clocks.wall(), monotonic=monotonic
                )
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PRESENCE_EVERY_S):
                    await _fold_writes(changes, cluster, clocks, last_seen)


async def _fold_writes(
    changes: asyncio.Queue[Delivery],
    cluster: Cluster,
    clocks: Clocks,
    last_seen: dict[str, float],
) -> None:
    """Fold each presence as it is written, without reading the bucket; for ever."""
    while True:
        delivery = await changes.get()
        try:
            presence = decode_json(delivery.data, Presence)
        except InvalidMessage:
            continue  # A delete marker, or noise: the next full read judges it.
        if delivery.subject.rpartition(".")[2] != token(presence.node):
            continue
        last_seen[presence.node] = clocks.monotonic()
        await fold_one_presence(cluster, presence, clocks.wall())


async def _publish_schemas(bus: Bus) -> None:
    """Put the JSON Schema of every message where people find it, then wait for ever."""
    for key, schema in message_schemas().items():
        try:
            await bus.put(subjects.SCHEMAS_BUCKET, key, encode_json(schema))
        except BusUnavailable as error:
            log.info("schema %s is not published: %s", key, error)
    await asyncio.Event().wait()


def main() -> int:
    """Run the operator."""
    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
