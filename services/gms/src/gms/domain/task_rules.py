"""What follows from a task: the lock to request, what the session must show, the manifest."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from gms.domain.layout import structure_hash
from gms.domain.tasks import (
    CONTAINER,
    DEFAULT_BACKEND,
    OBJECT,
    LoadTask,
    SaveTask,
    TransferDone,
)
from gms.domain.transfer import check_fits, saved_metadata
from snapback_client.frames import (
    AllocationInfo,
    Attach,
    Attached,
    LockMode,
    MemoryDomain,
    MetadataItem,
)
from snapshot_shared.artifact import (
    AllocationEntry,
    Encryption,
    Facts,
    FileEntry,
    PartManifest,
    SavedLayout,
    SavedObjects,
    part_path,
)
from snapshot_shared.errors import StaleLayout
from snapshot_shared.orders import LayoutRef


def save_request(task: SaveTask) -> Attach:
    """Return the request of a session that reads the fenced layout."""
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
    """Return the request of a session that writes a hidden layout."""
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


def check_fenced(wanted: LayoutRef, attached: Attached) -> None:
    """Raise StaleLayout unless the plan names what is attached."""
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
    """Raise StaleLayout unless what was listed has the structure of the plan."""
    shape = structure_hash([(info.id, info.size, info.tag) for info in infos], metadata)
    if shape != wanted.structure_hash:
        raise StaleLayout(
            "the layout that was listed is not the one that is committed",
            expected=wanted.structure_hash,
            found=shape,
        )


def check_room(allocations: Sequence[AllocationEntry], attached: Attached) -> None:
    """Raise DeviceTooSmall for allocations that can never fit."""
    check_fits(
        [entry.size for entry in allocations],
        granularity=attached.granularity,
        capacity=attached.capacity,
    )


def path_of(task: SaveTask | LoadTask) -> tuple[str, ...]:
    """Return the path of the part of a task below its artifact root."""
    return part_path(task.namespace, task.content_uid, task.generation, task.part)


def stripes_of(task: SaveTask) -> list[str]:
    """Return the names of the stripe roots over which a save spreads its files."""
    return [] if task.backend == OBJECT or task.staged else sorted(task.stripe_roots)


def backend_for(task: LoadTask, manifest: PartManifest) -> str:
    """Return the name of the backend of a load: the save decided where the bytes are."""
    if manifest.objects:
        return OBJECT
    return DEFAULT_BACKEND if task.backend == OBJECT else task.backend


def handed_over(task: LoadTask, size: int) -> TransferDone:
    """Return the end of a load that a container of the pod carries out: it is its word alone."""
    layout = LayoutRef(
        device=task.device,
        incarnation="",
        generation=0,
        layout_id=task.layout_id,
        structure_hash=task.structure_hash,
        bytes=size,
    )
    return TransferDone(
        bytes=size, digest=task.part_digest, layout=layout, moved=size, backend=CONTAINER
    )


def part_manifest(
    task: SaveTask,
    allocations: list[AllocationEntry],
    files: list[FileEntry],
    metadata: Sequence[MetadataItem],
    encryption: Encryption | None = None,
) -> PartManifest:
    """Return the manifest of a part that was written."""
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
        objects=SavedObjects(prefix="/".join(path_of(task)))
        if task.backend == OBJECT
        else msgspec.UNSET,
        encryption=encryption or msgspec.UNSET,
    )
