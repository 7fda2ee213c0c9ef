"""What a benchmark found, what was wanted of it, and the table that says so. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import Literal, NamedTuple

import msgspec

NOISE = 0.4
"""Half of the samples of a contender must lie within this share of their median."""

OTHERS = 0.2
"""Others may take this share of the processors while a benchmark runs."""

Verdict = Literal["met", "missed", "inconclusive", "not measured"]
Rows = dict[str, dict[str, list[float]]]


class Transfers(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of every contender of every row, one a round; counted values beside them."""

    size: int
    seconds: Rows
    in_huge_pages: bool = False
    """Whether the region is in huge pages that the host has set aside."""
    cpu: Rows
    """Processor-seconds, where they are those of this process."""
    others: float
    """Share of the time of all processors that others took."""
    written_again: float
    """Share of the bytes that a save of an unchanged layout writes."""
    extra_bytes: dict[str, int]
    """Peak private memory of a save and a load above what there was before."""
    extra_limit: int


class Calls(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Seconds of the same call over each contender, one a round, each that of `calls` calls."""

    calls: int
    seconds: Rows
    others: float = 0.0


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    machine: dict[str, str]
    transfers: list[Transfers] = []
    calls: Calls | None = None


class Goal(NamedTuple):
    """`ours` must be at least `least` times as fast as the fastest of `peers` in a row."""

    row: str
    what: str
    least: float
    peers: tuple[str, ...]
    ours: str = "posix-direct"


LIMIT = ("raw", "raw, huge pages", "raw, windows", "fio")
PEERS = ("numpy", "numpy mmap", "safetensors", "torch", "run:ai streamer", "fastsafetensors")
SHAPES = ("one large", "2,000 small")
GOALS = [
    *(Goal(f"save, {shape}", "raw write limit", 0.9, LIMIT) for shape in SHAPES),
    *(Goal(f"save, {shape}", "best durable peer", 1.8, PEERS) for shape in SHAPES),
    *(Goal(f"load, cold, pooled, {shape}", "raw read limit", 0.9, LIMIT) for shape in SHAPES),
    *(Goal(f"load, cold, pooled, {shape}", "best peer", 1.3, PEERS) for shape in SHAPES),
    Goal("load, cached, one large", "safetensors and copy", 1.0, ("safetensors",)),
    Goal("load, cold, fresh, one large", "safetensors", 2.0, ("safetensors",)),
]
CALL_GOAL = Goal("session call, p99", "grpc.aio", 5.0, ("grpc.aio",), "gms")
"""A fifth of the time of grpc.aio."""

REGIONS = (200, 4000)
HANDED_OVER_S = 0.005
"""How long 200 regions may take."""

STEPS = ("raw, windows", "raw, windows, digested", "raw, windows, digested, copied")
"""What a load is made of, as far as it can be done without it."""


def hand_over(count: int) -> str:
    return f"hand over {count:,} regions"


class Judged(NamedTuple):
    of: str
    row: str
    what: str
    wanted: str
    found: str
    verdict: Verdict


def judged(results: Results) -> list[Judged]:
    """Compare with every goal. What a noisy machine may have brought about is inconclusive."""
    found = [line for one in results.transfers for line in judged_transfers(one)]
    return found + (judged_calls(results.calls) if results.calls else [])


def judged_transfers(results: Transfers) -> list[Judged]:
    of = size_text(results.size)
    found = [_judged(of, goal, results.seconds.get(goal.row, {}), results.others) for goal in GOALS]
    share = results.written_again
    found.append(
        Judged(
            of,
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
        found.append(Judged(of, f"{verb}, 2,000 small", "peak extra memory", limit, mib, verdict))
    return found


def judged_calls(results: Calls) -> list[Judged]:
    of, row = "sessions", hand_over(REGIONS[0])
    found = [_judged(of, CALL_GOAL, results.seconds.get(CALL_GOAL.row, {}), results.others)]
    wanted = f"≤ {HANDED_OVER_S * 1e3:g} ms"
    samples = results.seconds.get(row, {}).get("gms")
    if not samples:
        return [*found, Judged(of, row, "time", wanted, "", "not measured")]
    verdict: Verdict = "met" if median(samples) <= HANDED_OVER_S else "missed"
    if verdict == "missed" and (spread(samples) > NOISE or results.others > OTHERS):
        verdict = "inconclusive"
    return [*found, Judged(of, row, "time", wanted, f"{median(samples) * 1e3:.2f} ms", verdict)]


def _judged(of: str, goal: Goal, row: dict[str, list[float]], others: float) -> Judged:
    wanted = f"≥ {goal.least:g} x"
    peers = {name: row[name] for name in goal.peers if row.get(name)}
    ours = row.get(goal.ours)
    if not peers or not ours:
        return Judged(of, goal.row, goal.what, wanted, "", "not measured")
    best = min(peers, key=lambda name: median(peers[name]))
    ratio = median(peers[best]) / median(ours)
    verdict: Verdict = "met" if ratio >= goal.least else "missed"
    is_noisy = others > OTHERS or max(spread(ours), spread(peers[best])) > NOISE
    # A peer that needs more of the processors than we do suffers more from others; a probe of the
    # disk suffers less, so that what is met beside one would be met without them too.
    is_flattered = others > OTHERS and goal.peers != LIMIT
    if (verdict == "missed" and is_noisy) or (verdict == "met" and is_flattered):
        verdict = "inconclusive"
    what = goal.what if goal.what == best else f"{goal.what} ({best})"
    return Judged(of, goal.row, what, wanted, f"{ratio:.2f} x", verdict)


def spread(samples: list[float]) -> float:
    """Give the width of the middle half of some samples as a share of their median."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    return (ordered[len(ordered) - 1 - cut] - ordered[cut]) / median(ordered)


_FIRST = ("GPU memory: ", "GMS sessions")
_LAST = "Devices"
"""How the titles begin of the sections that are first and last on the page."""

DEVICES = """
## Devices

`gms conformance --device simulated`: all rules hold. `--device cuda` was not run on a
GPU; service, client and transfers have only met a fake of the driver, in the tests.
"""
"""What is known of devices, which no benchmark on this machine finds out."""


def page(results: Results) -> str:
    """Write the page about a run, in Markdown."""
    return "\n".join(_lines(results)) + "\n" + DEVICES


def renewed(old: str, results: Results) -> str:
    """Write the page about a run, and keep what an older page has about anything else."""
    head, *new = _split(page(results))
    _, *older = _split(old)
    return _joined(head, older, new)


def with_section(page: str, text: str) -> str:
    """Put a section into a page, in place of the one with its title."""
    head, *parts = _split(page)
    return _joined(head, parts, [text.removeprefix("## ")])


def _split(page: str) -> list[str]:
    """Give what comes before the first section, and every section from its title on."""
    return page.split("\n## ")


def _joined(head: str, older: Sequence[str], new: Sequence[str]) -> str:
    titled = {part.partition("\n")[0]: part.rstrip() for part in (*older, *new)}

    def place(title: str) -> tuple[int, str]:
        if title.startswith(_LAST):
            return len(_FIRST) + 1, title
        found = [at for at, name in enumerate(_FIRST) if title.startswith(name)]
        return (found[0], title) if found else (len(_FIRST), "")

    parts = [f"## {titled[title]}\n" for title in sorted(titled, key=place)]
    return "\n".join([f"{head.rstrip()}\n", *parts])


def _lines(results: Results) -> Iterator[str]:
    yield "# Benchmarks\n"
    yield (
        "Written by `make bench-gms`. Figures hold for one machine and one run of each section;\n"
        "what carries over is ratios. Contenders take turns in every round, saves end in fsync,\n"
        "cold means that the files were dropped from the page cache, loads end with verified\n"
        "bytes in the region (peers do not verify). A missed ratio is *inconclusive* when the\n"
        f"middle half of the samples spreads over more than {NOISE:.0%} of their median. Where\n"
        f"others took more than {OTHERS:.0%} of the processors, every missed ratio is, and so is\n"
        "every ratio to a peer: most peers need more of the processors than we do.\n"
    )
    yield "The machine:\n"
    yield from (f"- {key}: {value}" for key, value in results.machine.items())
    for one in results.transfers:
        yield from _transfer_lines(one)
    if results.calls:
        yield from _call_lines(results.calls)


def _goal_lines(found: Sequence[Judged]) -> Iterator[str]:
    yield "| row | against | goal | found | |\n|---|---|---|---|---|"
    for line in found:
        yield f"| {line.row} | {line.what} | {line.wanted} | {line.found} | {line.verdict} |"


def _transfer_lines(results: Transfers) -> Iterator[str]:
    yield f"\n## GPU memory: save and load of {size_text(results.size)}\n"
    rounds = max((len(s) for row in results.seconds.values() for s in row.values()), default=0)
    yield (
        f"{rounds} rounds, medians. Others took {results.others:.0%} of the processors.\n"
        + (
            "The region is in huge pages that the host has set aside (`vm.nr_hugepages`), as the\n"
            "memory of a GPU is there before it is asked for; a fresh region is in ordinary ones.\n"
            if results.in_huge_pages
            else "The region is in pages of 4 KiB: the host has not set enough huge ones aside\n"
            "(`vm.nr_hugepages`).\n"
        )
    )
    yield from _goal_lines(judged_transfers(results))
    yield from _profile(results)
    yield "\n| row | contender | GB/s (median) | slowest … fastest | CPU s/GB |"
    yield "|---|---|---|---|---|"
    for row, contenders in results.seconds.items():
        for name, samples in contenders.items():
            if not samples:
                yield f"| {row} | {name} | not installed | | |"
                continue
            speeds = [results.size / 1e9 / seconds for seconds in samples]
            ends = f"{min(speeds):.2f} … {max(speeds):.2f}"
            cpu = results.cpu.get(row, {}).get(name)
            cost = f"{median(cpu) * 1e9 / results.size:.2f}" if cpu else ""
            yield f"| {row} | {name} | {median(speeds):.2f} | {ends} | {cost} |"


def _profile(results: Transfers) -> Iterator[str]:
    """Say what the time of a cold load goes to."""
    for shape in SHAPES:
        row = results.seconds.get(f"load, cold, pooled, {shape}", {})
        samples = [row.get(name) for name in (*STEPS, "posix-direct")]
        times = [1e9 * median(each) / results.size for each in samples if each]
        if len(times) < len(samples):
            continue
        read, digested, copied, whole = times
        yield (
            f"\nA cold load, {shape}, takes {whole:.2f} s/GB. With the same requests and threads\n"
            f"and nothing else, reading takes {read:.2f} s/GB, reading and digesting "
            f"{digested:.2f}, reading,\ndigesting and copying into the region {copied:.2f}."
        )
        cpu = results.cpu.get(f"load, cold, pooled, {shape}", {})
        costs = [cpu.get(name) for name in (STEPS[0], "posix-direct")]
        used = [1e9 * median(each) / results.size for each in costs if each]
        if len(used) == 2:
            yield (
                f"Reading alone needs {used[0]:.2f} processor-seconds a GB, the load "
                f"{used[1]:.2f}; others who\nuse the processors slow the load more."
            )
        limit = min(median(row[name]) for name in LIMIT if row.get(name))
        peers = {median(row[name]): name for name in PEERS if row.get(name)}
        if peers:
            most = min(peers) / limit
            yield (
                f"The best peer, {peers[min(peers)]}, comes to {1 / most:.2f} of the read limit: "
                f"nothing\ncan be more than {most:.2f} x as fast."
            )


def _call_lines(results: Calls) -> Iterator[str]:
    yield "\n## GMS sessions\n"
    rounds = max((len(s) for row in results.seconds.values() for s in row.values()), default=0)
    yield (
        f"{rounds} rounds, medians. Client and server are two processes. The call lists 16\n"
        "allocations; `gms` is the real service, the others only answer. A sample is the\n"
        f"percentile of {results.calls:,} calls. Others took {results.others:.0%} of the\n"
        "processors.\n"
    )
    yield from _goal_lines(judged_calls(results))
    yield "\n| row | contender | µs (median) | fastest … slowest |\n|---|---|---|---|"
    for row, contenders in results.seconds.items():
        for name, samples in contenders.items():
            ends = f"{min(samples) * 1e6:,.0f} … {max(samples) * 1e6:,.0f}"
            yield f"| {row} | {name} | {median(samples) * 1e6:,.0f} | {ends} |"


def size_text(size: int) -> str:
    return f"{size / 2**30:.2g} GiB"
