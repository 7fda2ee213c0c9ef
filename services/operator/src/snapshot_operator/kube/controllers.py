"""The controllers of a cluster: those of our own kinds, of pods that restore, and of nodes.

The pods and Jobs themselves are run by Kubernetes.
"""

from __future__ import annotations

from typing import NamedTuple

from msgspec.structs import replace

from snapshot_api.facts import AGENT_LABEL, FINISHED, SECCOMP_LABEL, Node, Pod
from snapshot_api.meta import condition, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.restore import SnapshotRestore, restore_name
from snapshot_operator.core import checkpoint, conditions, controllers
from snapshot_operator.core.checkpoint import CheckpointView
from snapshot_operator.core.conditions import REFUSED, Truth
from snapshot_operator.core.controllers import Controller
from snapshot_operator.core.plan import (
    NOTHING,
    Create,
    Label,
    Plan,
    Reader,
    rebased,
    status_plan,
)
from snapshot_operator.core.restore import RESTORED, restore_for, source_of
from snapshot_operator.kube.seccomp import label_of
from snapshot_shared.errors import Failure
from snapshot_shared.transitions import Restore

DEPRECATED = "DeprecatedFieldSet"
"""Condition of a DynamoCheckpoint: it sets fields that are read for its sake, and not honoured."""

LONG_WAITS = ("WaitingForSnapshot", "NoAgentOnNode")
"""Why a restore may wait for hours. Its pod says so, for it looks like one that does not start."""


class PodView(NamedTuple):
    """What a decision about a pod reads: the restore that it asks for, if there is one."""

    pod: Pod
    restore: SnapshotRestore | None = None


def gather(reader: Reader, pod: Pod) -> PodView:
    """Read what a decision about a pod depends on."""
    if not source_of(pod):
        return PodView(pod)
    found = reader.get("SnapshotRestore", pod.metadata.namespace, restore_name(pod.metadata.uid))
    return PodView(pod, found if isinstance(found, SnapshotRestore) else None)


def reconcile(view: PodView, now: float) -> Plan:
    """Return the next step for a pod that asks for a restore. Same input, same plan."""
    pod, restore = view.pod, view.restore
    if not source_of(pod) or pod.metadata.deletion_timestamp:
        return NOTHING
    if restore is None:
        said = condition(pod.status.conditions, RESTORED)
        # A restore that someone has deleted is not done again: its worker may serve by now.
        has_begun = said is not None and said.reason not in (REFUSED, *LONG_WAITS)
        is_over = pod.status.phase in FINISHED or has_begun
        made = Create(
            restore_for(pod),
            refused=lambda found: _unrestored(pod, found, now),
            waits=lambda found: _unrestored(pod, replace(found, reason=REFUSED), now),
        )
        return NOTHING if is_over else Plan((made,))
    match restore.status.state:
        case Restore.RESTORED:
            return _with_restored(pod, "True", "RestoreSucceeded", "", now)
        case Restore.FAILED:
            failure = restore.status.failure or Failure(reason="RestoreFailed", message="")
            return _with_restored(pod, "False", failure.reason, failure.message, now)
        case _:
            ready = condition(restore.status.conditions, "Ready")
            said = condition(pod.status.conditions, RESTORED)
            # A short wait is not worth a write, unless the pod still names a long one.
            is_new = said is None and ready is not None and _is_long(ready.reason, restore)
            is_open = said is not None and (said.status == "Unknown" or said.reason == REFUSED)
            if ready is None or not (is_new or is_open):
                return NOTHING
            # False is the end of a restore.
            return _with_restored(pod, "Unknown", ready.reason, ready.message, now)


def _is_long(reason: str, restore: SnapshotRestore) -> bool:
    """Return whether a restore may wait long: a source that it has named registers it at once."""
    is_named = reason == "WaitingForSnapshot" and restore.status.content_name
    return reason in LONG_WAITS and not is_named


def _with_restored(pod: Pod, truth: Truth, reason: str, message: str, now: float) -> Plan:
    """Set the condition of a pod that says how its restore is, unless it says so already."""
    found = condition(pod.status.conditions, RESTORED)
    if found is not None and (found.status, found.reason) == (truth, reason):
        return NOTHING
    rows = conditions.with_truth(pod.status.conditions, pod, now, RESTORED, truth, reason, message)
    return status_plan(pod, replace(pod, status=replace(pod.status, conditions=rows)))


def _unrestored(pod: Pod, failure: Failure, now: float) -> Plan:
    """Say at the pod that it has no restore, for an annotation that is no name or for a quota."""
    return _with_restored(pod, "False", failure.reason, failure.message, now)


def label_node(node: Node, _now: float) -> Plan:
    """Return what makes the labels of a Node agree with what its agent says.

    They are put on with the agent's presence and taken off when the node is lost; a node that is
    silent for less keeps them.
    """
    wanted: dict[str, str | None] = {}
    if is_true(node.status.conditions, "Ready"):
        profile = label_of(node.status.seccomp_profile) or None
        wanted = {AGENT_LABEL: "true", SECCOMP_LABEL: profile}
    elif is_true(node.status.conditions, "Lost"):
        wanted = {AGENT_LABEL: None, SECCOMP_LABEL: None}
    labels = node.metadata.labels
    changed = (key for key, value in wanted.items() if labels.get(key) != value)
    return Plan(tuple(Label(node, key, wanted[key]) for key in changed))


def deprecated(value: DynamoCheckpoint) -> list[str]:
    """Return the paths of the fields of the originals that are set and not honoured."""
    job, status = value.spec.job, value.status
    found = {
        "spec.job.backoffLimit": job.backoff_limit > 0,
        "spec.job.ttlSecondsAfterFinished": job.ttl_seconds_after_finished is not None,
        "status.location": bool(status.location),
        "status.storageType": status.storage_type is not None,
    }
    return [path for path, is_set in found.items() if is_set]


def reconcile_checkpoint(view: CheckpointView, now: float) -> Plan:
    """Return the next step of a checkpoint; its conditions name deprecated fields that are set."""
    value = view.checkpoint
    paths = deprecated(value)
    if not paths or value.metadata.deletion_timestamp:
        return checkpoint.reconcile(view, now)
    # Its own spec is immutable, and what it does is right without them.
    them = "them" if paths[1:] else "it"
    message = f"not honoured: {', '.join(paths)}. Next: leave {them} out of the next checkpoint"
    row = (DEPRECATED, True, "DeprecatedFieldSet", message)
    rows = conditions.with_conditions(value.status.conditions, value, now, row)
    marked = replace(value, status=replace(value.status, conditions=rows))
    if marked == value:
        return checkpoint.reconcile(view, now)
    return rebased(checkpoint.reconcile(view._replace(checkpoint=marked), now), value, marked)


_CORE = tuple(found for found in controllers.CONTROLLERS if found.kind != "DynamoCheckpoint")

CONTROLLERS = (
    Controller("DynamoCheckpoint", checkpoint.gather, reconcile_checkpoint),
    *_CORE,
    Controller("Pod", gather, reconcile),
    Controller("Node", lambda _, node: node, label_node),
)

INDEXES = controllers.INDEXES
