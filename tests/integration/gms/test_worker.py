"""Workers that are captured and restored, with the test as their snapshot agent."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import snapback_client
from snapback_client import AsyncWorker, MemoryPool, Resumed, Worker
from snapback_client.codec import decode_json, encode_json
from snapback_client.control import Signal
from snapback_client.errors import InvalidInput, NotEligible, NotFound
from tests.support.waiting import wait_until

PATIENCE_S = 20.0


class Agent:
    """The agent's side of a control directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        (path / "state").mkdir(parents=True)

    def put(self, name: str, attempt: int, **more: object) -> None:
        temporary = self.path / f".{name}.agent"
        temporary.write_bytes(encode_json({"attempt": attempt, **more}))
        temporary.rename(self.path / name)

    def found(self, name: str, attempt: int | None = None) -> None:
        """Wait until the worker has put a file there, of this attempt."""

        def is_there() -> bool:
            try:
                body = decode_json((self.path / name).read_bytes(), Signal)
            except FileNotFoundError:
                return False
            return attempt is None or body.attempt == attempt

        wait_until(is_there, name)

    def ask(self, attempt: int = 1) -> None:
        """Ask a worker that is ready to be quiet, and wait until it has heard that."""
        self.found("ready-for-snapshot")
        self.put("quiesce", attempt)
        wait_until(lambda: not (self.path / "ready-for-snapshot").exists(), "its withdrawal")

    def quiet(self, attempt: int = 1) -> None:
        """Have a worker that is ready be quiet."""
        self.ask(attempt)
        self.found("quiesced", attempt)

    def go_on(self, attempt: int = 1, *, end: str = "snapshot-complete") -> None:
        """Have a worker go on, and be ready again."""
        self.put(end, attempt)
        self.found("ready-for-snapshot")

    def remove(self, *names: str) -> None:
        for name in names:
            (self.path / name).unlink(missing_ok=True)


@pytest.fixture
def agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Agent:
    made = Agent(tmp_path / "control")
    monkeypatch.setenv("SNAPSHOT_CONTROL_DIR", str(made.path))
    return made


@pytest.fixture
def standby(agent: Agent, monkeypatch: pytest.MonkeyPatch) -> Agent:
    """The agent of a process that begins with what another has saved."""
    monkeypatch.setenv("SNAPSHOT_RESTORE_STANDBY", "1")
    return agent


@contextlib.contextmanager
def ready(*hooks: Any) -> Iterator[Worker]:
    """A worker that has said that it may be captured."""
    with Worker(*hooks) as worker:
        worker.ready()
        yield worker


def test_a_worker_outside_of_snapback_serves_and_is_never_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SNAPSHOT_CONTROL_DIR", raising=False)
    with ready() as worker, worker.request():
        assert worker.state is None


def test_a_control_directory_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SNAPSHOT_CONTROL_DIR", "/no/such/folder")
    with pytest.raises(InvalidInput, match="SNAPSHOT_CONTROL_DIR is '/no/such/folder'"):
        Worker()


_SECOND = """
from snapback_client import Worker
with Worker():
    print("started")
"""


def test_one_worker_at_a_time_follows_a_control_directory(agent: Agent) -> None:
    with ready() as worker:
        with pytest.raises(NotEligible, match="another Worker, of this process, follows"):
            Worker().start()
        second = [sys.executable, "-c", _SECOND]
        done = subprocess.run(second, capture_output=True, text=True, check=False)
        assert done.stdout == ""
        assert f"another Worker, of process {os.getpid()}, follows {agent.path}" in done.stderr
        # The refused worker has removed no file of the first.
        agent.quiet()
        agent.go_on()
        assert worker.failure is None
    agent.remove("quiesce", "quiesced", "snapshot-complete")
    with ready():
        agent.quiet(2)
        agent.go_on(2)
    subprocess.run(second, check=True)


def test_a_worker_that_was_killed_leaves_its_control_directory_to_the_next(agent: Agent) -> None:
    killed = f"{_SECOND}    import os; os.kill(os.getpid(), 9)"
    assert subprocess.run([sys.executable, "-c", killed], check=False).returncode == -signal.SIGKILL
    assert (agent.path / ".worker").exists()
    # As a program that has called execv(2).
    (agent.path / ".worker").write_bytes(encode_json({"pid": os.getpid(), "start": _start()}))
    with ready():
        agent.quiet()
        agent.go_on()


def _start() -> int:
    return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])


