"""The two loops of the contract of the bus: real time for a server, virtual for the simulated."""

import asyncio
from collections.abc import Callable, Mapping

import pytest

from tests.support.brokers import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Run what takes a `broker` twice, and everything else as ever."""
    if "broker" not in getattr(item, "fixturenames", ()):
        return {"nats": asyncio.new_event_loop}
    return {"simulated": VirtualLoop, "nats": asyncio.new_event_loop}
