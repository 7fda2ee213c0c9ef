"""A disk that is full or fails: a clean refusal, and what was there before stays whole."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.ports import GenerationRef
from snapshot_shared import files
from snapshot_shared.clocks import Clocks
from snapshot_shared.errors import NoSpace, StorageFailed
from snapshot_shared.files import free_bytes, open_root, opened
from snapshot_shared.ids import NodeName
from snapshot_shared.order_book import OrderBook
from tests.scenario import crash_stories as stories
from tests.scenario.crash_rig import mounted, run
from tests.scenario.disk import SimDisk

OFFSETS = 50
KINDS = ("data", "part manifest", "root manifest", "journal")


def _kind(name: str) -> str:
    names = {".part.json.tmp": "part manifest", ".root.json.tmp": "root manifest"}
    return names.get(name, "journal" if "journal" in name else "data")


def _world(*, direct: bool = True) -> tuple[stories.Service, SimDisk]:
    service, disk = stories.Service(), SimDisk()
    disk.os.takes_direct = direct
    with mounted(disk):
        service.prepare()
    disk.sync_all()
    disk.claimed = 2**40
    return service, disk


def _refused_at(room: int) -> tuple[str, stories.Service, SimDisk]:
    """Run a capture with room for so many bytes, and give the kind of file that had too little."""
    # The whole pages of direct requests are given back, and later files never lack room.
    service, disk = _world(direct=False)
    disk.capacity = disk.used + room
    with mounted(disk), pytest.raises(NoSpace):
        service.play_all()
    return _kind(disk.refused[0]), service, disk


def _offsets() -> list[int]:
    """Choose the bytes at which the disk is full: as many in every kind of file as there can be."""
    service, disk = _world(direct=False)
    start = disk.used
    seen: dict[str, list[int]] = {kind: [] for kind in KINDS}
    peak = 0

    def look(operation: str) -> None:
        nonlocal peak
        # Room that an earlier file had and gave back is room for the next one too.
        if operation == "write" and disk.used - start > peak:
            kind = _kind(disk.names_of(disk.written)[0])
            seen[kind] += range(peak, disk.used - start)
            peak = disk.used - start

    disk.after = look
    with mounted(disk):
        service.play_all()
    each = OFFSETS // len(KINDS) + 1
    return sorted(
        {found[turn * len(found) // each] for found in seen.values() for turn in range(each)}
    )


def _check_after_refusal(service: stories.Service) -> None:
    """Check what must hold while the disk is full, and once more when there is room."""
    place, older = service.place, GenerationRef("default", stories.UID, 1)
    if half := stories.visible(service.artifacts, place):
        # Only what came after the seal can have failed.
        stories.verify(service.root, place, half)
    found = stories.visible(service.artifacts, older)
    assert found is not None
    stories.verify(service.root, older, found)
    run(service.root.remove(place))
    assert not files.os.path.exists(service.where())


def _check_journal(log: stories.OlderJournal) -> None:
    """Check that the journal goes on where it was, and is whole when it is opened again."""
    assert log.journal is not None
    log.promises = {"records": log.promises["records"], "under way": []}
    try:
        log._append(stories.accepted(3))
    except StorageFailed:
        # Who met a broken disk does not trust it any more; the next start finds out what it holds.
        log.journal.close()
        log.recover()
        log._append(stories.accepted(3))
    log.journal.close()
    log.check(log.promises)


def test_a_disk_that_is_full_at_any_byte_refuses_cleanly() -> None:
    kinds: dict[str, int] = dict.fromkeys(KINDS, 0)
    offsets = _offsets()
    assert len(offsets) >= OFFSETS
    for room in offsets:
        kind, service, disk = _refused_at(room)
        kinds[kind] += 1
        with mounted(disk):
            _check_after_refusal(service)
            disk.heal()
            _check_journal(service.log)
    assert min(kinds.values()) >= 5, kinds


def test_an_outcome_is_written_when_there_is_room_again_though_nats_is_away() -> None:
    story, disk = stories.Journaling(), SimDisk()

    async def report() -> None:
        assert story.journal is not None
        book = OrderBook(
            node=NodeName("node-1"),
            service="agent",
            journal=story.journal,
            clocks=Clocks(lambda: 0.0, lambda: stories.NOW, "boot"),
        )
        await story.journal.append(stories.accepted(1))
        (entry,) = story.journal.ledger.entries.values()
        disk.capacity = disk.used
        reporting = asyncio.ensure_future(book.report(entry, "staged"))
        await asyncio.wait({reporting}, timeout=0.1)
        assert not reporting.done()
        disk.heal()
        async with asyncio.timeout(5.0):
            await reporting
        assert entry.terminal is not None

    with mounted(disk):
        story.open()
        run(report())


def test_only_what_has_room_counts_of_what_was_handed_over_together() -> None:
    log, disk = stories.OlderJournal(), SimDisk()

    async def hand_over() -> list[BaseException | None]:
        assert log.journal is not None
        large = [log.journal.write(*map(stories.accepted, range(10, 40)))]
        small = [log.journal.write(stories.accepted(number)) for number in (3, 4)]
        return await asyncio.gather(*large, *small, return_exceptions=True)

    with mounted(disk):
        log.prepare()
        log.open()
        assert log.journal is not None
        disk.capacity = disk.used + 2000
        refused, *others = run(hand_over())
        assert isinstance(refused, NoSpace)
        assert others == [None, None]
        known = log.journal.ledger.entries
        log.journal.close()
        log.recover()
        assert [*log.journal.ledger.entries] == [*known]
        log.journal.close()


def test_the_space_of_a_refused_capture_comes_back() -> None:
    _, service, disk = _refused_at(9000)
    with mounted(disk):
        before = disk.used
        run(service.root.remove(service.place))
        assert disk.used < before
        disk.heal()
        service.results.clear()
        service.stage_process()
        service.stage_gpu()
        service.seal()
        stories.verify(service.root, service.place, service.promises["sealed"])


@pytest.mark.parametrize(
    ("operation", "error", "least"),
    [
        *((each, errno.ENOSPC, 3) for each in ("create", "mkdir", "link", "write", "fsync")),
        *((each, errno.EIO, 10) for each in ("write", "fsync")),
    ],
)
def test_a_call_that_fails_ends_the_capture_and_spares_what_was_there_whenever_it_comes(
    operation: str, error: int, least: int
) -> None:
    assert _fails_everywhere(operation, error) >= least


def _fails_everywhere(operation: str, error: int) -> int:
    """Let each of the calls of this kind fail in a run of its own; give how many there are."""
    expected = NoSpace if error == errno.ENOSPC else (OSError, StorageFailed)
    for nth in itertools.count(1):
        service, disk = _world()
        disk.fail(operation, nth, error)
        with mounted(disk):
            try:
                service.play_all()
            except expected:
                pass
            else:
                return nth - 1
            _check_after_refusal(service)
            _check_journal(service.log)
    raise AssertionError


def test_short_writes_leave_nothing_out() -> None:
    service, disk = _world()
    disk.fail("write", 1, 0, times=10_000)
    with mounted(disk):
        service.play_all()
        stories.verify(service.root, service.place, service.promises["sealed"])


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Path]:
    """Mount a real file system of 1 MiB."""
    if os.geteuid() != 0:
        pytest.skip("mounting a file system needs root")
    where = tmp_path / "small"
    where.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", where],
        check=False,
        capture_output=True,
        text=True,
    )
    if made.returncode:
        pytest.skip(f"this machine mounts nothing: {made.stderr.strip()}")
    yield where
    # Lazily: a test that failed may have left files open.
    subprocess.run(["umount", "--lazy", where], check=True)


@pytest.mark.root
@pytest.mark.parametrize("eighths", [0, 1, 2, 4, 6, 7])
def test_a_real_file_system_that_is_full_refuses_cleanly(small: Path, eighths: int) -> None:
    for name in ("roomy", "full"):
        (small / name).mkdir()
    roomy = stories.Service(small / "roomy")
    roomy.prepare()
    before = _free(small)
    roomy.play_all()
    needed = before - _free(small)
    shutil.rmtree(small / "roomy")
    service = stories.Service(small / "full")
    service.prepare()
    with (small / "ballast").open("wb") as file:
        file.write(bytes(_free(small) - needed * eighths // 8))
    with pytest.raises(NoSpace):
        service.play_all()
    _check_after_refusal(service)
    (small / "ballast").unlink()
    _check_journal(service.log)


def _free(folder: Path) -> int:
    with opened(open_root(folder)) as root:
        return free_bytes(root)
