"""Values as people write and read them: ages, durations, sizes, rates, instants, JSON."""

from __future__ import annotations

import re
import textwrap
from datetime import datetime
from typing import Any, Literal

import msgspec

from snapshot_shared import units
from snapshotctl.domain.exits import WrongArguments

OutputFormat = Literal["table", "wide", "json", "yaml"]
"""The forms of a result; `wide` is a table with more columns where there are more."""

_DURATION = re.compile(r"(\d{1,9}(?:\.\d{1,6})?)(ms|s|m|h|d)", re.ASCII)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"(\d{1,15}(?:\.\d{1,6})?)\s*([kKMGTP]?)(i?)B?", re.ASCII)
_POWERS = {"": 0, "k": 1, "M": 2, "G": 3, "T": 4, "P": 5}
_COMMAND = re.compile(r"`[^`]*`|\b(?:snapshotctl|nats|kubectl|gms) [^;)]*")
"""A command between backquotes, or one up to the end of what it stands in."""
_HELD = "\x00"
"""Stands for a blank at which a line is not broken."""
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]+")
_CONTROL_BUT_TAB = re.compile(r"[\x00-\x08\x0a-\x1f\x7f-\x9f]")
_COLOUR = re.compile(r"(\x1b\[[0-9;:]*m)")
_ESCAPE = re.compile(
    # A control sequence, a string such as the title of a window, or one character (ECMA-48).
    r"\x1b(?:\[[0-?]*[ -/]*[@-~]|[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)?|[ -/]*[0-~])"
)
_NO_COLOUR = "\x1b[0m"
MAX_SECONDS = 7 * 86400.0


def parse_duration(text: str) -> float:
    """Return `90s`, `5m` or `1h30m` as seconds. WrongArguments, also beyond 7 days."""
    pieces = list(_DURATION.finditer(text))
    if not pieces or "".join(piece[0] for piece in pieces) != text:
        raise WrongArguments(
            f"{text!r} is not a duration", next_step="write it as 90s, 5m or 1h30m"
        )
    seconds = sum(float(piece[1]) * _SECONDS[piece[2]] for piece in pieces)
    if not 0 < seconds <= MAX_SECONDS:
        raise WrongArguments(f"{text} is not between 1ms and 7d")
    return seconds


def parse_size(text: str) -> int:
    """Return `512MiB`, `4Gi`, `1.5GB` or plain bytes as bytes. WrongArguments."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or (found[3] and not found[2]):
        raise WrongArguments(f"{text!r} is not a size", next_step="write it as 512MiB or 4GiB")
    base = 1024 if found[3] else 1000
    unit = found[2] if found[2] in _POWERS else found[2].lower()
    return int(float(found[1]) * base ** _POWERS[unit])


stamp = units.instant
size = units.size
counted = units.counted
rate = units.rate
span_time = units.span_time


def age(seconds: float) -> str:
    """Return how long ago something was, in the two largest units at most: `7s`, `3m12s`, `5d`."""
    whole = max(0, int(seconds))
    if whole < 120:
        return f"{whole}s"
    if whole < 600:
        return f"{whole // 60}m{whole % 60}s"
    if whole < 7200:
        return f"{whole // 60}m"
    if whole < 172_800:
        return f"{whole // 3600}h"
    return f"{whole // 86400}d"


def instant(text: str) -> float | None:
    """Return an RFC 3339 time as seconds since the epoch; None when it is not one."""
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        return None
    return moment.timestamp() if moment.tzinfo else None


def clock(at: float) -> str:
    """Return the time of day with milliseconds, or without where the time is whole."""
    return stamp(at)[11:23] if at % 1 else stamp(at)[11:19]


def seconds(at: datetime | None) -> float:
    """Return a time as seconds since the epoch, or 0.0 when there is none."""
    return 0.0 if at is None else at.timestamp()


def age_of(text: str, now: float) -> str:
    """Return the age of an RFC 3339 time; `-` when it is not one."""
    moment = instant(text)
    return "-" if moment is None else age(now - moment)


def wrapped(text: str, width: int) -> list[str]:
    """Return a line as lines of at most `width` columns, broken between words.

    A command is never broken, nor is a word that is longer than the width: the terminal wraps these
    itself, so that they can be copied.
    """
    if len(text) <= width:
        return [text]
    kept = _COMMAND.sub(lambda found: found[0].replace(" ", _HELD), text)
    indent = " " * (len(text) - len(text.lstrip(" ")) + 2)
    lines = textwrap.wrap(
        kept,
        width,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
        replace_whitespace=False,
        expand_tabs=False,
    )
    return [line.replace(_HELD, " ") for line in lines] or [text]


def plain(text: str) -> str:
    """Return text without control characters, safe to print on one line."""
    return _CONTROL.sub(" ", _ESCAPE.sub("", text)).strip()


def printable(line: str, *, coloured: bool) -> str:
    """Return a line of a program without what moves the cursor; if `coloured`, with its colours."""
    parts = _COLOUR.split(line)
    # Every second part is a colour.
    parts[::2] = [_CONTROL_BUT_TAB.sub("", _ESCAPE.sub("", part)) for part in parts[::2]]
    if coloured and len(parts) > 1:
        return "".join(parts) + _NO_COLOUR
    return "".join(parts[::2])


def data(value: Any) -> Any:
    """Return a value as JSON has it: mappings, lists, texts, numbers; times are RFC 3339."""
    return msgspec.json.decode(msgspec.json.encode(value))
