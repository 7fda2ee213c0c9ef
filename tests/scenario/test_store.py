"""The simulated way to the store, and to the lease: late where their ports let them be."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Coroutine, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.ports import Event
from snapshot_shared.errors import Conflict, StoreBusy
from tests.scenario.faults import Settings
from tests.scenario.loop import Machine, Process
from tests.scenario.store import LASTS_S, LOOK_S, TIMEOUT_S, Candidate, SimStore
from tests.scenario.world import World
from tests.support.objects import checkpoint

LATE_S = 3.0


class Pair:
    """Two operator processes with a way to one store each."""

    def __init__(self, settings: Settings) -> None:
        self.world = World(1, settings, [])
        self.mine, self.theirs = self.join("operator-0"), self.join("operator-1")

    def join(self, name: str) -> SimStore:
        return SimStore(self.world, Process(self.world.loop, Machine("m"), name))

    def on(self, store: SimStore, work: Coroutine[Any, Any, Any]) -> Any:
        """Do something as the process that a way to the store belongs to."""
        return self.world.loop.run_until_complete(store._process.spawn(work))

    def wait(self, seconds: float) -> None:
        self.world.loop.run_until_complete(asyncio.sleep(seconds))

    def end(self) -> None:
        self.world.loop.bury()
        self.world.store.close()
        self.world.loop.close()
        gc.collect()


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair(Settings(stale_s=LATE_S, lease="lease"))
    yield made
    made.end()


def said(value: Any, message: str) -> Any:
    return replace(value, status=replace(value.status, message=message))


def heard(store: SimStore) -> list[str]:
    """Return the list that grows by what is reported to an operator."""
    lines: list[str] = []

    def take(event: Event) -> None:
        lines.append(f"{event.change} {event.value.metadata.name}")

    store.subscribe(take)
    return lines


def test_events_come_late_to_the_writer_too_and_several_as_one(pair: Pair) -> None:
    mine, theirs = heard(pair.mine), heard(pair.theirs)
    first = pair.on(pair.mine, pair.mine.create(checkpoint()))
    pair.on(pair.mine, pair.mine.update_status(said(first, "newer")))
    assert mine == theirs == []
    pair.wait(LATE_S)
    assert mine == theirs == ["MODIFIED llm"]


def test_a_process_that_ended_hears_nothing_any_more(pair: Pair) -> None:
    mine = heard(pair.mine)
    pair.on(pair.theirs, pair.theirs.create(checkpoint()))
    pair.mine._process.kill()
    pair.wait(LATE_S)
    assert mine == []
    assert pair.mine not in pair.world.stores.values()


def test_a_store_that_is_out_of_reach_is_busy_and_tells_nothing(pair: Pair) -> None:
    mine = heard(pair.mine)
    pair.world.apart.add("operator-0")
    pair.on(pair.theirs, pair.theirs.create(checkpoint()))
    with pytest.raises(StoreBusy):
        pair.on(pair.mine, pair.mine.list("DynamoCheckpoint"))
    pair.wait(LATE_S)
    assert mine == []
    pair.world.apart.clear()
    pair.wait(LATE_S + TIMEOUT_S)
    assert mine == ["ADDED llm"]


def test_somebody_else_writes_first_where_conflicts_are_wanted() -> None:
    pair = Pair(Settings(conflicts=1.0))
    first = pair.on(pair.mine, pair.mine.create(checkpoint()))
    with pytest.raises(Conflict):
        pair.on(pair.mine, pair.mine.update_status(said(first, "newer")))
    pair.end()


async def hold(pair: Pair, process: Process) -> None:
    async with Candidate(pair.world, process).held() as lost:
        await lost.wait()


def candidates(pair: Pair) -> tuple[Process, Process]:
    """Return the holder of the lease, and who waits for it."""
    first, second = pair.mine._process, pair.theirs._process
    for process in (first, second):
        process.spawn(hold(pair, process))
        pair.wait(3 * LASTS_S)
    assert [*pair.world.lease.active] == [first]
    return first, second


def test_a_lease_is_lost_by_who_is_stopped_and_that_is_noticed_after_a_moment(pair: Pair) -> None:
    first, second = candidates(pair)
    first.stop()
    pair.wait(LASTS_S + LOOK_S)
    assert second in pair.world.lease.active
    first.resume()
    assert first in pair.world.lease.active
    pair.wait(2 * LOOK_S)
    assert [*pair.world.lease.active] == [second]


def test_a_lease_is_given_up_by_who_is_cut_off_before_another_has_it(pair: Pair) -> None:
    first, second = candidates(pair)
    pair.world.apart.add("operator-0")
    while second not in pair.world.lease.active:
        pair.wait(0.1)
    assert first not in pair.world.lease.active


def test_a_lease_goes_on_for_a_while_after_the_end_of_its_holder(pair: Pair) -> None:
    first, second = candidates(pair)
    first.kill()
    pair.wait(1.0)
    assert not pair.world.lease.active
    pair.wait(LASTS_S + LOOK_S)
    assert second in pair.world.lease.active


def test_the_lock_of_a_file_goes_with_its_holder_and_stays_with_one_that_is_stopped() -> None:
    pair = Pair(Settings(lease="file"))
    first, second = candidates(pair)
    first.stop()
    pair.wait(3 * LASTS_S)
    assert second not in pair.world.lease.active
    first.kill()
    pair.wait(LOOK_S)
    assert second in pair.world.lease.active
    pair.end()
