"""A finding of a check: `ok`, `warn` for what deserves a look, `fail` for what does not work.

One that is not ok has its fix, a command where there is one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal

import msgspec


class Finding(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One thing that was checked, and the fix when it is not ok."""

    level: Literal["ok", "warn", "fail"]
    what: str
    fix: str = ""


def ok(what: str) -> Finding:
    """Return that something is as it should be."""
    return Finding(level="ok", what=what)


def warn(what: str, fix: str) -> Finding:
    """Return that something deserves a look."""
    return Finding(level="warn", what=what, fix=fix)


def fail(what: str, fix: str) -> Finding:
    """Return that something does not work."""
    return Finding(level="fail", what=what, fix=fix)


def line(finding: Finding) -> str:
    """Return a finding as one line: `warn  what  → fix`."""
    return f"{finding.level:<5} {finding.what}" + (f"  → {finding.fix}" if finding.fix else "")


def summary(found: Sequence[Finding]) -> str:
    """Return the counts of findings of each level."""
    counts = Counter(finding.level for finding in found)
    return f"{counts['ok']} ok, {counts['warn']} warn, {counts['fail']} fail"
