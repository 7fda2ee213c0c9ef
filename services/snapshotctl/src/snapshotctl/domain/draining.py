"""Which pods a drained node gives up, and the objects by which each goes on elsewhere.

The names of those objects are derived from the pod's uid, so that a drain that is repeated goes on
with what there is.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable
from typing import Any, NamedTuple

from snapshot_api.facts import FINISHED, HOSTNAME_LABEL, Pod
from snapshot_api.meta import TRACEPARENT
from snapshot_api.well_known import (
    CAPTURE_ON_DRAIN,
    GROUP,
    RESTORE_CONTAINER,
    RESTORE_CONTENT,
    RESTORE_DIGEST,
    RESTORE_DRIVER,
    RESTORE_FROM,
    RESTORE_UID,
)
from snapshot_shared.ids import short_hash
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.pod_manifests import MAX_NAME, container

_OF_THE_NODE = ("DaemonSet", "Node")
"""What controls pods that belong to their node, and are there as long as it is."""
_OF_THE_SOURCE = (
    *(RESTORE_CONTENT, RESTORE_DIGEST, RESTORE_UID, TRACEPARENT),
    "kubectl.kubernetes.io/last-applied-configuration",
)
"""Annotations that hold for the drained pod alone."""
_HASH_DIGITS = 5
_DERIVED = re.compile(rf"(.+)-[0-9a-f]{{{_HASH_DIGITS}}}")


class Candidate(NamedTuple):
    """A pod of the node. It is captured, unless there is a reason `why` it is left there."""

    pod: Pod
    why: str = ""
    next_step: str = ""

    @property
    def name(self) -> str:
        """It as people type it, with the namespace where that is not the default."""
        space, name = self.pod.metadata.namespace or "default", self.pod.metadata.name
        return f"pod/{name}" if space == "default" else f"pod/{name} -n {space}"

    @property
    def is_over(self) -> bool:
        """Whether it has ended: by its own capture, or before that was asked for."""
        return self.pod.status.phase in FINISHED


def candidates(pods: Iterable[Pod], node: str) -> list[Candidate]:
    """Return the pods that have to leave a node, by namespace and name.

    Those that belong to the node, have ended without a label, or are being deleted are no concern.
    """
    found = [
        _candidate(pod)
        for pod in pods
        if pod.status.node_name == node
        and pod.metadata.deletion_timestamp is None
        and not any(owner.kind in _OF_THE_NODE for owner in pod.metadata.owner_references)
    ]
    concern = [each for each in found if not (each.is_over and each.why)]
    return sorted(concern, key=lambda each: (each.pod.metadata.namespace, each.pod.metadata.name))


def _candidate(pod: Pod) -> Candidate:
    meta = pod.metadata
    if meta.labels.get(CAPTURE_ON_DRAIN) != "true":
        return Candidate(
            pod,
            f"it has no label {CAPTURE_ON_DRAIN}=true",
            f"label it and drain again, or delete it: {_deletion(pod)}",
        )
    owner = next((each for each in meta.owner_references if each.controller), None)
    if owner is not None:
        return Candidate(
            pod,
            f"{owner.kind} {owner.name} controls it, and would start it again without its state",
            f"end its {owner.kind}, or delete the pod: {_deletion(pod)}",
        )
    try:
        target_of(pod)
    except WrongArguments as error:
        return Candidate(pod, error.message, f"name it in its annotation {RESTORE_CONTAINER}")
    return Candidate(pod)


def _deletion(pod: Pod) -> str:
    space = pod.metadata.namespace or "default"
    where = "" if space == "default" else f" -n {space}"
    return f"snapshotctl delete pod/{pod.metadata.name}{where}"


def target_of(pod: Pod) -> str:
    """Return the container that is captured. WrongArguments where the pod does not say which."""
    names = [each.name for each in pod.spec.containers]
    named = pod.metadata.annotations.get(RESTORE_CONTAINER)
    return container(names, named, f"pod {pod.metadata.name}")


def driver_of(pod: Pod) -> str:
    """Return the process driver: the one that the pod was restored by, or names."""
    return pod.metadata.annotations.get(RESTORE_DRIVER) or "cooperative"


def name_of(pod: Pod) -> str:
    """Return the name of the snapshot of a drained pod, and of the pod that is restored from it."""
    meta = pod.metadata
    # A pod of an earlier drain is called as the snapshot that it comes from.
    derived = _DERIVED.fullmatch(meta.name)
    is_ours = derived is not None and meta.annotations.get(RESTORE_FROM) == meta.name
    base = derived[1] if derived is not None and is_ours else meta.name
    suffix = short_hash("drain", meta.uid, length=_HASH_DIGITS)
    return f"{base[: MAX_NAME - 1 - _HASH_DIGITS].rstrip('-.')}-{suffix}"


def snapshot_of(pod: Pod, within_s: int) -> Document:
    """Return the snapshot of a drained pod, which ends once that is durable.

    Its capture ends within so many seconds, also without us; if it fails, the pod goes on.
    """
    meta = pod.metadata
    source = {"name": meta.name, "uid": meta.uid, "containers": [target_of(pod)]}
    value = {
        "apiVersion": GROUP,
        "kind": "Snapshot",
        "metadata": {"name": name_of(pod), "namespace": meta.namespace},
        "spec": {
            "source": {"podRef": source},
            "sourcePolicy": "Terminate",
            "driver": driver_of(pod),
            "deadlineSeconds": within_s,
        },
    }
    return Document(f"the snapshot of pod {meta.name}", value)


def restored(pod: Pod, manifest: dict[str, Any]) -> Document:
    """Return the pod that goes on elsewhere: as `manifest` says, which is all of the drained pod.

    It has the labels of that, so that services find it, and may run on any other node.
    """
    meta, spec = manifest["metadata"], copy.deepcopy(manifest["spec"])
    for name in ("nodeName", "ephemeralContainers"):
        spec.pop(name, None)
    spec.get("nodeSelector", {}).pop(HOSTNAME_LABEL, None)
    name = name_of(pod)
    before = meta.get("annotations") or {}
    kept = {key: text for key, text in before.items() if key not in _OF_THE_SOURCE}
    value = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": pod.metadata.namespace,
            "labels": meta.get("labels") or {},
            "annotations": {**kept, RESTORE_FROM: name, RESTORE_DRIVER: driver_of(pod)},
        },
        "spec": spec,
    }
    return Document(f"the pod restored from {name}", value)
