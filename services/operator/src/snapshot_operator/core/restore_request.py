"""What a pod asks for by its annotations: what it is restored from, and which one it has to be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from snapshot_shared.errors import Failure
from snapshot_shared.objects.snapback import (
    RESTORE_CONTAINER,
    RESTORE_CONTENT,
    RESTORE_DIGEST,
    RESTORE_FROM,
    RESTORE_POLICY,
    RESTORE_UID,
    WAIT,
    DynamoCheckpoint,
    Snapshot,
    SnapshotContent,
)


class RestoreRequest(NamedTuple):
    """The annotations of a pod about its restore; what is empty is left open."""

    source: str
    container: str = ""
    uid: str = ""
    content: str = ""
    digest: str = ""
    policy: str = WAIT

    @property
    def is_pinned(self) -> bool:
        """Whether its source has to be a certain one."""
        return bool(self.uid or self.content or self.digest)


def request_in(annotations: Mapping[str, str]) -> RestoreRequest:
    """Return what annotations ask for; without a source it is nothing."""
    return RestoreRequest(
        annotations.get(RESTORE_FROM, ""),
        annotations.get(RESTORE_CONTAINER, ""),
        annotations.get(RESTORE_UID, ""),
        annotations.get(RESTORE_CONTENT, ""),
        annotations.get(RESTORE_DIGEST, ""),
        annotations.get(RESTORE_POLICY) or WAIT,
    )


def mismatch(
    request: RestoreRequest,
    sources: Sequence[Snapshot | DynamoCheckpoint],
    content: SnapshotContent | None,
) -> Failure | None:
    """Return why what was found is not what was asked for; what is not there yet may be it.

    A checkpoint and its snapshot have one name, so that either may have the uid.
    """
    committed = content.status.committed if content is not None else None
    found = (
        (RESTORE_UID, request.uid, [source.metadata.uid for source in sources]),
        (RESTORE_CONTENT, request.content, [content.metadata.name] if content else []),
        (RESTORE_DIGEST, request.digest, [committed.root_digest] if committed else []),
    )
    for annotation, wanted, there in found:
        if wanted and there and wanted not in there:
            return Failure(
                reason="SourceMismatch",
                message=f"{request.source} is {' and '.join(there)}, and {annotation} of the pod "
                f"names {wanted}",
                next_step="correct the annotation, or remove it to take what has the name",
                values={"expected": wanted, "found": there[0]},
            )
    return None
