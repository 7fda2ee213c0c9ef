"""The command checkpoint: capture a running pod, or the pod of a manifest."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Annotated

import typer

from snapshot_api import revisions
from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint, Framework
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_shared.errors import AlreadyExists, Conflict, NotEligible, NotFound
from snapshotctl import objects
from snapshotctl.command import (
    Container,
    Manifest,
    MaybeNamespace,
    Timeout,
    command,
    complete_pods,
    new_app,
)
from snapshotctl.commands.watch import create_and_watch
from snapshotctl.domain import formats, pod_manifests, targets
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl checkpoint my-worker",
    "snapshotctl checkpoint my-worker --checkpoint-id llm --keep 3",
    "snapshotctl checkpoint --manifest worker.yaml --checkpoint-id llm-v2 --timeout 45m",
)
async def checkpoint(  # noqa: PLR0913, PLR0917 - its options, each of which a person may want
    tools: Tools,
    pod: Annotated[
        str,
        typer.Argument(metavar="POD", help="A running pod.", autocompletion=complete_pods),
    ] = "",
    manifest: Manifest = None,
    container: Container = None,
    framework: Annotated[
        Framework | None,
        typer.Option("--framework", help="Of a worker whose command runs no module dynamo.NAME."),
    ] = None,
    checkpoint_id: Annotated[
        str | None,
        typer.Option("--checkpoint-id", metavar="ID", help="Name of the snapshot or checkpoint."),
    ] = None,
    replace: Annotated[
        bool, typer.Option("--replace", help="Delete the capture of that name first, if any.")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="N",
            min=1,
            help="Take a revision of ID (ID-1, ID-2, ...), and keep the newest N.",
        ),
    ] = None,
    timeout: Timeout = "1h",
    namespace: MaybeNamespace = None,
) -> None:
    """Capture a running pod, or the pod of a manifest.

    A running pod goes on; that of a manifest is started and ended. The first makes a Snapshot, the
    second a DynamoCheckpoint. Its phases are shown to the end. If a capture of
    that name is under way, it is followed. If it is over, --replace is needed.

    With --keep each command takes another revision of one name. A restore that names ID is from
    the newest revision that is captured. Once the new one is ready, older ones than the newest N
    are deleted; pods that are being restored from one keep its files until they are done.
    """
    if bool(pod) == (manifest is not None):
        raise WrongArguments(
            "name either a running POD or --manifest FILE",
            next_step="snapshotctl checkpoint my-worker",
        )
    if keep is not None and (manifest is not None or replace or checkpoint_id is None):
        raise WrongArguments(
            "--keep is for a running POD, with --checkpoint-id and without --replace",
            next_step="snapshotctl checkpoint my-worker --checkpoint-id llm --keep 3",
        )
    name = targets.checked_name(checkpoint_id) if checkpoint_id is not None else None
    within_s = formats.parse_duration(timeout)
    written = pod_manifests.pod_manifest(tools.documents(manifest)) if manifest else None
    chosen = pod_manifests.namespace_of(written, namespace, tools.namespace)
    space = targets.checked_namespace(chosen)
    async with tools.operator(patiently=True) as operator:
        if written is not None:
            whose = f"pod {written.name}"
            target = pod_manifests.container(written.containers, container, whose)
            engine = pod_manifests.framework(written, target, framework)
            document = pod_manifests.checkpoint_of(written, target, engine, name, space)
        else:
            running = targets.one_target(["pod", pod.removeprefix("pod/")], space)
            document = await _snapshot_of(
                operator, running, container, name, is_revision=keep is not None
            )
        made = Target(KINDS[document.value["kind"]], space, document.value["metadata"]["name"])
        if keep is None:
            await _require_no_revisions(operator, made)
        if replace:
            await _remove(tools, operator, made, within_s)
        elif keep is None:
            await _require_open(operator, made, tools.now())
        await create_and_watch(tools, operator, document, space, within_s=within_s)
        if keep is not None and name is not None:
            await _keep_newest(tools, operator, name, space, keep)


async def _require_no_revisions(operator: Operator, target: Target) -> None:
    """Raise AlreadyExists if restores that name this object are from revisions now."""
    snapshots = await operator.all_of(KINDS["Snapshot"], target.namespace)
    if newest := revisions.newest(snapshots, target.name or ""):
        raise AlreadyExists(
            f"{target.name} is the name of revisions, the newest of which is "
            f"{newest.metadata.name}; restores of {target.name} would no longer be from them",
            next_step="take the next revision with --keep N, or use another --checkpoint-id",
        )


async def _require_open(operator: Operator, target: Target, now: float) -> None:
    """Raise AlreadyExists if a capture of this name is over."""
    found = await operator.get(target)
    if not isinstance(found, Snapshot | DynamoCheckpoint):
        return
    ended = [
        row
        for row in found.status.conditions
        if row.type in ("Ready", "Failed") and row.status == "True"
    ]
    if ended:
        how = "is Ready" if ended[0].type == "Ready" else f"has failed ({ended[0].reason})"
        at = formats.instant(ended[0].last_transition_time)
        since = f" since {formats.age(now - at)}" if at is not None else ""
        raise AlreadyExists(
            f"{target} {how}{since}; nothing was captured now",
            next_step="take another capture in its place with --replace, or beside it with "
            "another --checkpoint-id",
        )


async def _remove(tools: Tools, operator: Operator, target: Target, within_s: float) -> None:
    """Delete an object, if there is one, and wait until it is gone. DeadlineExceeded."""
    found = await operator.get(target)
    if found is None:
        return
    uid = found.metadata.uid
    if not await operator.delete(target, uid):
        await objects.until(
            operator,
            target,
            lambda now: True if now is None or now.metadata.uid != uid else None,
            within_s=within_s,
            what=f"{target} is deleted",
        )
    tools.screen.note(f"{target} deleted")


async def _snapshot_of(
    operator: Operator, pod: Target, container: str | None, name: str | None, *, is_revision: bool
) -> Document:
    """Return the Snapshot of a running pod. NotFound, NotEligible, WrongArguments.

    With `is_revision` it is one of `name`, and AlreadyExists is raised if that is taken itself.
    """
    found = await objects.existing(operator, pod)
    if not isinstance(found, Pod):
        raise NotEligible(f"{pod} is no pod", next_step="name a pod that runs")
    names = [item.name for item in found.spec.containers]
    target = pod_manifests.container(names, container, f"pod {found.metadata.name}")
    if not is_revision or name is None:
        return pod_manifests.snapshot_of(found, target, name)
    for kind in ("DynamoCheckpoint", "Snapshot"):
        taken = Target(KINDS[kind], pod.namespace, name)
        if await operator.get(taken) is not None:
            raise AlreadyExists(
                f"the name is taken: restores of {name} are from {taken}, not from revisions",
                next_step=f"snapshotctl delete {taken.typed}, or use another --checkpoint-id",
            )
    snapshots = await operator.all_of(KINDS["Snapshot"], pod.namespace)
    revision = _under_way(snapshots, name, found.metadata.uid)
    return pod_manifests.snapshot_of(
        found, target, revision or revisions.next_name(snapshots, name), name
    )


def _under_way(snapshots: Sequence[AnyObject], name: str, uid: str) -> str:
    """Return the revision by which the pod with a uid is being captured, if there is one."""
    for each in revisions.ordered(snapshots, name):
        captured = each.spec.source.pod_ref
        if not revisions.is_over(each) and captured is not None and captured.uid == uid:
            return each.metadata.name
    return ""


async def _keep_newest(
    tools: Tools, operator: Operator, name: str, namespace: str, keep: int
) -> None:
    """Delete the revisions of a name that are older than the newest of them."""
    found = await operator.all_of(KINDS["Snapshot"], namespace)
    for each in revisions.surplus(found, name, keep):
        target = Target(KINDS["Snapshot"], namespace, each.metadata.name)
        with contextlib.suppress(NotFound, Conflict):
            await operator.delete(target, each.metadata.uid)
            tools.screen.note(f"{target} deleted: the newest {keep} of {name} are kept")