def test_a_capture_waits_for_requests_and_holds_up_later_ones(agent: Agent) -> None:
    seen: list[object] = []
    with ready(seen.append, seen.append) as worker:
        with worker.request():
            agent.ask(3)
            time.sleep(0.05)
            assert seen == []
        agent.found("quiesced", 3)
        assert seen == [agent.path / "state"]
        late = threading.Thread(target=lambda: _ask(worker, seen))
        late.start()
        time.sleep(0.05)
        assert len(seen) == 1
        agent.put("snapshot-complete", 3)
        late.join(PATIENCE_S)
        assert seen[1:] == [Resumed("complete", {}), "answered"]
        agent.found("ready-for-snapshot")


def test_a_worker_shows_what_it_waits_for(agent: Agent) -> None:
    with ready() as worker:
        with worker.request(), worker.request():
            agent.ask(3)
            agent.found("quiescing", 3)
            body = decode_json((agent.path / "quiescing").read_bytes(), Signal)
            assert body.message == "2 requests under way"
        agent.found("quiesced", 3)
        agent.go_on(3)


async def test_a_worker_on_asyncio_shows_what_it_waits_for(agent: Agent) -> None:
    async with AsyncWorker() as worker:
        worker.ready()
        async with worker.request():
            await asyncio.to_thread(agent.ask, 3)
            await asyncio.to_thread(agent.found, "quiescing", 3)
            body = decode_json((agent.path / "quiescing").read_bytes(), Signal)
            assert body.message == "1 request under way"
        await asyncio.to_thread(agent.found, "quiesced", 3)
        await asyncio.to_thread(agent.go_on, 3)


def _ask(worker: Worker, seen: list[object]) -> None:
    with worker.request():
        seen.append("answered")


def test_a_worker_whose_saving_fails_says_why_and_goes_on_when_it_is_aborted(
    agent: Agent,
) -> None:
    seen: list[Resumed] = []

    def refuse(_state: Path) -> None:
        raise FileNotFoundError(errno.ENOENT, "no such file", os.fsdecode(b"\xff"))

    with ready(refuse, seen.append) as worker:
        agent.ask(7)
        agent.found("quiesce-failed", 7)
        body = decode_json((agent.path / "quiesce-failed").read_bytes(), Signal)
        assert body.message == "FileNotFoundError: [Errno 2] no such file: '\\udcff'"
        agent.go_on(7, end="snapshot-aborted")
        assert [each.outcome for each in seen] == ["aborted"]
        assert not (agent.path / "quiesced").exists()
        with worker.request():
            pass


def test_a_worker_whose_saving_fails_removes_all_that_it_has_saved(
    agent: Agent, tmp_path: Path
) -> None:
    others = tmp_path / "others"
    others.mkdir()
    (others / "file").write_text("not saved")
    has_saved = threading.Event()

    def save(state: Path) -> None:
        for name in ("a", "b", "c"):
            (state / name / "below").mkdir(parents=True)
            (state / name / "below" / "file").write_text("saved")
            (state / f"{name}.file").write_text("saved")
            (state / f"{name}.link").symlink_to(others)
        has_saved.set()
        raise OSError(errno.ENOSPC, "No space left on device")

    with ready(save):
        agent.put("quiesce", 1)
        assert has_saved.wait(PATIENCE_S)
        wait_until(lambda: not list((agent.path / "state").iterdir()), "its removal")
        agent.go_on(end="snapshot-aborted")
    assert (others / "file").read_text() == "not saved"


@pytest.mark.parametrize("previous", ["complete", "aborted"])
def test_a_worker_that_has_missed_the_end_of_a_capture_answers_the_next(
    agent: Agent, previous: str
) -> None:
    seen: list[Resumed] = []
    with ready(None, seen.append):
        agent.quiet()
        agent.put("quiesce", 2, previous=previous)
        agent.found("quiesced", 2)
        assert [each.outcome for each in seen] == [previous]
        agent.go_on(2)


def test_a_process_that_was_restored_elsewhere_answers_with_the_attempt_and_its_devices(
    agent: Agent,
) -> None:
    seen: list[Resumed] = []
    with ready(None, seen.append) as worker:
        agent.quiet()
        agent.put("restore-complete", 5, devices={"GPU-a": "GPU-b"})
        agent.found("restored", 5)
        assert seen == [Resumed("restored", {"GPU-a": "GPU-b"}, worker.identity)]
        assert worker.identity is not None
        agent.found("ready-for-snapshot")


