"""The command doctor: check this machine and the cluster."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snapshotctl.command import command, new_app
from snapshotctl.domain.exits import Exit
from snapshotctl.tools import Tools
from snapshotctl.views import finding, findings
from snapshotctl.views.finding import Finding

app = new_app()


@command(
    app,
    "snapshotctl doctor",
    "snapshotctl doctor --context production",
    "snapshotctl doctor -o json",
)
async def doctor(tools: Tools) -> Exit:
    """Check this machine and the cluster; print the fix of each problem.

    With --context or --kubeconfig what the chart has installed is checked as well, as far as you
    may read it: definitions, policies, webhooks, pods, keys, where artifacts are, and what restored
    processes have of their source in their environment.

    Every line has ok, warn or fail, what was checked, and the fix. It changes nothing, but writes a
    span to see whether NATS stores it, and ends with exit code 1 when something fails.
    """
    return show(tools, findings.examine(await tools.observe()))


def show(tools: Tools, found: Sequence[Finding]) -> Exit:
    """Print findings, and their counts below a table; return the exit code of the check."""
    if tools.screen.wants_table:
        for each in found:
            tools.screen.line(finding.line(each), strong=each.level == "fail")
        tools.screen.line(finding.summary(found), strong=True)
    else:
        tools.screen.value([msgspec.to_builtins(each) for each in found])
    return Exit.FAILED if any(each.level == "fail" for each in found) else Exit.OK
