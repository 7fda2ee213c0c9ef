"""The active operator, put together from its parts. What differs between the worlds is given."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import cache

import msgspec

from snapshot_api.manifests import message_schemas
from snapshot_operator.api.nodes import NodeApi
from snapshot_operator.api.objects import Api
from snapshot_operator.api.operations import Operations, Sweeping
from snapshot_operator.core.inventory import Policy
from snapshot_operator.core.retention import Limits
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.interpreter import Interpreter
from snapshot_operator.runtime.manager import Manager
from snapshot_operator.runtime.nats import ChangePublisher, NatsOrders
from snapshot_operator.runtime.presence import PresenceFollower
from snapshot_operator.runtime.reports import Reports
from snapshot_operator.runtime.spans import Spans
from snapshot_operator.runtime.sweep import Sweep
from snapshot_operator.runtime.upkeep import Retention, count_objects
from snapshot_operator.runtime.world import World
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.service import VERSION, until_stopped
from snapshot_shared.telemetry import Telemetry

log = logging.getLogger(__name__)

SERVICE = "snap-operator"
NODE = "operator"


class Environment(msgspec.Struct, frozen=True, kw_only=True):
    """What an operator is given besides its objects: clocks, randomness and ids among it.

    `jitter` returns a random number from 0 to 1, `new_id` an id that was never used. `is_mirrored`
    says whether the objects are copied into a bucket for people. `ahead_s` is how far the clock of
    this machine is ahead of that of `clocks`.
    """

    bus: Bus
    telemetry: Telemetry
    clocks: Clocks
    ahead_s: float = 0.0
    jitter: Callable[[], float]
    new_id: Callable[[], str]
    limits: Limits = Limits()
    policy: Policy = Policy()
    metrics: Metrics = OFF
    is_mirrored: bool = True


def steady(clocks: Clocks) -> Callable[[], float]:
    """Return a clock of seconds since the epoch that does not jump while this process lives.

    Deadlines are judged by it: a wall clock that is set does not end work that is under way.
    """
    offset = clocks.wall() - clocks.monotonic()
    return lambda: offset + clocks.monotonic()


async def serve(stop: asyncio.Event, cluster: Cluster, world: World, given: Environment) -> None:
    """Serve as the active operator until `stop` is set, which may be before all is read."""
    await until_stopped(stop, _serve(cluster, world, given))


async def _serve(cluster: Cluster, world: World, given: Environment) -> None:
    bus, metrics, clocks = given.bus, given.metrics, given.clocks
    now = steady(clocks)

    async def tidy() -> None:
        await world.tidy(cluster)
        await retention.run()

    await world.prepare()
    await cluster.sync()
    orders = NatsOrders(bus, given.telemetry)
    spans = Spans(given.telemetry, now, metrics)
    interpreter = Interpreter(
        cluster, orders, spans, metrics, world.changed, world.warned, world.shapes
    )
    manager = Manager(
        cluster, world.controllers, interpreter, now, given.jitter, metrics, world.namespaces
    )
    sweep = Sweep(cluster, orders, manager, interpreter.unpublished, now, metrics, world.warned)
    retention = Retention(cluster, given.limits, now, world.namespaces)
    changes = ChangePublisher(bus, given.new_id(), cluster if given.is_mirrored else None)
    cluster.subscribe(changes.watcher)
    answers = (
        Api(
            cluster, retention, clocks.wall, given.new_id, is_in_cluster=world.is_cluster
        ).endpoints()
        | Operations(
            cluster,
            orders,
            lambda: Sweeping(sweep.swept_at, sweep.fill),
            clocks.wall,
            given.ahead_s,
        ).endpoints()
        | NodeApi(cluster, given.policy).endpoints()
    )
    endpoints = {subjects.api(verb): handler for verb, handler in answers.items()}
    await bus.serve(SERVICE, VERSION, {"node": NODE}, endpoints)
    log.info("the operator serves")
    await until_stopped(
        asyncio.Event(),
        world.follow(),
        bus.keep_assets(),
        given.telemetry.publish_to(bus),
        changes.run(),
        changes.keep_mirror(),
        manager.run(),
        sweep.run(bus.reconnections(), tidy),
        count_objects(cluster, metrics),
        Reports(bus, cluster, manager, clocks.wall, metrics).run(),
        PresenceFollower(bus, cluster, clocks).run(),
        _publish_schemas(bus),
    )


@cache
def encoded_schemas() -> dict[str, bytes]:
    """Return the JSON Schema of every message, by its key in the bucket."""
    return {key: encode_json(schema) for key, schema in message_schemas().items()}


async def _publish_schemas(bus: Bus) -> None:
    """Put the JSON Schema of every message where people find it, then wait."""
    try:
        known = await bus.entries(subjects.SCHEMAS_BUCKET)
        for key, schema in encoded_schemas().items():
            if known.get(key) != schema:
                await bus.put(subjects.SCHEMAS_BUCKET, key, schema)
    except BusUnavailable as error:
        log.info("the schemas of the messages are not published: %s", error)
    await asyncio.Event().wait()
