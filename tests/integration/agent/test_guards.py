"""The guard on its own: what it does when its agent is gone, late, back, or satisfied."""

import asyncio
import contextlib
import json
import math
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_agent.adapters import guard as program
from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.guards import MARGIN_S, Guards
from snapshot_agent.domain import control
from snapshot_agent.domain.control import Access
from snapshot_agent.domain.driving import Release
from snapshot_agent.ports import GuardLink, GuardSpec, Process
from snapshot_shared.errors import NoGuard, SourceExited
from snapshot_shared.service import system_clocks
from tests.support import forks
from tests.support.agent_rig import PATIENCE_S, below, is_gone, stat_of, state_of
from tests.support.waiting import until


class Guarded:
    """A stopped process in a session of its own, its control directory, and guards for it."""

    def __init__(self, folder: Path, starter: Path | None = None) -> None:
        self.folder = folder
        self.control = folder / "control"
        self.control.mkdir()
        (self.control / control.QUIESCE).write_bytes(control.body(4))
        self.guards = Guards(folder / "guards", "test", node="node-1", starter=starter)
        self.begin()

    def begin(self) -> None:
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        os.kill(self.child.pid, signal.SIGSTOP)

    def end(self) -> None:
        self.child.kill()
        self.child.wait()

    def spec(self, deadline_s: float = 600.0, on_failure: Any = "Resume", **more: Any) -> GuardSpec:
        clocks = system_clocks()
        return GuardSpec(
            name="g",
            process=Process(*stat_of(self.child.pid).key),
            control=self.control,
            attempt=4,
            # The agent is the first to act at a deadline; here there is only the guard.
            deadline=clocks.monotonic() + deadline_s - MARGIN_S,
            boot_id=clocks.boot_id,
            on_failure=on_failure,
            order="prepare-1",
            traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
            **more,
        )

    async def start(self, **fields: Any) -> GuardLink:
        return await self.guards.start(self.spec(**fields))

    @property
    def running(self) -> list[int]:
        return [pid for pid, text in below(self.folder).items() if "adapters.guard" in text]

    @property
    def sockets(self) -> list[Path]:
        return list((self.folder / "guards").glob("*.sock"))

    def was_freed(self) -> bool:
        path = self.control / control.ABORTED
        return path.exists() and control.is_of(path.read_bytes(), 4)


@contextlib.asynccontextmanager
async def starting(folder: Path) -> AsyncIterator[forks.Forked]:
    """Run what starts guards in a cluster; the agent's folder is `folder`."""
    path = folder / "starter.sock"
    settings = {
        "SNAPBACK_STATE_DIR": str(folder),
        "SNAPBACK_NODE": "node-1",
        "SNAPBACK_GUARD_STARTER": str(path),
    }
    log = folder / "starter.log"
    process = await forks.start("snapshot_agent.guard_starter", os.environ | settings, log)
    try:
        await until(path.exists, "the socket of the starter")
        yield process
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)
    assert not path.exists() or process.returncode == -signal.SIGKILL


@contextlib.contextmanager
def guarding(folder: Path, starter: Path | None = None) -> Iterator[Guarded]:
    made = Guarded(folder, starter)
    try:
        yield made
    finally:
        for pid in made.running:
            os.kill(pid, signal.SIGKILL)
        made.end()


@pytest.fixture(params=["a child of its agent", "a child of the starter"])
async def guarded(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Guarded]:
    async with contextlib.AsyncExitStack() as stack:
        starter = None
        if request.param == "a child of the starter":
            await stack.enter_async_context(starting(tmp_path))
            starter = tmp_path / "starter.sock"
        yield stack.enter_context(guarding(tmp_path, starter))


async def test_a_guard_outlives_what_asked_for_it_and_its_starter_waits_for_it(
    tmp_path: Path,
) -> None:
    starter = tmp_path / "starter.sock"
    async with starting(tmp_path) as process:
        with guarding(tmp_path, starter) as guarded:
            link = await guarded.start()
            process.terminate()
            await until(lambda: not starter.exists(), "the end of new guards")
            assert guarded.running
            assert process.returncode is None
            link.close()
            await freed(guarded)
            assert await asyncio.wait_for(process.wait(), PATIENCE_S) == 0


async def test_without_a_starter_no_guard_is_armed_and_it_is_said_where(tmp_path: Path) -> None:
    with guarding(tmp_path, tmp_path / "nobody.sock") as guarded:
        with pytest.raises(NoGuard, match=r"nobody\.sock"):
            await guarded.start()
        assert guarded.sockets == []


