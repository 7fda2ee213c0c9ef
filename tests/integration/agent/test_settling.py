"""What becomes of a worker whose dump may have been killed, on real processes."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import settling
from snapshot_agent.domain.criu_images import mark_of
from snapshot_agent.domain.cuda import CudaStuck
from snapshot_agent.helper import cuda
from snapshot_agent.helper.settling import Records
from snapshot_shared.errors import Aborted, OutcomeUnknown
from tests.support.agent_rig import stat_of
from tests.support.cuda_rig import CudaNode

NETWORK = 1
"""The inode of no network namespace."""


class Worker:
    """A process that leads a session."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(["sleep", "600"], start_new_session=True)
        self.key = stat_of(self._process.pid).key

    def runs(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        self._process.kill()
        return self._process.wait()

    def ended_by(self) -> int:
        return -self._process.wait(5)


@pytest.fixture
def worker() -> Iterator[Worker]:
    made = Worker()
    yield made
    made.end()


@pytest.fixture
def records(tmp_path: Path) -> Records:
    return Records(tmp_path / "dumps", Path("/nowhere/nft"))


@pytest.mark.parametrize("error", [None, Aborted("given up"), ValueError("a defect")])
def test_a_dump_that_has_ended_by_itself_leaves_no_record(
    records: Records, worker: Worker, tmp_path: Path, error: Exception | None
) -> None:
    with contextlib.suppress(Aborted, ValueError), records.dumping(*worker.key, NETWORK):
        if error is not None:
            raise error
    assert list((tmp_path / "dumps").iterdir()) == []
    assert not records.settle(*worker.key)
    assert worker.runs()


def test_a_worker_whose_criu_was_killed_is_ended_once(records: Records, worker: Worker) -> None:
    with pytest.raises(OutcomeUnknown), records.dumping(*worker.key, NETWORK):
        raise OutcomeUnknown("CRIU was killed")
    assert records.settle(*worker.key)
    assert worker.ended_by() == signal.SIGKILL
    assert not records.settle(*worker.key)


def dumping_child(records: Records, worker: Worker) -> int:
    """Return the pid of a process that dumps until it is asked to end."""
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: stop.set())
        try:
            with records.dumping(*worker.key, NETWORK):
                os.write(told, b"!")
                stop.wait(60)
        finally:
            os._exit(0)
    os.read(ready, 1)
    os.close(ready)
    os.close(told)
    return child


def test_a_dump_under_way_is_asked_to_end_and_waited_for(records: Records, worker: Worker) -> None:
    child = dumping_child(records, worker)
    # What becomes of another child.
    records.settle_all(child + 1)
    assert os.waitpid(child, os.WNOHANG)[0] == 0
    assert not records.settle(*worker.key)
    assert worker.runs()
    assert os.waitpid(child, 0)[1] == 0


def test_a_worker_whose_dumping_child_was_killed_is_ended(records: Records, worker: Worker) -> None:
    child = dumping_child(records, worker)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    assert records.settle(*worker.key)
    assert worker.ended_by() == signal.SIGKILL


def test_a_helper_that_starts_settles_what_no_one_works_on(
    records: Records, worker: Worker
) -> None:
    other = Worker()
    child = dumping_child(records, other)
    with pytest.raises(OutcomeUnknown), records.dumping(*worker.key, NETWORK):
        raise OutcomeUnknown("CRIU was killed")
    records.settle_all()
    assert worker.ended_by() == signal.SIGKILL
    assert other.runs()
    os.kill(child, signal.SIGTERM)
    os.waitpid(child, 0)
    other.end()


def test_a_record_that_was_never_written_whole_is_of_a_worker_that_goes_on(
    records: Records, worker: Worker, tmp_path: Path
) -> None:
    pid, start = worker.key
    (tmp_path / "dumps" / f"{pid}-{start}").touch()
    assert not records.settle(pid, start)
    assert worker.runs()
    assert list((tmp_path / "dumps").iterdir()) == []


