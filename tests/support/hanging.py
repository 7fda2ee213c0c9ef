"""A file system that hangs, as one over a network does whose server is away.

Within a test `HangingRoot` does it. A program whose `PYTHONPATH` begins with `PRELOAD` does it to
itself, by the settings `ROOT` and `LOCK`: its calls below the one wait while the other is locked.
"""

from __future__ import annotations

import builtins
import contextlib
import fcntl
import io
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

CALLS = (
    *("open", "close", "mkdir", "rmdir", "link", "unlink", "rename", "listdir", "scandir", "stat"),
    *("statvfs", "fstatvfs", "fsync", "fdatasync", "ftruncate", "read", "pread", "preadv", "write"),
)
SOURCES = ("/src/snapshot_", "/src/gms/")
ROOT, LOCK = "HANGING_ROOT", "HANGING_LOCK"
PRELOAD = str(Path(__file__).with_name("preload"))


def gated(
    root: Path,
    gate: Callable[[str], None],
    put: Callable[[Any, str, Any], None] = setattr,
) -> None:
    """Have `gate` be called before each call of the product that is about a path below `root`.

    It is given the name of the call and of the function that makes it; `put` puts what does so
    into a module.
    """
    for name in CALLS:
        put(os, name, _gated(root, gate, name, getattr(os, name)))
    # One function by two names, which does not call that of `os`.
    opening = _gated(root, gate, "open", open)
    for module in (builtins, io):
        put(module, "open", opening)


def _gated(
    root: Path, gate: Callable[[str], None], name: str, call: Callable[..., Any]
) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        dir_fds = [value for key, value in kwargs.items() if key.endswith("dir_fd")]
        is_below = any(_is_below(root, place) for place in (*args[:1], *dir_fds))
        if is_below and (caller := _product()):
            gate(f"{name} in {caller}")
        return call(*args, **kwargs)

    return called


def _is_below(root: Path, place: Any) -> bool:
    if isinstance(place, int):
        try:
            place = Path(f"/proc/self/fd/{place}").readlink()
        except OSError:
            return False
    return place is not None and Path(os.fsdecode(place)).is_relative_to(root)


def _product() -> str:
    """Name the function of the product that is calling."""
    frame = sys._getframe(2)
    while frame is not None:
        if any(source in frame.f_code.co_filename for source in SOURCES):
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def hang_while_locked(root: Path, lock: Path) -> None:
    """Have the product's calls below `root` wait while another process has locked a file."""
    open_, close = os.open, os.close

    def gate(_call: str) -> None:
        # A lock of the kernel: it is waited for without a timer, and ends with its holder.
        descriptor = open_(lock, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        finally:
            close(descriptor)

    gated(root, gate)


class HangingRoot:
    """Everything below a folder: the product's calls on it hang from `hang` to `answer`.

    A call that is made in the thread of the event loop does not hang; `in_the_loop` names it.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._loop = threading.get_ident()
        self._answers = threading.Event()
        self._answers.set()
        self._hangs: tuple[str, ...] = CALLS
        self.in_the_loop: list[str] = []
        self.calls = 0
        self.waiting = 0
        gated(root, self._gate, monkeypatch.setattr)

    def hang(self, *names: str) -> None:
        """Answer no call from here on, or none of those that are named."""
        self._hangs = names or CALLS
        self._answers.clear()

    @contextlib.contextmanager
    def hanging(self, *names: str) -> Iterator[None]:
        self.hang(*names)
        try:
            yield
        finally:
            self.answer()

    def answer(self) -> None:
        """Go on with all calls."""
        self._answers.set()

    def _gate(self, call: str) -> None:
        self.calls += 1
        if threading.get_ident() == self._loop:
            self.in_the_loop.append(call)
        elif call.partition(" ")[0] in self._hangs:
            self.waiting += 1
            self._answers.wait(120)
            self.waiting -= 1


def hanging_memory(
    pid: int, monkeypatch: pytest.MonkeyPatch, given_up_after_s: float, threads: int = 16
) -> HangingRoot:
    """The environment of a process, of which a read can hang; so many may hang at a time."""
    module = "snapshot_agent.adapters.process_memory"
    monkeypatch.setattr(f"{module}.HANGS_S", given_up_after_s)
    monkeypatch.setattr(f"{module}.THREADS", threads)
    return HangingRoot(Path(f"/proc/{pid}/environ"), monkeypatch)
