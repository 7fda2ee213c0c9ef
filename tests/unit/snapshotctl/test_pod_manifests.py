"""From a pod to the objects that capture and restore it."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.facts import HOSTNAME_LABEL
from snapshot_api.identity import identity_hash
from snapshot_api.manifests import parse
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.well_known import RESTORE_FROM
from snapshot_shared.errors import InvalidManifest, NotEligible, SnapbackError
from snapshot_shared.ids import derived_uid
from snapshot_shared.orders import Driver
from snapshot_shared.volumes import SAVER
from snapshotctl.domain import pod_manifests
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.pod_manifests import Source
from tests.support import builders
from tests.support.builders import with_spec
from tests.support.objects import checkpoint_document
from tests.unit.tables import each

POD: dict[str, Any] = {
    "kind": "Pod",
    "metadata": {"name": "w", "labels": {"a": "b"}},
    "spec": {"containers": [{"name": "main", "command": ["x"]}]},
}
NOTHING = Source()
ROWS: list[Any] = [{"name": "KEY"}, {"name": "NODE", "valueFrom": {"fieldRef": {}}}]


def _manifest(**changes: Any) -> pod_manifests.PodManifest:
    return pod_manifests.pod_manifest([Document("f:1", {**POD, **changes})])


def _checkpoint() -> DynamoCheckpoint:
    document = checkpoint_document("llm")
    pod = document["spec"]["job"]["podTemplateSpec"]["spec"]
    pod |= {"nodeSelector": {HOSTNAME_LABEL: "node-1", "zone": "b"}, "nodeName": "node-1"}
    document["spec"]["job"]["targetContainerName"] = "main"
    value = parse(document)
    assert isinstance(value, DynamoCheckpoint)
    return value


def _restored(name: str = "llm", captured: Source = NOTHING, **more: Any) -> Any:
    given = {
        "manifest": None,
        "namespace": "default",
        "suffix": "restored-1",
        "target": None,
        "variables": {},
    }
    return pod_manifests.restored(name, captured, **{**given, **more}).value


@each(
    ("documents", "problem"),
    [
        ([POD, POD], "2 documents"),
        ([{**POD, "kind": "Job"}], "'Job' is no Pod"),
        ([["no", "object"]], "'list' is no Pod"),
        *(([{**POD, "metadata": meta}], "metadata.name") for meta in ({}, None)),
        *(
            ([{**POD, "spec": spec}], "spec.containers")
            for spec in ({}, {"containers": [{"image": "x"}]}, {"containers": "main"})
        ),
    ],
)
def test_a_manifest_that_is_not_one_pod_is_refused_with_the_field(
    documents: list[Any], problem: str
) -> None:
    with pytest.raises(InvalidManifest, match=problem):
        pod_manifests.pod_manifest([Document("f:1", value) for value in documents])


@each(
    ("wanted", "written", "namespace"),
    [("a", "b", "a"), (None, "b", "b"), (None, None, "default"), ("a", None, "a")],
)
def test_the_command_line_beats_the_manifest(
    wanted: str | None, written: str | None, namespace: str
) -> None:
    meta = {"name": "w"} | ({"namespace": written} if written else {})
    assert pod_manifests.namespace_of(_manifest(metadata=meta), wanted, "default") == namespace


@each(
    ("command", "args", "found", "problem"),
    [
        (["python3", "-m", "dynamo.vllm"], [], "vllm", ""),
        (["python3"], ["-m", "dynamo.sglang", "--model", "x"], "sglang", ""),
        (["sh", "-c", "exec python3 -m dynamo.trtllm"], None, "trtllm", ""),
        (["sh", "-c", "python3 -m dynamo.vllm && python3 -m dynamo.vllm"], None, "vllm", ""),
        (["python3", "worker.py"], None, "", "main of pod w runs no module dynamo"),
        (
            ["sh", "-c", "python3 -m dynamo.vllm; python3 -m dynamo.sglang"],
            None,
            "",
            "sglang and vllm",
        ),
        (7, None, "", "runs no module"),
        (None, None, "", "runs no module"),
    ],
)
def test_the_framework_is_that_of_the_command_of_the_captured_container_or_of_the_option(
    command: Any, args: list[str] | None, found: str, problem: str
) -> None:
    other = {"name": "other", "command": ["python3", "-m", "dynamo.frontend", "dynamo.sglang"]}
    main = {"name": "main", "command": command, "args": args}
    manifest = _manifest(spec={"containers": [other, main]})
    assert pod_manifests.framework(manifest, "main", "vllm") == "vllm"
    if found:
        assert pod_manifests.framework(manifest, "main", None) == found
        return
    with pytest.raises(WrongArguments, match=problem) as caught:
        pod_manifests.framework(manifest, "main", None)
    assert caught.value.next_step == "name one of vllm, sglang, trtllm: --framework vllm"


@each(
    ("resources", "memory"),
    [
        ({"claims": [{"name": "snapback-devices"}]}, {"enabled": True}),
        ({"claims": [{"name": "gpu"}]}, None),
        ({"claims": "snapback-devices"}, None),
        (None, None),
    ],
)
def test_a_worker_whose_claim_has_the_name_of_a_memory_servers_is_captured_with_one(
    resources: Any, memory: Any
) -> None:
    pod = _manifest(spec={"containers": [{"name": "main", "resources": resources}]})
    value = pod_manifests.checkpoint_of(pod, "main", "vllm", None, "ns").value
    assert value["spec"].get("gpuMemoryService") == memory


def test_a_running_pod_is_captured_by_its_uid_under_a_name_that_follows_from_it() -> None:
    pod = builders.pod("w", phase="Running")
    first, again = (pod_manifests.snapshot_of(pod, "main", None).value for _ in range(2))
    assert first == again
    assert first["spec"]["source"]["podRef"]["uid"] == pod.metadata.uid
    newer = replace(pod, metadata=replace(pod.metadata, uid=derived_uid("pod", "other")))
    assert pod_manifests.snapshot_of(newer, "main", None).value["metadata"] != first["metadata"]
    long = builders.pod("x" * 63, phase="Running")
    parse(pod_manifests.snapshot_of(long, "main", None).value)
    for phase in ("Succeeded", "Failed"):
        with pytest.raises(NotEligible, match="has ended"):
            pod_manifests.snapshot_of(builders.pod(phase=phase), "main", None)


def test_the_only_container_need_not_be_named_and_one_of_several_has_to() -> None:
    assert pod_manifests.container(["a"], None, "pod x") == "a"
    assert pod_manifests.container(["a", "b"], "b", "pod x") == "b"
    with pytest.raises(WrongArguments, match="pod x has a, b"):
        pod_manifests.container(["a", "b"], None, "pod x")
    with pytest.raises(WrongArguments, match="no container 'c'"):
        pod_manifests.container(["a", "b"], "c", "pod x")


def test_a_checkpoint_of_a_manifest_is_one_that_the_operator_takes() -> None:
    value = pod_manifests.checkpoint_of(_manifest(), "main", "sglang", None, "ns").value
    found = parse(value)
    assert isinstance(found, DynamoCheckpoint)
    assert (found.metadata.name, found.metadata.namespace) == ("w", "ns")
    assert found.spec.job.pod_template_spec.metadata.labels == {"a": "b"}
    assert found.spec.job.source_policy == "Terminate"
    assert found.spec.identity.backend_framework == "sglang"


def test_a_checkpoint_of_a_manifest_under_another_name_shares_nothing_with_the_first() -> None:
    found = [
        parse(pod_manifests.checkpoint_of(_manifest(), "main", "vllm", name, "ns").value)
        for name in (None, "mine", "yours")
    ]
    assert [value.metadata.name for value in found] == ["w", "mine", "yours"]
    identities = {
        identity_hash(value.spec.identity) for value in found if isinstance(value, DynamoCheckpoint)
    }
    assert len(identities) == 3


def test_a_restored_pod_is_as_the_captured_one_but_bound_to_no_node() -> None:
    checkpoint = _checkpoint()
    spec = msgspec.to_builtins(checkpoint.spec.job.pod_template_spec.spec)
    value = _restored(captured=Source(checkpoint, spec=spec))
    parse(value)
    assert value["metadata"]["name"] == "llm-restored-1"
    assert value["metadata"]["annotations"] == {RESTORE_FROM: "llm"}
    assert "nodeName" not in value["spec"]
    assert value["spec"]["nodeSelector"] == {"zone": "b"}
    assert spec["nodeName"] == "node-1"
    # What a pod has got from others on its way is not what the next one is created with.
    spec |= {
        "ephemeralContainers": [{"name": "debugger"}],
        "initContainers": [{"name": "first"}, {"name": SAVER}],
    }
    found = _restored("snap", Source(snapshot=builders.snapshot(), spec=spec))["spec"]
    assert "ephemeralContainers" not in found
    assert found["initContainers"] == [{"name": "first"}]


@pytest.mark.parametrize("driver", ["criu", "criu+cuda", "cooperative", "respawn"])
def test_a_process_comes_back_without_the_values_of_its_variables_and_a_new_one_needs_them(
    driver: Driver,
) -> None:
    main = {"name": "main", "command": ["x"], "env": ROWS}
    gone = Source(
        snapshot=builders.snapshot(),
        content=with_spec(builders.content(), driver=driver),
        spec={"containers": [main], "initContainers": [{"name": "first", "env": ROWS}]},
        is_kept=True,
    )
    if driver in ("criu", "criu+cuda"):
        spec = _restored("snap", gone)["spec"]
        assert [each["env"] for each in spec["containers"]] == [ROWS[1:]]
        assert [each["env"] for each in spec["initContainers"]] == [ROWS[1:]]
    else:
        with pytest.raises(NotEligible, match="not kept: KEY\n") as raised:
            _restored("snap", gone)
        assert raised.value.next_step == "snapshotctl restore snap --env KEY=VALUE"
        spec = _restored("snap", gone, variables={"KEY": "1"})["spec"]
        for each in (*spec["containers"], *spec["initContainers"]):
            assert each["env"] == [{"name": "KEY", "value": "1"}, ROWS[1]]
    with pytest.raises(WrongArguments, match="no variable KYE") as wrong:
        _restored("snap", gone, variables={"KYE": "1"})
    assert "it has KEY, NODE" in str(wrong.value.next_step)
    # A variable of a pod that is there may be empty.
    there = gone._replace(spec={"containers": [{"name": "main", "env": ROWS}]}, is_kept=False)
    assert _restored("snap", there)["spec"]["containers"][0]["env"] == ROWS


@each("text", ["", "{", "[]", "{}", '{"containers": [{}]}', '{"containers": 1}'])
def test_what_is_no_spec_of_a_pod_is_not_kept(text: str) -> None:
    assert pod_manifests.kept_spec(text) is None
    kept = '{"containers": [{"name": "main", "env": [{"name": "A"}], "image": "x"}]}'
    assert pod_manifests.kept_spec(kept) == json.loads(kept)


def test_a_manifest_is_kept_as_it_is_and_gets_the_annotation() -> None:
    pinned = _manifest(spec={**POD["spec"], "nodeName": "node-9"})
    value = _restored(manifest=pinned, namespace="ns")
    assert (value["metadata"]["name"], value["spec"]["nodeName"]) == ("w", "node-9")
    assert value["metadata"]["namespace"] == "ns"
    assert value["metadata"]["annotations"] == {RESTORE_FROM: "llm"}
    assert "annotations" not in POD["metadata"]


@pytest.mark.parametrize(
    ("changes", "captured", "kind", "problem"),
    [
        ({}, NOTHING, NotEligible, "captured from is gone"),
        ({"target": "x"}, NOTHING._replace(content=builders.content()), WrongArguments, "not x"),
        (
            {"manifest": _manifest(spec={"containers": [{"name": "o", "command": ["x"]}]})},
            NOTHING._replace(content=builders.content()),
            WrongArguments,
            "call a container",
        ),
        (
            {"manifest": _manifest(metadata={"name": "w", "annotations": {RESTORE_FROM: "else"}})},
            NOTHING,
            WrongArguments,
            "the command for llm",
        ),
    ],
)
def test_what_does_not_fit_is_refused(
    changes: dict[str, Any], captured: Source, kind: type[SnapbackError], problem: str
) -> None:
    if "target" in changes:
        captured = captured._replace(spec=POD["spec"])
    with pytest.raises(kind) as raised:
        _restored(captured=captured, **changes)
    assert problem in f"{raised.value.message} {raised.value.next_step}"
