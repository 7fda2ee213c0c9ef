"""The command render: manifests as admission would have them stored."""

from __future__ import annotations

import msgspec

from snapshotctl.command import Files, command, new_app
from snapshotctl.domain.documents import written
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl render -f pod.yaml",
    "snapshotctl render -f deployment.yaml --context prod | kubectl apply -f -",
)
async def render(tools: Tools, files: Files) -> None:
    """Print the manifests of a file with all that an operator puts into pods.

    Pods with an annotation `nvidia.com/capturable` or `nvidia.com/restore-from`, and templates of
    such pods, get their control directory and memory server. Such pods start while no operator
    answers. A pod with the policy `Immediate` starts cold then. Images are those of the cluster of
    --context, or else of SNAPBACK_GMS_IMAGE and SNAPBACK_AGENT_IMAGE. It changes nothing.
    """
    documents = [msgspec.json.decode(each.encode()) for each in tools.documents(*files)]
    found = tools.rendered(documents)
    if tools.screen.wants_table:
        tools.screen.verbatim(written(found))
    else:
        tools.screen.value(found)