async def lost(link: GuardLink) -> None:
    """Wait for the end of a guard."""
    await link.lost()
    link.close()


async def freed(guarded: Guarded, link: GuardLink | None = None) -> None:
    """The worker runs, knows why, and nothing of the guard, to which `link` was, is left."""
    if link is not None:
        await lost(link)
    await until(guarded.was_freed, "the release", within_s=2 * PATIENCE_S)
    await until(lambda: state_of(guarded.child.pid) == "S", "the thaw")
    await until(lambda: not (guarded.control / control.QUIESCE).exists(), "the end of the request")
    await until(lambda: not guarded.running, "the end of the guard")
    assert guarded.sockets == []


async def test_a_dismissed_guard_is_gone_at_once_and_has_done_nothing(guarded: Guarded) -> None:
    link = await guarded.start()
    assert len(guarded.running) == 1
    await link.dismiss()
    assert guarded.running == []
    assert guarded.sockets == []
    assert state_of(guarded.child.pid) == "T"
    assert not guarded.was_freed()


async def test_a_guard_frees_the_worker_at_the_deadline_although_its_agent_lives(
    guarded: Guarded,
) -> None:
    """It writes with the mode of the container, and logs with order, attempt and span."""
    access = Access(uid=os.getuid(), gid=os.getgid(), file_mode=0o660)
    await freed(guarded, await guarded.start(deadline_s=0.3, access=access))
    assert (guarded.control / control.ABORTED).stat().st_mode & 0o777 == 0o660
    (line,) = map(json.loads, (guarded.folder / "guards" / "log").read_text().splitlines())
    assert line.pop("at").endswith("Z")
    assert line.pop("message").startswith(f"freed process {guarded.child.pid} ")
    assert line == {
        "level": "WARNING",
        "service": "snap-guard",
        "node": "node-1",
        "logger": "guard",
        "trace_id": "a" * 32,
        "span_id": "b" * 16,
        "order_id": "prepare-1",
        "attempt": 4,
    }


async def test_a_guard_frees_a_worker_that_is_frozen_for_longer_than_its_agent_said(
    guarded: Guarded,
) -> None:
    link = await guarded.start()
    link.thaw_by(system_clocks().monotonic() + 0.3 - MARGIN_S)
    await freed(guarded, link)


async def test_a_worker_that_is_not_frozen_any_more_is_held_on(guarded: Guarded) -> None:
    began = system_clocks().monotonic()
    link = await guarded.start(deadline_s=2.0)
    link.thaw_by(system_clocks().monotonic() + 0.5 - MARGIN_S)
    link.thaw_by(math.inf)
    await lost(link)
    assert system_clocks().monotonic() - began > 1.5
    await freed(guarded)


async def test_a_guard_that_was_stopped_reads_what_its_agent_has_sent_before_it_acts(
    guarded: Guarded,
) -> None:
    with contextlib.closing(await guarded.start()) as link:
        (pid,) = guarded.running
        os.kill(pid, signal.SIGSTOP)
        await until(lambda: state_of(pid) == "T", "the stop of the guard")
        link.thaw_by(system_clocks().monotonic() - MARGIN_S)
        link.thaw_by(math.inf)
        os.kill(pid, signal.SIGCONT)
        await link.confirm()
        assert not guarded.was_freed()
        assert guarded.running == [pid]
        await link.dismiss()


async def test_an_agent_that_asks_knows_whether_the_worker_was_held_all_the_time(
    guarded: Guarded,
) -> None:
    link = await guarded.start()
    await link.confirm()
    link.release_by(Release(("/bin/sleep", "0.5"), PATIENCE_S))
    link.thaw_by(system_clocks().monotonic() - MARGIN_S)
    await until(guarded.was_freed, "the release")
    await link.confirm()
    assert guarded.running == []
    await freed(guarded, link)


async def test_a_guard_that_does_not_answer_is_ended_and_has_let_nothing_go(
    guarded: Guarded,
) -> None:
    link = await guarded.start()
    os.kill(guarded.running[0], signal.SIGSTOP)
    await link.confirm()
    await lost(link)
    assert guarded.running == []
    assert not guarded.was_freed()
    assert state_of(guarded.child.pid) == "T"


async def test_a_guard_says_that_it_lets_the_worker_go_before_the_worker_runs(
    guarded: Guarded,
) -> None:
    release = Release(("/bin/sleep", "600"), PATIENCE_S)
    with contextlib.closing(await guarded.start(deadline_s=0.2, release=release)):
        await until(guarded.was_freed, "the release", within_s=PATIENCE_S / 2)
        assert state_of(guarded.child.pid) == "T"
        os.kill(guarded.running[0], signal.SIGKILL)


