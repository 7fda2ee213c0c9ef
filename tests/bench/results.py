"""What a benchmark found, what was wanted of it, and the table that says so. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median
from typing import Literal, NamedTuple

import msgspec

NOISE = 0.4
"""Half of the samples of a contender must lie within this share of their median."""

Verdict = Literal["met", "missed", "inconclusive", "not measured"]


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of every contender of every row, one a round; counted values beside them."""

    machine: dict[str, str]
    size: int
    seconds: dict[str, dict[str, list[float]]]
    written_again: float
    """Share of the bytes that a save of an unchanged layout writes."""
    extra_bytes: dict[str, int]
    """Peak private memory of a save and a load above what there was before."""
    extra_limit: int


class Goal(NamedTuple):
    """`ours` must be at least `least` times as fast as the fastest of `peers` in a row."""

    row: str
    what: str
    least: float
    peers: tuple[str, ...]
    ours: str = "posix-direct"


LIMIT = ("raw", "raw, large pages", "fio")
PEERS = ("numpy", "numpy mmap", "safetensors")
SHAPES = ("one large", "2,000 small")
GOALS = [
    *(Goal(f"save, {shape}", "raw write limit", 0.9, LIMIT) for shape in SHAPES),
    *(Goal(f"save, {shape}", "best durable peer", 1.8, PEERS) for shape in SHAPES),
    *(Goal(f"load, cold, pooled, {shape}", "raw read limit", 0.9, LIMIT) for shape in SHAPES),
    *(Goal(f"load, cold, pooled, {shape}", "best peer", 1.3, PEERS) for shape in SHAPES),
    Goal("load, cached, one large", "safetensors and copy", 1.0, ("safetensors",)),
    Goal("load, cold, fresh, one large", "safetensors", 2.0, ("safetensors",)),
]


class Judged(NamedTuple):
    row: str
    what: str
    wanted: str
    found: str
    verdict: Verdict


def judged(results: Results) -> list[Judged]:
    """Compare with every goal. A missed one is inconclusive where the machine is too noisy."""
    found = [_judged(goal, results.seconds.get(goal.row, {})) for goal in GOALS]
    share = results.written_again
    found.append(
        Judged(
            "save of an unchanged layout",
            "bytes written",
            "< 1 %",
            f"{share:.2%}",
            "met" if share < 0.01 else "missed",
        )
    )
    for verb, extra in results.extra_bytes.items():
        is_met = extra <= results.extra_limit
        limit = f"≤ {results.extra_limit / 2**20:.0f} MiB"
        mib = f"{extra / 2**20:.0f} MiB"
        verdict: Verdict = "met" if is_met else "missed"
        found.append(Judged(f"{verb}, 2,000 small", "peak extra memory", limit, mib, verdict))
    return found


def _judged(goal: Goal, row: dict[str, list[float]]) -> Judged:
    wanted = f"≥ {goal.least:g} x"
    peers = {name: row[name] for name in goal.peers if row.get(name)}
    ours = row.get(goal.ours)
    if not peers or not ours:
        return Judged(goal.row, goal.what, wanted, "", "not measured")
    best = min(peers, key=lambda name: median(peers[name]))
    ratio = median(peers[best]) / median(ours)
    verdict: Verdict = "met" if ratio >= goal.least else "missed"
    if verdict == "missed" and max(spread(ours), spread(peers[best])) > NOISE:
        verdict = "inconclusive"
    return Judged(goal.row, f"{goal.what} ({best})", wanted, f"{ratio:.2f} x", verdict)


def spread(samples: list[float]) -> float:
    """Give the width of the middle half of some samples as a share of their median."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    return (ordered[len(ordered) - 1 - cut] - ordered[cut]) / median(ordered)


DEVICES = """
## Devices

`python -m gms.conformance --device simulated`: all rules hold. `--device cuda` was not run on a
GPU; known is only that the bindings have every symbol, and that a machine without bindings or
driver is told so in one line.
"""
"""What is known of devices, which no benchmark on this machine finds out."""


def page(results: Results) -> str:
    """Write the page about a run, in Markdown."""
    return "\n".join(_lines(results)) + "\n" + DEVICES


def _lines(results: Results) -> Iterator[str]:
    rounds = max(len(s) for row in results.seconds.values() for s in row.values())
    yield "# Benchmarks\n"
    yield (
        "Written by `make bench-gms`. Figures hold for one machine and one run; what carries over\n"
        "is ratios. Contenders take turns in every round, saves end in fsync, cold means that the\n"
        "files were dropped from the page cache, loads end with verified bytes in the region\n"
        "(peers do not verify). A missed ratio is *inconclusive* when the middle half of the\n"
        f"samples spreads over more than {NOISE:.0%} of their median.\n"
    )
    yield "## GPU memory: save and load\n"
    yield f"{results.size / 2**30:g} GiB, {rounds} rounds, medians. The machine:\n"
    yield from (f"- {key}: {value}" for key, value in results.machine.items())
    yield "\n| row | against | goal | found | |\n|---|---|---|---|---|"
    for line in judged(results):
        yield f"| {line.row} | {line.what} | {line.wanted} | {line.found} | {line.verdict} |"
    yield "\n| row | contender | GB/s (median) | slowest … fastest |\n|---|---|---|---|"
    for row, contenders in results.seconds.items():
        for name, samples in contenders.items():
            if not samples:
                yield f"| {row} | {name} | not installed | |"
                continue
            speeds = [results.size / 1e9 / seconds for seconds in samples]
            ends = f"{min(speeds):.2f} … {max(speeds):.2f}"
            yield f"| {row} | {name} | {median(speeds):.2f} | {ends} |"
