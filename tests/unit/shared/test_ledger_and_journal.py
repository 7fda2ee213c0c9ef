"""The journal and its fold: what is on record survives, what is torn goes, damage stops us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot_shared.errors import AlreadyExists, NoSpace, StorageFailed, UnsupportedVersion
from snapshot_shared.journal import KEEP_S, Journal, JournalCorrupt, read_records
from snapshot_shared.ledger import (
    Accepted,
    Began,
    Delivered,
    Ended,
    Ledger,
    Noted,
    Record,
    Reported,
    Tombstoned,
)
from tests.support import builders

UID = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
DUMP = f"dump-{UID}"
NOW = 2_000_000_000.0
FREEZE = Began(order=DUMP, attempt=1, step="freeze")
FROZEN = Ended(order=DUMP, attempt=1, step="freeze")


def accepted(order: str = DUMP, attempt: int = 1, wall: float = NOW) -> Accepted:
    return builders.accepted(order=order, attempt=attempt, wall=wall)


def reported(kind: str, order: str = DUMP, attempt: int = 1, n: int = 1) -> Reported:
    return Reported(report=builders.told(order=order, attempt=attempt, n=n, kind=kind))


def over(order: str = DUMP, kind: str = "failed", attempt: int = 1) -> list[Record]:
    """All that is known of an order that ended, and whose report was delivered."""
    return [
        accepted(order, attempt),
        reported(kind, order, attempt),
        Delivered(order=order, attempt=attempt, n=1),
    ]


def folded(*records: Record) -> Ledger:
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger


def opened(folder: Path, wall: float = NOW) -> Journal:
    return Journal.open(folder, wall=lambda: wall)


async def written(folder: Path, *records: Record) -> Path:
    """Leave a journal to which these were appended one by one; return its file."""
    journal = opened(folder)
    for record in records:
        await journal.append(record)
    journal.close()
    return folder / "journal"


def read(folder: Path, wall: float = NOW) -> Ledger:
    """Return what a journal knows when it is opened again."""
    journal = opened(folder, wall)
    journal.close()
    return journal.ledger


async def test_what_was_appended_is_there_after_a_restart(tmp_path: Path) -> None:
    await written(tmp_path, accepted(), FREEZE)
    (entry,) = read(tmp_path).unfinished()
    assert (entry.order, entry.open_step) == (DUMP, "freeze")


async def test_records_that_are_handed_over_together_share_one_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        synced.append(fd)
        real(fd)

    journal = opened(tmp_path)
    monkeypatch.setattr(os, "fdatasync", sync)
    steps = [Began(order=DUMP, attempt=1, step=str(number)) for number in range(20)]
    await asyncio.gather(journal.append(accepted()), *map(journal.append, steps))
    assert len(synced) == 1
    assert journal.ledger.entries[DUMP].began[-1] == "19"
    journal.close()


async def test_what_may_be_lost_is_written_with_what_comes_next_and_before_it(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path)
    await journal.append(accepted(), reported("accepted", n=1), reported("staged", n=2))
    size = (tmp_path / "journal").stat().st_size
    journal.write_later(Delivered(order=DUMP, attempt=1, n=1))
    await asyncio.sleep(0.05)
    assert (tmp_path / "journal").stat().st_size == size
    await journal.append(FREEZE)
    journal.write_later(Delivered(order=DUMP, attempt=1, n=2))
    await journal.settled()
    journal.close()
    kinds = [type(record) for record in read_records(tmp_path / "journal")]
    assert kinds[3:] == [Delivered, Began, Delivered]


async def test_what_a_cancelled_caller_handed_over_is_written_and_counts(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    appending = asyncio.ensure_future(journal.append(accepted()))
    await asyncio.sleep(0)
    appending.cancel()
    await journal.settled()
    assert appending.cancelled()
    assert DUMP in journal.ledger.entries
    journal.close()
    assert DUMP in read(tmp_path).entries


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
    path = await written(tmp_path, accepted(), FREEZE)
    path.write_bytes(path.read_bytes()[:-7])
    again = opened(tmp_path)
    (entry,) = again.ledger.unfinished()
    assert entry.open_step is None
    await again.append(FREEZE)
    again.close()
    assert opened(tmp_path).ledger.entries[DUMP].open_step == "freeze"


def line(record: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


async def test_fields_that_a_newer_build_added_to_records_are_ignored(tmp_path: Path) -> None:
    path = await written(tmp_path, accepted(), reported("accepted"))
    newer = b""
    for text in path.read_bytes().splitlines():
        record = msgspec.json.decode(text.partition(b" ")[2])
        if "report" in record:
            record["report"]["added_later"] = {"a": 1}
        newer += line({**record, "added_later": [1]})
    path.write_bytes(newer)
    (entry,) = read(tmp_path).unfinished()
    assert [item.kind for item in entry.reports] == ["accepted"]


@pytest.mark.parametrize("is_last", [True, False])
async def test_a_record_that_a_newer_build_wrote_is_refused_by_name_and_kept(
    tmp_path: Path, *, is_last: bool
) -> None:
    path = await written(tmp_path, accepted())
    later = line({"type": "moved", "order": DUMP, "attempt": 1})
    data = path.read_bytes() + later if is_last else later + path.read_bytes()
    path.write_bytes(data)
    with pytest.raises(UnsupportedVersion, match="'moved'"):
        opened(tmp_path)
    assert path.read_bytes() == data


async def test_damage_before_the_last_line_refuses_to_start_and_names_the_line(
    tmp_path: Path,
) -> None:
    path = await written(tmp_path, accepted(), FREEZE, FROZEN)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))
    with pytest.raises(JournalCorrupt, match="line"):
        opened(tmp_path)


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    first = opened(tmp_path)
    with pytest.raises(AlreadyExists):
        opened(tmp_path)
    first.close()
    opened(tmp_path).close()


async def test_compaction_keeps_results_for_fourteen_days_and_unfinished_work_for_ever(
    tmp_path: Path,
) -> None:
    other, gone, kept = f"dump-{OTHER}", f"capture-{UID}", f"capture-{OTHER}"
    work = [
        Began(order=other, attempt=1, step="freeze"),
        Ended(order=other, attempt=1, step="freeze"),
    ]
    tombstones = [Tombstoned(subject=kept, attempt=3), Tombstoned(subject=gone, attempt=1)]
    await written(tmp_path, *over(kind="staged"), accepted(other), *work, *tombstones)
    soon = read(tmp_path, NOW + 60)
    assert set(soon.entries) == {DUMP, other}
    assert soon.is_tombstoned(gone, 1)
    late = read(tmp_path, NOW + KEEP_S + 60)
    assert set(late.entries) == {other}
    assert late.entries[other].ended == ["freeze"]
    assert [late.is_tombstoned(kept, attempt) for attempt in (3, 4)] == [True, False]
    assert not late.is_tombstoned(gone, 1)


async def test_a_journal_that_has_grown_is_compacted_while_it_is_open(tmp_path: Path) -> None:
    now = NOW
    journal = Journal.open(tmp_path, wall=lambda: now, min_bytes=2000)
    await journal.append(*over(kind="staged"))
    now += KEEP_S + 60
    other = f"dump-{OTHER}"
    await journal.append(accepted(other, wall=now))
    while (tmp_path / "journal").stat().st_size >= 500:
        await journal.append(Noted(order=other, attempt=1, key="pid", value=7))
        assert (tmp_path / "journal").stat().st_size < 2500
    assert set(journal.ledger.entries) == {other}
    await journal.append(Began(order=other, attempt=1, step="freeze"))
    journal.close()
    again = read(tmp_path, now)
    assert set(again.entries) == {other}
    assert again.entries[other].open_step == "freeze"


OTHER_DUMP = f"dump-{OTHER}"


def small(folder: Path, wall: float = NOW) -> Journal:
    """Open a journal that moves each order out of memory as soon as it is finished."""
    return Journal.open(folder, wall=lambda: wall, min_bytes=1)


async def test_a_finished_order_leaves_the_memory_and_still_has_its_answer(
    tmp_path: Path,
) -> None:
    journal = small(tmp_path)
    await journal.append(accepted(OTHER_DUMP), *over(kind="staged"))
    await journal.settled()
    for _ in range(2):
        assert list(journal.ledger.entries) == [OTHER_DUMP]
        entry = journal.ledger.entry(DUMP)
        assert entry is not None
        assert [report.kind for report in entry.reports] == ["staged"]
        assert not entry.undelivered
        journal.close()
        journal = small(tmp_path)
    journal.close()


async def test_a_note_brings_an_order_back_and_a_higher_attempt_takes_its_place(
    tmp_path: Path,
) -> None:
    journal = small(tmp_path)
    await journal.append(*over(attempt=2))
    await journal.settled()
    assert not journal.ledger.entries
    await journal.append(accepted(attempt=1), Noted(order=DUMP, attempt=1, key="pid", value=1))
    await journal.append(Noted(order=DUMP, attempt=2, key="pid", value=2))
    entry = journal.ledger.entry(DUMP)
    assert entry is not None
    assert (entry.attempt, entry.notes, len(entry.reports)) == (2, {"pid": 2}, 1)
    await journal.append(accepted(attempt=3))
    assert journal.ledger.entries[DUMP].attempt == 3
    (known,) = await journal.entries_of("dump")
    assert known is journal.ledger.entries[DUMP]
    journal.close()


async def test_orders_of_a_verb_are_those_in_memory_and_those_that_are_not(tmp_path: Path) -> None:
    journal = small(tmp_path)
    await journal.append(*over(), *over(f"prepare-{UID}"), accepted(OTHER_DUMP))
    assert {entry.order for entry in await journal.entries_of("dump")} == {DUMP, OTHER_DUMP}
    journal.close()


@pytest.mark.parametrize("step", ["_replace", "_open"])
async def test_an_order_is_known_once_wherever_a_compaction_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    journal = small(tmp_path)

    def crash(*_: object) -> None:
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(f"snapshot_shared.journal.{step}", crash)
        await journal.append(*over(), Tombstoned(subject=f"capture-{UID}", attempt=1))
        with pytest.raises(StorageFailed, match="cut off"):
            await journal.append(accepted(OTHER_DUMP))
    journal.close()
    again = small(tmp_path)
    entry = again.ledger.entry(DUMP)
    assert entry is not None
    assert [report.n for report in entry.reports] == [1]
    assert again.ledger.is_tombstoned(f"capture-{UID}", 1)
    again.close()


async def test_a_full_disk_keeps_finished_orders_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> set[str]:
        raise NoSpace("no space left")

    journal = small(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr("snapshot_shared.finished.FinishedOrders.put", full)
        await journal.append(*over())
        await journal.settled()
        assert list(journal.ledger.entries) == [DUMP]
    journal.close()
    again = small(tmp_path)
    assert not again.ledger.entries
    again.close()


async def test_a_finished_order_is_forgotten_after_fourteen_days_with_its_tombstones(
    tmp_path: Path,
) -> None:
    tombstone = Tombstoned(subject=f"capture-{UID}", attempt=1)
    journal = small(tmp_path)
    await journal.append(tombstone, *over())
    journal.close()
    kept = small(tmp_path, NOW + KEEP_S)
    assert kept.ledger.entry(DUMP)
    assert kept.ledger.is_tombstoned(f"capture-{UID}", 1)
    kept.close()
    late = small(tmp_path, NOW + KEEP_S + 1)
    assert late.ledger.entry(DUMP) is None
    assert not late.ledger.tombstones
    late.close()


async def test_damage_to_a_finished_order_is_named_and_never_an_answer(tmp_path: Path) -> None:
    journal = small(tmp_path)
    await journal.append(*over())
    await journal.settled()
    path = tmp_path / "finished.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute(
            "UPDATE orders SET records = CAST(replace(records, 'failed', 'staged') AS BLOB)"
        )
    with pytest.raises(JournalCorrupt, match=r"finished\.sqlite"):
        journal.ledger.entry(DUMP)
    journal.close()
    path.write_bytes(b"damaged" * 1000)
    with pytest.raises(StorageFailed, match="not a database"):
        small(tmp_path)


async def test_a_finished_order_of_a_newer_build_is_refused_by_name(tmp_path: Path) -> None:
    journal = small(tmp_path)
    await journal.append(*over())
    await journal.settled()
    later = line({"type": "moved", "order": DUMP, "attempt": 1})
    path = tmp_path / "finished.sqlite"
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("UPDATE orders SET records = ?", (later,))
    with pytest.raises(UnsupportedVersion, match="'moved'"):
        journal.ledger.entry(DUMP)
    journal.close()


async def test_the_memory_of_finished_orders_does_not_grow(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW, min_bytes=100_000)
    tracemalloc.start()
    try:
        for number in range(2000):
            await journal.append(*over(f"dump-{UID[:-4]}{number:04}"))
        assert tracemalloc.get_traced_memory()[0] < 1_000_000
    finally:
        tracemalloc.stop()
    assert len(await journal.entries_of("dump")) == 2000
    journal.close()


async def written_over_and_over(journal: Journal, lines: int) -> None:
    """Write down what the next line replaces."""
    for _ in range(lines):
        await journal.append(*(Noted(order=DUMP, attempt=1, key="pid", value=7),) * 200)


async def test_a_journal_is_compacted_without_being_read_again(tmp_path: Path) -> None:
    journal = Journal.open(tmp_path, wall=lambda: NOW, min_bytes=2_000_000)
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
    journal = opened(tmp_path)
    await journal.append(accepted())
    await written_over_and_over(journal, 100)
    journal.close()
    size = (tmp_path / "journal").stat().st_size
    tracemalloc.start()
    try:
        opened(tmp_path).close()
        assert tracemalloc.get_traced_memory()[1] < 2.5 * size
    finally:
        tracemalloc.stop()


async def test_a_journal_opens_on_a_full_disk_and_only_its_torn_end_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await written(tmp_path, accepted(), FREEZE)
    whole = path.read_bytes()
    path.write_bytes(whole + b"00000000 half")

    def full(*_: object) -> None:
        raise NoSpace("no space left")

    monkeypatch.setattr("snapshot_shared.journal.write_replacing", full)
    again = opened(tmp_path)
    assert path.read_bytes() == whole
    await again.append(FROZEN)
    again.close()
    assert opened(tmp_path).ledger.entries[DUMP].ended == ["freeze"]


async def test_what_was_written_at_once_is_cut_off_as_one_when_its_begin_is_zeros(
    tmp_path: Path,
) -> None:
    journal = opened(tmp_path)
    await journal.append(accepted())
    path = tmp_path / "journal"
    size = path.stat().st_size
    await journal.append(FREEZE, FROZEN)
    journal.close()
    data = bytearray(path.read_bytes())
    data[size : size + 40] = bytes(40)
    path.write_bytes(data)
    assert read(tmp_path).entries[DUMP].began == []


OPEN = [
    accepted(),
    Noted(order=DUMP, attempt=1, key="phase", value="frozen"),
    Began(order=DUMP, attempt=1, step="freeze"),
    Ended(order=DUMP, attempt=1, step="freeze"),
    Began(order=DUMP, attempt=1, step="copy-state"),
]


@pytest.mark.parametrize("count", range(1, len(OPEN) + 1))
def test_compaction_changes_nothing_whatever_is_open(count: int) -> None:
    before = folded(Tombstoned(subject=f"capture-{UID}", attempt=2), *OPEN[:count])
    after = folded(*before.records())
    assert after.records() == before.records()
    assert after.tombstones == before.tombstones
    known, found = before.entries[DUMP], after.entries[DUMP]
    assert (found.began, found.ended, found.notes) == (known.began, known.ended, known.notes)
    assert found.open_step == known.open_step


def test_the_open_step_is_the_last_that_began_and_has_no_end() -> None:
    assert folded(*OPEN).entries[DUMP].open_step == "copy-state"
    assert folded(*OPEN[:4]).entries[DUMP].open_step is None


def test_what_was_not_acknowledged_is_kept_by_compaction() -> None:
    ledger = folded(
        accepted(),
        reported("accepted"),
        reported("failed", n=2),
        Delivered(order=DUMP, attempt=1, n=1),
    )
    again = folded(*ledger.records())
    assert [report.n for report in again.pending_reports()] == [2]
    assert again.entries[DUMP].delivered == {1}


def test_a_higher_attempt_takes_the_place_and_the_same_or_a_lower_one_does_not() -> None:
    ledger = folded(accepted(attempt=2), Began(order=DUMP, attempt=2, step="freeze"))
    for attempt in (1, 2):
        ledger.apply(accepted(attempt=attempt))
        assert ledger.entries[DUMP].began == ["freeze"]
    ledger.apply(Began(order=DUMP, attempt=1, step="copy-state"))
    ledger.apply(reported("failed", attempt=1))
    assert ledger.entries[DUMP].began == ["freeze"]
    assert ledger.unfinished() == [ledger.entries[DUMP]]
    ledger.apply(accepted(attempt=3))
    assert (ledger.entries[DUMP].attempt, ledger.entries[DUMP].began) == (3, [])


def test_a_tombstone_holds_up_to_its_attempt() -> None:
    ledger = folded(
        Tombstoned(subject=f"capture-{UID}", attempt=3),
        Tombstoned(subject=f"capture-{UID}", attempt=2),
    )
    assert [ledger.is_tombstoned(f"capture-{UID}", n) for n in (2, 3, 4)] == [True, True, False]
    assert not ledger.is_tombstoned(f"capture-{OTHER}", 1)


def test_what_led_to_an_artifact_goes_with_it_unless_it_is_newer_or_under_way() -> None:
    delete = f"delete-{UID}-gen-1"
    seal, release, unheard, abort = (
        f"seal-{UID}",
        f"release-{UID}",
        f"prepare-{UID}",
        f"dump-{OTHER}",
    )
    ledger = folded(
        Tombstoned(subject=f"capture-{UID}", attempt=2),
        *over(DUMP, attempt=2),
        *over(seal, attempt=3),
        accepted(release, 2),
        *over(unheard, attempt=2)[:2],
        *over(abort),
        accepted(delete),
    )
    ledger.apply(reported("failed", delete))
    assert DUMP in ledger.entries
    ledger.apply(reported("deleted", delete, n=2))
    assert list(ledger.entries) == [seal, release, unheard, abort, delete]


def test_a_deletion_without_a_tombstone_drops_nothing_of_the_capture() -> None:
    delete = f"delete-{UID}-gen-1"
    ledger = folded(*over(DUMP), accepted(delete), reported("deleted", delete))
    assert list(ledger.entries) == [DUMP, delete]


def test_an_order_lives_until_its_end_was_delivered_and_a_run_until_its_processes_ended() -> None:
    run = f"run-{UID}"
    assert not folded(*over()).entries[DUMP].is_live
    assert folded(accepted()).entries[DUMP].is_live
    assert folded(accepted(), reported("failed")).entries[DUMP].is_live
    started = over(run, "started")
    assert folded(*started).entries[run].is_live
    exited = [reported("exited", run, n=2), Delivered(order=run, attempt=1, n=2)]
    assert not folded(*started, *exited).entries[run].is_live
