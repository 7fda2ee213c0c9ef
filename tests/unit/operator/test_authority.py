"""A status is data: an order and a content in it are used only if they follow from their object."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.kinds import AnyObject
from snapshot_api.meta import OrderStatus
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.views import orders_of
from snapshot_operator.core import ordering
from snapshot_operator.core.authority import VERBS, foreign
from snapshot_operator.core.content import content_behind
from snapshot_operator.core.content import gather as read_by
from snapshot_operator.core.restore import gather
from snapshot_operator.runtime.cluster import Tracker
from snapshot_shared.orders import AbortOrder, DeleteOrder, LoadOrder, Order, astray, order_in
from tests.support.builders import payload, with_meta, with_status
from tests.support.objects import checkpoint, checkpoint_document, restore_document
from tests.support.operator_world import World, world_of
from tests.support.operator_world import payload as fields
from tests.unit.tables import each

STRANGER = "00000000-0000-4000-8000-0000000000ff"
POD = {"namespace": "victim", "name": "worker", "uid": STRANGER}
ARTIFACT = {"namespace": "victim", "content_uid": STRANGER}


async def story() -> list[tuple[AnyObject, OrderStatus]]:
    """Return every order of a capture, a restore, their ends, and the object that has it."""
    world = await world_of(4)
    seen: dict[str, tuple[AnyObject, OrderStatus]] = {}

    async def see() -> None:
        await world.answer_all()
        for value in await world.everything():
            seen.update({item.order: (value, item) for item in orders_of(value)})

    await world.apply(checkpoint_document())
    await see()
    await world.apply(restore_document(node="node-2"))
    await world.answer("run", "load", "commit")
    await world.fail(world.open("restore")[0], "RestoreFailed")
    await see()
    await world.apply(restore_document(name="again", node="node-2"))
    await see()
    await world.apply(checkpoint_document("failed"))
    await world.answer("run")
    await world.fail(world.open("prepare")[0], "NotEligible")
    await see()
    return [*seen.values()]


async def test_each_order_of_captures_and_restores_follows_from_its_object() -> None:
    found = await story()
    assert {item.verb for _, item in found} >= {
        *("run", "prepare", "dump", "save", "seal", "release", "abort"),
        *("load", "commit", "drop", "restore"),
    }
    for owner, item in found:
        assert item.verb in VERBS[type(owner)]
        assert foreign(owner, item) == "", item.order


def altered(item: OrderStatus, **changes: Any) -> OrderStatus:
    """Change fields of an order in its payload; those of a field that is an object are merged."""
    order = fields(item)
    for name, value in changes.items():
        inner = order.get(name)
        order[name] = inner | value if isinstance(inner, dict) else value
    return replace(item, payload=payload(**order))


CHANGES: dict[str, Any] = {
    "owner": STRANGER,
    "pod": POD,
    "namespace": "victim",
    "content_uid": STRANGER,
    "artifact": ARTIFACT,
    "fence_token": f"{STRANGER}.1",
    "load_token": f"{STRANGER}.1.gpu-0",
    "devices": ["GPU-of-another"],
    "driver": "criu",
}


@each("name", CHANGES)
async def test_an_order_that_names_what_is_of_another_is_foreign(name: str) -> None:
    changed = [
        (owner, item, altered(item, **{name: CHANGES[name]}))
        for owner, item in await story()
        if fields(item).get(name)
    ]
    found = [
        (item.order, foreign(owner, other))
        for owner, item, other in changed
        # A restore takes devices and driver from its pod, and the agent judges them.
        if order_in(other.payload) is not None
        and not (name in ("devices", "driver") and item.verb in ("restore", "run", "place"))
    ]
    assert found
    assert {field for _, field in found} == {name}, found


async def test_a_node_refuses_orders_that_reach_into_a_namespace_or_serve_no_owner() -> None:
    """The wall of a node, which sees neither spec nor status."""
    refused: set[tuple[str, str]] = set()
    for _, item in await story():
        order = order_in(item.payload)
        assert order is not None
        assert astray(order) == "", item.order
        for name in ("pod", "namespace", "artifact", "owner", "content_uid"):
            other = order_in(altered(item, **{name: CHANGES[name]}).payload)
            if fields(item).get(name) and other is not None and astray(other):
                refused.add((item.verb, name))
    reads = {(verb, name) for verb in ("load", "restore") for name in ("pod", "artifact")}
    writes = {(verb, name) for verb in ("save", "seal") for name in ("pod", "namespace")}
    owners = {
        (verb, name)
        for verb in ("prepare", "dump", "save", "seal", "release")
        for name in ("owner", "content_uid")
    }
    assert refused == reads | writes | owners


async def test_a_verb_or_an_id_of_another_object_is_foreign() -> None:
    for owner, item in await story():
        renamed = replace(item, order=item.order.replace(owner.metadata.uid, STRANGER))
        assert foreign(owner, renamed) == "order"
        assert foreign(owner, replace(item, payload=payload(type="snapback.v9.x"))) == "payload"
        assert foreign(owner, replace(item, attempt=item.attempt + 1)) == "payload"
        assert foreign(replace(checkpoint(), metadata=owner.metadata), item) == "verb"


async def victim() -> tuple[World, SnapshotContent]:
    """Return a world in which the namespace `victim` has an artifact and a running worker."""
    world = await world_of(4)
    document = checkpoint_document()
    document["metadata"]["namespace"] = "victim"
    await world.perform(document)
    return world, await world.content()


async def write_status(world: World, value: Any, **changes: Any) -> None:
    """Write a status without the operator, as a user who has the right to."""
    await world.store.update_status(with_status(value, **changes))
    await world.cluster.refresh(value)


@pytest.mark.parametrize("verb", ["delete", "abort"])
async def test_an_order_that_was_written_into_a_status_is_not_published(verb: str) -> None:
    world, content = await victim()
    await world.apply(checkpoint_document("mine"), restore_document("mine", "target"))
    restore = await world.restore("target")
    common: dict[str, Any] = {
        "order": f"{verb}-{restore.metadata.uid}",
        "attempt": 1,
        "node": "node-1",
        "owner": restore.metadata.uid,
        "deadline_s": 60.0,
    }
    uid = content.metadata.uid
    order: Order = DeleteOrder(namespace="victim", content_uid=uid, generation=1, **common)
    if verb == "abort":
        pod = ordering.source_ref(content)
        order = AbortOrder(pod=pod, content_uid=uid, on_failure="Kill", **common)
    forged = ordering.status_of(order, "agent", world.now)
    await write_status(world, restore, orders=[*restore.status.orders, forged])
    assert forged in orders_of(await world.restore("target"))
    await world.sweep.once()
    await world.advance(600.0)
    await world.sweep.once()
    assert [each for each in world.orders.history if each.order == forged.order] == []
    said = {(name, failure.reason) for name, failure in world.warnings}
    assert said == {(restore.metadata.name, "ForeignOrders")}


async def test_a_content_of_another_namespace_that_a_status_names_is_none() -> None:
    world, content = await victim()
    await world.apply(checkpoint_document("mine"))
    mine = await world.get("DynamoCheckpoint", "mine")
    named = with_status(mine, phase="Ready", content_name=content.metadata.name)
    assert content_behind(world.cluster.get, named) is None
    theirs = world.cluster.get("DynamoCheckpoint", "victim", "llm")
    assert theirs is not None
    assert content_behind(world.cluster.get, theirs) == content


async def test_a_restore_whose_status_names_a_content_of_another_namespace_loads_nothing() -> None:
    world, content = await victim()
    await world.capture("mine")
    await world.apply(restore_document("mine", "target"))
    restore = await world.restore("target")
    await write_status(world, restore, content_name=content.metadata.name, node_name="node-1")
    read = Tracker(world.cluster, is_full=False)
    assert gather(read, await world.restore("target")).content is None
    assert read_by(read, content).readers == []
    await world.answer_all()
    await world.advance(60.0)
    await world.answer_all()
    given = [order_in(each.payload) for each in world.orders.history]
    found = [each.artifact.content_uid for each in given if isinstance(each, LoadOrder)]
    assert content.metadata.uid not in found
    named = world.cluster.get("SnapshotContent", None, content.metadata.name)
    assert named.status.readers == []


async def test_an_artifact_of_the_namespace_of_the_restore_alone_may_be_loaded() -> None:
    loads = [(owner, item) for owner, item in await story() if item.verb == "load"]
    assert loads
    for owner, item in loads:
        moved = with_meta(owner, namespace="team")
        assert foreign(moved, altered(item, pod={"namespace": "team"})) == "artifact"


async def test_an_abort_of_a_capture_may_have_no_token() -> None:
    aborts = [(owner, item) for owner, item in await story() if fields(item).get("fence_token")]
    tokenless = [(o, altered(i, fence_token=None)) for o, i in aborts if i.verb == "abort"]
    assert tokenless
    assert [foreign(owner, item) for owner, item in tokenless] == [""] * len(tokenless)
