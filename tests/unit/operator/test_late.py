"""What is not seen yet: reports, orders and pods of it wait, and are not forgotten or ended."""

from __future__ import annotations

import msgspec

from snapshot_operator.runtime.cluster import key_of
from snapshot_operator.runtime.manager import Input
from snapshot_shared.api import PodsRequest, TemplateRequest
from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.orders import Report
from tests.support import builders
from tests.support.blind_store import BlindStore
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World, world_of


async def two_operators() -> tuple[World, World, BlindStore]:
    """Return an operator that works, and one that was just as far and hears of nothing since."""
    first = await world_of(1)
    await first.apply(checkpoint_document())
    blind = BlindStore(first.store, ())
    second = World(store=blind, orders=first.orders)
    await second.cluster.sync()
    second.is_synced = True
    return first, second, blind


async def test_a_report_for_an_order_that_is_not_seen_yet_waits_for_it() -> None:
    first, second, blind = await two_operators()
    await first.answer_well(first.open("run")[0])
    (content,) = first.cluster.page("SnapshotContent")
    blind.hidden.add("SnapshotContent")
    await second.cluster.find(content.metadata.uid)
    await first.answer_well(first.open("prepare")[0])
    (dump,) = first.open("dump")
    stored: list[Report] = []
    report = builders.told(
        order=dump.order, kind="failed", node=dump.node, service=dump.service, failure=None
    )
    second.manager.take(key_of(content), Input(report, lambda: stored.append(report)))
    await second.manager.drain()
    assert stored == []
    seen = second.cluster.by_uid(content.metadata.uid)
    assert seen is not None
    assert seen.metadata.resource_version == (await first.content()).metadata.resource_version


async def test_the_sweep_leaves_an_order_alone_whose_owner_is_not_seen_yet() -> None:
    first, second, blind = await two_operators()
    blind.hidden.update({"SnapshotContent", "Snapshot", "DynamoCheckpoint", "Pod"})
    await first.answer_well(first.open("run")[0])
    (prepare,) = first.open("prepare")
    await second.sweep.once()
    assert prepare.order in first.orders.stream


async def test_a_pod_that_is_not_seen_yet_is_not_given_up() -> None:
    first = await world_of(1)
    await first.apply(checkpoint_document())
    second = World(store=BlindStore(first.store, {"Pod"}))
    await second.cluster.sync()
    (pod,) = first.cluster.page("Pod")
    request = PodsRequest(node="node-1", pods=[pod.metadata.uid])
    assert (await second.nodes.pods(request)).unknown == []


async def test_the_template_of_a_pod_whose_placement_is_not_seen_yet_is_given() -> None:
    first = World()
    await first.apply(checkpoint_document())
    blind = BlindStore(first.store, ())
    second = World(store=blind)
    await second.cluster.sync()
    blind.hidden.add("Pod")
    await first.join(presence("node-1"))
    (pod,) = first.cluster.page("Pod")
    meta = pod.metadata
    request = TemplateRequest(
        node="node-1", namespace=meta.namespace or "", name=meta.name, uid=meta.uid
    )
    assert (await second.nodes.template(request)).spec == msgspec.to_builtins(pod.spec)


async def test_a_pod_that_the_store_does_not_know_or_has_given_up_is_named_to_its_node() -> None:
    world = await world_of(1)
    await world.apply(checkpoint_document())
    (pod,) = world.cluster.page("Pod")
    stray = "00000000-0000-0000-0000-000000000009"
    request = PodsRequest(node="node-1", pods=[pod.metadata.uid, stray])
    assert (await world.nodes.pods(request)).unknown == [stray]
    await world.report(world.open("run")[0])
    world.present.clear()
    await world.see(absent_s=100.0)
    await world.cluster.delete(world.cluster.page("Node")[0])
    await world.settle()
    failed = world.cluster.by_uid(pod.metadata.uid)
    assert isinstance(failed, Pod)
    assert failed.status.phase == "Failed"
    assert (await world.nodes.pods(request)).unknown == [pod.metadata.uid, stray]


async def test_a_pod_that_is_placed_nowhere_or_elsewhere_is_named_to_the_node_that_runs_it() -> (
    None
):
    first = World()
    await first.apply(checkpoint_document())
    blind = BlindStore(first.store, ())
    second = World(store=blind)
    await second.cluster.sync()
    blind.hidden.add("Pod")
    (pod,) = first.cluster.page("Pod")
    uid = pod.metadata.uid

    async def unknown(node: str) -> list[str]:
        return (await second.nodes.pods(PodsRequest(node=node, pods=[uid]))).unknown

    assert await unknown("node-1") == [uid]
    await first.join(presence("node-1"))
    assert await unknown("node-1") == []
    assert await unknown("node-2") == [uid]


async def restarted(world: World) -> World:
    """Return another operator on the same store, which has just started."""
    other = World(store=BlindStore(world.store, ()), orders=world.orders)
    other.answered = world.answered
    other.now = world.now
    other.manager._started_at = world.now
    return other


async def test_an_operator_that_was_away_hears_answers_before_it_calls_them_late() -> None:
    first = await world_of(1)
    await first.apply(checkpoint_document())
    await first.answer_well(first.open("run")[0])
    (prepare,) = first.open("prepare")
    first.now += 3000.0
    second = await restarted(first)
    await second.advance(10.0)
    assert second.open("prepare") == [prepare]
    assert not second.open("abort")
    await second.answer_well(prepare)
    assert second.open("dump")


async def test_what_is_not_answered_after_a_restart_is_late_in_the_end() -> None:
    first = await world_of(1)
    await first.apply(checkpoint_document())
    await first.answer_well(first.open("run")[0])
    first.now += 3000.0
    second = await restarted(first)
    await second.advance(16.0)
    assert second.open("abort")


async def test_a_clock_that_was_set_back_gives_no_order_more_than_its_whole_time() -> None:
    first = await world_of(1)
    await first.apply(checkpoint_document(activeDeadlineSeconds=86400))
    await first.answer_well(first.open("run")[0])
    (prepare,) = first.open("prepare")
    whole_s = (prepare.deadline - prepare.ordered_at).total_seconds()
    second = await restarted(first)
    second.now -= 7200.0
    second.manager._started_at = second.now
    await second.advance(whole_s + 1.0)
    assert second.open("abort")