def test_a_request_that_waits_is_refused_when_the_worker_is_closed(agent: Agent) -> None:
    refused: list[NotEligible] = []

    def ask() -> None:
        try:
            with worker.request():
                pass
        except NotEligible as error:
            refused.append(error)

    with ready() as worker:
        agent.quiet()
        late = threading.Thread(target=ask)
        late.start()
        time.sleep(0.05)
    late.join(PATIENCE_S)
    assert "closed while it was captured" in str(refused[0])


def test_a_process_with_many_open_files_is_captured(agent: Agent) -> None:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.ExitStack() as closing:
        closing.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limit)
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(4096, limit[1]), limit[1]))
        # `select` takes no descriptor from 1024 on.
        while (opened := os.open("/dev/null", os.O_RDONLY)) < 1100:
            closing.callback(os.close, opened)
        closing.callback(os.close, opened)
        with Worker() as worker:
            worker.ready()
            agent.quiet()
            agent.go_on()


def test_a_worker_that_is_closed_within_a_request_does_not_wait_for_it(agent: Agent) -> None:
    worker = Worker()
    worker.ready()
    with worker.request():
        agent.ask()
        worker.close()
    assert not (agent.path / "quiesced").exists()


@pytest.mark.parametrize("what", ["folder", "pipe", "link", "noise", "empty", "huge"])
def test_what_no_agent_has_put_there_is_left_alone(agent: Agent, what: str) -> None:
    path = agent.path / "quiesce"
    with ready():
        match what:
            case "folder":
                path.mkdir()
            case "pipe":
                os.mkfifo(path)
            case "link":
                path.symlink_to(path)
            case _:
                body = {"noise": b"{", "empty": b"", "huge": b"x" * 100_000}[what]
                (agent.path / ".noise").write_bytes(body)
                (agent.path / ".noise").rename(path)
        (agent.path / ".other").write_bytes(b"")
        (agent.path / ".other").rename(agent.path / "other")
        time.sleep(0.1)
        if path.is_dir():
            path.rmdir()
        agent.quiet(2)
        agent.go_on(2)


def test_what_a_process_before_has_said_is_taken_back(agent: Agent) -> None:
    agent.put("ready-for-snapshot", 0)
    worker = Worker()
    worker.start()
    assert not (agent.path / "ready-for-snapshot").exists()
    worker.ready()
    agent.found("ready-for-snapshot")
    worker.close()
    assert not (agent.path / "ready-for-snapshot").exists()


def test_a_worker_that_cannot_say_that_it_is_quiet_goes_on(agent: Agent) -> None:
    with ready():
        (agent.path / "quiesced").mkdir()
        agent.ask()
        agent.go_on(end="snapshot-aborted")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, for a process namespace")
def test_the_first_process_of_a_container_ends_as_well_when_it_cannot_go_on(agent: Agent) -> None:
    words = ["unshare", "--pid", "--fork", "--kill-child", sys.executable, "-c", UNABLE]
    process = subprocess.Popen(words, stderr=subprocess.DEVNULL)
    try:
        agent.quiet()
        agent.put("snapshot-complete", 1)
        assert process.wait(PATIENCE_S) == 128 + signal.SIGTERM
    finally:
        process.kill()


RESTORED_HERE = {
    "node": "n2",
    "pod": "default/clone",
    "pod_uid": "11111111-2222-3333-4444-555555555555",
    "capture": "99999999-2222-3333-4444-555555555555",
    "generation": 2,
}


