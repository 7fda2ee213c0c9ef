"""Waits for what another process or thread does, and of which there is no event."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

T = TypeVar("T")

WITHIN_S = 60.0
"""How long a wait lasts before the test fails, in seconds."""
PAUSE_S = 0.01
"""The time between two looks, in seconds."""

What = str | Callable[[], str]
"""What is waited for, or what says so when the wait is over: the log of a service, for example."""


def wait_until(holds: Callable[[], T], what: What = "", *, within_s: float = WITHIN_S) -> T:
    """Look again and again until the condition is true, and return its value."""
    pause, end = threading.Event(), time.monotonic() + within_s
    while not (found := holds()):
        if time.monotonic() > end:
            pytest.fail(_said(what, within_s))
        pause.wait(PAUSE_S)
    return found


async def until(holds: Callable[[], T], what: What = "", *, within_s: float = WITHIN_S) -> T:
    """As `wait_until`, and let the event loop run between two looks."""
    end = time.monotonic() + within_s
    while not (found := holds()):
        if time.monotonic() > end:
            pytest.fail(_said(what, within_s))
        await asyncio.sleep(PAUSE_S)
    return found


@contextlib.contextmanager
def later(work: Callable[[], object], after_s: float = 0.5) -> Iterator[None]:
    """Do something while the block waits for it."""
    timer = threading.Timer(after_s, work)
    timer.start()
    try:
        yield
    finally:
        timer.join()


def _said(what: What, within_s: float) -> str:
    text = what() if callable(what) else what
    return f"not true within {within_s:g} s: {text}"
