"""What is kept of the objects of Kubernetes, as its API server sends them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snapshot_operator.kube.client import path_kind
from snapshot_operator.kube.wire import job_in, node_in, pod_in

META = {
    "name": "worker-x",
    "namespace": "team",
    "uid": "0000",
    "resourceVersion": "7",
    "labels": {"app": "x", "nvidia.com/snapshot-checkpoint-id": "abc"},
    "annotations": {"kubectl.kubernetes.io/last": "x", "nvidia.com/restore-from": "llm"},
    "ownerReferences": [{"apiVersion": "batch/v1", "kind": "Job", "name": "llm", "uid": "j"}],
    "managedFields": [{"manager": "kubelet"}],
}


def encoded(**document: Any) -> bytes:
    return json.dumps({"metadata": META, **document}).encode()


def pod(**status: Any) -> Any:
    resources = {"limits": {"cpu": "500m", "nvidia.com/gpu": "2"}}
    container = {"name": "main", "image": "i", "resources": resources, "env": [{"name": "A"}]}
    spec = {"containers": [container], "nodeName": "node-1", "restartPolicy": "Always"}
    return pod_in(encoded(spec=spec, status=status))


def test_of_labels_and_annotations_only_ours_are_kept() -> None:
    meta = pod().metadata
    assert meta.labels == {"nvidia.com/snapshot-checkpoint-id": "abc"}
    assert meta.annotations == {"nvidia.com/restore-from": "llm"}
    assert meta.owner_references[0].uid == "j"


def test_a_pod_is_its_node_its_containers_and_the_devices_that_they_ask_for() -> None:
    found = pod(phase="Running")
    assert found.status.node_name == "node-1"
    (container,) = found.spec.containers
    assert container.resources.limits == {"nvidia.com/gpu": "2"}
    assert found.status.phase == "Running"


@pytest.mark.parametrize(
    ("state", "known"),
    [
        ({"running": {"startedAt": "2026-01-01T00:00:00Z"}}, ("running", None)),
        ({"waiting": {"reason": "ContainerCreating"}}, ("waiting", None)),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, ("terminated", 137)),
        ({}, ("waiting", None)),
    ],
)
def test_the_state_of_a_container_is_one_of_three(state: Any, known: Any) -> None:
    (found,) = pod(containerStatuses=[{"name": "main", "state": state}]).status.container_statuses
    assert (found.state, found.exit_code) == known


def test_a_job_has_its_counts_and_conditions() -> None:
    row = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    found = job_in(encoded(status={"failed": 3, "conditions": [row]}))
    assert found.status.failed == 3
    assert found.status.conditions[0].reason == "BackoffLimitExceeded"


def test_a_node_is_cordoned_or_not() -> None:
    assert node_in(encoded(spec={"unschedulable": True})).spec.unschedulable
    assert not node_in(encoded(spec={})).spec.unschedulable


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/api/v1/pods", "pods"),
        ("/api/v1/namespaces/a/pods/b/status", "pods/status"),
        ("/api/v1/namespaces/a", "namespaces"),
        ("/apis/nvidia.com/v1alpha1/snapshotcontents/x/status", "snapshotcontents/status"),
        ("/apis/nvidia.com/v1alpha1/namespaces/a/snapshots", "snapshots"),
    ],
)
def test_a_request_is_counted_by_what_it_is_about(path: str, kind: str) -> None:
    assert path_kind(path) == kind
