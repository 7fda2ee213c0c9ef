"""Containers as local processes: started, watched, re-adopted, ended; reads of them that hang."""

import asyncio
import contextlib
import errno
import os
import signal
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import NamedTuple
from unittest.mock import Mock

import pytest

from snapshot_agent.adapters import control_dir, process_memory, processes, procfs
from snapshot_agent.adapters.process_memory import ProcessMemory
from snapshot_agent.adapters.processes import LocalProcesses
from snapshot_agent.domain.control import CONTROL_DIR, ContainerPaths
from snapshot_agent.domain.spec import INSIDE, ProcessSpec
from snapshot_agent.ports import Process
from snapshot_shared.errors import DeadlineExceeded, InvalidInput
from snapshot_shared.orders import RunOrder
from snapshot_shared.tasks import calls_under_way, yield_turn
from tests.support.agent_rig import Pod, Rig, below, fresh_uid, is_gone, killed, zombies_of
from tests.support.hanging import HangingRoot, hanging_memory
from tests.support.waiting import until


def environment_of(pid: int) -> dict[str, str]:
    raw = os.fsdecode(procfs.memory(pid, "environ"))
    return dict(entry.split("=", 1) for entry in raw.split("\0") if entry)


async def test_a_pod_is_started_becomes_ready_and_its_exit_code_is_reported(node: Rig) -> None:
    pod = node.pod()
    order = node.run_order(pod)
    await node.done(order, "started")
    await node.answer(order, "ready")
    os.kill(pod.pid(node.journal), signal.SIGKILL)
    assert (await node.exited(pod)).exit_code == 128 + signal.SIGKILL
    kinds = [report.kind for report in node.reports if report.order == order.order]
    assert kinds == ["accepted", "started", "ready", "exited"]


