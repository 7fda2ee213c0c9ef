"""Builds every order: ids, budgets, tokens, trace context. One function a verb."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.meta import OrderStatus, time_of
from snapshot_api.v1alpha1.content import Committed, SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import ArtifactSource
from snapshot_operator.core import fold
from snapshot_shared.codec import digest, encode_json
from snapshot_shared.errors import Internal
from snapshot_shared.ids import Uid, order_id
from snapshot_shared.orders import (
    CLEANING,
    DEVICE_DRIVERS,
    SCHEMA_VERSION,
    AbortOrder,
    ArtifactRef,
    CommitOrder,
    DeleteOrder,
    DeviceRef,
    Driver,
    DropOrder,
    DumpOrder,
    LoadOrder,
    OnFailure,
    Order,
    PartResult,
    PlaceOrder,
    PodRef,
    PrepareOrder,
    ReleaseOrder,
    RestoreOrder,
    RunOrder,
    SaveOrder,
    SealOrder,
    Service,
    StopOrder,
    VectorEntry,
    VerifyOrder,
    order_in,
    service_of,
)
from snapshot_shared.spans import derived_context, parse_traceparent

BUDGET_S = {
    "run": 60.0,
    "stop": 60.0,
    "prepare": 300.0,
    "dump": 600.0,
    "save": 1800.0,
    "seal": 120.0,
    "release": 60.0,
    "load": 1800.0,
    "commit": 60.0,
    "drop": 60.0,
    "place": 600.0,
    "restore": 600.0,
    "abort": 60.0,
    "delete": 600.0,
    "verify": 3600.0,
}
HOLD_S = 1800.0
WAITS_S = 4.0
"""How long a quiet worker waits for the next order of its capture, in seconds.

A capture whose worker went on before anything was done is tried again (docs/adr/0051).
"""

DEVICES_S = 310.0
"""How much longer it may take to let a worker go that has to be given its CUDA memory, in seconds:
the agent waits so long for eight devices of 80 GB."""


def status_of(order: Order, service: Service, now: float, *, tries: int = 1) -> OrderStatus:
    """Write an order down as it is remembered on its object."""
    verb = order.order.partition("-")[0]
    return OrderStatus(
        order=order.order,
        verb=verb,
        attempt=order.attempt,
        node=order.node,
        service=service,
        payload=msgspec.Raw(encode_json(order)),
        ordered_at=time_of(now),
        deadline=time_of(now + order.deadline_s + fold.ANSWER_GRACE_S),
        tries=tries,
    )


def again(item: OrderStatus, now: float) -> OrderStatus | None:
    """Return the next attempt of an order; None when its payload is of an unknown version."""
    order = order_in(item.payload)
    if order is None:
        return None
    attempt = fold.next_attempt(item)
    span = order_span(order.traceparent, item.order, attempt)
    changed = replace(order, attempt=attempt, traceparent=span)
    return status_of(changed, item.service, now, tries=item.tries + 1)


def renewed(
    orders: Sequence[OrderStatus], now: float, *, besides: str = ""
) -> list[OrderStatus] | None:
    """Return the orders with each cleaning order that is due given again; None when none is.

    `besides` is a verb that is left alone.
    """
    changed = list(orders)
    for item in orders:
        at = fold.due_at(item) if item.verb in CLEANING and item.verb != besides else None
        if at is not None and now >= at and (new := again(item, now)) is not None:
            changed = fold.replaced(changed, new)
    return changed if changed != list(orders) else None


def order_span(parent: str, order: str, attempt: int) -> str:
    """Return the traceparent of the operator's span for one order; empty without a trace."""
    context = parse_traceparent(parent)
    if context is None:
        return ""
    return derived_context(context.trace_id, "order", order, str(attempt)).traceparent


def _common(
    verb: str,
    owner: str,
    attempt: int,
    node: str,
    trace: str,
    part: str | None = None,
) -> dict[str, Any]:
    name = order_id(verb, Uid(owner), part)
    return {
        "order": name,
        "attempt": attempt,
        "node": node,
        "owner": owner,
        "deadline_s": BUDGET_S[verb],
        "traceparent": order_span(trace, name, attempt),
        "schema": SCHEMA_VERSION,
    }


