"""Interventions of people on call: cordon a node, abort a capture, send an order again.

Each function returns what to store or to publish, or refuses with the reason and the next step.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from snapshot_api.facts import Node
from snapshot_api.kinds import AnyObject, kind_of
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.views import is_answered
from snapshot_shared.errors import NotEligible
from snapshot_shared.transitions import Capture

MAX_REQUESTED = 1024
"""How many characters of an annotation are kept; etcd takes 1.5 MiB of an object, and each copy
counts."""


def requested(content: SnapshotContent, annotation: str) -> str:
    """Return the beginning of an annotation by which people ask for something; empty if none."""
    return content.metadata.annotations.get(annotation, "")[:MAX_REQUESTED]


def cordoned(node: Node, *, unschedulable: bool) -> Node:
    """Return a node on which new work may begin, or may not; what runs there goes on."""
    return replace(node, spec=replace(node.spec, unschedulable=unschedulable))


def check_abortable(content: SnapshotContent) -> None:
    """Raise NotEligible when there is no capture left to abort."""
    meta, status = content.metadata, content.status
    if status.capture is Capture.READY:
        generation = status.committed.generation if status.committed else status.attempt
        raise NotEligible(
            f"the capture of {meta.name} is over: generation {generation} is committed",
            next_step="to remove what was captured: snapshotctl delete snapshot "
            f"{content.spec.snapshot_ref.name}",
            capture=status.capture.value,
        )
    if status.capture is Capture.FAILED:
        reason = status.failure.reason if status.failure else "unknown"
        raise NotEligible(
            f"the capture of {meta.name} has failed already: {reason}",
            next_step=f"look at it: snapshotctl get snapshotcontent {meta.name} -o yaml",
            capture=status.capture.value,
        )
    if meta.deletion_timestamp:
        raise NotEligible(
            f"{meta.name} is being deleted, which ends its capture",
            next_step=f"wait until it is gone: snapshotctl wait snapshotcontent/{meta.name} "
            "--for=delete",
        )


def sent_again(
    owner: AnyObject | None, orders: Sequence[OrderStatus], order_id: str
) -> OrderStatus:
    """Return the order that its owner awaits an answer to. NotEligible when it awaits none."""
    if owner is None:
        raise NotEligible(
            f"order {order_id} is not wanted any more: the object that it served is gone",
            next_step="nothing is owed for it; leave the dead letter as it is",
        )
    name = f"{kind_of(owner).name.lower()}/{owner.metadata.name}"
    mine = [item for item in orders if item.order == order_id]
    if not mine:
        raise NotEligible(
            f"{name} has never ordered {order_id}",
            next_step="nothing waits for it; leave the dead letter as it is",
        )
    current = max(mine, key=lambda item: item.attempt)
    if is_answered(current):
        why = f" ({current.final.failure})" if current.final and current.final.failure else ""
        raise NotEligible(
            f"order {order_id} of {name} is not wanted any more: attempt {current.attempt} "
            f"ended {current.state}{why}",
            next_step=f"see its whole life: snapshotctl orders show {order_id}",
            state=current.state,
            attempt=current.attempt,
        )
    return current
