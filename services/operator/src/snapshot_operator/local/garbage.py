"""Deletes objects whose owner is gone, as the garbage collector of Kubernetes does.

Owners delete their children themselves. What is collected here was created by an operator that had
not seen the deletion of the owner yet.
"""

from __future__ import annotations

import logging

from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_operator.runtime.cluster import Cluster
from snapshot_shared.errors import Conflict, NoSpace, NotFound, StoreBusy

log = logging.getLogger(__name__)


async def collect(cluster: Cluster) -> None:
    """Delete every object that names owners none of which exists; a live read confirms each."""
    orphans = [value for kind in KINDS for value in cluster.all(kind) if _is_orphan(cluster, value)]
    for value in orphans:
        meta = value.metadata
        try:
            if await _has_owner(cluster, value):
                continue
            log.warning("%s %s is deleted: its owner is gone", kind_of(value).name, meta.name)
            await cluster.delete(value)
        except (Conflict, NotFound) as error:
            log.info("%s %s is not deleted: %s", kind_of(value).name, meta.name, error)
        except (NoSpace, StoreBusy) as error:
            log.info("what has no owner is deleted with the next sweep: %s", error)
            return


def _is_orphan(cluster: Cluster, value: AnyObject) -> bool:
    owners = value.metadata.owner_references
    is_kept = value.metadata.deletion_timestamp or not owners
    return not is_kept and not any(cluster.by_uid(owner.uid) for owner in owners)


async def _has_owner(cluster: Cluster, value: AnyObject) -> bool:
    for owner in value.metadata.owner_references:
        if await cluster.find(owner.uid) is not None:
            return True
    return False
