"""The command abort: end a capture that is under way."""

from __future__ import annotations

import msgspec

from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_shared.transitions import Capture
from snapshotctl import objects
from snapshotctl.adapters import machine
from snapshotctl.command import Captured, Namespace, Timeout, command, new_app
from snapshotctl.domain import formats, targets
from snapshotctl.domain.exits import NeverTrue
from snapshotctl.domain.targets import Target
from snapshotctl.tools import Tools

app = new_app()


@command(app, "snapshotctl abort demo-llm", "snapshotctl abort snapshot/demo --timeout 30s")
async def abort(
    tools: Tools, name: Captured, timeout: Timeout = "2m", namespace: Namespace = "default"
) -> None:
    """End a capture that is under way, now.

    The worker goes on, what was staged is removed, and the capture is Failed with the reason
    Aborted and the user who requested it. What is committed is not aborted any more; delete it. A
    restore ends with its pod: snapshotctl delete pod NAME.
    """
    wanted, within_s = targets.aborted(name, namespace), formats.parse_duration(timeout)
    async with tools.operator(patiently=True) as operator:
        requested = await objects.request(
            operator, wanted, lambda target, uid: operator.abort(target, machine.person(), uid)
        )
        content = Target(KINDS["SnapshotContent"], None, requested.content)

        def decide(found: AnyObject | None) -> SnapshotContent | None:
            if not isinstance(found, SnapshotContent):
                raise NeverTrue(f"{content} was deleted while its capture was aborted")
            is_over = found.status.capture in (Capture.FAILED, Capture.READY)
            return found if is_over else None

        what = f"aborting {content}"
        ended = await objects.until(operator, content, decide, within_s=within_s, what=what)
    failure = ended.status.failure
    if ended.status.capture is Capture.READY or failure is None:
        raise NeverTrue(
            f"the capture of {content} was committed before the abort came",
            next_step=f"to remove it: snapshotctl delete {content}",
        )
    if tools.screen.wants_table:
        tools.screen.line(f"{content} {failure.reason}: {failure.message}")
    else:
        value = {"content": requested.content, "failure": msgspec.to_builtins(failure)}
        tools.screen.value(value)
