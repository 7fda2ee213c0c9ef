"""The seccomp profile of workers for CRIU: which pods get it, and on which nodes they may run."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import msgspec
import pytest

from snapshot_api.facts import SECCOMP_LABEL, Node, Pod
from snapshot_api.meta import ObjectMeta
from snapshot_operator.core.checkpoint import _job
from snapshot_operator.kube.restoring import standby_patch
from snapshot_operator.kube.seccomp import offered
from snapshot_operator.kube.shaping import job_manifest
from snapshot_operator.kube.store import RESOURCES
from snapshot_shared.orders import ProfileName
from tests.support.json_patch import applied
from tests.support.objects import checkpoint, checkpoint_document
from tests.unit.tables import each

PROFILE = "profiles/block-iouring.json"
OURS = {"type": "Localhost", "localhostProfile": PROFILE}
OWN = {"seccompProfile": {"type": "RuntimeDefault"}}
ROW = {"key": SECCOMP_LABEL, "operator": "In", "values": ["profiles_block-iouring.json"]}


def of_capture(driver: str, pod: Any = None, main: Any = None, profile: str = PROFILE) -> Any:
    """Return the spec of the pod of a checkpoint's Job."""
    document = checkpoint_document(driver=driver)
    spec = document["spec"]["job"]["podTemplateSpec"]["spec"]
    spec |= pod or {}
    spec["containers"][0] |= main or {}
    manifest = job_manifest(_job(checkpoint(driver=driver)), document, profile=profile)
    return manifest["spec"]["template"]["spec"]


def affinity(spec: Any) -> list[Any]:
    required = spec["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    [term] = required["nodeSelectorTerms"]
    rows: list[Any] = term["matchExpressions"]
    return rows


@pytest.mark.parametrize("driver", ["criu", "criu+cuda"])
def test_a_worker_of_criu_that_names_no_profile_gets_one_and_nodes_that_have_it(
    driver: str,
) -> None:
    spec = of_capture(driver, main={"securityContext": {"runAsUser": 7}})
    assert spec["containers"][0]["securityContext"] == {"runAsUser": 7, "seccompProfile": OURS}
    assert ROW in affinity(spec)
    assert "securityContext" not in spec


@each(
    ("driver", "pod", "main", "profile"),
    [
        ("cooperative", None, None, PROFILE),
        ("criu", {"securityContext": OWN}, None, PROFILE),
        ("criu", None, {"securityContext": OWN}, PROFILE),
        ("criu", None, {"securityContext": {"privileged": True}}, PROFILE),
        ("criu", None, None, ""),
    ],
)
def test_other_workers_keep_what_they_have(driver: str, pod: Any, main: Any, profile: str) -> None:
    spec = of_capture(driver, copy.deepcopy(pod), copy.deepcopy(main), profile)
    context = (main or {}).get("securityContext")
    assert spec["containers"][0].get("securityContext") == context
    assert ROW not in affinity(spec)


def node(name: str, label: str = "") -> Node:
    labels = {SECCOMP_LABEL: label} if label else {}
    return Node(metadata=ObjectMeta(name=name, uid=name, labels=labels))


NODES = [node("node-1"), node("node-2", "profiles_block-iouring.json"), node("node-3", "other")]


@each(
    ("spec", "profile", "found"),
    [
        ({}, PROFILE, PROFILE),
        ({}, "other", "other"),
        ({}, "none.json", ""),
        ({}, "", ""),
        ({"nodeName": "node-2"}, PROFILE, PROFILE),
        ({"nodeName": "node-1"}, PROFILE, ""),
    ],
)
def test_a_profile_is_given_if_a_node_for_the_pod_has_it(
    spec: Any, profile: str, found: str
) -> None:
    assert offered(NODES, profile, spec) == found


def waiting(driver: str, profile: str, **context: Any) -> tuple[Any, list[Any]]:
    """Return a pod that waits for its restore, and what a second call would change."""
    main = {"name": "main", "image": "m", **context}
    meta = {"annotations": {"nvidia.com/restore-from": "llm"}}
    pod = {"metadata": meta, "spec": {"containers": [main], "volumes": []}}
    once = applied(pod, standby_patch(pod, driver=driver, profile=profile))
    return once["spec"], standby_patch(once, driver=driver, profile=profile)


def test_a_pod_that_waits_for_a_process_with_a_filter_gets_the_profile_once() -> None:
    spec, again = waiting("criu", PROFILE)
    assert spec["containers"][0]["securityContext"]["seccompProfile"] == OURS
    assert ROW in affinity(spec)
    assert again == []


@each(
    ("driver", "profile", "context"),
    [
        ("cooperative", PROFILE, {}),
        ("criu", "", {}),
        ("criu", PROFILE, {"securityContext": OWN}),
    ],
)
def test_other_pods_that_wait_keep_what_they_have(driver: str, profile: str, context: Any) -> None:
    spec, again = waiting(driver, profile, **copy.deepcopy(context))
    assert spec["containers"][0].get("securityContext") == context.get("securityContext")
    assert ROW not in affinity(spec)
    assert again == []


@each(
    ("pod", "main", "found"),
    [
        ({}, {}, {}),
        ({"seccompProfile": {"type": "Unconfined"}}, {}, {"main": "Unconfined"}),
        ({"seccompProfile": {"type": "Unconfined"}}, OWN, {"main": "RuntimeDefault"}),
        ({}, {"seccompProfile": OURS}, {"main": f"Localhost/{PROFILE}"}),
        (OWN, {"privileged": True}, {}),
        (None, None, {}),
    ],
)
def test_a_pod_is_known_with_the_profiles_that_its_spec_names(
    pod: Any, main: Any, found: dict[str, str]
) -> None:
    spec = {"securityContext": pod, "containers": [{"name": "main", "securityContext": main}]}
    meta = {"name": "a", "namespace": "b", "uid": "c", "resourceVersion": "1"}
    value = RESOURCES["Pod"].value_in(msgspec.json.encode({"metadata": meta, "spec": spec}))
    assert isinstance(value, Pod)
    assert value.status.seccomp_profiles == found


@each(
    ("name", "is_one"),
    [
        ("", True),
        (PROFILE, True),
        ("a", True),
        ("../a", False),
        ("a/../b", False),
        ("/a", False),
        ("a/", False),
        ("a//b", False),
        ("a_b", False),
        ("a" * 64, False),
        ("a\n", False),
    ],
)
def test_the_name_of_a_profile_stays_below_its_folder_and_is_a_label(
    name: str, is_one: bool
) -> None:
    with contextlib.nullcontext() if is_one else pytest.raises(msgspec.ValidationError):
        msgspec.convert(name, ProfileName)
