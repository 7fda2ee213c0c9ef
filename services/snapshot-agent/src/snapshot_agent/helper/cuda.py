"""CUDA processes of a worker: locked and checkpointed before a dump, restored and unlocked after.

Every call of the driver may hang without an end, so each is made in a process of its own, which is
killed at its deadline. The driver goes on with what it has begun; `let_go` brings processes from
wherever they are back to running. The driver answers for no process that is stopped or frozen, so
all of this comes before CRIU's freeze and after its thaw.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Self

import msgspec

from snapshot_agent.adapters import procfs
from snapshot_agent.domain import cuda as rules
from snapshot_agent.domain.cuda import Answer, CudaMissing, LetGo, State, Verb

GRACE_S = 5.0
"""How long after its own timeout a lock may take to answer, its process's start included."""

UNDO_S = 10.0
"""How long processes may take to run again; add the bytes on their devices at 5 GB/s."""

BYTES_A_SECOND = 5_000_000_000
"""How fast a way back is at least."""

ASK_S = 10.0
"""How long a question may take. One during a checkpoint is answered at its end."""

UNLOCK_S = 3.0
"""What is left of the time for a way back when the unlocks wait for no restore any more."""

_PROGRAM = (sys.executable, "-m", "snapshot_agent.helper.cuda_call")
_REAP_S = 1.0


def undo_s(device_bytes: int) -> float:
    """Return how long processes with this much memory of devices may take to run again."""
    return UNDO_S + device_bytes / BYTES_A_SECOND


def processes(pids: Sequence[int], within_s: float = ASK_S) -> list[int]:
    """Return those of some processes that use CUDA. CudaMissing, CudaRefused, CudaTimedOut."""
    if not pids:
        return []
    answers: dict[int, Answer | None] = dict.fromkeys(pids)
    with _Calls() as calls:
        calls.start("thread", pids)
        answers.update(calls.until_all(time.monotonic() + within_s))
    uses: list[int] = []
    for pid, answer in answers.items():
        found = None if answer is None else rules.is_cuda(answer, alive=_is_alive(pid))
        if found is None:
            raise rules.refusal("restore thread", {pid: answer}, within_s)
        if found:
            uses.append(pid)
    return uses


def lock_all(
    pids: Sequence[int], timeout_s: float, *, grace_s: float = GRACE_S, undo_s: float = UNDO_S
) -> None:
    """Lock all processes or none, each after `timeout_s` at most.

    Those that were locked are unlocked before CudaRefused or CudaTimedOut, within `undo_s`;
    CudaStuck when that fails. After CudaTimedOut the driver may still lock a process, once that
    goes on: let go again.
    """
    with _undone(pids, undo_s):
        # To the driver, zero is no timeout.
        milliseconds = str(max(1, round(timeout_s * 1000)))
        _must("lock", pids, timeout_s + grace_s, milliseconds)


def checkpoint_all(pids: Sequence[int], within_s: float, *, undo_s: float = UNDO_S) -> None:
    """Bring what locked processes have on devices into their memory, for all or for none.

    All run again before CudaRefused or CudaTimedOut, within `undo_s`; CudaStuck when they do not.
    """
    with _undone(pids, undo_s):
        _must("checkpoint", pids, within_s)


def restore_all(pids: Sequence[int], uuid_map: Mapping[str, str], within_s: float) -> None:
    """Bring checkpointed processes to devices, locked; `uuid_map` names all old and new ones.

    Nothing is undone: CudaRefused or CudaTimedOut is the end of the tree that was restored.
    """
    pairs = rules.pairs_of(uuid_map)
    words = [
        f"{rules.uuid_bytes(old).hex()}:{rules.uuid_bytes(new).hex()}" for old, new in pairs.items()
    ]
    _must("restore", pids, within_s, ",".join(words))