def pod_ref(pod: Pod, container: str) -> PodRef:
    """Name one incarnation of a pod."""
    return PodRef(
        namespace=pod.metadata.namespace or "default",
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        container=container,
    )


def source_ref(content: SnapshotContent) -> PodRef:
    """Name the pod that a content captures. Internal for an import, which captures none."""
    source = content.spec.source
    if source.pod_ref is None:
        raise Internal(f"{content.metadata.name} captures no pod")
    return PodRef(
        namespace=source.namespace,
        name=source.pod_ref.name,
        uid=source.pod_ref.uid or "",
        container=source.pod_ref.containers[0],
    )


def source_node(content: SnapshotContent) -> str:
    """Return the node of the pod that a content captures. Internal for an import."""
    if content.spec.source.node_name is None:
        raise Internal(f"{content.metadata.name} captures no pod")
    return content.spec.source.node_name


def fence_token(content: SnapshotContent, attempt: int) -> str:
    """Name the hold of one capture attempt on the devices."""
    return f"{content.metadata.uid}.{attempt}"


def load_token(restore: SnapshotRestore, attempt: int, part: str) -> str:
    """Return the name of the hidden layout of one restore attempt on one device."""
    return f"{restore.metadata.uid}.{attempt}.{part}"


def template_digest(pod: Pod) -> str:
    """Digest what an agent will be given for a pod, so that a change between is noticed."""
    return digest(encode_json(msgspec.to_builtins(pod.spec)))


def run(pod: Pod, restore: SnapshotRestore | None, driver: Driver, now: float) -> OrderStatus:
    """Start the pod's containers; one that is restored waits for what the driver brings."""
    container = restore.spec.pod_ref.container if restore else pod.spec.containers[0].name
    order = RunOrder(
        pod=pod_ref(pod, container),
        template_digest=template_digest(pod),
        devices=pod.status.devices,
        standby=restore is not None,
        driver=driver,
        **_common("run", pod.metadata.uid, 1, pod.status.node_name, pod.status.traceparent),
    )
    return status_of(order, "agent", now)


def stop(pod: Pod, trace: str, now: float) -> OrderStatus:
    """End the pod's containers."""
    order = StopOrder(
        pod=pod_ref(pod, pod.spec.containers[0].name),
        grace_s=float(pod.spec.termination_grace_period_seconds),
        **_common("stop", pod.metadata.uid, 1, pod.status.node_name, trace),
    )
    return status_of(order, "agent", now)


def forget(pod: Pod, device: DeviceRef, trace: str, now: float) -> OrderStatus:
    """Free one of the pod's devices of what it left committed there."""
    part = f"gpu-{device.ordinal}"
    common = _common("drop", pod.metadata.uid, 1, pod.status.node_name, trace, part)
    return status_of(DropOrder(device=device.uuid, **common), "gms", now)


def target_ref(restore: SnapshotRestore) -> PodRef:
    """Name the pod and the container that are restored."""
    target = restore.spec.pod_ref
    return PodRef(
        namespace=restore.metadata.namespace or "default",
        name=target.name,
        uid=target.uid,
        container=target.container,
    )


def prepare(
    content: SnapshotContent, pod: Pod | None, attempt: int, trace: str, now: float
) -> OrderStatus:
    """Open a capture of a container of a pod."""
    source = content.spec.source
    order = PrepareOrder(
        pod=source_ref(content),
        content_uid=content.metadata.uid,
        devices=source.devices,
        memory_server=source.memory_server,
        image_digest=_image_digest(pod, source_ref(content).container),
        seccomp_profile=source.seccomp_profile,
        fence_token=fence_token(content, attempt),
        hold_s=HOLD_S,
        dump_within_s=WAITS_S,
        driver=content.spec.driver,
        **_common("prepare", content.metadata.uid, attempt, source_node(content), trace),
    )
    return status_of(order, "agent", now)


def _image_digest(pod: Pod | None, container: str) -> str:
    """Return the digest in the name of a container's image; empty where none is known."""
    rows = pod.status.container_statuses if pod is not None else []
    name = next((row.image_id for row in rows if row.name == container), "")
    found = re.search(r"(?:^|@)(sha256:[0-9a-f]{64})\Z", name)
    return found[1] if found else ""


