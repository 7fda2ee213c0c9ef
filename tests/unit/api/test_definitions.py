"""The CustomResourceDefinitions say what the structs say, and which of them are applied."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import pytest
from msgspec import Meta

from snapshot_api.kinds import KINDS
from snapshot_api.schema.definitions import PART_OF, VERSION_ANNOTATION, definitions
from snapshot_api.schema.openapi import PRESERVE, VALIDATIONS, re2, schema_of
from snapshot_api.schema.texts import key, packed
from snapshot_operator.kube.definitions import Found, Mode, next_step, version_of
from snapshot_operator.kube.rbac import cluster_role
from tests.support.crd_samples import document, rules, schemas
from tests.unit.tables import each

FOLDER = Path(__file__).parents[3] / "deploy/crds"
KINDS_OF_OURS = [kind.name for kind in KINDS.values() if kind.is_ours]


def nodes(schema: dict[str, Any], path: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within a schema, with its path."""
    yield path, schema
    for name, found in schema.get("properties", {}).items():
        yield from nodes(found, f"{path}.{name}")
    for name in ("items", "additionalProperties"):
        if name in schema:
            yield from nodes(schema[name], f"{path}[]")


ALL = [(f"{kind}{path}", found) for kind, root in schemas().items() for path, found in nodes(root)]


def test_there_is_one_for_each_kind_of_ours() -> None:
    assert [found["spec"]["names"]["kind"] for found in definitions()] == KINDS_OF_OURS


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FOLDER.iterdir()) < 300_000


def test_every_field_has_a_description() -> None:
    # The API server allows none at `metadata`, and shows that of a list, not of its items.
    missing = [
        path
        for path, found in ALL
        if "description" not in found and not path.endswith("[]") and ".metadata" not in path
    ]
    assert missing == []


def test_every_schema_is_structural() -> None:
    for path, found in ALL:
        assert not {"$ref", "oneOf", "allOf", "not", "nullable"} & set(found), path
        if "anyOf" in found:
            assert found["x-kubernetes-int-or-string"], path
            assert found["anyOf"] == [{"type": "integer"}, {"type": "string"}], path
        else:
            assert "type" in found or found.get(PRESERVE), path


def test_all_that_a_rule_reads_is_bounded() -> None:
    ruled = [found for kind in schemas().values() for found in _ruled(kind)]
    for path, found in (pair for schema in ruled for pair in nodes(schema)):
        match found.get("type"):
            case "string":
                assert {"maxLength", "enum"} & set(found), path
            case "array":
                assert "maxItems" in found, path
            case "object" if "properties" not in found and PRESERVE not in found:
                assert "maxProperties" in found, path


