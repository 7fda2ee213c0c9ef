"""Which pods a drain captures, and what goes on in their place."""

from __future__ import annotations

from typing import Any

from snapshot_api.facts import HOSTNAME_LABEL, Container, Pod
from snapshot_api.manifests import parse
from snapshot_api.meta import OwnerReference
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.well_known import CAPTURE_ON_DRAIN, RESTORE_DRIVER, RESTORE_FROM
from snapshot_shared.ids import derived_uid
from snapshotctl.domain import draining
from tests.support import builders

UID = derived_uid("worker")
LABELLED = {CAPTURE_ON_DRAIN: "true", "app": "llm"}


def worker(
    name: str = "worker",
    *,
    labels: dict[str, str] = LABELLED,
    annotations: dict[str, str] | None = None,
    node: str = "node-1",
    phase: Any = "Running",
    containers: tuple[str, ...] = ("main",),
    **meta: Any,
) -> Pod:
    given = {"uid": UID, "labels": labels, "annotations": annotations or {}, **meta}
    pod = builders.with_meta(builders.pod(name, node_name=node, phase=phase), **given)
    named = [Container(name=each, command=["x"]) for each in containers]
    return builders.with_spec(pod, containers=named)


def owned(kind: str, **more: bool) -> dict[str, Any]:
    fields: dict[str, Any] = {"api_version": "apps/v1", "name": "o", "controller": True, **more}
    return {"owner_references": [OwnerReference(kind=kind, uid=UID, **fields)]}


def judged(*pods: Pod) -> list[tuple[str, str]]:
    return [(each.pod.metadata.name, each.why) for each in draining.candidates(pods, "node-1")]


def test_a_pod_of_the_node_is_captured_if_its_label_says_so_and_it_has_not_ended() -> None:
    other = worker("b", labels={CAPTURE_ON_DRAIN: "false"})
    assert judged(other, worker("a"), worker("c", node="node-2")) == [
        ("a", ""),
        ("b", "it has no label nvidia.com/capture-on-drain=true"),
    ]
    going = worker(deletion_timestamp="2026-01-01T00:00:00Z")
    of_node = [worker(labels={}, **owned(kind)) for kind in ("DaemonSet", "Node")]
    assert judged(going, *of_node, worker(labels={}, phase="Succeeded")) == []
    # Its own capture may have ended one that is labelled.
    assert judged(worker(phase="Failed")) == [("worker", "")]


def test_a_pod_with_a_controller_is_left_since_that_would_start_it_cold() -> None:
    [(_, why)] = judged(worker(**owned("ReplicaSet")))
    assert "ReplicaSet o controls it" in why
    assert judged(worker(**owned("Workflow", controller=False))) == [("worker", "")]


def test_of_several_containers_the_annotation_says_which_is_captured() -> None:
    both = ("main", "side")
    [(_, why)] = judged(worker(containers=both))
    assert "which container?" in why
    named = worker(containers=both, annotations={"nvidia.com/restore-container": "side"})
    assert judged(named) == [("worker", "")]
    assert draining.target_of(named) == "side"


def test_the_snapshot_ends_the_pod_and_is_one_that_the_operator_takes() -> None:
    pod = worker(annotations={RESTORE_DRIVER: "criu"})
    found = parse(draining.snapshot_of(pod, 90).value)
    assert isinstance(found, Snapshot)
    spec = found.spec
    assert (spec.source_policy, spec.driver, spec.deadline_seconds) == ("Terminate", "criu", 90)
    assert spec.source.pod_ref is not None
    assert spec.source.pod_ref.uid == UID


def test_the_names_are_the_same_for_one_pod_and_do_not_grow_from_drain_to_drain() -> None:
    first = draining.name_of(worker())
    assert first == draining.name_of(worker())
    moved = worker(first, annotations={RESTORE_FROM: first}, uid=derived_uid("moved"))
    second = draining.name_of(moved)
    assert second != first
    assert len(second) == len(first)
    assert second.startswith("worker-")
    assert len(draining.name_of(worker("w" * 63))) == 63


def test_what_is_restored_is_the_whole_pod_free_of_its_node_and_of_its_past() -> None:
    pod = worker(annotations={RESTORE_DRIVER: "criu"})
    selector = {HOSTNAME_LABEL: "node-1", "zone": "b"}
    manifest = {
        "metadata": {
            "name": "worker",
            "labels": LABELLED,
            "annotations": {
                "mine": "1",
                RESTORE_DRIVER: "criu",
                "nvidia.com/restore-from-uid": "old",
                "kubectl.kubernetes.io/last-applied-configuration": "{}",
            },
            "ownerReferences": [],
            "resourceVersion": "7",
        },
        "spec": {"nodeName": "node-1", "nodeSelector": selector, "tolerations": [{"key": "a"}]},
        "status": {"phase": "Running"},
    }
    name = draining.name_of(pod)
    value = draining.restored(pod, manifest).value
    assert value["metadata"] == {
        "name": name,
        "namespace": "default",
        "labels": LABELLED,
        "annotations": {"mine": "1", RESTORE_FROM: name, RESTORE_DRIVER: "criu"},
    }
    assert value["spec"] == {"nodeSelector": {"zone": "b"}, "tolerations": [{"key": "a"}]}
    assert selector[HOSTNAME_LABEL] == "node-1"
