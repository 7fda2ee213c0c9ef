"""The request in the annotations of a pod: its source, and whether it can be captured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.well_known import (
    CAPTURABLE,
    RESTORE_CONTAINER,
    RESTORE_CONTENT,
    RESTORE_DIGEST,
    RESTORE_DRIVER,
    RESTORE_FROM,
    RESTORE_POLICY,
    RESTORE_UID,
    WAIT,
)
from snapshot_shared.errors import Failure
from snapshot_shared.orders import Driver


class RestoreRequest(NamedTuple):
    """The annotations of a pod about its restore; what is empty is left open."""

    source: str
    container: str = ""
    uid: str = ""
    content: str = ""
    digest: str = ""
    policy: str = WAIT
    driver: str = ""
    is_capturable: bool = False


def request_in(annotations: Mapping[str, str]) -> RestoreRequest:
    """Return what annotations ask for; without a source it is nothing."""
    return RestoreRequest(
        annotations.get(RESTORE_FROM, ""),
        annotations.get(RESTORE_CONTAINER, ""),
        annotations.get(RESTORE_UID, ""),
        annotations.get(RESTORE_CONTENT, ""),
        annotations.get(RESTORE_DIGEST, ""),
        annotations.get(RESTORE_POLICY) or WAIT,
        annotations.get(RESTORE_DRIVER, ""),
        annotations.get(CAPTURABLE) == "true",
    )


def driver_of(
    sources: Sequence[Snapshot | DynamoCheckpoint], content: SnapshotContent | None
) -> Driver | None:
    """Return the process driver of what was found; None where that is open.

    What an import brings has the driver that its artifact names.
    """
    if content is not None and content.status.committed is not None:
        return content.status.committed.driver
    for source in sources:
        if isinstance(source, DynamoCheckpoint):
            return source.spec.job.driver
        if source.spec.source.artifact is None:
            return source.spec.driver
    return None


def mismatch(
    request: RestoreRequest,
    sources: Sequence[Snapshot | DynamoCheckpoint],
    content: SnapshotContent | None,
) -> Failure | None:
    """Return why what was found is not what was asked for; what is not there yet may be it.

    A checkpoint and its snapshot have one name, so that either may have the uid.
    """
    committed = content.status.committed if content is not None else None
    driver = driver_of(sources, content)
    found = (
        (RESTORE_UID, request.uid, [source.metadata.uid for source in sources]),
        (RESTORE_CONTENT, request.content, [content.metadata.name] if content else []),
        (RESTORE_DIGEST, request.digest, [committed.root_digest] if committed else []),
        (RESTORE_DRIVER, request.driver, [driver] if driver else []),
    )
    for annotation, wanted, there in found:
        if wanted and there and wanted not in there:
            return Failure(
                reason="SourceMismatch",
                # The value found is left out, or a refusal would answer questions about objects.
                message=f"{request.source} is not {wanted}, which {annotation} of the pod names",
                next_step="correct the annotation, or remove it to take what has the name",
                values={"expected": wanted},
            )
    return None
