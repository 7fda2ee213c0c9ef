"""The guard on its own: what it does when its agent is gone, late, back, or satisfied."""

import asyncio
import json
import math
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from snapshot_agent.adapters import guard as program
from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.guards import MARGIN_S, Guards
from snapshot_agent.domain import control
from snapshot_agent.domain.driving import Release
from snapshot_agent.domain.spec import Access
from snapshot_agent.ports import Duty, Process
from snapshot_shared.errors import SourceExited
from snapshot_shared.service import system_clocks
from tests.support.agent_rig import below, is_gone, state_of, until


class Charge:
    """A stopped process in a session of its own, its control directory, and guards for it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.control = folder / "control"
        self.control.mkdir()
        (self.control / control.QUIESCE).write_bytes(control.body(4))
        self.guards = Guards(folder / "guards", "test", node="node-1")
        self.begin()

    def begin(self) -> None:
        self.child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        os.kill(self.child.pid, signal.SIGSTOP)

    def end(self) -> None:
        self.child.kill()
        self.child.wait()

    @property
    def log(self) -> list[dict[str, Any]]:
        return [
            json.loads(line) for line in (self.folder / "guards" / "log").read_text().splitlines()
        ]

    def duty(self, deadline_s: float = 600.0, on_failure: str = "Resume") -> Duty:
        found = procfs.read(self.child.pid)
        assert found is not None
        clocks = system_clocks()
        return Duty(
            name="g",
            process=Process(found.pid, found.start),
            control=self.control,
            attempt=4,
            # The agent is the first to act at a deadline; here there is only the guard.
            deadline=clocks.monotonic() + deadline_s - MARGIN_S,
            boot_id=clocks.boot_id,
            on_failure=on_failure,  # type: ignore[arg-type]
            order="prepare-1",
            traceparent=f"00-{'a' * 32}-{'b' * 16}-01",
        )

    @property
    def running(self) -> list[int]:
        return [pid for pid, text in below(self.folder).items() if "adapters.guard" in text]

    @property
    def sockets(self) -> list[Path]:
        return list((self.folder / "guards").glob("*.sock"))

    def was_freed(self) -> bool:
        path = self.control / control.ABORTED
        return path.exists() and control.is_of(path.read_bytes(), 4)


@pytest_asyncio.fixture
async def charge(tmp_path: Path) -> AsyncIterator[Charge]:
    made = Charge(tmp_path)
    try:
        yield made
    finally:
        for pid in made.running:
            os.kill(pid, signal.SIGKILL)
        made.end()


async def freed(charge: Charge) -> None:
    """The worker runs, knows why, and nothing of the guard is left."""
    await until(charge.was_freed, "the release", 10.0)
    await until(lambda: state_of(charge.child.pid) == "S", "the thaw")
    await until(lambda: not (charge.control / control.QUIESCE).exists(), "the end of the wish")
    await until(lambda: not charge.running, "the end of the guard")
    assert charge.sockets == []


async def test_a_dismissed_guard_is_gone_at_once_and_has_done_nothing(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty())
    assert len(charge.running) == 1
    await link.dismiss()
    assert charge.running == []
    assert charge.sockets == []
    assert state_of(charge.child.pid) == "T"
    assert not charge.was_freed()


async def test_a_guard_frees_the_worker_at_the_deadline_although_its_agent_lives(
    charge: Charge,
) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=0.3))
    await link.lost()
    link.close()
    await freed(charge)


async def test_a_guard_frees_a_worker_that_is_frozen_for_longer_than_its_agent_said(
    charge: Charge,
) -> None:
    link = await charge.guards.start(charge.duty())
    link.thaw_by(system_clocks().monotonic() + 0.3 - MARGIN_S)
    await link.lost()
    link.close()
    await freed(charge)


async def test_a_worker_that_is_not_frozen_any_more_is_held_on(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=2.0))
    link.thaw_by(system_clocks().monotonic() + 0.5 - MARGIN_S)
    link.thaw_by(math.inf)
    began = system_clocks().monotonic()
    await link.lost()
    link.close()
    assert system_clocks().monotonic() - began > 1.5
    await freed(charge)


async def test_what_a_guard_did_is_logged_with_order_attempt_and_span(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=0.3))
    await link.lost()
    link.close()
    (line,) = charge.log
    assert line.pop("at").endswith("Z")
    assert line.pop("message").startswith(f"freed process {charge.child.pid} ")
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


async def test_a_guard_that_was_taken_over_goes_on_and_can_be_dismissed(charge: Charge) -> None:
    first = await charge.guards.start(charge.duty())
    (pid,) = charge.running
    first.close()
    second = await Guards(charge.folder / "guards", "test").adopt(charge.duty())
    assert second is not None
    assert charge.running == [pid]
    await second.dismiss()
    assert is_gone(pid)
    assert charge.sockets == []
    assert not charge.was_freed()


async def test_there_is_nothing_to_take_over_where_no_guard_is(charge: Charge) -> None:
    assert await charge.guards.adopt(charge.duty()) is None
    link = await charge.guards.start(charge.duty())
    (pid,) = charge.running
    os.kill(pid, signal.SIGKILL)
    await link.lost()
    link.close()
    assert len(charge.sockets) == 1
    assert await charge.guards.adopt(charge.duty()) is None
    assert charge.sockets == []


async def test_a_guard_ends_with_its_worker(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty())
    charge.child.kill()
    await link.lost()
    link.close()
    assert charge.running == []
    assert charge.sockets == []
    assert not charge.was_freed()


async def test_a_worker_that_is_gone_cannot_be_guarded(charge: Charge) -> None:
    duty = charge.duty()
    charge.end()
    with pytest.raises(SourceExited):
        await charge.guards.start(duty)
    assert charge.running == []


async def test_a_guard_that_is_told_to_end_frees_the_worker_first(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty())
    os.kill(charge.running[0], signal.SIGTERM)
    await link.lost()
    link.close()
    await freed(charge)


async def test_a_guard_kills_the_worker_where_its_duty_says_so(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=0.2, on_failure="Kill"))
    assert await asyncio.to_thread(charge.child.wait) == -signal.SIGKILL
    await link.lost()
    link.close()


def wrote(folder: Path, name: str) -> tuple[str, ...]:
    """A program that writes a file, by which a test sees that it ran."""
    return ("/bin/sh", "-c", 'echo "$1" >"$0"', str(folder / name), "a word\nof two lines")


async def test_a_guard_runs_the_program_of_the_phase_before_the_worker_goes_on(
    charge: Charge,
) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=1.0))
    link.release_by(Release(wrote(charge.folder, "older"), 5.0))
    link.release_by(Release(wrote(charge.folder, "unlocked"), 5.0))
    await link.lost()
    link.close()
    await freed(charge)
    assert (charge.folder / "unlocked").read_text() == "a word\nof two lines\n"
    assert not (charge.folder / "older").exists()


async def test_a_guard_knows_from_its_start_how_the_worker_is_let_go(charge: Charge) -> None:
    release = Release(wrote(charge.folder, "unlocked"), 5.0)
    unfence = wrote(charge.folder, "unfenced")
    duty = charge.duty(deadline_s=0.3)._replace(release=release, unfence=unfence)
    link = await charge.guards.start(duty)
    # The first that a guard reads may be that its agent is gone.
    link.close()
    await freed(charge)
    assert (charge.folder / "unlocked").exists()
    await until((charge.folder / "unfenced").exists, "the end of the fence")


async def test_a_program_that_hangs_does_not_keep_a_worker_frozen(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=0.3))
    link.release_by(Release(("/bin/sleep", "600"), 0.2))
    await link.lost()
    link.close()
    await freed(charge)


@pytest.mark.parametrize("program", ["/nowhere/program", "/etc/hostname"])
async def test_a_program_that_cannot_be_started_does_not_keep_a_worker_frozen(
    charge: Charge, program: str
) -> None:
    release = Release((program,), 5.0)
    link = await charge.guards.start(charge.duty(deadline_s=0.2)._replace(release=release))
    await link.lost()
    link.close()
    await freed(charge)
    os.kill(charge.child.pid, signal.SIGSTOP)
    await charge.guards.release(charge.duty().process, release)
    await until(lambda: state_of(charge.child.pid) == "S", "the thaw by the agent")


async def test_a_guard_ends_the_worker_in_a_phase_that_cannot_be_undone(charge: Charge) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=1.0))
    link.release_by(Release(wrote(charge.folder, "asked"), 5.0, ends=True))
    assert await asyncio.to_thread(charge.child.wait) == -signal.SIGKILL
    await link.lost()
    link.close()
    assert (charge.folder / "asked").exists()


async def test_a_guard_stays_while_the_worker_is_replaced_and_frees_the_next_process(
    charge: Charge,
) -> None:
    link = await charge.guards.start(charge.duty(deadline_s=1.5))
    link.release_by(Release(wrote(charge.folder, "ended"), 5.0, ends=True, stays=True))
    await asyncio.sleep(0.2)
    charge.end()
    charge.begin()
    link.follow(charge.duty().process)
    link.release_by(Release())
    await link.lost()
    link.close()
    await freed(charge)
    assert not (charge.folder / "ended").exists()


async def test_a_guard_whose_worker_ended_while_it_was_replaced_does_what_was_left_to_do(
    charge: Charge,
) -> None:
    link = await charge.guards.start(charge.duty())
    link.release_by(Release(wrote(charge.folder, "ended"), 5.0, ends=True, stays=True))
    await asyncio.sleep(0.2)
    charge.end()
    os.kill(charge.running[0], signal.SIGTERM)
    await link.lost()
    link.close()
    assert (charge.folder / "ended").exists()
    assert charge.was_freed()


async def test_a_guard_writes_for_the_owner_and_with_the_mode_of_the_container(
    charge: Charge,
) -> None:
    access = Access(uid=os.getuid(), gid=os.getgid(), file_mode=0o660)
    duty = charge.duty(deadline_s=0.2)._replace(access=access)
    link = await charge.guards.start(duty)
    await link.lost()
    link.close()
    await freed(charge)
    assert (charge.control / control.ABORTED).stat().st_mode & 0o777 == 0o660


async def test_a_worker_that_was_told_of_its_completion_is_thawed_and_nothing_else(
    charge: Charge,
) -> None:
    (charge.control / control.COMPLETE).write_bytes(control.body(4))
    link = await charge.guards.start(charge.duty(deadline_s=0.2, on_failure="Kill"))
    await link.lost()
    link.close()
    await until(lambda: state_of(charge.child.pid) == "S", "the thaw")
    assert not (charge.control / control.ABORTED).exists()


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


def test_a_pid_that_was_given_again_is_another_process(charge: Charge) -> None:
    found = procfs.read(charge.child.pid)
    assert found is not None
    assert [member.pid for member in procfs.session_of(found.pid, found.start)] == [found.pid]
    assert procfs.session_of(found.pid, found.start - 1) == []
    with procfs.opened(found.pid, found.start) as ours:
        assert ours is not None
    with procfs.opened(found.pid, found.start - 1) as of_another:
        assert of_another is None


def remove_control(charge: Charge) -> None:
    (charge.control / control.QUIESCE).unlink()
    charge.control.rmdir()


def plant_link(charge: Charge) -> None:
    (charge.control / f".{control.ABORTED}.guard").symlink_to(charge.folder / "victim")


@pytest.mark.parametrize("spoil", [remove_control, plant_link])
async def test_a_spoilt_control_directory_does_not_keep_a_worker_frozen(
    charge: Charge, spoil: Callable[[Charge], None]
) -> None:
    spoil(charge)
    link = await charge.guards.start(charge.duty(deadline_s=0.2))
    await link.lost()
    link.close()
    await until(lambda: state_of(charge.child.pid) == "S", "the thaw")
    assert not (charge.folder / "victim").exists()
    assert charge.sockets == []


async def test_a_folder_with_a_long_path_is_no_obstacle(charge: Charge, tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["a-rather-long-name"] * 8)
    guards = Guards(deep, "test")
    link = await guards.start(charge.duty())
    link.close()
    adopted = await guards.adopt(charge.duty())
    assert adopted is not None
    await adopted.dismiss()


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
