"""Whose the generations are that agents find below their artifact roots."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from msgspec.structs import replace

from snapshot_api.facts import UNKNOWN_ARTIFACTS
from snapshot_api.meta import condition
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.core import inventory
from snapshot_operator.core.inventory import Policy
from snapshot_operator.core.presence import node_from
from snapshot_operator.main import OperatorSettings
from snapshot_shared import subjects
from snapshot_shared.api import FoundGeneration, InventoryRequest, Verdict
from snapshot_shared.bus import ASKED
from snapshot_shared.errors import InvalidInput
from snapshot_shared.ids import NodeName
from snapshot_shared.settings import load
from snapshot_shared.transitions import Capture
from tests.support import builders
from tests.support.objects import presence
from tests.support.operator_world import World, row_of
from tests.unit.tables import each

UID = builders.content().metadata.uid
OTHER = "00000000-0000-4000-8000-000000000002"
DAY_S = 86400.0
OLD_S = 8 * DAY_S
NOW = 1_000_000.0
UNDER_WAY = tuple(state for state in Capture if state not in (Capture.READY, Capture.FAILED))


def content(capture: Capture = Capture.READY, attempt: int = 2) -> SnapshotContent:
    return builders.content(capture=capture, attempt=attempt)


def found(uid: str = UID, generation: int = 1, **more: Any) -> FoundGeneration:
    fields = {"namespace": "default", "age_s": OLD_S, **more}
    return FoundGeneration(content_uid=uid, generation=generation, **fields)


def verdict(
    item: FoundGeneration, *contents: SnapshotContent, policy: Policy | None = None
) -> Verdict:
    (only,) = inventory.reply([item], contents, policy or Policy()).verdicts
    return only


def test_a_generation_of_no_content_is_moved() -> None:
    assert verdict(found(OTHER), content()) == "quarantine"


@each("capture", Capture)
@each("mode", ["off", "incomplete", "all"])
@each("sealed", [False, True])
@each("generation", [1, 2])
def test_whatever_an_attempt_of_a_content_may_have_written_is_kept(
    capture: Capture, mode: Literal["off", "incomplete", "all"], sealed: bool, generation: int
) -> None:
    item, policy = found(generation=generation, sealed=sealed), Policy(mode, after_s=0.0)
    assert verdict(item, content(capture), policy=policy) == "keep"


@each("capture", UNDER_WAY)
def test_the_next_attempt_of_a_capture_under_way_may_write_any_generation(capture: Capture) -> None:
    assert verdict(found(generation=3), content(capture)) == "keep"


@each("capture", [Capture.READY, Capture.FAILED])
def test_a_capture_that_is_over_writes_no_further_generation(capture: Capture) -> None:
    assert verdict(found(generation=3), content(capture)) == "quarantine"


def test_a_content_has_nothing_in_another_namespace() -> None:
    assert verdict(found(namespace="other"), content()) == "quarantine"


def test_what_changed_lately_is_left_alone() -> None:
    assert verdict(found(OTHER, age_s=7 * DAY_S - 1)) == "keep"
    assert verdict(found(OTHER, age_s=7 * DAY_S)) == "quarantine"


def test_a_store_that_was_lost_has_no_sealed_artifact_moved_but_told() -> None:
    assert verdict(found(sealed=True)) == "tell"


def test_everything_is_moved_only_when_that_is_asked_for() -> None:
    stray = inventory.reply([], [], Policy())
    assert (stray.others, stray.after_s) == ("tell", 7 * DAY_S)
    assert inventory.reply([], [], Policy("all")).others == "quarantine"
    assert verdict(found(OTHER, sealed=True), policy=Policy("all")) == "quarantine"


def test_quarantine_that_is_off_moves_nothing_and_still_tells() -> None:
    assert verdict(found(OTHER), policy=Policy("off")) == "tell"
    assert inventory.reply([], [], Policy("off")).others == "tell"


def of(node: str) -> dict[str, str]:
    """Return the headers of a request with the key of a node."""
    return {ASKED: subjects.inventory(NodeName(node))}


async def test_the_store_is_read_when_an_agent_asks() -> None:
    world = World()
    stored = await world.cluster.create(content(Capture.PENDING, 0))
    generations = [found(OTHER), found(stored.metadata.uid)]
    request = InventoryRequest(node="node-1", generations=generations)
    reply = await world.ask("inventory.*", request, of("node-1"))
    assert reply.verdicts == ["quarantine", "keep"]


async def test_a_node_asks_about_its_own_root_only() -> None:
    reply = await World().ask("inventory.*", InventoryRequest(node="node-1"), of("node-2"))
    assert reply.failure.reason == "Forbidden"


def test_the_settings_say_what_is_moved_and_after_how_long() -> None:
    environment = {"SNAPBACK_STATE_DIR": "/x"}
    assert load(OperatorSettings, environment).policy == Policy("incomplete", 7 * DAY_S)
    environment |= {"SNAPBACK_QUARANTINE": "all", "SNAPBACK_QUARANTINE_DAYS": "0.5"}
    assert load(OperatorSettings, environment).policy == Policy("all", DAY_S / 2)
    environment |= {"SNAPBACK_QUARANTINE": "some", "SNAPBACK_QUARANTINE_DAYS": "0"}
    with pytest.raises(InvalidInput) as caught:
        load(OperatorSettings, environment)
    assert "SNAPBACK_QUARANTINE='some'" in str(caught.value)
    assert "SNAPBACK_QUARANTINE_DAYS='0'" in str(caught.value)


def test_a_node_says_what_below_its_artifact_root_is_nobodys() -> None:
    clean = presence("node-1")
    node = node_from(clean, None, NOW)
    assert condition(node.status.conditions, UNKNOWN_ARTIFACTS) is None
    node = node_from(replace(clean, unknown=2), node, NOW)
    told = row_of(node, UNKNOWN_ARTIFACTS)
    assert (told.status, told.reason) == ("True", "UnknownArtifactsFound")
    node = node_from(replace(clean, quarantined=3), node, NOW)
    told = row_of(node, UNKNOWN_ARTIFACTS)
    assert (told.status, told.reason) == ("True", "UnknownArtifactsMoved")
    assert "3 moved into .quarantine" in told.message
    node = node_from(clean, node, NOW)
    assert row_of(node, UNKNOWN_ARTIFACTS).status == "False"
