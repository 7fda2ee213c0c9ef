"""The command checkpoint: capture a running pod, or the pod of a manifest."""

from __future__ import annotations

from typing import Annotated

import typer

from snapshot_shared.errors import NotEligible
from snapshot_shared.objects.kubernetes import Pod
from snapshot_shared.objects.snapback import Framework
from snapshotctl import objects
from snapshotctl.command import Container, Manifest, MaybeNamespace, Timeout, command, new_app
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
    "snapshotctl checkpoint --manifest worker.yaml --checkpoint-id llm-v2 --timeout 45m",
)
async def checkpoint(
    tools: Tools,
    pod: Annotated[str, typer.Argument(metavar="[POD]", help="A running pod.")] = "",
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
    timeout: Timeout = "1h",
    namespace: MaybeNamespace = None,
) -> None:
    """Capture a running pod, or the pod of a manifest.

    A running pod goes on; that of a manifest is started and ended. The first makes a Snapshot, the
    second a DynamoCheckpoint. Its phases are shown to the end.
    """
    if bool(pod) == (manifest is not None):
        raise WrongArguments(
            "name either a running POD or --manifest FILE",
            next_step="snapshotctl checkpoint my-worker",
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
            document = await _snapshot_of(operator, running, container, name)
        await create_and_watch(tools, operator, document, space, within_s=within_s)


async def _snapshot_of(
    operator: Operator, pod: Target, container: str | None, name: str | None
) -> Document:
    """Return the Snapshot of a running pod. NotFound, NotEligible, WrongArguments."""
    found = await objects.existing(operator, pod)
    if not isinstance(found, Pod):
        raise NotEligible(f"{pod} is no pod", next_step="name a pod that runs")
    names = [item.name for item in found.spec.containers]
    target = pod_manifests.container(names, container, f"pod {found.metadata.name}")
    return pod_manifests.snapshot_of(found, target, name)
