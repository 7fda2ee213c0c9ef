"""The journal: what is on record survives, what is torn is dropped, what is damaged stops us."""

from __future__ import annotations

import asyncio
import os
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot_shared.errors import AlreadyExists, NoSpace, StorageFailed, UnsupportedVersion
from snapshot_shared.ids import OrderId, owner_of
from snapshot_shared.journal import KEEP_S, Journal, JournalCorrupt, read_records
from snapshot_shared.ledger import (
    Accepted,
    Began,
    Delivered,
    Ended,
    Ledger,
    Noted,
    Reported,
    Tombstoned,
)
from snapshot_shared.orders import Report
from tests.support import builders

ORDER = "dump-00000000-0000-0000-0000-000000000001"
NOW = 2_000_000_000.0


def accepted(order: str = ORDER, attempt: int = 1, wall: float = NOW) -> Accepted:
    return builders.accepted(
        order=order, attempt=attempt, monotonic=1.0, wall=wall, deadline_s=10.0
    )


def report(kind: str, n: int, attempt: int = 1) -> Reported:
    return Reported(
        report=builders.told(order=ORDER, attempt=attempt, n=n, kind=kind, node="n", at=1.0)
    )


async def test_what_was_appended_is_there_after_a_restart(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted(), Began(order=ORDER, attempt=1, step="freeze"))
    journal.close()
    again = Journal.open(tmp_path, wall=lambda: NOW)
    (entry,) = again.ledger.unfinished()
    assert (entry.order, entry.open_step) == (ORDER, "freeze")
    again.close()


async def test_records_that_are_handed_over_together_share_one_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        synced.append(fd)
        real(fd)

    journal = Journal.open(tmp_path, wall=lambda: NOW)
    monkeypatch.setattr(os, "fdatasync", sync)
    steps = [Began(order=ORDER, attempt=1, step=str(number)) for number in range(20)]
    await asyncio.gather(journal.append(accepted()), *map(journal.append, steps))
    assert len(synced) == 1
    assert journal.ledger.entries[ORDER].began[-1] == "19"
    journal.close()


async def test_what_may_be_lost_is_written_with_what_comes_next_and_before_it(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted(), report("accepted", 1), report("staged", 2))
    size = (tmp_path / "journal").stat().st_size
    journal.write_later(Delivered(order=ORDER, attempt=1, n=1))
    await asyncio.sleep(0.05)
    assert (tmp_path / "journal").stat().st_size == size
    await journal.append(Began(order=ORDER, attempt=1, step="freeze"))
    journal.write_later(Delivered(order=ORDER, attempt=1, n=2))
    await journal.settled()
    journal.close()
    written = [type(record) for record in read_records(tmp_path / "journal")]
    assert written[3:] == [Delivered, Began, Delivered]


