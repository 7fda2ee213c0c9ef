"""Load one part: read it into the memory of a device, verified, and leave it hidden."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gms.adapters.striping import in_folders
from gms.domain.task_rules import backend_for, check_room, load_request, path_of
from gms.domain.tasks import LoadTask, TransferDone, TransferLeased
from gms.domain.transfer import check_loadable, metadata_of, plan_files
from gms.ports import Advance, Moved
from gms.transfer_child.session import Emit, ProgressMeter, backend_of, leased, mapped
from snapback_client.frames import Access, AllocationSpec
from snapback_client.lease import Lease
from snapshot_shared.artifact import PART_MANIFEST, PartManifest, check_part_manifest
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, digest
from snapshot_shared.errors import ArtifactCorrupt, pods_own
from snapshot_shared.files import open_artifact, open_root, opened, read_bounded
from snapshot_shared.orders import LayoutRef
from snapshot_shared.stripes import StripeRoots

if TYPE_CHECKING:
    from gms.adapters.encrypted import Ciphers


def load(task: LoadTask, emit: Emit) -> TransferDone:
    """Read a part into memory, verified, and leave it hidden under the load token."""
    with (
        opened(open_root(task.root)) as root,
        opened(open_artifact(root, path_of(task))) as directory,
        contextlib.ExitStack() as stack,
    ):
        manifest = read_manifest(root, directory, task)
        layout = check_loadable(manifest, layout_id=task.layout_id, wanted_hash=task.structure_hash)
        allocations, files = layout.allocations, manifest.files
        backend_name = backend_for(task, manifest)
        ciphers = _ciphers_of(task, manifest)
        plans = plan_files(
            allocations,
            [entry.size for entry in files],
            names=[entry.name for entry in files],
            chunk_bytes=[entry.chunk_bytes for entry in files],
            stripes=[entry.stripe or "" for entry in files],
        )
        folders = stack.enter_context(StripeRoots(task.stripe_roots).reading(directory, manifest))
        # The memory server may be of the pod: what it says is nothing about the artifact.
        with pods_own():
            lease = Lease.attach(task.socket_dir, load_request(task))
        with leased(lease):
            check_room(allocations, lease.attached)
            emit(TransferLeased())
            specs = [AllocationSpec(id=a.id, size=a.size, tag=a.tag) for a in allocations]
            with pods_own():
                infos = lease.allocate(specs, wait_s=task.memory_wait_s)
            find = functools.partial(backend_of, task, backend_name, ciphers=ciphers)
            with mapped(lease, infos, Access.RW, find) as (buffers, backend):
                meter = ProgressMeter(manifest.bytes, emit)

                def move(
                    folder: int, indices: Sequence[int], threads: int, advance: Advance
                ) -> Moved:
                    return backend.read_files(
                        folder,
                        [plans[index] for index in indices],
                        [files[index] for index in indices],
                        buffers,
                        threads=threads,
                        advance=advance,
                    )

                moved = in_folders(folders, plans, task.threads, move, meter.advance)
            with pods_own():
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


def _ciphers_of(task: LoadTask, manifest: PartManifest) -> Ciphers | None:
    if not manifest.encryption:
        return None
    # Every restore waits for this import, and few artifacts are encrypted.
    from gms.adapters.encrypted import ciphers_for_load  # noqa: PLC0415

    return ciphers_for_load(task, manifest)


def read_manifest(root: int, directory: int, task: LoadTask) -> PartManifest:
    """Return the manifest that was sealed. Raise ArtifactCorrupt for any other.

    `root` is a descriptor of the artifact root. NotTrusted where the artifact has to be signed.
    """
    if task.require_signature:
        # Every restore waits for this import, and few artifacts are signed.
        from gms.adapters.signed import check_signed  # noqa: PLC0415

        check_signed(root, task)
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
