"""The folder of a node where CRIU works when it does not below the artifact root."""

from pathlib import Path

import pytest

from snapshot_agent.adapters.scratch import Scratch, file_system_of
from snapshot_shared.errors import InvalidInput, NoSpace
from tests.support.agent_rig import Rig
from tests.support.artifact_keys import put_encryption

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
