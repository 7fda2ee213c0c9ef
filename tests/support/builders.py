"""Objects, orders and messages with valid values, of which a test gives those that it is about."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, TypeVar

import msgspec
from msgspec.structs import replace

from gms.domain.tasks import SaveTask
from snapshot_api.facts import (
    Container,
    Job,
    JobSpec,
    JobStatus,
    Node,
    NodeStatus,
    Pod,
    PodSpec,
    PodStatus,
    PodTemplateSpec,
)
from snapshot_api.meta import Condition, ObjectMeta, OrderStatus, OwnerReference, time_of
from snapshot_api.v1alpha1.content import (
    Committed,
    ContentSource,
    SnapshotContent,
    SnapshotContentSpec,
    SnapshotContentStatus,
    SnapshotRef,
)
from snapshot_api.v1alpha1.restore import (
    RestoreTarget,
    SnapshotRestore,
    SnapshotRestoreSpec,
    SnapshotRestoreStatus,
    restore_name,
)
from snapshot_api.v1alpha1.snapshot import (
    PodSource,
    Snapshot,
    SnapshotSource,
    SnapshotSpec,
    SnapshotStatus,
)
from snapshot_api.well_known import RESTORE_FROM
from snapshot_shared.artifact import FileEntry, PartManifest, RootManifest, RootPart
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Failure
from snapshot_shared.ids import derived_uid
from snapshot_shared.ledger import Accepted
from snapshot_shared.orders import (
    DumpOrder,
    LayoutRef,
    PartResult,
    PodRef,
    PresenceDevice,
    Progress,
    Report,
    VectorEntry,
)
from snapshot_shared.spans import SpanRecord

Object = TypeVar("Object", bound=msgspec.Struct)

NOW = 1_000_000.0
STAMP = "1970-01-12T13:46:30Z"
"""Ten seconds before NOW."""
DIGEST = "sha256:" + "a" * 64
UID = "00000000-0000-4000-8000-000000000001"


def meta(kind: str, name: str, **more: Any) -> ObjectMeta:
    fields = {"namespace": "default", "uid": derived_uid(kind, name), "creation_timestamp": STAMP}
    return ObjectMeta(name=name, **{**fields, **more})


def with_meta(value: Object, **changes: Any) -> Object:
    return _with(value, "metadata", changes)


def with_spec(value: Object, **changes: Any) -> Object:
    return _with(value, "spec", changes)


def with_status(value: Object, **changes: Any) -> Object:
    return _with(value, "status", changes)


def _with(value: Object, field: str, changes: dict[str, Any]) -> Object:
    return replace(value, **{field: replace(getattr(value, field), **changes)})


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
    return msgspec.Raw(encode_json(fields))


def work_order(kind: type[Object], owner: str = UID, **more: Any) -> Object:
    """Return an order as its service gets it, which is named after its verb and its owner."""
    verb = kind.__name__.removesuffix("Order").lower()
    fields = {"order": f"{verb}-{owner}", "attempt": 1, "node": "node-1", "owner": owner}
    return kind(**{**fields, "deadline_s": 60.0, **more})


def dump_order(**more: Any) -> DumpOrder:
    pod = PodRef(namespace="default", name="worker", uid=UID, container="main")
    return work_order(DumpOrder, **{"pod": pod, "content_uid": UID, "vector": [], **more})


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


def node(name: str = "node-1", **status: Any) -> Node:
    return Node(metadata=meta("node", name), status=NodeStatus(**status))


def job(name: str = "llm", **status: Any) -> Job:
    spec = JobSpec(template=PodTemplateSpec(spec=pod().spec))
    return Job(metadata=meta("job", name), spec=spec, status=JobStatus(**status))


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


def content(
    name: str = "snap", *, namespace: str = "default", of: str = "worker", **status: Any
) -> SnapshotContent:
    owner = derived_uid("snapshot", name)
    return SnapshotContent(
        metadata=meta("content", name, namespace=None),
        spec=SnapshotContentSpec(
            snapshot_ref=SnapshotRef(namespace=namespace, name=name, uid=owner),
            source=ContentSource(
                pod_ref=PodSource(name=of, uid=derived_uid("pod", of)),
                namespace=namespace,
                node_name="node-1",
            ),
        ),
        status=SnapshotContentStatus(**status),
    )


def committed(**more: Any) -> Committed:
    parts = [PartResult(part="process", bytes=10, digest=DIGEST)]
    fields: dict[str, Any] = {"generation": 1, "root_digest": DIGEST, "bytes": 10, "parts": parts}
    return Committed(**{**fields, "vector": [], **more})


def layout(**more: Any) -> LayoutRef:
    fields: dict[str, Any] = {"device": "GPU-1", "incarnation": "i", "generation": 1}
    fields |= {"layout_id": "l", "structure_hash": "h", "bytes": 1}
    return LayoutRef(**{**fields, **more})


def save_task(**more: Any) -> SaveTask:
    """Return the task that saves one device as `gpu-0`."""
    fields: dict[str, Any] = {"socket_dir": "/nowhere", "root": "/nowhere", "device": "GPU-1"}
    fields |= {"namespace": "default", "content_uid": UID, "generation": 1, "part": "gpu-0"}
    fields |= {"deadline_s": 60.0, "fence_token": "t", "layout": layout()}
    order = f"save-{more.get('content_uid', UID)}-gpu-0"
    return SaveTask(**{**fields, "order": order, **more})


def vector(devices: Iterable[dict[str, Any]], of_each: int) -> list[VectorEntry]:
    """Return what a capture has to take: a process, and so many bytes of each of these devices."""
    entries = [VectorEntry(part="process")]
    for each in devices:
        number = each["ordinal"]
        found = layout(device=each["uuid"], layout_id=f"layout-{number}", bytes=of_each)
        entries.append(VectorEntry(part=f"gpu-{number}", ordinal=number, layout=found))
    return entries


def file_entry(**more: Any) -> FileEntry:
    fields: dict[str, Any] = {"name": "shard-0", "size": 4096, "chunk_bytes": 4096}
    return FileEntry(**{**fields, "chunks": ["0" * 32], **more})


def part_manifest(*files: FileEntry, part: str = "process", **more: Any) -> PartManifest:
    fields: dict[str, Any] = {"namespace": "default", "content_uid": UID, "generation": 1}
    fields |= {"kind": "process", "part": part, "order": f"dump-{UID}"}
    if part != "process":
        fields |= {"kind": "gms", "order": f"save-{UID}-{part}"}
    size = sum(file.size for file in files)
    return PartManifest(**{**fields, "bytes": size, "files": [*files], **more})


def root_part(part: str, **more: Any) -> RootPart:
    kind = "process" if part == "process" else "gms"
    return RootPart(**{"part": part, "kind": kind, "bytes": 1, "digest": DIGEST, **more})


def root_manifest(*parts: RootPart, **more: Any) -> RootManifest:
    fields: dict[str, Any] = {"namespace": "default", "content_uid": UID, "generation": 1}
    fields |= {"source": PodRef(namespace="default", name="worker", uid=UID), "parts": [*parts]}
    return RootManifest(**{**fields, "bytes": sum(part.bytes for part in parts), **more})


def span(**more: Any) -> SpanRecord:
    fields: dict[str, Any] = {"trace_id": "a" * 32, "span_id": "s", "name": "write"}
    fields |= {"service": "s", "node": "n", "start_ns": 0, "end_ns": 1}
    return SpanRecord(**{**fields, **more})


def progress(**more: Any) -> Progress:
    fields: dict[str, Any] = {"order": f"dump-{UID}", "attempt": 1, "node": "node-1", "at": 1.0}
    fields |= {"part": "process", "step": "write", "done": 1, "total": 2}
    return Progress(**{**fields, **more})


def told(**more: Any) -> Report:
    """Return a report of an order that the test does not have."""
    fields: dict[str, Any] = {"order": f"dump-{UID}", "attempt": 1, "n": 1, "kind": "accepted"}
    fields |= {"node": "node-1", "service": "agent", "at": 0.0}
    return Report(**{**fields, **more})


def device(**more: Any) -> PresenceDevice:
    fields: dict[str, Any] = {"index": 0, "uuid": "GPU-1", "product": "p", "capacity_bytes": 2**30}
    return PresenceDevice(**{**fields, **more})


def accepted(**more: Any) -> Accepted:
    fields: dict[str, Any] = {"order": f"dump-{UID}", "attempt": 1, "payload": payload()}
    fields |= {"boot_id": "b", "monotonic": 0.0, "wall": 100.0, "deadline_s": 60.0}
    return Accepted(**{**fields, **more})
