"""Processes: started apart, found by their run, ended for certain."""

import asyncio
import os
import signal
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshotctl.adapters import inotify, processes
from snapshotctl.domain.cluster import ProcessRecord
from tests.support.waiting import until

STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
WAIT = "print('ready', flush=True); import signal; signal.pause()"


@pytest.fixture
def run_id() -> Iterator[str]:
    """The run id of one test; what carries it is ended with the test."""
    found = uuid.uuid4().hex[:8]
    yield found
    for member in processes.members(found):
        os.kill(member.pid, signal.SIGKILL)


async def _started(run_id: str, tmp_path: Path, program: str = WAIT) -> ProcessRecord:
    """Start a program and return once it has said something."""
    log = tmp_path / f"{uuid.uuid4().hex}.log"
    log.touch()
    environment = {**os.environ, "SNAPBACK_RUN": run_id}
    found = processes.spawn("x", [sys.executable, "-c", program], environment, log)
    assert found.started
    await until(log.read_text, "its first line")
    return found


async def test_a_process_of_a_run_has_a_session_and_a_log_and_is_found_by_its_environment(
    run_id: str, tmp_path: Path
) -> None:
    record = await _started(run_id, tmp_path)
    assert os.getsid(record.pid) == record.pid
    assert Path(record.log).read_text() == "ready\n"
    members = processes.members(run_id)
    assert [member.pid for member in members] == [record.pid]
    assert processes.environment_of(record.pid)["SNAPBACK_RUN"] == run_id
    # What started it lives.
    assert processes.supervised(members) == {run_id}


async def test_a_run_whose_starter_ended_is_not_supervised(run_id: str, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.touch()
    program = (
        "import os, sys; from pathlib import Path; from snapshotctl.adapters import processes; "
        "processes.spawn('x', [sys.executable, '-c', sys.argv[1]], "
        "{**os.environ, 'SNAPBACK_RUN': sys.argv[2]}, Path(sys.argv[3]))"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, "import signal; signal.pause()", run_id, str(log)
    )
    assert await child.wait() == 0
    members = processes.members(run_id)
    # A reaper of another name, such as that of a test runner, would hide what is left over.
    adopted = [
        Path(f"/proc/{m.pid}/stat").read_text().rpartition(")")[2].split()[1] for m in members
    ]
    if adopted != ["1"]:
        pytest.skip(f"orphans of this session are adopted by process {adopted}, not by the first")
    assert processes.supervised(members) == frozenset()


async def test_we_and_our_parents_are_no_members(run_id: str) -> None:
    program = (
        "import sys; from snapshotctl.adapters import processes; "
        "sys.exit(len(processes.members(sys.argv[1])))"
    )
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-c", program, run_id, env={**os.environ, "SNAPBACK_RUN": run_id}
    )
    assert await child.wait() == 0


@pytest.mark.parametrize(("ignores", "grace_s"), [("", 60), (STUBBORN, 0.2)])
async def test_a_process_ends_by_sigterm_at_once_or_is_killed_after_the_grace(
    run_id: str, tmp_path: Path, ignores: str, grace_s: float
) -> None:
    record = await _started(run_id, tmp_path, ignores + WAIT)
    handle = processes.opened(record)
    assert handle is not None
    async with asyncio.timeout(10):
        await processes.end([handle], grace_s=grace_s)
    assert not processes.is_alive(record)
    assert processes.opened(record) is None


async def test_another_process_with_the_same_pid_is_not_touched(
    run_id: str, tmp_path: Path
) -> None:
    record = await _started(run_id, tmp_path)
    namesake = ProcessRecord(name="x", pid=record.pid, started=record.started - 1)
    assert not processes.is_alive(namesake)
    assert processes.opened(namesake) is None
    assert processes.is_alive(record)


async def test_an_interrupt_waits_for_what_must_come_to_its_end() -> None:
    begun, may_end, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        await may_end.wait()
        ended.set()

    task = asyncio.create_task(processes.to_the_end(work()))
    await begun.wait()
    task.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_file_is_waited_for_through_folders_until_it_is_there(tmp_path: Path) -> None:
    wanted = tmp_path / "a" / "b" / "socket"
    waiting = asyncio.create_task(inotify.appears(wanted))
    async with asyncio.timeout(10):
        async with inotify.watching(tmp_path) as changes:
            wanted.parent.mkdir(parents=True)
            await changes.wait()
        assert not waiting.done()
        (wanted.parent / "temporary").touch()
        (wanted.parent / "temporary").rename(wanted)
        await waiting
    async with asyncio.timeout(5):
        await inotify.appears(wanted)
