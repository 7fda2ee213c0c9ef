"""What is done from time to time: artifacts beyond the limits deleted, objects counted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from snapshot_api.kinds import KINDS, kind_of
from snapshot_operator.core.census import Census, census
from snapshot_operator.core.retention import Decision, Holdings, Limits, judged
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.world import ALL, Selection
from snapshot_shared import instruments
from snapshot_shared.errors import Conflict, NoSpace, NotFound, StoreBusy
from snapshot_shared.metrics import Metrics
from snapshot_shared.tasks import any_set

log = logging.getLogger(__name__)

COUNT_EVERY_S = 10.0


class Retention:
    """Deletes captured artifacts that the limits do not keep."""

    def __init__(
        self,
        cluster: Cluster,
        limits: Limits,
        now: Callable[[], float],
        namespaces: Selection = ALL,
    ) -> None:
        """Use the objects; without limits nothing is ever deleted, nor in other `namespaces`."""
        self._cluster = cluster
        self._namespaces = namespaces
        self.limits = limits
        self._now = now

    def judged(self) -> list[Decision]:
        """Judge every captured artifact: whether it goes now, and why, or why it stays."""
        return judged(Holdings.of(self._cluster.all), self.limits, self._now())

    async def run(self) -> None:
        """Delete what goes; what stands in the way is tried again with the next sweep.

        A deletion names the uid, and the object's own finalizer waits for its readers.
        """
        if self.limits.is_off:
            return
        for verdict in self.judged():
            if not verdict.goes or not self._namespaces.has(verdict.value.metadata.namespace or ""):
                continue
            value, meta = verdict.value, verdict.value.metadata
            name = f"{kind_of(value).name} {meta.namespace}/{meta.name}"
            log.warning("retention deletes %s: %s", name, verdict.why)
            try:
                await self._cluster.delete(value)
            except (Conflict, NotFound, NoSpace, StoreBusy) as error:
                log.info("retention waits for the next sweep: %s", error)
                return


async def count_objects(cluster: Cluster, metrics: Metrics) -> None:
    """Count what the store holds, where metrics are read: every 10 s."""
    last: Census | None = None
    metrics.observe(instruments.OBJECTS, lambda: last.objects if last else {})
    metrics.observe(instruments.NODES, lambda: last.nodes if last else {})
    metrics.observe(instruments.READERS, lambda: {(): last.readers} if last else {})
    metrics.observe(instruments.QUARANTINED, lambda: {(): last.quarantined} if last else {})
    while metrics.is_on:
        last = census(value for kind in KINDS for value in cluster.all(kind))
        await any_set(COUNT_EVERY_S)
    await asyncio.Event().wait()
