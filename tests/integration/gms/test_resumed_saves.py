"""Saves that were killed go on from what is on the disk, and the artifact is the same."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

import snapback_client as client
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.resume import note_of, read_notes
from gms.domain.tasks import SaveTask, TransferDone, TransferEvent, TransferLeased
from gms.domain.transfer import CHUNK_BYTES
from gms.handlers.transfers import SAVES_AGAIN, persistent
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import ArtifactExists, TransferKilled
from snapshot_shared.frames import FenceRequest, UnfenceRequest
from snapshot_shared.orders import LayoutRef
from tests.support.doomed_saver import COUNTS

MIB = 1024 * 1024
UID = "11111111-2222-3333-4444-555555555555"
POINTS = int(os.environ.get("RESUMED_SAVES", "5"))
SIZE = int(os.environ.get("RESUMED_SAVES_MIB", "64")) * MIB
ROOT = Path(__file__).resolve().parents[3]
THREADS = 2
IN_FLIGHT = 2 * CHUNK_BYTES + THREADS * CHUNK_BYTES
"""Two batches of notes, which are a chunk each here, and a chunk a thread."""


class Ended(NamedTuple):
    """How a process that saves has ended: what it did, and its result if there is one."""

    calls: int
    bytes: int
    done: TransferDone | None


class Weights:
    """A device with weights on it, whose saves are killed, each in a root of its own."""

    def __init__(self, launch: Callable[..., Any], folder: Path, size: int) -> None:
        self.service = launch(capacities=(size + 32 * MIB, 32 * MIB))
        self.folder = folder
        with client.connect(lock="RW") as pool:
            rng = np.random.default_rng(7)
            arrays = pool.allocate_many(
                {"large": (size - 3 * MIB, "u1"), "odd": (2 * MIB + 5, "u1")}
            )
            for array in arrays.values():
                array[...] = rng.integers(0, 256, array.shape, dtype="u1")
            pool.commit()

    def fence(self, token: str) -> LayoutRef:
        request = FenceRequest(
            token=token, devices=self.service.uuids[:1], wait_s=5.0, deadline_s=600.0
        )
        (layout,) = self.service.run(self.service.control.fence(request)).vector
        return layout

    def task(self, name: str) -> SaveTask:
        """Return the task of a save that was not begun yet, under a fence of its own."""
        return SaveTask(
            socket_dir=str(self.service.folder),
            root=str(self.folder / name),
            device=self.service.uuids[0],
            namespace="default",
            content_uid=UID,
            generation=1,
            part="gpu-0",
            deadline_s=30.0,
            threads=THREADS,
            order=f"save-{UID}-gpu-0",
            fence_token=name,
            layout=self.fence(name),
            shard_bytes=24 * MIB,
            note_bytes=1,
        )

    def save(self, task: SaveTask, *, last: int = 0) -> Ended:
        """Run a save, which dies at its `last` call that changes the disk."""
        counts = self.folder / "counts"
        command = [sys.executable, "-m", "tests.support.doomed_saver", str(last), str(counts)]
        found = subprocess.run(
            command, cwd=ROOT, input=encode_json(task) + b"\n", capture_output=True, check=False
        )
        if last:
            assert found.returncode in (0, -signal.SIGKILL), found.stderr.decode()
        else:
            assert found.returncode == 0, found.stderr.decode()
        done = msgspec.json.decode(found.stdout, type=TransferDone) if found.stdout else None
        return Ended(*COUNTS.unpack(counts.read_bytes()), done)

    def end(self, task: SaveTask) -> TransferDone:
        """Run a save as the service does."""

        async def last() -> Any:
            return [event async for event in TransferProcesses().run(task)][-1]

        done = self.service.run(last())
        assert isinstance(done, TransferDone)
        return done


def part(task: SaveTask) -> Path:
    return Path(task.root, "default", UID, "gen-1", "gpu-0")


def content(task: SaveTask) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in part(task).iterdir()}


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
def weights(launch: Callable[..., Any], tmp_path: Path) -> Weights:
    return Weights(launch, tmp_path, 64 * MIB)


@pytest.mark.cpu(600)
@pytest.mark.timeout(900)
def test_a_killed_save_writes_again_only_what_was_in_flight(
    launch: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    weights = Weights(launch, tmp_path, SIZE)
    whole = weights.task("whole")
    plain = weights.save(whole)
    wanted = content(whole)
    total = sum(len(data) for name, data in wanted.items() if name != "part.json")
    rows, problems = [], []
    for number in range(POINTS):
        last = 1 + number * (plain.calls - 1) // max(1, POINTS - 1)
        task = weights.task(f"killed-{number}")
        first = weights.save(task, last=last)
        kept = noted(task)
        is_whole = (part(task) / "part.json").exists()
        second = weights.save(task)
        rows.append((last, plain.calls, first.bytes, kept, second.bytes))
        where = f"killed at call {last} of {plain.calls}"
        if content(task) != wanted:
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


def killed_half_way(weights: Weights, name: str = "killed") -> SaveTask:
    """Kill a save when it has noted some chunks."""
    whole = weights.save(weights.task("whole"))
    task = weights.task(name)
    weights.save(task, last=2 * whole.calls // 3)
    assert noted(task) >= 2 * CHUNK_BYTES
    return task


def test_a_killed_save_goes_on_in_the_service_too(weights: Weights) -> None:
    task = killed_half_way(weights)
    kept = noted(task)
    done = weights.end(task)
    assert done.moved == done.bytes - kept
    assert not (part(task) / ".notes").exists()


def test_what_a_save_under_another_fence_has_left_is_thrown_away(weights: Weights) -> None:
    task = killed_half_way(weights)
    service = weights.service
    service.run(service.control.unfence(UnfenceRequest(token="killed")))
    (part(task) / "foreign").write_bytes(b"not ours")
    again = msgspec.structs.replace(task, fence_token="later", layout=weights.fence("later"))
    done = weights.end(again)
    assert done.moved == done.bytes
    assert sorted(content(again)) == [
        "part.json", "shard-0000.bin", "shard-0001.bin", "shard-0002.bin"
    ]  # fmt: skip


def _turn(path: Path, offset: int) -> None:
    with path.open("r+b") as shard:
        shard.seek(offset)
        byte = shard.read(1)[0]
        shard.seek(offset)
        shard.write(bytes([byte ^ 1]))


def test_a_chunk_that_is_noted_and_damaged_is_written_again(weights: Weights) -> None:
    task = killed_half_way(weights)
    kept = noted(task)
    _turn(part(task) / "shard-0000.bin", 5)
    done = weights.end(task)
    assert done.moved == done.bytes - kept + CHUNK_BYTES
    whole = weights.folder / "whole" / "default" / UID / "gen-1" / "gpu-0"
    assert content(task) == {path.name: path.read_bytes() for path in whole.iterdir()}


def test_notes_whose_end_is_torn_count_as_far_as_they_are_whole(weights: Weights) -> None:
    task = killed_half_way(weights)
    notes = part(task) / ".notes"
    lines = notes.read_bytes().splitlines(keepends=True)
    notes.write_bytes(b"".join(lines[:-1]) + lines[-1][:-9])
    kept = noted(task)
    assert kept == CHUNK_BYTES * (len(lines) - 2), "the first line says which save it is"
    done = weights.end(task)
    assert done.moved == done.bytes - kept


def test_a_file_that_belongs_to_another_artifact_too_is_not_written_to(weights: Weights) -> None:
    task = killed_half_way(weights)
    shard = part(task) / "shard-0000.bin"
    elsewhere = weights.folder / "elsewhere"
    elsewhere.hardlink_to(shard)
    _turn(shard, 5)
    before = elsewhere.read_bytes()
    weights.end(task)
    assert elsewhere.read_bytes() == before
    assert not elsewhere.samefile(shard)


def test_two_saves_never_write_one_part(weights: Weights) -> None:
    task = killed_half_way(weights)
    with (part(task) / ".notes").open("rb") as notes:
        fcntl.flock(notes, fcntl.LOCK_EX)
        with pytest.raises(ArtifactExists, match="another process"):
            weights.end(task)
    assert noted(task) >= 2 * CHUNK_BYTES, "what is refused removes nothing"
    weights.end(task)


@pytest.mark.parametrize("kills", [1, SAVES_AGAIN + 1])
def test_a_save_whose_process_is_killed_goes_on_in_another_some_times(
    weights: Weights, kills: int
) -> None:
    task = weights.task("killed")
    killed: set[int] = set()

    async def all_events() -> TransferEvent:
        async with contextlib.aclosing(persistent(TransferProcesses(), task)) as events:
            async for event in events:
                if isinstance(event, TransferLeased) and len(killed) < kills:
                    for path in Path("/proc/self/task").glob("*/children"):
                        for pid in map(int, path.read_text().split()):
                            command = Path(f"/proc/{pid}/cmdline").read_bytes()
                            if b"gms.transfer_child" in command and pid not in killed:
                                os.kill(pid, signal.SIGKILL)
                                killed.add(pid)
        return event

    if kills > SAVES_AGAIN:
        with pytest.raises(TransferKilled):
            weights.service.run(all_events())
        fence = weights.service.device().fence
        assert fence is not None
        assert fence.phase == "leased", "what it saved cannot change"
        return
    assert isinstance(weights.service.run(all_events()), TransferDone)
    assert len(killed) == kills
