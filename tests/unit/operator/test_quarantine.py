"""A committed artifact that is found damaged is doubted by all, until it was read whole."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.meta import Condition, OrderStatus, condition, is_true
from snapshot_shared.errors import Failure, NotEligible, NotFound
from snapshot_shared.transitions import Restore
from tests.support.objects import checkpoint_document, presence, restore_document
from tests.support.operator_world import World, payload, row_of, world_of

DAMAGE = Failure(
    reason="ArtifactCorrupt",
    message="chunk 3 of shard-0 is damaged",
    values={"file": "shard-0", "chunk": 3},
)


async def come_to(world: World, verb: str) -> OrderStatus:
    """Answer one order after another well until there is one of this verb."""
    while not world.open(verb):
        await world.answer_well(world.open()[0])
    return world.open(verb)[0]


async def find_damage(world: World, verb: str = "load") -> None:
    """Have the restore of a pod on node-2 find damage, and be answered no further."""
    await world.apply(restore_document(node="node-2"))
    await world.report(await come_to(world, verb), "failed", failure=DAMAGE)


async def damage_found(world: World, verb: str = "load") -> None:
    """Have a restore find damage, and end."""
    await find_damage(world, verb)
    await world.answer_all()


async def row(world: World, type_: str) -> Condition:
    return row_of(await world.content(), type_)


@pytest.mark.parametrize(("verb", "part"), [("load", "gpu-0"), ("restore", "")])
async def test_damage_that_a_restore_finds_brings_the_content_into_quarantine(
    world: World, verb: str, part: str
) -> None:
    await damage_found(world, verb)
    found = await row(world, "Quarantined")
    assert (found.status, found.reason) == ("True", "ArtifactCorrupt")
    for word in (part, "chunk 3 of shard-0", "pod default/restored", "node-2"):
        assert word in found.message


async def test_all_who_use_a_damaged_content_say_so_and_stay_captured(world: World) -> None:
    await damage_found(world)
    for kind in ("DynamoCheckpoint", "Snapshot"):
        ready = await world.row(kind)
        assert (ready.status, ready.reason) == ("False", "ArtifactCorrupt")
        assert "chunk 3 of shard-0" in ready.message
        assert not is_true((await world.get(kind, "llm")).status.conditions, "Failed")
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_who_looks_only_after_the_damage_was_found_still_learns_of_the_capture() -> None:
    world = await world_of(2, answered=())
    await come_to(world, "seal")
    under_way = {kind: await world.get(kind, "llm") for kind in ("DynamoCheckpoint", "Snapshot")}
    await world.answer_all()
    await damage_found(world)
    told = {kind: await world.get(kind, "llm") for kind in under_way}
    for kind, value in under_way.items():
        late = replace(await world.get(kind, "llm"), status=value.status)
        await world.cluster.update_status(late)
    await world.settle()
    for kind, value in told.items():
        found = (await world.get(kind, "llm")).status
        truths = [(row.type, row.status) for row in found.conditions]
        assert truths == [("Ready", "False"), ("Failed", "False")]
        assert (await world.row(kind)).reason == "ArtifactCorrupt"
        assert found.bytes == value.status.bytes > 0
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_a_new_restore_of_a_damaged_content_is_refused_before_any_side_effect(
    world: World,
) -> None:
    await damage_found(world)
    before = len(world.orders.history)
    await world.apply(restore_document(name="late"))
    pod = await world.get("Pod", "late")
    assert (pod.status.phase, pod.status.reason) == ("Failed", "Quarantined")
    assert "chunk 3 of shard-0" in pod.status.message
    assert (pod.status.node_name, pod.status.orders) == ("", [])
    assert len(world.orders.history) == before
    assert (await world.content()).status.readers == []


async def test_a_restore_that_waits_for_a_place_is_refused_once_damage_is_found(
    world: World,
) -> None:
    await world.apply(restore_document(name="one", node="node-2"))
    await world.apply(restore_document(name="two", node="node-2"))
    waiting = await world.restore("two")
    assert (waiting.status.state, waiting.status.node_name) == (Restore.PENDING, "")
    assert waiting.status.conditions[0].reason == "WaitingForPod"
    assert waiting.status.content_name == (await world.content()).metadata.name
    await world.report(world.open("load")[0], "failed", failure=DAMAGE)
    found = (await world.restore("two")).status
    assert (found.state, found.failure.reason) == (Restore.FAILED, "Quarantined")


async def test_quarantine_deletes_nothing_and_does_not_stand_in_the_way_of_a_deletion(
    world: World,
) -> None:
    await damage_found(world)
    assert not [order for order in world.orders.history if order.verb == "delete"]
    await world.remove("DynamoCheckpoint", "llm")
    assert not world.cluster.page("SnapshotContent")


@pytest.mark.parametrize("reason", ["Incompatible", "DeviceTooSmall", "NoSpace", "Internal"])
async def test_what_only_the_target_lacks_is_no_reason_for_a_quarantine(
    world: World, reason: str
) -> None:
    await world.apply(restore_document())
    await world.fail(world.open("load")[0], reason)
    await world.answer_all()
    content = await world.content()
    assert condition(content.status.conditions, "Quarantined") is None
    assert is_true(content.status.conditions, "Ready")


async def test_damage_that_a_second_device_finds_after_the_restore_has_failed_counts(
    world: World,
) -> None:
    await world.apply(restore_document())
    first, second = world.open("load")
    await world.fail(first, "NoSpace")
    await world.report(second, "failed", failure=DAMAGE)
    await world.answer_all()
    assert (await row(world, "Quarantined")).status == "True"


async def test_a_verification_reads_the_committed_generation_on_a_ready_node(world: World) -> None:
    content = await world.content()
    reply = await world.verify()
    assert (reply.content, reply.verification) == (content.metadata.name, 1)
    (order,) = world.open("verify")
    assert order.node == "node-1"
    assert payload(order)["artifact"]["root_digest"] == content.status.committed.root_digest
    assert (await row(world, "Verified")).reason == "Verifying"
    await world.answer_well(order)
    found = await row(world, "Verified")
    assert (found.status, found.message) == ("True", "node-1 read 2.01 KiB")
    assert (await world.content()).status.verified == 1


@pytest.mark.parametrize("kind", ["DynamoCheckpoint", "Snapshot", "SnapshotContent"])
async def test_a_verification_may_be_asked_for_by_any_of_the_three_names(
    world: World, kind: str
) -> None:
    name = (await world.content()).metadata.name if kind == "SnapshotContent" else "llm"
    await world.verify(kind, name)
    assert world.open("verify")


async def test_a_verification_under_way_is_joined(world: World) -> None:
    assert (await world.verify()).verification == 1
    assert (await world.verify()).verification == 1
    await world.answer_all()
    assert (await world.verify()).verification == 2
    assert [order.attempt for order in world.orders.history if order.verb == "verify"] == [1, 2]


async def test_a_verification_that_finds_damage_brings_into_quarantine(world: World) -> None:
    await world.verify()
    failure = Failure(reason="ArtifactMissing", message="shard-0 does not exist")
    await world.report(world.open("verify")[0], "failed", failure=failure)
    assert (await row(world, "Verified")).status == "False"
    found = await row(world, "Quarantined")
    assert (found.status, found.reason) == ("True", "ArtifactMissing")
    assert "node-1" in found.message


async def test_a_verification_that_finds_nothing_lifts_the_quarantine_everywhere(
    world: World,
) -> None:
    before = await world.row("DynamoCheckpoint")
    await damage_found(world)
    await world.verify()
    await world.answer_all()
    assert (await row(world, "Quarantined")).status == "False"
    after = await world.get("DynamoCheckpoint", "llm")
    assert after.status.message == ""
    shown = row_of(after)
    assert (shown.status, shown.reason, shown.message) == ("True", before.reason, before.message)
    await world.join(presence("node-3"))
    await world.perform(restore_document(name="again", node="node-3"))
    assert (await world.restore("again")).status.state is Restore.RESTORED
    await world.advance(60.0)
    assert (await row(world, "Quarantined")).status == "False"


async def test_a_quarantine_that_was_lifted_stays_so_while_its_finder_is_still_being_dropped(
    world: World,
) -> None:
    await find_damage(world)
    assert (await row(world, "Quarantined")).status == "True"
    await world.verify()
    await world.answer_well(world.open("verify")[0])
    await world.advance(1.0)
    assert (await world.restore("restored")).status.state is Restore.DROPPING
    assert (await row(world, "Quarantined")).status == "False"


async def test_damage_found_while_a_verification_reads_is_not_lifted_by_that_one(
    world: World,
) -> None:
    reply = await world.verify()
    (early,) = world.open("verify")
    await find_damage(world)
    await world.answer_well(early)
    assert (await row(world, "Quarantined")).status == "True"
    (late,) = world.open("verify")
    assert late.attempt == reply.verification + 1
    status = (await world.content()).status
    assert status.verified < status.verifications
    assert (await row(world, "Verified")).status == "Unknown"
    await world.answer_all()
    assert (await row(world, "Quarantined")).status == "False"


@pytest.mark.parametrize("reason", ["StorageFailed", "DeadlineExceeded"])
async def test_a_verification_that_could_not_read_says_that_nothing_is_known(
    world: World, reason: str
) -> None:
    await world.verify()
    await world.fail(world.open("verify")[0], reason)
    found = await row(world, "Verified")
    assert (found.status, found.reason) == ("Unknown", reason)
    content = await world.content()
    assert condition(content.status.conditions, "Quarantined") is None
    assert content.status.verified == 1


async def test_a_verification_that_is_older_than_the_node_knows_is_made_past_that(
    world: World,
) -> None:
    await world.verify()
    superseded = Failure(reason="Superseded", message="older", values={"attempt": 7})
    await world.report(world.open("verify")[0], "rejected", failure=superseded)
    (order,) = world.open("verify")
    assert order.attempt == 8
    await world.answer_all()
    status = (await world.content()).status
    assert (status.verifications, status.verified) == (8, 8)
    assert (await row(world, "Verified")).status == "True"


async def test_an_answer_after_the_deadline_still_counts(world: World) -> None:
    await world.verify()
    (order,) = world.open("verify")
    await world.advance(4000.0)
    found = await row(world, "Verified")
    assert (found.status, found.reason) == ("Unknown", "AgentUnresponsive")
    await world.report(order, "failed", failure=DAMAGE)
    assert (await row(world, "Quarantined")).status == "True"


async def test_a_verification_waits_for_a_node_that_can_read(world: World) -> None:
    back = dict(world.present)
    await world.silence(10.0)
    await world.verify()
    assert not world.open("verify")
    assert (await row(world, "Verified")).reason == "NoNode"
    await world.join(back["node-2"])
    (order,) = world.open("verify")
    assert order.node == "node-2"


async def test_a_verification_does_not_hold_up_a_deletion(world: World) -> None:
    await world.verify()
    await world.delete("DynamoCheckpoint", "llm")
    await world.answer("delete")
    assert world.open("verify")
    assert [o for o in world.orders.history if o.verb == "delete"]


async def test_only_what_is_captured_can_be_verified(world: World) -> None:
    with pytest.raises(NotFound):
        await world.verify(name="none")
    await world.apply(checkpoint_document("young"))
    with pytest.raises(NotEligible, match="young holds no captured artifact"):
        await world.verify(name="young")


async def test_settled_quarantine_and_verification_plan_nothing_more(world: World) -> None:
    await damage_found(world)
    await world.verify()
    await world.answer_all()
    before: Any = await world.everything()
    await world.advance(60.0)
    assert await world.everything() == before
