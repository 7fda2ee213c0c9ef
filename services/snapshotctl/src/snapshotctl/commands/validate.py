"""The command validate: whether the manifests of a file are right, without a server."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from snapshot_api.validate import World, problems, repetitions, unchecked, warnings
from snapshot_shared.errors import InvalidManifest
from snapshotctl.command import Files, command, new_app
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
    files: Files,
    standalone: Annotated[
        bool, typer.Option("--standalone", help="Check for standalone mode, not for a cluster.")
    ] = False,
) -> None:
    """Check the manifests of a file by the rules of the operator, without a server.

    Every problem is named by its field. A cluster may lack what the file does not show, such as a
    Secret. Of kinds of Kubernetes itself only the annotations of Snapback are checked, and the
    output says so.
    """
    world: World = "standalone" if standalone else "kubernetes"
    documents = tools.documents(*files)
    values = [msgspec.json.decode(document.encode()) for document in documents]
    found = [[str(problem) for problem in problems(value, world)] for value in values]
    for place, problem in repetitions(values):
        found[place].append(str(problem))
    doubts = [list(map(str, warnings(value, world))) for value in values]
    if refused := [
        document.placed(problem)
        for document, each in zip(documents, found, strict=True)
        for problem in each
    ]:
        raise InvalidManifest(
            f"{len(refused)} problem{'' if len(refused) == 1 else 's'}",
            next_step="correct the fields and run it again",
            problems=refused,
        )
    left = [unchecked(value, world) for value in values]
    checked = list(zip(documents, doubts, left, strict=True))
    if not tools.screen.wants_table:
        tools.screen.value(
            [
                {"where": each.where, "warnings": doubt, "notChecked": rest}
                for each, doubt, rest in checked
            ]
        )
        return
    for document, each, rest in checked:
        for warning in each:
            tools.screen.note(f"warning: {document.placed(warning)}")
        tools.screen.line(f"{document.where}: " + (f"not checked: {rest}" if rest else "right"))
