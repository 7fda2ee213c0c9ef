"""The guard: a child process that outlives the agent and releases a captured worker without it.

It is armed before the worker is quiesced, and holds the worker's pidfd and a connection from the
agent. It acts at a deadline: that of the hold, or an earlier one that the agent sets and moves on
each second, because an agent may hang or be stopped. It also acts five seconds after the connection
has ended, unless a new agent connects. It then starts the program that ends the fence on the
worker's devices, writes `snapshot-aborted`, and lets the worker go as the driver set it last (a
program and a signal); or kills the worker, if its task says so. It ends when it is dismissed and
when the worker ends, unless the driver is about to replace the process. It leaves no socket behind.

The file is written before the worker runs again. So if it is not there, the worker was held all the
time, and a copy of its state is consistent. Two cases are exceptions: the disk is full, or the
control directory is gone. The worker is let go then all the same.

`python -m snapshot_agent.adapters.guard <task>`. It imports nothing outside the standard library,
nor json, pathlib or typing, because a capture waits until its guard has started.
"""

# ruff: noqa: PTH108, PTH123

from __future__ import annotations

import contextlib
import errno
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable

from snapshot_agent.adapters import procfs

RETURN_S = 5.0
"""How long the guard waits for a returning agent, in seconds."""

FULL_S = 1.0
"""How long to wait before another try while the disk is full, in seconds."""

ARMED = b"armed"
GONE = b"gone"
DISMISS = b"dismiss"
FOLLOW = b"follow "
"""Followed by the pid and the start time of the process that the worker has from here on."""
RELEASE = b"release "
"""Followed by a `WireRelease`, which replaces the one before."""
UNFENCE = b"unfence "
"""Followed by the arguments of the program that ends the fence, with a NUL after each."""
THAW_BY = b"thaw-by "
"""Followed by the time at which the worker is let go unless another such message comes before."""
CONFIRM = b"confirm"
HELD = b"held"
"""The answer to CONFIRM. A guard that has begun to act does not answer."""

MESSAGE_BYTES = 65536
_PEER = struct.Struct("3i")


class GuardTask:
    """What one guard has to do, as the arguments of its process.

    `socket` is the name of the socket for returning agents. `deadline` is in seconds of the
    monotonic clock of boot `boot_id`. To let the worker go, the file `says` is written with `body`
    and the file `ends` is removed in `control`; with `kill` the worker is killed as well. Neither
    happens when the file `unless` is there. `uid`, `gid` (-1: unchanged) and `mode` are those of
    the file. `node`, `order`, `attempt` and `trace` (trace id and span id with a colon between) are
    for the log.
    """

    socket: str
    pid: int
    start: int
    control: str
    deadline: float
    boot_id: str
    kill: bool
    says: str
    body: str
    ends: str
    unless: str
    uid: int
    gid: int
    mode: int
    node: str
    order: str
    attempt: int
    trace: str

    def __init__(self, **values: object) -> None:
        # A plain record: importing dataclasses takes too long.
        self.__dict__.update(values)

    def arguments(self) -> list[str]:
        """Return the arguments of the program."""
        return [f"{name}={value}" for name, value in vars(self).items()]

    @classmethod
    def read(cls, arguments: list[str]) -> GuardTask:
        """Return the task that `arguments` wrote."""
        given = dict(argument.split("=", 1) for argument in arguments)
        return cls(**{name: _READ[cls.__annotations__[name]](given[name]) for name in given})


_READ: dict[str, Callable[[str], object]] = {
    "int": int,
    "float": float,
    "str": str,
    "bool": "True".__eq__,
}
"""How a value is read, by the annotation of its field."""


class WireRelease:
    """A `snapshot_agent.domain.driving.Release` on the connection to a guard."""

    def __init__(self, program: list[str], within_s: float, *, ends: bool, stays: bool) -> None:
        self.program = program
        self.within_s = within_s
        self.ends = ends
        self.stays = stays

    def words(self) -> bytes:
        """Return the message."""
        head = [repr(self.within_s), str(int(self.ends)), str(int(self.stays))]
        return RELEASE + joined(head + self.program)

    @classmethod
    def read(cls, words: bytes) -> WireRelease:
        """Return what `words` wrote, given without its first word."""
        within_s, ends, stays, *program = split(words)
        return cls(program, float(within_s), ends=ends == "1", stays=stays == "1")


