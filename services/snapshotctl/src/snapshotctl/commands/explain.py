"""The command explain: an object with its events, its state and the next steps; or a reason."""

from __future__ import annotations

import difflib
from typing import Annotated

import typer

from snapshot_api.facts import Node, Pod
from snapshot_shared.errors import NotFound
from snapshot_shared.reasons import REASONS, Reason, explained
from snapshotctl import objects
from snapshotctl.adapters.cluster_logs import ClusterLogs
from snapshotctl.command import Namespace, command, complete_explained, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator, Screen
from snapshotctl.tools import Tools
from snapshotctl.views import explanation
from snapshotctl.views.explanation import LogLine
from snapshotctl.views.related import RelatedObjects, reference, trace_of
from snapshotctl.views.state import ObjectState, object_state
from snapshotctl.views.timeline import Event

MAX_EVENTS = 60
"""How many of the last events are shown."""

_NODE_PROGRAMS = ("agent", "gms")

app = new_app()


@command(
    app,
    "snapshotctl explain demo-llm",
    "snapshotctl explain pod/demo-llm-restored",
    "snapshotctl explain DeviceTooSmall",
)
async def explain(
    tools: Tools,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|REASON",
            help="A checkpoint, snapshot, content, pod or node; KIND/NAME; or a reason.",
            autocompletion=complete_explained,
        ),
    ],
    namespace: Namespace = "default",
) -> None:
    """Explain an object: what was asked, what happened, its state, what to do.

    A reason, which is one word such as DeviceTooSmall, is explained without a server.
    """
    # Names of objects have no capitals, reasons begin with one.
    if name != name.lower() and "/" not in name:
        _show_reason(tools.screen, *_reason(name))
        return
    wanted = targets.explained(name, namespace)
    async with tools.operator() as operator:
        try:
            await _explain(operator, tools.screen, wanted, tools.logs(), now=tools.now())
        except NotFound:
            found = explained(name)
            if found is None:
                raise
            _show_reason(tools.screen, *found)


def _reason(word: str) -> tuple[str, Reason]:
    found = explained(word)
    if found is not None:
        return found
    near = difflib.get_close_matches(word, REASONS, n=3, cutoff=0.5)
    raise WrongArguments(
        f"{word!r} is no reason and no name of an object, which has no capitals",
        next_step=f"did you mean {' or '.join(near)}?"
        if near
        else "docs/troubleshooting.md lists all reasons",
    )


def _show_reason(screen: Screen, name: str, found: Reason) -> None:
    if not screen.wants_table:
        screen.value({"reason": name, **found._asdict()})
        return
    screen.line(name, strong=True)
    screen.line(f"  what it means  {found.meaning}")
    screen.line(f"  why it comes   {found.cause}")
    screen.line(f"  what to do     {found.fix}")


async def _explain(
    operator: Operator,
    screen: Screen,
    wanted: list[Target],
    logs: ClusterLogs | None,
    *,
    now: float,
) -> None:
    """Print the explanation of the first target that exists. `now` is seconds since the epoch."""
    root = await objects.find(operator, wanted)
    found = await objects.gather(operator, root)
    events = await objects.timeline_of(operator, found)
    state = object_state(found)
    progress = await operator.last_progress(state.order.order) if state.order else None
    presence = await operator.presence()
    asked = explanation.asked_services(found, state)
    silent = [
        f"{service}@{node}" for node, service in asked if not await operator.answers(node, service)
    ]
    held = explanation.held_back(asked, await operator.paused())
    lines = explanation.now_lines(found, state, presence, progress, silent, now)
    lines += [each.message for each in held]
    advice = explanation.advice(found, state, silent, held)
    logged = [] if logs is None or state.word == "fine" else _log(found, logs)
    if screen.wants_table:
        _show(screen, found, state, events, lines)
        if state.word != "fine":
            _show_log(screen, found, logged, logs)
        screen.line("What to do", strong=True)
        for line in advice:
            screen.line(f"  {explanation.pointing_up(line, root)}")
        return
    screen.value(
        {
            "object": reference(root),
            "state": state.word,
            "reason": state.reason,
            "message": state.message,
            "values": dict(state.values),
            "since": None if state.since is None else formats.stamp(state.since),
            "asked": explanation.asked(root),
            "happened": [event.value() for event in events],
            "now": lines,
            "waitingFor": None if state.order is None else formats.data(state.order),
            "log": [line._asdict() for line in logged],
            "silent": silent,
            "next": advice,
        }
    )


def _show(
    screen: Screen, found: RelatedObjects, state: ObjectState, events: list[Event], lines: list[str]
) -> None:
    screen.line(explanation.headline(found, state), strong=True)
    screen.line(f"  asked: {explanation.asked(found.root)}")
    screen.line("What happened", strong=True)
    if len(events) > MAX_EVENTS:
        screen.line(
            f"  … {len(events) - MAX_EVENTS} earlier: snapshotctl events {found.root.metadata.name}"
        )
    day, known = "", set[tuple[str, str]]()
    for event in events[-MAX_EVENTS:]:
        if (today := formats.stamp(event.at)[:10]) != day:
            day = today
            screen.line(f"  {day} (UTC)")
        why = (event.reason, event.message)
        text = f"{event.head}, as above" if why in known else event.text
        known.update({why} if event.message else ())
        screen.line(f"  {formats.clock(event.at):<12}  {event.where}: {text}")
    screen.line("Where it stands", strong=True)
    for line in lines:
        screen.line(f"  {line}")


def _log(found: RelatedObjects, logs: ClusterLogs) -> list[LogLine]:
    """Return the lines of the logs that matter for an object."""
    ids = explanation.order_ids(found)
    traces = [trace for trace in map(trace_of, found.primary) if trace]
    nodes = {item.node for _, item in found.orders} | {found.root.metadata.name}
    programs = ["operator", *(f"{node}-{kind}" for node in nodes for kind in _NODE_PROGRAMS)]
    since = "" if isinstance(found.root, Node) else found.root.metadata.creation_timestamp
    chosen = explanation.relevant_lines(logs.lines(), ids, programs, since, traces=traces)
    for value in found.primary:
        if isinstance(value, Pod) and value.status.node_name:
            written = logs.worker(value.status.node_name, value.metadata.uid)
            chosen += [explanation.parse_log_line(container, line) for container, line in written]
    return chosen


def _show_log(
    screen: Screen, found: RelatedObjects, logged: list[LogLine], logs: ClusterLogs | None
) -> None:
    if logged:
        screen.line("Log", strong=True)
        for line in logged:
            marks = " ".join(filter(None, (line.program, line.at[11:23], line.level)))
            screen.line(f"  {marks}: {line.text}")
    if logged and logs is not None:
        screen.line(f"  all of it: {logs.folder}")
    elif logs is None:
        screen.line("Log", strong=True)
        nodes = sorted({item.node for _, item in found.orders})
        where = f" and of agent and GMS on {', '.join(nodes)}" if nodes else ""
        screen.line(f"  not readable from here: see standard error of the operator{where}")
