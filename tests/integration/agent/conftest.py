"""A rig a test, on the nats-server of the whole run: every rig is a node of its own."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest_asyncio

from tests.support.agent_rig import Rig
from tests.support.agent_rig import rig as open_rig


@pytest_asyncio.fixture
async def rig(tmp_path: Path, nats_url_session: str) -> AsyncIterator[Rig]:
    async with open_rig(tmp_path, nats_url_session) as made:
        yield made
