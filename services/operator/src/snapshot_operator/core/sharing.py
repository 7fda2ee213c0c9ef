"""Which of the checkpoints of one identity captures, and for which of the others.

In a namespace the checkpoints of one identity that have neither failed nor are being deleted have
one owner, whose artifact is that of them all: the oldest of those that have begun a capture, or
else the oldest of all. Memory may be late, so two may begin side by side; once they see each
other, the one that is not the owner gives its capture up.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec.structs import replace

from snapshot_api.identity import identity_hash as hash_of
from snapshot_api.v1alpha1.checkpoint import (
    DynamoCheckpoint,
    DynamoCheckpointSpec,
    GmsClientSpec,
    GpuMemoryServiceSpec,
)
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.core.owning import serves
from snapshot_operator.core.plan import Reader
from snapshot_shared.errors import Failure


def identity_hash(checkpoint: DynamoCheckpoint) -> str:
    """Return the id that equal identities share."""
    return hash_of(checkpoint.spec.identity)


def identity_keys(checkpoint: DynamoCheckpoint) -> list[str]:
    """Return under which values of the index `identities` a checkpoint is found."""
    if checkpoint.status.phase == "Failed" or checkpoint.metadata.deletion_timestamp:
        return []
    begun, every = _keys(checkpoint)
    return [begun, every] if has_begun(checkpoint) else [every]


def _keys(checkpoint: DynamoCheckpoint) -> tuple[str, str]:
    """Return the values of those of an identity that have begun, and of all of them.

    As they are apart, one more that shares wakes none of the others.
    """
    every = f"{checkpoint.metadata.namespace}/{identity_hash(checkpoint)}"
    return f"{every}/begun", every


def has_begun(checkpoint: DynamoCheckpoint) -> bool:
    """Whether a checkpoint has a worker of its own, or had one."""
    return bool(checkpoint.status.job_name)


def owner_for(reader: Reader, checkpoint: DynamoCheckpoint) -> DynamoCheckpoint | None:
    """Return the other checkpoint that captures for this one; None when it captures itself."""
    for member in _by_rank(reader, checkpoint):
        if member.metadata.uid == checkpoint.metadata.uid:
            return None
        if not _is_spent(reader, member):
            space, name = member.metadata.namespace, member.metadata.name
            found = reader.get("DynamoCheckpoint", space, name, member.metadata.uid)
            return found if isinstance(found, DynamoCheckpoint) else None
    return None


def _by_rank(reader: Reader, checkpoint: DynamoCheckpoint) -> Iterator[DynamoCheckpoint]:
    for key in _keys(checkpoint):
        found = reader.by_index("identities", key)
        yield from sorted((m for m in found if isinstance(m, DynamoCheckpoint)), key=_age)


def _age(checkpoint: DynamoCheckpoint) -> tuple[str, str]:
    return (checkpoint.metadata.creation_timestamp, checkpoint.metadata.name)


def _is_spent(reader: Reader, checkpoint: DynamoCheckpoint) -> bool:
    """Whether what a checkpoint has captured is not there any more, while it stays Ready."""
    status = checkpoint.status
    is_captured = status.phase == "Ready" and not status.shares
    return is_captured and artifact_of(reader, checkpoint) is None


def artifact_of(reader: Reader, checkpoint: DynamoCheckpoint) -> SnapshotContent | None:
    """Return what a Ready checkpoint has captured or shares, unless that goes or is gone."""
    status = checkpoint.status
    if status.phase != "Ready" or not status.content_name:
        return None
    found = reader.get("SnapshotContent", None, status.content_name)
    if not serves(found, checkpoint) or found.metadata.deletion_timestamp:
        return None
    return found


def conflict(checkpoint: DynamoCheckpoint, owner: DynamoCheckpoint) -> Failure | None:
    """Return why a checkpoint cannot share the artifact of the owner; None when it can.

    One that has not begun yet may lose its place to an older one that is not seen yet.
    """
    name, other = checkpoint.metadata.name, owner.metadata.name
    part = _difference(checkpoint, owner)
    if not part or not (has_begun(owner) or owner.status.phase == "Ready"):
        return None
    return Failure(
        reason="IdentityConflict",
        message=f"DynamoCheckpoint {other} has the identity of {name} "
        f"({identity_hash(checkpoint)}), and another {part}",
        values={"checkpoint": name, "owner": other, "field": part},
        next_step=f"make {part} that of {other}, or set them apart in "
        "spec.identity.extraParameters; then delete the checkpoint and apply it again",
    )


def _difference(checkpoint: DynamoCheckpoint, owner: DynamoCheckpoint) -> str:
    """Return the first field in which the workers of two checkpoints differ, or nothing."""
    mine, other = checkpoint.spec, owner.spec
    fields = {
        "spec.job.podTemplateSpec": (mine.job.pod_template_spec, other.job.pod_template_spec),
        "spec.job.targetContainerName": (
            mine.job.target_container_name,
            other.job.target_container_name,
        ),
        "spec.job.driver": (mine.job.driver, other.job.driver),
        "spec.gpuMemoryService": (_memory(mine), _memory(other)),
    }
    return next((name for name, (one, two) in fields.items() if one != two), "")


def _memory(spec: DynamoCheckpointSpec) -> tuple[GpuMemoryServiceSpec, GmsClientSpec | None]:
    """Return how the weights are kept; a saver of which nothing is given is as good as none."""
    found = spec.gpu_memory_service
    return replace(found, checkpoint=None), found.saver
