"""What is kept of the objects of Kubernetes, as its API server sends them."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from snapshot_operator.kube.store import RESOURCES
from snapshot_shared.kube_client import path_kind
from snapshot_shared.objects.kubernetes import JobSpec
from tests.support.objects import checkpoint_document
from tests.unit.tables import each

POD, JOB, NODE, CHECKPOINT = (
    RESOURCES[kind].value_in for kind in ("Pod", "Job", "Node", "DynamoCheckpoint")
)

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


def pod(restarts: str = "Never", **status: Any) -> Any:
    resources = {"limits": {"cpu": "500m", "nvidia.com/gpu": "2"}}
    container = {"name": "main", "image": "i", "resources": resources, "env": [{"name": "A"}]}
    spec = {"containers": [container], "nodeName": "node-1", "restartPolicy": restarts}
    return POD(encoded(spec=spec, status=status))


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
    ("volumes", "started", "known"),
    [
        ([], None, "none"),
        (["gms-sockets"], None, "starting"),
        (["gms-sockets"], False, "starting"),
        (["models", "gms-sockets"], True, "ready"),
    ],
)
def test_a_pod_has_a_memory_server_from_the_start_of_its_init_container(
    volumes: list[str], started: bool | None, known: str
) -> None:
    status = {"initContainerStatuses": [{"name": "gms-server", "started": started}]}
    spec = {"containers": [], "volumes": [{"name": name} for name in volumes]}
    assert POD(encoded(spec=spec, status=status)).status.memory_server == known


@pytest.mark.parametrize(
    ("state", "known"),
    [
        (
            {"running": {"startedAt": "2026-01-01T00:00:00Z"}},
            ("running", None, "2026-01-01T00:00:00Z"),
        ),
        ({"running": {"startedAt": None}}, ("running", None, "")),
        ({"waiting": {"reason": "ContainerCreating"}}, ("waiting", None, "")),
        ({"terminated": {"exitCode": 137, "reason": "OOMKilled"}}, ("terminated", 137, "")),
        ({}, ("waiting", None, "")),
    ],
)
def test_the_state_of_a_container_is_one_of_three(state: Any, known: Any) -> None:
    (found,) = pod(containerStatuses=[{"name": "main", "state": state}]).status.container_statuses
    assert (found.state, found.exit_code, found.started_at) == known


@pytest.mark.parametrize(
    ("restarts", "code", "phase", "state"),
    [
        ("Never", 1, "Running", "terminated"),
        ("OnFailure", 1, "Running", "waiting"),
        ("OnFailure", 0, "Running", "terminated"),
        ("Always", 0, "Running", "waiting"),
        ("Always", 1, "Failed", "terminated"),
    ],
)
def test_a_container_that_its_kubelet_starts_again_has_not_ended_for_good(
    restarts: str, code: int, phase: str, state: str
) -> None:
    rows = [{"name": "main", "state": {"terminated": {"exitCode": code}}}]
    (found,) = pod(restarts, phase=phase, containerStatuses=rows).status.container_statuses
    assert found.state == state


def test_a_container_that_runs_names_the_image_that_it_runs() -> None:
    row = {"name": "main", "state": {"running": {}}, "imageID": "llm@sha256:a"}
    (found,) = pod(containerStatuses=[row]).status.container_statuses
    assert found.image_id == "llm@sha256:a"


@each("rows", ["containerStatuses", "initContainerStatuses"])
@each(
    ("waiting", "said"),
    [
        (
            {"reason": "CreateContainerConfigError", "message": 'secret "llm" not found'},
            ("PodTemplateInvalid", 'container main: secret "llm" not found'),
        ),
        ({"reason": "ErrImagePull"}, ("ImagePullBackOff", "container main: ErrImagePull")),
        ({"reason": "ContainerCreating"}, ("", "")),
    ],
)
def test_a_pod_whose_container_cannot_start_says_why(
    rows: str, waiting: dict[str, str], said: tuple[str, str]
) -> None:
    status = pod(**{rows: [{"name": "main", "state": {"waiting": waiting}}]}).status
    assert (status.reason, status.message) == said


STANDBY = "SNAPSHOT_RESTORE_STANDBY"


@pytest.mark.parametrize(
    ("annotations", "env", "cold"),
    [
        ({"nvidia.com/restore-from": "llm"}, [{"name": STANDBY, "value": "1"}], []),
        ({"nvidia.com/restore-from": "llm"}, [{"name": STANDBY, "value": "0"}], ["main"]),
        (
            {"nvidia.com/restore-from": "llm"},
            [{"name": STANDBY, "value": "1"}, {"name": STANDBY, "valueFrom": {"fieldRef": {}}}],
            ["main"],
        ),
        ({"nvidia.com/restore-from": "llm"}, None, ["main"]),
        ({}, None, []),
    ],
)
def test_a_container_of_a_pod_to_restore_is_cold_unless_its_environment_says_standby(
    annotations: dict[str, str], env: Any, cold: list[str]
) -> None:
    container = {"name": "main", **({} if env is None else {"env": env})}
    document = {
        "metadata": META | {"annotations": annotations},
        "spec": {"containers": [container]},
    }
    assert POD(json.dumps(document).encode()).status.cold_containers == cold


@pytest.mark.parametrize(
    ("command", "workers"),
    [
        (["/snapback/snapback-init"], ["other"]),
        (["/snapback/snapback-init", "--", "serve"], ["other"]),
        (["serve", "/snapback/snapback-init"], ["main", "other"]),
        (["serve"], ["main", "other"]),
        (None, ["main", "other"]),
    ],
)
def test_a_container_of_a_pod_to_restore_runs_a_worker_unless_it_is_a_placeholder(
    command: Any, workers: list[str]
) -> None:
    main = {"name": "main", **({} if command is None else {"command": command})}
    document = {
        "metadata": META | {"annotations": {"nvidia.com/restore-from": "llm"}},
        "spec": {"containers": [main, {"name": "other"}]},
    }
    assert POD(json.dumps(document).encode()).status.worker_containers == workers
    document["metadata"] = META | {"annotations": {}}
    assert POD(json.dumps(document).encode()).status.worker_containers == []


def test_a_job_has_its_counts_and_conditions() -> None:
    row = {"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}
    spec = {"template": {"spec": {"containers": [{"name": "main", "image": "i"}]}}}
    found = JOB(encoded(spec=spec, status={"failed": 3, "conditions": [row]}))
    assert found.status.failed == 3
    assert found.status.conditions[0].reason == "BackoffLimitExceeded"
    # As snapshotctl reads it.
    assert msgspec.json.decode(msgspec.json.encode(found.spec), type=JobSpec) == found.spec


def test_a_node_is_cordoned_or_not() -> None:
    assert NODE(encoded(spec={"unschedulable": True})).spec.unschedulable
    assert not NODE(encoded(spec={})).spec.unschedulable


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


def checkpoint(template: Any, **meta: Any) -> Any:
    document = checkpoint_document()
    document["metadata"] = {**META, **meta}
    document["spec"]["job"]["podTemplateSpec"] = template
    return CHECKPOINT(json.dumps(document).encode())


def template(**container: Any) -> dict[str, Any]:
    main = {"name": "main", "env": [{"name": "a.b"}], **container}
    return {"spec": {"containers": [main], "restartPolicy": "Always", "hostNetwork": True}}


def test_a_checkpoint_is_decoded_whatever_kubernetes_allows_in_its_template() -> None:
    long = {"kubectl.kubernetes.io/last-applied-configuration": "x" * 100_000}
    found = checkpoint(template(), annotations=long)
    assert [container.name for container in found.spec.job.pod_template_spec.spec.containers] == [
        "main"
    ]
    assert found.metadata.annotations == {}


def test_templates_that_differ_in_a_field_that_is_not_kept_differ_here_too() -> None:
    one, other = checkpoint(template(image="a")), checkpoint(template(image="a", tty=True))
    assert one.spec.job != other.spec.job
    assert one.spec == checkpoint(template(image="a")).spec


@each(
    ("resources", "gpus"),
    [
        ({"limits": {"cpu": 0.5, "memory": 2e9, "nvidia.com/gpu": 1}}, {"nvidia.com/gpu": 1}),
        ({"limits": {"nvidia.com/gpu": 2.0}}, {"nvidia.com/gpu": 2}),
        ({"limits": {"nvidia.com/gpu": 0.5}}, {}),
        ({"limits": {"nvidia.com/gpu": None}}, {}),
        ({"limits": None}, {}),
        (None, {}),
    ],
)
def test_a_checkpoint_is_decoded_whatever_way_its_quantities_are_written(
    resources: Any, gpus: dict[str, Any]
) -> None:
    found = checkpoint(template(resources=resources, image=None))
    (container,) = found.spec.job.pod_template_spec.spec.containers
    assert (container.resources.limits, container.image) == (gpus, "")


@pytest.mark.parametrize("policy", ["Sometimes", None])
def test_a_checkpoint_is_decoded_whatever_its_template_says_of_restarts(policy: Any) -> None:
    # Its Job has a policy of its own.
    found = checkpoint({"spec": {**template()["spec"], "restartPolicy": policy}})
    assert found.spec.job.pod_template_spec.spec.containers
