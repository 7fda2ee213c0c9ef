"""Saves and loads that were requested over gRPC: streamed, and ended with the call.

A capture or a restore sends orders instead (`handlers.orders`). There is no journal here: a call
that is cancelled or fails leaves no process, no part and no layout.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from pathlib import Path

from gms.domain.tasks import (
    DEFAULT_OPTIONS,
    LoadTask,
    SaveTask,
    TransferDone,
    TransferEvent,
    TransferFailed,
    TransferLeased,
    TransferOptions,
    TransferProgress,
)
from gms.handlers.memory_server import MemoryServer
from gms.ports import Transfers
from snapshot_shared.artifact import PART_MANIFEST, part_path
from snapshot_shared.errors import ArtifactMissing, Conflict, Internal, NotEligible, TransferKilled
from snapshot_shared.files import names_in, open_dir, open_root, opened
from snapshot_shared.frames import (
    LoadRequest,
    SaveRequest,
    TransferStage,
    TransferUpdate,
)
from snapshot_shared.object_storage import ObjectStorage
from snapshot_shared.orders import LayoutRef
from snapshot_shared.stripes import StripeRoots, remove_stored
from snapshot_shared.tasks import in_thread, undisturbed
from snapshot_shared.telemetry import current_traceparent

SAVES_AGAIN = 2
"""How many times a save is resumed after its process was killed."""

log = logging.getLogger(__name__)


class GmsTransfers:
    """The `TransferControl` port, on transfer processes of this node."""

    def __init__(
        self,
        gms: MemoryServer,
        transfers: Transfers,
        *,
        socket_dir: Path,
        root: Path,
        options: TransferOptions = DEFAULT_OPTIONS,
    ) -> None:
        """Work on `gms`; parts stand below the artifact root `root` unless a request names one.

        Their bytes are moved in this way.
        """
        self._gms = gms
        self._transfers = transfers
        self._socket_dir = str(socket_dir)
        self._root = str(root)
        self._options = options
        self._saving: set[Path] = set()

    async def save(self, request: SaveRequest) -> AsyncGenerator[TransferUpdate, None]:
        device = self._gms.table.device(request.device)
        info = self._gms.devices[request.device].info
        committed = device.weights.committed
        if committed is None or committed.ref is None:
            raise NotEligible(
                f"nothing is committed on {request.device}",
                next_step="let a worker commit its weights first",
                device=request.device,
            )
        part = request.part or f"gpu-{info.index}"
        root = request.root or self._root
        task = SaveTask(
            socket_dir=self._socket_dir,
            **self._options.of_save(),
            root=root,
            device=request.device,
            namespace=request.namespace,
            content_uid=request.content_uid,
            generation=request.attempt,
            part=part,
            deadline_s=request.deadline_s,
            traceparent=current_traceparent(),
            order=f"save-{request.content_uid}-{part}",
            fence_token=request.fence_token,
            layout=committed.ref,
            product=info.product,
        )
        path = Path(root, *part_path(request.namespace, request.content_uid, request.attempt, part))
        with self._only_one(path):
            async with aclosing(whole_or_nothing(self._transfers, task)) as events:
                async for event in events:
                    yield _update(event, path)

    async def load(self, request: LoadRequest) -> AsyncGenerator[TransferUpdate, None]:
        found = self._committed(request)
        path = Path(
            request.root or self._root,
            *part_path(request.namespace, request.content_uid, request.attempt, request.part),
        )
        if found is not None:
            yield TransferUpdate(
                stage=TransferStage.DONE,
                digest=request.part_digest,
                layout=found,
                path=str(path),
                was_there=True,
            )
            return
        task = LoadTask(
            socket_dir=self._socket_dir,
            **self._options.of_load(),
            root=request.root or self._root,
            device=request.device,
            namespace=request.namespace,
            content_uid=request.content_uid,
            generation=request.attempt,
            part=request.part,
            deadline_s=request.deadline_s,
            traceparent=current_traceparent(),
            part_digest=request.part_digest,
            load_token=request.load_token,
            layout_id=request.layout_id,
            structure_hash=request.structure_hash,
            if_match=request.if_match,
        )
        is_over = False
        try:
            async with aclosing(self._transfers.run(task)) as events:
                async for event in events:
                    published = None
                    if isinstance(event, TransferDone):
                        if request.publish:
                            published = self._gms.publish_hidden(request.device, request.load_token)
                        is_over = True
                    yield _update(event, path, published)
        except BaseException:
            if not is_over:
                self._gms.drop_hidden(request.device, request.load_token)
            raise

    def _committed(self, request: LoadRequest) -> LayoutRef | None:
        """Return the committed layout when it is the one to load; then nothing is loaded."""
        committed = self._gms.table.device(request.device).weights.committed
        if not request.publish or committed is None or committed.ref is None:
            return None
        found = (committed.ref.layout_id, committed.ref.structure_hash)
        return committed.ref if found == (request.layout_id, request.structure_hash) else None

    @contextlib.contextmanager
    def _only_one(self, path: Path) -> Iterator[None]:
        if path in self._saving:
            raise Conflict(f"{path} is being written by another call", path=str(path))
        self._saving.add(path)
        try:
            yield
        finally:
            self._saving.discard(path)


async def persistent(
    transfers: Transfers, task: SaveTask | LoadTask
) -> AsyncGenerator[TransferEvent, None]:
    """Run a transfer; resume a save in a new process when its own is killed.

    The fence holds meanwhile, so the memory is unchanged. TransferKilled after the last attempt.
    """
    again = SAVES_AGAIN if isinstance(task, SaveTask) else 0
    while True:
        try:
            async with aclosing(transfers.run(task)) as events:
                async for event in events:
                    yield event
        except TransferKilled as error:
            if not again:
                raise
            again -= 1
            log.warning("the save of %s goes on in a new process: %s", task.part, error)
        else:
            return


async def whole_or_nothing(
    transfers: Transfers, task: SaveTask | LoadTask
) -> AsyncGenerator[TransferEvent, None]:
    """Run a transfer. When it is cancelled, nothing of the part stays on disk.

    A transfer that fails removes its files itself; one that was killed cannot. What it has said is
    less than what it has done, so the folder of the part says what there is to remove.
    """
    last: TransferEvent | None = None
    events = persistent(transfers, task)
    step: asyncio.Future[TransferEvent | None] | None = None
    try:
        while True:
            step = asyncio.ensure_future(anext(events, None))
            try:
                found = await asyncio.shield(step)
            except asyncio.CancelledError:
                step.cancel()
                raise
            if found is None:
                return
            last = found
            yield last
    except (asyncio.CancelledError, GeneratorExit, TransferKilled):
        await undisturbed(_ended(events, step))
        # After the last event the part is complete, and stays.
        if isinstance(task, SaveTask) and not isinstance(last, TransferDone):
            await in_thread(_remove_part, task, has_begun=isinstance(last, TransferProgress))
        raise


async def _ended(
    events: AsyncGenerator[TransferEvent, None], step: asyncio.Future[TransferEvent | None] | None
) -> None:
    """End a transfer process. Its last event is ignored."""
    if step is not None:
        await asyncio.wait([step])
    await events.aclose()


def _remove_part(task: SaveTask, *, has_begun: bool) -> None:
    """Remove what a save has left; of one that has not said that it began, what is not complete."""
    place = part_path(task.namespace, task.content_uid, task.generation, task.part)
    # One that has not begun has made no folder.
    with contextlib.suppress(ArtifactMissing), opened(open_root(task.root)) as root:
        with opened(open_dir(root, place)) as part:
            is_complete = PART_MANIFEST in names_in(part)
        if has_begun or not is_complete:
            with opened(open_dir(root, place[:-1])) as parent:
                remove_stored(
                    parent,
                    place,
                    lambda: ObjectStorage(task.object_storage),
                    StripeRoots(task.stripe_roots),
                )


def _update(event: TransferEvent, path: Path, published: LayoutRef | None = None) -> TransferUpdate:
    match event:
        case TransferLeased():
            return TransferUpdate(stage=TransferStage.LEASED)
        case TransferProgress(done=done, total=total):
            return TransferUpdate(stage=TransferStage.PROGRESS, done=done, total=total)
        case TransferDone(bytes=size, digest=digest, layout=layout):
            return TransferUpdate(
                stage=TransferStage.DONE,
                done=size,
                total=size,
                digest=digest,
                layout=published or layout,
                path=str(path),
            )
        case TransferFailed():
            raise Internal("a failed transfer has no update: its error is raised")
