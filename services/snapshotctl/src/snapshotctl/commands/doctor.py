"""The command doctor: check this machine and the cluster."""

from __future__ import annotations

import msgspec

from snapshotctl.command import command, new_app
from snapshotctl.domain.exits import Exit
from snapshotctl.tools import Tools
from snapshotctl.views import findings

app = new_app()


@command(app, "snapshotctl doctor", "snapshotctl doctor -o json")
async def doctor(tools: Tools) -> Exit:
    """Check this machine and the cluster; print the fix of each problem.

    Every line has ok, warn or fail, what was checked, and the fix. It changes nothing, but writes a
    span to see whether NATS stores it, and ends with exit code 1 when something fails.
    """
    found = findings.examine(await tools.observe())
    if tools.screen.wants_table:
        for finding in found:
            tools.screen.line(findings.line(finding), strong=finding.level == "fail")
        tools.screen.line(findings.summary(found), strong=True)
    else:
        tools.screen.value([msgspec.to_builtins(finding) for finding in found])
    return Exit.FAILED if any(finding.level == "fail" for finding in found) else Exit.OK
