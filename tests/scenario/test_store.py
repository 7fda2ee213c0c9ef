"""The simulated view of a store: late where the port lets it be, and nowhere else."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.controller import Controller, Interpreter
from snapshot_operator.domain import ordering
from snapshot_shared.errors import Conflict
from snapshot_shared.manifests import parse
from snapshot_shared.telemetry import Telemetry
from tests.scenario.faults import Settings
from tests.scenario.loop import Machine, Process
from tests.scenario.store import StoreView
from tests.scenario.world import World
from tests.support.objects import checkpoint, restore_document
from tests.support.operator_world import MemoryOrders

LATE_S = 3.0


class Pair:
    """Two operators' views of one store, each used by a process of its own."""

    def __init__(self) -> None:
        self.world = World(1, Settings(stale_s=LATE_S), [])
        self.mine = self.join()
        self.theirs = self.join()

    def join(self) -> StoreView:
        view = StoreView(self.world, Process(self.world.loop, Machine("m"), "operator"))
        self.world.views[view] = None
        return view

    def on(self, view: StoreView, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something as the operator that has a view."""
        return self.world.loop.run_until_complete(view._process.spawn(work))


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.world.loop.bury()
    made.world.store.close()
    made.world.loop.close()
    gc.collect()


def said(value: Any, message: str) -> Any:
    return replace(value, status=replace(value.status, message=message))


def test_what_another_wrote_is_read_late_and_then_for_good(pair: Pair) -> None:
    first = pair.on(pair.mine, pair.mine.create(checkpoint()))
    assert pair.on(pair.theirs, pair.theirs.by_uid(first.metadata.uid)) is None
    assert pair.on(pair.theirs, pair.theirs.list("DynamoCheckpoint")) == []
    pair.on(pair.theirs, pair.theirs.catch_up())
    newer = pair.on(pair.mine, pair.mine.update_status(said(first, "newer")))
    assert pair.on(pair.theirs, pair.theirs.list("DynamoCheckpoint")) == [first]
    pair.on(pair.theirs, asyncio.sleep(LATE_S))
    assert pair.on(pair.theirs, pair.theirs.list("DynamoCheckpoint")) == [newer]


def test_what_an_operator_wrote_itself_it_reads_at_once(pair: Pair) -> None:
    first = pair.on(pair.mine, pair.mine.create(checkpoint()))
    assert pair.on(pair.mine, pair.mine.get("DynamoCheckpoint", "default", "llm")) == first


def test_a_decision_on_a_late_view_is_a_conflict_until_it_has_caught_up(pair: Pair) -> None:
    first = pair.on(pair.mine, pair.mine.create(checkpoint()))
    pair.on(pair.theirs, pair.theirs.catch_up())
    pair.on(pair.mine, pair.mine.create(checkpoint("another")))
    as_of = pair.theirs.as_of()
    assert pair.theirs.others_since(as_of)
    with pytest.raises(Conflict):
        pair.on(pair.theirs, pair.theirs.update_status(said(first, "old"), as_of=as_of))
    pair.on(pair.theirs, pair.theirs.catch_up())
    as_of = pair.theirs.as_of()
    pair.on(pair.theirs, pair.theirs.update_status(said(first, "decided"), as_of=as_of))


def test_changes_of_others_are_told_late_and_as_one(pair: Pair) -> None:
    told: list[str] = []
    pair.theirs.subscribe(lambda change, value: told.append(f"{change} {value.status.message}"))
    first = pair.on(pair.mine, pair.mine.create(checkpoint()))
    pair.on(pair.mine, pair.mine.update_status(said(first, "newer")))
    assert told == []
    pair.on(pair.theirs, asyncio.sleep(LATE_S))
    assert told == ["MODIFIED newer"]


def test_who_starts_may_not_have_heard_of_the_last_writes(pair: Pair) -> None:
    seen = []
    for number in range(20):
        pair.on(pair.mine, pair.mine.create(checkpoint(f"c{number}")))
        pair.on(pair.mine, asyncio.sleep(LATE_S / 3))
        third = pair.join()
        seen.append(len(pair.on(third, third.list("DynamoCheckpoint"))) > number)
    assert True in seen
    assert False in seen


def test_a_sweep_leaves_orders_alone_that_another_operator_has_just_written(pair: Pair) -> None:
    orders = MemoryOrders()
    theirs = pair.theirs
    interpreter = Interpreter(theirs, orders, Telemetry("snap-operator", "operator", "0"), float)
    controller = Controller(theirs, orders, interpreter, float)
    pod: Any = parse(restore_document("llm", "restored"))
    pod = pair.on(pair.mine, pair.mine.create(pod))
    order = ordering.run(pod, standby=True, trace="", now=0.0)
    placed = replace(pod, status=replace(pod.status, node_name="node-1", orders=[order]))
    pair.on(pair.mine, pair.mine.update_status(placed))
    pair.on(pair.mine, orders.publish(order))
    assert pair.on(theirs, theirs.list("Pod")) == []
    pair.on(theirs, controller.sweep_once())
    assert list(orders.stream) == [order.order]
