"""Decides which captured artifacts are let go when a namespace holds too many of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec

from snapshot_operator.domain import capture, quarantine
from snapshot_operator.domain.pods import FINISHED, restore_source
from snapshot_operator.domain.requests import identity_hash, owned_by, seconds
from snapshot_shared.objects import DynamoCheckpoint, Pod, Snapshot, SnapshotContent
from snapshot_shared.transitions import Capture, Restore

DAY_S = 86400.0


class Limits(msgspec.Struct, frozen=True):
    """What a namespace may keep: artifacts, their age in days, their bytes. None is no limit."""

    count: int | None = None
    days: float | None = None
    bytes: int | None = None

    @property
    def is_off(self) -> bool:
        """Say whether there is no limit at all."""
        return self == Limits()


class Holdings(NamedTuple):
    """All that the decision looks at, of all namespaces."""

    checkpoints: Sequence[DynamoCheckpoint]
    snapshots: Sequence[Snapshot]
    contents: Sequence[SnapshotContent]
    pods: Sequence[Pod]


class Verdict(NamedTuple):
    """Whether an artifact goes now with the object that stands for it, and why, or why it stays."""

    value: DynamoCheckpoint | Snapshot
    content: SnapshotContent
    goes: bool
    why: str


class _Artifact(NamedTuple):
    """A captured artifact, who stands for it, and what it is interchangeable with."""

    value: DynamoCheckpoint | Snapshot
    snapshot: Snapshot
    content: SnapshotContent
    identity: str

    @property
    def namespace(self) -> str:
        return self.snapshot.metadata.namespace or "default"

    @property
    def bytes(self) -> int:
        committed = self.content.status.committed
        return committed.bytes if committed is not None else 0

    @property
    def age_key(self) -> tuple[str, str]:
        return (self.content.metadata.creation_timestamp, self.content.metadata.name)


def judged(holdings: Holdings, limits: Limits, now: float) -> list[Verdict]:
    """Judge every captured artifact, the oldest first; `now` is seconds since the epoch.

    What somebody needs or may need stays, whatever the limits say, and counts: what has readers,
    is under way, in quarantine, asked for by a pod, to be retained, the newest usable one of its
    identity, and a checkpoint whose worker still runs, for it would end with the checkpoint.
    """
    found = sorted(_artifacts(holdings), key=lambda artifact: artifact.age_key)
    verdicts: list[Verdict] = []
    for namespace in dict.fromkeys(artifact.namespace for artifact in found):
        here = [artifact for artifact in found if artifact.namespace == namespace]
        verdicts += _of_namespace(here, holdings.pods, limits, now)
    return verdicts


def _of_namespace(
    here: Sequence[_Artifact], pods: Sequence[Pod], limits: Limits, now: float
) -> list[Verdict]:
    count, size = len(here), sum(artifact.bytes for artifact in here)
    newest = {a.identity: a.content.metadata.uid for a in here if _is_usable(a)}
    verdicts: list[Verdict] = []
    for artifact in here:
        why = _excess(artifact, count, size, limits, now)
        is_newest = newest.get(artifact.identity) == artifact.content.metadata.uid
        need = "it is the newest usable one of its identity" if is_newest else ""
        stays = need or _need(artifact, pods) or (not why and "it is within the limits")
        if stays:
            verdicts.append(Verdict(artifact.value, artifact.content, goes=False, why=stays))
            continue
        verdicts.append(Verdict(artifact.value, artifact.content, goes=True, why=why))
        count, size = count - 1, size - artifact.bytes
    return verdicts


def _excess(artifact: _Artifact, count: int, size: int, limits: Limits, now: float) -> str:
    age_days = (now - seconds(artifact.content.metadata.creation_timestamp)) / DAY_S
    if limits.days is not None and age_days > limits.days:
        return f"it is {age_days:.1f} days old, the limit is {limits.days:g}"
    if limits.count is not None and count > limits.count:
        return f"the namespace holds {count} artifacts, the limit is {limits.count}"
    if limits.bytes is not None and size > limits.bytes:
        return f"the namespace holds {size} bytes, the limit is {limits.bytes}"
    return ""


def _artifacts(holdings: Holdings) -> Iterable[_Artifact]:
    contents = {content.metadata.name: content for content in holdings.contents}
    checkpoints = {
        (checkpoint.metadata.namespace, checkpoint.metadata.name): checkpoint
        for checkpoint in holdings.checkpoints
    }
    for snapshot in holdings.snapshots:
        content = contents.get(snapshot.status.bound_snapshot_content_name or "")
        if content is None or not _is_kept(snapshot, content):
            continue
        owner = checkpoints.get((snapshot.metadata.namespace, snapshot.metadata.name))
        if owner is None or not owned_by(snapshot, owner):
            identity = f"pod/{snapshot.spec.source.pod_ref.name}"
            yield _Artifact(snapshot, snapshot, content, identity)
        elif not owner.metadata.deletion_timestamp:
            yield _Artifact(owner, snapshot, content, identity_hash(owner))


def _is_kept(snapshot: Snapshot, content: SnapshotContent) -> bool:
    is_going = snapshot.metadata.deletion_timestamp or content.metadata.deletion_timestamp
    return content.status.capture is Capture.READY and not is_going


def _is_usable(artifact: _Artifact) -> bool:
    return not quarantine.is_quarantined(artifact.content)


def _need(artifact: _Artifact, pods: Sequence[Pod]) -> str:
    """Say who needs an artifact, or nothing."""
    content, status = artifact.content, artifact.content.status
    names = {artifact.snapshot.metadata.name, artifact.value.metadata.name}
    is_under_way = not capture.is_settled(content) or status.verifications > status.verified
    asking = any(_asks_for(pod, artifact.namespace, names) for pod in pods)
    working = isinstance(artifact.value, DynamoCheckpoint) and _has_worker(content, pods)
    needs = {
        f"it is being restored by {len(status.readers)} pods": bool(status.readers),
        "its capture or a verification is under way": is_under_way,
        "it is in quarantine": quarantine.is_quarantined(content),
        "its deletionPolicy is Retain": content.spec.deletion_policy == "Retain",
        "a pod asks to be restored from it": asking,
        "its worker runs, and would end with the checkpoint": working,
    }
    return next((why for why, holds in needs.items() if holds), "")


def _asks_for(pod: Pod, namespace: str, names: set[str]) -> bool:
    restore = pod.status.restore
    is_over = restore is not None and restore.state in (Restore.RESTORED, Restore.FAILED)
    is_here = pod.metadata.namespace == namespace and restore_source(pod) in names
    return is_here and not is_over and pod.status.phase not in FINISHED


def _has_worker(content: SnapshotContent, pods: Sequence[Pod]) -> bool:
    uid = content.spec.source.pod_ref.uid
    return any(pod.metadata.uid == uid and pod.status.phase not in FINISHED for pod in pods)