def unlock_all(pids: Sequence[int], within_s: float = UNDO_S) -> None:
    """Let restored or locked processes run; one that runs already is none that failed."""
    until = time.monotonic() + within_s
    failed = _failures(_for_each("unlock", pids, within_s))
    if failed and (left := let_go(list(failed), max(0.0, until - time.monotonic())).stuck):
        raise rules.refusal("unlock", {pid: failed[pid] for pid in left}, within_s)


def let_go(pids: Sequence[int], within_s: float = UNDO_S) -> LetGo:
    """Bring processes back to running, from whatever state each is in; again is no harm.

    A checkpointed one is restored to the devices that it was on. Returns within `within_s`, with
    those that are stuck. CudaMissing.
    """
    until = time.monotonic() + within_s
    way = _WayBack(pids)
    with _Calls() as calls:
        for pid in pids:
            calls.start("state", [pid])
        while calls.pids:
            late = until - min(UNLOCK_S, within_s / 3)
            hurry = time.monotonic() >= late
            done = calls.wait(until if hurry else late)
            if not done and hurry:
                break
            for call in done:
                if way.must_ask(call):
                    calls.start("state", [call.pid])
            for pid, verb in way.steps(hurry=time.monotonic() >= late).items():
                if pid not in calls.pids:
                    calls.start(verb, [pid])
    return way.outcome()


class _Call(NamedTuple):
    """A call that has ended; `answer` is None when it ended without one."""

    verb: str
    pid: int
    answer: Answer | None


