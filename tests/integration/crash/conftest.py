"""One cluster for all cases, and how often each is run."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator

import pytest

from tests.integration.crash.crash_cases import NODE
from tests.support.live_cluster import LiveCluster

REPEAT = int(os.environ.get("CRASH_REPEAT", "1"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run a case as often as it was asked for."""
    if "turn" in metafunc.fixturenames:
        metafunc.parametrize("turn", range(REPEAT))


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """A cluster of one node; what it leaves behind is looked for at its end."""
    found = LiveCluster(tmp_path_factory.mktemp("crash"))
    asyncio.run(found.up(NODE))
    yield found
    assert asyncio.run(found.down()) == []
