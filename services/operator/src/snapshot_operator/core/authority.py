"""Decides whether an order follows from the object that remembers it.

A status is data. A user who may write the status of one object could name pods and artifacts of any
namespace in it, as an order that waits to be published. So an order is carried out only if its
owner, its pod and its artifact are those that the spec, the uid and the namespace of the object
lead to. The spec of a SnapshotContent is trusted, because no right within a namespace can write
this kind. This module reads no status, and an order with one foreign field is not published.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.views import part_of
from snapshot_operator.core import ordering
from snapshot_shared.orders import AbortOrder, AnyOrder, order_in

Derive = Callable[[Any], Any]
"""Takes the value of a field, and returns the value that the owner allows there."""

VERBS: Mapping[type[AnyObject], frozenset[str]] = {
    Pod: frozenset({"run", "stop", "drop"}),
    SnapshotContent: frozenset(
        {"prepare", "dump", "save", "seal", "release", "abort", "delete", "verify"}
    ),
    SnapshotRestore: frozenset({"load", "commit", "drop", "place", "restore", "abort"}),
}
"""Which orders an object of each kind may have. An object of another kind has none."""


def foreign(owner: AnyObject, item: OrderStatus) -> str:
    """Return the first field of an order that does not follow from its owner; empty if all do.

    The payload of an order that this build cannot read is foreign: nothing can be said of it.
    """
    order = order_in(item.payload)
    if order is None:
        return "payload"
    return next(_differences(owner, item, order), "")


def _differences(owner: AnyObject, item: OrderStatus, order: AnyOrder) -> Iterator[str]:
    verb = str(order.__struct_config__.tag).removeprefix("snapback.v1.").removesuffix("_order")
    if item.verb != verb or verb not in VERBS.get(type(owner), ()):
        yield "verb"
    part = part_of(item.order)
    if item.order != f"{verb}-{owner.metadata.uid}" + (f"-{part}" if part else ""):
        yield "order"
    if (item.order, item.attempt, item.node) != (order.order, order.attempt, order.node):
        yield "payload"
    for name, derive in _derived(owner, order).items():
        if hasattr(order, name) and getattr(order, name) != derive(getattr(order, name)):
            yield name


def _derived(owner: AnyObject, order: AnyOrder) -> dict[str, Derive]:
    uid = owner.metadata.uid
    found: dict[str, Derive] = {
        "owner": lambda _: uid,
        # A later attempt of an order has the token of an earlier one.
        "fence_token": lambda given: given and f"{uid}.{given.rpartition('.')[2]}",
        "load_token": lambda given: f"{uid}.{given[len(uid) + 1 :]}",
    }
    match owner:
        case SnapshotContent():
            return found | _of_content(owner, order)
        case SnapshotRestore():
            return found | _of_restore(owner, order)
        case Pod():
            # What a pod that is gone has left on a device belongs to no restore.
            return found | {
                "pod": lambda given: given and ordering.pod_ref(owner, given.container),
                "load_token": lambda _: "",
            }
        case _:
            return found


def _of_content(content: SnapshotContent, order: AnyOrder) -> dict[str, Derive]:
    source = content.spec.source
    uuids = {device.uuid for device in source.devices}
    found: dict[str, Derive] = {
        "namespace": lambda _: source.namespace,
        "content_uid": lambda _: content.metadata.uid,
        "driver": lambda _: content.spec.driver,
        "parent": lambda given: given and replace(given, namespace=source.namespace),
        "artifact": lambda given: replace(
            given, namespace=source.namespace, content_uid=content.artifact_uid
        ),
        "devices": lambda given: [each for each in given if getattr(each, "uuid", each) in uuids],
        "pod": lambda _: source.pod_ref and ordering.source_ref(content),
    }
    if order.order.startswith(("delete-", "verify-")):
        return found | {"content_uid": lambda _: content.artifact_uid}
    # Any node that reaches the artifact root may remove and verify. The pod's own node captures it.
    return found | {"node": lambda _: source.node_name}


def _of_restore(value: SnapshotRestore, order: AnyOrder) -> dict[str, Derive]:
    space = value.metadata.namespace or "default"
    found: dict[str, Derive] = {
        "pod": lambda _: ordering.target_ref(value),
        "artifact": lambda given: replace(given, namespace=space),
    }
    if isinstance(order, AbortOrder):
        # With these fields an abort compensates a capture: it may end a worker and free devices.
        return found | {
            "content_uid": lambda _: None,
            "fence_token": lambda _: None,
            "devices": lambda _: [],
        }
    return found
