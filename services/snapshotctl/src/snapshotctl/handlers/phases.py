"""The command watch: the phases of an object as they come, part by part, until it settles."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple

from snapshot_shared.errors import BusUnavailable, DeadlineExceeded
from snapshot_shared.objects import Job, Node, Pod, SnapshotRestore
from snapshot_shared.tasks import end_all
from snapshotctl.domain import formats, phases, story
from snapshotctl.domain.exits import NeverTrue, WrongArguments
from snapshotctl.domain.history import clock, stamp
from snapshotctl.domain.kin import Changed, Kin, reference
from snapshotctl.domain.phases import Phase
from snapshotctl.domain.story import Standing
from snapshotctl.domain.targets import Target
from snapshotctl.handlers import looking
from snapshotctl.handlers.following import Following
from snapshotctl.ports import News, Operator, Parts, Screen

LOOK_AGAIN_S = 15.0
"""How long news may be lost before the objects are read again, in seconds."""


class Clocks(NamedTuple):
    """Seconds since the epoch, and seconds that only go on."""

    wall: Callable[[], float]
    monotonic: Callable[[], float]


class _Show:
    """One story on the screen: what was shown of it already."""

    def __init__(self, screen: Screen, parts: Parts, phase: str, clocks: Clocks) -> None:
        self._screen = screen
        self._shown: set[Any] = set()
        self._is_begun = False
        self._wall = clocks.wall
        self.following = Following(phase, parts, clocks.monotonic)

    def show(self, kin: Kin, how: Standing) -> None:
        """Show what is new."""
        self._parts(kin)
        if (
            how.word in ("waiting", "unknown", "going")
            and ("waits", how.reason, how.message) not in self._shown
        ):
            self._shown.add(("waits", how.reason, how.message))
            self._waits(how)

    def _waits(self, how: Standing) -> None:
        why = ": ".join(filter(None, (how.reason, how.message)))
        if self._screen.wants_table:
            self._screen.line(f"  {clock(self._wall()):<12}  waits: {formats.plain(why)}")
        else:
            self._screen.entry({"waits": how.reason, "message": how.message})

    def _parts(self, kin: Kin) -> None:
        for phase in sorted(phases.phases(kin), key=lambda phase: phase.ended or phase.began):
            self._phase(phase)
        plan = phases.planned(kin)
        if plan is None:
            return
        owner, parts = plan
        settled = phases.settled_parts(kin)
        if not self._is_begun:
            self._is_begun = True
            moving = {part: size for part, size in parts.items() if part not in settled}
            self.following.begin(owner, moving)
        for part, size in settled.items():
            if part not in self._shown:
                self._shown.add(part)
                self.following.settled(part, size)

    def _phase(self, phase: Phase) -> None:
        is_over = bool(phase.ended)
        if (phase.key, is_over) in self._shown:
            return
        self._shown |= {(phase.key, is_over), (phase.key, False)}
        if self._screen.wants_table:
            self._screen.line(f"  {phase.line()}")
            return
        times = {"began": stamp(phase.began), "ended": stamp(phase.ended) if is_over else None}
        about = {"phase": phase.name, "where": phase.where, "failure": phase.failure}
        self._screen.entry({**about, **times})


async def watch(
    operator: Operator,
    screen: Screen,
    targets: Sequence[Target],
    *,
    within_s: float,
    clocks: Clocks,
) -> Kin:
    """Show phases until the first target that exists settles; give its story then.

    NotFound at once, NeverTrue when it failed or was deleted, DeadlineExceeded.
    """
    root = await looking.find(operator, targets)
    target = looking.target_of(root, targets)
    if isinstance(root, Node | Job):
        raise WrongArguments(
            f"{reference(root)} has no phases",
            next_step=f"look at it: snapshotctl explain {reference(root)}",
        )
    phase = "restore" if isinstance(root, Pod | SnapshotRestore) else "capture"
    try:
        async with asyncio.timeout(within_s):
            with screen.parts() as parts:
                shown = _Show(screen, parts, phase, clocks)
                found, how = await _until_settled(operator, shown, target)
    except TimeoutError:
        raise DeadlineExceeded(
            f"{target} is not settled within {within_s:g} s",
            next_step=f"see where it is: snapshotctl explain {target.typed}",
            budget_s=within_s,
        ) from None
    why = ": ".join(filter(None, (how.reason, how.message)))
    if how.word == "failed":
        raise NeverTrue(
            f"{target} has failed: {why}",
            next_step=f"the whole story: snapshotctl explain {target.typed}",
        )
    if screen.wants_table:
        now = clock(clocks.wall())
        screen.line(f"  {now:<12}  {target} is ready: {formats.plain(why)}", strong=True)
    else:
        screen.entry({"object": str(target), "state": how.word, "message": how.message})
    return found


async def _until_settled(operator: Operator, shown: _Show, target: Target) -> tuple[Kin, Standing]:
    changed = asyncio.Event()
    known: set[str] = set()
    async with operator.progress() as messages, operator.news() as news:
        listening = asyncio.create_task(shown.following.listen(messages))
        hearing = asyncio.create_task(_hear(news, known, changed))
        try:
            while True:
                changed.clear()
                with contextlib.suppress(BusUnavailable):
                    found = await _look(operator, target)
                    known |= {value.metadata.uid for value in found.members}
                    how = story.standing(found)
                    shown.show(found, how)
                    if how.word in ("fine", "failed"):
                        return found, how
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_AGAIN_S):
                        await changed.wait()
        finally:
            await end_all(listening, hearing)


async def _look(operator: Operator, target: Target) -> Kin:
    root = await operator.get(target)
    if root is None:
        raise NeverTrue(
            f"{target} was deleted",
            next_step=f"what is kept of it: snapshotctl events | grep {target.name}",
        )
    return await looking.gather(operator, root)


async def _hear(news: AsyncIterator[News], known: set[str], changed: asyncio.Event) -> None:
    """Say when an object of the story has changed, for ever."""
    async for item in news:
        if item is None or (isinstance(item, Changed) and item.is_of(known)):
            changed.set()
