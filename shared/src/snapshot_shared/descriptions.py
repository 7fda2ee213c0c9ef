"""What the fields of messages and objects mean, for the pages of docs/ and for `kubectl explain`.

A text is a fragment without a full stop; its unit is named unless the name of the field says it.
"""

from __future__ import annotations

MEANINGS = {
    "active_deadline_seconds": (
        "how long after its creation the worker may take to be captured; then its Job is ended"
    ),
    "annotations": "annotations of the pods",
    "artifact": "the committed artifact that is read",
    "artifact_root": "the folder of the artifacts on this node",
    "at": "when, in seconds since the epoch on the sender's clock; for people only",
    "attempt": "fences the order: a higher one always wins",
    "attributes": "facts about the work",
    "boot_id": "the boot of the machine; a new one means that all processes are gone",
    "bytes": "how many bytes it has",
    "capacity_bytes": "the memory of the device",
    "conditions": "how it stands: `Ready`, `Failed` and others, each with a reason and a message",
    "container": "the container that is meant",
    "content_uid": "the SnapshotContent that the capture serves",
    "criu": "the version of CRIU; empty when there is none",
    "deadline": "when the order fails",
    "deadline_s": "the budget; it begins when the receiver accepts",
    "deadline_seconds": "how long after its creation the capture may take",
    "deletion_policy": "what becomes of the artifact when this is deleted",
    "device": "the UUID of the device",
    "devices": "the devices, in the worker's own order",
    "digest": "SHA-256 of the part manifest",
    "done": "bytes done so far",
    "driver": "the process driver",
    "drivers": "the process drivers that this node has",
    "end_ns": "when it ended, in nanoseconds since the epoch",
    "ended_at": "when it was answered",
    "env": "environment variables",
    "env_from_secret": "a Secret of the namespace whose keys become variables, behind the others",
    "envs": (
        "variables: one of a default's name replaces it in place, others follow; "
        "`GMS_SOCKET_DIR` cannot be set"
    ),
    "error": "the reason, when it failed",
    "exit_code": "how the pod ended (`exited`)",
    "exit_codes": "how each container ended, by its name (`exited`)",
    "failure": "why it failed or was refused",
    "fence_token": "names the fence on the devices",
    "final": "the report that ended it",
    "free_bytes": "free space below the artifact root",
    "generation": "the attempt whose directory it is",
    "grace_s": "how long after SIGTERM comes SIGKILL",
    "dump_within_s": "how long the worker waits for its dump; then the agent releases it alone",
    "release_within_s": "how long the worker waits for its release after its dump; then the agent "
    "releases it alone",
    "hold_s": "how long the worker may stay quiesced in all; then the agent releases it alone",
    "image": "the image",
    "image_digest": "the digest of the image that the container was started from",
    "seccomp_profile": "the seccomp profile that the spec of the container's pod names: "
    "`RuntimeDefault`, `Unconfined` or `Localhost/<file>`; empty if it names none",
    "incarnation": "the life of the GMS that holds the layout",
    "index": "its number on this node",
    "kind": "what happened; the last word of the subject",
    "labels": "labels of the pods",
    "layout": "the layout of the device, as the fence found it",
    "layout_id": "names the layout; the same after a restore",
    "leased": "whether the save holds its lease, so that the worker may go on",
    "links": "spans of other traces that this one belongs to",
    "load_token": "names the load, and the layout that it leaves hidden",
    "loader": (
        "the container that loads GPU memory, beside a worker that is restored; refused on "
        "a DynamoCheckpoint, which only saves"
    ),
    "message": "what happened, for people",
    "mount_path": "where it is mounted",
    "mount_propagation": "how mounts are passed between the host and the container",
    "n": "counts the reports of one (order, attempt) from 1",
    "name": "the name",
    "namespace": "the namespace",
    "next_step": "what to do about it",
    "node": "the node",
    "node_name": "the node",
    "not_after": "no start later than this, in seconds since the epoch",
    "obligations": "the verbs of the orders that have to be answered before this is settled",
    "on_failure": "what becomes of the worker when the capture fails",
    "order": "the id: `<verb>-<owner uid>[-<part>]`",
    "ordered_at": "when the order was decided",
    "orders": "the orders of the current attempt, and those that are not answered",
    "ordinal": "the worker's own number of the device",
    "outcome": "how the capture ended",
    "owner": "the uid of the object that the order serves",
    "parent": "an artifact of the same layout: files that did not change are shared",
    "parent_id": "the span above it; empty for the first of a trace",
    "part": "the part: `process` or `gpu-<ordinal>`",
    "part_digest": "SHA-256 of the part manifest, as the root manifest has it",
    "parts": "all staged parts, with their digests",
    "payload": "a copy of the message, as base64",
    "phase": "the phase, for people; the conditions decide",
    "pod": "the pod",
    "policy": "what becomes of the worker after its capture",
    "paused_s": "for how long the worker was paused, in seconds",
    "product": "the model of the device",
    "progress": "the parts that are complete, of all, for people",
    "proven": "what a verified artifact holds: its parts, the vector and the process driver",
    "quarantined": "how many unknown directories it has moved into quarantine",
    "quiesce_s": "how long the worker may take to become quiet",
    "read_only": "whether nothing can be written there",
    "ready_s": "how long to wait for the worker to be ready",
    "reason": "what went wrong, in CamelCase; stable",
    "recursive_read_only": "whether mounts below it are read-only, too",
    "retries": "how many attempts came after the first",
    "retryable": "whether the same may be tried again before any side effect",
    "revision_of": "the name of which this is a revision, for restores of the newest",
    "root_digest": "SHA-256 of the root manifest",
    "saver": "the container that saves GPU memory, beside a worker that is captured",
    "schema": "the version of the schema",
    "schemas": "the versions of orders that the node understands",
    "seconds": "how long it took",
    "sequence": "its place in the stream",
    "service": "the service that sent it",
    "size": "the size of the artifact, for people",
    "slots": "how many workers are captured at a time",
    "source_policy": "what becomes of the worker after a capture that succeeded",
    "span_id": "the span",
    "stall_s": "how long the step waits, in seconds; 0: until its deadline",
    "standby": "start the worker waiting, to be restored",
    "start_ns": "when it began, in nanoseconds since the epoch",
    "started_at": "when the attempt began",
    "step": "the step, one of those of its verb",
    "steps": "how long each step took",
    "structure_hash": "hash of allocations and metadata, not of contents",
    "sub_path": "the path within the volume",
    "sub_path_expr": "the same, with variables of the environment",
    "subject": "the subject it came on",
    "template_digest": "SHA-256 of the pod's spec, which the agent asks for",
    "time": "`at` as RFC 3339, for people; no program reads it",
    "total": "bytes in all",
    "trace_id": "the trace",
    "traceparent": "where it belongs in its trace (W3C)",
    "tries": "how often an order that cleans up was given, this time included",
    "type": "names the message",
    "uid": "the uid; a pod of the same name that came later has another one",
    "unconfirmed": "the hold ran out and the agent let the worker go on alone",
    "unknown": "how many entries of the artifact root belong to no content",
    "verbs": "the verbs of orders that the agent carries out; an older agent names none",
    "unready": "why process drivers of this node cannot be used now",
    "uuid": "the UUID of the device",
    "value": "the value",
    "value_from": "where the value comes from, as in a Pod",
    "values": "the facts involved",
    "vector": "what each part will hold: the plan",
    "verb": "what is to be done",
    "version": "the version of the product",
    "volume_mounts": "mounts, beside the default ones",
    "why": "the reason, for people",
}
"""What fields mean, by name."""