def stage(
    content: SnapshotContent,
    vector: list[VectorEntry],
    parents: Mapping[str, ArtifactRef],
    trace: str,
    now: float,
) -> list[OrderStatus]:
    """Order all parts of the plan together: the dump and one save a device.

    `parents` are older artifacts of the same layout, by part.
    """
    source, attempt, uid = content.spec.source, content.status.attempt, content.metadata.uid
    orders: list[Order] = [
        DumpOrder(
            pod=source_ref(content),
            content_uid=uid,
            vector=vector,
            # A worker that is to end waits until its weights are saved and committed.
            release_within_s=WAITS_S if content.spec.source_policy == "Resume" else HOLD_S,
            driver=content.spec.driver,
            **_common("dump", uid, attempt, source_node(content), trace),
        )
    ]
    for entry in vector:
        if entry.layout is not None:
            common = _common("save", uid, attempt, source_node(content), trace, entry.part)
            orders.append(
                SaveOrder(
                    namespace=source.namespace,
                    content_uid=uid,
                    part=entry.part,
                    layout=entry.layout,
                    fence_token=fence_token(content, attempt),
                    parent=parents.get(entry.part),
                    pod=source_ref(content),
                    **common,
                )
            )
    return [status_of(order, service_of(order), now) for order in orders]


def seal(content: SnapshotContent, parts: list[PartResult], trace: str, now: float) -> OrderStatus:
    """Make the generation an artifact."""
    source = content.spec.source
    order = SealOrder(
        namespace=source.namespace,
        content_uid=content.metadata.uid,
        pod=source_ref(content),
        vector=content.status.vector,
        parts=parts,
        **_common(
            "seal", content.metadata.uid, content.status.attempt, source_node(content), trace
        ),
    )
    return status_of(order, "agent", now)


def release(content: SnapshotContent, trace: str, now: float) -> OrderStatus:
    """Let the worker go on, or end it."""
    order = ReleaseOrder(
        pod=source_ref(content),
        content_uid=content.metadata.uid,
        policy=content.spec.source_policy,
        driver=content.spec.driver,
        **_common(
            "release", content.metadata.uid, content.status.attempt, source_node(content), trace
        ),
    )
    return status_of(_with_devices(order), "agent", now)


def _with_devices(order: ReleaseOrder | AbortOrder) -> Order:
    """Return the order with the time that a driver needs to give a worker its CUDA memory."""
    more_s = DEVICES_S if order.driver in DEVICE_DRIVERS else 0.0
    return replace(order, deadline_s=order.deadline_s + more_s)


def abort_capture(
    content: SnapshotContent, why: str, trace: str, now: float, on_failure: OnFailure
) -> list[OrderStatus]:
    """Tombstone a capture attempt at the agent and, when it has devices, at GMS."""
    source, attempt, uid = content.spec.source, content.status.attempt, content.metadata.uid
    details: dict[str, Any] = {
        "pod": source_ref(content),
        "content_uid": uid,
        "driver": content.spec.driver,
        "fence_token": fence_token(content, attempt),
        "devices": [device.uuid for device in source.devices],
        "why": why[:4096],
        "on_failure": on_failure,
    }
    common = _common("abort", uid, attempt, source_node(content), trace)
    found = [status_of(_with_devices(AbortOrder(**common, **details)), "agent", now)]
    if source.devices or source.memory_server:
        common = _common("abort", uid, attempt, source_node(content), trace, "gms")
        found.append(status_of(AbortOrder(**common, **details), "gms", now))
    return found


def abort_restore(
    value: SnapshotRestore, node: str, why: str, trace: str, now: float
) -> OrderStatus:
    """Say to the worker that waits for a restore that none comes."""
    common = _common("abort", value.metadata.uid, max(1, value.status.attempt), node, trace)
    order = AbortOrder(pod=target_ref(value), why=why[:4096], **common)
    return status_of(order, "agent", now)


def delete(
    content: SnapshotContent,
    generation: int,
    node: str,
    now: float,
    last: OrderStatus | None,
) -> OrderStatus:
    """Remove one generation from the artifact root; `last` is the try before this one."""
    uid, trace = content.metadata.uid, content.status.traceparent
    attempt = fold.next_attempt(last) if last else 1
    order = DeleteOrder(
        namespace=content.spec.source.namespace,
        content_uid=content.artifact_uid,
        generation=generation,
        **_common("delete", uid, attempt, node, trace, f"gen-{generation}"),
    )
    return status_of(order, "agent", now, tries=last.tries + 1 if last else 1)


