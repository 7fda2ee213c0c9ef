"""Keeps the ResourceSlice of the node as its devices are, until it is cancelled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from gms.domain.claims import ClaimableDevice
from gms.domain.slices import Create, Delete, Replace, next_write
from gms.ports import ClusterApi
from snapshot_shared.errors import SnapbackError
from snapshot_shared.tasks import any_set

log = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.5
MAX_PAUSE_S = 30.0


async def publish_slices(
    api: ClusterApi,
    node: str,
    devices: Sequence[ClaimableDevice],
    *,
    jitter: Callable[[], float],
    first_pause_s: float = FIRST_PAUSE_S,
) -> None:
    """Publish devices, and again whenever the slice is lost: it has other writers.

    The kubelet deletes all slices of its node when it starts, and those of a driver that was away
    for 30 s. `jitter` returns a random number from 0 to 1.
    """
    pause_s = first_pause_s
    while True:
        try:
            await _publish_once(api, node, devices)
            pause_s = first_pause_s
        except SnapbackError as error:
            log.warning("the devices could not be published: %s", error)
            await any_set(pause_s * (0.5 + jitter()))
            pause_s = min(2 * pause_s, MAX_PAUSE_S)


async def _publish_once(api: ClusterApi, node: str, devices: Sequence[ClaimableDevice]) -> None:
    found, version = await api.slices(node)
    write = next_write(found, node, await api.node_uid(node), devices)
    match write:
        case Create(body):
            await api.create_slice(body)
        case Replace(name, body):
            await api.replace_slice(name, body)
        case Delete(name):
            await api.delete_slice(name)
        case None:
            await api.slices_changed(node, version)
            return
    log.info("the resource slice of the node: %s", type(write).__name__.lower())
