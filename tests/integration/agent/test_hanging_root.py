"""An artifact root that does not answer delays captures, and touches nothing else."""

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_agent.adapters import presence
from snapshot_agent.domain import control
from snapshot_shared import subjects
from snapshot_shared.codec import decode_json
from snapshot_shared.orders import DumpOrder, Presence, RestoreOrder
from tests.support.agent_rig import PATIENCE_S, Pod, Rig, failure_of, fresh_uid, state_of
from tests.support.hanging import HangingRoot
from tests.support.waiting import until

pytestmark = pytest.mark.turns

SOON_S = 8.0
MORE_THAN_THREADS = 40


@pytest.fixture
def root(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> Iterator[HangingRoot]:
    monkeypatch.setattr(presence, "EVERY_S", 0.2)
    made = HangingRoot(rig.root, monkeypatch)
    yield made
    made.answer()


@contextlib.asynccontextmanager
async def serving(rig: Rig, disk: HangingRoot) -> AsyncIterator[None]:
    """Run the agent; it cannot end before the disk answers."""
    async with rig.agent():
        try:
            yield
        finally:
            disk.answer()


@pytest.fixture
async def disk(rig: Rig, root: HangingRoot) -> AsyncIterator[HangingRoot]:
    """The root of an agent that serves."""
    async with serving(rig, root):
        yield root


def is_signalled(pod: Pod, name: str) -> bool:
    return (pod.control / name).exists() and not (pod.control / control.QUIESCE).exists()


async def dumping(rig: Rig, disk: HangingRoot, **fields: Any) -> tuple[Pod, DumpOrder, int]:
    """A worker whose dump hangs while it is frozen, and its process."""
    pod, content, dump = await rig.held()
    disk.hang()
    dump = rig.dump_order(pod, content, dump.vector, **fields)
    await rig.send(dump)
    pid = pod.pid(rig.journal)
    await until(lambda: disk.waiting and state_of(pid) in "Tt", "a dump that hangs")
    return pod, dump, pid


async def test_the_event_loop_makes_no_call_on_the_artifact_root(
    rig: Rig, disk: HangingRoot
) -> None:
    pod, content = await rig.running("--answer", "42"), fresh_uid()
    artifact = await rig.captured(pod, content)
    await rig.done(rig.verify_order(artifact), "verified")
    target = await rig.running(standby=True)
    await rig.done(rig.restore_order(target, artifact), "restored")
    await rig.done(rig.delete_order(content), "deleted")
    assert disk.calls > 100
    assert disk.in_the_loop == []


async def test_presence_goes_on_with_the_free_space_that_was_measured_last(
    rig: Rig, root: HangingRoot
) -> None:
    # Until they are known there is no GMS to wait for.
    rig.answers_pods.clear()
    subject = f"$KV.{subjects.NODES_BUCKET}.{rig.node}"
    async with rig.bus.listening(subject) as queue, serving(rig, root):
        known = decode_json((await asyncio.wait_for(queue.get(), PATIENCE_S)).data, Presence)
        # Not all calls: the inventory may begin at any time.
        root.hang("statvfs", "fstatvfs")
        await until(lambda: root.waiting, "a measurement")
        while not queue.empty():
            known = decode_json(queue.get_nowait().data, Presence)
        for _ in range(3):
            published = decode_json((await asyncio.wait_for(queue.get(), SOON_S)).data, Presence)
            assert published.free_bytes == known.free_bytes > 0
        assert root.waiting == 1


async def test_a_worker_whose_dump_hangs_is_released_when_the_capture_is_given_up(
    rig: Rig, disk: HangingRoot
) -> None:
    pod, dump, pid = await dumping(rig, disk)
    content = dump.content_uid
    abort = rig.abort_order(pod, content)
    await rig.send(abort)
    await until(lambda: state_of(pid) not in "Tt", "the thaw", within_s=SOON_S)
    assert (await asyncio.wait_for(rig.answer(abort), SOON_S)).kind == "aborted"
    assert is_signalled(pod, control.ABORTED)
    await until(lambda: pod.events()[-1] == "snapshot-aborted 1", "the worker to go on")
    # What still hangs belongs to the dump, and nothing below it is removed before that ends.
    delete = rig.delete_order(content)
    await rig.send(delete)
    assert not [r for r in rig.reports if r.order == dump.order and r.is_terminal]

    disk.answer()
    assert (await rig.answer(dump)).kind == "failed"
    assert (await rig.answer(delete)).kind == "deleted"
    assert not rig.generation(content).exists()
    await until(lambda: open_below(rig.root) == [], "all descriptors to be closed")
    await rig.captured(pod, fresh_uid())


def open_below(root: Path) -> list[Path]:
    """What this process has open below a folder."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found.append(link.readlink())
    return [path for path in found if path.is_relative_to(root)]


async def test_a_dump_that_hangs_beyond_its_deadline_does_not_keep_the_worker_frozen(
    rig: Rig, disk: HangingRoot
) -> None:
    pod, dump, pid = await dumping(rig, disk, deadline_s=5.0)
    # The agent does it, not the guard, which would report to the worker as well.
    await until(lambda: state_of(pid) not in "Tt", "the thaw", within_s=8.0)
    assert not is_signalled(pod, control.ABORTED)
    disk.answer()
    failure_of(await rig.answer(dump), "DeadlineExceeded")


async def test_a_capture_that_cannot_be_measured_is_given_up_at_once(
    rig: Rig, disk: HangingRoot
) -> None:
    pod, content = await rig.running(), fresh_uid()
    disk.hang()
    prepare = rig.prepare_order(pod, content)
    await rig.send(prepare)
    await until((pod.control / control.QUIESCED).exists, "a quiet worker")
    await rig.send(rig.abort_order(pod, content))
    failed = await asyncio.wait_for(rig.answer(prepare), SOON_S)
    assert failed.kind == "failed"
    assert is_signalled(pod, control.ABORTED)


async def test_the_release_of_another_worker_and_new_pods_do_not_wait(
    rig: Rig, disk: HangingRoot
) -> None:
    held, content = await rig.running(), fresh_uid()
    await rig.staged(held, content)
    disk.hang()
    deletes = [rig.delete_order(fresh_uid()) for _ in range(MORE_THAN_THREADS)]
    for order in deletes:
        await rig.send(order)
    await until(lambda: disk.waiting > 2, "threads that hang")
    await asyncio.wait_for(rig.done(rig.release_order(held, content), "released"), SOON_S)
    assert is_signalled(held, control.COMPLETE)
    pod = await asyncio.wait_for(rig.running(), SOON_S)
    await asyncio.wait_for(rig.done(rig.stop_order(pod), "stopped"), SOON_S)
    disk.answer()
    for order in deletes:
        assert (await rig.answer(order)).kind == "deleted"


async def restoring(
    rig: Rig, disk: HangingRoot, *calls: str, **fields: Any
) -> tuple[Pod, RestoreOrder]:
    """A worker in standby whose restore hangs in one of these calls on the artifact root."""
    target, artifact = await rig.restorable()
    order = rig.restore_order(target, artifact, **fields)
    disk.hang(*calls)
    before = disk.waiting
    await rig.send(order)
    await until(lambda: disk.waiting > before, "a restore that hangs")
    return target, order


@pytest.mark.parametrize("calls", [(), ("preadv",)], ids=["within its check", "within its copy"])
async def test_the_abort_of_a_restore_that_hangs_reports_to_the_worker_and_ends(
    rig: Rig, disk: HangingRoot, calls: tuple[str, ...]
) -> None:
    target, order = await restoring(rig, disk, *calls)
    abort = rig.restore_abort(target)
    await rig.send(abort)
    await until(lambda: target.events()[-1] == "restore-failed", "the report")
    assert (await rig.answer(abort)).kind == "aborted"
    disk.answer()
    assert (await rig.answer(order)).kind == "failed"


async def test_a_restore_that_hangs_beyond_its_deadline_is_reported_to_the_worker(
    rig: Rig, disk: HangingRoot
) -> None:
    target, order = await restoring(rig, disk, "preadv", deadline_s=5.0)
    await until(lambda: target.events()[-1] == "restore-failed", "the report", within_s=8.0)
    disk.answer()
    failure_of(await rig.answer(order), "DeadlineExceeded")


AN_AGENT_WITH_A_ROOT_THAT_HANGS = """
import signal, sys, threading, time
from pathlib import Path
import pytest
from snapshot_agent.main import main
from tests.support.hanging import HangingRoot
disk = HangingRoot(Path(sys.argv[1]), pytest.MonkeyPatch())

def report():
    while not disk.waiting:
        time.sleep(0.01)
    Path(sys.argv[2]).touch()

threading.Thread(target=report, daemon=True).start()
signal.signal(signal.SIGUSR1, lambda *_: disk.hang())
sys.exit(main())
"""
GRACE_S = 10.0
"""What container engines give a process between SIGTERM and SIGKILL, in seconds."""


@pytest.fixture
async def process(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> asyncio.subprocess.Process:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[3]), prepend=os.pathsep)
    arguments = (AN_AGENT_WITH_A_ROOT_THAT_HANGS, str(rig.root), str(hangs(rig)))
    return await rig.process("-c", *arguments)


def hangs(rig: Rig) -> Path:
    """A file that is there once a call on the root hangs."""
    return rig.state.parent / "hangs"


async def ended(process: asyncio.subprocess.Process) -> float:
    """End an agent as a container engine does; the seconds that it took."""
    began = time.monotonic()
    process.terminate()
    assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0
    return time.monotonic() - began


async def test_an_agent_ends_within_its_grace_period_while_a_dump_hangs(
    rig: Rig, process: asyncio.subprocess.Process
) -> None:
    pod, _, dump = await rig.held()
    process.send_signal(signal.SIGUSR1)
    await rig.send(dump)
    pid = pod.pid(rig.journal)
    await until(lambda: hangs(rig).exists() and state_of(pid) in "Tt", "a dump that hangs")
    assert await ended(process) < GRACE_S
    await until(lambda: pod.events()[-1] == "snapshot-aborted 1", "the worker to go on")
    assert state_of(pid) not in "Tt"


async def test_an_agent_ends_within_its_grace_period_while_nothing_but_its_own_work_hangs(
    rig: Rig, process: asyncio.subprocess.Process
) -> None:
    process.send_signal(signal.SIGUSR1)
    await rig.send(rig.delete_order(fresh_uid()))
    await until(hangs(rig).exists, "a delete that hangs")
    assert await ended(process) < GRACE_S
