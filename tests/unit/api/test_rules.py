"""The rules of the definitions in Python; tests/cluster/test_crds.py compares an API server."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest

from snapshot_api.schema.openapi import VALIDATIONS
from snapshot_api.schema.rules import Broken, as_stored, broken
from tests.support.crd_samples import at, document, fixed_paths, other_values, rules, schemas

KNOWN = {"all", "exists", "has", "size"}
"""The functions that were compared. An API server has others, which the library in Python lacks."""


def found(kind: str, value: Any, old: Any = None) -> list[str]:
    schema = schemas()[kind]
    return [each.path for each in broken(schema, as_stored(schema, value), old)]


@pytest.mark.parametrize("kind", schemas())
def test_a_sample_breaks_no_rule_and_a_change_of_any_field_breaks_its_own(kind: str) -> None:
    old = document(kind)
    assert found(kind, old) == found(kind, old, old) == []
    paths = fixed_paths(kind)
    assert paths
    for path in paths:
        for change in other_values(kind, path):
            value = copy.deepcopy(old)
            change(value)
            if value != old:
                assert path in found(kind, value, old), path


def test_every_function_of_a_rule_is_one_that_was_compared() -> None:
    texts = [
        text
        for schema in schemas().values()
        for rule in _rules(schema)
        for text in (rule["rule"], rule.get("messageExpression", ""))
    ]
    used = {name for text in texts for name in re.findall(r"(\w+)\(", text)}
    assert used - {""} <= KNOWN


def _rules(schema: dict[str, Any]) -> list[dict[str, str]]:
    inner = [rule for each in schema.get("properties", {}).values() for rule in _rules(each)]
    return [*schema.get(VALIDATIONS, ()), *inner]


@pytest.mark.parametrize("kind", schemas())
def test_a_rule_finds_the_same_in_the_fields_that_it_names_as_in_all(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = document(kind)
    for path, _ in rules(kind):
        for change in other_values(kind, path):
            given = copy.deepcopy(value)
            change(given)
            in_named = found(kind, given)
            with monkeypatch.context() as whole:
                whole.setattr(
                    "snapshot_api.schema.rules._named", lambda _schema, each, _words: each
                )
                assert found(kind, given) == in_named, path


def test_defaults_are_there_before_a_rule_reads_them_and_nulls_are_not() -> None:
    value = document("DynamoCheckpoint")
    memory = value["spec"]["gpuMemoryService"]
    del memory["enabled"], value["spec"]["job"]["targetContainerName"]
    memory["checkpoint"]["loader"] = memory["mode"] = None
    assert found("DynamoCheckpoint", value) == []
    memory["mode"] = "interPod"
    assert found("DynamoCheckpoint", value) == ["spec.gpuMemoryService.mode"]


@pytest.mark.parametrize("value", [None, "text", 2**70, [], {}])
def test_a_rule_that_reads_another_type_says_nothing(value: Any) -> None:
    for kind in schemas():
        for path, _ in rules(kind):
            given = document(kind)
            parent, last = at(given, path)
            parent[last] = value
            assert isinstance(found(kind, given), list)


RULED = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "text": {"type": "string"}},
    VALIDATIONS: [{"rule": "self.n > 1", "message": "is too low"}],
}


def test_no_object_is_too_deep() -> None:
    value = document("DynamoCheckpoint")
    deep: dict[str, Any] = {}
    for _ in range(10_000):
        deep = {"spec": deep}
    value["spec"]["job"]["podTemplateSpec"]["spec"]["spec"] = deep
    assert found("DynamoCheckpoint", value) == []


def test_a_field_that_no_schema_declares_may_not_change_either() -> None:
    old = document("DynamoCheckpoint")
    new = copy.deepcopy(old)
    new["spec"]["job"]["podTemplateSpec"]["spec"]["undeclared"] = "other"
    assert found("DynamoCheckpoint", new, old) == ["spec.job.podTemplateSpec"]


def test_a_message_with_values_falls_back_to_the_plain_one() -> None:
    (rule,) = RULED[VALIDATIONS]
    said = RULED | {VALIDATIONS: [rule | {"messageExpression": "'found ' + self.text"}]}
    assert [*broken(said, {"n": 1, "text": "it"})] == [Broken("", "found it")]
    assert [*broken(said, {"n": 1})] == [Broken("", "is too low")]
    assert [*broken(said, {"n": 2})] == []
