"""Objects with a past, for the tests of what is told of them."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from snapshot_shared.errors import Failure
from snapshot_shared.ids import derived_uid
from snapshot_shared.objects import (
    RESTORE_FROM,
    Committed,
    Condition,
    Container,
    ContentSource,
    ObjectMeta,
    OrderStatus,
    OwnerReference,
    Pod,
    PodSource,
    PodSpec,
    PodStatus,
    Snapshot,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotContentStatus,
    SnapshotRef,
    SnapshotSource,
    SnapshotSpec,
    SnapshotStatus,
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
        "payload": {"part": part} if part else {},
        "ordered_at": at,
        "deadline": at + 60,
    }
    return OrderStatus(**{**fields, **more})


def report(item: OrderStatus, kind: str, *, n: int = 2, **more: Any) -> Report:
    fields: dict[str, Any] = {
        "order": item.order,
        "attempt": item.attempt,
        "n": n,
        "kind": kind,
        "node": item.node,
        "service": item.service,
        "at": item.ordered_at + n,
    }
    return Report(**{**fields, **more})


def ended(item: OrderStatus, kind: str, failure: Failure | None = None, **more: Any) -> OrderStatus:
    final = report(item, kind, failure=failure, **more)
    return replace(item, state=kind, final=final, ended_at=item.ordered_at + 2)


def pod(name: str = "worker", source: str = "", **status: Any) -> Pod:
    annotations = {RESTORE_FROM: source} if source else {}
    return Pod(
        metadata=meta("pod", name, annotations=annotations),
        spec=PodSpec(containers=[Container(name="main", command=["x"])]),
        status=PodStatus(**status),
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
    reference = OwnerReference(api_version="v", kind="Snapshot", name=name, uid=owner)
    return SnapshotContent(
        metadata=meta("content", name, namespace=None, owner_references=[reference]),
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