async def test_a_container_sees_its_node_its_pod_and_nothing_of_the_agents_environment(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ONLY_FOR_THE_AGENT", "1")
    greeting = {"name": "GREETING", "value": "hello $(POD_NAME)"}
    async with rig.agent():
        pod = rig.pod("--answer", "$(GREETING)", env=[greeting])
        await rig.carry_out(rig.run_order(pod))
        env = environment_of(pod.pid(rig.journal))
    assert env["SNAPSHOT_CONTROL_DIR"] == str(pod.control)
    assert env["POD_UID"] == pod.ref.uid
    assert env["GREETING"] == "hello worker"
    assert env["SNAPBACK_RUN"] == "test"
    assert env["POD_SOCKET_DIR"] == str(rig.sockets / pod.ref.uid[:8])
    assert not {"ONLY_FOR_THE_AGENT", "SNAPBACK_NATS_URL", "SNAPSHOT_RESTORE_STANDBY"} & set(env)
    assert (rig.sockets / pod.ref.uid[:8]).stat().st_mode & 0o777 == 0o700


async def test_a_spec_of_another_digest_or_without_its_program_is_refused_by_name(
    node: Rig,
) -> None:
    pod, lacks = node.pod(), node.pod()
    order = node.run_order(pod)
    pod.spec["containers"][0]["command"].append("--stubborn")
    await node.refused(order, "StalePodReference", kind="rejected")
    assert not pod.home.exists()
    lacks.spec["containers"][0]["command"] = ["no-such-program"]
    assert "no-such-program" in (await node.refused(node.run_order(lacks), "NotFound")).message


async def test_stop_ends_a_stubborn_worker_and_what_left_its_session(node: Rig) -> None:
    pod = await node.running("--stubborn", "--child")
    child = int((pod.home / "child").read_text())
    assert not is_gone(child)
    await node.done(node.stop_order(pod, grace_s=0.2), "stopped")
    assert is_gone(child)
    assert is_gone(pod.pid(node.journal))
    assert (await node.exited(pod)).exit_code == 128 + signal.SIGKILL
    await until(lambda: not (node.sockets / pod.ref.uid[:8]).exists(), "the end of its folder")


async def test_stopping_a_pod_that_never_ran_is_stopped_and_keeps_it_from_running(
    node: Rig,
) -> None:
    pod = node.pod()
    await node.done(node.stop_order(pod), "stopped")
    await node.refused(node.run_order(pod), "Superseded", kind="rejected")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_an_agent_that_ends_leaves_its_containers_running_and_the_next_one_adopts_them(
    rig: Rig, number: signal.Signals
) -> None:
    process = await rig.process()
    pod = await rig.running("--answer", "once")
    process.send_signal(number)
    await process.wait()
    pid = pod.pid(rig.journal)
    await pod.goes_on()

    await rig.process()
    assert (await rig.status())["pods"][0]["containers"] == {"main": pid}
    assert pod.events() == ["started --answer once"]
    os.kill(pid, signal.SIGTERM)
    exited = await rig.exited(pod)
    # Only a parent learns the code, and that was the agent that is gone.
    assert exited.exit_code is None
    assert len({report.n for report in rig.reports if report.kind == "ready"}) == 1


async def test_a_container_that_ended_while_the_agent_was_away_is_reported_with_no_code(
    rig: Rig,
) -> None:
    process = await rig.process()
    pod = await rig.running()
    await killed(process)
    os.kill(pod.pid(rig.journal), signal.SIGKILL)
    await until(lambda: is_gone(pod.pid(rig.journal)), "the end of the worker")
    async with rig.agent():
        assert (await rig.exited(pod)).exit_code is None


async def test_a_failed_container_ends_the_others_of_its_pod(node: Rig) -> None:
    pod = node.pod("--exit-at-start", "7")
    spec = pod.spec["containers"]
    spec.append({**spec[0], "name": "sidecar", "command": ["sleep", "600"]})
    order = node.run_order(pod)
    await node.send(order)
    exited = await node.answer(order, "exited")
    ended = (await node.status())["pods"][0]["ended"]
    assert exited.exit_codes == ended == {"main": 7, "sidecar": 128 + signal.SIGTERM}
    assert exited.exit_code == 7
    assert "exit code 7" in exited.message


async def test_orders_of_many_pods_are_carried_out_side_by_side(node: Rig) -> None:
    pods = await asyncio.gather(*(node.running() for _ in range(5)))
    assert len({pod.pid(node.journal) for pod in pods}) == 5
    reports = await asyncio.gather(*(node.carry_out(node.stop_order(pod)) for pod in pods))
    assert {report.kind for report in reports} == {"stopped"}


@pytest.mark.parametrize("kind", ["fifo", "link"])
async def test_what_a_worker_puts_in_the_place_of_its_log_is_not_written_to(
    tmp_path: Path, kind: str
) -> None:
    places = ContainerPaths(tmp_path / "main", tmp_path / "sockets")
    places.log.parent.mkdir(parents=True)
    if kind == "fifo":
        os.mkfifo(places.log)
        # Or a writer that opens it would hang.
        os.open(places.log, os.O_RDWR | os.O_NONBLOCK)
    else:
        places.log.symlink_to(tmp_path / "elsewhere")
    launcher = LocalProcesses()
    with pytest.raises(InvalidInput, match="no plain file"):
        await launcher.spawn(ProcessSpec(["true"], dict(os.environ), tmp_path, places))
    launcher.close()
    assert not (tmp_path / "elsewhere").exists()


async def test_a_worker_that_nests_folders_in_each_other_can_be_stopped(node: Rig) -> None:
    pod = await node.running()
    folder = os.open(pod.control / "state", os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("down", dir_fd=folder)
        below = os.open("down", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    try:
        await node.done(node.stop_order(pod), "stopped")
        assert list((pod.control / "state").iterdir()) == []
    finally:
        # What is left is too deep for pytest to remove.
        await asyncio.to_thread(subprocess.run, ["rm", "-rf", pod.control / "state"])


async def test_a_stop_does_not_fail_because_something_cannot_be_tidied_up(
    node: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = Mock(side_effect=OSError(errno.EIO, "the disk is broken"))
    pod = await node.running()
    monkeypatch.setattr(control_dir, "_clear", fail)
    monkeypatch.setattr(processes, "_remove", fail)
    await node.done(node.stop_order(pod), "stopped")
    await node.exited(pod)
    assert is_gone(pod.pid(node.journal))


async def test_the_event_loop_makes_no_call_on_the_state_of_a_worker(
    node: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pod = await node.running()
    target = await node.running(standby=True)
    watched = [HangingRoot(each.control / "state", monkeypatch) for each in (pod, target)]
    artifact = await node.captured(pod, fresh_uid())
    await node.done(node.restore_order(target, artifact), "restored")
    for each in (pod, target):
        await node.done(node.stop_order(each), "stopped")
    assert all(each.calls > 5 for each in watched)
    assert [each.in_the_loop for each in watched] == [[], []]


async def test_a_process_whose_environment_cannot_be_read_delays_no_pod(
    node: Rig, bystander: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = HangingRoot(Path(f"/proc/{bystander}/environ"), monkeypatch)
    with memory.hanging():
        for _ in range(2):
            pod = await node.running("--child")
            child = int((pod.home / "child").read_text())
            await node.done(node.stop_order(pod), "stopped")
            assert is_gone(child)
        # A thread for the process, not for each look at it.
        assert (memory.waiting, memory.in_the_loop) == (1, [])


async def test_processes_are_looked_at_again_once_no_more_hang_than_there_are_threads(
    bystander: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = hanging_memory(bystander, monkeypatch, 0.5, threads=1)
    launcher = LocalProcesses()
    with memory.hanging():
        for _ in range(2):
            with pytest.raises(DeadlineExceeded, match=str(bystander)):
                await launcher.running(tmp_path)
    await until(lambda: not memory.waiting, "the end of the read")
    # On a machine with much to do, each read takes long.
    monkeypatch.setattr(process_memory, "HANGS_S", 60.0)
    assert await launcher.running(tmp_path) == []


class Sleeper(NamedTuple):
    launcher: LocalProcesses
    process: Process
    places: ContainerPaths


@pytest.fixture
async def sleeper(tmp_path: Path) -> AsyncIterator[Sleeper]:
    """A container that sleeps."""
    places = ContainerPaths(tmp_path / "main", tmp_path / "sockets")
    places.control.mkdir(parents=True)
    name, _, value = places.marker.partition("=")
    launcher = LocalProcesses()
    spec = ProcessSpec(["sleep", "600"], {**os.environ, name: value}, tmp_path, places)
    process = await launcher.spawn(spec)
    # Until the program has begun, its environment is empty.
    await until(lambda: environment_of(process.pid), "the program")
    yield Sleeper(launcher, process, places)
    procfs.send(procfs.Stat(process.pid, "", 0, 0, process.start), signal.SIGKILL)
    await launcher.ended(process)
    launcher.close()


@pytest.mark.parametrize(("grace_s", "number"), [(0.0, signal.SIGKILL), (20.0, signal.SIGTERM)])
async def test_a_session_is_ended_although_too_many_processes_hang_to_look_for_others(
    sleeper: Sleeper,
    bystander: int,
    monkeypatch: pytest.MonkeyPatch,
    grace_s: float,
    number: signal.Signals,
) -> None:
    memory = hanging_memory(bystander, monkeypatch, 0.5, threads=1)
    launcher, process, places = sleeper
    with memory.hanging():
        # Not success: a process that has left the session may still run.
        with pytest.raises(DeadlineExceeded, match=str(bystander)):
            await launcher.terminate(process, places, grace_s)
        assert is_gone(process.pid)
        assert await launcher.ended(process) == 128 + number


@pytest.mark.parametrize(("grace_s", "number"), [(0.0, signal.SIGKILL), (60.0, signal.SIGTERM)])
async def test_a_session_is_ended_while_a_search_waits_for_a_process_that_hangs(
    sleeper: Sleeper,
    bystander: int,
    monkeypatch: pytest.MonkeyPatch,
    grace_s: float,
    number: signal.Signals,
) -> None:
    launcher, process, places = sleeper
    with (memory := hanging_memory(bystander, monkeypatch, 60.0)).hanging():
        searching = asyncio.create_task(launcher.running(places.home))
        terminating = asyncio.create_task(launcher.terminate(process, places, grace_s))
        await until(lambda: memory.waiting, "the search")
        async with asyncio.timeout(10.0):
            assert await launcher.ended(process) == 128 + number
    await asyncio.gather(searching, terminating)


@pytest.mark.parametrize(("hangs", "code"), [(False, 7), (True, 128 + signal.SIGTERM)])
async def test_a_container_within_a_placeholder_is_asked_alone_to_end_where_it_can_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hangs: bool, code: int
) -> None:
    monkeypatch.setattr(process_memory, "HANGS_S", 0.2)
    marker = f"{CONTROL_DIR}={INSIDE}/control"
    script = f"env {marker} sleep 600 & echo $! >child; wait $!; exit 7"
    places = ContainerPaths(tmp_path / "main", tmp_path / "sockets")
    places.control.mkdir(parents=True)
    launcher = LocalProcesses()
    process = await launcher.spawn(
        ProcessSpec(["sh", "-c", script], dict(os.environ), tmp_path, places)
    )
    noted = tmp_path / "child"
    await until(lambda: noted.exists() and noted.read_text().endswith("\n"), "the child")
    child = int(noted.read_text())
    await until(
        lambda: procfs.carries(procfs.memory(child, "environ"), marker), "the program of the child"
    )
    memory = HangingRoot(Path(f"/proc/{child}/environ"), monkeypatch)
    with memory.hanging() if hangs else contextlib.nullcontext():
        await launcher.terminate(process, places, 20.0)
        assert await launcher.ended(process) == code
        assert is_gone(child)
    launcher.close()


async def test_the_search_for_others_takes_no_time_from_the_end_of_what_it_finds(
    sleeper: Sleeper, bystander: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "HANGS_S", 2.0)
    monkeypatch.setattr(processes, "KILLED_WITHIN_S", 1.9)
    memory = HangingRoot(Path(f"/proc/{bystander}/environ"), monkeypatch)
    launcher, process, places = sleeper
    elsewhere = await launcher.spawn(
        ProcessSpec(["sleep", "600"], environment_of(process.pid), places.home, places)
    )
    with memory.hanging():
        await launcher.terminate(process, places, 0.0)
    ended = is_gone(process.pid), is_gone(elsewhere.pid)
    procfs.send(procfs.Stat(elsewhere.pid, "", 0, 0, elsewhere.start), signal.SIGKILL)
    assert ended == (True, True)


async def test_a_stop_ends_the_worker_although_too_many_processes_hang_to_look_for_others(
    rig: Rig, bystander: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = hanging_memory(bystander, monkeypatch, 0.2, threads=1)
    async with rig.agent():
        pod = await rig.running()
        with memory.hanging():
            await rig.refused(rig.stop_order(pod), "DeadlineExceeded")
            assert is_gone(pod.pid(rig.journal))


async def beginning(
    rig: Rig, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[HangingRoot, Pod, RunOrder]:
    """A pod whose start hangs because its working directory does not answer."""
    slow = folder / "slow"
    slow.mkdir()
    disk = HangingRoot(slow, monkeypatch)
    disk.hang()
    pod = rig.pod(workingDir=str(slow))
    run = rig.run_order(pod)
    await rig.send(run)
    await until(lambda: disk.waiting or disk.in_the_loop, "a start that hangs")
    return disk, pod, run


async def test_a_working_directory_that_does_not_answer_delays_no_other_pod(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with rig.agent():
        disk, _, run = await beginning(rig, tmp_path, monkeypatch)
        other = await asyncio.wait_for(rig.running(), 8.0)
        await rig.done(rig.stop_order(other), "stopped")
        disk.answer()
        assert (await rig.answer(run)).kind == "started"
    assert disk.in_the_loop == []


async def test_a_pod_that_is_stopped_while_its_process_begins_leaves_nothing_running(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = zombies_of(os.getpid())
    async with rig.agent():
        disk, pod, run = await beginning(rig, tmp_path, monkeypatch)
        stop = rig.stop_order(pod)
        await rig.send(stop)
        await rig.answer(stop, "accepted")
        disk.answer()
        assert (await rig.answer(run)).kind == "failed"
        assert (await rig.answer(stop)).kind == "stopped"
        # A child that was started and never watched would stay as a zombie.
        assert below(pod.home) == {}
        await until(lambda: zombies_of(os.getpid()) <= before, "its end", within_s=5.0)


SOON_S = 20.0


@pytest.fixture
def another() -> Iterator[int]:
    """The pid of one more process, which is read after the bystander."""
    with subprocess.Popen(["sleep", "600"]) as process:
        yield process.pid
        process.kill()


async def pids(memory: ProcessMemory) -> set[int]:
    async with asyncio.timeout(SOON_S):
        return {each.pid for each in await memory.select(lambda *_: True)}


async def cancelled(reading: asyncio.Task[set[int]]) -> None:
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading


async def test_reads_that_are_cancelled_keep_one_thread_for_a_process_that_hangs(
    bystander: int, another: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging = hanging_memory(bystander, monkeypatch, 0.2, threads=2)
    memory = ProcessMemory()
    with hanging.hanging():
        for _ in range(3):
            reading = asyncio.create_task(pids(memory))
            await until(lambda: hanging.waiting, "a read that hangs")
            await yield_turn()
            await cancelled(reading)
        found = await pids(memory)
        assert (another in found, bystander in found, hanging.waiting) == (True, False, 1)


async def test_a_process_that_does_not_hang_is_read_after_a_read_of_it_was_cancelled(
    bystander: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = HangingRoot(Path(f"/proc/{bystander}/environ"), monkeypatch)
    memory = ProcessMemory()
    with slow.hanging():
        reading = asyncio.create_task(pids(memory))
        await until(lambda: slow.waiting, "a read that takes a while")
        await cancelled(reading)
        after = asyncio.create_task(pids(memory))
        await yield_turn()
    assert bystander in await after


async def test_a_process_that_answers_is_read_again_while_the_next_one_hangs(
    bystander: int, another: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process_memory, "HANGS_S", 0.2)
    both = sorted((bystander, another))
    first, second = (HangingRoot(Path(f"/proc/{pid}/environ"), monkeypatch) for pid in both)
    memory = ProcessMemory()
    with first.hanging(), second.hanging():
        assert not await pids(memory) & set(both)
        first.answer()
        # The read of the first goes no further: that of the second is the one that is left.
        await until(lambda: len(calls_under_way()) == 1, "the end of the read of the first")
        assert await pids(memory) & set(both) == {both[0]}
        assert second.waiting == 1


async def test_a_read_for_which_no_process_is_listed_in_time_fails(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(process_memory, "HANGS_S", 0.2)
    listing = HangingRoot(Path("/proc"), monkeypatch)
    memory = ProcessMemory()
    with listing.hanging("listdir"), pytest.raises(DeadlineExceeded, match="not listed"):
        await pids(memory)
    assert await pids(memory)
