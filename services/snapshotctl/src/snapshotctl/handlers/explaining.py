"""The command explain: the story of an object, or what a reason means."""

from __future__ import annotations

from snapshot_shared.objects import Node, Pod
from snapshot_shared.reasons import Reason
from snapshotctl.domain import formats, history, logs, story
from snapshotctl.domain.history import Happening
from snapshotctl.domain.kin import Kin, reference
from snapshotctl.domain.logs import LogLine
from snapshotctl.domain.story import Standing
from snapshotctl.domain.targets import Target
from snapshotctl.handlers import looking
from snapshotctl.handlers.traces import trace_of
from snapshotctl.ports import Logs, Operator, Screen

SHOWN = 60
"""How many of the last happenings are shown."""

_NODE_PROGRAMS = ("agent", "gms")

Named = tuple[str, Reason]
"""A reason with its name."""


def reason(screen: Screen, name: str, found: Reason) -> None:
    """Explain a reason by itself."""
    if not screen.wants_table:
        screen.value({"reason": name, **found._asdict()})
        return
    screen.line(name, strong=True)
    screen.line(f"  what it means  {found.meaning}")
    screen.line(f"  why it comes   {found.cause}")
    screen.line(f"  what to do     {found.fix}")


async def explain(
    operator: Operator, screen: Screen, targets: list[Target], logged: Logs | None, *, now: float
) -> None:
    """Tell the story of the first target that exists. `now` is seconds since the epoch."""
    root = await looking.find(operator, targets)
    found = await looking.gather(operator, root)
    happened = await looking.history_of(operator, found)
    how = story.standing(found)
    progress = await operator.last_progress(how.order.order) if how.order else None
    presence = await operator.presence()
    silent = [
        f"{service}@{node}"
        for node, service in story.asked_services(found, how)
        if not await operator.answers(node, service)
    ]
    lines = story.now_lines(found, how, presence, progress, silent, now)
    advice = story.advice(found, how, silent)
    chosen = [] if logged is None else _log(found, how, logged)
    if screen.wants_table:
        _show(screen, found, how, happened, lines)
        if how.word != "fine":
            _show_log(screen, found, chosen, logged)
        screen.line("What to do", strong=True)
        for line in advice:
            screen.line(f"  {line}")
        return
    screen.value(
        {
            "object": reference(root),
            "state": how.word,
            "reason": how.reason,
            "message": how.message,
            "values": dict(how.values),
            "since": None if how.since is None else history.stamp(how.since),
            "asked": story.asked(root),
            "happened": [item.value() for item in happened],
            "now": lines,
            "waitingFor": None if how.order is None else formats.data(how.order),
            "log": [line._asdict() for line in chosen],
            "silent": silent,
            "next": advice,
        }
    )


def _show(
    screen: Screen, found: Kin, how: Standing, happened: list[Happening], lines: list[str]
) -> None:
    screen.line(story.headline(found, how), strong=True)
    screen.line(f"  asked: {story.asked(found.root)}")
    screen.line("What happened", strong=True)
    if len(happened) > SHOWN:
        screen.line(
            f"  … {len(happened) - SHOWN} earlier: snapshotctl events {found.root.metadata.name}"
        )
    day, known = "", set[tuple[str, str]]()
    for item in happened[-SHOWN:]:
        if (today := history.stamp(item.at)[:10]) != day:
            day = today
            screen.line(f"  {day} (UTC)")
        told = (item.reason, item.message)
        text = f"{item.head}, as above" if told in known else item.text
        known.update({told} if item.message else ())
        screen.line(f"  {history.clock(item.at):<12}  {item.where}: {text}")
    screen.line("Where it stands", strong=True)
    for line in lines:
        screen.line(f"  {line}")


def _log(found: Kin, how: Standing, logged: Logs) -> list[LogLine]:
    """Choose from the logs; of what is well, nothing."""
    if how.word == "fine":
        return []
    ids = [*story.order_ids(found), *filter(None, map(trace_of, found.told))]
    nodes = {item.node for _, item in found.orders} | {found.root.metadata.name}
    programs = ["operator", *(f"{node}-{kind}" for node in nodes for kind in _NODE_PROGRAMS)]
    since = "" if isinstance(found.root, Node) else found.root.metadata.creation_timestamp
    chosen = logs.relevant(logged.lines(), ids, programs, since)
    for value in found.told:
        if isinstance(value, Pod) and value.status.node_name:
            written = logged.worker(value.status.node_name, value.metadata.uid)
            chosen += [logs.parse(container, line) for container, line in written]
    return chosen


def _show_log(screen: Screen, found: Kin, chosen: list[LogLine], logged: Logs | None) -> None:
    if chosen:
        screen.line("Log", strong=True)
        for line in chosen:
            marks = " ".join(filter(None, (line.program, line.at[11:23], line.level)))
            screen.line(f"  {marks}: {line.text}")
    if chosen and logged is not None:
        screen.line(f"  all of it: {logged.folder}")
    elif logged is None:
        screen.line("Log", strong=True)
        nodes = sorted({item.node for _, item in found.orders})
        where = f" and of agent and GMS on {', '.join(nodes)}" if nodes else ""
        screen.line(f"  not readable from here: see standard error of the operator{where}")
