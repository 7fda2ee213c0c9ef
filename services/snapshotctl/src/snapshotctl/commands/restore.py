"""The command restore: start a pod from what was captured."""

from __future__ import annotations

import secrets
from typing import Annotated

import typer

from snapshot_shared.errors import NotEligible, NotFound
from snapshot_shared.objects.kinds import KINDS
from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.objects.snapback import DynamoCheckpoint, Snapshot, SnapshotContent
from snapshotctl.command import Container, Manifest, MaybeNamespace, Timeout, command, new_app
from snapshotctl.commands.watch import create_and_watch
from snapshotctl.domain import formats, pod_manifests, targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.pod_manifests import Source
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools
from snapshotctl.views.state import failure_of

app = new_app()


@command(
    app,
    "snapshotctl restore demo-llm",
    "snapshotctl restore demo-llm --manifest worker.yaml --timeout 10m",
)
async def restore(
    tools: Tools,
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="The checkpoint or snapshot to start from.")
    ] = "",
    manifest: Manifest = None,
    container: Container = None,
    checkpoint_id: Annotated[
        str | None, typer.Option("--checkpoint-id", metavar="ID", help="The same as NAME.")
    ] = None,
    timeout: Timeout = "1h",
    namespace: MaybeNamespace = None,
) -> None:
    """Start a pod from what was captured, and wait until it serves.

    What is not captured yet is waited for. Without --manifest the pod is as the captured one was,
    on any node that fits; its name is printed.
    """
    if bool(name) == (checkpoint_id is not None) and name != checkpoint_id:
        raise WrongArguments(
            "name what to restore from, once" if name else "what to restore from is missing",
            next_step="snapshotctl restore demo-llm",
        )
    wanted = targets.checked_name(name or checkpoint_id or "")
    within_s = formats.parse_duration(timeout)
    pod = pod_manifests.pod_manifest(tools.documents(manifest)) if manifest else None
    space = targets.checked_namespace(pod_manifests.namespace_of(pod, namespace, tools.namespace))
    async with tools.operator(patiently=True) as operator:
        document = pod_manifests.restored(
            wanted,
            await _source(operator, wanted, space),
            pod,
            namespace=space,
            suffix=f"restored-{secrets.token_hex(3)}",
            target=container,
        )
        await create_and_watch(tools, operator, document, space, within_s=within_s)


async def _source(operator: Operator, name: str, namespace: str) -> Source:
    """Read the objects of the source. NotFound, and NotEligible when its capture has failed."""
    checkpoint = await operator.get(Target(KINDS["DynamoCheckpoint"], namespace, name))
    snapshot = await operator.get(Target(KINDS["Snapshot"], namespace, name))
    for value in (checkpoint, snapshot):
        if value is not None and (why := failure_of(value)):
            raise NotEligible(
                f"{name} has failed: {why}", next_step=f"see why: snapshotctl explain {name}"
            )
    if checkpoint is None and snapshot is None:
        raise NotFound(
            f"no checkpoint or snapshot is called {name} in namespace {namespace}",
            next_step="list what is captured: snapshotctl artifacts ls -A",
        )
    snapshot = snapshot if isinstance(snapshot, Snapshot) else None
    bound = snapshot.status.bound_snapshot_content_name if snapshot else None
    content = await operator.get(Target(KINDS["SnapshotContent"], None, bound)) if bound else None
    source = snapshot.spec.source.pod_ref if snapshot else None
    pod = await operator.get(Target(KINDS["Pod"], namespace, source.name)) if source else None
    is_source = source is not None and pod is not None and source.uid in (None, pod.metadata.uid)
    return Source(
        checkpoint if isinstance(checkpoint, DynamoCheckpoint) else None,
        snapshot,
        content if isinstance(content, SnapshotContent) else None,
        pod if isinstance(pod, Pod) and is_source else None,
    )
