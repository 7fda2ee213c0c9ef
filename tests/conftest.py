"""Fixtures for every folder of tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.nats_server import nats_server


@pytest.fixture
def nats_url(tmp_path: Path) -> Iterator[str]:
    """Where a nats-server of this test alone listens, with an empty JetStream store."""
    with nats_server(tmp_path / "nats") as server:
        yield server.url


@pytest.fixture(scope="session")
def nats_url_session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Where a nats-server of the whole run listens, for tests that name their own streams."""
    with nats_server(tmp_path_factory.mktemp("nats")) as server:
        yield server.url