def joined(words: list[str]) -> bytes:
    """Return arguments as one message, with a NUL after each."""
    return b"".join(os.fsencode(word) + b"\0" for word in words)


def split(data: bytes) -> list[str]:
    """Return the arguments that `joined` wrote."""
    return [os.fsdecode(word) for word in data.split(b"\0")[:-1]]


class _Watch:
    """The events that a guard waits for."""

    def __init__(self, task: GuardTask, worker: int, link: socket.socket) -> None:
        self.task = task
        self.worker = worker
        self.process = task.pid, task.start
        self.release = WireRelease([], 0.0, ends=False, stays=False)
        self.unfence: list[str] = []
        self.returns_by = math.inf
        self.thaw_by = math.inf
        self.link: socket.socket | None = link
        self.listener = _listen(task.socket)
        self.alarm, alarm = socket.socketpair()
        alarm.setblocking(False)  # noqa: FBT003 - its only form
        self._alarm = alarm
        # A handler in Python does not end poll by itself (PEP 475); the byte written here does.
        signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.poll = select.poll()
        for source in (worker, link, self.listener, self.alarm):
            self.poll.register(source, select.POLLIN)

    def until_over(self) -> bool:
        """Wait for the end of the guard; whether the worker has to be let go."""
        while True:
            left = min(self.task.deadline, self.returns_by, self.thaw_by) - time.monotonic()
            # poll takes an int of milliseconds, so a deadline in the far future is cut.
            ready = {fd for fd, _ in self.poll.poll(math.ceil(min(max(left, 0), 86400) * 1000))}
            if self.link is not None and self.link.fileno() in ready:
                if self._receive(self.link):
                    return False
                # A guard that was stopped reads first what its agent has sent meanwhile. And what
                # was sent before the worker ended decides what its end means.
                continue
            if left <= 0:
                return True
            if self.worker in ready:
                return False
            if self.alarm.fileno() in ready:
                return True
            if self.listener.fileno() in ready:
                self._welcome()

    def _receive(self, link: socket.socket) -> bool:
        """Handle one message; whether the guard is over."""
        try:
            message = link.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if message == DISMISS:
            return True
        if not message:
            self._hang_up(link)
            self.returns_by = time.monotonic() + RETURN_S
        elif message == CONFIRM:
            with contextlib.suppress(OSError):
                link.send(HELD)
        elif message.startswith(THAW_BY):
            self.thaw_by = float(message[len(THAW_BY) :])
        elif message.startswith(RELEASE):
            self.release = WireRelease.read(message[len(RELEASE) :])
            self._attend()
        elif message.startswith(UNFENCE):
            self.unfence = split(message[len(UNFENCE) :])
        elif message.startswith(FOLLOW):
            return self._follow(message[len(FOLLOW) :])
        return False

    def _attend(self) -> None:
        """Watch for the end of the worker, unless its process is about to be replaced."""
        with contextlib.suppress(KeyError):
            self.poll.unregister(self.worker)
        if not self.release.stays:
            self.poll.register(self.worker, select.POLLIN)

    def _follow(self, words: bytes) -> bool:
        """Watch another process; whether it has ended already."""
        pid, start = words.split()
        found = procfs.open_pidfd(int(pid), int(start))
        if found is None:
            return True
        with contextlib.suppress(KeyError):
            self.poll.unregister(self.worker)
        os.close(self.worker)
        self.worker, self.process = found, (int(pid), int(start))
        self._attend()
        return False

    def _hang_up(self, link: socket.socket) -> None:
        self.poll.unregister(link)
        link.close()
        self.link = None

    def _welcome(self) -> None:
        """Let a returning agent take over from the one before."""
        with contextlib.suppress(OSError):
            caller = let_in(self.listener)
            if caller is None:
                return
            if self.link is not None:
                self._hang_up(self.link)
            self.link = caller
            self.returns_by = math.inf
            self.poll.register(caller, select.POLLIN)
            caller.send(ARMED)

    def forget(self) -> None:
        """Remove the socket, so that no agent connects to a guard that has decided."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.task.socket)
        self.listener.close()


def _listen(name: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    # The mode of a unix socket is set by the umask at bind alone.
    os.umask(0o077)
    listener.bind(name)
    listener.listen(4)
    return listener


def let_in(listener: socket.socket) -> socket.socket | None:
    """Accept a connection; None when it is of another user, and closed again."""
    caller, _ = listener.accept()
    if peer_of(caller)[1] in (0, os.getuid()):
        return caller
    caller.close()
    return None


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """Return pid and uid of the process at the other end, from the kernel."""
    data = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    pid, uid, _ = _PEER.unpack(data)
    return pid, uid


def free(
    task: GuardTask, process: tuple[int, int], release: WireRelease, unfence: list[str]
) -> None:
    """Let the worker go, or kill it."""
    if unfence:
        # Not waited for: a GMS that hangs must not delay the thaw.
        _start(unfence)
    try:
        control = os.open(task.control, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        control = None
    is_over = control is not None and _exists(control, task.unless)
    is_said = control is None or is_over or _is_written(control, task)
    run_program(release.program, release.within_s)
    let_go(process, ends=release.ends or (task.kill and not is_over))
    if control is not None and not is_over:
        while not (is_said or _is_written(control, task)) and any(procfs.family_of(*process)):
            # The disk is full. The worker waits for this file, and no other process writes it.
            select.select([], [], [], FULL_S)
        with contextlib.suppress(OSError):
            os.unlink(task.ends, dir_fd=control)


def let_go(process: tuple[int, int], *, ends: bool) -> None:
    """Let every process of a worker run, or kill it."""
    number = signal.SIGKILL if ends else signal.SIGCONT
    for member in procfs.family_of(*process):
        procfs.send(member, number)


def run_program(program: list[str], within_s: float) -> None:
    """Run a program, and kill it after `within_s`. One that is not there is ignored."""
    pid = _start(program) if program else None
    if pid is None:
        return
    pidfd = os.pidfd_open(pid)
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    if not poll.poll(within_s * 1000):
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(pidfd)


def _start(program: list[str]) -> int | None:
    try:
        return os.posix_spawn(program[0], program, dict(os.environ))
    except OSError:
        return None


def _is_written(control: int, task: GuardTask) -> bool:
    try:
        _write(control, task)
    except OSError as error:
        return error.errno not in (errno.ENOSPC, errno.EDQUOT)
    return True


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write(directory: int, task: GuardTask) -> None:
    temporary = f".{task.says}.guard"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        if (task.uid, task.gid) != (-1, -1):
            os.fchown(fd, task.uid, task.gid)
        os.fchmod(fd, task.mode)
        os.write(fd, task.body.encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, task.says, src_dir_fd=directory, dst_dir_fd=directory)


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def _line(task: GuardTask, message: str) -> str:
    """Return a line of the log in the form of the services.

    json is not imported here: no value has a character that would need an escape.
    """
    now = time.time()
    at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now * 1000) % 1000:03d}Z"
    trace_id, _, span_id = task.trace.partition(":")
    words = {
        "at": at,
        "level": "WARNING",
        "service": "snap-guard",
        "node": task.node,
        "logger": "guard",
        "message": message,
        "trace_id": trace_id,
        "span_id": span_id,
        "order_id": task.order,
    }
    said = ", ".join(f'"{name}": "{word}"' for name, word in words.items() if word)
    return f'{{{said}, "attempt": {task.attempt}}}\n'


def main(arguments: list[str]) -> int:
    """Run one guard. The socket is created in the working directory; its link is descriptor 0."""
    task = GuardTask.read(arguments)
    # Or else the program that ends the fence would keep the connection to the agent open.
    link = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    worker = procfs.open_pidfd(task.pid, task.start)
    if worker is None or task.boot_id != _boot_id():
        link.send(GONE)
        return 1
    watch = _Watch(task, worker, link)
    link.send(ARMED)
    must_act = watch.until_over()
    watch.forget()
    if must_act:
        free(task, watch.process, watch.release, watch.unfence)
        sys.stderr.write(_line(task, f"freed process {watch.process[0]} ({task.socket})"))
    return 0


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    # The agent waits for this end; the finalization of the interpreter would take longer.
    os._exit(status)
