"""A worker with state that CRIU may lose, named as docs/how-to/after-a-restore.md names it.

It prints its state as a line of JSON before it waits, and again when it goes on. What this kernel
or this processor lacks is left out.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

MEMORY, PAGE = 4 << 20, 4096
READ_WRITE, PRIVATE_ANONYMOUS = 3, 0x22
SLACK_NS, NONE = 123_456, ctypes.c_ulong(0)

libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
listener = socket.create_server(("127.0.0.1", 0))


class State(NamedTuple):
    """A state: `make` gives it to this process, `read` returns it."""

    name: str
    make: Callable[[], Any]
    read: Callable[[], Any]


def word(value: Any) -> Any:
    return ctypes.c_long(value) if isinstance(value, int) else value


def checked(result: int) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def prctl(*words: Any) -> int:
    return checked(libc.prctl(*map(word, words), *[NONE] * (5 - len(words))))


def prctl_value(option: int) -> int:
    value = ctypes.c_ulong()
    prctl(option, ctypes.byref(value))
    return value.value


def syscall(number: int, *words: Any) -> int:
    return checked(libc.syscall(ctypes.c_long(number), *map(word, words)))


def own(name: str) -> Path:
    return Path("/proc/self", name)


def status(name: str) -> str:
    return next(line for line in own("status").read_text().splitlines() if line.startswith(name))


def mapping() -> int:
    """Return the address of memory between two pages that have no access."""
    size = MEMORY + 2 * PAGE
    begin: int = libc.mmap(None, word(size), READ_WRITE, PRIVATE_ANONYMOUS, -1, word(0))
    for edge in (begin, begin + PAGE + MEMORY):
        checked(libc.mprotect(ctypes.c_void_p(edge), word(PAGE), 0))
    return begin + PAGE


def smaps(address: int, name: str) -> list[str]:
    """Return the words of a row of the mapping at an address."""
    is_found = False
    for line in own("smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            begin, end = (int(each, 16) for each in first.split("-"))
            is_found = begin <= address < end
        elif is_found and first == f"{name}:":
            return sorted(rest)
    raise LookupError(name)


def prctl_state(name: str, set_option: int, value: int, get_option: int) -> State:
    return State(name, lambda: prctl(set_option, value), lambda: prctl(get_option))


def option(name: str, value: int) -> State:
    tcp, number = socket.IPPROTO_TCP, getattr(socket, name)
    return State(
        name,
        lambda: listener.setsockopt(tcp, number, value),
        lambda: listener.getsockopt(tcp, number),
    )


def file_state(name: str, value: str) -> State:
    return State(name, lambda: own(name).write_text(value), own(name).read_text)


def advised(name: str, advice: int) -> State:
    area = mapping()
    return State(name, lambda: advise(area, advice), lambda: smaps(area, "VmFlags"))


def advise(area: int, advice: int) -> None:
    checked(libc.madvise(ctypes.c_void_p(area), word(MEMORY), advice))


def fill(area: int) -> None:
    advise(area, 14)
    ctypes.memset(area, 7, MEMORY)
    if smaps(area, "AnonHugePages")[0] == "0":
        raise OSError("no huge pages here")


def lock(area: int) -> None:
    checked(libc.mlock(ctypes.c_void_p(area), word(MEMORY)))


def restrict() -> None:
    """Refuse this process to make sockets in folders."""
    rights = ctypes.c_ulonglong(1 << 9)
    rules = syscall(444, ctypes.byref(rights), 8, 0)
    prctl(38, 1)
    syscall(446, rules, 0)
    os.close(rules)


def is_restricted() -> bool:
    path = Path(os.environ["SNAPSHOT_CONTROL_DIR"], "socket")
    with socket.socket(socket.AF_UNIX) as made:
        try:
            made.bind(str(path))
        except PermissionError:
            return True
    path.unlink()
    return False


def bind_memory() -> None:
    nodes = ctypes.c_ulong(1)
    syscall(238, 1, ctypes.byref(nodes), 64)


def bind_area(area: int) -> None:
    nodes = ctypes.c_ulong(1)
    syscall(237, ctypes.c_void_p(area), MEMORY, 2, ctypes.byref(nodes), 64, 0)


def memory_policy(area: int | None = None) -> int:
    mode = ctypes.c_int()
    syscall(239, ctypes.byref(mode), None, 0, ctypes.c_void_p(area), 0 if area is None else 2)
    return mode.value


def add_key() -> None:
    syscall(248, ctypes.c_char_p(b"user"), ctypes.c_char_p(b"key"), ctypes.c_char_p(b"k"), 1, -3)


def has_key() -> bool:
    with contextlib.suppress(OSError):
        return syscall(249, ctypes.c_char_p(b"user"), ctypes.c_char_p(b"key"), None, 0) > 0
    return False


def pend() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})
    os.kill(os.getpid(), signal.SIGUSR2)


def states() -> list[State]:
    huge, locked, bound, core = mapping(), mapping(), mapping(), resource.RLIMIT_CORE
    batch = os.SCHED_BATCH, os.sched_param(0)
    return [
        State("CPU affinity", lambda: os.sched_setaffinity(0, {1}), lambda: status("Cpus_allowed")),
        prctl_state("timer slack", 29, SLACK_NS, 30),
        State("I/O priority", lambda: syscall(251, 1, 0, 2 << 13 | 6), lambda: syscall(252, 1, 0)),
        State("name", lambda: prctl(15, ctypes.c_char_p(b"state")), lambda: status("Name")),
        State("PR_SET_PDEATHSIG", lambda: prctl(1, 10), lambda: prctl_value(2)),
        State("PR_SET_CHILD_SUBREAPER", lambda: prctl(36, 1), lambda: prctl_value(37)),
        prctl_state("PR_SET_SECUREBITS", 28, 4, 27),
        State("PR_MCE_KILL", lambda: prctl(33, 1, 1), lambda: prctl(34)),
        prctl_state("PR_SET_MEMORY_MERGE", 67, 1, 68),
        State("PR_SET_SPECULATION_CTRL", lambda: prctl(53, 0, 4), lambda: prctl(52, 0)),
        prctl_state("PR_SET_MDWE", 65, 1, 66),
        State("Landlock", restrict, is_restricted),
        State("personality", lambda: libc.personality(0x40000), lambda: libc.personality(-1)),
        file_state("oom_score_adj", "500\n"),
        file_state("coredump_filter", "0x3f\n"),
        State("nice", lambda: os.nice(5), lambda: os.getpriority(os.PRIO_PROCESS, 0)),
        State("policy", lambda: os.sched_setscheduler(0, *batch), lambda: os.sched_getscheduler(0)),
        State("umask", lambda: os.umask(0o27), lambda: status("Umask")),
        State(
            "RLIMIT_CORE",
            lambda: resource.setrlimit(core, (0, 0)),
            lambda: resource.getrlimit(core),
        ),
        State("set_mempolicy", bind_memory, memory_policy),
        State("mbind", lambda: bind_area(bound), lambda: memory_policy(bound)),
        State("huge pages", lambda: fill(huge), lambda: smaps(huge, "AnonHugePages")[0] != "0"),
        advised("MADV_HUGEPAGE", 14),
        advised("MADV_DONTFORK", 10),
        advised("MADV_DONTDUMP", 16),
        State("mlock", lambda: lock(locked), lambda: smaps(locked, "VmFlags")),
        State(
            "mlockall",
            lambda: checked(libc.mlockall(2)),
            lambda: "lo" in smaps(mapping(), "VmFlags"),
        ),
        State("membarrier", lambda: syscall(324, 16, 0, 0), lambda: syscall(324, 512, 0, 0)),
        State("clear_child_tid", lambda: None, lambda: prctl_value(40)),
        State("pending signals", pend, lambda: sorted(map(int, signal.sigpending()))),
        option("TCP_NODELAY", 1),
        option("TCP_DEFER_ACCEPT", 3),
        option("TCP_FASTOPEN", 5),
        option("TCP_USER_TIMEOUT", 9000),
        State("keyrings", add_key, has_key),
    ]


def main() -> None:
    """Print the state, wait to be captured or restored, and print it again."""
    made: list[State] = []
    for state in states():
        with contextlib.suppress(OSError):
            state.make()
            made.append(state)
    begun, over = threading.Event(), threading.Event()
    slack: list[int] = []

    def second() -> None:
        prctl(29, 2 * SLACK_NS)
        begun.set()
        over.wait()
        slack.append(prctl(30))

    thread = threading.Thread(target=second)
    thread.start()
    begun.wait()
    print(json.dumps({state.name: state.read() for state in made}), flush=True)
    folder = Path(os.environ["SNAPSHOT_CONTROL_DIR"])
    (folder / "ready-for-snapshot").touch()
    while not any((folder / name).exists() for name in ("snapshot-complete", "restore-complete")):
        time.sleep(0.05)
    over.set()
    thread.join()
    after = {state.name: state.read() for state in made}
    print(json.dumps(after | {"of a second thread": slack[0] == 2 * SLACK_NS}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
