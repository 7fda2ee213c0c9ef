"""How many messages a consumer asks for ahead, and what it makes of those that never come."""

from __future__ import annotations

import asyncio

import pytest

from snapshot_shared.bus.pull import BATCH, Pull
from snapshot_shared.errors import BusUnavailable

SOON_S = 0.05


class Asked:
    """A server that only counts what it is asked for."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.pull = Pull[int](self.ask)

    async def ask(self, count: int) -> None:
        self.counts.append(count)

    async def waiting(self) -> asyncio.Future[list[int]]:
        """Return a batch that nothing has come for yet."""
        batch = asyncio.ensure_future(self.pull.batch(10.0))
        await asyncio.sleep(0)
        return batch

    async def begin(self) -> None:
        """Have the pull ask, and end before anything has come."""
        waiting = await self.waiting()
        waiting.cancel()
        await asyncio.gather(waiting, return_exceptions=True)

    async def deliver(self, *messages: int) -> list[int]:
        for message in messages:
            self.pull.take(message)
        return await self.pull.batch(SOON_S)


@pytest.fixture
async def asked() -> Asked:
    return Asked()


async def test_what_has_come_is_given_out_at_once_in_its_order(asked: Asked) -> None:
    assert await asked.deliver(1, 2, 3) == [1, 2, 3]


async def test_a_batch_waits_for_its_first_message(asked: Asked) -> None:
    waiting = await asked.waiting()
    assert not waiting.done()
    asked.pull.take(7)
    assert await waiting == [7]


async def test_no_more_is_asked_for_before_half_of_the_window_is_free(asked: Asked) -> None:
    await asked.begin()
    for count in range(BATCH // 2):
        assert asked.counts == [BATCH], count
        await asked.deliver(count)
    await asked.deliver(0)
    assert asked.counts == [BATCH, BATCH // 2]


async def test_messages_that_wait_to_be_used_take_room_in_the_window(asked: Asked) -> None:
    for message in range(BATCH // 2 + 1):
        asked.pull.take(message)
    assert len(await asked.pull.batch(SOON_S)) == BATCH // 2 + 1
    assert asked.counts == []


async def test_what_has_lapsed_is_asked_for_again(asked: Asked) -> None:
    await asked.begin()
    asked.pull.lapse(BATCH)
    await asked.begin()
    assert asked.counts == [BATCH, BATCH]


async def test_a_server_that_has_forgotten_is_asked_again_at_once(asked: Asked) -> None:
    waiting = await asked.waiting()
    asked.pull.forget()
    assert await waiting == []
    await asked.pull.batch(SOON_S)
    assert asked.counts == [BATCH, BATCH]


async def test_a_request_of_which_nothing_comes_in_time_is_made_again(asked: Asked) -> None:
    assert await asked.pull.batch(SOON_S) == []
    assert await asked.pull.batch(SOON_S) == []
    assert asked.counts == [BATCH, BATCH]


async def test_an_error_is_raised_after_the_messages_that_came_before_it(asked: Asked) -> None:
    asked.pull.take(1)
    asked.pull.fail(BusUnavailable("consumer deleted"))
    assert await asked.pull.batch(SOON_S) == [1]
    with pytest.raises(BusUnavailable, match="consumer deleted"):
        await asked.pull.batch(SOON_S)


async def test_a_message_that_comes_as_a_batch_is_cancelled_is_kept(asked: Asked) -> None:
    waiting = await asked.waiting()
    asked.pull.take(7)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    assert asked.pull.rest() == [7]