class _WayBack:
    """How far processes are on their way back to running."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._seen: dict[int, State | None] = dict.fromkeys(pids)
        self._refused: dict[int, tuple[Verb, str]] = {}
        self._killed: set[tuple[int, Verb]] = set()
        self._stuck: dict[int, str] = {}

    def must_ask(self, call: _Call) -> bool:
        """Take in how a call has ended; whether the state of its process is to be asked again."""
        name = "no answer" if call.answer is None else call.answer.name
        if call.verb != "state":
            verb = Verb(call.verb)
            if call.answer is not None and call.answer.ok:
                self._seen[call.pid] = rules.MOVES[verb][1]
                return False
            self._seen[call.pid] = None
            # A call that was killed says nothing of the driver, and is made once more.
            if call.answer is not None or (call.pid, verb) in self._killed:
                self._refused[call.pid] = verb, name
            else:
                self._killed.add((call.pid, verb))
            return True
        if call.answer is None:
            state = State.UNKNOWN
        else:
            state = rules.state_in(call.answer, alive=_is_alive(call.pid))
        self._seen[call.pid] = state
        refused, why = self._refused.get(call.pid, (None, ""))
        if refused is not None and rules.WAY_BACK[state] is refused:
            self._stuck[call.pid] = f"{state}, {refused}: {why}"
        elif state is State.UNKNOWN:
            self._stuck[call.pid] = f"{state}, state: {name}"
        elif state is State.FAILED:
            self._stuck[call.pid] = state
        return False

    def steps(self, *, hurry: bool) -> dict[int, Verb]:
        """Return what to do next."""
        going = {pid: state for pid, state in self._seen.items() if pid not in self._stuck}
        return rules.next_steps(going, hurry=hurry)

    def outcome(self) -> LetGo:
        """Return what has become of all."""
        seen = self._seen
        left = {
            pid: self._stuck.get(pid, f"{state or State.UNKNOWN}, no answer")
            for pid, state in seen.items()
            if state not in (State.RUNNING, State.NONE)
        }
        running = [pid for pid, state in seen.items() if state is State.RUNNING]
        return LetGo(running, [pid for pid, state in seen.items() if state is State.NONE], left)


class _Calls:
    """Calls of the driver that are under way. Those left at the end of the block are killed."""

    def __init__(self) -> None:
        self._poll = select.poll()
        self._under_way: dict[int, _UnderWay] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for call in self._under_way.values():
            call.process.kill()
        until = time.monotonic() + _REAP_S
        for call in self._under_way.values():
            call.close(until)

    @property
    def pids(self) -> set[int]:
        """The processes for which there is a call."""
        return {pid for call in self._under_way.values() for pid in call.left}

    def start(self, verb: str, pids: Sequence[int], value: str = "") -> None:
        """Start to call the driver for processes, one after another."""
        words = [verb, value, str(os.getpid()), *(str(pid) for pid in pids)]
        process = subprocess.Popen(
            [*_PROGRAM, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE
        )
        call = _UnderWay(verb, process, list(pids))
        self._under_way[call.process.stdout.fileno()] = call
        self._poll.register(call.process.stdout, select.POLLIN)

    def wait(self, until: float) -> list[_Call]:
        """Return what has ended; nothing at `until`. CudaMissing."""
        ended: list[_Call] = []
        while self._under_way and not ended:
            left = until - time.monotonic()
            if left <= 0:
                break
            for fd, _ in self._poll.poll(left * 1000):
                call = self._under_way[fd]
                ended += call.read()
                if not call.left:
                    self._poll.unregister(fd)
                    call.close(time.monotonic() + _REAP_S)
                    del self._under_way[fd]
        return ended

    def until_all(self, until: float) -> dict[int, Answer | None]:
        """Return the answers of all calls that have ended by then."""
        answers: dict[int, Answer | None] = {}
        while done := self.wait(until):
            answers.update({call.pid: call.answer for call in done})
        return answers


class _UnderWay:
    """A process that calls the driver, and the processes for which it has not answered."""

    def __init__(self, verb: str, process: subprocess.Popen[bytes], pids: list[int]) -> None:
        self.verb = verb
        self.process: Any = process
        self.left = pids
        self._text = b""

    def read(self) -> list[_Call]:
        """Read what it has printed, at its end what it has not."""
        data = os.read(self.process.stdout.fileno(), 65536)
        *lines, self._text = (self._text + data).split(b"\n")
        ended = [self._answered(msgspec.json.decode(line)) for line in lines]
        if not data:
            ended += [_Call(self.verb, pid, None) for pid in self.left]
            self.left = []
        return ended

    def close(self, until: float) -> None:
        """Wait for the end of the process, which has ended its work or was killed."""
        self.process.stdout.close()
        # One within the kernel may end later than a worker can wait.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(max(0.0, until - time.monotonic()))

    def _answered(self, line: dict[str, Any]) -> _Call:
        if "missing" in line:
            raise CudaMissing(
                f"the CUDA driver cannot be used: {line['missing']}",
                next_step="install cuda-bindings, and the NVIDIA driver where the helper runs",
            )
        self.left.remove(line["pid"])
        answer = Answer(line["status"], line["name"], line["value"])
        return _Call(self.verb, line["pid"], answer)


def _for_each(
    verb: str, pids: Sequence[int], within_s: float, value: str = ""
) -> dict[int, Answer | None]:
    """Call the driver for all at once, so that one that hangs keeps no other back."""
    answers: dict[int, Answer | None] = dict.fromkeys(pids)
    with _Calls() as calls:
        for pid in pids:
            calls.start(verb, [pid], value)
        answers.update(calls.until_all(time.monotonic() + within_s))
    return answers


def _failures(answers: Mapping[int, Answer | None]) -> dict[int, Answer | None]:
    return {pid: each for pid, each in answers.items() if each is None or not each.ok}


def _must(verb: str, pids: Sequence[int], within_s: float, value: str = "") -> None:
    if failed := _failures(_for_each(verb, pids, within_s, value)):
        raise rules.refusal(verb, failed, within_s)


@contextlib.contextmanager
def _undone(pids: Sequence[int], within_s: float) -> Iterator[None]:
    """Let processes run again when the block fails."""
    try:
        yield
    except BaseException as error:
        if left := rules.stuck(let_go(pids, within_s)):
            raise left from error
        raise


def _is_alive(pid: int) -> bool:
    found = procfs.read(pid)
    return found is not None and found.is_running
