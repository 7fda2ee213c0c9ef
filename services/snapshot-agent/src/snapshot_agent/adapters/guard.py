"""The guard: a child that outlives the agent and frees a captured worker when nobody else can.

It is armed before the worker is asked to be quiet. It holds the worker's pidfd and one connection
from the agent. While that stands and the deadline has not come, it does nothing. When the
connection ends it waits five seconds for a returning agent to connect, and then, as at the
deadline, it kills the dump tool if one was named, lets the worker run, and writes
`snapshot-aborted`; or kills the worker, where its duty says so. It goes when it is dismissed and
when the worker ends, and leaves no socket behind.

`python -m snapshot_agent.adapters.guard <duty as JSON>`; standard library only, for it must start
at once and run on when the installation around it is replaced.
"""

# The import of pathlib would take as long as the rest of the start.
# ruff: noqa: PTH108, PTH123

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import signal
import socket
import struct
import sys
import time
from typing import TypedDict

from snapshot_agent.adapters import procfs

RETURN_S = 5.0
"""How long the guard waits for a returning agent, in seconds."""

ARMED = b"armed"
GONE = b"gone"
DISMISS = b"dismiss"
TOOL = b"tool "
"""Followed by the pid and the start time of the process that leads the tool's session."""

MESSAGE_BYTES = 256
_PEER = struct.Struct("3i")


class DutyDocument(TypedDict):
    """A duty as the agent hands it over. `link` is the descriptor of the first connection.

    `files` are to be written (name to body) and `remove` to be removed when the worker is let go;
    nothing is done to a worker for which the file `unless` is there.
    """

    socket: str
    link: int
    pid: int
    start: int
    control: str
    deadline: float
    boot_id: str
    kill: bool
    files: dict[str, str]
    remove: list[str]
    unless: str


class _Watch:
    """The events that a guard waits for."""

    def __init__(self, duty: DutyDocument, worker: int) -> None:
        self.duty = duty
        self.worker = worker
        self.tool: tuple[int, int] | None = None
        self.returns_by = math.inf
        self.link: socket.socket | None = socket.socket(fileno=duty["link"])
        self.listener = _listen(duty["socket"])
        self.alarm, alarm = socket.socketpair()
        alarm.setblocking(False)  # noqa: FBT003 - its only form
        self._alarm = alarm
        signal.set_wakeup_fd(alarm.fileno(), warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, lambda *_: None)
        self.poll = select.poll()
        for source in (worker, self.link, self.listener, self.alarm):
            self.poll.register(source, select.POLLIN)

    def until_over(self) -> bool:
        """Wait; True when the worker has to be let go, False when there is nothing to do."""
        while True:
            left = min(self.duty["deadline"], self.returns_by) - time.monotonic()
            if left <= 0:
                return True
            ready = {fd for fd, _ in self.poll.poll(math.ceil(min(left, 86400) * 1000))}
            if self.worker in ready:
                return False
            if self.alarm.fileno() in ready:
                return True
            if self.link is not None and self.link.fileno() in ready and self._hear(self.link):
                return False
            if self.listener.fileno() in ready:
                self._welcome()

    def _hear(self, link: socket.socket) -> bool:
        """Take one message; True when dismissed."""
        try:
            message = link.recv(MESSAGE_BYTES)
        except OSError:
            message = b""
        if message == DISMISS:
            return True
        if message.startswith(TOOL):
            pid, start = message[len(TOOL) :].split()
            self.tool = int(pid), int(start)
        elif not message:
            self._hang_up(link)
            self.returns_by = time.monotonic() + RETURN_S
        return False

    def _hang_up(self, link: socket.socket) -> None:
        self.poll.unregister(link)
        link.close()
        self.link = None

    def _welcome(self) -> None:
        """Let a returning agent take over from the one that started us."""
        with contextlib.suppress(OSError):
            caller, _ = self.listener.accept()
            if _uid_of(caller) not in (0, os.getuid()):
                caller.close()
                return
            if self.link is not None:
                self._hang_up(self.link)
            self.link = caller
            self.returns_by = math.inf
            self.poll.register(caller, select.POLLIN)
            caller.send(ARMED)

    def forget(self) -> None:
        """Remove the socket, so that no agent finds a guard that has decided."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.duty["socket"])
        self.listener.close()


def _listen(name: str) -> socket.socket:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(name)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    os.umask(0o077)
    listener.bind(name)
    listener.listen(4)
    return listener


def _uid_of(caller: socket.socket) -> int:
    data = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(data)[1])


def free(duty: DutyDocument, tool: tuple[int, int] | None) -> None:
    """Let the worker go, or kill it."""
    if tool is not None:
        for member in procfs.session_of(*tool):
            procfs.send(member, signal.SIGKILL)
    try:
        control = os.open(duty["control"], os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        control = None
    is_over = control is not None and _exists(control, duty["unless"])
    signals = [signal.SIGKILL] if duty["kill"] and not is_over else [signal.SIGCONT]
    for member in procfs.session_of(duty["pid"], duty["start"]):
        for number in signals:
            procfs.send(member, number)
    if control is not None and not is_over:
        for name, body in duty["files"].items():
            _write(control, name, body.encode())
        for name in duty["remove"]:
            with contextlib.suppress(OSError):
                os.unlink(name, dir_fd=control)


def _exists(directory: int, name: str) -> bool:
    try:
        os.stat(name, dir_fd=directory, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _write(directory: int, name: str, data: bytes) -> None:
    temporary = f".{name}.guard"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(temporary, dir_fd=directory)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    fd = os.open(temporary, flags, 0o600, dir_fd=directory)
    try:
        os.write(fd, data)
        os.fsync(fd)
    finally:
        os.close(fd)
    os.rename(temporary, name, src_dir_fd=directory, dst_dir_fd=directory)


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:
        return file.read().strip()


def main(arguments: list[str]) -> int:
    """Keep one duty to its end. The working directory is where the socket goes."""
    duty: DutyDocument = json.loads(arguments[0])
    worker = procfs.open_pidfd(duty["pid"], duty["start"])
    if worker is None or duty["boot_id"] != _boot_id():
        with socket.socket(fileno=duty["link"]) as link:
            link.send(GONE)
        return 1
    watch = _Watch(duty, worker)
    if watch.link is not None:
        watch.link.send(ARMED)
    must_act = watch.until_over()
    watch.forget()
    if must_act:
        free(duty, watch.tool)
        sys.stderr.write(f"guard: freed process {duty['pid']} ({duty['socket']})\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
