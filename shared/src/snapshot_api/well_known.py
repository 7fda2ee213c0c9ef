"""Labels, annotations and variables of our group, as people and programs write them."""

from __future__ import annotations

OURS = "nvidia.com"
"""The group of the API that our kinds are in."""

GROUP = f"{OURS}/v1alpha1"
"""The apiVersion of the kinds of snapshot_api.v1alpha1."""

RESTORE_FROM = "nvidia.com/restore-from"
"""Annotation of a Pod: `<snapshot or checkpoint>` in the same namespace to restore from."""

RESTORE_CONTAINER = "nvidia.com/restore-container"
"""Annotation of a Pod: which of its containers is restored or captured; the first without it."""

RESTORE_UID = "nvidia.com/restore-from-uid"
"""Annotation of a Pod: the uid that the snapshot or checkpoint has to have."""

RESTORE_CONTENT = "nvidia.com/restore-content"
"""Annotation of a Pod: the SnapshotContent that the snapshot or checkpoint has to lead to."""

RESTORE_DIGEST = "nvidia.com/restore-digest"
"""Annotation of a Pod: the digest that the root manifest of the artifact has to have."""

RESTORE_DRIVER = "nvidia.com/restore-driver"
"""Annotation of a Pod: the driver that its source is captured with, where that is not there yet."""

CAPTURE_DRIVER = "nvidia.com/capture-driver"
"""Annotation of a Pod in standalone mode: the driver that it will be captured with.

The Job of a checkpoint has it and gives it to its pods.
"""

CAPTURABLE = "nvidia.com/capturable"
"""Annotation of a Pod: `true` has admission add to it what a capture of its worker needs."""

RESTORE_POLICY = "nvidia.com/restore-policy"
"""Annotation of a Pod: what it does in a cluster when its source is not captured yet."""

WAIT, IMMEDIATE = "WaitForCheckpoint", "Immediate"
"""Its values: wait in standby, which is the default, or start cold at once."""

STANDBY_VARIABLES = ("SNAPSHOT_RESTORE_STANDBY", "DYN_SNAPSHOT_RESTORE_STANDBY")
"""Either is 1 for a worker that waits to be restored; images for Dynamo read the second."""

CAPTURE_ON_DRAIN = "nvidia.com/capture-on-drain"
"""Label of a Pod: `true` where it is captured, and restored elsewhere, when its node is drained."""

SNAPSHOT_UID = "nvidia.com/snapshot-uid"
"""Label of a SnapshotContent, which is in no namespace and so has no owner: whose it is."""

POD_SPEC = "nvidia.com/pod-spec"
"""Annotation of a Snapshot: the spec of its pod in JSON, without the values of variables.

The operator sets it before the capture, so that a restore does without the pod. It is empty if the
spec is too long for an annotation.
"""

CHECKPOINT_ID = "nvidia.com/snapshot-checkpoint-id"
"""Label of the Job of a checkpoint, and of its pods: the identity hash."""

ABORT = "nvidia.com/abort"
"""Annotation of a SnapshotContent: who wants its capture to end now."""

VERIFY = "nvidia.com/verify"
"""Annotation of a SnapshotContent: each new value asks for one verification of its artifact."""
