"""Nodes: their agents, their versions and drivers, and what waits for one that has none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.facts import AGENT_LABEL, SECCOMP_LABEL, Node
from snapshot_api.meta import ObjectMeta, is_true
from snapshot_operator.core.nodes import agents
from snapshot_operator.core.plan import NOTHING, Label
from snapshot_operator.core.presence import LOST_AFTER_S, node_absent, node_from
from snapshot_operator.kube.controllers import label_node
from snapshot_operator.kube.shaping import with_agent_affinity
from snapshot_operator.runtime.presence import EVERY_S, PresenceFollower
from snapshot_shared.bus import Delivery
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import BusUnavailable, Failure
from snapshot_shared.orders import Presence
from tests.support.objects import checkpoint_document, presence, restore_document, unready
from tests.support.operator_world import World, row_of, world_of
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


def changed(found: Node) -> dict[str, str | None]:
    """Return the labels that a node gets, and loses."""
    writes = [write for write in label_node(found, NOW).writes if isinstance(write, Label)]
    assert label_node(found, NOW).writes == tuple(writes)
    return {write.key: write.text for write in writes}


def test_a_node_gets_the_label_with_its_agent_and_once() -> None:
    assert changed(present(node())) == {AGENT_LABEL: "true"}
    assert label_node(present(labelled()), NOW) == NOTHING
    for never_looked_for in (labelled(), node()):
        assert label_node(never_looked_for, NOW) == NOTHING


def test_a_node_has_a_label_for_the_seccomp_profile_that_its_agent_announces() -> None:
    says = replace(presence("node-1"), seccomp_profile="profiles/a.json")
    assert changed(node_from(says, labelled(), NOW)) == {SECCOMP_LABEL: "profiles_a.json"}
    both = node(**{AGENT_LABEL: "true", SECCOMP_LABEL: "profiles_a.json"})
    assert label_node(node_from(says, both, NOW), NOW) == NOTHING
    assert changed(present(both)) == {SECCOMP_LABEL: None}
    lost = node_absent(node_from(says, both, NOW), LOST_AFTER_S, NOW)
    assert changed(lost) == {AGENT_LABEL: None, SECCOMP_LABEL: None}


@pytest.mark.parametrize("absent_s", [0.0, LOST_AFTER_S - 1.0])
def test_a_node_that_is_silent_for_less_than_it_takes_to_be_lost_keeps_it(absent_s: float) -> None:
    assert label_node(node_absent(present(labelled()), absent_s, NOW), NOW) == NOTHING
    assert label_node(node_absent(labelled(), absent_s, NOW), NOW) == NOTHING


def test_a_node_that_is_lost_loses_it_and_gets_it_again_with_its_agent() -> None:
    lost = node_absent(present(labelled()), LOST_AFTER_S, NOW)
    assert changed(lost) == {AGENT_LABEL: None}
    assert label_node(present(lost), NOW) == NOTHING
    never = node_absent(node(), LOST_AFTER_S, NOW)
    assert label_node(never, NOW) == NOTHING


def test_a_node_changes_twice_for_an_agent_that_stays_away() -> None:
    missed = node_absent(present(node()), 10.0, NOW)
    assert row_of(missed).message == "no presence since 1970-01-12T13:46:30Z"
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
    await world.silence(10.0)
    await world.apply(checkpoint_document())
    assert (await world.row("DynamoCheckpoint")).reason == "Unschedulable"
    await world.see(absent_s=LOST_AFTER_S)
    assert (await world.row("DynamoCheckpoint")).reason == "NoAgentOnNode"
    assert "Next: " in (await world.get("DynamoCheckpoint", "llm")).status.message
    await world.join(presence("node-1"))
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_a_restore_whose_pod_waits_says_when_no_node_has_an_agent() -> None:
    world = await world_of(1, captured=True)
    await world.silence(LOST_AFTER_S)
    await world.apply(restore_document())
    (row,) = (await world.restore("restored")).status.conditions
    assert (row.reason, "Next: " in row.message) == ("NoAgentOnNode", True)
    await world.join(presence("node-1"), presence("node-2"))
    await world.answer_all()
    row = row_of(await world.restore("restored"), "Ready")
    assert (row.reason, row.message) == ("Restored", "restored from snapshot/llm")


class Broker:
    """A bus that has seen one node once, and then does what `reads` says of each full read."""

    def __init__(self, reads: Callable[[int], None]) -> None:
        self.again = asyncio.Event()
        self._reads = reads
        self._count = 0

    def reconnections(self) -> asyncio.Event:
        return self.again

    @asynccontextmanager
    async def listening(self, _: str) -> AsyncIterator[asyncio.Queue[Delivery]]:
        yield asyncio.Queue()

    async def entries(self, _: str) -> dict[str, bytes]:
        self._count += 1
        if self._count == 1:
            return {"node-1": encode_json(presence("node-1"))}
        self._reads(self._count)
        return {}


async def is_lost(after_s: float, reads: Callable[[Broker, int], None]) -> bool:
    """Whether a node that went away at once counts as lost after some seconds."""
    world = World()
    await world.join()
    broker = Broker(lambda count: reads(broker, count))
    clock = asyncio.get_running_loop().time
    clocks = Clocks(monotonic=clock, wall=clock, boot_id="b")
    follower = PresenceFollower(broker, world.cluster, clocks)  # type: ignore[arg-type]
    with suppress(TimeoutError):
        await asyncio.wait_for(follower.run(), after_s)
    node = await world.get("Node", "node-1")
    return is_true(node.status.conditions, "Lost")


def nothing(broker: Broker, count: int) -> None:
    """The bus is healthy."""


def unavailable(broker: Broker, count: int) -> None:
    """The second full read finds no bus."""
    if count == 2:
        raise BusUnavailable("not connected")


def reconnected(broker: Broker, count: int) -> None:
    """The connection is lost and found between two full reads."""
    if count == 2:
        broker.again.set()


@pytest.mark.parametrize(
    ("reads", "lost_after_s"),
    [
        (nothing, LOST_AFTER_S),
        (unavailable, LOST_AFTER_S + 2 * EVERY_S),
        (reconnected, LOST_AFTER_S + 2 * EVERY_S),
    ],
)
async def test_absence_counts_from_when_the_bus_was_last_unknown(
    virtual_time: None, reads: Callable[[Broker, int], None], lost_after_s: float
) -> None:
    assert not await is_lost(lost_after_s - 1.0, reads)
    assert await is_lost(lost_after_s + 1.0, reads)


BOTH = "node-1 cannot be ordered anything: it knows message schemas [2], the operator knows [1]"


async def test_no_pod_goes_to_a_node_with_no_version_in_common() -> None:
    world = World()
    await world.join(replace(presence("node-1"), schemas=[2]))
    await world.apply(checkpoint_document())
    found = await world.get("DynamoCheckpoint", "llm")
    assert BOTH in found.status.message
    assert world.open() == []
    await world.join(replace(presence("node-2"), schemas=[1, 2]))
    assert [order.node for order in world.open("run")] == ["node-2"]


async def test_a_capture_waits_until_its_node_has_a_version_in_common() -> None:
    world = await warm(replace(presence("node-1"), schemas=[2]))
    assert world.open("prepare") == []
    found = await world.get("Snapshot", "llm")
    content = await world.content()
    waits = row_of(content)
    assert (waits.reason, waits.message) == ("UnsupportedVersion", BOTH)
    assert found.status.bound_snapshot_content_name == content.metadata.name
    await world.join(presence("node-1"))
    assert len(world.open("prepare")) == 1


async def test_an_order_that_its_node_cannot_read_is_tried_again_before_the_freeze() -> None:
    world = await world_of(1, answered=("run",))
    (prepare,) = world.open("prepare")
    await world.report(prepare, "prepared", schema=2)
    failure = (await world.content()).status.failure
    assert (failure.reason, failure.retryable) == ("UnsupportedVersion", True)
    assert failure.values == {"found": 2, "supported": [1]}
    await world.answer("abort")
    await world.advance(1.0)
    assert [order.attempt for order in world.open("prepare")] == [2]


WHY = Failure(
    reason="NotEligible",
    message="CRIU does not work on this node: CRIU did not dump: no such option",
    next_step="use CRIU 4.2 or later",
)
HAS_IT = replace(presence("node-1"), drivers=["cooperative", "criu"], criu="4.2")
UNFIT = replace(HAS_IT, drivers=["cooperative"], unready=unready(WHY, "criu"))


async def warm(last: Presence, **job: Any) -> World:
    """Return a world in which a worker is warm, and its node says this of itself."""
    world = await world_of(1)
    await world.apply(checkpoint_document(**job))
    (run,) = world.open("run")
    await world.report(run, "started")
    await world.join(last)
    await world.report(run, "ready")
    return world


async def test_a_capture_waits_for_the_self_test_of_its_node_and_names_what_failed() -> None:
    world = await warm(UNFIT, driver="criu")
    assert world.open("prepare") == []
    row = await world.row("Snapshot")
    assert (row.reason, row.message) == (
        "DriverUnavailable",
        f"node node-1 cannot use the driver criu: {WHY.message}. Next: {WHY.next_step}",
    )
    await world.join(HAS_IT)
    assert world.open("prepare")


async def test_a_capture_names_the_drivers_of_a_node_that_does_not_have_its_own() -> None:
    world = await warm(replace(UNFIT, unready=[]), driver="criu")
    assert world.open("prepare") == []
    row = await world.row("Snapshot")
    assert row.reason == "DriverUnavailable"
    assert "does not have the driver criu, it has cooperative" in row.message


async def test_a_capture_begins_on_a_node_that_does_not_say_which_drivers_it_has() -> None:
    assert (await warm(presence("node-1"), driver="criu")).open("prepare")


async def test_a_node_keeps_what_its_agent_says_of_criu() -> None:
    world = World()
    await world.join(UNFIT)
    node = await world.get("Node", "node-1")
    assert (node.status.criu, node.status.unready) == ("4.2", unready(WHY, "criu"))
