"""What a benchmark found, and how a ratio is judged. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec

NOISE = 0.4
"""Half of the samples of a contender must lie within this share of their median."""

OTHERS = 0.2
"""Others may take this share of the processors while a benchmark runs."""

TURNS = 5
"""Fewer decide nothing."""

TURNS_WITH_LIMITS = 3
"""How many turns a round those have that are compared with the limit of the disk, and its probes.

The speed of a disk changes within seconds by more than what is looked for.
"""

Verdict = Literal["met", "missed", "inconclusive", "not measured"]
Rows = dict[str, dict[str, list[float]]]
"""Samples of each contender of each row, one a round or more."""

SHAPES = ("one large", "2,000 small")
PAGES = ("huge", "ordinary")
STEPS = ("digested", "digested and copied")
"""What a transfer does beside moving the bytes, as far as it can be done without it."""

REGIONS = (200, 4000)


class Transfers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of every contender of every row, one a round or more; counted values beside them."""

    size: int
    seconds: Rows
    cpu: Rows
    """Processor-seconds, where they are those of this process."""
    absent: dict[str, str] = {}
    """Why a contender was left out."""
    others: float
    """Share of the time of all processors that others took."""
    reported: int | None = None
    """Bytes of free memory that the kernel reported to its host during the run, where it counts."""
    written_again: float
    """Share of the bytes that a save of an unchanged layout writes."""
    extra_bytes: dict[str, int]
    """Peak private memory of a save and a load above what there was before."""
    extra_limit: int
    threads: dict[str, int] = {}
    """How many of ours save and load."""


class Calls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the same call over each contender, one a round, each that of `calls` calls."""

    calls: int
    seconds: Rows
    cpu: Rows = {}
    """Processor-seconds of one call, by the end that takes them: client and server."""
    others: float = 0.0


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    machine: dict[str, str]
    transfers: list[Transfers] = []
    calls: Calls | None = None


class Judged(NamedTuple):
    of: str
    row: str
    what: str
    wanted: str
    found: str
    verdict: Verdict
    why: str = ""


def saving(shape: str) -> str:
    return f"save, {shape}"


def loading(shape: str) -> str:
    return f"load, cold, pooled, {shape}"


CACHED = f"load, cached, {SHAPES[0]}"
FRESH = f"load, cold, fresh, {SHAPES[0]}"
MEMCPY = "memcpy"


def in_pages(row: str, pages: str) -> str:
    """Give the name of a row of which the region is in these pages."""
    return f"{row}, {pages} pages"


def limit_of(row: str) -> str:
    """Give the name of the row with the probes of the disk that took turns with a row."""
    return f"{row}, limit"


def probe_of(threads: int) -> str:
    return f"raw, {threads} threads"


def profile_of(verb: str) -> str:
    return f"{verb}, profile"


def hand_over(count: int) -> str:
    return f"hand over {count:,} regions"


def decided(
    share: float, samples: Mapping[str, Sequence[float]], *, others: float, suffers: bool
) -> tuple[Verdict, str]:
    """Judge what samples come to, as a share of what is wanted, and say why.

    What others on the machine, or the disk, may have brought about is inconclusive. `suffers` when
    the one that is compared with loses more by others than we do: then they may also have made a
    ratio look better than it is.
    """
    is_met = share >= 1
    fewest = min(map(len, samples.values()))
    if fewest < TURNS:
        return "inconclusive", f"{fewest} of {TURNS} turns"
    if others > OTHERS and (suffers or not is_met):
        return "inconclusive", f"others took {others:.0%} of the processors"
    widest = max(samples, key=lambda name: spread(samples[name]))
    if not is_met and (width := spread(samples[widest])) > NOISE:
        return "inconclusive", f"half of the samples of {widest} spread over {width:.0%}"
    return ("met", "") if is_met else ("missed", f"{1 - share:.0%} short of it")


def spread(samples: Sequence[float]) -> float:
    """Give the width of the middle half of some samples as a share of their median."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    return (ordered[len(ordered) - 1 - cut] - ordered[cut]) / median(ordered)


def size_text(size: int) -> str:
    """Round a size, of which a run takes off up to 8 MB."""
    return f"{size / 2**30:.2g} GiB" if size > 0.99 * 2**30 else f"{size / 2**20:.0f} MiB"
