"""Limits of this process, for the length of a block."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator


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
