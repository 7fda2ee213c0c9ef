"""Measures the hot path of a running service: calls, and the hand-over of regions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from gms.domain.showing import BenchRow
from snapback_client.frames import Access, AllocationSpec, Attach, LockMode, MemoryDomain
from snapback_client.lease import Lease

LOCK_S = 5.0
ROUNDS = 20
"""How often regions are handed over."""


def bench_sessions(socket_dir: str, device: str, *, calls: int, regions: int) -> list[BenchRow]:
    """Time a call, an attach and the hand-over of `regions` regions of one granule each.

    Works in the domain kv, which is never saved. DeadlineExceeded when a worker holds it.
    """

    def attach() -> Lease:
        request = Attach(
            device=device,
            domain=MemoryDomain.KV,
            lock=LockMode.RW,
            deadline_s=LOCK_S,
            client="gms bench",
        )
        return Lease.attach(socket_dir, request)

    def hand_over() -> None:
        for run in lease.export(ids, Access.RW):
            for _, descriptor in run:
                os.fstat(descriptor)

    rows = [_timed("attach and detach", max(10, calls // 10), lambda: attach().detach())]
    lease = attach()
    try:
        rows.append(_timed("call (list allocations)", calls, lease.allocations))
        ids = [f"bench-{number}" for number in range(regions)]
        began = time.perf_counter()
        lease.allocate([AllocationSpec(id=each, size=1) for each in ids])
        made_us = 1e6 * (time.perf_counter() - began)
        rows.append(
            BenchRow(what=f"make {regions} regions", calls=1, p50_us=made_us, p99_us=made_us)
        )
        rows.append(_timed(f"hand over {regions} regions", ROUNDS, hand_over))
    finally:
        lease.detach()
    return rows


def _timed(what: str, count: int, call: Callable[[], object]) -> BenchRow:
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    times.sort()
    return BenchRow(
        what=what,
        calls=count,
        p50_us=1e6 * times[count // 2],
        p99_us=1e6 * times[min(count - 1, count * 99 // 100)],
    )
