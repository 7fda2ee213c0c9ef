"""The command validate: whether the manifests of a file are right, without a server."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from snapshot_shared.errors import InvalidManifest
from snapshot_shared.validation import World, problems, repetitions, warnings
from snapshotctl.command import File, command, new_app
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl validate -f checkpoint.yaml",
    "snapshotctl validate --standalone -f deploy/examples/checkpoint.yaml",
    "kubectl kustomize overlays/test | snapshotctl validate -f - -o json",
)
async def validate(
    tools: Tools,
    file: File,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Check for standalone mode, not for a cluster.")
    ] = False,
) -> None:
    """Check the manifests of a file by the rules of the operator, without a server.

    Every problem is named by its field. A cluster may lack what the file does not show, such as a
    Secret. Kinds of Kubernetes itself are left to Kubernetes.
    """
    world: World = "standalone" if standalone else "kubernetes"
    documents = tools.documents(file)
    values = [msgspec.json.decode(document.encode()) for document in documents]
    found = [[str(problem) for problem in problems(value, world)] for value in values]
    for place, problem in repetitions(values):
        found[place].append(str(problem))
    missing = [list(map(str, [] if standalone else warnings(value))) for value in values]
    wheres = [document.where for document in documents]
    if refused := [
        f"{where}: {problem}" for where, each in zip(wheres, found, strict=True) for problem in each
    ]:
        raise InvalidManifest(
            f"{len(refused)} problem{'' if len(refused) == 1 else 's'}",
            next_step="correct the fields and run it again",
            problems=refused,
        )
    checked = list(zip(wheres, missing, strict=True))
    if not tools.screen.wants_table:
        tools.screen.value([{"where": where, "warnings": each} for where, each in checked])
        return
    for where, each in checked:
        for warning in each:
            tools.screen.note(f"warning: {where}: {warning}")
        tools.screen.line(f"{where}: right")
