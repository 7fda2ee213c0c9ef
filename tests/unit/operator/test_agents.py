"""Nodes with a live agent: their label, and what a checkpoint says where there is none."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot_operator.core.nodes import agents
from snapshot_operator.core.plan import NOTHING, Label
from snapshot_operator.core.presence import LOST_AFTER_S, node_absent, node_from
from snapshot_operator.kube.controllers import label_node
from snapshot_operator.kube.shaping import with_agent_affinity
from snapshot_shared.objects.kubernetes import AGENT_LABEL, Node
from snapshot_shared.objects.meta import ObjectMeta, condition, is_true
from tests.support.objects import checkpoint_document, presence, restore_document
from tests.support.operator_world import World, world_of
from tests.unit.tables import each

NOW = 1_000_000.0
HAS_AGENT = {"key": AGENT_LABEL, "operator": "In", "values": ["true"]}
ZONE = {"key": "zone", "operator": "In", "values": ["a"]}
REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"


def node(**labels: str) -> Node:
    return Node(metadata=ObjectMeta(name="node-1", uid="u", labels=labels))


def labelled() -> Node:
    return node(**{AGENT_LABEL: "true"})


def present(found: Node) -> Node:
    return node_from(presence("node-1"), found, NOW)


def test_a_node_gets_the_label_with_its_agent_and_once() -> None:
    (write,) = label_node(present(node()), NOW).writes
    assert isinstance(write, Label)
    assert (write.key, write.text) == (AGENT_LABEL, "true")
    assert label_node(present(labelled()), NOW) == NOTHING


@pytest.mark.parametrize("absent_s", [0.0, LOST_AFTER_S - 1.0])
def test_a_node_that_is_silent_for_less_than_it_takes_to_be_lost_keeps_it(absent_s: float) -> None:
    assert label_node(node_absent(present(labelled()), absent_s, NOW), NOW) == NOTHING
    assert label_node(node_absent(labelled(), absent_s, NOW), NOW) == NOTHING


def test_a_node_that_is_lost_loses_it_and_gets_it_again_with_its_agent() -> None:
    lost = node_absent(present(labelled()), LOST_AFTER_S, NOW)
    (write,) = label_node(lost, NOW).writes
    assert isinstance(write, Label)
    assert write.text is None
    assert label_node(present(lost), NOW) == NOTHING
    never = node_absent(node(), LOST_AFTER_S, NOW)
    assert label_node(never, NOW) == NOTHING


def test_a_node_whose_agent_was_never_looked_for_is_left_as_it_is() -> None:
    assert label_node(labelled(), NOW) == NOTHING
    assert label_node(node(), NOW) == NOTHING


def test_a_node_changes_twice_for_an_agent_that_stays_away() -> None:
    missed = node_absent(present(node()), 10.0, NOW)
    row = condition(missed.status.conditions, "Ready")
    assert row is not None
    assert row.message == "no presence since 1970-01-12T13:46:30Z"
    assert node_absent(missed, 40.0, NOW + 30.0) == missed
    lost = node_absent(missed, LOST_AFTER_S, NOW + 80.0)
    assert is_true(lost.status.conditions, "Lost")
    assert node_absent(lost, LOST_AFTER_S + 30.0, NOW + 110.0) == lost


@each(
    ("found", "has"),
    [
        (node(), True),
        (labelled(), True),
        (present(node()), True),
        (node_absent(present(node()), 10.0, NOW), True),
        (node_absent(present(node()), LOST_AFTER_S, NOW), False),
        (node_absent(node(), 0.0, NOW), False),
        (node_absent(labelled(), 0.0, NOW), True),
    ],
)
def test_an_agent_is_absent_where_it_was_lost_or_never_seen(found: Node, has: bool) -> None:
    assert bool(agents(found)) is has


def required(spec: dict[str, Any]) -> Any:
    with_agent_affinity(spec)
    before = repr(spec)
    with_agent_affinity(spec)
    assert repr(spec) == before
    return spec["affinity"]["nodeAffinity"][REQUIRED]


def user(*terms: Any) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": list(terms)}}}}


@pytest.mark.parametrize("spec", [{}, {"affinity": None}, {"affinity": {"nodeAffinity": None}}])
def test_a_pod_without_affinity_requires_a_node_with_an_agent(spec: dict[str, Any]) -> None:
    assert required(spec) == {"nodeSelectorTerms": [{"matchExpressions": [HAS_AGENT]}]}


def test_every_term_of_the_users_requires_it_too() -> None:
    field = {"key": "metadata.name", "operator": "In", "values": ["node-1"]}
    found = required(user({"matchExpressions": [ZONE]}, {"matchFields": [field]}))
    assert found["nodeSelectorTerms"] == [
        {"matchExpressions": [ZONE, HAS_AGENT]},
        {"matchFields": [field], "matchExpressions": [HAS_AGENT]},
    ]


def test_a_term_that_matches_no_node_still_matches_none() -> None:
    found = required(user({}, {"matchExpressions": []}, {"matchExpressions": [ZONE]}))
    assert found["nodeSelectorTerms"][:2] == [{}, {"matchExpressions": []}]


def test_what_else_the_user_wants_of_affinity_is_kept() -> None:
    spec = user({"matchExpressions": [ZONE]})
    spec["affinity"]["podAntiAffinity"] = {"x": 1}
    spec["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"] = [2]
    required(spec)
    assert spec["affinity"]["podAntiAffinity"] == {"x": 1}
    assert list(spec["affinity"]["nodeAffinity"]) == [
        REQUIRED,
        "preferredDuringSchedulingIgnoredDuringExecution",
    ]


@pytest.mark.parametrize(
    "spec",
    [
        {"affinity": "x"},
        {"affinity": {"nodeAffinity": {REQUIRED: [1]}}},
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": None}}}},
        {"affinity": {"nodeAffinity": {REQUIRED: {"nodeSelectorTerms": [1]}}}},
        {"nodeName": "node-1"},
    ],
)
def test_what_the_api_server_will_refuse_and_a_pod_with_a_node_pass_through(spec: Any) -> None:
    before = repr(spec)
    with_agent_affinity(spec)
    assert repr(spec) == before


async def test_a_checkpoint_whose_pod_waits_says_when_no_node_has_an_agent() -> None:
    world = await world_of(1)
    world.present.clear()
    await world.see(absent_s=10.0)
    await world.apply(checkpoint_document())
    assert await reason(world) == "Unschedulable"
    await world.see(absent_s=LOST_AFTER_S)
    assert await reason(world) == "NoAgentOnNode"
    found = await world.get("DynamoCheckpoint", "llm")
    assert "Next: " in found.status.message
    await world.join(presence("node-1"))
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_a_restore_whose_pod_waits_says_when_no_node_has_an_agent() -> None:
    world = await world_of(1, captured=True)
    world.present.clear()
    await world.see(absent_s=LOST_AFTER_S)
    await world.apply(restore_document())
    (row,) = (await world.restore("restored")).status.conditions
    assert (row.reason, "Next: " in row.message) == ("NoAgentOnNode", True)
    await world.join(presence("node-1"), presence("node-2"))
    await world.answer_all()
    row = condition((await world.restore("restored")).status.conditions, "Ready")
    assert row is not None
    assert row.reason == "Restored"


async def reason(world: World) -> str:
    found = await world.get("DynamoCheckpoint", "llm")
    row = condition(found.status.conditions, "Ready")
    return row.reason if row is not None else ""
