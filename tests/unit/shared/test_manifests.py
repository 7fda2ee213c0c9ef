"""A manifest that is not right is refused with the path of every problem at once."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot_shared.errors import InvalidManifest
from snapshot_shared.manifests import message_schemas, parse
from tests.support.objects import checkpoint_document, restore_document


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


@pytest.mark.parametrize(
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


def test_a_target_container_that_does_not_exist_is_refused_with_those_that_do() -> None:
    document = checkpoint_document(targetContainerName="engine")
    assert problems(document) == [
        "spec.job.targetContainerName: 'engine' is no container of the template (found main)"
    ]


@pytest.mark.parametrize("document", [None, [], "text", 7, {}, {"kind": "Secret"}, {"kind": []}])
def test_what_is_no_manifest_at_all_is_refused(document: Any) -> None:
    assert problems(document)


def test_what_get_prints_can_be_applied_again() -> None:
    document = checkpoint_document()
    document["metadata"].update(uid="x", resourceVersion="7", creationTimestamp="then")
    document["status"] = {"phase": "Ready"}
    assert parse(document) == parse(checkpoint_document())


def test_every_request_reply_and_event_has_a_schema_as_orders_have() -> None:
    schemas = message_schemas()
    assert {"get_request.v1", "get_reply.v1", "object_event.v1", "sim_request.v1"} <= set(schemas)
    assert schemas["get_request.v1"]["$defs"]["GetRequest"]["required"] == ["kind"]
