"""The world that most tests of the operator begin with, and time that passes at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.scenario.bus import SimBus, SimServer
from tests.support.brokers import VirtualLoop
from tests.support.operator_world import World, world_of


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what takes `virtual_time` on a loop whose hours pass at once."""
    is_virtual = "virtual_time" in getattr(item, "fixturenames", ())
    return {"loop": VirtualLoop if is_virtual else asyncio.new_event_loop}


@pytest.fixture
def virtual_time() -> None:
    """Time that passes at once wherever all wait."""


@pytest.fixture
async def bus(virtual_time: None) -> SimBus:
    """The bus of the operator, on a server that has what it needs."""
    found = await SimBus(SimServer(), "operator").connect()
    await found.ensure_assets()
    return found


@pytest.fixture
async def world() -> World:
    """Two nodes, and a checkpoint whose capture has ended well."""
    return await world_of(2, captured=True)
