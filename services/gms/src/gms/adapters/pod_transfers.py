"""Saves and loads that the saver or loader container of a pod carries out, by files in its volume.

An order has a folder there (`gms.containers` is the other side): it is filled under a name that
begins with a dot and appears whole, and is taken away at the end, which ends what still works on
it. All that is in it may be of the pod: it is opened without links and read in bounds.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from gms.domain.containers import DONE, EVENT, FAILED, ORDER_FILE, Outcome
from gms.domain.task_rules import handed_over
from gms.domain.tasks import (
    LoadTask,
    SaveTask,
    TransferEvent,
    TransferLeased,
    TransferProgress,
    order_folder,
)
from gms.ports import Transfers
from snapback_client.frames import error_of
from snapshot_shared.codec import MAX_MESSAGE_BYTES, decode_json, encode_pretty
from snapshot_shared.errors import (
    ArtifactMissing,
    ContainerFailed,
    InvalidMessage,
    SnapbackError,
    pods_own,
)
from snapshot_shared.files import (
    make_dir,
    open_dir,
    open_root,
    opened,
    read_bounded,
    remove_tree,
    write_replacing,
)
from snapshot_shared.orders import LoadOrder, SaveOrder
from snapshot_shared.tasks import in_thread, undisturbed

_ANY_EVENT: Any = TransferEvent


class PodTransfers:
    """The `PodWork` port, by the volume of a pod on its node."""

    def __init__(self, folder: Path, processes: Transfers) -> None:
        """Leave orders in `folder`; `processes` copy the parts between it and the artifact root."""
        self._folder = folder
        self._processes = processes

    async def run(
        self, order: SaveOrder | LoadOrder, task: SaveTask | LoadTask
    ) -> AsyncGenerator[TransferEvent, None]:
        name = order_folder(order.order, order.attempt)
        copying = self._processes.run(replace(task, staged=str(self._folder)))
        try:
            if not await in_thread(self._is_offered, name):
                await in_thread(self._begin, name)
                if isinstance(task, LoadTask):
                    yield TransferLeased()
                    async with aclosing(copying) as events:
                        async for event in events:
                            if isinstance(event, TransferProgress):
                                yield event
                await in_thread(self._offer, name, order)
            async with aclosing(self._answers(name)) as answers:
                async for event in answers:
                    yield event
            if isinstance(task, SaveTask):
                async with aclosing(copying) as events:
                    async for event in events:
                        yield event
            else:
                yield handed_over(task, order.bytes if isinstance(order, LoadOrder) else 0)
        finally:
            await copying.aclose()
            await undisturbed(in_thread(self._withdraw, name))

    async def _answers(self, name: str) -> AsyncGenerator[TransferEvent, None]:
        """Yield what a container says of an order until it is done. Its failure is raised."""
        # It looks for the C library by programs that the image of a memory server may lack.
        from asyncinotify import Inotify, Mask  # noqa: PLC0415

        last: TransferEvent | None = None
        with Inotify() as inotify:
            changes = Mask.MOVED_TO | Mask.CLOSE_WRITE | Mask.CREATE | Mask.DELETE_SELF
            await in_thread(self._watch, name, lambda path: inotify.add_watch(path, changes))
            while True:
                event, is_done = await in_thread(self._look, name)
                if last is None and (event is not None or is_done):
                    yield TransferLeased()
                if isinstance(event, TransferProgress) and event != last:
                    yield event
                last = event or last
                if is_done:
                    return
                while (change := await inotify.get()).mask & Mask.CREATE:
                    # A file is read when it has been written, and a link never is.
                    if not await in_thread(self._is_file, name, str(change.name)):
                        break

    @pods_own()
    def _watch(self, name: str, add: Callable[[str], object]) -> None:
        with self._opened(name) as folder:
            add(f"/proc/self/fd/{folder}")

    @pods_own()
    def _is_file(self, name: str, entry: str) -> bool:
        with self._opened(name) as folder, contextlib.suppress(FileNotFoundError):
            return stat.S_ISREG(os.stat(entry, dir_fd=folder, follow_symlinks=False).st_mode)
        return True

    @pods_own()
    def _look(self, name: str) -> tuple[TransferEvent | None, bool]:
        with self._opened(name) as folder:
            if (failed := _read(folder, FAILED)) is not None:
                raise _failure_in(failed)
            is_done = _read(folder, DONE) is not None
            event = _read(folder, EVENT)
        with contextlib.suppress(InvalidMessage):
            return decode_json(event or b"", _ANY_EVENT), is_done
        return None, is_done

    @pods_own()
    def _is_offered(self, name: str) -> bool:
        """Whether an earlier process of this service has put the order there."""
        try:
            with self._opened(name) as folder:
                return _read(folder, ORDER_FILE) is not None
        except ArtifactMissing:
            return False

    @pods_own()
    def _begin(self, name: str) -> None:
        with opened(open_root(self._folder)) as root:
            remove_tree(root, f".{name}", durable=False)
            with opened(make_dir(root, [f".{name}"])) as folder:
                # For the user of the container, which may be any.
                os.fchmod(folder, 0o777)

    @pods_own()
    def _offer(self, name: str, order: SaveOrder | LoadOrder) -> None:
        with opened(open_root(self._folder)) as root:
            with opened(open_dir(root, [f".{name}"])) as folder:
                write_replacing(folder, ORDER_FILE, encode_pretty([order]), mode=0o644)
            os.rename(f".{name}", name, src_dir_fd=root, dst_dir_fd=root)

    def _withdraw(self, name: str) -> None:
        # What still works on it may write once more; the rest goes with the pod.
        with contextlib.suppress(OSError, SnapbackError), opened(open_root(self._folder)) as root:
            for each in (name, f".{name}"):
                remove_tree(root, each, durable=False)

    @contextlib.contextmanager
    def _opened(self, name: str) -> Iterator[int]:
        with opened(open_root(self._folder)) as root, opened(open_dir(root, [name])) as folder:
            yield folder


def _read(folder: int, name: str) -> bytes | None:
    try:
        return read_bounded(folder, name, MAX_MESSAGE_BYTES)
    except ArtifactMissing:
        return None


def _failure_in(data: bytes) -> SnapbackError:
    """Return the failure that a container has left; one that is not ours may write any text."""
    with contextlib.suppress(InvalidMessage):
        if (failure := decode_json(data, Outcome).failure) is not None:
            return error_of(failure)
    said = data[:200].decode(errors="replace").strip()
    return ContainerFailed(f"the saver or loader of the pod failed: {said}")
