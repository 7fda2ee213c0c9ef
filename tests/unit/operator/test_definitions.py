"""Which CustomResourceDefinitions an operator applies, and what it leaves alone."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from snapshot_operator.kube.crds import PART_OF, VERSION_ANNOTATION, definitions
from snapshot_operator.kube.definitions import Found, Mode, next_step, version_of
from snapshot_operator.kube.rbac import cluster_role

WANTED = definitions()
NAMES = tuple(document["metadata"]["name"] for document in WANTED)
FIRST = NAMES[0]


def there(*, labels: Any = None, version: str = "0.0.1", is_established: bool = True) -> Found:
    return msgspec.convert(
        {
            "metadata": {
                "name": FIRST,
                "labels": dict([PART_OF]) if labels is None else labels,
                "annotations": {VERSION_ANNOTATION: version},
            },
            "status": {
                "conditions": [
                    {"type": "Established", "status": "True" if is_established else "False"}
                ]
            },
        },
        Found,
    )


def all_there(**first: Any) -> dict[str, Found]:
    return {**{name: there() for name in NAMES}, FIRST: there(**first)}


def test_what_is_absent_or_older_is_applied_and_then_waited_for() -> None:
    assert next_step(WANTED, {}, "apply").apply == NAMES
    assert next_step(WANTED, all_there(), "apply").apply == NAMES
    found = all_there(is_established=False)
    step = next_step(WANTED, found, "apply", frozenset(NAMES))
    assert (step.apply, step.waits_for, step.problem) == ((), (FIRST,), None)


def test_all_is_done_when_all_are_established() -> None:
    assert next_step(WANTED, all_there(), "apply", frozenset(NAMES)) == ((), (), None)


def test_a_newer_definition_is_left_as_it_is() -> None:
    step = next_step(WANTED, all_there(version="99.0.0"), "apply")
    assert step.apply == NAMES[1:]


@pytest.mark.parametrize("mode", ["apply", "keep"])
def test_nothing_is_applied_where_one_belongs_to_another_product(mode: Mode) -> None:
    found = {FIRST: there(labels={PART_OF[0]: "dynamo"})}
    step = next_step(WANTED, found, mode)
    assert step.apply == ()
    assert step.waits_for == (FIRST,)
    assert step.problem is not None
    assert step.problem.reason == "CRDsOwnedByOther"
    assert f"{FIRST} (of dynamo)" in step.problem.message
    assert "SNAPBACK_CRDS=adopt" in step.problem.next_step


def test_one_of_another_product_is_applied_where_it_may_be_adopted() -> None:
    step = next_step(WANTED, all_there(labels={}, version="99.0.0"), "adopt")
    assert step.apply == NAMES


def test_keep_applies_none_and_waits_for_those_that_are_absent() -> None:
    assert next_step(WANTED, all_there(), "keep") == ((), (), None)
    found = {name: there() for name in NAMES[1:]}
    step = next_step(WANTED, found, "keep")
    assert (step.apply, step.waits_for) == ((), (FIRST,))
    assert step.problem is not None
    assert step.problem.reason == "CRDsMissing"


@pytest.mark.parametrize(
    ("older", "newer"),
    [("", "0.1.0"), ("0.1.0", "0.1.1"), ("0.9.9", "0.10.0"), ("v1", "1.0.1")],
)
def test_versions_are_compared_as_numbers(older: str, newer: str) -> None:
    assert version_of(older) < version_of(newer)


def test_the_operator_may_write_definitions_of_its_own_kinds_alone() -> None:
    rules = [
        rule for rule in cluster_role()["rules"] if "apiextensions.k8s.io" in rule["apiGroups"]
    ]
    assert [rule["resourceNames"] for rule in rules] == [list(NAMES)]
