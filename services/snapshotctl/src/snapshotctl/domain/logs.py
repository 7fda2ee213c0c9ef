"""Which lines of the services' logs belong to a story."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from snapshotctl.domain import formats

MAX_LINES = 12
_LOUD = ("WARNING", "ERROR", "CRITICAL")


class LogLine(NamedTuple):
    """One line of a log: who wrote it, when (RFC 3339, or empty), and what."""

    program: str
    at: str
    level: str
    text: str


def parse(program: str, line: str) -> LogLine:
    """Read one line of a service, which writes JSON; anything else stays as it is."""
    try:
        found: Any = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        found = None
    if not isinstance(found, dict):
        return LogLine(program, "", "", formats.plain(line))
    text = str(found.get("message", ""))
    trouble = str(found.get("traceback", "")).rstrip().rpartition("\n")[2]
    shown = f"{text} [{trouble}]" if trouble else text
    at, level = str(found.get("at", "")), str(found.get("level", ""))
    return LogLine(program, at, level, formats.plain(shown))


def relevant(
    lines: Iterable[tuple[str, str]], ids: Sequence[str], programs: Sequence[str], since: str
) -> list[LogLine]:
    """Choose the last lines that matter, in the order of their times.

    `lines` are programs with raw lines. A line matters when it names one of the ids, or when it
    is a warning or worse, of one of the programs and not older than `since` (RFC 3339).
    """
    chosen = []
    for program, raw in lines:
        if any(wanted in raw for wanted in ids):
            chosen.append(parse(program, raw))
            continue
        line = parse(program, raw)
        if program in programs and line.level in _LOUD and line.at >= since:
            chosen.append(line)
    return sorted(chosen, key=lambda line: line.at)[-MAX_LINES:]
