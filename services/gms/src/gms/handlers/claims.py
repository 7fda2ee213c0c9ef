"""Prepares and unprepares claims when the kubelet asks, and finds again what was prepared.

Both may be asked for any number of times. Prepare comes again after a restart of the kubelet;
unprepare can come minutes after the pod object is gone, when another claim has the device
already: everything is kept by claim, and nothing by device.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar

from gms.domain.claims import (
    MAX_PREPARED,
    ClaimableDevice,
    ClaimRef,
    PreparedClaim,
    held_by_others,
    prepared_claim,
)
from gms.ports import ClaimStore, ClusterApi, MemorySockets
from snapshot_shared.errors import NotEligible, SnapbackError
from snapshot_shared.tasks import Changes, any_set, in_thread

log = logging.getLogger(__name__)

T = TypeVar("T")

PATIENCE_S = 30.0
"""How long a claim waits for the API server or for its devices, in seconds. The kubelet ends the
call after 45 s; an error instead of a wait costs a minute or more, until it tries again."""
FIRST_PAUSE_S = 0.25
MAX_PAUSE_S = 4.0


class Claims:
    """The claims that are prepared on this node."""

    def __init__(
        self,
        api: ClusterApi,
        store: ClaimStore,
        sockets: MemorySockets,
        pool: str,
        devices: Sequence[ClaimableDevice],
        *,
        patience_s: float = PATIENCE_S,
    ) -> None:
        """Prepare claims on the devices of a pool."""
        self._api = api
        self._store = store
        self._sockets = sockets
        self._pool = pool
        self._devices = devices
        self._patience_s = patience_s
        self._prepared: dict[str, PreparedClaim] = {}
        # One claim at a time is put in place or removed; what may wait long is outside of it.
        self._turn = asyncio.Lock()
        self._changes = Changes()

    async def restore(self) -> None:
        """Serve what an earlier run has prepared."""
        for claim in await in_thread(self._store.load):
            try:
                await self._serve(claim)
            except (SnapbackError, OSError) as error:
                # Also a device that is served no more: its pods cannot have it.
                log.warning("claim %s cannot be served again: %s", claim.uid, error)
            self._prepared[claim.uid] = claim
        log.info("%d claims were prepared already", len(self._prepared))

    async def prepare(self, ref: ClaimRef) -> PreparedClaim:
        """Return what a claim is given, once all of it is there."""
        claim = self._prepared.get(ref.uid) or await self._take(ref)
        async with self._turn:
            if self._prepared.get(ref.uid) is not claim:
                raise NotEligible(f"claim {ref.uid} was unprepared meanwhile")
            # After a failure it keeps its devices: the kubelet asks again, or unprepares it.
            await self._serve(claim)
            return claim

    async def unprepare(self, uid: str) -> None:
        """Take back all that a claim was given."""
        async with self._turn:
            await self._sockets.close(self._store.folder(uid))
            await in_thread(self._store.remove, uid)
            if self._prepared.pop(uid, None) is not None:
                self._changes.notify()

    async def _take(self, ref: ClaimRef) -> PreparedClaim:
        if len(self._prepared) >= MAX_PREPARED:
            raise NotEligible(
                f"{len(self._prepared)} claims are prepared on this node, the most there may be",
                next_step="look for claims whose pods are gone: kubectl get resourceclaims -A",
            )
        end = asyncio.get_running_loop().time() + self._patience_s
        found = await patiently(lambda: self._api.claim(ref.namespace, ref.name), end)
        claim = prepared_claim(ref, found, self._pool, self._devices)
        while held := held_by_others(claim, self._prepared.values()):
            changed = self._changes.next
            if not await any_set(end - asyncio.get_running_loop().time(), changed):
                device, other = held[0]
                raise NotEligible(
                    f"{device} is still held by claim {other.namespace}/{other.name} "
                    f"({other.uid}), which the kubelet has not unprepared yet",
                    next_step="wait; it does so within minutes of the end of the pod. If no such "
                    f"pod is left on the node, remove {self._store.folder(other.uid)} and start "
                    "the GPU memory service again",
                )
        # In the table before anything is awaited: another claim on the device sees it.
        return self._prepared.setdefault(claim.uid, claim)

    async def _serve(self, claim: PreparedClaim) -> None:
        """Put in place what containers get; nothing changes where it is there already."""
        await in_thread(self._store.save, claim)
        by_name = {device.name: device for device in self._devices}
        for each in claim.devices:
            device = by_name.get(each.device)
            if device is None:
                raise NotEligible(f"{each.device} is not served on this node any more")
            folder = self._store.folder(claim.uid) / str(each.ordinal)
            await self._sockets.serve(folder, device)
        await in_thread(self._store.publish, claim)


async def patiently(call: Callable[[], Awaitable[T]], end: float = math.inf) -> T:
    """Return what a call returns; try again after passing trouble, until `end` (loop time)."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except SnapbackError as error:
            left = end - asyncio.get_running_loop().time()
            if not error.retryable or left <= pause_s:
                raise
            log.warning("the API server is asked again in %.1f s: %s", pause_s, error)
        await any_set(pause_s)
        pause_s = min(2 * pause_s, MAX_PAUSE_S)
