"""What every reason means, where it comes from, and what to do: one table for people.

A reason is the CamelCase word of an error, a condition or a report. `snapshotctl explain REASON`
and docs/troubleshooting.md show what stands here; a test compares it with the sources.
"""

from __future__ import annotations

from typing import NamedTuple


class Reason(NamedTuple):
    """One reason in plain words. `fix` names the command to run, between backquotes."""

    meaning: str
    cause: str
    fix: str


SECTIONS: dict[str, dict[str, Reason]] = {
    "What is well": {
        "AgentPresent": Reason(
            "The agent of this node says every 10 s that it is there.",
            "Its presence was read from the bucket `snap_nodes`.",
            "Nothing is to be done; `snapshotctl nodes` says when it was last seen.",
        ),
        "Captured": Reason(
            "The artifact is committed and may be restored.",
            "All parts were staged and sealed, and the store holds the digest of the root "
            "manifest.",
            "Restore it: `snapshotctl restore NAME`.",
        ),
        "Completed": Reason(
            "The containers of the pod have ended with exit code 0.",
            "The process came to its end, or it was ended after its capture, as the policy "
            "`Terminate` wants it.",
            "Nothing is to be done; `snapshotctl delete pod NAME` removes the record.",
        ),
        "DigestsMatch": Reason(
            "Every byte of the artifact was read and is what was written.",
            "A verification has ended and found no damage; a quarantine is lifted by it.",
            "Nothing is to be done.",
        ),
        "NoUnknownArtifacts": Reason(
            "All that lies below the artifact root of the node belongs to a SnapshotContent again.",
            "What had no owner was removed or has one.",
            "Nothing is to be done.",
        ),
        "Restored": Reason(
            "The worker serves again from a captured state.",
            "Its GPU memory was loaded and verified, and it said itself that it goes on.",
            "Nothing is to be done; `snapshotctl trace pod/NAME` shows where the time went.",
        ),
        "RestoreSucceeded": Reason(
            "The restore into this pod has ended well.",
            "The last order of the restore was answered `restored`.",
            "Nothing is to be done.",
        ),
        "Scheduled": Reason(
            "A node and devices were chosen for the pod.",
            "The node admits the pod, is ready and has enough devices free.",
            "Nothing is to be done.",
        ),
        "WorkerReady": Reason(
            "The worker has said that a capture may begin.",
            "The file `ready-for-snapshot` stands in its control directory.",
            "Capture it: `snapshotctl checkpoint POD`.",
        ),
    },
    "What is under way or waits": {
        "BusFull": Reason(
            "Nothing new begins, because the stream of orders is more than 80 % full.",
            "Many orders are unanswered: nodes are slow, or agents do not run.",
            "Look for agents that are not there: `snapshotctl nodes`. It goes on by itself.",
        ),
        "Capturing": Reason(
            "The capture is under way.",
            "Orders of this attempt are with the node of the worker.",
            "Wait, and watch the parts: `snapshotctl watch NAME`.",
        ),
        "DriverUnavailable": Reason(
            "The capture waits because its node cannot use the process driver that it names.",
            "The container `helper` does not run or answer there, CRIU did not pass its self-test, "
            "or the driver of the GPUs is missing or too old; the message says which.",
            "Do what the message says, and see it again: `snapshotctl doctor`. It goes on by "
            "itself; `snapshotctl abort NAME` if it should not wait.",
        ),
        "Importing": Reason(
            "A node reads all bytes of the artifact that the Snapshot names.",
            "Nothing is restored from what was not compared with its digests once.",
            "Wait, and watch it: `snapshotctl watch NAME`.",
        ),
        "NoAgentOnNode": Reason(
            "The worker's pod is on a node without a snapshot agent, or no node has one.",
            "The template names a node (`nodeName`) where no agent runs, or no Node has the label "
            '`nvidia.com/snapback-agent: "true"`, which the operator keeps.',
            "See which agents are there: `snapshotctl nodes`; start that of the node. It goes on "
            "by itself.",
        ),
        "NoNode": Reason(
            "No node is ready to read or to remove the artifact.",
            "Every node is without presence; any ready node would do.",
            "See which are there: `snapshotctl nodes`, and start an agent.",
        ),
        "NoSuchNode": Reason(
            "No node matches what the pod asks for.",
            "Its `nodeName` or `nodeSelector` names a node that has never had an agent.",
            "Compare with `snapshotctl nodes`; correct the pod, or start the agent of that node.",
        ),
        "PodPending": Reason(
            "The worker's pod is being created.",
            "The Job of the checkpoint has just begun.",
            "Wait; `snapshotctl watch NAME` shows what follows.",
        ),
        "ReadersRegistered": Reason(
            "The artifact is to be deleted, but restores still read it.",
            "The uids of those SnapshotRestores stand in `status.readers` of the content; "
            "`snapshotctl describe snapcontent NAME` names their pods.",
            "It goes when they are done; to hurry, delete the pods: `snapshotctl delete pod NAME`.",
        ),
        "Retrying": Reason(
            "An attempt failed and left the worker as it was, and another one begins.",
            "The failure was retryable. A capture has four attempts at most, a restore three, with "
            "rests between them; an attempt that ends with a service does not count for a capture.",
            "Wait; `snapshotctl explain NAME` says what the attempt before failed of.",
        ),
        "Restoring": Reason(
            "The restore into the pod is under way.",
            "Orders of this attempt are with the node of the pod.",
            "Wait, and watch the parts: `snapshotctl watch pod/NAME`.",
        ),
        "SharesIdentity": Reason(
            "The checkpoint starts no worker: another one of its identity is being captured.",
            "In a namespace the oldest checkpoint of an identity captures for all; `spec.identity` "
            "says what the others may share.",
            "Wait; it is Ready when that one is, and captures itself when that one fails or is "
            "deleted. `snapshotctl identity -f FILE` prints the identity of a manifest.",
        ),
        "SourcePodNotFound": Reason(
            "There is no pod of the name that the snapshot gives.",
            "It is not applied yet, the name is misspelt, or the pod is in another namespace. The "
            "snapshot waits for it until `spec.deadlineSeconds` are over, and fails then.",
            "List the pods: `snapshotctl get pods -A`; apply the pod, or name a running one.",
        ),
        "Starting": Reason(
            "The containers of the pod are being started.",
            "The order `run` is with the agent of the node.",
            "Wait; if it lasts, read the agent's log: `snapshotctl explain pod/NAME`.",
        ),
        "Unschedulable": Reason(
            "The pod waits for a node or for free devices.",
            "All nodes that it admits are not ready, or other pods hold their devices.",
            "See who holds them: `snapshotctl get pods -A`; delete a pod, or add a node.",
        ),
        "Verifying": Reason(
            "A node reads every byte of the artifact.",
            "A user ran `snapshotctl verify`, or damage was found while it was read.",
            "Wait: `snapshotctl verify NAME` joins it and ends with the result.",
        ),
        "WaitingForCapture": Reason(
            "An older capture of the same container is not over yet.",
            "A container is captured for one snapshot at a time.",
            "See what the other one waits for: `snapshotctl get snapshotcontents`.",
        ),
        "WaitingForMemoryServer": Reason(
            "The pod has been placed, and its memory server has not started yet.",
            "Its image is pulled, or it cannot open the devices of its claim.",
            "Wait; `kubectl logs POD --container gms-server` shows what it does.",
        ),
        "WaitingForPod": Reason(
            "The pod to capture is not ready for a snapshot yet, or the pod to restore not placed.",
            "The worker has not written `ready-for-snapshot` into its control directory; or no "
            "node with free devices was found.",
            "See how it stands: `snapshotctl explain pod/NAME`.",
        ),
        "WaitingForSnapshot": Reason(
            "The pod waits for the snapshot that it shall be restored from.",
            "`nvidia.com/restore-from` names a snapshot or checkpoint that is not there, not "
            "captured yet, or being deleted.",
            "List the captures: `snapshotctl artifacts ls -A`.",
        ),
        "WorkerEnding": Reason(
            "The checkpoint waits until a worker of its own has ended, to start another one.",
            "It had begun beside an older checkpoint of its identity, gave its worker up for that, "
            "and has to capture by itself after all, as that one has failed or is deleted.",
            "Wait; `snapshotctl get pods` shows the worker.",
        ),
        "WorkerNotReady": Reason(
            "The worker has run for 5 minutes and is still not ready for a snapshot.",
            "It loads weights or warms up for so long, hangs, or never writes "
            "`ready-for-snapshot` into the folder that `$SNAPSHOT_CONTROL_DIR` names.",
            "Read its log (`snapshotctl explain pod/NAME` shows the last lines); have it write "
            "that file once it is warm. The limit is `spec.job.activeDeadlineSeconds`.",
        ),
        "WorkerStarting": Reason(
            "The worker runs and is not ready for a snapshot yet.",
            "It loads weights or warms up, and has not written `ready-for-snapshot`.",
            "Wait; `snapshotctl explain pod/NAME` shows the last lines that it wrote. The limit is "
            "`spec.job.activeDeadlineSeconds`.",
        ),
    },
    "A worker cannot be captured": {
        "AgentLost": Reason(
            "The guard gave up the capture, because the agent of the node was gone.",
            "The agent crashed or was stopped for more than 5 s while it held the worker. The "
            "worker was thawed and serves.",
            "Read the agent's log (`snapshotctl explain NAME` shows its last lines), then delete "
            "the snapshot and take a new one.",
        ),
        "AgentRestarted": Reason(
            "The agent ended within a step that may be undone, and it was undone.",
            "The agent crashed or was restarted during the order.",
            "It is tried again by itself where nothing was frozen; else take a new snapshot: "
            "`snapshotctl checkpoint POD`.",
        ),
        "AgentSilent": Reason(
            "The agent gave no sign of life for five seconds, and the guard let the worker go.",
            "The agent was stopped, or its node was too busy to run it.",
            "The capture is tried again by itself; if it fails again, take a new snapshot: "
            "`snapshotctl checkpoint POD`.",
        ),
        "CheckpointContainerFailed": Reason(
            "A container of the pod failed while others ran, before its worker was captured or "
            "restored.",
            "It ended with the exit code that the message has, and is not started again. The other "
            "containers of a pod that was started for a checkpoint with `sourcePolicy: Terminate` "
            "are ended; those of any other pod go on.",
            "Read its log: `kubectl logs POD --container NAME`; correct it, and apply it again.",
        ),
        "ControlFolderBroken": Reason(
            "The control directory of the worker, or the folder of its `snapback-init`, is not as "
            "it was made.",
            "The worker, or another process of its pod, replaced or removed the directory.",
            "Correct the pod: the worker may write into the directory, not replace it, and no "
            "container may mount the volumes `snapshot-control` and `snapback-init` without a "
            "subPath. Then start it again, and take a new snapshot or restore it again.",
        ),
        "HoldDeadline": Reason(
            "The next order of the capture did not come in time, and the agent let the worker go "
            "on.",
            "The operator or NATS was away for four seconds, or the agent was stopped for five. If "
            "the dump had not begun, the capture is tried again.",
            "Look whether the operator answers: `snapshotctl nodes`; then take a new snapshot.",
        ),
        "IdentityConflict": Reason(
            "Another checkpoint of the namespace has the same identity and another worker.",
            "Checkpoints of one identity share one artifact, so `spec.job.podTemplateSpec`, "
            "`spec.job.targetContainerName` and `spec.gpuMemoryService` have to be equal. The "
            "message names the checkpoint and the field.",
            "Make the field equal, or distinguish the two by `spec.identity.extraParameters`; then "
            "`snapshotctl delete dynamocheckpoint NAME`, and apply it again.",
        ),
        "InvalidTargetContainer": Reason(
            "The pod has no container of that name.",
            "`spec.source.podRef.containers` or `--container` names another one.",
            "See the names: `snapshotctl describe pod NAME`, and name one of them.",
        ),
        "JobDeleted": Reason(
            "The Job of the checkpoint was deleted before the capture was done.",
            "A user deleted the object.",
            "`snapshotctl delete dynamocheckpoint NAME`, then apply it again.",
        ),
        "JobNameConflict": Reason(
            "A Job of the checkpoint's name exists and belongs to something else.",
            "The checkpoint would start its worker by a Job of its own name.",
            "Rename the checkpoint, or `snapshotctl delete job NAME`.",
        ),
        "NotEligible": Reason(
            "The object or the worker is not in a state in which this can be done.",
            "For example: nothing is captured yet, the worker is being captured already, it was "
            "started on its own and does not wait for a restore, or a pool is used in a fork.",
            "The message names the state; see all of it with `snapshotctl describe KIND NAME`.",
        ),
        "PlanMismatch": Reason(
            "The agent prepared other parts than the pod's devices need.",
            "Agent and operator differ in their version, or the pod's devices changed.",
            "Compare the versions: `snapshotctl get nodes`; upgrade the older program.",
        ),
        "PodDeleted": Reason(
            "The pod of the Job is gone.",
            "A user deleted it before the Job had ended.",
            "Delete the checkpoint and apply it again: `snapshotctl delete dynamocheckpoint NAME`.",
        ),
        "PodNameConflict": Reason(
            "A pod of the name that the Job gives exists and belongs to something else.",
            "The name follows from the Job's uid, so that pod was created by a user.",
            "`snapshotctl delete pod NAME`, then apply the checkpoint again.",
        ),
        "PodFailed": Reason(
            "The pod of the Job has failed, and says no more precisely why.",
            "The container ended, or its node was lost.",
            "Look at the pod: `snapshotctl explain pod/NAME`.",
        ),
        "SnapshotContentDeleted": Reason(
            "The content of the snapshot was deleted.",
            "A user deleted the SnapshotContent; the artifact went with it.",
            "Delete the snapshot and take a new one: `snapshotctl delete snapshot NAME`.",
        ),
        "SnapshotContentNameConflict": Reason(
            "A content of the snapshot's name exists and belongs to something else.",
            "The name follows from the snapshot's uid, so that content was created by a user.",
            "Delete the snapshot and take a new one: `snapshotctl delete snapshot NAME`.",
        ),
        "SnapshotDeleted": Reason(
            "The Snapshot of the checkpoint was deleted before the capture was done.",
            "A user deleted the object.",
            "`snapshotctl delete dynamocheckpoint NAME`, then apply it again.",
        ),
        "SnapshotNameConflict": Reason(
            "A Snapshot of the checkpoint's name exists and belongs to something else.",
            "The checkpoint would capture its worker by a Snapshot of its own name.",
            "Rename the checkpoint, or `snapshotctl delete snapshot NAME`.",
        ),
        "NodeBusy": Reason(
            "The node has as many captures under way as it may, so the worker was left as it was.",
            "`SNAPBACK_SLOTS` of the agent bounds how many workers are written at a time.",
            "Wait: the capture is tried again until its deadline. Raise `SNAPBACK_SLOTS` if the "
            "disks of the node can take more.",
        ),
        "NoGuard": Reason(
            "No guard could be started, so the worker was left as it was.",
            "The container `guards` of the agent's pod does not run or does not answer.",
            "The capture is tried again until its deadline. Read the log of the guards: "
            "`kubectl logs --namespace NAMESPACE --selector app.kubernetes.io/component=node "
            "--container guards --prefix`.",
        ),
        "SourceExited": Reason(
            "The worker ended while it was needed.",
            "It crashed or was killed during its capture or its restore; the message has the "
            "exit code where one is known.",
            "Read what it printed: `snapshotctl explain pod/NAME`; start it again.",
        ),
        "WorkerRefused": Reason(
            "The worker says that it cannot be captured; it goes on.",
            "Its `on_quiesce`, or the hook `--quiesce` of `snapback-run`, failed; the message has "
            "the error.",
            "Read what it printed: `snapshotctl logs POD`; mend the worker, then take a new "
            "capture: `snapshotctl checkpoint POD`.",
        ),
        "SourcePodGone": Reason(
            "The pod to capture has ended.",
            "It finished, failed, or is being deleted.",
            "Start the worker again, then take a snapshot of that pod: "
            "`snapshotctl checkpoint POD`.",
        ),
        "StalePodReference": Reason(
            "The pod of that name is not the one that was meant.",
            "It was deleted and made again since, so its uid differs, or its kubelet knows the "
            "uid as that of another pod.",
            "Take a snapshot of the pod that runs now: `snapshotctl checkpoint POD`.",
        ),
    },
    "A restore is refused or fails": {
        "DeviceTooSmall": Reason(
            "The artifact can never fit on the GPU of the target.",
            "A GPU of the node has less memory than one GPU of the source used; both numbers "
            "stand in the message.",
            "Choose a node with larger GPUs (`snapshotctl nodes`), and make the pod again with "
            "its nodeSelector.",
        ),
        "Incompatible": Reason(
            "The target cannot take the artifact; nothing was touched.",
            "The number of GPUs, the architecture, the driver or the worker differ from what was "
            "captured, or the `securityContext` of the container allows less; both values stand in "
            "the message.",
            "Choose a target that is like the source: `snapshotctl artifacts show NAME` says what "
            "the source was.",
        ),
        "KeyUnavailable": Reason(
            "A key that encrypts the artifact is not on the node, or its KMS does not give it; "
            "nothing was touched.",
            "The folder of `SNAPBACK_ARTIFACT_KEYS` lacks the key that the message names, or the "
            "command of `SNAPBACK_KMS_COMMAND` has failed.",
            "Add the key as `NAME.key` to the keys of the agents and start them again, or see in "
            "the log of the agent what the command says.",
        ),
        "NotInStandby": Reason(
            "Nothing is restored into the pod, for its worker was started to begin by itself.",
            "The pod has `nvidia.com/restore-policy: Immediate`, and when it was created its "
            "source was not captured yet or no operator answered; so the container has no "
            "`SNAPSHOT_RESTORE_STANDBY=1`. Or the cluster has no webhooks. Or "
            "`nvidia.com/restore-container` names none of its containers. Or its source was "
            "captured with the driver `criu` or `criu+cuda`, which brings the process itself, and "
            "was not there when the pod was created.",
            "Let it serve as it is; or see that the operator is ready and create the pod again: "
            "`kubectl delete pod NAME`. A pod that is created before its source names the driver: "
            "`nvidia.com/restore-driver: criu`.",
        ),
        "NotTrusted": Reason(
            "The artifact is not signed as the node wants it; nothing was touched.",
            "The node restores signed artifacts alone, and this one has no signature, one by "
            "another key, or one of another artifact; both names stand in the message.",
            "Restore one that was captured by nodes whose keys are trusted; or add the public key "
            "of the node that captured it, as `NAME.pub`, to the keys of the agents.",
        ),
        "Quarantined": Reason(
            "The artifact was found damaged; no restore begins from it.",
            "A load, a restore or a verification found bytes that differ from their digests.",
            "Restore another one (`snapshotctl artifacts ls`); if the storage was repaired, "
            "`snapshotctl verify NAME` lifts it.",
        ),
        "RestoreFailed": Reason(
            "The restore into this pod has failed, and says no more precisely why.",
            "An order of the restore ended badly.",
            "See which one: `snapshotctl explain pod/NAME`; then delete the pod and restore again.",
        ),
        "DRAUnavailable": Reason(
            "The cluster has no API by which a pod claims devices (resource.k8s.io/v1).",
            "The checkpoint asks for a memory server, which shares the devices of a claim.",
            "Use Kubernetes 1.34 or later with a DRA driver for its GPUs, or leave out "
            "`spec.gpuMemoryService`.",
        ),
        "DriverNotInCluster": Reason(
            "The process driver of the checkpoint exists outside of Kubernetes alone.",
            "`spec.job.driver` is `respawn`, which ends a process and starts it again. In a pod "
            "only the kubelet does.",
            "Use `cooperative`, which copies the same state, or `criu`, and apply it again.",
        ),
        "GMSSnapshotDisabled": Reason(
            "The operator captures no workers with a memory server.",
            "It was started with `SNAPBACK_ALLOW_GMS_SNAPSHOT=false`, and the checkpoint sets "
            "`spec.gpuMemoryService`.",
            "Leave out `spec.gpuMemoryService`, or let the operator take it: helm's option "
            "`--set-string operator.env.SNAPBACK_ALLOW_GMS_SNAPSHOT=true`.",
        ),
        "CrashLoopBackOff": Reason(
            "A container of the pod ends each time that it is started, such as its memory server.",
            "The message names the container.",
            "Read its log: `kubectl logs POD --container NAME --previous`.",
        ),
        "ImagePullBackOff": Reason(
            "The node cannot pull the image of a container.",
            "The message is that of the kubelet: no such image, no rights or no way to the "
            "registry.",
            "See that the nodes can pull it, or correct it: delete the checkpoint and apply it "
            "again.",
        ),
        "PodTemplateInvalid": Reason(
            "Kubernetes refuses the pod template of the checkpoint, or cannot start its pod.",
            "The message is that of the API server and names the field, or that of the kubelet "
            "and names the Secret or ConfigMap that is missing; or no container has the "
            "name in `spec.job.targetContainerName`.",
            "Correct `spec.job.podTemplateSpec`, delete the checkpoint and apply it again.",
        ),
        "SnapshotGone": Reason(
            "What the pod shall be restored from was deleted while its worker waited for it.",
            "A user deleted the snapshot or checkpoint after the pod had got its place.",
            "Name another snapshot in `nvidia.com/restore-from`, or start the worker cold.",
        ),
        "SnapshotNotFound": Reason(
            "The snapshot or checkpoint that the pod shall be restored from does not exist.",
            "The name in `nvidia.com/restore-from` is misspelt, or of another namespace. The pod "
            "had its place, and so its devices, for an hour.",
            "List the captures: `snapshotctl get snapshots`. Correct the annotation, and create "
            "the pod again.",
        ),
        "SourceMismatch": Reason(
            "The snapshot or checkpoint is not the one that the annotations of the pod ask for.",
            "`nvidia.com/restore-from-uid`, `nvidia.com/restore-content`, "
            "`nvidia.com/restore-digest` or `nvidia.com/restore-driver` has another value than "
            "what has the name now: it was deleted and made again, or captured again. The "
            "message has the value of the annotation alone.",
            "Compare with `snapshotctl describe KIND NAME`; correct the annotation, or remove it, "
            "and create the pod again.",
        ),
        "SnapshotFailed": Reason(
            "What the pod shall be restored from has failed itself.",
            "The capture of that snapshot or checkpoint ended badly; its own reason follows in "
            "the message.",
            "`snapshotctl explain NAME` of the snapshot; take a new one, or start the worker cold.",
        ),
    },
    "Artifacts and disks": {
        "ArtifactCorrupt": Reason(
            "Bytes, sizes, names or digests of the artifact differ from its manifest.",
            "The storage lost or changed data, or a process wrote into the artifact; part, file "
            "and chunk stand in the message.",
            "Restore another one; repair the storage, then `snapshotctl verify NAME`.",
        ),
        "ArtifactError": Reason(
            "The artifact on disk cannot be used.",
            "The message says what is wrong with it.",
            "Have all of it read: `snapshotctl verify NAME`.",
        ),
        "ArtifactExists": Reason(
            "Something else already stands where this artifact has to go.",
            "A folder of the same content and generation was left or made by hand.",
            "Look at the path in the message and move it away; then take a new snapshot.",
        ),
        "ArtifactInUse": Reason(
            "The artifact that a Snapshot names in `spec.source.artifact` belongs to a "
            "SnapshotContent that is still there.",
            "The checkpoint or snapshot that captured it was not deleted, or another Snapshot has "
            "imported it.",
            "Restore from the one that has it, which the message names. If that says "
            "`deletionPolicy: Retain`, you may delete it and apply this one again; otherwise the "
            "files would go with it.",
        ),
        "ArtifactMissing": Reason(
            "A part, a file or a manifest of the artifact is not there.",
            "A process removed files below the artifact root, or the storage is not mounted on "
            "that node.",
            "Mount or restore the storage, then `snapshotctl verify NAME`.",
        ),
        "ArtifactRootEmpty": Reason(
            "Nothing at all lies below the artifact root of the node.",
            "The storage of artifacts is not mounted there. Nothing is quarantined for it.",
            "Mount it on that node, or cordon the node; then apply the restore again.",
        ),
        "BucketMissing": Reason(
            "The bucket or container of the object storage does not exist.",
            "`SNAPBACK_OBJECT_STORAGE` names another one than was made, or the credentials are "
            "those of another account or region.",
            "Make the bucket or correct `SNAPBACK_OBJECT_STORAGE` of GMS and agents, and start "
            "them again.",
        ),
        "DeleteFailed": Reason(
            "The artifact could not be removed; it is tried again.",
            "A node failed to remove the files; its failure follows in the message.",
            "Correct what the message names. The tries rest for 30 s and longer; "
            "`snapshotctl describe snapcontent NAME` lists them.",
        ),
        "JournalCorrupt": Reason(
            "The journal of a service cannot be read to its end.",
            "The disk below its state folder lost or changed data.",
            "Check the disk. Move the journal that the message names away, and start the service "
            "again; captures under way on the node fail.",
        ),
        "MemoryLockRefused": Reason(
            "The backend `pinned-host` may not lock as much memory as it needs.",
            "`RLIMIT_MEMLOCK` of GMS is lower than its threads times a chunk; the numbers stand in "
            "the message.",
            "Raise it: `ulimit -l unlimited` before GMS is started, or `--ulimit memlock=-1` of "
            "docker; or set `SNAPBACK_TRANSFER_BACKEND=posix-direct`.",
        ),
        "NoSpace": Reason(
            "The disk has too little room.",
            "Needed and free bytes stand in the message.",
            "`snapshotctl artifacts ls` shows what takes the room; delete checkpoints, or free "
            "the disk.",
        ),
        "ObjectStorageDenied": Reason(
            "The object storage refuses the credentials of this service.",
            "They are missing, wrong or too old, or may not read, write, list and delete below "
            "the prefix; the code of the storage stands in the message.",
            "Give GMS and the agents credentials in their environment; see "
            "docs/how-to/keep-artifacts-in-object-storage.md.",
        ),
        "ObjectStorageUnavailable": Reason(
            "The object storage does not answer, or answers with an error.",
            "Its endpoint is down or cannot be reached from the node, or it is overloaded; the "
            "request was repeated before it was given up.",
            "Reach the endpoint that the message names from that node: `curl -I ENDPOINT`. Then "
            "try again.",
        ),
        "ObjectStorageUnset": Reason(
            "The bytes are in object storage, and this service does not know which.",
            "`SNAPBACK_OBJECT_STORAGE` is not set for it, or the package `obstore` is missing.",
            "Set `SNAPBACK_OBJECT_STORAGE` of GMS and agents to the same URL, or install the "
            "extra: `pip install 'snapback-gms[object]'`.",
        ),
        "StripeMissing": Reason(
            "A stripe root that has files of the artifact is not on the node.",
            "`SNAPBACK_STRIPE_ROOTS` of the node does not name it, its disk is not mounted, or "
            "another disk is in its place; the message says which.",
            "Mount the disk, or correct `SNAPBACK_STRIPE_ROOTS` of GMS and agent and start them "
            "again. A deletion is then repeated by itself; restore and verify again.",
        ),
        "ProcMalformed": Reason(
            "A line of a file below `/proc` is not as the kernel writes it.",
            "What is mounted at `/proc` is no procfs, or a program stands in for it; the message "
            "shows the file and the line.",
            "Look at what is mounted there: `findmnt /proc`.",
        ),
        "StorageFailed": Reason(
            "The disk does not read or write any more.",
            "The kernel answered with an input/output error, or the file system is read-only.",
            "Look at the kernel's log on that node: `dmesg | tail`, and replace the disk.",
        ),
        "Refused": Reason(
            "The API server does not let the operator do this.",
            "A right is missing, a quota is used up, or an admission webhook says no; the message "
            "is that of the server.",
            "`kubectl describe clusterrole snapback-operator`, `kubectl get quota`; it is tried "
            "again, the Job of a checkpoint for its `activeDeadlineSeconds`.",
        ),
        "ForeignOrders": Reason(
            "A status has orders that the operator did not write; they are not carried out.",
            "A user or a program wrote into the status of the object, and an order there names a "
            "pod, a node or an artifact that is not that of the object.",
            "Find out who may write this status: `kubectl auth can-i --list`, and the policies of "
            "docs/how-to/share-a-cluster.md. Delete the object and make it again.",
        ),
        "ResourceExpired": Reason(
            "The API server has forgotten the changes that a watch was to continue with.",
            "The operator was cut off for longer than etcd keeps history, some minutes.",
            "Nothing: it lists the objects again.",
        ),
        "StoreRewound": Reason(
            "The objects of the API server are older than what the operator has seen of them.",
            "etcd was restored from a backup.",
            "Nothing: the operator ends, starts again and has every unanswered order repeated.",
        ),
        "ContainerFailed": Reason(
            "A container of a pod that moves or holds its GPU memory has failed.",
            "It says so in words of its own, which stand in the message, or its files are not as "
            "they were made. What such a container says puts no artifact into quarantine.",
            "Read its log: `kubectl logs POD --container gms-saver`, `gms-loader` or `gms-server`.",
        ),
        "TransferKilled": Reason(
            "The process that moved the bytes was killed.",
            "Often the kernel did, because memory was short; the signal stands in the message.",
            "Look for it: `dmesg | grep -i oom` on that node; give GMS more memory.",
        ),
        "Unsound": Reason(
            "A verification found the artifact damaged.",
            "Bytes on disk differ from their digests.",
            "Restore another one: `snapshotctl artifacts ls`; this one stays in quarantine.",
        ),
        "Unverified": Reason(
            "Not all of the artifact could be read; whether it is sound is not known.",
            "The node that read it was lost, or time ran out.",
            "Try again: `snapshotctl verify NAME`.",
        ),
        "UnknownArtifactsFound": Reason(
            "Below the artifact root of a node lies something that belongs to no SnapshotContent.",
            "The store was lost or is another one, `Retain` left an artifact, or something else "
            "writes there. Nothing was moved, and no restore reads it.",
            "`snapshotctl describe node NAME` says how much; with SNAPBACK_QUARANTINE=all the "
            "operator has it moved aside.",
        ),
        "UnknownArtifactsMoved": Reason(
            "What belongs to no SnapshotContent was moved into .quarantine below its root.",
            "A capture whose content is gone left it, without a root manifest; nothing reads it.",
            "Look into .quarantine; move a directory back to where its path says, or remove it: "
            "`ls -R ROOT/.quarantine`.",
        ),
    },
    "GPU memory": {
        "CudaFailed": Reason(
            "The CUDA driver refused a call; the call and its status stand in the message.",
            "The device is gone or broken, or the driver has a defect.",
            "Look at the device: `nvidia-smi` on that node; the kernel's log names its faults.",
        ),
        "CudaMissing": Reason(
            "The helper of the node cannot use the CUDA driver, so no worker on it is captured.",
            "The package cuda-bindings, the driver or nvidia-smi is missing in its container.",
            "Install what the message names, or capture with another process driver.",
        ),
        "CudaRefused": Reason(
            "The CUDA driver refused to lock, checkpoint, restore or unlock a process.",
            "Its work did not end in time, it has unified or shared memory, or another state.",
            "Read the verb and the status in the message; after a capture the worker runs on.",
        ),
        "CudaTimedOut": Reason(
            "The CUDA driver did not answer in time, and the call was killed.",
            "A device hangs, or a process is stopped, for which the driver waits without an end.",
            "Look at `nvidia-smi` and the kernel's log on that node.",
        ),
        "CudaStuck": Reason(
            "The CUDA driver does not let processes of a worker run again.",
            "A restore ran out of device memory, or the driver has marked the process as failed.",
            "A worker that is captured was ended by its node, for nothing else frees its devices. "
            "Capture another one: `snapshotctl checkpoint POD`.",
        ),
        "CudaUnavailable": Reason(
            "This machine, or this environment, cannot use CUDA.",
            "The package cuda-bindings, the driver, or a symbol of it is missing.",
            "Install what the message names, or use simulated devices: `snapshotctl up`.",
        ),
        "TorchUnavailable": Reason(
            "This environment has no PyTorch, or one that is too old.",
            "The package torch is missing, does not load, or lacks what the message names.",
            "Install it beside the client: `pip install 'snapback-client[torch]'`.",
        ),
        "AddressTaken": Reason(
            "The addresses that the weights had are in use in this process.",
            "The engine mapped something else there before it attached.",
            "Attach to GMS earlier in the worker, before other libraries map memory.",
        ),
        "DeviceError": Reason(
            "A GPU, real or simulated, refused what was asked.",
            "The message has the driver's answer.",
            "Look at the GPU on that node: `nvidia-smi`; in simulation read the log of GMS.",
        ),
        "Fenced": Reason(
            "A capture holds the device; attaches and commits wait meanwhile.",
            "The worker asked while it is being captured.",
            "Wait, it is retryable; `snapshotctl get snapshotcontents` shows the capture.",
        ),
        "GenerationMismatch": Reason(
            "The writer wanted to replace another generation than the committed one.",
            "Two loaders wrote to one device, and the other one was first. Or a process that is no "
            "pod has committed memory and left it: `snapshotctl doctor` shows that in a local "
            "cluster.",
            "Read the committed layout and use it; do not load the weights again. If no worker "
            "needs it, free it: `gms drop`.",
        ),
        "DeviceProcessGone": Reason(
            "The process that served a GPU has ended, and with it the memory of that GPU.",
            "The message says how. With SNAPBACK_PROCESS_PER_DEVICE each GPU has a process.",
            "It is started again by itself: attach again, and load the weights again.",
        ),
        "ConnectionLost": Reason(
            "The GPU memory service ended, or closed the connection of a session.",
            "It was killed, or it was stopped; with it went all memory that it had.",
            "It is started again by itself, and an order is tried again. A program attaches again, "
            "and loads its weights again.",
        ),
        "GmsUnavailable": Reason(
            "The GPU memory service of a node does not answer an agent, transfer or program.",
            "It does not run, is being started, or its socket folder is another one than that of "
            "who asks. A transfer waits half a minute for it, and its order is tried again.",
            "Start it; in a local cluster: `snapshotctl sim restart NODE --service gms`.",
        ),
        "InvalidTransition": Reason(
            "The state machine has no such step.",
            "A client called in the wrong order, or an order came for a state that is over.",
            "The message has the state and the event; correct the client, or report it.",
        ),
        "LayoutConflict": Reason(
            "An allocation id or a load token is already in use for something else.",
            "Two writers or two loads use the same name.",
            "Give each allocation an id of its own; for a restore delete the pod and make it "
            "again: `snapshotctl delete pod NAME`.",
        ),
        "LayoutError": Reason(
            "The GPU memory layout is not in the state that the request needs.",
            "The message says which state it is in.",
            "See the orders on that node: `snapshotctl explain pod/NAME`.",
        ),
        "LoadLost": Reason(
            "What a restore has loaded is not in GPU memory any more.",
            "GMS was restarted before the restore could use it.",
            "Wait, it is loaded again; `snapshotctl explain pod/NAME` shows the restore.",
        ),
        "OutOfDeviceMemory": Reason(
            "An allocation does not fit on the GPU, and no other gave up as much in time.",
            "Others hold memory there. The message says how much is free and what GMS holds, and "
            "names the processes with the rest where NVML shows them. A fork of a process that was "
            "killed keeps its memory.",
            "See who has the GPU: `nvidia-smi` on the node, `snapshotctl get pods -A`; end a "
            "process or a pod, or choose another node.",
        ),
        "StaleLayout": Reason(
            "The committed layout is not the one that the worker knew.",
            "GMS was restarted, or a client committed other weights; both hashes stand in the "
            "message.",
            "Load the weights again, or restore the worker: `snapshotctl restore NAME`.",
        ),
        "TooManyOpenFiles": Reason(
            "A process has no file descriptor left for the GPU memory that it is handed.",
            "Its limit of open files is low, or it keeps many open. Each allocation comes with a "
            "descriptor, up to 128 at a time; they are closed when the memory is mapped.",
            "Raise the limit of the process: `ulimit -n 65536`, or `LimitNOFILE=` of systemd.",
        ),
        "TooManySessions": Reason(
            "GMS serves as many clients as it may.",
            "Clients were left running, or one process, pod or user opens too many.",
            "End workers that are not needed on that node, then try again; it is retryable.",
        ),
        "UnknownDevice": Reason(
            "No such device is served on this node, or CUDA does not show it to the process.",
            "The order names a GPU of another node, the devices of the node changed, or "
            "CUDA_VISIBLE_DEVICES or NVIDIA_VISIBLE_DEVICES of a worker name others.",
            "Compare with the node: `snapshotctl describe node NAME`; look at these variables; "
            "make the pod again.",
        ),
    },
    "Nodes, orders and time": {
        "CleaningOwed": Reason(
            "The artifact is to be deleted, and its worker or its node has not been let go yet.",
            "A release or an abort was not answered: the node is silent, or it fails to do it. It "
            "is ordered again, with longer and longer rests.",
            "See which order: `snapshotctl describe snapcontent NAME`. Bring the node back, or "
            "give it up: `snapshotctl delete node NODE`.",
        ),
        "Aborted": Reason(
            "The work was ended by an abort order.",
            "Another part of the same capture or restore failed, or a user aborted the capture or "
            "deleted the object.",
            "`snapshotctl explain NAME` shows which order failed first.",
        ),
        "AgentUnresponsive": Reason(
            "A service of the node did not end its order in time.",
            "It does not run, hangs, or the work takes longer than its deadline.",
            "Look at `snapshotctl nodes` and at the service's log; in a local cluster start it "
            "again: `snapshotctl sim restart NODE`.",
        ),
        "ContainerExited": Reason(
            "A container of the pod has ended with an error.",
            "The exit code stands in the message: 137 is SIGKILL, often for lack of memory, and "
            "143 is SIGTERM.",
            "Read what it printed: `snapshotctl explain pod/NAME` shows the last lines.",
        ),
        "DeadlineExceeded": Reason(
            "It was not done in the time that it had.",
            "A step, an order or a whole wait took longer than its budget; or a capture was not "
            "done in the time of its snapshot (`spec.deadlineSeconds`) or of its checkpoint "
            "(`spec.job.activeDeadlineSeconds`), waiting included.",
            "`snapshotctl explain NAME` shows where the time went; raise that field or --timeout, "
            "or correct what is slow.",
        ),
        "Deleted": Reason(
            "The object was deleted during its capture or restore.",
            "A user or the retention requested it.",
            "Nothing is to be done; what was begun is undone.",
        ),
        "InjectedFault": Reason(
            "A step failed because the fault switch is set so.",
            "A user ran `snapshotctl sim fail` in a local cluster.",
            "Disarm it: `snapshotctl sim fail NODE --clear`, then try again.",
        ),
        "InvalidReport": Reason(
            "A service reported the end of an order without what belongs to it.",
            "It has another version than the operator.",
            "Compare the versions: `snapshotctl get nodes`; upgrade the older program.",
        ),
        "NodeCordoned": Reason(
            "The capture waits because nothing new may begin on its node.",
            "A user cordoned the node: `snapshotctl nodes` says SchedulingDisabled. Only pods with "
            'the label `nvidia.com/capture-on-drain: "true"` are captured there.',
            "`snapshotctl uncordon NODE`, or `snapshotctl abort NAME` if it should not wait.",
        ),
        "NodeLost": Reason(
            "The Node object was deleted while the node had work.",
            "A user ran `snapshotctl delete node`, which gives up all that the node owes. A node "
            "that is only silent loses nothing.",
            "Restore its workers on another node: `snapshotctl restore NAME`.",
        ),
        "NodeSilent": Reason(
            "The pod's node was silent for 90 s; its worker may well run.",
            "The machine, the agent or its network is down. The phase of the pod is Unknown; "
            "nothing fails and nothing is ended for that.",
            "See since when: `snapshotctl nodes`. Bring the node back and all goes on; or give it "
            "up with all that it has: `snapshotctl delete node NODE`.",
        ),
        "NotReady": Reason(
            "Nothing new begins on this node: it is not known to be there with its devices.",
            "Its agent was silent for 30 s, or has not found its GPU memory service yet.",
            "`snapshotctl explain NODE`; in a local cluster: `snapshotctl sim restart NODE`.",
        ),
        "NoMemoryServer": Reason(
            "A pod has no memory server on this node, or has it no more.",
            "The pod has ended, or was made without one.",
            "`kubectl logs POD --container gms-server` shows what became of it.",
        ),
        "OrdersPaused": Reason(
            "A service of the node gets no orders; what runs there goes on.",
            "A user paused its durable, as `nats consumer pause` does; that outlives restarts.",
            "Let it get orders again: `nats consumer resume ORDERS agent-NODE`, or `gms-NODE`.",
        ),
        "OutcomeUnknown": Reason(
            "A step that must not run twice was interrupted; how it ended is not known.",
            "The service crashed within the step. Or the order was in NATS for longer than the 14 "
            "days for which its node remembers orders.",
            "The worker was thawed or ended. Take a new snapshot: `snapshotctl checkpoint POD`.",
        ),
        "CriuFailed": Reason(
            "CRIU did not dump or restore a process; the message has what its log says.",
            "The process holds something that CRIU cannot carry, or the kernel refuses it a right.",
            "Do what the next step says. A worker whose dump fails goes on.",
        ),
        "HelperUnavailable": Reason(
            "The helper of the node does not answer, so CRIU was not started.",
            "The container `helper` of the agent's pod starts, or ends again and again.",
            "It is tried again. Read why: `kubectl logs --namespace NAMESPACE --selector "
            "app.kubernetes.io/component=node --container helper --prefix`.",
        ),
        "GpusUnknown": Reason(
            "Which GPUs a container has is not known, so nothing was done to it.",
            "The kubelet of the node does not answer at its socket of pod-resources.",
            "See the kubelet's log on that node. It is tried again.",
        ),
        "ChildKilled": Reason(
            "A process of the node's helper was killed while it packed or unpacked files or ran "
            "CRIU. A worker goes on; a placeholder in which CRIU had begun is ended.",
            "The node or the pod has run out of memory, most often.",
            "See the kernel's log of the node, raise the memory limit of the container `helper` "
            "or, for a restore, of the pod, and take a new snapshot or create the pod again: "
            "`snapshotctl checkpoint POD`.",
        ),
        "HelperLost": Reason(
            "The helper of the node ended while it dumped or restored a process.",
            "It was killed, or its pod was replaced.",
            "A worker whose CRIU was killed is ended, for its connections are broken. Capture "
            "another one: `snapshotctl checkpoint POD`.",
        ),
        "ServiceStopped": Reason(
            "The agent or GMS was stopped within an order, which was undone.",
            "It was restarted or updated during the order.",
            "A capture and a restore are tried again by themselves; start the pod again if it has "
            "ended.",
        ),
        "PresenceMissing": Reason(
            "The agent of this node was silent for more than 30 s.",
            "The machine, the agent or its network is down; its work is not stopped for that.",
            "Start the agent; in a local cluster: `snapshotctl sim restart NODE`.",
        ),
        "Rejected": Reason(
            "An order must not be carried out on this node; nothing was touched.",
            "It does not fit what the node knows of the pod.",
            "The message names what differs; see `snapshotctl explain NAME`.",
        ),
        "SchedulingDisabled": Reason(
            "Nothing new begins on this node; what runs there goes on.",
            "A user cordoned the node.",
            "Let it take work again: `snapshotctl uncordon NODE`.",
        ),
        "Superseded": Reason(
            "A higher attempt of the same order, the same attempt with another artifact, or an "
            "abort is known on the node.",
            "An old message was delivered late, or the operator's store is older than the node's "
            "journal, as after it was restored from a backup.",
            "Nothing is to be done: the newer attempt counts; `attempt` in the values names it.",
        ),
        "WrongNode": Reason(
            "The order names another node than the one that it reached.",
            "A subject or a credential of one node is used by another.",
            "Compare SNAPBACK_NODE with the name of the machine's key; see `snapshotctl nodes`.",
        ),
    },
    "The bus, the store and versions": {
        "BusUnavailable": Reason(
            "NATS, or the operator behind it, does not answer.",
            "nats-server does not run, the address is wrong, or the operator is down.",
            "For a local cluster: `snapshotctl up`; else check --server and the operator.",
        ),
        "CRDsMissing": Reason(
            "The operator waits for CustomResourceDefinitions that others shall apply.",
            "SNAPBACK_CRDS is `keep`, and some of the definitions that are named are absent.",
            "`kubectl apply --server-side -f deploy/crds`; it goes on by itself.",
        ),
        "CRDsOwnedByOther": Reason(
            "The operator waits: a CustomResourceDefinition of its name is another product's.",
            "The definition does not have the label `app.kubernetes.io/part-of: snapback`; Dynamo "
            "has kinds of the same names. Nothing was touched.",
            "`kubectl get crd NAME -o yaml` says whose it is. Remove that product, or set "
            "SNAPBACK_CRDS=adopt; it goes on by itself.",
        ),
        "CRDsRefused": Reason(
            "The API server does not take a CustomResourceDefinition of the operator.",
            "Objects are stored in a version that the definition does not have, or its scope "
            "differs; the message is that of the server.",
            "`kubectl get crd NAME -o yaml`; delete the definition if nothing needs its objects.",
        ),
        "Conflict": Reason(
            "The object changed since it was read.",
            "It was written since, deleted, or made again under the same name.",
            "Look at it again with `snapshotctl describe KIND NAME`, then run the command again.",
        ),
        "Internal": Reason(
            "The product itself has a defect here.",
            "Something happened that no rule foresees; the log of the service has the traceback.",
            "Read the log (`snapshotctl explain NAME` says where it is) and report a bug with it.",
        ),
        "NotPermitted": Reason(
            "NATS refuses this user, or this subject to it.",
            "The nkey is that of another role or node.",
            "Use the nkey of a user who may: set NATS_NKEY, or name the cluster with --cluster.",
        ),
        "OSError": Reason(
            "The operating system refused a call of the command.",
            "A file or folder cannot be read or written; it stands in the message.",
            "Check the path and its rights: `ls -ld PATH`.",
        ),
        "Stale": Reason(
            "A decision rested on the absence of an object that is there.",
            "The objects in the operator's memory were late; the decision was not carried out.",
            "Nothing is to be done: it decides again. It is seen in the operator's log alone.",
        ),
        "StoreBusy": Reason(
            "The object store takes no write now, and nothing was written.",
            "Another program has the file of the store open in a transaction: a shell of "
            "sqlite3, or a backup.",
            "Look for it: `fuser -v objects.sqlite` in the operator's state folder; end it. It is "
            "retryable.",
        ),
        "UnsupportedVersion": Reason(
            "A version that is required is unknown to this program.",
            "Two programs of the cluster have different releases.",
            "Compare the versions: `snapshotctl get nodes`; upgrade the older program.",
        ),
    },
    "What was asked for": {
        "AddressInUse": Reason(
            "A service cannot listen on its address.",
            "Another process has the port.",
            "See which: `ss -ltnp`; change SNAPBACK_HTTP_ADDRESS or end the other one.",
        ),
        "AlreadyExists": Reason(
            "The name is taken by an object with another spec, and a spec never changes.",
            "An object of this name was applied before.",
            "Use another name, or delete it first: `snapshotctl delete KIND NAME`.",
        ),
        "AlreadyRunning": Reason(
            "The local cluster, or the service to start, runs already.",
            "`snapshotctl up` or `sim restart` was run before.",
            "Use it as it is: `snapshotctl nodes`; or end it: `snapshotctl down`.",
        ),
        "Ambiguous": Reason(
            "Several objects have the name that a command was given.",
            "A name alone is looked up among all kinds, such as a pod and a checkpoint.",
            "Name the kind as well: `snapshotctl get KIND NAME`.",
        ),
        "RequestExpired": Reason(
            "The request came after its client had stopped waiting for it; nothing was done.",
            "The operator was stopped or busy meanwhile, or the clocks of the two machines differ "
            "by more than the 5 s that a client waits.",
            "Run the command again. If it lasts, compare `date -u` on both machines.",
        ),
        "DemoFailed": Reason(
            "A step of the demo was lost, or an answer differs.",
            "The message says which; the demo compares every answer, byte for byte.",
            "Run it again and keep what it made: `snapshotctl demo --keep`.",
        ),
        "Forbidden": Reason(
            "The caller may not do this.",
            "For example: a node that is not lost is to be deleted, or a node asks for the pods "
            "of another.",
            "The message names what is missing; `snapshotctl nodes` shows the nodes.",
        ),
        "InvalidInput": Reason(
            "What was written is not acceptable.",
            "A value is out of its range or of the wrong form; the message names it.",
            "Correct it and run the command again; `snapshotctl COMMAND --help` shows the form.",
        ),
        "DeprecatedFieldSet": Reason(
            "The checkpoint sets fields that are accepted for older manifests, and ignored.",
            "`backoffLimit`: a worker is never started again on Kubernetes; "
            "`ttlSecondsAfterFinished`: the Job goes with its checkpoint; `location` and "
            "`storageType`: the SnapshotContent has the place. The message names those set.",
            "Leave them out of the manifest of the next checkpoint; this one needs no change.",
        ),
        "InvalidManifest": Reason(
            "The manifest is refused; nothing was stored.",
            "Every problem is listed with its file, line and field.",
            "Correct the fields and run `snapshotctl apply -f FILE` again.",
        ),
        "InvalidMessage": Reason(
            "A message, frame or file does not decode as what it claims to be.",
            "Two programs have different versions, or something foreign writes to the bus.",
            "Compare the versions: `snapshotctl get nodes` and `snapshotctl --version`.",
        ),
        "InvalidName": Reason(
            "A name, an id or a path is outside its alphabet, or too long.",
            "Names have lower-case letters, digits, dashes and dots: those of objects at most 253, "
            "those of nodes and namespaces at most 63.",
            "Choose another name and run the command again.",
        ),
        "NeverTrue": Reason(
            "What was waited for cannot come true any more.",
            "The object failed or was deleted meanwhile.",
            "See why: `snapshotctl explain NAME`.",
        ),
        "NotDrained": Reason(
            "Pods are left on a node that was to be drained.",
            "They have no label `nvidia.com/capture-on-drain`, belong to a controller, or could "
            "not be captured or restored: each line says which.",
            "Do what the line of each pod says; then again: `snapshotctl drain NODE --capture`.",
        ),
        "NotFound": Reason(
            "The named object does not exist.",
            "The name is misspelt, in another namespace, or was deleted.",
            "List what there is: `snapshotctl get dynamocheckpoints -A`.",
        ),
        "StartFailed": Reason(
            "A program of the local cluster did not come up.",
            "Its last lines are printed; often a port or a folder is not usable.",
            "Read the log that is named; then `snapshotctl down` and `snapshotctl up`.",
        ),
        "Unready": Reason(
            "This machine lacks something that the demo needs.",
            "Each thing is listed with its fix.",
            "Do what the list says, then `snapshotctl demo` again.",
        ),
        "WrongArguments": Reason(
            "The command line says something that no command understands.",
            "An option, a name or a number is wrong; the message says which.",
            "`snapshotctl COMMAND --help` shows the options with an example.",
        ),
    },
}

REASONS: dict[str, Reason] = {
    name: reason for section in SECTIONS.values() for name, reason in section.items()
}
"""All reasons by their names."""

_BY_FOLDED = {name.lower(): name for name in REASONS}


def explained(word: str) -> tuple[str, Reason] | None:
    """Find a reason by its name in any case, with the name as it is written; None else."""
    name = _BY_FOLDED.get(word.lower())
    return None if name is None else (name, REASONS[name])
