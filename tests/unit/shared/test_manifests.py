"""A manifest that is not right is refused with the path of every problem at once."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot_shared.errors import InvalidManifest
from snapshot_shared.manifests import message_schemas, parse, parse_identity
from snapshot_shared.objects.snapback import LOADER_REFUSED
from tests.support.objects import checkpoint_document, restore_document
from tests.unit.tables import each

ARTIFACT = {
    "contentUID": "00000000-0000-4000-8000-000000000001",
    "generation": 1,
    "rootDigest": "sha256:" + "0" * 64,
}


def problems(document: Any) -> list[str]:
    with pytest.raises(InvalidManifest) as caught:
        parse(document)
    found: list[str] = caught.value.values["problems"]
    return found


def test_every_problem_is_named_at_once_by_its_path() -> None:
    document = checkpoint_document()
    document["metadata"]["name"] = "Bad_Name"
    document["spec"]["extra"] = 1
    document["spec"]["identity"] = {"model": 7}
    container = document["spec"]["job"]["podTemplateSpec"]["spec"]["containers"][0]
    container["securityContext"] = {}
    found = problems(document)
    where = "spec.job.podTemplateSpec.spec.containers[0].securityContext"
    for path in (
        "metadata.name:",
        "spec.extra:",
        "spec.identity.backendFramework:",
        "spec.identity.model:",
        f"{where}:",
    ):
        assert any(line.startswith(path) for line in found), (path, found)


@each(
    ("change", "path"),
    [
        ({"containers": []}, "spec.containers"),
        ({"containers": [{"name": "main"}]}, "spec.containers[0].command"),
        ({"containers": [{"name": "A", "command": ["x"]}]}, "spec.containers[0].name"),
        ({"containers": [{"name": "a", "command": "x"}]}, "spec.containers[0].command"),
        ({"restartPolicy": "Always"}, "spec.restartPolicy"),
        (
            {
                "containers": [
                    {"name": "a", "command": ["x"], "env": [{"name": "A", "value": "\0"}]}
                ]
            },
            "spec.containers[0].env[0].value",
        ),
        (
            {
                "containers": [
                    {"name": "a", "command": ["x"], "resources": {"limits": {"nvidia.com/gpu": 65}}}
                ]
            },
            "spec.containers",
        ),
        (
            {
                "containers": [
                    {"name": "a", "command": ["x"], "resources": {"limits": {"nvidia.com/gpu": -2}}}
                ]
            },
            "spec.containers[0].resources.limits.nvidia.com/gpu",
        ),
        ({"volumes": []}, "spec.volumes"),
        ({"nodeName": "a_b"}, "spec.nodeName"),
    ],
)
def test_a_pod_field_that_is_not_honoured_is_refused_by_its_path(
    change: dict[str, Any], path: str
) -> None:
    document = restore_document()
    document["spec"].update(change)
    assert any(line.startswith(path) for line in problems(document)), problems(document)


@each(
    ("field", "value", "problem"),
    [
        ("backoffLimit", "x", "expected integer, found 'x'"),
        ("backoffLimit", -1, "-1 is less than the minimum of 0"),
        ("targetContainerName", "A", "'A' is not a name: up to 63 lower-case letters"),
        ("driver", "none", "'none' is not one of ['cooperative'"),
        ("backoffLimit", "x" * 79, f"expected integer, found '{'x' * 76}..."),
        ("backoffLimit", "x" * 78, f"expected integer, found '{'x' * 78}'"),
        ("extra", 1, "unknown or unsupported field (known here: activeDeadlineSeconds, "),
    ],
)
def test_a_problem_says_what_was_expected_and_what_was_found(
    field: str, value: object, problem: str
) -> None:
    (found,) = problems(checkpoint_document(**{field: value}))
    assert found.startswith(f"spec.job.{field}: {problem}")


def test_a_text_of_the_right_type_is_told_what_it_should_look_like() -> None:
    document = restore_document()
    document["spec"]["nodeName"] = "a_b"
    limits = {"limits": {"nvidia.com/gpu": "two"}}
    document["spec"]["containers"] = [{"name": "a", "command": ["x"], "resources": limits}]
    gpus, node = sorted(line for line in problems(document) if "_" in line or "two" in line)
    assert gpus.endswith("'two' is not a quantity, such as 500m, 2 or 4Gi")
    assert "'a_b' is not a name: lower-case letters" in node


def test_a_field_that_may_be_left_out_says_so() -> None:
    document = checkpoint_document()
    document["spec"]["identity"]["maxModelLen"] = "x"
    assert problems(document) == ["spec.identity.maxModelLen: expected integer or null, found 'x'"]
    del document["spec"]["identity"]
    assert problems(document) == ["spec.identity: is required"]


SAVER = {"image": "saver:1", "command": ["/bin/save"], "envs": [{"name": "A", "value": "1"}]}


@each(
    ("memory", "job", "path"),
    [
        ({"mode": "interPod"}, {}, "spec.gpuMemoryService.mode"),
        ({"deviceClassName": "own"}, {}, "spec.gpuMemoryService.deviceClassName"),
        ({"extraClientContainers": ["a"]}, {}, "spec.gpuMemoryService.extraClientContainers"),
        ({"checkpoint": {"saver": SAVER}}, {}, "spec.gpuMemoryService.checkpoint.saver"),
        ({}, {"sharedMemory": {"size": "1Gi"}}, "spec.job.sharedMemory"),
        ({}, {"ttlSecondsAfterFinished": 300}, "spec.job.ttlSecondsAfterFinished"),
    ],
)
def test_a_field_that_only_kubernetes_honours_is_refused_by_its_path(
    memory: dict[str, Any], job: dict[str, Any], path: str
) -> None:
    document = checkpoint_document(**job)
    document["spec"]["gpuMemoryService"] = memory
    assert problems(document) == [
        f"{path}: is honoured on Kubernetes alone; remove it, or apply this to a cluster"
    ]


def test_a_checkpoint_with_a_loader_is_refused() -> None:
    document = checkpoint_document()
    document["spec"]["gpuMemoryService"] = {"checkpoint": {"loader": {}}}
    assert problems(document) == [f"spec.gpuMemoryService.checkpoint.loader: {LOADER_REFUSED}"]


@pytest.mark.parametrize("checkpoint", [{}, {"saver": {}}, {"saver": None}])
def test_an_empty_saver_is_none(checkpoint: dict[str, Any]) -> None:
    document = checkpoint_document()
    document["spec"]["gpuMemoryService"] = {"enabled": True, "checkpoint": checkpoint}
    assert parse(document).spec.gpu_memory_service.enabled


@pytest.mark.parametrize(
    "parameters", [{str(number): "" for number in range(257)}, {"a": "x" * 4097}]
)
def test_parameters_of_an_identity_are_bounded(parameters: dict[str, str]) -> None:
    document = checkpoint_document()
    document["spec"]["identity"]["extraParameters"] = parameters
    assert problems(document)[0].startswith("spec.identity.extraParameters")


def test_a_target_container_that_does_not_exist_is_refused_with_those_that_do() -> None:
    document = checkpoint_document(targetContainerName="engine")
    assert problems(document) == [
        "spec.job.targetContainerName: 'engine' is no container of the template (found main)"
    ]


@each("document", [None, [], "text", 7, {}, {"kind": "Secret"}, {"kind": []}])
def test_what_is_no_manifest_at_all_is_refused(document: Any) -> None:
    assert problems(document)


CONTAINER = {"name": "a", "command": ["x"]}


@pytest.mark.parametrize(
    ("containers", "found"),
    [
        ([CONTAINER, CONTAINER], "spec.containers[1].name: 'a' appears twice"),
        (
            [{**CONTAINER, "workingDir": "here"}],
            "spec.containers[0].workingDir: 'here' is not an absolute path",
        ),
        (
            [{**CONTAINER, "resources": {"limits": {"nvidia.com/gpu": -1}}}],
            "spec.containers[0].resources.limits.nvidia.com/gpu: ",
        ),
        (
            [
                {**CONTAINER, "resources": {"limits": {"nvidia.com/gpu": 33}}},
                {**CONTAINER, "name": "b", "resources": {"limits": {"nvidia.com/gpu": 32}}},
            ],
            "spec.containers: nvidia.com/gpu must be a whole number up to 64",
        ),
    ],
)
def test_what_a_schema_cannot_say_is_refused_by_its_path(containers: list[Any], found: str) -> None:
    document = restore_document()
    document["spec"]["containers"] = containers
    (problem,) = problems(document)
    assert problem.startswith(found)


def test_as_many_gpus_as_a_node_may_have_can_be_asked_for() -> None:
    document = restore_document()
    limits = {"nvidia.com/gpu": 32}
    document["spec"]["containers"] = [
        {**CONTAINER, "workingDir": "/here", "resources": {"limits": limits}},
        {**CONTAINER, "name": "b", "resources": {"limits": limits}},
    ]
    assert parse(document)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ({}, "neither"),
        ({"podRef": {"name": "p"}, "artifact": ARTIFACT}, "both"),
    ],
)
def test_a_snapshot_has_exactly_one_source(source: dict[str, Any], found: str) -> None:
    document = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "Snapshot",
        "metadata": {"name": "s"},
        "spec": {"source": source},
    }
    (problem,) = problems(document)
    assert problem.startswith("spec.source: exactly one")
    assert problem.endswith(found)


def test_a_name_holds_no_two_dots_in_a_row() -> None:
    document = restore_document(name="a..b")
    assert any(line.startswith("metadata.name") for line in problems(document))


def test_no_more_than_fifty_problems_are_shown() -> None:
    document = restore_document()
    document["spec"].update({f"x{number}": 1 for number in range(51)})
    with pytest.raises(InvalidManifest, match="51 problems") as caught:
        parse(document, where="f: ")
    shown = caught.value.values["problems"]
    assert len(shown) == 50
    assert shown[0].startswith("f: spec.")


@pytest.mark.parametrize(
    ("spec", "found"),
    [
        (None, "spec.identity: expected a mapping, found nothing"),
        ({}, "spec.identity: expected a mapping, found nothing"),
        ({"identity": []}, "spec.identity: expected a mapping, found list"),
        ({"identity": {"model": "m"}}, "spec.identity.backendFramework: is required"),
    ],
)
def test_an_identity_is_read_of_a_checkpoint_whatever_the_rest_of_it_is(
    spec: object, found: str
) -> None:
    document = checkpoint_document()
    identity = parse_identity({**document, "spec": {"identity": document["spec"]["identity"]}})
    assert identity.model == "example/llm"
    with pytest.raises(InvalidManifest) as caught:
        parse_identity({**document, "spec": spec}, where="f: ")
    assert caught.value.values["problems"] == [f"f: {found}"]


def test_what_get_prints_can_be_applied_again() -> None:
    document = checkpoint_document()
    document["metadata"].update(uid="x", resourceVersion="7", creationTimestamp="then")
    document["status"] = {"phase": "Ready"}
    assert parse(document) == parse(checkpoint_document())


def test_every_request_reply_and_event_has_a_schema_as_orders_have() -> None:
    schemas = message_schemas()
    assert {"get_request.v1", "get_reply.v1", "object_event.v1", "sim_request.v1"} <= set(schemas)
    assert schemas["get_request.v1"]["$defs"]["GetRequest"]["required"] == ["kind"]
