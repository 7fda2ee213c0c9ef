"""What a worker that was restored still has of its source, as far as its pod shows it.

A driver that brings a process back brings its environment, too: a variable that a container has
from its pod is in the memory of the process as its source had it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from snapshot_shared.transitions import Restore
from snapshotctl.views.finding import Finding, ok, warn

Document = Mapping[str, Any]

BRINGING = ("criu", "criu+cuda")
"""The drivers that bring the process back; the others start its program anew."""
_OWN = ("metadata.name", "metadata.uid", "status.podIP", "status.podIPs", "status.hostIP",
        "status.hostIPs", "spec.nodeName")  # fmt: skip
"""Fields of a pod that another pod has otherwise."""


def brought_back(restores: Sequence[Document]) -> dict[tuple[str, str], Document]:
    """Return the restores that have brought a process back, by namespace and name of the pod."""
    return {
        (each["metadata"]["namespace"], each["spec"]["podRef"]["name"]): each
        for each in restores
        if each.get("status", {}).get("state") == Restore.RESTORED
        and each["status"].get("driver") in BRINGING
    }


def clone_findings(restores: Sequence[Document], pods: Sequence[Document]) -> Iterator[Finding]:
    """Yield what was found in the pods of workers that were brought back; nothing without one."""
    found = brought_back(restores)
    wrong = False
    for pod in pods:
        meta = pod["metadata"]
        restore = found.get((meta["namespace"], meta["name"]))
        if restore is None or restore["spec"]["podRef"]["uid"] != meta["uid"]:
            continue
        for container in pod["spec"]["containers"]:
            stale = _of_the_pod(container)
            if container["name"] != restore["spec"]["podRef"].get("container", "main") or not stale:
                continue
            wrong = True
            yield warn(
                f"pod {meta['namespace']}/{meta['name']}: its process was brought back by "
                f"{restore['status']['driver']}, with its source's {', '.join(stale)}",
                "have the worker take name, address and node from what it is given after a "
                "restore: docs/how-to/after-a-restore.md",
            )
    if found and not wrong:
        yield ok("no worker that was brought back has name, address or node in its environment")


def _of_the_pod(container: Document) -> list[str]:
    return [
        row["name"]
        for row in container.get("env") or ()
        if ((row.get("valueFrom") or {}).get("fieldRef") or {}).get("fieldPath") in _OWN
    ]
