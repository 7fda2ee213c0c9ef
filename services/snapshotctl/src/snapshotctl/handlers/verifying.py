"""The command verify: have every byte of an artifact read, and say what was found."""

from __future__ import annotations

from collections.abc import Sequence

from snapshot_shared.api import VerifyReply
from snapshot_shared.objects import KINDS, AnyObject, Condition, SnapshotContent, condition
from snapshotctl.domain.exits import NeverTrue, Unsound, Unverified
from snapshotctl.domain.targets import Target
from snapshotctl.handlers import looking
from snapshotctl.handlers.watching import until
from snapshotctl.ports import Operator, Screen


async def verify(
    operator: Operator, screen: Screen, targets: Sequence[Target], *, within_s: float
) -> None:
    """Verify the first target that exists.

    Unsound, Unverified, NotFound, DeadlineExceeded, and what the operator refuses.
    """
    asked = await _ask(operator, targets)
    content = Target(KINDS["SnapshotContent"], None, asked.content)

    def decide(found: AnyObject | None) -> Condition | None:
        if not isinstance(found, SnapshotContent):
            raise NeverTrue(f"{content} was deleted while it was verified")
        # It reads again by itself when damage was found while it read.
        wanted = max(asked.verification, found.status.verifications)
        is_over = found.status.verified >= wanted
        return condition(found.status.conditions, "Verified") if is_over else None

    result = await until(operator, content, decide, within_s=within_s, what=f"verifying {content}")
    if result.status == "False":
        raise Unsound(
            f"{content} is damaged: {result.reason}: {result.message}",
            next_step="restore another snapshot; this one stays in quarantine",
            content=asked.content,
            reason=result.reason,
        )
    if result.status != "True":
        raise Unverified(
            f"{content} was not read to its end: {result.reason}: {result.message}",
            next_step=f"try again: snapshotctl verify {content}",
            content=asked.content,
            reason=result.reason,
        )
    if screen.wants_table:
        screen.line(f"{content} is sound: {result.message}")
    else:
        screen.value({"content": asked.content, "verified": True, "message": result.message})


async def _ask(operator: Operator, targets: Sequence[Target]) -> VerifyReply:
    found = await looking.find(operator, targets)
    target = looking.target_of(found, targets)
    with looking.as_it_was_read(target):
        return await operator.verify(target, found.metadata.uid)
