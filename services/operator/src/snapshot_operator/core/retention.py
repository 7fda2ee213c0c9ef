"""Decides which captured artifacts are deleted when a namespace holds too many of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import msgspec

from snapshot_api.facts import FINISHED, Pod
from snapshot_api.kinds import AnyObject
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_operator.core import capture, quarantine
from snapshot_operator.core.conditions import seconds
from snapshot_operator.core.content import content_behind
from snapshot_operator.core.owning import owned_by
from snapshot_operator.core.restore import source_of
from snapshot_operator.core.sharing import identity_hash
from snapshot_shared.transitions import RESTORE
from snapshot_shared.units import counted, sizes

DAY_S = 86400.0


class Limits(msgspec.Struct, frozen=True):
    """What a namespace may keep: artifacts, their age in days, their bytes. None is no limit."""

    count: int | None = None
    days: float | None = None
    bytes: int | None = None

    @property
    def is_off(self) -> bool:
        """Whether there is no limit at all."""
        return self == Limits()


class Holdings(NamedTuple):
    """All that the decision looks at, of all namespaces."""

    checkpoints: Sequence[DynamoCheckpoint]
    snapshots: Sequence[Snapshot]
    contents: Sequence[SnapshotContent]
    pods: Sequence[Pod]
    restores: Sequence[SnapshotRestore] = ()

    @classmethod
    def of(cls, every: Callable[[str], Sequence[AnyObject]]) -> Holdings:
        """Return what there is; `every` returns all objects of a kind."""
        return cls(
            [v for v in every("DynamoCheckpoint") if isinstance(v, DynamoCheckpoint)],
            [v for v in every("Snapshot") if isinstance(v, Snapshot)],
            [v for v in every("SnapshotContent") if isinstance(v, SnapshotContent)],
            [v for v in every("Pod") if isinstance(v, Pod)],
            [v for v in every("SnapshotRestore") if isinstance(v, SnapshotRestore)],
        )


class Decision(NamedTuple):
    """Whether an artifact goes now with the object that stands for it, and why, or why it stays."""

    value: DynamoCheckpoint | Snapshot
    content: SnapshotContent
    goes: bool
    why: str


class _Artifact(NamedTuple):
    """A captured artifact, who stands for it, and what it is interchangeable with.

    `names` are what a pod may name to be restored from it: its own, and those that share it.
    """

    value: DynamoCheckpoint | Snapshot
    snapshot: Snapshot
    content: SnapshotContent
    bytes: int
    identity: str
    names: frozenset[str]

    @property
    def namespace(self) -> str:
        return self.snapshot.metadata.namespace or "default"

    @property
    def age_key(self) -> tuple[str, str]:
        return (self.content.metadata.creation_timestamp, self.content.metadata.name)


def judged(holdings: Holdings, limits: Limits, now: float) -> list[Decision]:
    """Judge every captured artifact, the oldest first; `now` is seconds since the epoch.

    What is needed or may be needed stays, whatever the limits are, and counts: what has readers,
    is under way, in quarantine, asked for by a pod, to be retained, the newest usable one of its
    identity, and a checkpoint whose worker still runs, for it would end with the checkpoint.
    """
    found = sorted(_artifacts(holdings), key=lambda artifact: artifact.age_key)
    ended = {r.spec.pod_ref.uid for r in holdings.restores if r.status.state in RESTORE.terminal()}
    running = [pod for pod in holdings.pods if pod.status.phase not in FINISHED]
    asked = {
        (pod.metadata.namespace, source_of(pod))
        for pod in running
        if source_of(pod) and pod.metadata.uid not in ended
    }
    pods = _Pods(frozenset(pod.metadata.uid for pod in running), frozenset(asked))
    verdicts: list[Decision] = []
    for namespace in dict.fromkeys(artifact.namespace for artifact in found):
        here = [artifact for artifact in found if artifact.namespace == namespace]
        verdicts += _of_namespace(here, pods, limits, now)
    return verdicts


class _Pods(NamedTuple):
    """The uids of pods that have not ended, and what those name that still wait for a restore."""

    running: frozenset[str]
    asked: frozenset[tuple[str | None, str]]


def _of_namespace(
    here: Sequence[_Artifact], pods: _Pods, limits: Limits, now: float
) -> list[Decision]:
    count, size = len(here), sum(artifact.bytes for artifact in here)
    newest = {a.identity: a.content.metadata.uid for a in here if _is_usable(a)}
    verdicts: list[Decision] = []
    for artifact in here:
        why = _excess(artifact, count, size, limits, now)
        is_newest = newest.get(artifact.identity) == artifact.content.metadata.uid
        need = "it is the newest usable one of its identity" if is_newest else ""
        stays = need or _need(artifact, pods) or (not why and "it is within the limits")
        if stays:
            verdicts.append(Decision(artifact.value, artifact.content, goes=False, why=stays))
            continue
        verdicts.append(Decision(artifact.value, artifact.content, goes=True, why=why))
        count, size = count - 1, size - artifact.bytes
    return verdicts


def _excess(artifact: _Artifact, count: int, size: int, limits: Limits, now: float) -> str:
    age_days = (now - seconds(artifact.content.metadata.creation_timestamp)) / DAY_S
    if limits.days is not None and age_days > limits.days:
        return f"it is {age_days:.1f} days old, the limit is {limits.days:g}"
    if limits.count is not None and count > limits.count:
        return f"the namespace holds {counted(count, 'artifact')}, the limit is {limits.count}"
    if limits.bytes is not None and size > limits.bytes:
        held, limit = sizes(size, limits.bytes)
        return f"the namespace holds {held}, the limit is {limit}"
    return ""


def _artifacts(holdings: Holdings) -> Iterable[_Artifact]:
    contents = {content.metadata.name: content for content in holdings.contents}
    checkpoints = {
        (checkpoint.metadata.namespace, checkpoint.metadata.name): checkpoint
        for checkpoint in holdings.checkpoints
    }
    # A status of another namespace may name any content.
    sharers: dict[tuple[str | None, str], set[str]] = {}
    for checkpoint in holdings.checkpoints:
        if checkpoint.status.shares:
            shared = (checkpoint.metadata.namespace, checkpoint.status.content_name)
            sharers.setdefault(shared, set()).add(checkpoint.metadata.name)
    for snapshot in holdings.snapshots:
        content = content_behind(lambda _kind, _space, name: contents.get(name), snapshot)
        committed = content.status.committed if content is not None else None
        if content is None or committed is None or _is_going(snapshot, content):
            continue
        shared = (snapshot.metadata.namespace, content.metadata.name)
        names = frozenset({snapshot.metadata.name, *sharers.get(shared, ())})
        owner = checkpoints.get((snapshot.metadata.namespace, snapshot.metadata.name))
        if owner is None or not owned_by(snapshot, owner):
            source = _source_of(snapshot)
            yield _Artifact(snapshot, snapshot, content, committed.bytes, source, names)
        elif not owner.metadata.deletion_timestamp:
            identity = identity_hash(owner)
            yield _Artifact(owner, snapshot, content, committed.bytes, identity, names)


def _source_of(snapshot: Snapshot) -> str:
    """Return what artifacts that were taken by name are interchangeable with."""
    source = snapshot.spec.source
    if snapshot.spec.revision_of is not None:
        return f"revision/{snapshot.spec.revision_of}"
    if source.pod_ref is not None:
        return f"pod/{source.pod_ref.name}"
    return f"artifact/{source.artifact.content_uid if source.artifact else ''}"


def _is_going(snapshot: Snapshot, content: SnapshotContent) -> bool:
    return bool(snapshot.metadata.deletion_timestamp or content.metadata.deletion_timestamp)


def _is_usable(artifact: _Artifact) -> bool:
    return not quarantine.is_quarantined(artifact.content)


def _need(artifact: _Artifact, pods: _Pods) -> str:
    """Return who needs an artifact, or nothing."""
    content, status = artifact.content, artifact.content.status
    is_under_way = not capture.is_settled(content) or status.verifications > status.verified
    pod = content.spec.source.pod_ref
    has_worker = pod is not None and pod.uid in pods.running
    needs = {
        f"it is being restored by {counted(len(status.readers), 'pod')}": bool(status.readers),
        "its capture or a verification is under way": is_under_way,
        "it is in quarantine": quarantine.is_quarantined(content),
        "its deletionPolicy is Retain": content.spec.deletion_policy == "Retain",
        "a pod asks to be restored from it": any(
            (artifact.namespace, name) in pods.asked for name in artifact.names
        ),
        "its worker runs, and would end with the checkpoint": has_worker
        and isinstance(artifact.value, DynamoCheckpoint),
    }
    return next((why for why, holds in needs.items() if holds), "")
