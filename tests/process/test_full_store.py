"""The store of an operator, and the journal of a node, on a disk that is full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_operator.local.store import RESERVE_BYTES, SqliteStore
from snapshot_shared import journal as journals
from snapshot_shared.errors import NoSpace
from snapshot_shared.journal import Journal, read_records
from snapshot_shared.ledger import Began, Ended, Reported
from tests.process.killing import MIB
from tests.support import builders
from tests.support.agent_rig import fresh_uid
from tests.support.builders import with_status
from tests.support.objects import checkpoint

# It mounts on this machine, which the tests of plain processes must not see.
pytestmark = pytest.mark.xdist_group("mounts")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", tmp_path], check=True)
    yield tmp_path
    subprocess.run(["umount", "--lazy", tmp_path], check=True)


def fill(disk: Path) -> None:
    seen = os.statvfs(disk)
    with (disk / "filler").open("ab") as file:
        os.posix_fallocate(file.fileno(), file.tell(), seen.f_bfree * seen.f_frsize)


async def test_what_frees_room_is_written_on_a_full_disk_and_nothing_else(disk: Path) -> None:
    store = SqliteStore(disk / "store", timestamp=lambda: "2026-01-01T00:00:00Z").open()
    made = [await store.create(checkpoint(name)) for name in ("one", "two")]
    kept = [await store.add_finalizer(each, "nvidia.com/test") for each in made]
    assert (disk / "reserve").stat().st_blocks * 512 == RESERVE_BYTES
    fill(disk)
    fillers = [store.create(checkpoint(f"filler-{number}")) for number in range(1000)]
    done = await asyncio.gather(*fillers, return_exceptions=True)
    assert isinstance(done[-1], NoSpace)
    with pytest.raises(NoSpace):
        await store.update_status(with_status(kept[0], message="x" * MIB))
    assert (disk / "reserve").exists()

    going = await store.delete(kept[0])
    assert going is not None
    going = await store.update_status(with_status(going, message="x" * MIB))
    assert not (disk / "reserve").exists()
    # There is no second reserve.
    fill(disk)
    with pytest.raises(NoSpace):
        await store.update_status(with_status(going, message="x" * 9 * MIB))

    os.truncate(disk / "filler", 0)
    assert await store.remove_finalizer(going, "nvidia.com/test") is None
    assert (disk / "reserve").stat().st_blocks * 512 == RESERVE_BYTES
    store.close()


DELETE = f"delete-{fresh_uid()}"


async def test_a_deletion_is_journalled_on_a_full_disk_and_no_capture_is(disk: Path) -> None:
    journal = Journal.open(disk, wall=lambda: 0.0)
    reserve = disk / "reserve"
    assert reserve.stat().st_blocks * 512 == journals.RESERVE_BYTES

    async def filled() -> None:
        """Take all room, that in the last page of the file among it."""
        fill(disk)
        with contextlib.suppress(NoSpace):
            while True:
                await journal.append(builders.accepted(order=f"dump-{fresh_uid()}"))

    await filled()
    await journal.append(builders.accepted(order=DELETE))
    assert not reserve.exists()
    for step in ("tombstone", "remove"):
        await journal.append(Began(order=DELETE, attempt=1, step=step))
        await journal.append(Ended(order=DELETE, attempt=1, step=step))
    await filled()

    os.truncate(disk / "filler", 0)
    deleted = builders.told(order=DELETE, attempt=1, n=2, kind="deleted")
    await journal.append(Reported(report=deleted))
    await journal.settled()
    assert reserve.stat().st_blocks * 512 == journals.RESERVE_BYTES
    journal.close()
    ended = [each for each in read_records(disk / "journal") if isinstance(each, Ended)]
    assert [(each.order, each.step) for each in ended] == [
        (DELETE, "tombstone"),
        (DELETE, "remove"),
    ]