def artifact_ref(content: SnapshotContent, proof: Committed | ArtifactSource) -> ArtifactRef:
    """Name the artifact of a content, committed or to be imported."""
    return ArtifactRef(
        namespace=content.spec.source.namespace,
        content_uid=content.artifact_uid,
        generation=proof.generation,
        root_digest=proof.root_digest,
    )


def verify(
    content: SnapshotContent,
    proof: Committed | ArtifactSource,
    node: str,
    now: float,
    *,
    attempt: int,
    budget_s: float = 0.0,
) -> OrderStatus:
    """Read all of an artifact; within `budget_s` seconds where that is more than the usual."""
    trace = content.status.traceparent
    common = _common("verify", content.metadata.uid, attempt, node, trace)
    common["deadline_s"] = max(common["deadline_s"], budget_s)
    order = VerifyOrder(artifact=artifact_ref(content, proof), **common)
    return status_of(order, "agent", now)


def load(
    value: SnapshotRestore, artifact: ArtifactRef, committed: Committed, trace: str, now: float
) -> list[OrderStatus]:
    """Load every device part of the artifact, hidden."""
    status = value.status
    digests = {part.part: part for part in committed.parts}
    devices = {device.ordinal: device.uuid for device in status.devices}
    found = []
    for entry in committed.vector:
        if entry.layout is None or entry.ordinal not in devices or entry.part not in digests:
            continue
        order = LoadOrder(
            artifact=artifact,
            part=entry.part,
            part_digest=digests[entry.part].digest,
            device=devices[entry.ordinal],
            layout_id=entry.layout.layout_id,
            structure_hash=entry.layout.structure_hash,
            load_token=load_token(value, status.attempt, entry.part),
            bytes=entry.layout.bytes,
            pod=target_ref(value),
            **_of_restore("load", value, trace, entry.part),
        )
        found.append(status_of(order, "gms", now))
    return found


def _of_restore(
    verb: str, value: SnapshotRestore, trace: str, part: str | None = None
) -> dict[str, Any]:
    status = value.status
    return _common(verb, value.metadata.uid, status.attempt, status.node_name, trace, part)


def _loads(orders: Sequence[OrderStatus]) -> list[LoadOrder]:
    found = (order_in(item.payload) for item in orders)
    return [order for order in found if isinstance(order, LoadOrder)]


def commit(
    value: SnapshotRestore, loads: Sequence[OrderStatus], trace: str, now: float
) -> list[OrderStatus]:
    """Publish what the loads left hidden."""
    return [
        status_of(
            CommitOrder(
                device=done.device,
                load_token=done.load_token,
                layout_id=done.layout_id,
                pod=done.pod,
                **_of_restore("commit", value, trace, done.part),
            ),
            "gms",
            now,
        )
        for done in _loads(loads)
    ]


def drop(
    value: SnapshotRestore, loads: Sequence[OrderStatus], trace: str, now: float
) -> list[OrderStatus]:
    """Forget what the loads left, hidden or committed."""
    return [
        status_of(
            DropOrder(
                device=done.device,
                load_token=done.load_token,
                pod=done.pod,
                **_of_restore("drop", value, trace, done.part),
            ),
            "gms",
            now,
        )
        for done in _loads(loads)
    ]


def place(value: SnapshotRestore, artifact: ArtifactRef, trace: str, now: float) -> OrderStatus:
    """Bring the process into the worker's place, while its devices are loaded."""
    order = PlaceOrder(
        artifact=artifact,
        pod=target_ref(value),
        devices=value.status.devices,
        driver=value.status.driver,
        **_of_restore("place", value, trace),
    )
    return status_of(order, "agent", now)


def restore(value: SnapshotRestore, artifact: ArtifactRef, trace: str, now: float) -> OrderStatus:
    """Fill the waiting worker and let it go."""
    order = RestoreOrder(
        artifact=artifact,
        pod=target_ref(value),
        devices=value.status.devices,
        driver=value.status.driver,
        **_of_restore("restore", value, trace),
    )
    return status_of(order, "agent", now)
