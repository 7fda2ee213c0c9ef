"""The command restore: start a pod from what was captured."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from snapshot_api import revisions
from snapshot_api.kinds import KINDS, kind_of
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_api.well_known import POD_SPEC
from snapshot_shared.errors import NotEligible, NotFound
from snapshotctl import objects
from snapshotctl.command import (
    Container,
    Manifest,
    MaybeNamespace,
    Timeout,
    command,
    complete_sources,
    new_app,
)
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
    "snapshotctl restore serving --env SIZE_MIB=64 --env POD_SOCKET_DIR=/tmp",
)
async def restore(
    tools: Tools,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="The checkpoint or snapshot to start from.",
            autocompletion=complete_sources,
        ),
    ] = "",
    manifest: Manifest = None,
    container: Container = None,
    checkpoint_id: Annotated[
        str | None, typer.Option("--checkpoint-id", metavar="ID", help="The same as NAME.")
    ] = None,
    env: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Value of a variable of the pod."),
    ] = None,
    timeout: Timeout = "1h",
    namespace: MaybeNamespace = None,
) -> None:
    """Start a pod from what was captured, and wait until it serves.

    If NAME has revisions, the pod starts from the newest captured revision. A capture under way is
    waited for. Without --manifest the pod is as the captured one was,
    on any node that fits; its name is printed. If the captured pod is gone, the values of its
    variables are gone with it, because a Snapshot keeps no secrets. A worker whose process comes
    back (criu) has them. A worker that is started anew needs them by --env.
    """
    if bool(name) == (checkpoint_id is not None) and name != checkpoint_id:
        raise WrongArguments(
            "name what to restore from, once" if name else "what to restore from is missing",
            next_step="snapshotctl restore demo-llm",
        )
    wanted = targets.source_named(name or checkpoint_id or "")
    variables = _variables(env or [])
    if variables and manifest:
        raise WrongArguments(
            "--env is for a restore without --manifest",
            next_step="write the variable into the manifest",
        )
    within_s = formats.parse_duration(timeout)
    pod = pod_manifests.pod_manifest(tools.documents(manifest)) if manifest else None
    space = targets.checked_namespace(pod_manifests.namespace_of(pod, namespace, tools.namespace))
    async with tools.operator(patiently=True) as operator:
        source = await _source(operator, wanted, space)
        # The spec of one revision must not meet the artifact of a later one.
        named = source.snapshot.metadata.name if pod is None and source.snapshot else wanted
        if named != wanted:
            tools.screen.note(f"the newest revision of {wanted} is {named}")
        document = pod_manifests.restored(
            named,
            source if pod is not None else await _with_spec(operator, source),
            pod,
            namespace=space,
            suffix=f"restored-{secrets.token_hex(3)}",
            target=container,
            variables=variables,
        )
        await create_and_watch(tools, operator, document, space, within_s=within_s)


def _variables(words: Sequence[str]) -> dict[str, str]:
    """Return variables that were given as NAME=VALUE. WrongArguments."""
    found = {}
    for word in words:
        name, mark, value = word.partition("=")
        if not name or not mark:
            raise WrongArguments(
                f"--env {word!r} is no NAME=VALUE", next_step="snapshotctl restore NAME --env A=b"
            )
        found[name] = value
    return found


async def _source(operator: Operator, name: str, namespace: str) -> Source:
    """Read the objects of the source. NotFound, and NotEligible when its capture has failed."""
    targets = [Target(KINDS[kind], namespace, name) for kind in ("DynamoCheckpoint", "Snapshot")]
    checkpoint, snapshot = [await operator.get(target) for target in targets]
    if checkpoint is None and snapshot is None:
        found = await operator.all_of(KINDS["Snapshot"], namespace)
        snapshot = revisions.newest(found, name)
    for value in (checkpoint, snapshot):
        if value is not None and (why := failure_of(value)):
            failed = value.metadata.name
            raise NotEligible(
                f"{failed} has failed: {why}", next_step=f"see why: snapshotctl explain {failed}"
            )
    if checkpoint is None and snapshot is None:
        names = [target.name for target in await objects.like(operator, targets)]
        raise NotFound(
            f"no checkpoint or snapshot is called {name} in namespace {namespace}",
            next_step=f"did you mean {' or '.join(dict.fromkeys(map(str, names)))}?"
            if names
            else "list what is captured: snapshotctl artifacts ls -A",
        )
    snapshot = snapshot if isinstance(snapshot, Snapshot) else None
    bound = snapshot.status.bound_snapshot_content_name if snapshot else None
    content = await operator.get(Target(KINDS["SnapshotContent"], None, bound)) if bound else None
    return Source(
        checkpoint if isinstance(checkpoint, DynamoCheckpoint) else None,
        snapshot,
        content if isinstance(content, SnapshotContent) else None,
    )


async def _with_spec(operator: Operator, source: Source) -> Source:
    """Return a source with the spec of its pod, as far as it is known.

    `get` returns less of a spec than the store of a cluster has.
    """
    if source.checkpoint is not None:
        document = await _document(operator, source.checkpoint)
        return source._replace(spec=document["spec"]["job"]["podTemplateSpec"]["spec"])
    captured = source.snapshot.spec.source.pod_ref if source.snapshot is not None else None
    if source.snapshot is None or captured is None:
        return source
    space = source.snapshot.metadata.namespace
    pod = await operator.manifest(Target(KINDS["Pod"], space, captured.name))
    if pod is not None and captured.uid in (None, pod["metadata"]["uid"]):
        return source._replace(spec=pod["spec"])
    document = await _document(operator, source.snapshot)
    text = document["metadata"].get("annotations", {}).get(POD_SPEC, "")
    return source._replace(spec=pod_manifests.kept_spec(text), is_kept=True)


async def _document(operator: Operator, value: DynamoCheckpoint | Snapshot) -> dict[str, Any]:
    """Return the whole of an object that was read. NotFound if it is gone meanwhile."""
    kind, meta = kind_of(value), value.metadata
    found = await operator.manifest(Target(kind, meta.namespace, meta.name))
    if found is None:
        raise NotFound(f"{kind.name} {meta.name} has just been deleted")
    return found
