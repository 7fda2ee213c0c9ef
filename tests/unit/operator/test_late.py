"""What is not seen yet: nothing of it ends, goes or is forgotten, and who waits for it waits on."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import OrderStatus, is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.views import orders_of
from snapshot_operator.core import fold
from snapshot_operator.core.restore import restore_for
from snapshot_operator.local import garbage
from snapshot_operator.runtime.cluster import key_of
from snapshot_operator.runtime.manager import Input
from snapshot_shared.api import PodsRequest, TemplateRequest
from tests.support import builders
from tests.support.objects import (
    checkpoint_document,
    pod_document,
    presence,
    restore_document,
    snapshot_document,
)
from tests.support.operator_world import World, world_of
from tests.support.waiting import until
from tests.unit.tables import each


async def two_operators(nodes: int = 1) -> tuple[World, World]:
    """Return an operator that works, and one that has seen as much so far."""
    first = await world_of(nodes, answered=())
    second = first.another()
    await second.sync()
    return first, second


async def state_when_acknowledged(
    first: World, second: World, owner: AnyObject, order: OrderStatus
) -> str:
    """Give `second` a report; return the state of its order in the store when it is acknowledged.

    A report that meets an old version is tried again 20 ms later, after `drain` has returned.
    """
    states: list[str] = []

    def acknowledge() -> None:
        found = first.cluster.by_uid(owner.metadata.uid)
        states.extend(known.state for known in orders_of(found) if known.order == order.order)

    report = builders.report(order, "failed")
    second.manager.take(key_of(owner), Input(report, acknowledge))
    running = asyncio.create_task(second.manager.run())
    await until(lambda: states)
    running.cancel()
    (state,) = states
    return state


async def test_a_report_for_an_order_that_is_not_seen_yet_waits_for_it() -> None:
    first, second = await two_operators()
    await first.answer("run")
    content = await first.content()
    second.store.hidden.add("SnapshotContent")
    await second.cluster.find(content.metadata.uid)
    await first.answer("prepare")
    (dump,) = first.open("dump")
    assert await state_when_acknowledged(first, second, content, dump) == "failed"


async def test_a_report_for_an_order_not_seen_yet_is_stored_though_another_object_is_written() -> (
    None
):
    """The pod lacks its restore in this view, and its plan creates that and writes no status."""
    first = await world_of(2)
    second = first.another("SnapshotRestore")
    await second.sync()
    second.store.hidden.add("Pod")
    await first.apply(restore_document(source="to-come"))
    pod = await first.get("Pod", "restored")
    assert isinstance(await second.cluster.find(pod.metadata.uid), Pod)
    await first.apply(checkpoint_document(name="to-come"))
    for verbs in ("run",), ("prepare",), ("dump", "save"), ("release", "seal"):
        await first.answer(*verbs)
    (run,) = orders_of(await first.get("Pod", "restored"))
    assert await state_when_acknowledged(first, second, pod, run) == "failed"


async def test_the_sweep_leaves_an_order_alone_whose_owner_is_not_seen_yet() -> None:
    first, second = await two_operators()
    second.store.hidden.update({"SnapshotContent", "Snapshot", "DynamoCheckpoint", "Pod"})
    await first.answer("run")
    (prepare,) = first.open("prepare")
    await second.sweep.once()
    assert prepare.order in first.orders.stream


async def test_a_pod_that_is_not_seen_yet_is_not_given_up() -> None:
    first = await world_of(1, answered=())
    second = first.another("Pod")
    await second.sync()
    (pod,) = first.cluster.page("Pod")
    request = PodsRequest(node="node-1", pods=[pod.metadata.uid])
    assert (await second.nodes.pods(request)).unknown == []


async def test_the_template_of_a_pod_whose_placement_is_not_seen_yet_is_given() -> None:
    first, second = await two_operators(nodes=0)
    second.store.hidden.add("Pod")
    await first.join(presence("node-1"))
    (pod,) = first.cluster.page("Pod")
    meta = pod.metadata
    request = TemplateRequest(
        node="node-1", namespace=meta.namespace or "", name=meta.name, uid=meta.uid
    )
    assert (await second.nodes.template(request)).spec == msgspec.to_builtins(pod.spec)


async def test_a_pod_that_the_store_does_not_know_or_has_given_up_is_named_to_its_node() -> None:
    world = await world_of(1, answered=())
    (pod,) = world.cluster.page("Pod")
    stray = "00000000-0000-0000-0000-000000000009"
    request = PodsRequest(node="node-1", pods=[pod.metadata.uid, stray])
    assert (await world.nodes.pods(request)).unknown == [stray]
    await world.report(world.open("run")[0])
    await world.silence(100.0)
    await world.delete("Node", "node-1")
    failed: Any = world.cluster.by_uid(pod.metadata.uid)
    assert failed.status.phase == "Failed"
    assert (await world.nodes.pods(request)).unknown == [pod.metadata.uid, stray]


async def test_a_pod_that_is_placed_nowhere_or_elsewhere_is_named_to_the_node_that_runs_it() -> (
    None
):
    first, second = await two_operators(nodes=0)
    second.store.hidden.add("Pod")
    (pod,) = first.cluster.page("Pod")
    uid = pod.metadata.uid

    async def unknown(node: str) -> list[str]:
        return (await second.nodes.pods(PodsRequest(node=node, pods=[uid]))).unknown

    assert await unknown("node-1") == [uid]
    await first.join(presence("node-1"))
    assert await unknown("node-1") == []
    assert await unknown("node-2") == [uid]


async def test_an_operator_that_was_away_hears_answers_before_it_calls_them_late() -> None:
    first = await world_of(1, answered=("run",))
    (prepare,) = first.open("prepare")
    first.now += 3000.0
    second = first.another()
    await second.advance(10.0)
    assert second.open("prepare") == [prepare]
    assert not second.open("abort")
    await second.answer_well(prepare)
    assert second.open("dump")


async def test_what_is_not_answered_after_a_restart_is_late_in_the_end() -> None:
    first = await world_of(1, answered=("run",))
    first.now += 3000.0
    second = first.another()
    await second.advance(16.0)
    assert second.open("abort")


async def test_a_clock_that_was_set_back_gives_no_order_more_than_its_whole_time() -> None:
    first = await world_of(1)
    await first.apply(checkpoint_document(activeDeadlineSeconds=86400))
    await first.answer("run")
    (prepare,) = first.open("prepare")
    whole_s = (prepare.deadline - prepare.ordered_at).total_seconds()
    first.now -= 7200.0
    second = first.another()
    await second.advance(whole_s + 1.0)
    assert second.open("abort")


async def warming_up(world: World) -> None:
    await world.apply(checkpoint_document())


async def capturing(world: World) -> None:
    await world.apply(checkpoint_document())
    await world.answer("run")


async def staging(world: World) -> None:
    await capturing(world)
    await world.answer("prepare")


async def captured(world: World) -> None:
    await world.capture()


async def loading(world: World) -> None:
    await captured(world)
    await world.apply(restore_document(node="node-2"))
    await world.answer("run")


async def restored(world: World) -> None:
    await loading(world)
    await world.answer_all()


async def deleting(world: World) -> None:
    """A reader keeps the artifact of a checkpoint that is being deleted."""
    await loading(world)
    await world.delete("DynamoCheckpoint", "llm")


async def sharing(world: World) -> None:
    """Two checkpoints share the artifact of another, and one is restored from."""
    await captured(world)
    for name in ("second", "third"):
        await world.apply(checkpoint_document(name, model="example/llm"))
    await world.perform(restore_document("second", node="node-2"))


STAGES = (warming_up, capturing, staging, captured, loading, restored, deleting, sharing)


@each("hidden", sorted(KINDS))
@each("stage", STAGES)
async def test_an_operator_that_does_not_see_a_kind_yet_ends_nothing(
    stage: Any, hidden: str
) -> None:
    first = await world_of(2)
    await stage(first)
    before = {value.metadata.uid: shown(value) for value in await first.everything()}
    first.now += 1.0
    second = first.another(hidden)
    await second.advance(1.0)
    await second.advance(5.0)
    stored = [value for kind in KINDS for value in await first.store.list(kind)]
    assert {value.metadata.uid: shown(value) for value in stored} == before


def shown(value: AnyObject) -> dict[str, Any]:
    """Return of an object what cannot be taken back."""
    status: Any = value.status
    return {
        "object": f"{type(value).__name__} {value.metadata.name}",
        "ready": isinstance(value, DynamoCheckpoint) and value.status.phase == "Ready",
        "goes": value.metadata.deletion_timestamp,
        "finalizers": value.metadata.finalizers,
        "failed": is_true(status.conditions, "Failed")
        or (isinstance(value, Pod) and value.status.phase == "Failed"),
        "state": str(getattr(status, "capture", getattr(status, "state", ""))),
        "lost": sum(item.state == fold.LOST for item in orders_of(value)),
        "orders": sorted((item.order, item.attempt) for item in orders_of(value)),
        "readers": value.status.readers if isinstance(value, SnapshotContent) else [],
    }


async def test_an_absence_that_is_real_is_acted_upon_after_one_live_read() -> None:
    world = await world_of(1, answered=())
    job = await world.get("Job", "llm")
    await world.store.remove_finalizer(job, job.metadata.finalizers[0])
    await world.store.delete(await world.get("Job", "llm"))
    await world.settle()
    found = await world.get("DynamoCheckpoint", "llm")
    assert (found.status.phase, found.status.conditions[0].reason) == ("Failed", "JobDeleted")


async def test_a_pod_a_snapshot_of_it_and_a_restore_may_be_applied_together_in_any_order() -> None:
    world = await world_of(2)
    snapshot = snapshot_document("web", "worker")
    await world.perform(restore_document(name="copy", source="web"), snapshot, pod_document())
    assert is_true((await world.get("Snapshot", "web")).status.conditions, "Ready")
    assert (await world.restore("copy")).status.state == "Restored"


@pytest.mark.parametrize("kind", ["Job", "Snapshot"])
async def test_a_name_is_not_taken_by_what_is_gone_from_the_store(kind: str) -> None:
    """That it was deleted is seen late, and a conflict would be the end of the checkpoint."""
    world = World().another()
    store = world.store
    await world.join(presence("node-1"), presence("node-2"))
    await world.capture("first")
    child: Any = await world.get(kind, "first")
    stranger = replace(child.metadata, name="llm", owner_references=[], uid="", finalizers=[])
    await world.cluster.create(replace(child, metadata=stranger))
    await world.settle()
    there = await world.get(kind, "llm")
    store.hidden = {kind}
    await store.delete(await store.remove_finalizer(there, there.metadata.finalizers[0]))
    assert await store.read(kind, "default", "llm") is None
    await world.apply(checkpoint_document())
    await world.advance(1.0)
    await world.answer_all()
    assert is_true((await world.get("DynamoCheckpoint", "llm")).status.conditions, "Ready")


async def test_a_restore_made_by_an_operator_that_missed_the_end_of_its_pod_is_deleted() -> None:
    world = await world_of(1)
    await world.apply(restore_document(source="to-come"))
    pod = await world.get("Pod", "restored")
    await world.cluster.delete(pod)
    await world.answer_all()
    await world.settle()
    assert await world.get("Pod", "restored") is None
    await world.cluster.create(restore_for(pod))
    await world.settle()

    await garbage.collect(world.cluster)

    await world.settle()
    assert not world.cluster.all("SnapshotRestore")


async def test_an_object_is_kept_whose_owner_is_only_not_seen_yet() -> None:
    before = await world_of(1)
    await before.apply(restore_document(source="to-come"), checkpoint_document())
    late = before.another("Pod", "DynamoCheckpoint")
    await late.sync()
    owned = [value for value in await late.everything() if value.metadata.owner_references]
    assert {type(value).__name__ for value in owned} == {"SnapshotRestore", "Job"}

    await garbage.collect(late.cluster)

    assert not any(value.metadata.deletion_timestamp for value in await late.everything())
