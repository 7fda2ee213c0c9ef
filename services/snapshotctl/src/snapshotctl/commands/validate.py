"""The command validate: whether the manifests of a file are right, without a server."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import typer

from snapshot_shared.errors import InvalidManifest
from snapshot_shared.validation import World, problems, warnings
from snapshotctl.command import File, command, new_app
from snapshotctl.domain.documents import Document
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
    found = [_checked(document, world) for document in documents]
    if refused := [f"{each['where']}: {problem}" for each in found for problem in each["problems"]]:
        raise InvalidManifest(
            f"{len(refused)} problem{'' if len(refused) == 1 else 's'}",
            next_step="correct the fields and run it again",
            problems=refused,
        )
    if not tools.screen.wants_table:
        tools.screen.value(found)
        return
    for each in found:
        for warning in each["warnings"]:
            tools.screen.note(f"warning: {each['where']}: {warning}")
        tools.screen.line(f"{each['where']}: right")


def _checked(document: Document, world: World) -> dict[str, Any]:
    value = msgspec.json.decode(document.encode())
    missing = warnings(value) if world == "kubernetes" else []
    return {
        "where": document.where,
        "problems": [str(problem) for problem in problems(value, world)],
        "warnings": [str(problem) for problem in missing],
    }
