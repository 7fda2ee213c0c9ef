"""The journal and its fold: what is on record survives, what is torn goes, damage stops us."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sqlite3
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapshot_shared.errors import NoSpace, StorageFailed, UnsupportedVersion
from snapshot_shared.journal import (
    FRESH_S,
    KEEP_S,
    MIN_BYTES,
    Journal,
    JournalCorrupt,
    read_records,
)
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
from tests.support.waiting import until

UID = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
DUMP, OTHER_DUMP = f"dump-{UID}", f"dump-{OTHER}"
CAPTURE, OTHER_CAPTURE = f"capture-{UID}", f"capture-{OTHER}"
NOW = 2_000_000_000.0
FREEZE = Began(order=DUMP, attempt=1, step="freeze")
FROZEN = Ended(order=DUMP, attempt=1, step="freeze")
OTHER_FREEZE = Began(order=OTHER_DUMP, attempt=1, step="freeze")


def accepted(order: str = DUMP, attempt: int = 1, wall: float = NOW) -> Accepted:
    return builders.accepted(order=order, attempt=attempt, wall=wall)


def reported(kind: str, order: str = DUMP, attempt: int = 1, n: int = 1) -> Reported:
    return Reported(report=builders.told(order=order, attempt=attempt, n=n, kind=kind))


def delivered(order: str = DUMP, attempt: int = 1, n: int = 1) -> Delivered:
    return Delivered(order=order, attempt=attempt, n=n)


def noted(value: int, order: str = DUMP, attempt: int = 1) -> Noted:
    return Noted(order=order, attempt=attempt, key="pid", value=value)


def over(order: str = DUMP, kind: str = "failed", attempt: int = 1) -> list[Record]:
    """All that is known of an order that ended, and whose report was delivered."""
    return [accepted(order, attempt), reported(kind, order, attempt), delivered(order, attempt)]


def folded(*records: Record) -> Ledger:
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    return ledger


def opened(
    folder: Path, wall: float = NOW, min_bytes: int = MIN_BYTES
) -> contextlib.closing[Journal]:
    return contextlib.closing(Journal.open(folder, wall=lambda: wall, min_bytes=min_bytes))


def small(folder: Path, wall: float = NOW) -> contextlib.closing[Journal]:
    """Open a journal that moves each order out of memory as soon as it is finished."""
    return opened(folder, wall, min_bytes=1)


async def written(folder: Path, *records: Record) -> Path:
    """Leave a journal to which these were appended one by one; return its file."""
    with opened(folder) as journal:
        for record in records:
            await journal.append(record)
    return folder / "journal"


def read(folder: Path, wall: float = NOW) -> Ledger:
    """Return what a journal knows when it is opened again."""
    with opened(folder, wall) as journal:
        return journal.ledger


def full(*_: object, **__: object) -> Any:
    """Stand in for what writes on a disk."""
    raise NoSpace("no space left")


async def test_records_that_are_handed_over_together_share_one_fsync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fdatasync

    def sync(fd: int) -> None:
        synced.append(fd)
        real(fd)

    steps = [Began(order=DUMP, attempt=1, step=str(number)) for number in range(20)]
    with opened(tmp_path) as journal:
        monkeypatch.setattr(os, "fdatasync", sync)
        await asyncio.gather(journal.append(accepted()), *map(journal.append, steps))
        assert len(synced) == 1
        assert journal.ledger.entries[DUMP].began[-1] == "19"


async def test_what_may_be_lost_is_written_with_what_comes_next_and_before_it(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    with opened(tmp_path) as journal:
        await journal.append(accepted(), reported("accepted", n=1), reported("staged", n=2))
        size = path.stat().st_size
        journal.write_later(delivered(n=1))
        await asyncio.sleep(0.05)
        assert path.stat().st_size == size
        await journal.append(FREEZE)
        journal.write_later(delivered(n=2))
        await journal.settled()
    kinds = [type(record) for record in read_records(path)]
    assert kinds[3:] == [Delivered, Began, Delivered]


async def test_what_a_cancelled_caller_handed_over_is_written_and_counts(tmp_path: Path) -> None:
    with opened(tmp_path) as journal:
        appending = asyncio.ensure_future(journal.append(accepted()))
        await asyncio.sleep(0)
        appending.cancel()
        await journal.settled()
        assert appending.cancelled()
        assert DUMP in journal.ledger.entries
    assert DUMP in read(tmp_path).entries


async def test_a_record_that_comes_after_the_end_is_refused_and_written_nowhere(
    tmp_path: Path,
) -> None:
    with opened(tmp_path / "journal") as journal:
        pass
    other = tmp_path / "other"
    with other.open("wb"), pytest.raises(StorageFailed, match="the journal is closed"):
        await journal.append(accepted())
    assert other.read_bytes() == b""


def line(record: dict[str, Any]) -> bytes:
    body = msgspec.json.encode(record)
    return b"%08x %s\n" % (zlib.crc32(body), body)


OF_NEWER_BUILD = line({"type": "moved", "order": DUMP, "attempt": 1})


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
    known = path.read_bytes()
    data = known + OF_NEWER_BUILD if is_last else OF_NEWER_BUILD + known
    path.write_bytes(data)
    with pytest.raises(UnsupportedVersion, match="'moved'"):
        opened(tmp_path)
    assert path.read_bytes() == data


async def test_compaction_keeps_results_for_fourteen_days_and_unfinished_work_for_ever(
    tmp_path: Path,
) -> None:
    work = [accepted(OTHER_DUMP), OTHER_FREEZE, Ended(order=OTHER_DUMP, attempt=1, step="freeze")]
    kept, gone = (
        Tombstoned(subject=OTHER_CAPTURE, attempt=3),
        Tombstoned(subject=CAPTURE, attempt=1),
    )
    await written(tmp_path, *over(kind="staged"), *work, kept, gone)
    soon = read(tmp_path, NOW + 60)
    assert set(soon.entries) == {DUMP, OTHER_DUMP}
    assert soon.is_tombstoned(CAPTURE, 1)
    late = read(tmp_path, NOW + KEEP_S + 60)
    assert set(late.entries) == {OTHER_DUMP}
    assert late.entries[OTHER_DUMP].ended == ["freeze"]
    assert [late.is_tombstoned(OTHER_CAPTURE, attempt) for attempt in (3, 4)] == [True, False]
    assert not late.is_tombstoned(CAPTURE, 1)


async def test_a_journal_that_has_grown_is_compacted_while_it_is_open(tmp_path: Path) -> None:
    now = NOW
    with contextlib.closing(Journal.open(tmp_path, wall=lambda: now, min_bytes=2000)) as journal:
        await journal.append(*over(kind="staged"))
        now += KEEP_S + 60
        await journal.append(accepted(OTHER_DUMP, wall=now))
        while (tmp_path / "journal").stat().st_size >= 500:
            await journal.append(noted(7, OTHER_DUMP))
            assert (tmp_path / "journal").stat().st_size < 2500
        # The file is replaced in a thread, and what is in memory after it.
        await until(lambda: set(journal.ledger.entries) == {OTHER_DUMP}, "the compacted ledger")
        await journal.append(OTHER_FREEZE)
    again = read(tmp_path, now)
    assert set(again.entries) == {OTHER_DUMP}
    assert again.entries[OTHER_DUMP].open_step == "freeze"


async def test_a_finished_order_leaves_the_memory_and_still_has_its_answer(
    tmp_path: Path,
) -> None:
    def check(ledger: Ledger) -> None:
        assert list(ledger.entries) == [OTHER_DUMP]
        entry = ledger.entry(DUMP)
        assert entry is not None
        assert [report.kind for report in entry.reports] == ["staged"]
        assert not entry.undelivered

    with small(tmp_path) as journal:
        await journal.append(accepted(OTHER_DUMP), *over(kind="staged"))
        await journal.settled()
        check(journal.ledger)
    with small(tmp_path) as again:
        check(again.ledger)


async def test_a_note_brings_an_order_back_and_a_higher_attempt_takes_its_place(
    tmp_path: Path,
) -> None:
    with small(tmp_path) as journal:
        await journal.append(*over(attempt=2))
        await journal.settled()
        assert not journal.ledger.entries
        await journal.append(accepted(attempt=1), noted(1))
        await journal.append(noted(2, attempt=2))
        entry = journal.ledger.entry(DUMP)
        assert entry is not None
        assert (entry.attempt, entry.notes, len(entry.reports)) == (2, {"pid": 2}, 1)
        await journal.append(accepted(attempt=3))
        assert journal.ledger.entries[DUMP].attempt == 3
        (known,) = await journal.entries_of("dump")
        assert known is journal.ledger.entries[DUMP]


async def test_orders_of_a_verb_are_those_in_memory_and_those_that_are_not(tmp_path: Path) -> None:
    with small(tmp_path) as journal:
        await journal.append(*over(), *over(f"prepare-{UID}"), accepted(OTHER_DUMP))
        assert {entry.order for entry in await journal.entries_of("dump")} == {DUMP, OTHER_DUMP}


@pytest.mark.parametrize("step", ["_replace", "_open"])
async def test_an_order_is_known_once_wherever_a_compaction_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def crash(*_: object) -> None:
        raise OSError("cut off")

    with small(tmp_path) as journal, monkeypatch.context() as patched:
        patched.setattr(f"snapshot_shared.journal.{step}", crash)
        await journal.append(*over(), Tombstoned(subject=CAPTURE, attempt=1))
        with pytest.raises(StorageFailed, match="cut off"):
            await journal.append(accepted(OTHER_DUMP))
    with small(tmp_path) as again:
        entry = again.ledger.entry(DUMP)
        assert entry is not None
        assert [report.n for report in entry.reports] == [1]
        assert again.ledger.is_tombstoned(CAPTURE, 1)


async def test_the_end_of_a_worker_stays_at_hand_while_it_may_have_to_be_told_again(
    tmp_path: Path,
) -> None:
    order = f"run-{UID}"
    kinds = ("accepted", "started", "exited")
    reports = [
        Reported(report=builders.told(order=order, attempt=1, n=n, kind=kind, at=NOW))
        for n, kind in enumerate(kinds, 1)
    ]
    records = [accepted(order), *reports, *(delivered(order, n=n) for n in (1, 2, 3))]
    with small(tmp_path) as journal:
        for record in records:
            await journal.append(record)
    with small(tmp_path, NOW + FRESH_S) as journal:
        assert order in journal.ledger.entries
    with small(tmp_path, NOW + FRESH_S + 1.0) as journal:
        assert order not in journal.ledger.entries
        assert journal.ledger.entry(order) is not None


async def test_a_full_disk_keeps_finished_orders_in_the_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with small(tmp_path) as journal, monkeypatch.context() as patched:
        patched.setattr("snapshot_shared.finished.FinishedOrders.put", full)
        await journal.append(*over())
        await journal.settled()
        assert list(journal.ledger.entries) == [DUMP]
    with small(tmp_path) as again:
        assert not again.ledger.entries


async def test_a_finished_order_is_forgotten_after_fourteen_days_with_its_tombstones(
    tmp_path: Path,
) -> None:
    with small(tmp_path) as journal:
        await journal.append(Tombstoned(subject=CAPTURE, attempt=1), *over())
    with small(tmp_path, NOW + KEEP_S) as kept:
        assert kept.ledger.entry(DUMP)
        assert kept.ledger.is_tombstoned(CAPTURE, 1)
    with small(tmp_path, NOW + KEEP_S + 1) as late:
        assert late.ledger.entry(DUMP) is None
        assert not late.ledger.tombstones


CHANGED = "UPDATE orders SET records = CAST(replace(records, 'failed', 'staged') AS BLOB)"


@pytest.mark.parametrize(
    ("change", "values", "error", "named"),
    [
        pytest.param(CHANGED, (), JournalCorrupt, r"finished\.sqlite", id="damaged"),
        pytest.param(
            "UPDATE orders SET records = ?",
            (OF_NEWER_BUILD,),
            UnsupportedVersion,
            "'moved'",
            id="of-a-newer-build",
        ),
    ],
)
async def test_a_finished_order_that_cannot_be_read_is_named_and_never_an_answer(
    tmp_path: Path, change: str, values: tuple[bytes, ...], error: type[Exception], named: str
) -> None:
    with small(tmp_path) as journal:
        await journal.append(*over())
        await journal.settled()
        path = tmp_path / "finished.sqlite"
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as other:
            other.execute(change, values)
        with pytest.raises(error, match=named):
            journal.ledger.entry(DUMP)


async def test_a_file_of_finished_orders_that_is_no_database_is_refused(tmp_path: Path) -> None:
    with small(tmp_path) as journal:
        await journal.append(*over())
    (tmp_path / "finished.sqlite").write_bytes(b"damaged" * 1000)
    with pytest.raises(StorageFailed, match="not a database"):
        small(tmp_path)


@contextlib.contextmanager
def memory() -> Iterator[Callable[[], tuple[int, int]]]:
    """Give what tells how many bytes the block has taken, and the most that it has."""
    tracemalloc.start()
    try:
        yield tracemalloc.get_traced_memory
    finally:
        tracemalloc.stop()


async def test_the_memory_of_finished_orders_does_not_grow(tmp_path: Path) -> None:
    with opened(tmp_path, min_bytes=100_000) as journal:
        with memory() as taken:
            for number in range(2000):
                await journal.append(*over(f"dump-{UID[:-4]}{number:04}"))
            assert taken()[0] < 1_000_000
        assert len(await journal.entries_of("dump")) == 2000


async def written_over_and_over(journal: Journal, lines: int) -> None:
    """Write down what the next line replaces."""
    for _ in range(lines):
        await journal.append(*(noted(7),) * 200)


async def test_a_journal_is_compacted_without_being_read_again(tmp_path: Path) -> None:
    with opened(tmp_path, min_bytes=2_000_000) as journal:
        await journal.append(accepted())
        with memory() as taken:
            await written_over_and_over(journal, 120)
            assert taken()[1] < 500_000
        assert (tmp_path / "journal").stat().st_size < 1_000_000


async def test_a_journal_is_opened_with_little_more_memory_than_its_file_takes(
    tmp_path: Path,
) -> None:
    with opened(tmp_path) as journal:
        await journal.append(accepted())
        await written_over_and_over(journal, 100)
    size = (tmp_path / "journal").stat().st_size
    with memory() as taken:
        read(tmp_path)
        assert taken()[1] < 2.5 * size


async def test_a_journal_opens_on_a_full_disk_and_only_its_torn_end_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = await written(tmp_path, accepted(), FREEZE)
    whole = path.read_bytes()
    path.write_bytes(whole + b"00000000 half")
    monkeypatch.setattr("snapshot_shared.journal.write_replacing", full)
    with opened(tmp_path) as again:
        assert path.read_bytes() == whole
        await again.append(FROZEN)
    assert read(tmp_path).entries[DUMP].ended == ["freeze"]


async def test_what_was_written_at_once_is_cut_off_as_one_when_its_begin_is_zeros(
    tmp_path: Path,
) -> None:
    path = tmp_path / "journal"
    with opened(tmp_path) as journal:
        await journal.append(accepted())
        size = path.stat().st_size
        await journal.append(FREEZE, FROZEN)
    data = bytearray(path.read_bytes())
    data[size : size + 40] = bytes(40)
    path.write_bytes(data)
    assert read(tmp_path).entries[DUMP].began == []


OPEN = [
    accepted(),
    Noted(order=DUMP, attempt=1, key="phase", value="frozen"),
    FREEZE,
    FROZEN,
    Began(order=DUMP, attempt=1, step="copy-state"),
]


@pytest.mark.parametrize("count", range(1, len(OPEN) + 1))
def test_compaction_changes_nothing_whatever_is_open(count: int) -> None:
    before = folded(Tombstoned(subject=CAPTURE, attempt=2), *OPEN[:count])
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
    ledger = folded(accepted(), reported("accepted"), reported("failed", n=2), delivered(n=1))
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
    ledger = folded(*(Tombstoned(subject=CAPTURE, attempt=attempt) for attempt in (3, 2)))
    assert [ledger.is_tombstoned(CAPTURE, attempt) for attempt in (2, 3, 4)] == [True, True, False]
    assert not ledger.is_tombstoned(OTHER_CAPTURE, 1)


def test_what_led_to_an_artifact_goes_with_it_unless_it_is_newer_or_under_way() -> None:
    delete = f"delete-{UID}-gen-1"
    seal, release, unheard = (f"{verb}-{UID}" for verb in ("seal", "release", "prepare"))
    ledger = folded(
        Tombstoned(subject=CAPTURE, attempt=2),
        *over(DUMP, attempt=2),
        *over(seal, attempt=3),
        accepted(release, 2),
        *over(unheard, attempt=2)[:2],
        *over(OTHER_DUMP),
        accepted(delete),
    )
    ledger.apply(reported("failed", delete))
    assert DUMP in ledger.entries
    ledger.apply(reported("deleted", delete, n=2))
    assert list(ledger.entries) == [seal, release, unheard, OTHER_DUMP, delete]


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
    exited = [reported("exited", run, n=2), delivered(run, n=2)]
    assert not folded(*started, *exited).entries[run].is_live