async def test_a_guard_that_was_taken_over_goes_on_and_can_be_dismissed(
    guarded: Guarded, tmp_path: Path
) -> None:
    # A socket's path is short, which a folder with a long one is no obstacle for.
    deep = tmp_path.joinpath(*["a-rather-long-name"] * 8)
    first = await Guards(deep, "test").start(guarded.spec())
    (pid,) = guarded.running
    first.close()
    second = await Guards(deep, "test").adopt(guarded.spec())
    assert second is not None
    assert guarded.running == [pid]
    await second.dismiss()
    assert is_gone(pid)
    assert list(deep.glob("*.sock")) == []
    assert not guarded.was_freed()


async def test_there_is_nothing_to_take_over_where_no_guard_is(guarded: Guarded) -> None:
    assert await guarded.guards.adopt(guarded.spec()) is None
    link = await guarded.start()
    (pid,) = guarded.running
    os.kill(pid, signal.SIGKILL)
    await lost(link)
    assert len(guarded.sockets) == 1
    assert await guarded.guards.adopt(guarded.spec()) is None
    assert guarded.sockets == []


async def test_a_guard_ends_with_its_worker_for_which_none_is_started_then(
    guarded: Guarded,
) -> None:
    spec = guarded.spec()
    link = await guarded.guards.start(spec)
    guarded.end()
    await lost(link)
    assert not guarded.was_freed()
    with pytest.raises(SourceExited):
        await guarded.guards.start(spec)
    assert guarded.running == []
    assert guarded.sockets == []


async def test_a_guard_that_gets_sigterm_frees_the_worker_first(guarded: Guarded) -> None:
    link = await guarded.start()
    os.kill(guarded.running[0], signal.SIGTERM)
    await freed(guarded, link)


async def test_a_guard_kills_the_worker_where_its_duty_says_so(guarded: Guarded) -> None:
    link = await guarded.start(deadline_s=0.2, on_failure="Kill")
    assert await asyncio.to_thread(guarded.child.wait) == -signal.SIGKILL
    await lost(link)


def wrote(folder: Path, name: str) -> tuple[str, ...]:
    """A program that writes a file, by which a test sees that it ran."""
    return ("/bin/sh", "-c", 'echo "$1" >"$0"', str(folder / name), "a word\nof two lines")


async def test_a_guard_runs_the_program_of_the_phase_before_the_worker_goes_on(
    guarded: Guarded,
) -> None:
    link = await guarded.start(deadline_s=4.0)
    link.release_by(Release(wrote(guarded.folder, "older"), PATIENCE_S))
    link.release_by(Release(wrote(guarded.folder, "unlocked"), PATIENCE_S))
    await freed(guarded, link)
    assert (guarded.folder / "unlocked").read_text() == "a word\nof two lines\n"
    assert not (guarded.folder / "older").exists()


async def test_a_guard_knows_from_its_start_how_the_worker_is_let_go(guarded: Guarded) -> None:
    release = Release(wrote(guarded.folder, "unlocked"), PATIENCE_S)
    unfence = wrote(guarded.folder, "unfenced")
    link = await guarded.start(release=release, unfence=unfence)
    # The first that a guard reads may be that its agent is gone.
    link.close()
    await freed(guarded)
    assert (guarded.folder / "unlocked").exists()
    await until((guarded.folder / "unfenced").exists, "the end of the fence")


@pytest.mark.parametrize("program", ["/nowhere/program", "/etc/hostname", "/bin/sleep 600"])
async def test_a_program_that_cannot_be_started_or_hangs_does_not_keep_a_worker_frozen(
    guarded: Guarded, program: str
) -> None:
    release = Release(tuple(program.split()), 0.2)
    await freed(guarded, await guarded.start(deadline_s=0.2, release=release))
    os.kill(guarded.child.pid, signal.SIGSTOP)
    await guarded.guards.release(guarded.spec().process, release)
    await until(lambda: state_of(guarded.child.pid) == "S", "the thaw by the agent")


async def test_a_guard_ends_the_worker_in_a_phase_that_cannot_be_undone(guarded: Guarded) -> None:
    link = await guarded.start(deadline_s=4.0)
    link.release_by(Release(wrote(guarded.folder, "asked"), PATIENCE_S, ends=True))
    assert await asyncio.to_thread(guarded.child.wait) == -signal.SIGKILL
    await lost(link)
    assert (guarded.folder / "asked").exists()


