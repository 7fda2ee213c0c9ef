"""The page of state machines and step tables, drawn from the tables that the programs use."""

from __future__ import annotations

from typing import Any

from gms.domain.fence import FENCES, FencePhase
from gms.domain.locks import LOCKS, USES, Lock, Use
from snapshot_shared.orders import TERMINAL
from snapshot_shared.steps import AGENT_VERBS, GMS_VERBS, STEPS
from snapshot_shared.transitions import CAPTURE, RESTORE, Capture, Restore, TransitionTable

PAGE = "state-machines.md"

INTRO = """\
# State machines

Each is one table in the code, `(state, event) -> state`; what has no row is refused as
`InvalidTransition`, with both. The pictures are drawn from the tables by `make docs`.
"""

MACHINES: tuple[tuple[str, TransitionTable[Any, Any], Any, str, str], ...] = (
    (
        "A capture",
        CAPTURE,
        Capture.PENDING,
        "shared/src/snapshot_shared/transitions.py",
        (
            "Where one SnapshotContent stands; the operator folds reports into events. A capture "
            "that failed before\nthe freeze, and may be tried again, goes back to Pending with the "
            "next attempt."
        ),
    ),
    (
        "A restore",
        RESTORE,
        Restore.PENDING,
        "shared/src/snapshot_shared/transitions.py",
        (
            "Where one SnapshotRestore stands. Nothing is committed before everything is loaded, "
            "and a failure\nforgets what was loaded first. What failed without touching the "
            "worker, and may be tried again, goes\nback to Pending with the next attempt."
        ),
    ),
    (
        "Memory of a device",
        LOCKS,
        Lock.EMPTY,
        "services/gms/src/gms/domain/locks.py",
        (
            "Who holds one domain (weights or kv) of one device: a committed layout or none, one "
            "writer or none,\nreaders or none."
        ),
    ),
    (
        "A session",
        USES,
        Use.WRITING,
        "services/gms/src/gms/domain/locks.py",
        (
            "What a client that holds a lock may ask for. Readers begin in `reading`; `spent` is a "
            "layout that\nwaits hidden."
        ),
    ),
    (
        "A fence",
        FENCES,
        FencePhase.PENDING,
        "services/gms/src/gms/domain/fence.py",
        (
            "While it is pending or held no client attaches or commits; once every saver has its "
            "lease, readers may."
        ),
    ),
)


def page() -> str:
    """Write the page."""
    parts = [INTRO]
    for title, table, first, where, text in MACHINES:
        parts += [f"## {title}\n", f"{text}\n", f"`{table.name}` in [`{where}`](../{where}).\n"]
        parts += [_picture(table, first), _rows(table)]
    parts += [_steps(AGENT_VERBS, "agent"), _steps(GMS_VERBS, "GMS")]
    return "\n".join(parts).rstrip() + "\n"


def _picture(table: TransitionTable[Any, Any], first: Any) -> str:
    """Draw a table in Mermaid, the events between the same two states on one arrow."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), target in table.rows.items():
        arrows.setdefault((_name(state), _name(target)), []).append(event.value)
    lines = [f"    [*] --> {_name(first)}"]
    lines += [f"    {a} --> {b}: {', '.join(events)}" for (a, b), events in arrows.items()]
    lines += [f"    {_name(state)} --> [*]" for state in sorted(table.terminal())]
    return "\n".join(["```mermaid", "stateDiagram-v2", *lines, "```", ""])


def _name(state: Any) -> str:
    return str(state.value).replace("-", "_")


def _rows(table: TransitionTable[Any, Any]) -> str:
    lines = ["| in state | on event | to state |", "|---|---|---|"]
    lines += [f"| {state} | {event} | {target} |" for (state, event), target in table.rows.items()]
    return "\n".join(lines) + "\n"


def _steps(verbs: tuple[str, ...], service: str) -> str:
    lines = [
        f"## Steps of the {service}",
        "",
        "In the order in which they run. Each is journalled before it begins and has a deadline;",
        "`snapshotctl sim --at` takes the same names.",
        "",
        "| verb | steps | ends with |",
        "|---|---|---|",
    ]
    for verb in verbs:
        steps = " → ".join(f"`{step}`" for step in STEPS[verb])
        lines.append(f"| {verb} | {steps} | `{TERMINAL[verb]}` |")
    return "\n".join(lines) + "\n"
