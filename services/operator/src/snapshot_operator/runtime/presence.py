"""Makes the Nodes that the operator knows agree with the presence that agents announce."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping

from snapshot_api.facts import Node
from snapshot_operator.core.presence import absences, node_absent, node_from
from snapshot_operator.runtime.cluster import Cluster
from snapshot_shared import subjects
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json
from snapshot_shared.errors import (
    AlreadyExists,
    BusUnavailable,
    Conflict,
    InvalidMessage,
    NoSpace,
    NotFound,
    StoreBusy,
)
from snapshot_shared.ids import token
from snapshot_shared.orders import Presence

log = logging.getLogger(__name__)

EVERY_S = 30.0


class PresenceFollower:
    """Follows the bucket as it is written, and reads all of it every 30 s to see who is missing.

    Absence counts from the last time that a node was seen on a healthy bus, or from our start.
    """

    def __init__(self, bus: Bus, cluster: Cluster, clocks: Clocks) -> None:
        """Use a connected bus and the objects."""
        self._bus = bus
        self._cluster = cluster
        self._clocks = clocks
        self._last_seen: dict[str, float] = {}

    async def run(self) -> None:
        """Follow presence until it is cancelled."""
        again = self._bus.reconnections()
        async with self._bus.listening(f"$KV.{subjects.NODES_BUCKET}.>") as changes:
            while True:
                if again.is_set():
                    again.clear()
                    self._last_seen.clear()
                try:
                    await self._compare(await self._present())
                except BusUnavailable as error:
                    log.info("presence is unknown: %s", error)
                    self._last_seen.clear()
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(EVERY_S):
                        await self._follow(changes)

    async def _present(self) -> dict[str, Presence]:
        """Return the presence of every node; what does not decode is logged and left out."""
        found = {}
        for key, value in (await self._bus.entries(subjects.NODES_BUCKET)).items():
            try:
                presence = decode_json(value, Presence)
            except InvalidMessage as error:
                log.warning("presence of %s is ignored: %s", key, error)
                continue
            if token(presence.node) == key:
                found[presence.node] = presence
        return found

    async def _compare(self, present: Mapping[str, Presence]) -> None:
        monotonic = self._clocks.monotonic()
        for node in self._cluster.all("Node"):
            self._last_seen.setdefault(node.metadata.name, monotonic)
        self._last_seen.update(dict.fromkeys(present, monotonic))
        await fold_presence(
            self._cluster, present, self._last_seen, now=self._clocks.wall(), monotonic=monotonic
        )

    async def _follow(self, changes: asyncio.Queue[Delivery]) -> None:
        """Fold each presence as it is written, without reading the bucket."""
        while True:
            delivery = await changes.get()
            try:
                presence = decode_json(delivery.data, Presence)
            except InvalidMessage:
                continue  # A delete marker, or noise: the next full read judges it.
            if delivery.subject.rpartition(".")[2] != token(presence.node):
                continue
            self._last_seen[presence.node] = self._clocks.monotonic()
            await fold_one_presence(self._cluster, presence, self._clocks.wall())


async def fold_presence(
    cluster: Cluster,
    present: Mapping[str, Presence],
    last_seen: Mapping[str, float],
    *,
    now: float,
    monotonic: float,
) -> None:
    """Make the Node objects agree with who is there. `last_seen` is monotonic seconds by node."""
    found = [node for node in cluster.all("Node") if isinstance(node, Node)]
    for presence in present.values():
        await fold_one_presence(cluster, presence, now)
    for node, absent_s in absences(found, present, last_seen, monotonic):
        changed = node_absent(node, absent_s, now)
        if changed != node:
            await _write(cluster, changed, is_new=False)


async def fold_one_presence(cluster: Cluster, presence: Presence, now: float) -> None:
    """Make one Node object agree with what its agent announces; equal values make no write."""
    known = cluster.get("Node", None, presence.node)
    wanted = node_from(presence, known if isinstance(known, Node) else None, now)
    if wanted != known:
        await _write(cluster, wanted, is_new=known is None)


async def _write(cluster: Cluster, node: Node, *, is_new: bool) -> None:
    """Store a node; the next presence repeats what could not be written."""
    try:
        await (cluster.create(node) if is_new else cluster.update_status(node))
    except (Conflict, AlreadyExists) as error:
        log.info("node %s is read again: %s", node.metadata.name, error)
        with contextlib.suppress(StoreBusy):
            await cluster.refresh(node)
    except (NoSpace, NotFound, StoreBusy) as error:
        log.info("node %s is not written: %s", node.metadata.name, error)
