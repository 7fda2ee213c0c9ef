"""Which object belongs to which, and what becomes of the children of one that is deleted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeGuard

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import TRACEPARENT, ObjectMeta, OwnerReference
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_operator.core.plan import FINALIZER, Delete, Finalize, Plan, status_plan
from snapshot_shared.errors import Conflict, Failure, InvalidManifest


def child_meta(
    owner: AnyObject,
    name: str,
    *,
    is_ours: bool = False,
    labels: dict[str, str] | None = None,
    annotations: dict[str, str] | None = None,
) -> ObjectMeta:
    """Return the metadata of an object that is made for another one in its namespace.

    Only objects of our own kinds get the finalizer: those of Kubernetes are kept by its
    own controllers.
    """
    kind = KINDS[type(owner).__name__]
    reference = OwnerReference(
        api_version=kind.api_version,
        kind=kind.name,
        name=owner.metadata.name,
        uid=owner.metadata.uid,
    )
    return ObjectMeta(
        name=name,
        namespace=owner.metadata.namespace,
        owner_references=[reference],
        finalizers=[FINALIZER] if is_ours else [],
        annotations={**traced(owner), **(annotations or {})},
        labels=labels or {},
    )


def traced(owner: AnyObject) -> dict[str, str]:
    """Return the annotation that carries the owner's trace on, if it has one."""
    trace = owner.metadata.annotations.get(TRACEPARENT)
    return {TRACEPARENT: trace} if trace else {}


def owned_by(value: AnyObject | None, owner: AnyObject) -> bool:
    """Whether an object belongs to this very incarnation of its owner.

    A SnapshotContent is cluster-scoped and so has no owner in a namespace: it names its snapshot.
    """
    if isinstance(value, SnapshotContent) and isinstance(owner, Snapshot):
        return value.spec.snapshot_ref.uid == owner.metadata.uid
    return value is not None and any(
        reference.uid == owner.metadata.uid for reference in value.metadata.owner_references
    )


def serves(content: AnyObject | None, value: AnyObject) -> TypeGuard[SnapshotContent]:
    """Whether a content is there, and of the namespace of an object that names it in its status."""
    if not isinstance(content, SnapshotContent):
        return False
    space = value.metadata.namespace or "default"
    return content.spec.source.namespace == content.spec.snapshot_ref.namespace == space


def delete_children(owner: AnyObject, children: Sequence[AnyObject | None]) -> Plan:
    """Delete what is left of an owner's children; when none is left, let the owner go."""
    left = [child for child in children if child is not None]
    if not left:
        return Plan((Finalize(owner),))
    deletes = [Delete(child) for child in left if not child.metadata.deletion_timestamp]
    return status_plan(owner, owner, *deletes)


def require_own(wanted: dict[str, Any], there: dict[str, Any]) -> None:
    """Raise unless an existing object has the owner of the wanted object; both are documents.

    Conflict if the existing object has another owner of that kind: this is an earlier incarnation,
    and the object is about to be collected. InvalidManifest for any other owner, or none.
    """
    kind, name = wanted["kind"], wanted["metadata"]["name"]
    (owner,) = wanted["metadata"]["ownerReferences"]
    owners = there["metadata"].get("ownerReferences", ())
    if any(each["uid"] == owner["uid"] for each in owners):
        return
    if any(each["kind"] == owner["kind"] for each in owners):
        raise Conflict(f"{kind} {name} is of another {owner['kind']}")
    raise InvalidManifest(
        f"there is a {kind} {name} that does not belong to {owner['kind']} {owner['name']}",
        next_step="give one of them another name",
    )


def gone(kind: str, name: str, *, is_captured: bool = False) -> Failure:
    """Return the failure of an object whose child was deleted under it."""
    what = "and the artifact with it" if is_captured else "before the capture was done"
    return Failure(
        reason=f"{kind}Deleted",
        message=f"{kind} {name} was deleted, {what}",
        next_step="delete this object, and take another capture",
    )


def taken(kind: str, value: AnyObject) -> Failure:
    """Return the failure of an object whose child's name is in use."""
    return Failure(
        reason=f"{kind}NameConflict",
        message=f"{kind} {value.metadata.name} exists and belongs to something else",
        next_step="rename the checkpoint or delete the other object",
    )
