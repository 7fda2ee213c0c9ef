"""The command watch: the phases of a capture or a restore as they come, part by part."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Collection, Sequence
from typing import Any

import msgspec

from snapshot_api.facts import Job, Node, Pod
from snapshot_api.kinds import KINDS
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_shared.errors import BusUnavailable, DeadlineExceeded
from snapshot_shared.ids import OrderId, owner_of
from snapshot_shared.orders import Progress
from snapshot_shared.tasks import end_all
from snapshotctl import objects
from snapshotctl.command import Namespace, Timeout, Traced, command, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import NeverTrue, WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import News, Operator, Parts, Screen
from snapshotctl.tools import Tools
from snapshotctl.views import state
from snapshotctl.views.explanation import numbers_of
from snapshotctl.views.progress import ProgressDisplay
from snapshotctl.views.related import ObjectChanged, RelatedObjects, reference
from snapshotctl.views.state import ObjectState, TimedPhase

LOOK_AGAIN_S = 15.0
"""How long news may be lost before the objects are read again, in seconds."""

app = new_app()

JUST_NOW_S = 2.0
"""For how long an end counts as now, in seconds."""


@command(app, "snapshotctl watch demo-llm", "snapshotctl watch pod/demo-llm-restored --timeout 5m")
async def watch(
    tools: Tools, name: Traced, timeout: Timeout = "1h", namespace: Namespace = "default"
) -> None:
    """Show a capture or a restore phase by phase and part by part, until it is over.

    Ends with exit code 1 when it failed.
    """
    wanted, within_s = targets.traced(name, namespace), formats.parse_duration(timeout)
    async with tools.operator(patiently=True) as operator:
        await _watch(tools, operator, wanted, within_s=within_s)


async def create_and_watch(
    tools: Tools, operator: Operator, document: Document, namespace: str, *, within_s: float
) -> None:
    """Store an object and show its phases until it is ready. NeverTrue, DeadlineExceeded."""
    [made] = await objects.store(operator, tools.telemetry, [document])
    if tools.screen.wants_table:
        tools.screen.line(f"{made.kind.lower()}/{made.name} {made.action}")
    else:
        tools.screen.entry(msgspec.to_builtins(made))
    kind, name = KINDS[document.value["kind"]], document.value["metadata"]["name"]
    target = Target(kind, namespace, name)
    try:
        await _watch(tools, operator, [target], within_s=within_s)
    except asyncio.CancelledError:
        tools.screen.note(f"{target} goes on; follow it: snapshotctl watch {target.typed}")
        tools.screen.note(f"or give it up: snapshotctl delete {target.typed}")
        raise


async def _watch(
    tools: Tools, operator: Operator, wanted: Sequence[Target], *, within_s: float
) -> None:
    """Show phases until the first target that exists is ready.

    NotFound at once, NeverTrue when it failed or was deleted, DeadlineExceeded.
    """
    root = await objects.find(operator, wanted)
    target = objects.target_of(root, wanted)
    if isinstance(root, Node | Job):
        raise WrongArguments(
            f"{reference(root)} has no phases",
            next_step=f"look at it: snapshotctl explain {reference(root)}",
        )
    phase = "restore" if isinstance(root, Pod | SnapshotRestore) else "capture"
    numbers = ""
    try:
        async with asyncio.timeout(within_s):
            with tools.screen.parts() as parts:
                display = Display(tools, parts, phase)
                ended = await until_ended(operator, display, target)
                numbers = display.numbers
    except TimeoutError:
        raise DeadlineExceeded(
            f"{target} is not over within {within_s:g} s, and goes on",
            next_step=f"see where it is: snapshotctl explain {target.typed}; follow it: "
            f"snapshotctl watch {target.typed}",
            budget_s=within_s,
        ) from None
    _show_end(tools.screen, target, ended, numbers, tools.now())


def _show_end(screen: Screen, target: Target, ended: ObjectState, numbers: str, now: float) -> None:
    """Print that an object is ready. NeverTrue when it has failed."""
    why = ": ".join(filter(None, (ended.reason, ended.message)))
    if ended.word == "failed":
        raise NeverTrue(
            f"{target} has failed: {why}", next_step=f"see why: snapshotctl explain {target.typed}"
        )
    if screen.wants_table:
        # A condition has whole seconds.
        at = now if ended.since is None or now - ended.since < JUST_NOW_S else ended.since
        line = f"  {formats.clock(at):<12}  {target} is ready: {formats.plain(why)}"
        screen.line(line, strong=True)
        if numbers:
            screen.line(f"  {'':<12}  {numbers}")
    else:
        about = {"object": str(target), "state": ended.word, "message": ended.message}
        screen.entry({**about, "numbers": numbers})


class Display:
    """One object on the screen: what was shown of it already."""

    def __init__(self, tools: Tools, parts: Parts, phase: str, subject: str = "") -> None:
        """Show the phase `capture` or `restore`; each line names the `subject` if it is given."""
        self._subject = subject
        self._screen = tools.screen
        self._now = tools.now
        self._shown: set[Any] = set()
        self._is_begun = False
        self.numbers = ""
        """What it has cost, in a sentence, once it is over."""
        self.progress = ProgressDisplay(
            phase,
            lambda part: parts.show(part._replace(part=f"{subject} {part.part}".lstrip())),
            tools.monotonic,
        )

    def show(self, found: RelatedObjects, current: ObjectState) -> None:
        """Show what is new."""
        for phase in sorted(state.phases(found), key=lambda phase: phase.ended or phase.began):
            self._show_phase(phase)
        self._show_parts(found)
        self.numbers = numbers_of(found)
        waits = ("waits", current.reason, current.message)
        if current.word in ("waiting", "unknown", "going") and waits not in self._shown:
            self._shown.add(waits)
            self._show_waits(current.reason, current.message)

    def show_awaited(self, text: str) -> None:
        """Show what the worker waits for before it is quiet, once."""
        if text not in self._shown:
            self._shown.add(text)
            self._show_waits("Worker", text)

    def _show_waits(self, reason: str, message: str) -> None:
        why = ": ".join(filter(None, (reason, message)))
        if self._screen.wants_table:
            at = formats.clock(self._now())
            self._line(f"{at:<12}  waits: {formats.plain(why)}")
        else:
            self._entry({"waits": reason, "message": message})

    def _line(self, text: str) -> None:
        self._screen.line(f"  {self._subject} {text}" if self._subject else f"  {text}")

    def _entry(self, value: dict[str, Any]) -> None:
        self._screen.entry({"of": self._subject, **value} if self._subject else value)

    def _show_parts(self, found: RelatedObjects) -> None:
        plan = state.planned_parts(found)
        if plan is None:
            return
        owner, parts = plan
        complete = state.complete_parts(found)
        if not self._is_begun:
            self._is_begun = True
            # Parts that are complete already would be shown as 0 bytes first.
            moving = {part: size for part, size in parts.items() if part not in complete}
            self.progress.begin(owner, moving)
        for part, size in complete.items():
            if part not in self._shown:
                self._shown.add(part)
                self.progress.complete(part, size)

    def _show_phase(self, phase: TimedPhase) -> None:
        is_over = bool(phase.ended)
        if (phase.key, is_over) in self._shown:
            return
        # One that was first seen at its end has no line of its beginning.
        self._shown |= {(phase.key, is_over), (phase.key, False)}
        if self._screen.wants_table:
            self._line(phase.line())
            return
        ended = formats.stamp(phase.ended) if is_over else None
        times = {"began": formats.stamp(phase.began), "ended": ended}
        about = {"phase": phase.name, "where": phase.where, "failure": phase.failure}
        self._entry({**about, **times})


async def until_ended(operator: Operator, display: Display, target: Target) -> ObjectState:
    """Show an object until it is ready or has failed; return its state then. NeverTrue."""
    changed = asyncio.Event()
    known: set[str] = set()
    async with operator.progress() as messages, operator.news() as news:
        receiving = asyncio.create_task(
            display.progress.receive(_show_awaited(messages, known, display))
        )
        notifying = asyncio.create_task(_notify(news, known, changed))
        try:
            while True:
                # Cleared before the read: a change during it causes another one.
                changed.clear()
                with contextlib.suppress(BusUnavailable):
                    found = await _read(operator, target)
                    known |= {value.metadata.uid for value in found.members}
                    current = state.object_state(found)
                    display.show(found, current)
                    if current.word in ("fine", "failed"):
                        return current
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await changed.wait()
        finally:
            await end_all(receiving, notifying)


async def _show_awaited(
    messages: AsyncIterator[Progress], known: Collection[str], display: Display
) -> AsyncIterator[Progress]:
    """Yield the messages; show what the orders of the known objects wait for."""
    async for message in messages:
        if message.awaits and owner_of(OrderId(message.order)) in known:
            display.show_awaited(message.awaits)
        yield message


async def _read(operator: Operator, target: Target) -> RelatedObjects:
    root = await operator.get(target)
    if root is None:
        raise NeverTrue(
            f"{target} was deleted",
            next_step=f"what is kept of it: snapshotctl events | grep {target.name}",
        )
    return await objects.gather(operator, root)


async def _notify(news: AsyncIterator[News], known: set[str], changed: asyncio.Event) -> None:
    """Set an event when one of the known objects has changed, until cancelled."""
    async for item in news:
        if item is None or (isinstance(item, ObjectChanged) and item.concerns(known)):
            changed.set()
