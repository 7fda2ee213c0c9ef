"""How clients share the event loop: who works when, counted in its turns."""

from __future__ import annotations

import asyncio
import itertools

import pytest

from gms.adapters.turns import Turns
from snapshot_shared.tasks import end_all


class Work:
    """Clients that always have more to do, on a clock on which each piece takes a second."""

    def __init__(self, budget_s: float) -> None:
        self.now = 0.0
        self.done: list[str] = []
        self.turns = Turns(budget_s, clock=lambda: self.now)

    async def client(self, name: str, owner: str, pieces: int = 1_000_000) -> None:
        for _ in range(pieces):
            await self.turns.take(owner)
            self.now += 1
            self.done.append(name)

    async def flooded_by(self, *names: str) -> list[asyncio.Task[None]]:
        """Begin clients that do not end; a name begins with its owner."""
        tasks = [asyncio.create_task(self.client(name, name[0])) for name in names]
        await asyncio.sleep(0)
        return tasks


@pytest.mark.parametrize("clients", [1, 5, 100])
async def test_however_many_have_work_ready_a_turn_of_the_loop_has_little_of_it(
    clients: int,
) -> None:
    work = Work(budget_s=3.0)
    tasks = await work.flooded_by(*(f"a{number}" for number in range(clients)))
    for _ in range(50):
        before = work.now
        await asyncio.sleep(0)
        assert work.now - before <= 3.0 + 1.0
    await end_all(*tasks)


async def test_one_piece_of_another_comes_next_beside_many_clients_of_one_owner() -> None:
    work = Work(budget_s=0.0)
    tasks = await work.flooded_by(*(f"a{number}" for number in range(100)))
    for _ in range(10):
        await asyncio.sleep(0)
    one = asyncio.create_task(work.client("b", "b", pieces=1))
    for _ in range(4):
        await asyncio.sleep(0)
    assert one.done(), "it waits for many pieces of another owner"
    await end_all(one, *tasks)


async def test_every_client_of_an_owner_comes_in_its_turn() -> None:
    work = Work(budget_s=0.0)
    tasks = await work.flooded_by("a0", "a1", "b0")
    for _ in range(41):
        await asyncio.sleep(0)
    assert len(work.done) >= 40
    counts = {name: work.done.count(name) for name in ("a0", "a1", "b0")}
    assert counts["b0"] in range(18, 23)
    assert counts["a0"] in range(8, 13)
    await end_all(*tasks)


async def test_what_fits_into_the_budget_waits_for_no_turn() -> None:
    work = Work(budget_s=3.0)
    loop = asyncio.get_running_loop()
    turns = itertools.count()
    loop.call_soon(next, turns)
    await work.client("a", "a", pieces=3)
    assert next(turns) == 0, "the loop turned meanwhile"


async def test_one_who_gave_up_while_it_waited_delays_no_other() -> None:
    work = Work(budget_s=0.0)
    tasks = await work.flooded_by("a", "b", "c")
    tasks[0].cancel()
    for _ in range(20):
        await asyncio.sleep(0)
    assert work.done.count("c") >= 5
    await end_all(*tasks)
