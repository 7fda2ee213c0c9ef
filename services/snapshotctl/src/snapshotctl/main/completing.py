"""What a shell offers when the user presses Tab: kinds, and the names that a cluster has now.

A cluster that does not answer at once offers nothing, and says nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Sequence

import typer

from snapshot_shared.errors import SnapbackError
from snapshot_shared.manifests import message_schemas
from snapshot_shared.objects import KINDS, Kind, find_kind
from snapshotctl.adapters.folders import Folders
from snapshotctl.adapters.operator_client import connected
from snapshotctl.domain import targets

PROGRAM = "snapshotctl"
VARIABLE = "_SNAPSHOTCTL_COMPLETE"
"""The variable by which the script of a shell asks us, as typer and click name it."""

PATIENCE_S = 1.0
"""How long a user who pressed Tab waits at most for a cluster, in seconds."""


def kinds_and_names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete `KIND NAME` and `KIND/NAME`."""
    known = context.params.get("words") or []
    if "/" in incomplete:
        kind = _kind(incomplete.partition("/")[0])
        prefix = incomplete.partition("/")[0] + "/"
        return [prefix + name for name in _names(context, [kind])] if kind else []
    if known:
        kind = _kind(known[0]) if len(known) == 1 else None
        return _names(context, [kind]) if kind else []
    return [kind.plural for kind in KINDS.values()]


def captured(context: typer.Context) -> list[str]:
    """Complete the name of whatever may hold an artifact."""
    return _names(context, [KINDS[name] for name in targets.VERIFIABLE])


def traced(context: typer.Context) -> list[str]:
    """Complete the name of whatever may have a trace."""
    return _names(context, [KINDS[name] for name in targets.TRACED])


def nodes(context: typer.Context) -> list[str]:
    """Complete the name of a node."""
    return _names(context, [KINDS["Node"]])


def queue_words(context: typer.Context) -> list[str]:
    """Complete a node, or `show`."""
    return [] if context.params.get("words") else ["show", *nodes(context)]


def schemas() -> list[str]:
    """Complete the type of a message or object."""
    return list(message_schemas())


def _kind(text: str) -> Kind | None:
    with contextlib.suppress(SnapbackError):
        return find_kind(text)
    return None


def _names(context: typer.Context, kinds: Sequence[Kind]) -> list[str]:
    root = context.find_root().params
    space = context.params.get("namespace") or "default"

    async def look() -> list[str]:
        server = Folders(os.environ).find_server(root.get("server"), root.get("cluster"))
        async with asyncio.timeout(PATIENCE_S), connected(server) as client:
            found = [await client.all_of(kind, targets.place(kind, space)) for kind in kinds]
            return sorted({item.metadata.name for items in found for item in items})

    try:
        return asyncio.run(look())
    except (SnapbackError, OSError, ValueError):
        return []
