"""Work on many items in a few threads."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

STREAMS = 2
"""How many files go through buffers at a time: one is filled while the other moves."""

T = TypeVar("T")
R = TypeVar("R")


def for_all(items: Iterable[T], work: Callable[[T], int], threads: int) -> int:
    """Return the sum of `work` over all items, done in threads. The first error stops the rest."""
    return sum(results_of(items, work, threads))


def results_of(items: Iterable[T], work: Callable[[T], R], threads: int) -> list[R]:
    """Return the results of `work` in the order of the items. The first error stops the rest."""
    if threads == 1:
        return [work(item) for item in items]
    following = enumerate(items)
    taking = threading.Lock()
    results: dict[int, R] = {}
    errors: list[BaseException] = []

    # Each thread takes the next item itself: handed out by the caller, it would wait for the caller
    # to be woken, and the disk for the thread.
    def run() -> None:
        try:
            while not errors:
                with taking:
                    numbered = next(following, None)
                if numbered is None:
                    return
                number, item = numbered
                results[number] = work(item)
        except BaseException as error:  # noqa: BLE001 - raised by the caller
            errors.append(error)

    with ThreadPoolExecutor(threads, thread_name_prefix="transfer") as pool:
        for _ in range(threads):
            pool.submit(run)
    if errors:
        raise errors[0]
    return [results[number] for number in sorted(results)]


def share(threads: int) -> tuple[int, int]:
    """Return the number of streams, and the threads that a backend may take in each."""
    streams = min(STREAMS, threads)
    return streams, threads // streams
