"""Asynchronous tests of the simulator run under virtual time."""

from collections.abc import Mapping

import pytest

from tests.support.brokers import VirtualLoop


def pytest_asyncio_loop_factories(
    config: pytest.Config, item: pytest.Item
) -> Mapping[str, type[VirtualLoop]]:
    return {"virtual": VirtualLoop}
