"""The command doctor: say how everything is, one line each."""

from __future__ import annotations

import msgspec

from snapshotctl.domain.doctor import Observed, examine, line, summary
from snapshotctl.domain.exits import Exit
from snapshotctl.ports import Screen


def show(screen: Screen, seen: Observed) -> Exit:
    """Print the findings; FAILED when one of them is a failure."""
    found = examine(seen)
    if screen.wants_table:
        for finding in found:
            screen.line(line(finding), strong=finding.level == "fail")
        screen.line(summary(found), strong=True)
    else:
        screen.value([msgspec.to_builtins(finding) for finding in found])
    return Exit.FAILED if any(finding.level == "fail" for finding in found) else Exit.OK
