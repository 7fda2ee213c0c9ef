"""The sweep repairs what a publish could not do, and soon."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import pytest

from snapshot_operator.controller import RETRY_S
from snapshot_shared.errors import BusUnavailable
from tests.support.agent_rig import until
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World


async def test_an_order_that_could_not_be_published_goes_out_with_the_next_try(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World()
    await world.join(presence("node-1"))
    publish, failures = world.orders.publish, [BusUnavailable("no leader"), BusUnavailable("yet")]

    async def unreliably(order: Any) -> None:
        if failures:
            raise failures.pop()
        await publish(order)

    monkeypatch.setattr(world.orders, "publish", unreliably)
    sweep = asyncio.ensure_future(world.controller.sweep(asyncio.Event()))
    try:
        await world.apply(checkpoint_document())
        await until(lambda: world.open("run"), "the order", 3 * RETRY_S + 2.0)
        assert not failures
    finally:
        sweep.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await sweep