def test_a_restored_worker_is_told_who_it_is(
    standby: Agent, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOSTNAME", "the-source")
    standby.put("restore-complete", 3, **RESTORED_HERE)
    with Worker() as worker:
        assert worker.identity is not None
        found = worker.identity._asdict()
        assert found.pop("hostname") == socket.gethostname()
        assert found.pop("seed") in range(1 << 32)
        del found["address"]
        assert found == {**RESTORED_HERE, "attempt": 3, "context": {}}


@pytest.mark.parametrize(
    ("text", "context"),
    [
        ('{"env": {"POD_NAME": "a", "DYN_SYSTEM_PORT": null}, "later": 1}', None),
        ('{"env": {"POD_NAME": 1}}', {}),
        ("no JSON", {}),
    ],
)
def test_a_restored_worker_finds_the_variables_of_its_new_container(
    standby: Agent, text: str, context: Any
) -> None:
    (standby.path / "restore-context.json").write_text(text)
    standby.put("restore-complete", 3, **RESTORED_HERE)
    with Worker() as worker:
        assert worker.identity is not None
        wanted = json.loads(text)["env"] if context is None else context
        assert worker.identity.context == wanted


def test_a_worker_that_goes_on_in_its_place_keeps_who_it_is(agent: Agent) -> None:
    seen: list[Resumed] = []
    with ready(None, seen.append) as worker:
        for attempt, end in ((1, "snapshot-complete"), (2, "snapshot-aborted")):
            agent.quiet(attempt)
            agent.go_on(attempt, end=end)
        assert [each.identity for each in seen] == [None, None]
        assert worker.identity is None


def test_a_pool_that_its_builder_has_committed_is_left_so(agent: Agent, launch: Any) -> None:
    launch()

    def build(pool: MemoryPool) -> None:
        pool.allocate("w", 4, "uint8")
        pool.commit(layout_id="mine")

    with Worker() as worker:
        assert worker.pool("weights", build).layout_id == "mine"


def test_a_pool_that_was_not_saved_is_named(standby: Agent) -> None:
    standby.put("restore-complete", 1)
    with Worker() as worker, pytest.raises(NotFound, match="no pool 'weights' was saved"):
        worker.pool("weights")


UNABLE = """
import signal
from snapback_client import Worker
def fail(resumed): raise ValueError("no weights")
with Worker(on_resume=fail) as worker:
    worker.ready()
    signal.pause()
"""


@pytest.mark.parametrize("end", ["snapshot-complete", "restore-failed"])
def test_a_worker_that_cannot_go_on_ends(agent: Agent, end: str) -> None:
    process = subprocess.Popen([sys.executable, "-c", UNABLE], stderr=subprocess.PIPE, text=True)
    try:
        agent.quiet()
        agent.put(end, 1, message="no weights")
        _, said = process.communicate(timeout=PATIENCE_S)
    finally:
        process.kill()
    assert process.returncode == -signal.SIGTERM
    assert "the worker cannot go on" in said
    assert "no weights" in said


def test_a_standby_begins_with_what_was_saved(standby: Agent) -> None:
    standby.put("restored", 1)
    standby.put("restore-complete", 4, devices={"GPU-a": "GPU-b"})
    with Worker() as worker:
        assert not (standby.path / "restored").exists()
        assert worker.state == standby.path / "state"
        assert worker.devices == {"GPU-a": "GPU-b"}
        worker.ready()
        standby.found("restored", 4)
    assert not (standby.path / "restored").exists()


def test_a_worker_that_respawns_stands_in_the_midst_of_a_capture(
    agent: Agent, tmp_path: Path
) -> None:
    agent.put("quiesce", 2)
    made = Worker(resume_from=tmp_path)
    started = threading.Thread(target=made.start)
    started.start()
    agent.found("quiesced", 2)
    assert started.is_alive()
    agent.put("snapshot-complete", 2)
    started.join(PATIENCE_S)
    assert made.state == tmp_path
    made.close()


def test_two_pools_of_one_name_are_refused(agent: Agent) -> None:
    made = Worker()
    made._pools["weights"] = None  # type: ignore[assignment]
    with pytest.raises(InvalidInput, match="a pool 'weights' already"):
        made.pool("weights")
    made._pools.clear()
    made.close()


async def test_what_an_async_worker_calls_may_be_async(agent: Agent) -> None:
    seen: list[object] = []

    async def saved(state: Path) -> None:
        await asyncio.sleep(0)
        seen.append(state)

    async def resumed(why: Resumed) -> None:
        await asyncio.sleep(0)
        seen.append(why.outcome)

    async with AsyncWorker(saved, resumed) as worker:
        worker.ready()
        async with worker.request():
            agent.put("quiesce", 1)
            await asyncio.sleep(0.05)
            assert seen == []
        await asyncio.to_thread(agent.found, "quiesced", 1)
        late = asyncio.create_task(_ask_async(worker, seen))
        await asyncio.sleep(0.05)
        agent.put("snapshot-complete", 1)
        async with asyncio.timeout(PATIENCE_S):
            await late
        assert seen == [agent.path / "state", "complete", "answered"]


async def _ask_async(worker: AsyncWorker, seen: list[object]) -> None:
    async with worker.request():
        seen.append("answered")


async def test_an_async_standby_can_be_cancelled_while_it_waits(standby: Agent) -> None:
    worker = AsyncWorker()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05):
            await worker.start()
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.get_running_loop().shutdown_default_executor()


def test_no_service_imports_asyncio_for_the_client() -> None:
    script = "import sys, snapback_client; sys.exit('asyncio' in sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert set(snapback_client.__all__) >= {"AsyncWorker", "Worker"}
    with pytest.raises(AttributeError, match="no attribute 'Nothing'"):
        _ = snapback_client.Nothing  # type: ignore[attr-defined]
