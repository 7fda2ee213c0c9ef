"""A rig a test, on the nats-server of the whole run: every rig is a node of its own."""

import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.support.agent_rig import Rig
from tests.support.agent_rig import rig as open_rig


@pytest.fixture
async def rig(tmp_path: Path, nats_url_session: str) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, nats_url_session) as made:
        yield made


@pytest.fixture
async def node(rig: Rig) -> AsyncIterator[Rig]:
    """The rig while its agent serves, in this event loop."""
    async with rig.agent():
        yield rig


@pytest.fixture
def bystander() -> Iterator[int]:
    """The pid of a process that has nothing to do with any agent."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()