async def test_what_a_cancelled_caller_handed_over_is_written_and_counts(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    appending = asyncio.ensure_future(journal.append(accepted()))
    await asyncio.sleep(0)
    appending.cancel()
    await journal.settled()
    assert appending.cancelled()
    assert ORDER in journal.ledger.entries
    journal.close()
    again = Journal.open(tmp_path, wall=lambda: NOW)
    assert ORDER in again.ledger.entries
    again.close()


async def test_a_record_that_comes_after_the_end_is_refused_and_written_nowhere(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path / "journal", wall=lambda: NOW)
    journal.close()
    other = tmp_path / "other"
    with other.open("wb"), pytest.raises(StorageFailed, match="the journal is closed"):
        await journal.append(accepted())
    assert other.read_bytes() == b""


async def test_a_torn_last_line_is_cut_off(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted())
    await journal.append(Began(order=ORDER, attempt=1, step="freeze"))
    journal.close()
    path = tmp_path / "journal"
    path.write_bytes(path.read_bytes()[:-7])
    again = Journal.open(tmp_path, wall=lambda: NOW)
    (entry,) = again.ledger.unfinished()
    assert entry.open_step is None
    await again.append(Began(order=ORDER, attempt=1, step="freeze"))
    again.close()
    assert Journal.open(tmp_path, wall=lambda: NOW).ledger.entries[ORDER].open_step == "freeze"


def line(record: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


async def test_fields_that_a_newer_build_added_to_records_are_ignored(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted())
    await journal.append(report("accepted", 1))
    journal.close()
    path = tmp_path / "journal"
    newer = b""
    for text in path.read_bytes().splitlines():
        record = msgspec.json.decode(text.partition(b" ")[2])
        if "report" in record:
            record["report"]["added_later"] = {"a": 1}
        newer += line({**record, "added_later": [1]})
    path.write_bytes(newer)
    again = Journal.open(tmp_path, wall=lambda: NOW)
    (entry,) = again.ledger.unfinished()
    assert [item.kind for item in entry.reports] == ["accepted"]
    again.close()


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_record_that_a_newer_build_wrote_is_refused_by_name_and_kept(
    tmp_path: Path, *, is_last: bool
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted())
    journal.close()
    path = tmp_path / "journal"
    later = line({"type": "moved", "order": ORDER, "attempt": 1})
    data = path.read_bytes() + later if is_last else later + path.read_bytes()
    path.write_bytes(data)
    with pytest.raises(UnsupportedVersion, match="'moved'"):
        Journal.open(tmp_path, wall=lambda: NOW)
    assert path.read_bytes() == data


async def test_damage_before_the_last_line_refuses_to_start_and_names_the_line(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    for step in ("freeze", "copy-state", "thaw"):
        await journal.append(accepted(), Began(order=ORDER, attempt=1, step=step))
    journal.close()
    path = tmp_path / "journal"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(JournalCorrupt, match="line"):
        Journal.open(tmp_path, wall=lambda: NOW)


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    first = Journal.open(tmp_path, wall=lambda: NOW)
    with pytest.raises(AlreadyExists):
        Journal.open(tmp_path, wall=lambda: NOW)
    first.close()
    Journal.open(tmp_path, wall=lambda: NOW).close()


async def test_reports_stay_pending_until_they_are_delivered(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted(), report("accepted", 1), report("staged", 2))
    await journal.append(Delivered(order=ORDER, attempt=1, n=1))
    journal.close()
    again = Journal.open(tmp_path, wall=lambda: NOW)
    assert [pending.kind for pending in again.ledger.pending_reports()] == ["staged"]
    again.close()


async def test_a_higher_attempt_replaces_and_records_of_the_lower_are_ignored(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted(), accepted(attempt=2), report("staged", 1, attempt=1))
    entry = journal.ledger.entries[ORDER]
    assert (entry.attempt, entry.terminal) == (2, None)
    journal.close()


async def test_compaction_keeps_results_for_fourteen_days_and_unfinished_work_for_ever(
    tmp_path: Path,
) -> None:
    other = ORDER[:-1] + "2"
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted(), report("staged", 1), Delivered(order=ORDER, attempt=1, n=1))
    await journal.append(accepted(other), Began(order=other, attempt=1, step="freeze"))
    await journal.append(Ended(order=other, attempt=1, step="freeze"))
    gone, kept = (f"capture-{owner_of(OrderId(each))}" for each in (ORDER, other))
    await journal.append(Tombstoned(subject=kept, attempt=3), Tombstoned(subject=gone, attempt=1))
    journal.close()
    soon = Journal.open(tmp_path, wall=lambda: NOW + 60)
    assert set(soon.ledger.entries) == {ORDER, other}
    assert soon.ledger.is_tombstoned(gone, 1)
    soon.close()
    late = Journal.open(tmp_path, wall=lambda: NOW + KEEP_S + 60)
    assert set(late.ledger.entries) == {other}
    assert late.ledger.entries[other].ended == ["freeze"]
    assert late.ledger.is_tombstoned(kept, 3)
    assert not late.ledger.is_tombstoned(kept, 4)
    assert not late.ledger.is_tombstoned(gone, 1)
    late.close()


def test_what_led_to_an_artifact_is_forgotten_once_that_is_deleted() -> None:
    owner = owner_of(OrderId(ORDER))
    delete, release = f"delete-{owner}-gen-1", f"release-{owner}"
    ledger = Ledger()

    def answered(order: str, kind: str, attempt: int = 1, *, is_heard: bool = True) -> None:
        ledger.apply(accepted(order, attempt=attempt))
        report = Report(
            order=order, attempt=attempt, n=1, kind=kind, node="n", service="agent", at=NOW
        )
        ledger.apply(Reported(report=report))
        if is_heard:
            ledger.apply(Delivered(order=order, attempt=attempt, n=1))

    answered(ORDER, "staged")
    answered(release, "released", is_heard=False)
    answered(f"prepare-{owner}", "prepared", attempt=2)
    ledger.apply(Tombstoned(subject=f"capture-{owner}", attempt=1))
    answered(delete, "deleted")
    assert set(ledger.entries) == {release, f"prepare-{owner}", delete}
    assert ledger.is_tombstoned(f"capture-{owner}", 1)


async def test_a_journal_that_has_grown_is_compacted_while_it_is_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshot_shared.journal.MIN_BYTES", 2000)
    now = NOW
    journal = Journal.open(tmp_path, wall=lambda: now)
    await journal.append(accepted(), report("staged", 1), Delivered(order=ORDER, attempt=1, n=1))
    now += KEEP_S + 60
    other = ORDER[:-1] + "2"
    await journal.append(accepted(other, wall=now))
    while (tmp_path / "journal").stat().st_size >= 500:
        await journal.append(Noted(order=other, attempt=1, key="pid", value=7))
        assert (tmp_path / "journal").stat().st_size < 2500
    assert set(journal.ledger.entries) == {other}
    await journal.append(Began(order=other, attempt=1, step="freeze"))
    journal.close()
    again = Journal.open(tmp_path, wall=lambda: now)
    assert set(again.ledger.entries) == {other}
    assert again.ledger.entries[other].open_step == "freeze"
    again.close()


async def written_over_and_over(journal: Journal, lines: int) -> None:
    """Write down what the next line replaces."""
    for _ in range(lines):
        await journal.append(*(Noted(order=ORDER, attempt=1, key="pid", value=7),) * 200)


async def test_a_journal_is_compacted_without_being_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("snapshot_shared.journal.MIN_BYTES", 2_000_000)
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted())
    tracemalloc.start()
    try:
        await written_over_and_over(journal, 120)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
    assert (tmp_path / "journal").stat().st_size < 1_000_000
    journal.close()


async def test_a_journal_is_opened_with_little_more_memory_than_its_file_takes(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted())
    await written_over_and_over(journal, 100)
    journal.close()
    size = (tmp_path / "journal").stat().st_size
    tracemalloc.start()
    try:
        Journal.open(tmp_path, wall=lambda: NOW).close()
        assert tracemalloc.get_traced_memory()[1] < 2.5 * size
    finally:
        tracemalloc.stop()


async def test_a_journal_opens_on_a_full_disk_and_only_its_torn_end_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted())
    await journal.append(Began(order=ORDER, attempt=1, step="freeze"))
    journal.close()
    path = tmp_path / "journal"
    whole = path.read_bytes()
    path.write_bytes(whole + b"00000000 half")

    def full(*_: object) -> None:
        raise NoSpace("no space left")

    monkeypatch.setattr("snapshot_shared.journal.write_replacing", full)
    again = Journal.open(tmp_path, wall=lambda: NOW)
    assert path.read_bytes() == whole
    await again.append(Ended(order=ORDER, attempt=1, step="freeze"))
    again.close()
    assert Journal.open(tmp_path, wall=lambda: NOW).ledger.entries[ORDER].ended == ["freeze"]


async def test_what_was_written_at_once_is_cut_off_as_one_when_its_begin_is_zeros(
    tmp_path: Path,
) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW)
    await journal.append(accepted())
    path = tmp_path / "journal"
    size = path.stat().st_size
    await journal.append(
        Began(order=ORDER, attempt=1, step="freeze"), Ended(order=ORDER, attempt=1, step="freeze")
    )
    journal.close()
    data = bytearray(path.read_bytes())
    data[size : size + 40] = bytes(40)
    path.write_bytes(data)
    again = Journal.open(tmp_path, wall=lambda: NOW)
    assert again.ledger.entries[ORDER].began == []
    again.close()
