"""Dumps by the real CRIU onto a disk that becomes full at any byte of them."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager

import pytest

from snapshot_shared.orders import Report
from tests.process.killing import MIB, HaltedDump, prepared, thinned
from tests.process.node import Container, Node
from tests.support.agent_rig import failure_of, fresh_uid
from tests.support.turns import TURN
from tests.support.waiting import until

# It mounts on this machine, which the tests of plain processes must not see.
pytestmark = pytest.mark.xdist_group("mounts")

DISK_BYTES = 256 * MIB
OFFSETS = 50
TURNS = 5
"""How many tests share the offsets."""
LAST = 12
"""How many of the offsets are at the last pages of a dump, where small files are written."""


@pytest.fixture
async def disk(node: Node) -> AsyncIterator[Node]:
    """A node whose artifacts are on a disk of their own."""
    options = ("-t", "tmpfs", "-o", f"size={DISK_BYTES}")
    subprocess.run(["mount", *options, "tmpfs", node.root], check=True)  # noqa: ASYNC221
    yield node
    subprocess.run(["umount", "--lazy", node.root], check=True)  # noqa: ASYNC221


def used(node: Node) -> int:
    seen = os.statvfs(node.root)
    return (seen.f_blocks - seen.f_bfree) * seen.f_frsize


@contextmanager
def full_after(node: Node, count: int) -> Iterator[None]:
    """Let only `count` bytes more be written to the disk of a node, for a block."""
    filler = node.root / "filler"
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, DISK_BYTES - used(node) - count)
    yield
    filler.unlink()


async def dumped(node: Node, worker: Container, room: int) -> Report:
    """Dump a worker onto a disk that has this room from the start of CRIU on."""
    halted = HaltedDump(node, worker, await prepared(node, worker))
    halted.arm("start")
    await node.send(halted.order)
    await halted.reached(over=False)
    with full_after(node, room):
        halted.go_on()
        report = await halted.answered()
        await worker.goes_on()
        await halted.rests()
        assert halted.is_staged == (report.kind == "staged")
    seen = len(worker.did())
    await halted.end(report)
    await until(lambda: len(worker.did()) > seen, "the worker's release")
    return report


@pytest.mark.parametrize("turn", range(TURNS))
async def test_a_disk_that_becomes_full_fails_a_dump_by_name_and_its_worker_goes_on(
    disk: Node, turn: int
) -> None:
    worker = await disk.container("worker")
    await disk.captured(worker, fresh_uid())  # type: ignore[arg-type]
    # It polls, and would miss the end of this capture in the next one.
    await until(lambda: "snapshot-complete" in worker.did(), "the worker's release")
    total = used(disk)
    last = [total - mmap.PAGESIZE * count for count in range(LAST)]
    rest = [total * number // (OFFSETS - LAST) for number in range(OFFSETS - LAST)]
    failed = 0
    for room in thinned(sorted(rest + last)[turn::TURNS]):
        shutil.rmtree(disk.root / "default")
        report = await dumped(disk, worker, room)
        if report.kind == "staged":
            assert room > total - LAST * mmap.PAGESIZE
            continue
        failed += 1
        failure = failure_of(report, "NoSpace")
        assert str(disk.root) in failure.message
        assert failure.values["free"] < mmap.PAGESIZE
        assert failure.values["needed"] > 0
    assert failed >= (OFFSETS - LAST) // TURNS // TURN.every
