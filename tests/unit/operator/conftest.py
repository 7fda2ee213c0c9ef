"""The world that most tests of the operator begin with."""

from __future__ import annotations

import pytest

from tests.support.operator_world import World, world_of


@pytest.fixture
async def world() -> World:
    """Two nodes, and a checkpoint whose capture has ended well."""
    return await world_of(2, captured=True)