def _ruled(root: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The spec, of which each field has a rule, and the fields of the status that have one."""
    yield root["properties"]["spec"]
    status = root["properties"]["status"]
    for rule in status.get(VALIDATIONS, ()):
        yield status["properties"][rule["fieldPath"].removeprefix(".")]


def test_every_field_of_a_spec_has_a_rule_that_keeps_it_as_it_is() -> None:
    for kind, root in schemas().items():
        kept = [path for path, message in rules(kind) if message.startswith("is immutable")]
        leaves = [
            path.removeprefix(".")
            for path, found in nodes(root["properties"]["spec"], ".spec")
            if "properties" not in found and "[]" not in path
        ]
        for leaf in leaves:
            assert any(leaf == path or leaf.startswith(f"{path}.") for path in kept), leaf


@pytest.mark.parametrize("kind", KINDS_OF_OURS)
def test_conditions_are_told_apart_by_their_type(kind: str) -> None:
    found = schemas()[kind]["properties"]["status"]["properties"]["conditions"]
    assert found["x-kubernetes-list-type"] == "map"
    assert found["x-kubernetes-list-map-keys"] == ["type"]


@each("variant", [0, 1])
@each("kind", KINDS_OF_OURS)
def test_what_the_schema_allows_can_be_decoded(kind: str, variant: int) -> None:
    data = msgspec.json.encode(document(kind, variant=variant))
    value = msgspec.json.decode(data, type=KINDS[kind].type)
    assert value.metadata.name == f"{kind.lower()}-{variant}"


@pytest.mark.parametrize(
    ("python", "go"),
    [
        (r"^[a-z]{0,61}\Z", "^[a-z]{0,61}$"),
        (r"^(a|\.)\Z", r"^(a|\.)$"),
        (r"^[^\x00]*\Z", r"^[^\x00]*$"),
        ("^(?:a)+", "^(?:a)+"),
    ],
)
def test_a_pattern_ends_in_go_where_it_ends_in_python(python: str, go: str) -> None:
    assert re2(python) == go
    assert re.search(python, "a") or python == r"^[^\x00]*\Z"


@each(
    "pattern",
    [
        *("^(?!a)", "(?=a)", "(?<!a)b", r"(a)\1", "^a$"),
        *(r"^\d\Z", r"\bword", "a++", "a{1001}", "a{2,1001}"),
    ],
)
def test_a_pattern_that_go_lacks_or_reads_differently_is_refused(pattern: str) -> None:
    with pytest.raises(ValueError, match="Go"):
        re2(pattern)


class Sized(msgspec.Struct):
    above: Annotated[float, Meta(gt=0, le=2)]


def test_a_limit_that_is_exclusive_is_marked_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(packed(), key(Sized, "above"), "A number.")
    found = schema_of(Sized)["properties"]["above"]
    assert (found["minimum"], found["exclusiveMinimum"], found["maximum"]) == (0, True, 2)
    assert "exclusiveMaximum" not in found


@pytest.mark.parametrize("type_", [int | bool, str | float, Literal[1, 2], bytes, tuple[int, str]])
def test_a_type_that_has_no_structural_schema_is_refused(type_: Any) -> None:
    with pytest.raises(TypeError):
        schema_of(type_)


class Undescribed(msgspec.Struct):
    never_described: int


def test_a_field_without_a_description_is_refused_by_its_name() -> None:
    with pytest.raises(LookupError, match=r"Undescribed\.never_described"):
        schema_of(Undescribed)


WANTED = definitions()
NAMES = tuple(document["metadata"]["name"] for document in WANTED)
FIRST = NAMES[0]


def there(*, labels: Any = None, version: str = "0.0.1", is_established: bool = True) -> Found:
    metadata = {
        "name": FIRST,
        "labels": dict([PART_OF]) if labels is None else labels,
        "annotations": {VERSION_ANNOTATION: version},
    }
    row = {"type": "Established", "status": "True" if is_established else "False"}
    return msgspec.convert({"metadata": metadata, "status": {"conditions": [row]}}, Found)


def all_there(**first: Any) -> dict[str, Found]:
    return {**{name: there() for name in NAMES}, FIRST: there(**first)}


def test_what_is_absent_or_older_is_applied_and_then_waited_for() -> None:
    assert next_step(WANTED, {}, "apply").apply == NAMES
    assert next_step(WANTED, all_there(), "apply").apply == NAMES
    found = all_there(is_established=False)
    step = next_step(WANTED, found, "apply", frozenset(NAMES))
    assert (step.apply, step.waits_for, step.problem) == ((), (FIRST,), None)
    assert next_step(WANTED, all_there(), "apply", frozenset(NAMES)) == ((), (), None)


def test_a_newer_definition_is_left_as_it_is() -> None:
    step = next_step(WANTED, all_there(version="99.0.0"), "apply")
    assert step.apply == NAMES[1:]


@pytest.mark.parametrize("mode", ["apply", "keep"])
def test_nothing_is_applied_where_one_belongs_to_another_product(mode: Mode) -> None:
    found = {FIRST: there(labels={PART_OF[0]: "dynamo"})}
    step: Any = next_step(WANTED, found, mode)
    assert (step.apply, step.waits_for) == ((), (FIRST,))
    assert step.problem.reason == "CRDsOwnedByOther"
    assert f"{FIRST} (of dynamo)" in step.problem.message
    assert "SNAPBACK_CRDS=adopt" in step.problem.next_step


def test_one_of_another_product_is_applied_where_it_may_be_adopted() -> None:
    step = next_step(WANTED, all_there(labels={}, version="99.0.0"), "adopt")
    assert step.apply == NAMES


def test_keep_applies_none_and_waits_for_those_that_are_absent() -> None:
    assert next_step(WANTED, all_there(), "keep") == ((), (), None)
    found = {name: there() for name in NAMES[1:]}
    step: Any = next_step(WANTED, found, "keep")
    assert (step.apply, step.waits_for) == ((), (FIRST,))
    assert step.problem.reason == "CRDsMissing"


@pytest.mark.parametrize(
    ("older", "newer"), [("", "0.1.0"), ("0.1.0", "0.1.1"), ("0.9.9", "0.10.0"), ("v1", "1.0.1")]
)
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert version_of(older) < version_of(newer)


def test_the_operator_may_write_definitions_of_its_own_kinds_alone() -> None:
    rules, group = cluster_role()["rules"], "apiextensions.k8s.io"
    named = [rule["resourceNames"] for rule in rules if group in rule["apiGroups"]]
    assert named == [list(NAMES)]
