"""The command apply: store manifests."""

from __future__ import annotations

import msgspec

from snapshot_shared.validation import warnings
from snapshotctl import objects
from snapshotctl.command import File, command, new_app
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl apply -f deploy/examples/checkpoint.yaml",
    "cat *.yaml | snapshotctl apply -f -",
)
async def apply(tools: Tools, file: File) -> None:
    """Store the manifests of a file, all or none."""
    documents = tools.documents(file)
    if tools.kubernetes is None:
        for document in documents:
            for warning in warnings(msgspec.json.decode(document.encode()), "standalone"):
                tools.screen.note(f"warning: {document.placed(warning)}")
    async with tools.operator() as operator:
        results = await objects.store(operator, tools.telemetry, documents)
    if not tools.screen.wants_table:
        tools.screen.value([msgspec.to_builtins(result) for result in results])
        return
    for result in results:
        tools.screen.line(f"{result.kind.lower()}/{result.name} {result.action}")
