"""The command apply: store manifests, or see what that would do."""

from __future__ import annotations

from typing import Annotated

import msgspec
import typer

from snapshot_api.validate import warnings
from snapshotctl import objects
from snapshotctl.command import Files, MaybeNamespace, command, new_app
from snapshotctl.domain.documents import in_namespace
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl apply -f deploy/examples/checkpoint.yaml",
    "snapshotctl apply -f checkpoint.yaml -f restore.yaml -n team-a --dry-run",
    "cat *.yaml | snapshotctl apply -f -",
)
async def apply(
    tools: Tools,
    files: Files,
    namespace: MaybeNamespace = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check everything, say what would change, store nothing."),
    ] = False,
) -> None:
    """Store the manifests of files, all or none.

    With --dry-run the server checks them by all its rules, also against what is there; `validate`
    needs no server and so knows less.
    """
    documents = tools.documents(*files)
    if namespace is not None:
        documents = [in_namespace(document, namespace) for document in documents]
    if tools.kubernetes is None:
        for document in documents:
            for warning in warnings(msgspec.json.decode(document.encode()), "standalone"):
                tools.screen.note(f"warning: {document.placed(warning)}")
    async with tools.operator() as operator:
        if dry_run:
            results = await objects.tried(operator, documents)
        else:
            results = await objects.store(operator, tools.telemetry, documents)
    if not tools.screen.wants_table:
        tools.screen.value([msgspec.to_builtins(result) for result in results])
        return
    tail = " (dry run)" if dry_run else ""
    for result in results:
        tools.screen.line(f"{result.kind.lower()}/{result.name} {result.action}{tail}")
