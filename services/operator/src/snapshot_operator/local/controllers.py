"""The controllers of the local cluster: what Kubernetes does where there is one."""

from __future__ import annotations

from snapshot_api.facts import FINISHED, Pod
from snapshot_operator.core import controllers
from snapshot_operator.core.controllers import Controller, Index
from snapshot_operator.local import jobs, pods
from snapshot_operator.local.scheduler import shape


def _unplaced(pod: Pod) -> list[str]:
    is_over = pod.status.phase in FINISHED or pod.metadata.deletion_timestamp
    return [] if pod.status.node_name or is_over else [shape(pod)]


def _holders(pod: Pod) -> list[str]:
    return [pod.status.node_name] if pods.holds_devices(pod) else []


CONTROLLERS = (
    *controllers.CONTROLLERS,
    Controller("Job", jobs.gather, jobs.reconcile),
    Controller("Pod", pods.gather, pods.reconcile, claims=pods.places),
)

INDEXES = (
    *controllers.INDEXES,
    Index("holders", "Pod", _holders),
    Index("unplaced", "Pod", _unplaced, is_queue=True),
)
