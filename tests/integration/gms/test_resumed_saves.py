"""Saves that were killed go on from what is on the disk, and the artifact is the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gms.adapters.transfer_process import TransferProcesses
from gms.domain.resume import note_of, read_notes
from gms.domain.tasks import SaveTask, TransferDone, TransferEvent, TransferLeased
from gms.domain.transfer import CHUNK_BYTES
from gms.handlers.transfers import SAVES_AGAIN, persistent
from snapshot_shared.errors import ArtifactExists, TransferKilled
from snapshot_shared.frames import UnfenceRequest
from tests.support.gms_rig import MIB, transfer_processes
from tests.support.weights import PART, Weights, flip

POINTS = int(os.environ.get("RESUMED_SAVES", "5"))
SIZE = int(os.environ.get("RESUMED_SAVES_MIB", "64")) * MIB
THREADS = 2
IN_FLIGHT = 2 * CHUNK_BYTES + THREADS * CHUNK_BYTES
"""Two batches of notes, which are a chunk each here, and a chunk a thread."""


class Killed(Weights):
    """Weights whose saves are killed, each in a root of its own."""

    def __init__(self, launch: Callable[..., Any], folder: Path, size: int) -> None:
        service = launch(capacities=(size + 32 * MIB, 32 * MIB))
        arrays = {"large": (size - 3 * MIB, "u1"), "odd": (2 * MIB + 5, "u1")}
        fields = {"threads": THREADS, "shard_bytes": 24 * MIB, "note_bytes": 1}
        super().__init__(service, folder / "artifacts", arrays, is_fenced=False, **fields)

    def task(self, name: str) -> SaveTask:
        """Return the task of a save that was not begun yet, under a fence of its own."""
        self.layout = self.fence(name)
        return self.save_task(root=str(self.root.parent / name), fence_token=name)


def part(task: SaveTask) -> Path:
    return Path(task.root, PART)


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def noted(task: SaveTask) -> int:
    """Return the bytes of the chunks that a killed save has noted."""
    notes = part(task) / ".notes"
    written = read_notes(notes.read_bytes() if notes.exists() else b"", note_of(task)).written
    return sum(
        min(CHUNK_BYTES, (part(task) / name).stat().st_size - index * CHUNK_BYTES)
        for name, chunks in written.items()
        for index in chunks
    )


@pytest.fixture
def weights(launch: Callable[..., Any], tmp_path: Path) -> Killed:
    return Killed(launch, tmp_path, 64 * MIB)


@pytest.mark.cpu(600)
@pytest.mark.timeout(900)
def test_a_killed_save_writes_again_only_what_was_in_flight(
    launch: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Killed(launch, tmp_path, SIZE)
    whole = weights.task("whole")
    plain = weights.doomed(whole)
    wanted = content(part(whole))
    total = sum(len(data) for name, data in wanted.items() if name != "part.json")
    rows, problems = [], []
    for number in range(POINTS):
        last = 1 + number * (plain.calls - 1) // max(1, POINTS - 1)
        task = weights.task(f"killed-{number}")
        first = weights.doomed(task, last=last)
        kept = noted(task)
        is_whole = (part(task) / "part.json").exists()
        second = weights.doomed(task)
        rows.append((last, plain.calls, first.bytes, kept, second.bytes))
        where = f"killed at call {last} of {plain.calls}"
        if content(part(task)) != wanted:
            problems.append(f"{where}: the part is another one")
        # A last page is written whole.
        missing = 0 if is_whole else total - kept
        if second.bytes > missing + 4096 * len(wanted):
            problems.append(f"{where}: {second.bytes} bytes were written, {missing} were missing")
        if first.bytes - kept > IN_FLIGHT and not is_whole:
            problems.append(f"{where}: {first.bytes - kept} bytes were written and not noted")
    with capsys.disabled():
        print(
            f"\n{total / MIB:.1f} MiB, {CHUNK_BYTES // MIB} MiB a chunk,"
            f" a note a chunk, {THREADS} threads"
        )
        print("killed at call | MiB written before | of them noted | MiB written after it")
        for last, calls, before, kept, after in rows:
            print(
                f"{last:>6} of {calls:<4} | {before / MIB:>18.1f} | {kept / MIB:>13.1f}"
                f" | {after / MIB:>20.1f}"
            )
    assert problems == []
    assert any(0 < kept < total for _, _, _, kept, _ in rows), "no point was in the middle"


def killed_half_way(weights: Killed, name: str = "killed") -> SaveTask:
    """Kill a save when it has noted some chunks."""
    whole = weights.doomed(weights.task("whole"))
    task = weights.task(name)
    weights.doomed(task, last=2 * whole.calls // 3)
    assert noted(task) >= 2 * CHUNK_BYTES
    return task


def test_a_killed_save_goes_on_in_the_service_too(weights: Killed) -> None:
    task = killed_half_way(weights)
    kept = noted(task)
    done = weights.events(task)[-1]
    assert isinstance(done, TransferDone)
    assert done.moved == done.bytes - kept
    assert not (part(task) / ".notes").exists()


def test_what_a_save_under_another_fence_has_left_is_thrown_away(weights: Killed) -> None:
    task = killed_half_way(weights)
    service = weights.service
    service.run(service.control.unfence(UnfenceRequest(token="killed")))
    (part(task) / "foreign").write_bytes(b"not ours")
    again = msgspec.structs.replace(task, fence_token="later", layout=weights.fence("later"))
    done = weights.run(again)
    assert done.moved == done.bytes
    assert content(part(again)).keys() == {"part.json", *(f"shard-{n:04}.bin" for n in range(3))}


def test_a_chunk_that_is_noted_and_damaged_is_written_again(weights: Killed) -> None:
    task = killed_half_way(weights)
    kept = noted(task)
    flip(part(task) / "shard-0000.bin", 5)
    done = weights.run(task)
    assert done.moved == done.bytes - kept + CHUNK_BYTES
    assert content(part(task)) == content(weights.root.parent / "whole" / PART)


def test_a_file_that_belongs_to_another_artifact_too_is_not_written_to(weights: Killed) -> None:
    task = killed_half_way(weights)
    shard = part(task) / "shard-0000.bin"
    elsewhere = weights.root.parent / "elsewhere"
    elsewhere.hardlink_to(shard)
    flip(shard, 5)
    before = elsewhere.read_bytes()
    weights.run(task)
    assert elsewhere.read_bytes() == before
    assert not elsewhere.samefile(shard)


def test_two_saves_never_write_one_part(weights: Killed) -> None:
    task = killed_half_way(weights)
    with (part(task) / ".notes").open("rb") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        with pytest.raises(ArtifactExists, match="another process"):
            weights.run(task)
    assert noted(task) >= 2 * CHUNK_BYTES, "what is refused removes nothing"
    weights.run(task)


@pytest.mark.parametrize("kills", [1, SAVES_AGAIN + 1])
def test_a_save_whose_process_is_killed_goes_on_in_another_some_times(
    weights: Killed, kills: int
) -> None:
    task = weights.task("killed")
    killed: set[int] = set()

    async def all_events() -> TransferEvent:
        async with contextlib.aclosing(persistent(TransferProcesses(), task)) as events:
            async for event in events:
                if isinstance(event, TransferLeased) and len(killed) < kills:
                    for pid in {*transfer_processes()} - killed:
                        os.kill(pid, signal.SIGKILL)
                        killed.add(pid)
        return event

    if kills > SAVES_AGAIN:
        with pytest.raises(TransferKilled, match="signal 9"):
            weights.service.run(all_events())
        fence = weights.service.device().fence
        assert fence is not None
        assert fence.phase == "leased", "what it saved cannot change"
        return
    assert isinstance(weights.service.run(all_events()), TransferDone)
    assert len(killed) == kills
