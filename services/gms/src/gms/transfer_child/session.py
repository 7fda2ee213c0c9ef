"""What a save and a load share: the session, the mapped layout, the backend and the progress."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from gms.adapters.backends import find_backend
from gms.adapters.bounce_buffers import BounceBuffered
from gms.domain.task_rules import path_of
from gms.domain.tasks import LoadTask, SaveTask, TransferEvent, TransferProgress
from gms.ports import TransferBackend
from snapback_client.frames import Access, AllocationInfo
from snapback_client.lease import Lease
from snapback_client.reservation import HUGE_PAGE, Reservation, reserve
from snapshot_shared.errors import pods_own

if TYPE_CHECKING:
    from gms.adapters.encrypted import Ciphers

Emit = Callable[[TransferEvent], None]

PROGRESS_EVERY_S = 0.25


class ProgressMeter:
    """Counts bytes from several threads; emits each quarter, and otherwise four times a second."""

    def __init__(self, total: int, emit: Emit) -> None:
        self._total = total
        self._emit = emit
        self._lock = threading.Lock()
        self._done = 0
        self._emitted_at = time.monotonic()
        self._emitted = 0
        emit(TransferProgress(done=0, total=total))

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            quarter = 4 * self._done // self._total > 4 * self._emitted // self._total
            if quarter or now - self._emitted_at >= PROGRESS_EVERY_S:
                self._emitted_at, self._emitted = now, self._done
                self._emit(TransferProgress(done=self._done, total=self._total))


@contextlib.contextmanager
def leased(lease: Lease) -> Iterator[Lease]:
    """Detach after success. After an error only close: then the server knows the save as failed."""
    try:
        yield lease
    except BaseException:
        lease.close()
        raise
    with pods_own():
        lease.detach()


@contextlib.contextmanager
def mapped(
    lease: Lease,
    infos: Sequence[AllocationInfo],
    access: Access,
    find: Callable[..., TransferBackend],
) -> Iterator[tuple[list[memoryview], TransferBackend]]:
    """Map a whole layout; yield the bytes of each allocation and the backend that moves them.

    The memory of a CUDA device has no bytes here; the backend then moves it by bounce buffers.
    """
    places: dict[str, int] = {}
    end, page = 0, 0

    def exported() -> Iterator[tuple[int, int, int]]:
        nonlocal page
        for run in lease.export([info.id for info in infos], access):
            for info, descriptor in run:
                # All memory of a device is in pages of one size.
                page = page or os.fstat(descriptor).st_blksize
                yield descriptor, places[info.id], info.aligned

    for info in infos:
        places[info.id] = end
        end += info.aligned
    attached = lease.attached
    if attached.device_kind == "cuda":
        # Only here: the transfers of simulated devices need nothing of it.
        from gms.transfer_child import gpu  # noqa: PLC0415

        gpu.prepare(attached.device)
    at = reserve(attached.device_kind, attached.device, end, address=None)
    try:
        with pods_own():
            at.map_all(exported(), writable=access is Access.RW)
        if isinstance(at, Reservation):
            views = [at.view(places[info.id], info.size) for info in infos]
            yield views, find(in_place=page >= HUGE_PAGE)
        else:
            offsets = [places[info.id] for info in infos]
            # The windows are page-locked, and as good for a disk as huge pages are.
            with BounceBuffered(find(in_place=True), at, offsets, end) as bounced:
                yield [], bounced
    finally:
        at.release()


def backend_of(
    task: SaveTask | LoadTask,
    name: str,
    *,
    in_place: bool = False,
    ciphers: Ciphers | None = None,
) -> TransferBackend:
    """Return a backend for the part of a task, which is encrypted if there are ciphers."""
    prefix = "/".join(path_of(task))
    if ciphers is None:
        return find_backend(name, storage=task.object_storage, prefix=prefix, in_place=in_place)
    # Every restore waits for this import, and few artifacts are encrypted.
    from gms.adapters.encrypted import Encrypted  # noqa: PLC0415

    # What moves is in buffers of ours, which are in huge pages.
    found = find_backend(name, storage=task.object_storage, prefix=prefix, in_place=True)
    return Encrypted(found, ciphers)