async def test_a_guard_stays_while_the_worker_is_replaced_and_frees_the_next_process(
    guarded: Guarded,
) -> None:
    link = await guarded.start(deadline_s=6.0)
    link.release_by(Release(wrote(guarded.folder, "ended"), PATIENCE_S, ends=True, stays=True))
    await asyncio.sleep(0.2)
    guarded.end()
    guarded.begin()
    link.follow(guarded.spec().process)
    link.release_by(Release())
    await freed(guarded, link)
    assert not (guarded.folder / "ended").exists()


async def test_a_guard_whose_worker_ended_while_it_was_replaced_does_what_was_left_to_do(
    guarded: Guarded,
) -> None:
    link = await guarded.start()
    link.release_by(Release(wrote(guarded.folder, "ended"), PATIENCE_S, ends=True, stays=True))
    await asyncio.sleep(0.2)
    guarded.end()
    os.kill(guarded.running[0], signal.SIGTERM)
    await lost(link)
    assert (guarded.folder / "ended").exists()
    assert guarded.was_freed()


async def test_a_guard_that_reads_of_a_replacement_after_the_worker_has_ended_still_acts(
    guarded: Guarded,
) -> None:
    link = await guarded.start()
    (guard,) = guarded.running
    # As on a busy machine: the message and the end of the worker are there at the same time.
    os.kill(guard, signal.SIGSTOP)
    await until(lambda: state_of(guard) == "T", "the stop of the guard")
    link.release_by(Release(wrote(guarded.folder, "ended"), PATIENCE_S, ends=True, stays=True))
    guarded.end()
    await until(lambda: is_gone(guarded.child.pid), "the end of the worker")
    os.kill(guard, signal.SIGCONT)
    await asyncio.sleep(0.2)
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard, signal.SIGTERM)
    await lost(link)
    assert (guarded.folder / "ended").exists()


async def test_a_worker_that_has_its_completion_is_thawed_and_nothing_else(
    guarded: Guarded,
) -> None:
    (guarded.control / control.COMPLETE).write_bytes(control.body(4))
    await lost(await guarded.start(deadline_s=0.2, on_failure="Kill"))
    await until(lambda: state_of(guarded.child.pid) == "S", "the thaw")
    assert not (guarded.control / control.ABORTED).exists()


@pytest.mark.parametrize(("further", "is_let_in"), [(0, True), (1, False)])
def test_only_our_user_and_root_may_speak_to_a_guard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, further: int, is_let_in: bool
) -> None:
    # The path of a socket is short, so a guard makes its own in its working directory.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(program, "peer_of", lambda _: (1, os.getuid() + further))
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as caller,
    ):
        listener.bind("g.sock")
        listener.listen()
        caller.connect("g.sock")
        link = program.let_in(listener)
        assert (link is not None) is is_let_in
        if link is not None:
            link.close()
        assert caller.recv(1) == b""


def test_a_pid_that_was_given_again_is_another_process(guarded: Guarded) -> None:
    found = stat_of(guarded.child.pid)
    assert [member.pid for member in procfs.family_of(found.pid, found.start)] == [found.pid]
    assert procfs.family_of(found.pid, found.start - 1) == []
    with procfs.opened(found.pid, found.start) as ours:
        assert ours is not None
    with procfs.opened(found.pid, found.start - 1) as of_another:
        assert of_another is None


@pytest.mark.parametrize("has_link", [False, True], ids=["gone", "with a link of the worker"])
async def test_a_spoilt_control_directory_does_not_keep_a_worker_frozen(
    guarded: Guarded, has_link: bool
) -> None:
    if has_link:
        link_of_worker = guarded.control / f".{control.ABORTED}.guard"
        link_of_worker.symlink_to(guarded.folder / "victim")
    else:
        shutil.rmtree(guarded.control)
    await lost(await guarded.start(deadline_s=0.2))
    await until(lambda: state_of(guarded.child.pid) == "S", "the thaw")
    assert not (guarded.folder / "victim").exists()
    assert guarded.sockets == []


def test_the_guard_imports_only_the_standard_library() -> None:
    code = (
        "import sys, snapshot_agent.adapters.guard as g\n"
        "own = {m for m in sys.modules if not m.startswith('snapshot_agent')}\n"
        "top = {m.partition('.')[0] for m in own}\n"
        "print(sorted(top - set(sys.stdlib_module_names) - {'__main__'}), 'asyncio' in top)\n"
    )
    sources = str(Path(program.__file__).parents[2])
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        env={"PYTHONPATH": sources},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == "[] False"
