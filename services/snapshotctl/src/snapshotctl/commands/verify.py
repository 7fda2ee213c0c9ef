"""The command verify: read every byte of an artifact and compare it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import Condition, condition
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared.tasks import end_all
from snapshotctl import objects
from snapshotctl.command import Captured, Namespace, Timeout, command, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.domain.exits import NeverTrue, Unsound, Unverified
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools
from snapshotctl.views.progress import WHOLE, ProgressDisplay

app = new_app()


@command(
    app, "snapshotctl verify demo-llm", "snapshotctl verify snapshot/demo-llm --timeout 10m -o json"
)
async def verify(
    tools: Tools, name: Captured, timeout: Timeout = "1h", namespace: Namespace = "default"
) -> None:
    """Have every byte of a captured artifact read and compared.

    Damage brings it into quarantine, where no restore from it begins; a verification that finds
    none lifts that. Damage, and an artifact that could not be read to its end, are failures
    (exit code 1).
    """
    wanted, within_s = targets.verified(name, namespace), formats.parse_duration(timeout)
    async with (
        tools.operator(patiently=True) as operator,
        _progress(tools, operator) as progress,
    ):
        requested = await objects.request(operator, wanted, operator.verify)
        content = Target(KINDS["SnapshotContent"], None, requested.content)
        is_told = False

        def decide(found: AnyObject | None) -> Condition | None:
            if not isinstance(found, SnapshotContent):
                raise NeverTrue(f"{content} was deleted while it was verified")
            nonlocal is_told
            if not is_told and (committed := found.status.committed) is not None:
                is_told = True
                size = formats.size(committed.bytes)
                tools.screen.note(f"reading {size} of {content} and comparing every digest")
                progress.begin(found.metadata.uid, {WHOLE: committed.bytes})
            # Damage that is found starts another verification by itself.
            last = max(requested.verification, found.status.verifications)
            is_over = found.status.verified >= last
            return condition(found.status.conditions, "Verified") if is_over else None

        what = f"verifying {content}"
        result = await objects.until(operator, content, decide, within_s=within_s, what=what)
    _check(content, result)
    if tools.screen.wants_table:
        tools.screen.line(f"{content} is sound: {result.message}")
    else:
        value = {"content": requested.content, "verified": True, "message": result.message}
        tools.screen.value(value)


@contextlib.asynccontextmanager
async def _progress(tools: Tools, operator: Operator) -> AsyncIterator[ProgressDisplay]:
    """Show how much is read for the length of the block, once that was begun."""
    async with operator.progress() as messages:
        with tools.screen.parts() as parts:
            display = ProgressDisplay("verify", parts.show, tools.monotonic)
            receiving = asyncio.create_task(display.receive(messages))
            try:
                yield display
            finally:
                await end_all(receiving)


def _check(content: Target, result: Condition) -> None:
    """Raise Unsound for a damaged artifact, Unverified for one that was not read to its end."""
    if result.status == "False":
        raise Unsound(
            f"{content} is damaged: {result.reason}: {result.message}",
            next_step="restore another snapshot; this one stays in quarantine",
            content=content.name,
            reason=result.reason,
        )
    if result.status != "True":
        raise Unverified(
            f"{content} was not read to its end: {result.reason}: {result.message}",
            next_step=f"try again: snapshotctl verify {content}",
            content=content.name,
            reason=result.reason,
        )
