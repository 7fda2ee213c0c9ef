"""Limits of this process, for the length of a block.

By CPU time a test that computes is as fast on a machine that others use as on one alone; a limit of
wall-clock time is only for what hangs.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from collections.abc import Iterator
from types import FrameType

import pytest

CPU_S = 60.0
"""The CPU time that a test may take, in seconds, where no mark `cpu` says another."""


@contextlib.contextmanager
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


@contextlib.contextmanager
def no_descriptor_left(below: int | None = None) -> Iterator[None]:
    """Let this process open nothing more: every number that it may use is in use.

    `below` is the first number that it may not use; by default the lowest that is free.
    """
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = os.open(os.devnull, os.O_RDONLY)
    os.close(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (free if below is None else below, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