def test_a_dump_does_not_begin_with_a_record_that_was_settled_meanwhile(
    records: Records, worker: Worker, tmp_path: Path
) -> None:
    pid, start = worker.key
    path = tmp_path / "dumps" / f"{pid}-{start}"
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        begun: list[BaseException] = []

        def dump() -> None:
            try:
                with records.dumping(pid, start, NETWORK):
                    pass
            except Aborted as error:
                begun.append(error)

        dumping = threading.Thread(target=dump)
        dumping.start()
        # Until it waits for the lock, which it has opened.
        while not any(opened(path)):
            time.sleep(0.01)
        path.unlink()
    dumping.join(5)
    assert len(begun) == 1
    assert list((tmp_path / "dumps").iterdir()) == []


def opened(path: Path) -> Iterator[str]:
    """Yield the descriptors of this process that wait for a lock of a file."""
    inode = path.stat().st_ino
    for line in Path("/proc/locks").read_text().splitlines():
        if "->" in line and line.split()[-3].endswith(f":{inode}"):
            yield line


def test_a_placeholder_whose_restore_was_killed_is_ended(records: Records, worker: Worker) -> None:
    child = os.fork()
    if child == 0:
        with records.restoring(*worker.key, ()):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    records.settle_all(child)
    assert worker.ended_by() == signal.SIGKILL


@pytest.mark.parametrize("error", [OutcomeUnknown("CRIU was killed"), ValueError("a defect")])
def test_a_restore_that_is_given_up_ends_its_placeholder_and_the_files_without_a_name(
    records: Records, worker: Worker, tmp_path: Path, error: Exception
) -> None:
    (tmp_path / "data" / "deep").mkdir(parents=True)
    mark, others = mark_of(*worker.key), mark_of(worker.key[0] + 1, worker.key[1])
    for name in (f"a{mark}.cr.1.ghost", f"deep/b{mark}.cr.2f.ghost", f"c{others}.cr.1.ghost"):
        (tmp_path / "data" / name).touch()
    volumes = [str(tmp_path / "data"), str(tmp_path / "nowhere")]
    with contextlib.suppress(OutcomeUnknown, ValueError), records.restoring(*worker.key, volumes):
        raise error
    assert list((tmp_path / "dumps").iterdir()) == []
    assert worker.ended_by() == signal.SIGKILL
    left = {path.name for path in (tmp_path / "data").rglob("*")}
    assert left == {f"c{others}.cr.1.ghost", "deep"}


def test_a_restore_that_is_undone_leaves_its_placeholder(
    records: Records, worker: Worker, tmp_path: Path
) -> None:
    with contextlib.suppress(Aborted), records.restoring(*worker.key, ()) as undone:
        undone()
        raise Aborted("CRIU has taken back what it made")
    assert list((tmp_path / "dumps").iterdir()) == []
    assert worker.runs()


def test_a_pid_that_another_process_has_now_is_not_ended(records: Records, worker: Worker) -> None:
    pid, start = worker.key
    with pytest.raises(OutcomeUnknown), records.dumping(pid, start + 1, NETWORK):
        raise OutcomeUnknown("CRIU was killed")
    assert records.settle(pid, start + 1)
    assert worker.runs()


def killed_dump(records: Records, pid: int, *, at: str) -> tuple[int, int]:
    """Kill a dump of a CUDA process in its midst; return the process."""
    key = stat_of(pid).key
    child = os.fork()
    if child == 0:
        with records.dumping(*key, NETWORK, [pid], 10.0) as criu_works:
            cuda.lock_all([pid], 5)
            cuda.checkpoint_all([pid], 10)
            if at == "locked":
                os._exit(0)
            with criu_works():
                if at == "dumped":
                    os._exit(0)
            os._exit(0)
    os.waitpid(child, 0)
    return key


