"""Which plans cannot be taken back, so that what they rest on is read from the store first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.core import content, fold
from snapshot_operator.core.conditions import timestamp
from snapshot_operator.core.controllers import CONTROLLERS, INDEXES
from snapshot_operator.core.plan import (
    Adopt,
    Create,
    Delete,
    Finalize,
    Label,
    Plan,
    SetStatus,
    Write,
    is_final,
    new_orders,
    rebased,
    status_plan,
)
from snapshot_operator.runtime.cluster import Key, Tracker
from snapshot_shared.errors import InvalidManifest, Refused, SnapbackError
from snapshot_shared.transitions import Capture, Restore
from tests.support import builders
from tests.support.builders import with_meta, with_spec, with_status
from tests.support.objects import checkpoint_document, restore_document
from tests.support.operator_world import World, world_of


@pytest.fixture
async def world() -> World:
    """A world in which a checkpoint is captured, and a pod is being restored from it."""
    world = await world_of(2, captured=True)
    await world.apply(restore_document(node="node-2"))
    return world


async def one(world: World, kind: str) -> Any:
    if kind == "SnapshotContent":
        return await world.content()
    if kind == "SnapshotRestore":
        return await world.restore("restored")
    return await world.get(kind, "restored" if kind == "Pod" else "llm")


def lost(value: Any) -> list[Any]:
    return [replace(item, state=fold.LOST) for item in value.status.orders]


def removing(value: Any) -> list[Any]:
    first = value.status.orders[0]
    return [*value.status.orders, replace(first, order="delete-x", verb="delete")]


FAILED = [builders.row("Failed", "True", "x")]


@pytest.mark.parametrize(
    ("kind", "change", "is_taken_back"),
    [
        ("DynamoCheckpoint", {"message": "m"}, False),
        ("DynamoCheckpoint", {"phase": "Creating"}, True),
        ("DynamoCheckpoint", {"phase": "Failed"}, True),
        ("DynamoCheckpoint", {"job_name": ""}, True),
        ("Pod", {"phase": "Running"}, False),
        ("Pod", {"phase": "Failed"}, True),
        ("Snapshot", {"bytes": 1}, False),
        ("Snapshot", {"conditions": FAILED}, True),
        ("SnapshotContent", {"retries": 1}, False),
        ("SnapshotContent", {"capture": Capture.SEALING}, False),
        ("SnapshotContent", {"capture": Capture.ABORTING}, True),
        ("SnapshotContent", {"capture": Capture.FAILED}, True),
        ("SnapshotContent", lambda v: {"readers": [*v.status.readers, "another"]}, False),
        ("SnapshotContent", {"readers": []}, True),
        ("SnapshotContent", lambda v: {"orders": removing(v)}, True),
        ("SnapshotContent", lambda v: {"orders": lost(v)}, True),
        ("SnapshotRestore", {"retries": 1}, False),
        ("SnapshotRestore", {"state": Restore.DROPPING}, True),
        ("SnapshotRestore", {"state": Restore.FAILED}, True),
        ("SnapshotRestore", lambda v: {"orders": lost(v)}, True),
    ],
)
async def test_a_status_that_fails_or_gives_something_up_is_final(
    world: World,
    kind: str,
    change: dict[str, Any] | Callable[[Any], dict[str, Any]],
    is_taken_back: bool,
) -> None:
    old = await one(world, kind)
    new = with_status(old, **(change(old) if callable(change) else change))
    assert new != old
    assert is_final(status_plan(old, new)) is is_taken_back
    # What was given up before is not given up again.
    assert not is_final(Plan((SetStatus(new, with_status(new)),)))


async def test_a_checkpoint_that_becomes_ready_or_begins_gives_nothing_up(world: World) -> None:
    ready = await one(world, "DynamoCheckpoint")
    creating = with_status(ready, phase="Creating", job_name="")
    assert not is_final(status_plan(creating, ready))
    assert not is_final(status_plan(creating, with_status(creating, message="m")))
    named = with_status(creating, job_name="llm")
    assert not is_final(status_plan(named, with_status(named, message="m")))


async def test_what_deletes_forgets_starts_a_worker_or_takes_an_artifact_is_final(
    world: World,
) -> None:
    job, content, snapshot = [
        await one(world, kind) for kind in ("Job", "SnapshotContent", "Snapshot")
    ]
    assert not is_final(Plan())
    assert not is_final(Plan((Adopt(job),)))
    for write in (Delete(job), Finalize(job), Create(job)):
        assert is_final(Plan((Adopt(job), write)))
    assert not is_final(Plan((Create(content),)))
    assert not is_final(Plan((Create(snapshot),)))


def decided(world: World, value: Any, read: Tracker | None = None) -> Plan:
    """Return what is decided about an object as if it were stored like this."""
    (by,) = [each for each in CONTROLLERS if each.kind == type(value).__name__]
    reader = read or Tracker(world.cluster, is_full=False)
    return by.reconcile(by.gather(reader, value), world.now)


def reads(world: World, value: Any) -> set[object]:
    """Return what a decision about an object reads, whose changes wake it."""
    read = Tracker(world.cluster, is_full=False)
    decided(world, value, read)
    return set(read.interests)


@pytest.mark.parametrize("kind", [controller.kind for controller in CONTROLLERS])
async def test_nothing_is_begun_for_an_object_before_it_is_adopted(world: World, kind: str) -> None:
    value = await one(world, kind)
    bare = with_meta(value, finalizers=[])
    assert decided(world, bare) == Plan((Adopt(bare),))


@pytest.mark.parametrize("kind", ["SnapshotContent", "SnapshotRestore"])
async def test_what_is_deleted_before_it_is_adopted_is_left_alone(world: World, kind: str) -> None:
    value = await one(world, kind)
    going = with_meta(value, finalizers=[], deletion_timestamp=timestamp(world.now))
    assert decided(world, going) == Plan()


async def test_what_is_bound_or_over_reads_what_it_depends_on_and_no_more(world: World) -> None:
    await world.apply(checkpoint_document("sharer", model="example/llm"))
    name = (await world.content()).metadata.name
    content, snapshot = Key("SnapshotContent", "", name), Key("Snapshot", "default", "llm")
    pod, node = Key("Pod", "default", "restored"), Key("Node", "", "node-2")
    assert reads(world, await one(world, "DynamoCheckpoint")) == {snapshot}
    assert reads(world, await world.get("DynamoCheckpoint", "sharer")) == {content}
    assert reads(world, await one(world, "Snapshot")) == {content}
    assert reads(world, await one(world, "SnapshotRestore")) == {content, pod, node}
    await world.answer_all()
    assert reads(world, await one(world, "SnapshotRestore")) == set()
    damaged = ("reading", f"{name}/damaged")
    assert reads(world, await one(world, "SnapshotContent")) == {("reading", name), damaged}


async def test_a_capture_reads_the_pod_with_its_uid_and_no_other_of_the_name(world: World) -> None:
    preparing = with_status(await one(world, "SnapshotContent"), capture=Capture.PREPARING)
    source = preparing.spec.source
    read = Tracker(world.cluster, is_full=False)
    view = content.gather(read, preparing)
    assert view.source is not None
    assert view.source.metadata.uid == source.pod_ref.uid
    other = replace(source.pod_ref, uid="00000000-0000-4000-8000-00000000abcd")
    another = with_spec(preparing, source=replace(source, pod_ref=other))
    assert content.gather(read, another).source is None


async def test_a_restore_that_has_found_damage_is_found_under_that_too(world: World) -> None:
    restore = await one(world, "SnapshotRestore")
    (reading,) = [index for index in INDEXES if index.name == "reading"]
    name = restore.status.content_name
    assert reading.keys(restore) == [name]
    order = next(item for item in restore.status.orders if item.verb == "load")
    for reason, keys in (("NoSpace", [name]), ("ArtifactCorrupt", [name, f"{name}/damaged"])):
        await world.fail(order, reason)
        (folded,) = [item for item in world.stored if item.order == order.order]
        damaged = with_status(restore, orders=[replace(order, final=folded)])
        assert reading.keys(damaged) == keys
        world.stored.clear()


async def test_what_was_folded_in_is_written_once_with_or_without_a_decision(world: World) -> None:
    stored = await one(world, "SnapshotContent")
    folded, decided = with_status(stored, retries=1), with_status(stored, retries=2)
    child = Delete(await one(world, "Job"))
    assert rebased(Plan((child,)), stored, stored) == Plan((child,))
    assert rebased(Plan((child,)), stored, folded).writes == (SetStatus(stored, folded), child)
    both = Plan((child, SetStatus(folded, decided)))
    assert rebased(both, stored, folded).writes == (child, SetStatus(stored, decided))
    for write in (Adopt(folded), Finalize(folded)):
        assert rebased(Plan((child, write)), stored, folded).writes == (SetStatus(stored, folded),)


async def test_an_order_is_new_by_its_name_and_attempt(world: World) -> None:
    content = await one(world, "SnapshotContent")
    first, *others = content.status.orders
    fewer = with_status(content, orders=others)
    assert new_orders(fewer, content) == [first]
    assert new_orders(None, content) == [first, *others]
    again = replace(first, attempt=first.attempt + 1)
    assert new_orders(content, with_status(content, orders=[again, *others])) == [again]


@pytest.mark.parametrize("error", [Refused, InvalidManifest])
@pytest.mark.parametrize(
    "call", ["delete", "update_status", "add_finalizer", "remove_finalizer", "label"]
)
async def test_a_write_that_is_refused_is_said_of_its_object(
    world: World, monkeypatch: pytest.MonkeyPatch, call: str, error: type[SnapbackError]
) -> None:
    async def refuse(*_: object) -> None:
        raise error("a policy of the cluster")

    value = await world.get("DynamoCheckpoint", "llm")
    new = with_status(value, message="new")
    writes: dict[str, Write] = {
        "delete": Delete(value),
        "update_status": SetStatus(value, new),
        "add_finalizer": Adopt(value),
        "remove_finalizer": Finalize(value),
        "label": Label(value, "a", "b"),
    }
    monkeypatch.setattr(world.cluster, call, refuse)
    with pytest.raises(error):
        await world.interpreter.apply(Plan((writes[call],)))
    ((name, failure),) = world.warnings
    assert (name, failure.reason) == ("llm", error.__name__)
    assert failure.message == "a policy of the cluster"
