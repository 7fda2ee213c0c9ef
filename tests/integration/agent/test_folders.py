"""Control directories and the scratch folder of CRIU: who owns what is there, and for how long."""

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from snapshot_agent.adapters.control_dir import ControlDirectories
from snapshot_agent.adapters.scratch import Scratch, file_system_of
from snapshot_agent.domain import control
from snapshot_agent.domain.control import Access, ContainerPaths
from snapshot_shared.errors import ControlFolderBroken, InvalidInput, NoSpace
from tests.support.agent_rig import PATIENCE_S, Rig
from tests.support.artifact_keys import put_encryption

SHARED = Access(folder_mode=0o2770, file_mode=0o660)


@pytest.fixture
async def controls() -> AsyncIterator[ControlDirectories]:
    made = ControlDirectories()
    yield made
    await made.close()


@pytest.mark.parametrize(
    "access",
    [
        Access(),
        SHARED,
        pytest.param(
            SHARED._replace(uid=12345, gid=54321),
            marks=pytest.mark.skipif(os.getuid() != 0, reason="only root gives files to others"),
        ),
    ],
    ids=["the agent's own", "of a shared group", "of another user"],
)
async def test_everything_has_the_owner_and_the_mode_that_the_container_needs(
    controls: ControlDirectories, tmp_path: Path, access: Access
) -> None:
    where = ContainerPaths(tmp_path / "main", tmp_path / "sockets", access)
    controls.create(where)
    controls.put(where, control.QUIESCE, b"{}")
    await controls.clear(where, control.STATE)
    found = [where.control, where.control / control.STATE, where.control / control.QUIESCE]
    modes = [path.stat().st_mode & 0o7777 for path in found]
    assert modes == [access.folder_mode, access.folder_mode, access.file_mode]
    owner = (access.uid, access.gid) if access.uid != -1 else (os.getuid(), os.getgid())
    assert {(path.stat().st_uid, path.stat().st_gid) for path in found} == {owner}


async def test_a_file_that_a_worker_puts_there_is_awaited_without_looking_again(
    controls: ControlDirectories, tmp_path: Path
) -> None:
    where = ContainerPaths(tmp_path / "main", tmp_path / "sockets")
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


@pytest.mark.parametrize("instead", ["nothing", "a file", "a link"])
async def test_a_control_folder_that_its_worker_has_swapped_away_is_named(
    controls: ControlDirectories, tmp_path: Path, instead: str
) -> None:
    where = ContainerPaths(tmp_path / "main", tmp_path / "sockets")
    controls.create(where)
    where.control.rename(tmp_path / "away")
    if instead == "a file":
        where.control.touch()
    elif instead == "a link":
        where.control.symlink_to(tmp_path / "away")
    with pytest.raises(ControlFolderBroken, match=f"{where.control} is no folder any more"):
        await controls.appears(where, control.READY, lambda _: True)


PROC_SUPER_MAGIC = 0x9FA0


def made(folder: Path, *, always: bool = True) -> Scratch:
    return Scratch(folder / "scratch", folder, always=always)


async def test_each_dump_has_a_place_of_its_own_which_goes_with_it(tmp_path: Path) -> None:
    scratch = made(tmp_path)
    async with scratch.place() as one, scratch.place() as other:
        assert one.name != other.name
        folder = scratch.folder / one.name
        assert folder.stat().st_mode & 0o777 == 0o700
        (folder / "pages-1.img").touch()
    assert list(scratch.folder.iterdir()) == []


async def test_an_agent_removes_at_its_start_what_a_killed_one_has_left_and_nothing_else(
    tmp_path: Path,
) -> None:
    killed = made(tmp_path)
    await killed.place().__aenter__()
    (killed.folder / "lost+found").mkdir()
    made(tmp_path)
    assert [path.name for path in killed.folder.iterdir()] == ["lost+found"]


async def test_a_restore_that_does_not_fit_is_refused_by_the_name_of_the_folder(
    tmp_path: Path,
) -> None:
    scratch = made(tmp_path)
    with pytest.raises(NoSpace, match=str(scratch.folder)):
        async with scratch.place(2**60):
            pass
    assert list(scratch.folder.iterdir()) == []


async def test_it_is_used_where_artifacts_are_on_nfs_and_where_it_is_asked_for(
    tmp_path: Path,
) -> None:
    assert await made(tmp_path, always=True).is_wanted()
    assert not await made(tmp_path, always=False).is_wanted()
    assert not await Scratch(tmp_path / "s", tmp_path / "gone", always=False).is_wanted()
    assert file_system_of(Path("/proc")) == PROC_SUPER_MAGIC


async def test_an_agent_with_a_helper_that_encrypts_does_not_start_without_one(rig: Rig) -> None:
    folder = rig.state.parent / "keys"
    put_encryption(folder)
    rig.settings |= {
        "SNAPBACK_WORLD": "kubernetes",
        "SNAPBACK_HELPER": str(rig.sockets / "helper.sock"),
        "SNAPBACK_ARTIFACT_KEYS": str(folder),
    }
    with pytest.raises(InvalidInput, match="SNAPBACK_SCRATCH_DIR"):
        async with rig.agent():
            pass