@pytest.mark.parametrize("at", ["locked", "thawed"])
def test_a_worker_whose_dump_was_killed_before_or_after_criu_goes_on_on_its_devices(
    records: Records, cuda_node: CudaNode, at: str
) -> None:
    user = cuda_node.worker()
    assert not records.settle(*killed_dump(records, user.pids[0], at=at))
    user.ping("still here")
    assert user.answer() == "still here"
    assert cuda_node.verbs() == ["lock", "checkpoint", "restore", "unlock"]


def test_a_worker_whose_dump_was_killed_with_criu_is_ended_and_the_driver_is_not_asked(
    records: Records, cuda_node: CudaNode
) -> None:
    user = cuda_node.worker()
    assert records.settle(*killed_dump(records, user.pids[0], at="dumped"))
    assert user.process.wait(5) == -signal.SIGKILL
    assert cuda_node.verbs() == ["lock", "checkpoint"]


@pytest.mark.parametrize("in_reach", [True, False])
def test_a_worker_that_the_driver_does_not_let_go_is_ended(
    records: Records, cuda_node: CudaNode, monkeypatch: pytest.MonkeyPatch, in_reach: bool
) -> None:
    user = cuda_node.worker()
    process = killed_dump(records, user.pids[0], at="locked")
    if in_reach:
        cuda_node.faults("unlock 0 error 304")
    else:
        monkeypatch.delenv("LD_LIBRARY_PATH")
    assert records.settle(*process)
    assert user.process.wait(5) == -signal.SIGKILL


def test_devices_that_could_not_be_unlocked_leave_the_record(
    records: Records, worker: Worker, tmp_path: Path
) -> None:
    with pytest.raises(CudaStuck), records.dumping(*worker.key, NETWORK, [worker.key[0]], 1.0):
        raise CudaStuck("it does not run")
    assert len(list((tmp_path / "dumps").iterdir())) == 1


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[socket.socket]:
    """The socket of a helper that does not answer yet; one caller may wait."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "helper.sock"))
        listener.listen(0)
        yield listener


@pytest.mark.parametrize("answer", [b'{"type":"done"}', b'{"type":"done","ended":true}'])
def test_the_release_program_does_as_the_helper_says(
    worker: Worker, helper: socket.socket, answer: bytes
) -> None:
    def serve() -> None:
        caller, _ = helper.accept()
        with caller:
            caller.recv(4096)
            caller.send(answer)

    serving = threading.Thread(target=serve)
    serving.start()
    assert settling.settle(helper.getsockname(), worker.key) == (b"ended" in answer)
    serving.join()
    assert worker.runs()


def test_the_release_program_leaves_a_worker_alone_when_the_helper_was_stopped_at_rest(
    worker: Worker, tmp_path: Path
) -> None:
    (tmp_path / "helper.sock").touch()
    assert not settling.settle(str(tmp_path / "helper.sock"), worker.key, return_s=0.0)
    assert worker.runs()


def test_the_release_program_ends_the_worker_when_no_helper_comes_back(
    worker: Worker, tmp_path: Path
) -> None:
    began = time.monotonic()
    assert settling.settle(str(tmp_path / "nowhere"), worker.key, return_s=0.3)
    assert time.monotonic() - began >= 0.3
    assert worker.ended_by() == signal.SIGKILL


@pytest.mark.parametrize("has_another", [False, True], ids=["waits", "finds no room to wait"])
def test_the_release_program_leaves_a_worker_alone_when_the_helper_is_busy_with_others(
    worker: Worker, helper: socket.socket, has_another: bool
) -> None:
    path = helper.getsockname()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        if has_another:
            other.connect(path)
        assert not settling.settle(path, worker.key, return_s=0.3, answer_s=0.5)
    assert worker.runs()


def test_the_release_program_ends_the_worker_when_the_helper_ends_with_its_question(
    worker: Worker, helper: socket.socket
) -> None:
    path = helper.getsockname()
    ending = threading.Timer(0.5, helper.close)
    ending.start()
    assert settling.settle(path, worker.key, return_s=0.3, answer_s=20.0)
    ending.join()
    assert worker.ended_by() == signal.SIGKILL
