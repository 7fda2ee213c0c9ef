"""What the demo prints for people: about 25 lines of at most 80 columns, step by step."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from snapshot_api import figures
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshotctl.domain import formats
from snapshotctl.domain.cluster import ClusterAccess
from snapshotctl.domain.demo_engines import Engine
from snapshotctl.domain.demo_script import MIB, SOURCE_NODE, TARGET_NODE

WIDTH = 80
INDENT = "    "
MOST_SHOWN = 3
"""How many answers are shown of one worker."""

START = "1/5 A cluster of real processes"
STARTED_ELSEWHERE = "it runs already, nothing is started"
CAPTURE = "3/5 Capture the worker while it lives"
RESTORE = f"5/5 Restore the worker on {TARGET_NODE}"
NO_SMALL_NODE = "no node can be added here, so none that is too small is tried"
REMOVED = "Everything is ended and removed."
WITHOUT_KEEP = "With --keep it stays, to look around; --trace shows where the time went."


def wrapped(text: str) -> list[str]:
    """Return a detail of a step, in as many lines as it needs."""
    return textwrap.wrap(
        text, WIDTH, initial_indent=INDENT, subsequent_indent=INDENT * 2, break_on_hyphens=False
    )


def started(name: str, seconds: float) -> list[str]:
    """Return that the cluster is up."""
    took = formats.span_time(seconds)
    return wrapped(
        f"{name}: nats-server, the operator, {SOURCE_NODE} and {TARGET_NODE}, after {took}"
    )


def cold_start(engine: Engine, size_mib: int) -> str:
    """Return the title of the cold start."""
    return (
        f"2/5 Cold start on {SOURCE_NODE}: {engine.what}, {formats.size(size_mib * MIB)} of weights"
    )


def waiting(what: str, seconds: float, share: str) -> str:
    """Return what is under way, for how long already, and how far it is where that is known."""
    return f"{INDENT}{what}: {', '.join(filter(None, (share, f'{seconds:.0f} s so far')))}"


def cold(seconds: float) -> list[str]:
    """Return how long the cold start took."""
    return wrapped(f"cold start: {formats.span_time(seconds)} to the first answer")


def restored(seconds: float) -> list[str]:
    """Return how long the restore took."""
    return wrapped(f"restore: {formats.span_time(seconds)} to the first answer")


def learned(said: str) -> list[str]:
    """Return what the worker was given to learn."""
    return wrapped(f'it learns: "{said}"')


def captured(content: SnapshotContent) -> list[str]:
    """Return what was captured in which time, and the pause."""
    return wrapped(figures.capture_text(content))


def answers(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """Return questions with their answers, the first few."""
    lines = [line for asked, said in pairs[:MOST_SHOWN] for line in wrapped(f"{asked} -> {said}")]
    more = len(pairs) - MOST_SHOWN
    return lines + (wrapped(f"and {more} more") if more > 0 else [])


def lost(killed: Sequence[str]) -> str:
    """Return the title of the loss of the node, with how many processes it had."""
    return f"4/5 {SOURCE_NODE} is lost: its {len(killed)} processes are killed with SIGKILL"


def same(count: int) -> list[str]:
    """Return that the clone has answered as its source."""
    return wrapped(f"all {count} answers are the same, byte for byte")


def refused(reason: str) -> list[str]:
    """Return that a node that is too small was not used."""
    return wrapped(f"on a node whose GPUs are too small it is refused: {reason}")


def conclusion(cold_s: float, restored_s: float) -> str:
    """Return how the restore compares with the cold start."""
    return f"The restore was {figures.comparison(cold_s, restored_s)}."


def look_around(access: ClusterAccess, pod: str, engine: Engine) -> list[str]:
    """Return how to look at a cluster that goes on, one command a line, and how to end it."""
    ask = [] if engine.asks != "lines" else [f'{access.snapshotctl} ask {pod} "{engine.asked[-1]}"']
    commands = [*ask, f"{access.snapshotctl} trace pod/{pod}", f"{access.nats} stream ls"]
    page = f"; its page is {access.page}" if access.page else ""
    end = access.end[:1].upper() + access.end[1:]
    return [f"It goes on{page}", *(f"{INDENT}{line}" for line in commands), end]
