"""The one step runner: journal, span, deadline, compensation, for every step of every order.

A step table is a list of `Step`; its names must be those of `steps.table` for the verb and the
driver. No step can forget its journal record or its deadline, because nothing else runs steps.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from snapshot_shared import instruments, steps
from snapshot_shared.errors import DeadlineExceeded, Internal, failure_of
from snapshot_shared.journal import Journal
from snapshot_shared.ledger import Began, Ended
from snapshot_shared.metrics import OFF, Metrics
from snapshot_shared.orders import Order, driver_of
from snapshot_shared.tasks import undisturbed
from snapshot_shared.telemetry import Attributes, Telemetry

log = logging.getLogger(__name__)

UNDO_S = 10.0
"""How long one compensation may take, in seconds (DESIGN: compensation ends within 10 s)."""


@dataclass(frozen=True)
class Step:
    """One stage: what to do, how long it may take, and how to undo it when a later one fails.

    `undo` runs when this step has begun, whether it ended or not, so it must tolerate both. It may
    take `undo_s` seconds.
    A step with `replayable=False` is never run a second time after an interruption.
    """

    name: str
    run: Callable[[], Awaitable[None]]
    deadline_s: float
    undo: Callable[[], Awaitable[None]] | None = None
    undo_s: float = UNDO_S
    replayable: bool = True


class Faults(Protocol):
    """The fault switch of the simulation: may raise, stall or crash when a step begins."""

    async def before(self, verb: str, step: str) -> None:
        """Be called when the step is on record and has not begun; its deadline runs already."""


class Runner:
    """Runs step tables for one service."""

    def __init__(
        self,
        journal: Journal,
        telemetry: Telemetry,
        faults: Faults | None = None,
        metrics: Metrics = OFF,
    ) -> None:
        """Use the service's journal, tracer and metrics; `faults` is absent unless asked for."""
        self._journal = journal
        self._telemetry = telemetry
        self._faults = faults
        self.metrics = metrics

    async def run(
        self,
        verb: str,
        order: Order,
        table: Sequence[Step],
        *,
        remaining_s: Callable[[], float],
    ) -> None:
        """Run the table; at the first failure undo the begun steps, newest first, and raise.

        `remaining_s` gives what is left of the order's own budget. DeadlineExceeded names the step.
        """
        if tuple(step.name for step in table) != steps.table(verb, driver_of(order)):
            raise Internal(f"the step table of {verb} is {[step.name for step in table]}")
        begun: list[Step] = []
        ended: list[Ended] = []
        try:
            for step in table:
                begun.append(step)
                began = Began(order=order.order, attempt=order.attempt, step=step.name)
                await self._journal.append(*ended, began)
                await self._run_step(verb, order, step, remaining_s())
                ended = [Ended(order=order.order, attempt=order.attempt, step=step.name)]
            # The report of how the order ended comes next, and is written with it.
            self._journal.write_later(*ended)
        except BaseException as error:
            why = "cancelled" if isinstance(error, asyncio.CancelledError) else failure_of(error)
            log.warning("%s ended at %s: %s", verb, begun[-1].name, why)
            await undisturbed(self._undo(order, begun))
            raise

    async def _run_step(self, verb: str, order: Order, step: Step, remaining_s: float) -> None:
        budget = min(step.deadline_s, remaining_s)
        attributes: Attributes = {
            "snapback.order.id": order.order,
            "snapback.attempt": order.attempt,
            "snapback.verb": verb,
        }
        with (
            self.metrics.timed(instruments.STEP_DURATION, verb, step.name),
            self._telemetry.span(step.name, attributes=attributes),
        ):
            scope = asyncio.timeout(max(budget, 0.0))
            try:
                async with scope:
                    if self._faults:
                        await self._faults.before(verb, step.name)
                    await step.run()
            except TimeoutError:
                if not scope.expired():
                    raise
                raise DeadlineExceeded(
                    f"{verb}: step {step.name} took longer than {budget:.1f} s",
                    step=step.name,
                    budget_s=round(budget, 3),
                ) from None

    async def _undo(self, order: Order, begun: Sequence[Step]) -> None:
        for step in reversed(begun):
            if step.undo is None:
                continue
            try:
                async with asyncio.timeout(step.undo_s):
                    await step.undo()
            except Exception:
                log.exception("compensation of %s failed", step.name)
