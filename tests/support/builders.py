"""Objects with a past, for the tests of what is told of them."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Failure
from snapshot_shared.ids import derived_uid
from snapshot_shared.objects.kubernetes import Container, Pod, PodSpec, PodStatus
from snapshot_shared.objects.meta import Condition, ObjectMeta, OrderStatus, OwnerReference, time_of
from snapshot_shared.objects.snapback import (
    RESTORE_FROM,
    Committed,
    ContentSource,
    PodSource,
    RestoreTarget,
    Snapshot,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotContentStatus,
    SnapshotRef,
    SnapshotRestore,
    SnapshotRestoreSpec,
    SnapshotRestoreStatus,
    SnapshotSource,
    SnapshotSpec,
    SnapshotStatus,
    restore_name,
)
from snapshot_shared.orders import PartResult, Report

NOW = 1_000_000.0
STAMP = "1970-01-12T13:46:30Z"
"""Ten seconds before NOW."""
DIGEST = "sha256:" + "a" * 64


def meta(kind: str, name: str, **more: Any) -> ObjectMeta:
    fields = {"namespace": "default", "uid": derived_uid(kind, name), "creation_timestamp": STAMP}
    return ObjectMeta(name=name, **{**fields, **more})


def row(type_: str, status: str, reason: str, message: str = "") -> Condition:
    return Condition(
        type=type_,
        status=status,  # type: ignore[arg-type]
        reason=reason,
        message=message,
        last_transition_time=STAMP,
    )


def order(
    verb: str, owner: str, *, part: str = "", at: float = NOW - 5, **more: Any
) -> OrderStatus:
    fields: dict[str, Any] = {
        "order": f"{verb}-{owner}" + (f"-{part}" if part else ""),
        "verb": verb,
        "attempt": 1,
        "node": "node-1",
        "service": "gms" if part.startswith("gpu") else "agent",
        "payload": payload(part=part) if part else payload(),
        "ordered_at": time_of(at),
        "deadline": time_of(at + 60),
    }
    return OrderStatus(**{**fields, **more})


def payload(**fields: Any) -> msgspec.Raw:
    """Return fields as the payload of an order."""
    return msgspec.Raw(encode_json(fields))


def report(item: OrderStatus, kind: str, *, n: int = 2, **more: Any) -> Report:
    fields: dict[str, Any] = {
        "order": item.order,
        "attempt": item.attempt,
        "n": n,
        "kind": kind,
        "node": item.node,
        "service": item.service,
        "at": item.ordered_at.timestamp() + n,
    }
    return Report(**{**fields, **more})


def ended(item: OrderStatus, kind: str, failure: Failure | None = None, **more: Any) -> OrderStatus:
    final = report(item, kind, failure=failure, **more)
    return replace(item, state=kind, final=final, ended_at=item.ordered_at + timedelta(seconds=2))


def pod(name: str = "worker", source: str = "", **status: Any) -> Pod:
    annotations = {RESTORE_FROM: source} if source else {}
    return Pod(
        metadata=meta("pod", name, annotations=annotations),
        spec=PodSpec(containers=[Container(name="main", command=["x"])]),
        status=PodStatus(**status),
    )


def restore(source: str = "snap", *, of: str = "worker", **status: Any) -> SnapshotRestore:
    uid = derived_uid("pod", of)
    owner = OwnerReference(api_version="v1", kind="Pod", name=of, uid=uid)
    return SnapshotRestore(
        metadata=meta("restore", restore_name(uid), owner_references=[owner]),
        spec=SnapshotRestoreSpec(pod_ref=RestoreTarget(name=of, uid=uid), source=source),
        status=SnapshotRestoreStatus(**status),
    )


def snapshot(name: str = "snap", **status: Any) -> Snapshot:
    return Snapshot(
        metadata=meta("snapshot", name),
        spec=SnapshotSpec(
            source=SnapshotSource(
                pod_ref=PodSource(name="worker", uid=derived_uid("pod", "worker"))
            )
        ),
        status=SnapshotStatus(**status),
    )


def content(name: str = "snap", **status: Any) -> SnapshotContent:
    owner = derived_uid("snapshot", name)
    return SnapshotContent(
        metadata=meta("content", name, namespace=None),
        spec=SnapshotContentSpec(
            snapshot_ref=SnapshotRef(namespace="default", name=name, uid=owner),
            source=ContentSource(
                pod_ref=PodSource(name="worker", uid=derived_uid("pod", "worker")),
                namespace="default",
                node_name="node-1",
            ),
        ),
        status=SnapshotContentStatus(**status),
    )


def committed(**more: Any) -> Committed:
    parts = [PartResult(part="process", bytes=10, digest=DIGEST)]
    fields: dict[str, Any] = {"generation": 1, "root_digest": DIGEST, "bytes": 10, "parts": parts}
    return Committed(**{**fields, "vector": [], **more})
