"""Save one layout: write it as a part, files first and the manifest last."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from msgspec import UNSET
from msgspec.structs import replace

from gms.adapters.bounce_buffers import BUFFER_BYTES, BounceBuffered
from gms.adapters.buffers import digest_in_memory
from gms.adapters.sharing import DigestOf, parent_of, share
from gms.adapters.staging import drop_notes, staged
from gms.adapters.striping import in_folders, require_room
from gms.domain.task_rules import (
    check_fenced,
    check_shape,
    part_manifest,
    path_of,
    save_request,
    stripes_of,
)
from gms.domain.tasks import OBJECT, SaveTask, TransferDone, TransferLeased
from gms.domain.transfer import (
    ENCRYPTED_SHARD_BYTES,
    FilePlan,
    place,
    plan_files,
    shard_length,
    spread,
)
from gms.ports import Advance, Moved, ResumableBackend, TransferBackend
from gms.transfer_child.session import Emit, ProgressMeter, backend_of, leased, mapped
from snapback_client.frames import Access, AllocationInfo, MetadataItem
from snapback_client.lease import Lease
from snapshot_shared.artifact import (
    PART_MANIFEST,
    AllocationEntry,
    FileEntry,
    PartManifest,
    check_part_manifest,
)
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, digest, encode_pretty
from snapshot_shared.errors import ArtifactExists, ArtifactMissing, InvalidInput
from snapshot_shared.files import (
    open_dir,
    open_root,
    opened,
    read_bounded,
    settle_new,
    write_new,
)
from snapshot_shared.object_storage import ObjectStorage, check_objects
from snapshot_shared.stripes import StripeRoots, check_files

if TYPE_CHECKING:
    from gms.adapters.encrypted import Ciphers


def save(task: SaveTask, emit: Emit) -> TransferDone:
    """Write the fenced layout as a part: files, digests, the manifest last."""
    with opened(open_root(task.root, create=True)) as root:
        if (known := saved_before(root, task)) is not None:
            return known
        with leased(Lease.attach(task.socket_dir, save_request(task))) as lease:
            check_fenced(task.layout, lease.attached)
            emit(TransferLeased())
            infos, metadata = lease.allocations(), lease.metadata()
            check_shape(infos, metadata, task.layout)
            ciphers = ciphers_of(task)
            find = functools.partial(backend_of, task, task.backend, ciphers=ciphers)
            with mapped(lease, infos, Access.RO, find) as (buffers, backend):
                return write_part(
                    root, task, infos, metadata, buffers, emit, backend=backend, ciphers=ciphers
                )


def write_part(
    root: int,
    task: SaveTask,
    infos: Sequence[AllocationInfo],
    metadata: Sequence[MetadataItem],
    buffers: Sequence[memoryview],
    emit: Emit,
    *,
    backend: TransferBackend | None = None,
    ciphers: Ciphers | None = None,
) -> TransferDone:
    """Write the bytes of every allocation beneath an artifact root, and the manifest last.

    Files that a sealed artifact of the same namespace holds already are shared with it. What a
    killed process of the same save has written is kept, where memory and file prove it. `backend`
    is that of the task by default; one with bounce buffers needs no `buffers`. `ciphers` are those
    of a backend that encrypts.

    A failure leaves no directory. NoSpace; ArtifactExists when the part exists.
    """
    if backend is None:
        ciphers = ciphers_of(task)
        backend = backend_of(task, task.backend, ciphers=ciphers)
    bounced = backend if isinstance(backend, BounceBuffered) else None
    longest = min(
        task.shard_bytes,
        BUFFER_BYTES if bounced else task.shard_bytes,
        ENCRYPTED_SHARD_BYTES if ciphers else task.shard_bytes,
    )
    entries, plans = _planned(infos, stripes_of(task), longest)
    size, shared = sum(plan.size for plan in plans), dict[str, FileEntry]()
    compute = ciphers.older_digest if ciphers else digest_in_memory
    digest_of: DigestOf = functools.partial(compute, buffers=buffers)
    if bounced:
        digest_of = functools.partial(bounced.digest_of, compute=compute)
    with staged(root, task, stripes={plan.stripe for plan in plans} - {""}) as staging:
        folders = staging.folders
        encryption = ciphers.begin(staging) if ciphers else None
        meter = ProgressMeter(size, emit)
        with parent_of(root, task) as parent:
            if parent is not None and (ciphers is None or ciphers.follow(parent.manifest)):
                shared = share(
                    parent,
                    folders,
                    [plan for plan in plans if not staging.written(plan.name)],
                    digest_of,
                    backend,
                    threads=task.threads,
                    advance=meter.advance,
                )
        missing = [plan for plan in plans if plan.name not in shared]
        if task.backend != OBJECT:
            needed = {
                stripe: sum(plan.size for plan in missing if plan.stripe == stripe)
                - staging.allocated(stripe)
                for stripe in folders
            }
            require_room(folders, needed, f"part {task.part}")
        write = (
            functools.partial(backend.write_missing, notes=staging)
            if isinstance(backend, ResumableBackend)
            else backend.write_files
        )

        def move(folder: int, indices: Sequence[int], threads: int, advance: Advance) -> Moved:
            some = [missing[index] for index in indices]
            return write(folder, some, buffers, threads=threads, advance=advance)

        moved = in_folders(folders, missing, task.threads, move, meter.advance)
        written = {entry.name: entry for entry in moved.files}
        files = shared | {
            plan.name: replace(written[plan.name], stripe=plan.stripe or UNSET) for plan in missing
        }
        in_order = [files[plan.name] for plan in plans]
        if ciphers:
            in_order = [ciphers.finished(entry) for entry in in_order]
        data = encode_pretty(part_manifest(task, entries, in_order, metadata, encryption))
        if len(data) > MAX_MANIFEST_BYTES:
            raise InvalidInput("the manifest would be too long", size=len(data))
        staging.secure_stripes()
        write_new(staging.directory, PART_MANIFEST, data)
        staging.finish()
    return TransferDone(
        bytes=size,
        digest=digest(data),
        layout=task.layout,
        moved=moved.bytes,
        backend=moved.backend,
    )


def _planned(
    infos: Sequence[AllocationInfo], stripes: Sequence[str], longest: int
) -> tuple[list[AllocationEntry], list[FilePlan]]:
    """Return the allocations with their extents, and the files, spread over stripe roots."""
    length = shard_length([info.size for info in infos], 1 + len(stripes), longest)
    entries, sizes = place(infos, shard_bytes=length)
    return entries, plan_files(entries, sizes, stripes=spread(sizes, stripes))


def ciphers_of(task: SaveTask) -> Ciphers | None:
    """Return the keys by which a part is to be encrypted; None where it is not."""
    if not task.encrypt:
        return None
    # Every save waits for this import, and few artifacts are encrypted.
    from gms.adapters.encrypted import ciphers_for_save  # noqa: PLC0415

    return ciphers_for_save(task)


def saved_before(root: int, task: SaveTask) -> TransferDone | None:
    """Return the result of the same save when an earlier process has finished it, else None."""
    path = path_of(task)
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
        else:
            with StripeRoots(task.stripe_roots).reading(directory, manifest) as folders:
                check_files(folders, check_part_manifest(manifest))
        drop_notes(directory)
    return TransferDone(bytes=manifest.bytes, digest=digest(data), layout=task.layout)
