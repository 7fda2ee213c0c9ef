"""The store of an operator, the journal of a node and the bus, on a disk that is full."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_operator.local.store import RESERVE_BYTES, SqliteStore
from snapshot_shared import journal as journals
from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable, NoSpace
from snapshot_shared.journal import Journal, read_records
from snapshot_shared.ledger import Began, Ended, Reported
from tests.process.killing import MIB
from tests.support import builders
from tests.support.agent_rig import fresh_uid
from tests.support.builders import with_status
from tests.support.nats_server import NatsServer
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


def is_healthy(server: NatsServer) -> bool:
    """Ask as the chart and compose.yaml do."""
    *_, port = re.findall(r"http monitor on .*:(\d+)", server.log)
    asked = subprocess.run(["deploy/images/healthy", port, "/healthz"], check=False)
    return asked.returncode == 0


async def test_a_nats_server_whose_disk_was_full_is_unhealthy_until_it_is_started_again(
    disk: Path,
) -> None:
    configuration = disk / "nats.conf"
    # What the streams may grow to, which is more than this disk has.
    configuration.write_text("jetstream { max_file_store: 4GB }")
    arguments = ("--config", str(configuration), "--http_port", "-1")
    async with contextlib.AsyncExitStack() as closing:
        server = NatsServer(disk / "nats", arguments=arguments)
        closing.callback(server.stop)
        server.start()
        bus = await Bus(server.url, "test").connect()
        closing.push_async_callback(bus.close)
        await bus.ensure_assets()
        await announced(bus)
        assert is_healthy(server)

        fill(disk)
        with pytest.raises(BusUnavailable):
            await announced(bus, 1000)
        os.truncate(disk / "filler", 0)
        with pytest.raises(BusUnavailable):
            await announced(bus)
        assert not is_healthy(server)

        again = bus.reconnections()
        server.stop()
        server.start()
        await again.wait()
        await announced(bus)
        assert is_healthy(server)


async def announced(bus: Bus, times: int = 1) -> None:
    for _ in range(times):
        await bus.put(subjects.NODES_BUCKET, "node-1", bytes(4096))


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
