"""Control directories on a real file system: who owns what the agent puts there."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from snapshot_agent.adapters.control_dir import ControlDirectories
from snapshot_agent.domain import control
from snapshot_agent.domain.control import Access, ContainerPaths
from tests.support.agent_rig import PATIENCE_S

SHARED = Access(folder_mode=0o2770, file_mode=0o660)
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others")


@pytest_asyncio.fixture
async def controls() -> AsyncIterator[ControlDirectories]:
    made = ControlDirectories()
    yield made
    await made.close()


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o7777


def paths(folder: Path, access: Access = Access()) -> ContainerPaths:  # noqa: B008 - an immutable value
    return ContainerPaths(folder / "main", folder / "sockets", access)


async def test_a_container_of_the_agents_own_user_has_its_files_to_itself(
    controls: ControlDirectories, tmp_path: Path
) -> None:
    where = paths(tmp_path)
    controls.create(where)
    controls.put(where, control.QUIESCE, b"{}")
    assert mode(where.control) == mode(where.control / control.STATE) == 0o700
    assert mode(where.control / control.QUIESCE) == 0o600


async def test_a_container_of_a_shared_group_can_use_every_file(
    controls: ControlDirectories, tmp_path: Path
) -> None:
    where = paths(tmp_path, SHARED)
    controls.create(where)
    controls.put(where, control.QUIESCE, b"{}")
    await controls.clear(where, control.STATE)
    assert mode(where.control) == mode(where.control / control.STATE) == 0o2770
    assert mode(where.control / control.QUIESCE) == 0o660


@needs_root
async def test_everything_belongs_to_the_user_of_the_container(
    controls: ControlDirectories, tmp_path: Path
) -> None:
    where = paths(tmp_path, SHARED._replace(uid=12345, gid=54321))
    controls.create(where)
    controls.put(where, control.QUIESCE, b"{}")
    await controls.clear(where, control.STATE)
    for path in (where.control, where.control / control.STATE, where.control / control.QUIESCE):
        assert (path.stat().st_uid, path.stat().st_gid) == (12345, 54321)


async def test_a_file_that_a_worker_puts_there_is_awaited_without_looking_again(
    controls: ControlDirectories, tmp_path: Path
) -> None:
    where = paths(tmp_path)
    controls.create(where)
    seen = asyncio.create_task(
        controls.appears(where, control.QUIESCED, lambda data: control.is_of(data, 2))
    )
    for attempt in (1, 2):
        await asyncio.sleep(0)
        assert not seen.done()
        (where.control / ".new").write_bytes(control.body(attempt))
        (where.control / ".new").rename(where.control / control.QUIESCED)
    await asyncio.wait_for(seen, PATIENCE_S)
