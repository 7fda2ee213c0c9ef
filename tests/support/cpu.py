"""Limits of CPU time: a test that computes is as fast on a machine that others use as on one alone.

A limit of wall-clock time is only for what hangs.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

CPU_S = 60.0
"""The CPU time that a test may take, in seconds, where no mark `cpu` says another."""


@contextmanager
def cpu_limit(seconds: float) -> Iterator[None]:
    """Fail the test once this process, with all its threads, has taken so much CPU time."""

    def exceeded(_number: int, _frame: FrameType | None) -> None:
        pytest.fail(f"took more than {seconds:g} s of CPU time")

    before = signal.signal(signal.SIGPROF, exceeded)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
