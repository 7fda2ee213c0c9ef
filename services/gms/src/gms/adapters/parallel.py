"""Work on many items in a few threads."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TypeVar

T = TypeVar("T")


def for_all(items: Iterable[T], work: Callable[[T], int], threads: int) -> int:
    """Return the sum of `work` over all items, done in threads. The first error stops the rest."""
    if threads == 1:
        return sum(work(item) for item in items)
    total = 0
    with ThreadPoolExecutor(threads, thread_name_prefix="transfer") as pool:
        running: set[Future[int]] = set()
        try:
            for item in items:
                running.add(pool.submit(work, item))
                if len(running) >= 2 * threads:
                    total += _collect(running)
            while running:
                total += _collect(running)
        finally:
            for future in running:
                future.cancel()
    return total


def _collect(running: set[Future[int]]) -> int:
    done, _ = wait(running, return_when=FIRST_COMPLETED)
    running -= done
    return sum(future.result() for future in done)