EXACT = {
    "AbortOrder.devices": "the UUIDs of the devices whose fence or load ends",
    "ArtifactRef.content_uid": "the uid of the SnapshotContent that has the files",
    "ArtifactRef.namespace": "the namespace whose folder it is in",
    "ArtifactSource.content_uid": "the uid of the SnapshotContent that made the files",
    "CheckpointJobSpec.backoff_limit": (
        "deprecated, and on Kubernetes ignored: how often a worker that failed is started again"
    ),
    "CheckpointJobSpec.driver": "how the state of the process is captured",
    "CheckpointJobSpec.pod_template_spec": "the pod to start and capture",
    "CheckpointJobSpec.shared_memory": "the tmpfs at /dev/shm; 8Gi without it",
    "CheckpointJobSpec.target_container_name": "the container to capture",
    "CheckpointJobSpec.ttl_seconds_after_finished": (
        "deprecated and ignored: the Job goes with its checkpoint"
    ),
    "ClientEnvVar.name": "the name of the variable",
    "Committed.bytes": "the size of all parts",
    "Committed.parts": "the parts, with their digests",
    "Condition.last_transition_time": "when the status changed last",
    "Condition.message": "what it means, for people, and what to do",
    "Condition.observed_generation": "the generation of the object that this is about",
    "Condition.reason": "why, in CamelCase; stable",
    "Condition.status": "whether it holds",
    "Condition.type": "what this is about",
    "ContentSource.artifact": "an artifact that exists, to be imported",
    "ContentSource.devices": "the devices of the pod, in the worker's own order",
    "ContentSource.memory_server": "whether the pod has a memory server, which says its devices",
    "PrepareOrder.memory_server": "whether the pod has a memory server, which says its devices",
    "ContentSource.namespace": "the namespace of the pod",
    "ContentSource.node_name": "the node of the pod",
    "ContentSource.pod_ref": "the pod and the container that are captured",
    "DropOrder.load_token": "the load; empty: everything that no session holds",
    "DynamoCheckpointSpec.gpu_memory_service": (
        "whether and how the weights are in the GPU memory service; not part of the identity"
    ),
    "DynamoCheckpointSpec.identity": (
        "what makes two checkpoints interchangeable; equal ones share an artifact"
    ),
    "DynamoCheckpointSpec.job": "the worker to start and capture",
    "DynamoCheckpointStatus.bytes": "the size of the artifact",
    "DynamoCheckpointStatus.checkpoint_id": "the hash of the identity, in 16 hex digits",
    "DynamoCheckpointStatus.content_name": "the SnapshotContent that has the artifact",
    "DynamoCheckpointStatus.created_at": "when it became ready",
    "DynamoCheckpointStatus.job_name": "the Job of the worker",
    "DynamoCheckpointStatus.location": "deprecated and never set: where the artifact is stored",
    "DynamoCheckpointStatus.message": "why it waits or failed, for people",
    "DynamoCheckpointStatus.shares": (
        "the checkpoint of the same identity whose artifact this is, if not its own"
    ),
    "DynamoCheckpointStatus.snapshot_name": "the Snapshot of the worker",
    "DynamoCheckpointStatus.storage_type": "deprecated and never set: how the artifact is stored",
    "GmsCheckpointSpec.saver": (
        "what the container that saves GPU memory has beside or instead of its defaults; "
        "empty changes nothing"
    ),
    "GmsClientSpec.command": "the whole argument vector; nothing is put before or behind it",
    "GmsClientSpec.image": "the image; empty for the default one",
    "GpuMemoryServiceSpec.checkpoint": "the containers that save and load",
    "GpuMemoryServiceSpec.device_class_name": "the DeviceClass of the claim for GPUs",
    "GpuMemoryServiceSpec.enabled": "whether the worker has its weights in the GPU memory service",
    "GpuMemoryServiceSpec.extra_client_containers": (
        "other containers of the pod that attach to the service"
    ),
    "GpuMemoryServiceSpec.mode": (
        "whether the service runs in the pod of the worker, or in one of its own"
    ),
    "IdentitySpec.backend_framework": "the inference engine",
    "IdentitySpec.dtype": "the type of the weights",
    "IdentitySpec.dynamo_version": "the version of Dynamo; empty is no part of the hash",
    "IdentitySpec.extra_parameters": "other parameters that make workers differ",
    "IdentitySpec.max_model_len": "the longest context, in tokens",
    "IdentitySpec.model": "the model",
    "IdentitySpec.pipeline_parallel_size": "GPUs over which the layers are spread",
    "IdentitySpec.tensor_parallel_size": "GPUs over which each layer is spread",
    "LayoutRef.generation": "rises with each commit on the device",
    "LoadOrder.bytes": "how many bytes will be read; 0 when unknown",
    "OrderStatus.attempt": "the attempt that it belongs to",
    "OrderStatus.node": "the node that has to do it",
    "OrderStatus.payload": "the order as it is published",
    "OrderStatus.service": "the service that has to do it",
    "OrderStatus.state": "`ordered`, the kind of the last report, or `lost` with its node",
    "PodSource.containers": "the one container to capture",
    "PodSource.name": "the pod, in the namespace of the snapshot",
    "PodSource.uid": "the uid of the pod; one of the same name that came later is refused",
    "Presence.devices": "the devices of the node",
    "Presence.seccomp_profile": "the seccomp profile that the node has for workers of CRIU",
    "Progress.awaits": "what the step waits for, if it waits",
    "Progress.part": "the part that is moved",
    "Report.bytes": "how many bytes were moved",
    "Report.generation": "the generation that was committed or removed",
    "Report.part": "the part that was staged",
    "RestoreTarget.container": "the container to restore into",
    "RestoreTarget.name": "the pod",
    "RunOrder.devices": "the devices that the pod gets",
    "SharedMemorySpec.disabled": "whether there is none",
    "SharedMemorySpec.size": "its size",
    "SnapshotContentSpec.driver": "how the state of the process is captured",
    "SnapshotContentSpec.snapshot_ref": "the Snapshot that it belongs to",
    "SnapshotContentSpec.source": "what is captured or imported, fixed at binding",
    "SnapshotContentStatus.attempt": "the current attempt; it fences all orders and never falls",
    "SnapshotContentStatus.capture": "the state of the capture",
    "SnapshotContentStatus.committed": "the generation that readers may use; set once",
    "SnapshotContentStatus.doubted": (
        "how many verifications had been requested when damage was last found"
    ),
    "SnapshotContentStatus.generations": "the attempts that may have left files",
    "SnapshotContentStatus.captured_seconds": (
        "how long the capture took, from its first order to the sealed artifact, in seconds"
    ),
    "SnapshotContentStatus.paused_seconds": (
        "for how long the worker was paused, in seconds; absent where it ended"
    ),
    "SnapshotContentStatus.readers": "the uids of the SnapshotRestores that read the artifact",
    "SnapshotContentStatus.verifications": "how many verifications were requested",
    "SnapshotRestoreStatus.restored_seconds": (
        "how long the restore took, from its first order to the worker that serves, in seconds"
    ),
    "SnapshotContentStatus.verified": "how many verifications have ended",
    "SnapshotContentStatus.verify_request": (
        "the value of the annotation `nvidia.com/verify` that was obeyed last"
    ),
    "SnapshotRef.name": "the name of the Snapshot",
    "SnapshotRef.namespace": "the namespace of the Snapshot",
    "SnapshotRef.uid": "the uid of the Snapshot",
    "SnapshotRestoreSpec.pod_ref": "the container to restore into",
    "SnapshotRestoreSpec.source": "the Snapshot or DynamoCheckpoint, in the same namespace",
    "SnapshotRestoreStatus.absent_since": (
        "since when no Snapshot or DynamoCheckpoint has the name of the source; unset while one has"
    ),
    "SnapshotRestoreStatus.artifact": "the artifact that is read, fixed when an attempt begins",
    "SnapshotRestoreStatus.attempt": "the current attempt; it fences all orders and never falls",
    "SnapshotRestoreStatus.source_lost": (
        "whether a content that the source led to was gone before this restore could read it"
    ),
    "SnapshotRestoreStatus.capture_traceparent": "the span of the capture of the artifact",
    "SnapshotRestoreStatus.content_name": (
        "the SnapshotContent that is to register this as a reader"
    ),
    "SnapshotRestoreStatus.devices": "the devices of the pod, in the worker's own order",
    "SnapshotRestoreStatus.state": "the state of the restore",
    "SnapshotSource.artifact": "an artifact that was retained, to be imported",
    "SnapshotSource.pod_ref": "the running pod to capture",
    "SnapshotSpec.driver": "how the state of the process is captured",
    "SnapshotSpec.source": "what to capture or import: exactly one of the two",
    "SnapshotStatus.bound_snapshot_content_name": "the SnapshotContent of this snapshot; set once",
    "SnapshotStatus.bytes": "the size of the artifact",
    "SpanRecord.kind": "its role; `producer` and `consumer` are of a message",
    "SpanRecord.name": "a verb or a step",
    "TemplateContainer.name": "the name of the container",
    "TemplateEnvVar.name": "the name of the variable",
    "TemplatePodSpec.containers": (
        "the containers; those fields that are not named here are kept as in a Pod"
    ),
    "TemplatePodSpec.init_containers": "the containers that run before",
    "TemplatePodSpec.volumes": "the volumes",
    "TemplateSkeleton.metadata": "labels and annotations of the pods",
    "TemplateSkeleton.spec": "the spec of the pods, as in a Pod",
    "TemplateVolume.name": "the name of the volume",
    "VolumeMount.name": "the name of a volume of the pod",
}
"""Where a name alone says too little, by struct and field."""


def description(struct: str, field: str) -> str:
    """Return what a field means, by the names in Python. LookupError when nothing describes it."""
    found = EXACT.get(f"{struct}.{field}") or MEANINGS.get(field)
    if found is None:
        raise LookupError(f"describe {struct}.{field} in snapshot_shared/descriptions.py")
    return found
