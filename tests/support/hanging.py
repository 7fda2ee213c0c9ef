"""A file system that hangs, as one over a network does whose server is away."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

CALLS = (
    "open",
    "close",
    "mkdir",
    "rmdir",
    "link",
    "unlink",
    "rename",
    "listdir",
    "scandir",
    "stat",
    "statvfs",
    "fstatvfs",
    "fsync",
    "read",
    "preadv",
    "write",
)
SOURCES = "/src/snapshot_"


class HangingRoot:
    """Everything below a folder: the product's calls on it hang from `hang` to `answer`.

    A call that is made in the thread of the event loop does not hang; `in_the_loop` names it.
    """

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = root
        self._loop = threading.get_ident()
        self._answers = threading.Event()
        self._answers.set()
        self._hangs: tuple[str, ...] = CALLS
        self.in_the_loop: list[str] = []
        self.calls = 0
        self.waiting = 0
        for name in CALLS:
            monkeypatch.setattr(os, name, self._hanging(name, getattr(os, name)))

    def hang(self, *names: str) -> None:
        """Answer no call from here on, or none of those that are named."""
        self._hangs = names or CALLS
        self._answers.clear()

    def answer(self) -> None:
        """Go on with all calls."""
        self._answers.set()

    def _hanging(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            dir_fds = [value for key, value in kwargs.items() if key.endswith("dir_fd")]
            if any(map(self._is_below, (*args[:1], *dir_fds))) and (caller := _product()):
                self.calls += 1
                if threading.get_ident() == self._loop:
                    self.in_the_loop.append(f"{name} in {caller}")
                elif name in self._hangs:
                    self.waiting += 1
                    self._answers.wait(120)
                    self.waiting -= 1
            return call(*args, **kwargs)

        return called

    def _is_below(self, place: Any) -> bool:
        if isinstance(place, int):
            try:
                place = Path(f"/proc/self/fd/{place}").readlink()
            except OSError:
                return False
        return place is not None and Path(os.fsdecode(place)).is_relative_to(self._root)


def _product() -> str:
    """Name the function of the product that is calling."""
    frame = sys._getframe(2)
    while frame is not None:
        if SOURCES in frame.f_code.co_filename:
            return f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""
