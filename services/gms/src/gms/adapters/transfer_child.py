"""The program that moves bytes: `python -m gms.adapters.transfer_child save|load|either`.

An ordinary client of the lease socket. It reads one task from standard input and writes events to
standard output, one JSON line each. It ends when standard input closes, because then whoever
started it is gone. It is on the critical path of every restore, so it imports little.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec

from gms.adapters.backends import find_backend
from gms.adapters.posix import digest_in_memory
from gms.adapters.sharing import parent_of, share
from gms.adapters.staging import drop_notes, staged
from gms.adapters.windows import WINDOW, Windowed
from gms.arena import HUGE_PAGE, Arena, reserve
from gms.domain.layout import structure_hash
from gms.domain.resume import note_of
from gms.domain.tasks import (
    DEFAULT_BACKEND,
    OBJECT,
    LoadTask,
    SaveTask,
    TransferDone,
    TransferEvent,
    TransferFailed,
    TransferLeased,
    TransferProgress,
)
from gms.domain.transfer import (
    check_fits,
    check_loadable,
    metadata_of,
    place,
    plan_files,
    saved_metadata,
)
from gms.lease import Lease
from gms.ports import ResumableBackend, TransferBackend
from snapshot_shared.artifact import (
    PART_MANIFEST,
    AllocationEntry,
    Facts,
    FileEntry,
    PartManifest,
    SavedLayout,
    SavedObjects,
    check_part_manifest,
    part_path,
)
from snapshot_shared.codec import (
    MAX_MANIFEST_BYTES,
    MAX_MESSAGE_BYTES,
    decode_json,
    digest,
    encode_json,
    encode_pretty,
)
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactExists,
    ArtifactMissing,
    InvalidInput,
    StaleLayout,
    failure_of,
)
from snapshot_shared.files import (
    open_artifact,
    open_dir,
    open_regular,
    open_root,
    opened,
    read_bounded,
    require_space,
    settle_new,
    write_new,
)
from snapshot_shared.frames import (
    Access,
    AllocationInfo,
    AllocationSpec,
    Attach,
    Attached,
    LockMode,
    MemoryDomain,
    MetadataItem,
)
from snapshot_shared.object_storage import ObjectStorage, check_objects
from snapshot_shared.orders import LayoutRef
from snapshot_shared.spans import parse_traceparent

Emit = Callable[[TransferEvent], None]

TELL_EVERY_S = 0.25
_PR_SET_PDEATHSIG = 1
_TALKATIVE = ("DEBUG", "INFO")
_KINDS: dict[str, Any] = {"save": SaveTask, "load": LoadTask, "either": SaveTask | LoadTask}


class _Meter:
    """Counts bytes from several threads; tells each quarter, and else four times a second."""

    def __init__(self, total: int, emit: Emit) -> None:
        self._total = total
        self._emit = emit
        self._lock = threading.Lock()
        self._done = 0
        self._told_at = time.monotonic()
        self._told = 0
        emit(TransferProgress(done=0, total=total))

    def advance(self, size: int) -> None:
        with self._lock:
            self._done += size
            now = time.monotonic()
            quarter = 4 * self._done // self._total > 4 * self._told // self._total
            if quarter or now - self._told_at >= TELL_EVERY_S:
                self._told_at, self._told = now, self._done
                self._emit(TransferProgress(done=self._done, total=self._total))


def save(task: SaveTask, emit: Emit) -> TransferDone:
    """Write the fenced layout as a part: files, digests, the manifest last."""
    with opened(open_root(task.root, create=True)) as root:
        if (known := saved_before(root, task)) is not None:
            return known
        with _leased(Lease.attach(task.socket_dir, save_request(task))) as lease:
            check_fenced(task.layout, lease.attached)
            emit(TransferLeased())
            infos, metadata = lease.allocations(), lease.metadata()
            check_shape(infos, metadata, task.layout)
            find = functools.partial(_backend, task, task.backend)
            with _mapped(lease, infos, Access.RO, find) as (buffers, backend):
                return write_part(root, task, infos, metadata, buffers, emit, backend=backend)


def write_part(
    root: int,
    task: SaveTask,
    infos: Sequence[AllocationInfo],
    metadata: Sequence[MetadataItem],
    buffers: Sequence[memoryview],
    emit: Emit,
    *,
    backend: TransferBackend | None = None,
) -> TransferDone:
    """Write the bytes of every allocation beneath an artifact root, and the manifest last.

    Files that a sealed artifact of the same namespace holds already are shared with it. What a
    killed process of the same save has written stays, where memory and file prove it. `backend` is
    that of the task by default; one with windows needs no buffers.

    What fails leaves no directory. NoSpace, and ArtifactExists when one stands there.
    """
    backend = backend or _backend(task, task.backend)
    windows = backend if isinstance(backend, Windowed) else None
    shard_bytes = task.shard_bytes if windows is None else min(task.shard_bytes, WINDOW)
    entries, sizes = place(infos, shard_bytes=shard_bytes)
    plans, shared = plan_files(entries, sizes), dict[str, FileEntry]()
    digest_of = (
        windows.digest_of if windows else functools.partial(digest_in_memory, buffers=buffers)
    )
    note, every, storage = note_of(task), task.note_bytes, task.object_storage
    with staged(root, _path_of(task), note, every_bytes=every, storage=storage) as staging:
        directory = staging.directory
        meter = _Meter(sum(sizes), emit)
        with parent_of(root, task) as parent:
            if parent is not None:
                shared = share(
                    parent,
                    directory,
                    [plan for plan in plans if not staging.written(plan.name)],
                    digest_of,
                    backend,
                    threads=task.threads,
                    advance=meter.advance,
                )
        missing = [plan for plan in plans if plan.name not in shared]
        if task.backend != OBJECT:
            needed = sum(plan.size for plan in missing) - staging.allocated()
            require_space(directory, needed, f"part {task.part}")
        write = (
            functools.partial(backend.write_missing, notes=staging)
            if isinstance(backend, ResumableBackend)
            else backend.write_files
        )
        moved = write(directory, missing, buffers, threads=task.threads, advance=meter.advance)
        files = shared | {entry.name: entry for entry in moved.files}
        in_order = [files[plan.name] for plan in plans]
        data = encode_pretty(part_manifest(task, entries, in_order, metadata))
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput("the manifest would be too long", size=len(data))
        write_new(directory, PART_MANIFEST, data)
        staging.finish()
    return TransferDone(
        bytes=sum(sizes),
        digest=digest(data),
        layout=task.layout,
        moved=moved.bytes,
        backend=moved.backend,
    )


def load(task: LoadTask, emit: Emit) -> TransferDone:
    """Read a part into memory, verified, and leave it hidden under the load token."""
    with (
        opened(open_root(task.root)) as root,
        opened(open_artifact(root, _path_of(task))) as directory,
    ):
        manifest = read_manifest(directory, task)
        layout = check_loadable(manifest, layout_id=task.layout_id, wanted_hash=task.structure_hash)
        allocations, files = layout.allocations, manifest.files
        way = _way_of(task, manifest)
        plans = plan_files(
            allocations,
            [entry.size for entry in files],
            names=[entry.name for entry in files],
            chunk_bytes=[entry.chunk_bytes for entry in files],
        )
        with _leased(Lease.attach(task.socket_dir, load_request(task))) as lease:
            check_room(allocations, lease.attached)
            emit(TransferLeased())
            infos = lease.allocate(
                [AllocationSpec(id=a.id, size=a.size, tag=a.tag) for a in allocations]
            )
            find = functools.partial(_backend, task, way)
            with _mapped(lease, infos, Access.RW, find) as (buffers, backend):
                meter = _Meter(manifest.bytes, emit)
                moved = backend.read_files(
                    directory, plans, files, buffers, threads=task.threads, advance=meter.advance
                )
            lease.put_metadata(metadata_of(layout.metadata))
            done = lease.commit(if_match=task.if_match, hidden=True, layout_id=task.layout_id)
    ref = LayoutRef(
        device=task.device,
        incarnation=done.incarnation,
        generation=0,
        layout_id=done.layout_id,
        structure_hash=done.structure_hash,
        bytes=done.bytes,
    )
    return TransferDone(
        bytes=manifest.bytes,
        digest=task.part_digest,
        layout=ref,
        moved=moved.bytes,
        backend=moved.backend,
    )


def save_request(task: SaveTask) -> Attach:
    """Ask to read the fenced layout."""
    return Attach(
        device=task.device,
        domain=MemoryDomain.WEIGHTS,
        lock=LockMode.RO,
        deadline_s=task.deadline_s,
        fence_token=task.fence_token,
        client="save",
        traceparent=task.traceparent,
    )


def load_request(task: LoadTask) -> Attach:
    """Ask to build a hidden layout."""
    return Attach(
        device=task.device,
        domain=MemoryDomain.WEIGHTS,
        lock=LockMode.RW,
        deadline_s=task.deadline_s,
        if_match=task.if_match,
        load_token=task.load_token,
        client="load",
        traceparent=task.traceparent,
    )


@contextlib.contextmanager
def _leased(lease: Lease) -> Iterator[Lease]:
    """Detach after success. After a failure the socket just ends: the save is then not over."""
    try:
        yield lease
    except BaseException:
        lease.close()
        raise
    lease.detach()


@contextlib.contextmanager
def _mapped(
    lease: Lease,
    infos: Sequence[AllocationInfo],
    access: Access,
    find: Callable[..., TransferBackend],
) -> Iterator[tuple[list[memoryview], TransferBackend]]:
    """Map a whole layout, one allocation after another; give the bytes of each and what moves them.

    Where only the device addresses them, there are no bytes to give, and it moves them by windows.
    """
    places: dict[str, int] = {}
    end, page = 0, 0
    for info in infos:
        places[info.id] = end
        end += info.aligned
    attached = lease.attached
    at = reserve(attached.device_kind, attached.device, end, address=None)
    try:
        for run in lease.export([info.id for info in infos], access):
            for info, descriptor in run:
                at.map(descriptor, places[info.id], info.aligned, writable=access is Access.RW)
                # All memory of a device is in pages of one size.
                page = page or os.fstat(descriptor).st_blksize
        if isinstance(at, Arena):
            views = [at.view(places[info.id], info.size) for info in infos]
            yield views, find(in_place=page >= HUGE_PAGE)
        else:
            offsets = [places[info.id] for info in infos]
            with Windowed(find(), at, offsets, end) as windows:
                yield [], windows
    finally:
        at.release()


def check_fenced(wanted: LayoutRef, attached: Attached) -> None:
    """StaleLayout unless what is attached is what the plan names."""
    found = LayoutRef(
        device=attached.device,
        incarnation=attached.incarnation,
        generation=attached.generation,
        layout_id=attached.layout_id,
        structure_hash=attached.structure_hash,
        bytes=attached.bytes,
    )
    if found != wanted:
        raise StaleLayout(
            "the committed layout is not the one of the plan",
            next_step="start a new attempt",
            expected=_named(wanted),
            found=_named(found),
        )


def _named(ref: LayoutRef) -> str:
    return f"{ref.layout_id} {ref.structure_hash[:16]} {ref.incarnation}/{ref.generation}"


def check_shape(
    infos: Sequence[AllocationInfo], metadata: Sequence[MetadataItem], wanted: LayoutRef
) -> None:
    """StaleLayout unless what was listed has the structure of the plan."""
    shape = structure_hash([(info.id, info.size, info.tag) for info in infos], metadata)
    if shape != wanted.structure_hash:
        raise StaleLayout(
            "the layout that was listed is not the one that is committed",
            expected=wanted.structure_hash,
            found=shape,
        )


def check_room(allocations: Sequence[AllocationEntry], attached: Attached) -> None:
    """Refuse a device that is too small or too full."""
    check_fits(
        [entry.size for entry in allocations],
        granularity=attached.granularity,
        capacity=attached.capacity,
        free=attached.free,
    )


def _path_of(task: SaveTask | LoadTask) -> tuple[str, ...]:
    return part_path(task.namespace, task.content_uid, task.generation, task.part)


def _backend(task: SaveTask | LoadTask, name: str, *, in_place: bool = False) -> TransferBackend:
    prefix = "/".join(_path_of(task))
    return find_backend(name, storage=task.object_storage, prefix=prefix, in_place=in_place)


def _way_of(task: LoadTask, manifest: PartManifest) -> str:
    """Name the backend of a load: whatever was chosen, the bytes are where the save left them."""
    if manifest.objects:
        return OBJECT
    return DEFAULT_BACKEND if task.backend == OBJECT else task.backend


def saved_before(root: int, task: SaveTask) -> TransferDone | None:
    """Give the result of the same save when it was finished before it could be reported."""
    path = _path_of(task)
    try:
        directory = open_dir(root, path)
    except ArtifactMissing:
        return None
    with opened(directory):
        settle_new(directory, PART_MANIFEST)
        try:
            data = read_bounded(directory, PART_MANIFEST, MAX_MANIFEST_BYTES)
        except ArtifactMissing:
            return None
        manifest = decode_json(data, PartManifest, limit=MAX_MANIFEST_BYTES)
        if manifest.layout is None or (manifest.order, manifest.layout.source) != (
            task.order,
            task.layout,
        ):
            raise ArtifactExists(f"another part stands in {'/'.join(path)}", path="/".join(path))
        # The manifest may have outlived its files, and neither need be durable yet.
        if manifest.objects:
            check_objects(ObjectStorage(task.object_storage), check_part_manifest(manifest))
        for entry in manifest.files if not manifest.objects else ():
            os.close(open_regular(directory, entry.name, size=entry.size, shared=True))
        drop_notes(directory)
    return TransferDone(bytes=manifest.bytes, digest=digest(data), layout=task.layout)


def read_manifest(directory: int, task: LoadTask) -> PartManifest:
    """Read the manifest that was sealed. ArtifactCorrupt for any other."""
    data = read_bounded(directory, PART_MANIFEST, MAX_MANIFEST_BYTES)
    if (found := digest(data)) != task.part_digest:
        raise ArtifactCorrupt(
            f"the manifest of {task.part} is not the one that was sealed",
            expected=task.part_digest,
            found=found,
        )
    manifest = check_part_manifest(decode_json(data, PartManifest, limit=MAX_MANIFEST_BYTES))
    wanted = (task.namespace, task.content_uid, task.generation, task.part)
    if wanted != (manifest.namespace, manifest.content_uid, manifest.generation, manifest.part):
        raise ArtifactCorrupt(f"the manifest is that of another part than {task.part}")
    return manifest


def part_manifest(
    task: SaveTask,
    allocations: list[AllocationEntry],
    files: list[FileEntry],
    metadata: Sequence[MetadataItem],
) -> PartManifest:
    """Describe what was written."""
    return PartManifest(
        kind="gms",
        part=task.part,
        namespace=task.namespace,
        content_uid=task.content_uid,
        generation=task.generation,
        order=task.order,
        bytes=sum(entry.size for entry in files),
        files=files,
        layout=SavedLayout(
            source=task.layout, allocations=allocations, metadata=saved_metadata(metadata)
        ),
        facts=Facts(device_product=task.product, devices=1),
        objects=SavedObjects(prefix="/".join(_path_of(task)))
        if task.backend == OBJECT
        else msgspec.UNSET,
    )


def main(arguments: Sequence[str]) -> int:
    """Carry out one task. Status 0 when it is done, 1 when it failed, 2 when it makes no sense."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    emit = _emitter()
    try:
        if len(arguments) != 1 or arguments[0] not in _KINDS:
            raise InvalidInput("usage: python -m gms.adapters.transfer_child save|load|either")
        task: SaveTask | LoadTask = decode_json(_read_line(), _KINDS[arguments[0]])
    except Exception as error:  # noqa: BLE001 - whatever it is, it makes no sense
        # Whoever started this may have ended while it waited.
        with contextlib.suppress(BrokenPipeError):
            emit(TransferFailed.of(failure_of(error)))
        return 2
    threading.Thread(target=_end_with_parent, daemon=True).start()
    verb = "save" if isinstance(task, SaveTask) else "load"
    try:
        done = save(task, emit) if isinstance(task, SaveTask) else load(task, emit)
    except Exception as error:  # noqa: BLE001 - the one place where a failure becomes an event
        failure = failure_of(error)
        _say(task, "WARNING", f"{verb} of {task.part} failed: {failure}")
        emit(TransferFailed.of(failure))
        return 2 if isinstance(error, InvalidInput) else 1
    _say(task, "INFO", f"{verb} of {task.part} is done: {done.bytes} bytes")
    emit(done)
    return 0


