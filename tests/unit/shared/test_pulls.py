"""How a consumer gives up a pull, whatever nats-py makes of being cancelled."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import nats.errors
import pytest

from snapshot_shared.bus import _fetch


class _Deaf:
    """A source as nats-py's is at times: a status message makes it forget a cancellation."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()

    async def fetch(self, _batch: int, timeout: float) -> list[object]:
        self.asked.set()
        try:
            await asyncio.sleep(timeout)
        except asyncio.CancelledError:
            await asyncio.sleep(timeout)
        return []


async def test_an_orphaned_pull_is_given_up_though_it_forgets_its_cancellation() -> None:
    source, elected = _Deaf(), asyncio.Event()
    pulling = asyncio.ensure_future(_fetch(source, asyncio.Event(), elected))
    await source.asked.wait()
    elected.set()
    async with asyncio.timeout(5.0):
        assert await pulling == []


async def test_a_message_that_comes_as_the_pull_is_given_up_is_not_lost() -> None:
    message, again = object(), asyncio.Event()

    async def fetch(_batch: int, timeout: float) -> list[object]:
        try:
            await asyncio.sleep(timeout)
        except asyncio.CancelledError:
            return [message]
        return []

    pulling = asyncio.ensure_future(_fetch(SimpleNamespace(fetch=fetch), again, asyncio.Event()))
    await asyncio.sleep(0)
    again.set()
    assert await pulling == [message]


async def test_a_pull_that_finds_nothing_is_no_error_and_a_refused_one_is() -> None:
    async def empty(_batch: int, timeout: float) -> list[object]:
        raise nats.errors.TimeoutError

    async def refused(_batch: int, timeout: float) -> list[object]:
        raise nats.errors.Error(f"refused within {timeout} s")

    never = asyncio.Event()
    assert await _fetch(SimpleNamespace(fetch=empty), never, asyncio.Event()) == []
    with pytest.raises(nats.errors.Error, match="refused"):
        await _fetch(SimpleNamespace(fetch=refused), never, asyncio.Event())
