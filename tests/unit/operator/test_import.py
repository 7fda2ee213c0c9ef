"""An artifact that was retained and is named again: read as a whole, then like one captured."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import OrderStatus, is_true
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import ArtifactSource, SnapshotSource
from snapshot_operator.core.content import content_name, import_name
from snapshot_operator.core.retention import Holdings, Limits, judged
from snapshot_operator.local.store import SqliteStore
from snapshot_shared.api import FoundGeneration, InventoryRequest
from snapshot_shared.errors import NotEligible
from snapshot_shared.orders import Proven
from snapshot_shared.transitions import Capture, Restore
from tests.support import builders
from tests.support.builders import UID, with_meta, with_spec
from tests.support.objects import checkpoint_document, restore_document, snapshot_document
from tests.support.operator_world import DIGEST, World, payload, row_of, world_of


@pytest.fixture
async def world() -> World:
    return await world_of(2)


async def to_retain(world: World, **job: Any) -> SnapshotContent:
    """Capture a worker whose artifact is to be retained."""
    document = checkpoint_document("first", **job)
    document["spec"]["deletionPolicy"] = "Retain"
    await world.perform(document)
    return await world.content()  # type: ignore[no-any-return]


async def retained(world: World, **job: Any) -> SnapshotContent:
    """Capture a worker and delete its checkpoint; return the content as it was."""
    made = await to_retain(world, **job)
    await world.remove("DynamoCheckpoint", "first")
    assert not world.cluster.all("SnapshotContent")
    assert "delete" not in {order.verb for order in world.orders.history}
    return made


def naming(made: Any, name: str = "again", **spec: Any) -> dict[str, Any]:
    artifact = {
        "contentUID": made.metadata.uid,
        "generation": made.status.committed.generation,
        "rootDigest": made.status.committed.root_digest,
    }
    return snapshot_document(name, "", source={"artifact": artifact}, **spec)


def proof_of(made: Any) -> Proven:
    known = made.status.committed
    return Proven(bytes=known.bytes, parts=known.parts, vector=known.vector, driver=known.driver)


async def imported(world: World, made: SnapshotContent, **spec: Any) -> None:
    await world.apply(naming(made, **spec))
    (order,) = world.open("verify")
    await world.report(order, proven=proof_of(made))


async def ready(world: World, name: str = "again") -> tuple[bool, str, str]:
    found = row_of(await world.get("Snapshot", name), "Ready")
    return found.status == "True", found.reason, found.message


async def failed(world: World, name: str = "again") -> str:
    assert is_true((await world.get("Snapshot", name)).status.conditions, "Failed")
    return (await ready(world, name))[1]


async def test_a_retained_artifact_that_is_named_again_is_restored_from(world: World) -> None:
    made = await retained(world)
    await imported(world, made)
    content = await world.content()
    assert content.status.committed == made.status.committed
    assert (content.status.capture, (await ready(world))[0]) == (Capture.READY, True)
    assert is_true(content.status.conditions, "Verified")
    await world.perform(restore_document(source="again"))
    assert (await world.restore("restored")).status.state is Restore.RESTORED
    read = [payload(order) for order in world.orders.history if "artifact" in payload(order)]
    named = {(found["artifact"]["content_uid"], found["artifact"]["generation"]) for found in read}
    assert named == {(made.metadata.uid, 1)}


async def test_the_driver_of_its_restores_is_that_of_the_artifact(world: World) -> None:
    await imported(world, await retained(world, driver="respawn"))
    await world.perform(restore_document(source="again"))
    (order,) = [order for order in world.orders.history if order.verb == "restore"]
    assert payload(order)["driver"] == "respawn"


async def test_an_import_orders_nothing_but_to_read(world: World) -> None:
    made = await retained(world)
    before = len(world.orders.history)
    await imported(world, made)
    await world.advance(60.0)
    assert [order.verb for order in world.orders.history[before:]] == ["verify"]


async def test_an_import_waits_while_the_content_that_made_it_is_there(world: World) -> None:
    made = await to_retain(world)
    await world.apply(naming(made))
    assert (await ready(world))[1] == "ArtifactInUse"
    assert made.metadata.name in (await ready(world))[2]
    await world.remove("DynamoCheckpoint", "first")
    (order,) = [order for order in world.orders.history if order.verb == "verify"]
    assert payload(order)["artifact"]["content_uid"] == made.metadata.uid


async def test_one_of_two_imports_has_the_artifact_and_the_other_fails_at_its_deadline(
    world: World,
) -> None:
    made = await retained(world)
    await imported(world, made)
    await world.apply(naming(made, "other", deadlineSeconds=100))
    assert (await ready(world, "other"))[1] == "ArtifactInUse"
    await world.apply(restore_document(source="other"))
    await world.advance(99.0)
    other = await world.get("Snapshot", "other")
    assert not is_true(other.status.conditions, "Failed")
    await world.advance(1.0)
    assert await failed(world, "other") == "ArtifactInUse"
    assert (await world.restore("restored")).status.state is Restore.FAILED
    assert (await ready(world))[0]


async def test_of_imports_that_wait_together_one_goes_on_and_the_other_waits(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = world.store

    async def slow(value: AnyObject) -> AnyObject:
        await asyncio.sleep(0)
        return await SqliteStore.create(store, value)

    made = await to_retain(world)
    await world.apply(naming(made, "one"), naming(made, "two"))
    monkeypatch.setattr(store, "create", slow)
    await world.delete("DynamoCheckpoint", "first")
    await world.answer("stop", "drop")
    (order,) = world.open("verify")
    await world.report(order, proven=proof_of(made))
    reasons = sorted([(await ready(world, name))[1] for name in ("one", "two")])
    assert reasons == ["ArtifactInUse", "Captured"]


async def test_a_checkpoint_whose_content_was_deleted_is_ready_no_more() -> None:
    world = await world_of(1, captured=True)
    await world.delete("SnapshotContent", (await world.content()).metadata.name)
    await world.answer_all()
    status = (await world.get("DynamoCheckpoint", "llm")).status
    assert (status.phase, is_true(status.conditions, "Failed")) == ("Failed", True)
    (row,) = [each for each in status.conditions if each.type == "Ready"]
    assert (row.status, row.reason) == ("False", "SnapshotContentDeleted")
    assert "was deleted, and the artifact with it" in row.message
    assert row.message.count("Next: ") == 1


async def test_who_has_lost_a_content_of_the_same_name_stands_for_it_no_more(world: World) -> None:
    made = await retained(world)
    await imported(world, made, deletionPolicy="Retain")
    await world.apply(naming(made, "other"))
    await world.delete("SnapshotContent", (await world.content()).metadata.name)
    await world.report(world.open("verify")[0], proven=proof_of(made))
    assert (await ready(world, "other"))[0]
    assert await failed(world) == "SnapshotContentDeleted"
    with pytest.raises(NotEligible):
        await world.verify("Snapshot", "again")
    verdicts = judged(Holdings.of(world.cluster.all), Limits(count=1), world.now)
    assert [verdict.value.metadata.name for verdict in verdicts] == ["other"]


@pytest.mark.parametrize(("policy", "may_delete"), [("Delete", False), ("Retain", True)])
async def test_nobody_is_told_to_delete_what_would_take_the_files_with_it(
    world: World, policy: str, may_delete: bool
) -> None:
    made = await retained(world)
    await imported(world, made, deletionPolicy=policy)
    await world.apply(naming(made, "other", deadlineSeconds=100))
    assert "delete" not in (await ready(world, "other"))[2]
    await world.advance(101.0)
    _, _, message = await ready(world, "other")
    assert "restore from again" in message
    assert ("delete that" in message) is may_delete


async def test_a_uid_of_another_namespace_tells_nothing_of_its_content(world: World) -> None:
    await world.capture("first")
    document = naming(await world.content())
    document["metadata"]["namespace"] = "elsewhere"
    await world.apply(document)
    (order,) = world.open("verify")
    assert payload(order)["artifact"]["namespace"] == "elsewhere"


async def test_a_reading_that_may_go_well_the_next_time_is_tried_again(world: World) -> None:
    made = await retained(world)
    await world.apply(naming(made, deadlineSeconds=86400))
    for attempt in (1, 2, 3):
        (order,) = world.open("verify")
        assert (order.attempt, payload(order)["deadline_s"]) == (attempt, 86400)
        await world.fail(order, "DeadlineExceeded", retryable=True)
    await world.fail(world.open("verify")[0], "DeadlineExceeded", retryable=True)
    assert await failed(world) == "DeadlineExceeded"


async def test_an_import_takes_what_another_has_given_up(world: World) -> None:
    made = await retained(world)
    await imported(world, made, deletionPolicy="Retain")
    await world.apply(naming(made, "other"))
    await world.delete("Snapshot", "again")
    (order,) = world.open("verify")
    await world.report(order, proven=proof_of(made))
    assert (await ready(world, "other"))[0]


@pytest.mark.parametrize("reason", ["ArtifactCorrupt", "ArtifactMissing"])
async def test_what_is_damaged_or_missing_fails_the_import_and_nothing_is_removed(
    world: World, reason: str
) -> None:
    made = await retained(world)
    await world.apply(naming(made))
    await world.fail(world.open("verify")[0], reason)
    assert await failed(world) == reason
    status = (await world.content()).status
    assert status.verifications == status.verified
    await world.delete("Snapshot", "again")
    assert not world.cluster.all("SnapshotContent")
    assert "delete" not in {order.verb for order in world.orders.history}


@pytest.mark.parametrize(("policy", "removed"), [("Delete", True), ("Retain", False)])
async def test_its_deletion_removes_the_files_that_it_names_unless_they_are_retained(
    world: World, policy: str, removed: bool
) -> None:
    made = await retained(world)
    await imported(world, made, deletionPolicy=policy)
    await world.delete("Snapshot", "again")
    orders = [payload(order) for order in world.orders.history if order.verb == "delete"]
    assert [order["content_uid"] for order in orders] == [made.metadata.uid] * removed
    await world.answer_all()
    assert not world.cluster.all("SnapshotContent")


async def test_an_answer_that_does_not_say_what_it_holds_fails_the_import(world: World) -> None:
    await world.apply(naming(await retained(world)))
    await world.report(world.open("verify")[0])
    assert await failed(world) == "InvalidReport"


async def test_another_node_reads_when_the_first_is_gone(world: World) -> None:
    made = await retained(world)
    await world.apply(naming(made))
    (first,) = world.open("verify")
    del world.present[first.node]
    await world.see(absent_s=95.0)
    await world.delete("Node", first.node)
    second: OrderStatus = world.open("verify")[-1]
    assert (second.node, second.attempt) == ("node-2", 2)
    await world.report(second, proven=proof_of(made))
    assert (await ready(world))[0]


async def test_an_import_with_no_node_to_read_it_says_so_and_ends_at_its_deadline(
    world: World,
) -> None:
    made = await retained(world)
    await world.silence(95.0)
    await world.apply(naming(made, deadlineSeconds=100))
    assert (await ready(world))[1] == "NoNode"
    await world.advance(101.0)
    assert await failed(world) == "DeadlineExceeded"


async def test_an_import_does_not_begin_on_what_memory_has_not_seen_yet() -> None:
    first = await world_of(1)
    await first.capture("first")
    made = await first.content()
    late = first.another(*KINDS.keys() - {"Node"})
    await late.apply(naming(made))
    await late.advance(10.0)
    assert (await ready(late))[1] == "ArtifactInUse"
    assert len(await first.store.list("SnapshotContent")) == 1


async def test_what_an_import_has_is_not_moved_into_quarantine(world: World) -> None:
    made = await retained(world)
    await imported(world, made)
    found = FoundGeneration(
        namespace="default", content_uid=made.metadata.uid, generation=1, age_s=1e9
    )
    other = replace(found, generation=2)
    reply = await world.nodes.inventory(InventoryRequest(node="node-1", generations=[found, other]))
    assert reply.verdicts == ["keep", "quarantine"]


@pytest.mark.parametrize(("namespace", "space"), [("one", "one"), (None, "default")])
def test_the_content_of_an_import_is_named_by_namespace_uid_and_generation(
    namespace: str | None, space: str
) -> None:
    artifact = ArtifactSource(content_uid=UID, generation=3, root_digest=DIGEST)
    snapshot = with_spec(builders.snapshot(), source=SnapshotSource(artifact=artifact))
    assert content_name(with_meta(snapshot, namespace=namespace)) == import_name(space, UID, 3)


def test_the_same_uid_in_another_namespace_is_another_artifact() -> None:
    assert import_name("one", "uid", 1) != import_name("two", "uid", 1)
    assert import_name("one", "uid", 1) != import_name("one", "uid", 2)