def _say(task: SaveTask | LoadTask, level: str, message: str) -> None:
    """Log a line as the services do, on the standard error of the service that started this."""
    if level == "INFO" and os.environ.get("SNAPBACK_LOG_LEVEL", "INFO").upper() not in _TALKATIVE:
        return
    now = time.time()
    line = {
        "at": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z",
        "level": level,
        "service": "snap-transfer",
        "node": os.environ.get("SNAPBACK_NODE", ""),
        "logger": __spec__.name if __spec__ else __name__,
        "message": message,
    }
    if context := parse_traceparent(task.traceparent):
        line["trace_id"], line["span_id"] = context
    data = encode_json({**line, "order_id": task.order, "attempt": task.attempt})
    with contextlib.suppress(OSError):
        os.write(2, data + b"\n")


def _emitter() -> Emit:
    lock = threading.Lock()

    def emit(event: TransferEvent) -> None:
        data = memoryview(encode_json(event) + b"\n")
        with lock:
            while data:
                data = data[os.write(1, data) :]

    return emit


def _read_line() -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = os.read(0, 65536)
        if not piece or len(data) > MAX_MESSAGE_BYTES:
            raise InvalidInput("a task is one line of JSON on standard input")
        data += piece
    return data


def _end_with_parent() -> None:
    with contextlib.suppress(OSError):
        while os.read(0, 4096):
            pass
    # No clean-up: the socket ends with us, and a part without manifest is no part.
    os._exit(3)


if __name__ == "__main__":
    # Straight out: a thread that waits for standard input must not hold the process up.
    os._exit(main(sys.argv[1:]))
