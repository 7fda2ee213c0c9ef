"""The streams, buckets and durables that NATS holds for us: made, compared and measured."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import nats.errors
import nats.js.errors
from nats.js.api import (
    ConsumerInfo,
    DiscardPolicy,
    KeyValueConfig,
    RetentionPolicy,
    StorageType,
    StreamConfig,
)

from snapshot_shared import subjects
from snapshot_shared.bus.connection import REQUEST_S, Connection, translated, unavailable
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.tasks import any_set

log = logging.getLogger(__name__)

ENSURE_EVERY_S = 30.0
ENSURE_AGAIN_S = 1.0
PRESENCE_TTL_S = 30.0
DAY_S = 86400.0
DEDUPLICATE_S = 120.0
CONSUMERS_A_PAGE = 256

STREAMS: tuple[StreamConfig, ...] = (
    StreamConfig(
        name=subjects.ORDERS,
        description="What nodes are to do, one message an order until it is settled",
        subjects=["snap.order.*.*.*"],
        retention=RetentionPolicy.LIMITS,
        storage=StorageType.FILE,
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=1,
        max_msgs=100_000,
        max_bytes=256 * 1024 * 1024,
        max_msg_size=256 * 1024,
        max_consumers=10_000,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.REPORTS,
        description="What became of orders, for 14 days",
        subjects=["snap.report.*.*.*"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=14 * DAY_S,
        max_bytes=512 * 1024 * 1024,
        max_msg_size=256 * 1024,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.PROGRESS,
        description="How far the running step of each order is, the last value alone",
        subjects=["snap.progress.*.*"],
        storage=StorageType.MEMORY,
        discard=DiscardPolicy.OLD,
        max_msgs_per_subject=1,
        max_age=DAY_S,
        max_bytes=16 * 1024 * 1024,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.SPANS,
        description="Finished spans of traces, for 2 days",
        subjects=["snap.span.*.*"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=2 * DAY_S,
        max_bytes=64 * 1024 * 1024,
        allow_direct=True,
    ),
    StreamConfig(
        name=subjects.DEAD,
        description="Messages that no service could take as an order or a report, for 30 days",
        subjects=["snap.dead.*"],
        storage=StorageType.FILE,
        discard=DiscardPolicy.OLD,
        max_age=30 * DAY_S,
        max_bytes=64 * 1024 * 1024,
        allow_direct=True,
    ),
)

BUCKETS: tuple[KeyValueConfig, ...] = (
    KeyValueConfig(
        bucket=subjects.NODES_BUCKET,
        description="What each node says of itself; a key is gone 30 s after its node fell silent",
        history=1,
        ttl=PRESENCE_TTL_S,
        direct=True,
    ),
    KeyValueConfig(
        bucket=subjects.OBJECTS_BUCKET,
        description="Identity and status of every object, for people; no program reads it",
        history=1,
        direct=True,
    ),
    KeyValueConfig(
        bucket=subjects.SCHEMAS_BUCKET,
        description="The JSON Schema of every message and object",
        history=1,
        direct=True,
    ),
)


def stream_of(bucket: KeyValueConfig) -> StreamConfig:
    """Describe the stream behind a bucket.

    As nats-py does, but without rollups: with one, a user who may write one key could delete
    every other.
    """
    return StreamConfig(
        name=subjects.stream_of_bucket(bucket.bucket),
        description=bucket.description,
        subjects=[subjects.bucket_key(bucket.bucket, ">")],
        discard=DiscardPolicy.NEW,
        max_msgs_per_subject=bucket.history,
        max_age=bucket.ttl,
        duplicate_window=min(bucket.ttl or DEDUPLICATE_S, DEDUPLICATE_S),
        deny_delete=True,
        allow_rollup_hdrs=False,
        allow_direct=bucket.direct,
        allow_msg_ttl=True,
    )


class StreamState(NamedTuple):
    """A stream as it is. `differs` names the settings that are not as the product wants them.

    `fill` is the share of its room that is taken, from 0 to 1; `durables` gives filters by name.
    `paused` are the durables that deliver nothing until an hour that people have set.
    """

    name: str
    exists: bool
    differs: tuple[str, ...] = ()
    messages: int = 0
    bytes: int = 0
    fill: float = 0.0
    durables: Mapping[str, str] = MappingProxyType({})
    paused: frozenset[str] = frozenset()


class Assets(Connection):
    """A connection that keeps what its streams and buckets need in existence."""

    async def ensure_assets(self) -> bool:
        """Create what is missing of streams and buckets; change what differs. Idempotent.

        Return whether any was missing. BusUnavailable when JetStream does not answer, as while its
        servers choose a leader.
        """
        stream = self.client.jetstream(timeout=REQUEST_S)
        was_missing = False
        for wanted in (*STREAMS, *map(stream_of, BUCKETS)):
            config = wanted.evolve(num_replicas=self._replicas)
            try:
                found = (await stream.stream_info(config.name or "")).config
            except nats.js.errors.NotFoundError:
                await translated(stream.add_stream(config), f"create stream {config.name}")
                was_missing = True
                continue
            except (nats.errors.Error, nats.js.errors.Error) as error:
                raise unavailable(error, f"look at stream {config.name}") from error
            if _differing(config, found):
                await translated(stream.update_stream(config), f"update stream {config.name}")
        return was_missing

    async def examine(self) -> list[StreamState]:
        """Look at every stream, and at those of buckets, without changing any. BusUnavailable."""
        manager = self.client.jetstream(timeout=REQUEST_S)
        found = []
        for wanted in (*STREAMS, *map(stream_of, BUCKETS)):
            name = wanted.name or ""
            try:
                info = await manager.stream_info(name)
            except nats.js.errors.NotFoundError:
                found.append(StreamState(name, exists=False))
                continue
            except (nats.errors.Error, nats.js.errors.Error) as error:
                raise unavailable(error, f"look at stream {name}") from error
            state = info.state
            consumers = await self._consumers(name, state.consumer_count)
            # How many servers keep it is a setting of the operator.
            differs = tuple(f for f in _differing(wanted, info.config) if f != "num_replicas")
            found.append(
                StreamState(
                    name,
                    exists=True,
                    differs=differs,
                    messages=state.messages,
                    bytes=state.bytes,
                    fill=fill_of(state.messages, state.bytes, info.config),
                    durables={each.name: each.config.filter_subject or "" for each in consumers},
                    paused=frozenset(each.name for each in consumers if each.paused),
                )
            )
        return found

    async def paused(self, stream: str) -> frozenset[str]:
        """Return the durables of a stream that are paused until an hour that people have set.

        BusUnavailable.
        """
        manager = self.client.jetstream(timeout=REQUEST_S)
        info = await translated(manager.stream_info(stream), f"look at stream {stream}")
        found = await self._consumers(stream, info.state.consumer_count)
        return frozenset(each.name for each in found if each.paused)

    async def _consumers(self, stream: str, count: int) -> list[ConsumerInfo]:
        manager = self.client.jetstream(timeout=REQUEST_S)
        found: list[ConsumerInfo] = []
        for offset in range(0, count, CONSUMERS_A_PAGE):
            found += await translated(manager.consumers_info(stream, offset), f"list {stream}")
        return found

    async def connect_and_ensure(self) -> None:
        """Wait until NATS answers and streams and buckets are there, however long that takes."""
        await self.connect()
        again = self.reconnections()
        while True:
            try:
                await self.ensure_assets()
                return
            except BusUnavailable as error:
                log.warning("cannot ensure streams and buckets: %s", error)
                await self.pause(again)

    async def keep_assets(self) -> None:
        """Ensure the assets now, then every 30 s, until it is cancelled.

        Sooner after a reconnection, and when a consumer of this bus misses its stream. What failed
        is tried again soon: a cluster that lost its store still chooses a leader then.
        """
        again = self.reconnections()
        while True:
            rest_s = ENSURE_EVERY_S
            self._misses_stream.clear()
            try:
                if await self.ensure_assets():
                    self._begin_again()
            except BusUnavailable as error:
                log.warning("cannot ensure streams and buckets: %s", error)
                rest_s = ENSURE_AGAIN_S
            await any_set(rest_s, again, self._misses_stream)
            again.clear()


def fill_of(messages: int, size: int, limits: StreamConfig) -> float:
    """Return the share of a stream's room that is taken, by messages or bytes, from 0 to 1."""
    taken = ((messages, limits.max_msgs), (size, limits.max_bytes))
    return max((used / most for used, most in taken if most and most > 0), default=0.0)


def _differing(wanted: StreamConfig, found: StreamConfig) -> list[str]:
    fields = (
        "description",
        "subjects",
        "max_msgs_per_subject",
        "max_bytes",
        "max_age",
        "discard",
        "max_msgs",
        "num_replicas",
        "allow_direct",
        "allow_rollup_hdrs",
        "allow_msg_ttl",
    )
    return [
        field
        for field in fields
        if getattr(wanted, field) is not None and getattr(wanted, field) != getattr(found, field)
    ]
