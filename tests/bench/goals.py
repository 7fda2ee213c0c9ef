"""What was found and wanted of the GPU memory service, how a ratio is judged, and the page. Pure.

The rules stand on the page before its first section, in docs/benchmarks.md, and are no part of a
run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from tests.bench import common
from tests.bench.common import NOISE, OTHERS, Judged, Rows, Verdict, spread

TURNS = 5
"""Fewer decide nothing."""

TURNS_WITH_LIMITS = 3
"""How many turns a round those have that are compared with the limit of the disk, and its probes.

The speed of a disk changes within seconds by more than what is looked for.
"""

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
    cpu: Rows
    """Processor-seconds of one call, by the end that takes them: client and server."""
    others: float


class Results(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    machine: dict[str, str]
    transfers: list[Transfers] = []
    calls: Calls | None = None


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


def size_text(size: int) -> str:
    """Round a size, of which a run takes off up to 8 MB."""
    return f"{size / 2**30:.2g} GiB" if size > 0.99 * 2**30 else f"{size / 2**20:.0f} MiB"


Row = Mapping[str, Sequence[float]]

OURS = "posix-direct"
LIMITS = ("write limit", "read limit")
NO_PEERS = (OURS, f"{OURS}, encrypted", "posix-buffered", MEMCPY)
"""What takes turns with the peers and is none."""


class Goal(NamedTuple):
    """Ours must be at least `least` times as fast as the fastest of its rivals.

    The rivals are those of `rivals` in the row `against`, or all peers there are. Where the fastest
    of them stays below `below` of the limit of the disk, `more` is wanted.
    """

    row: str
    what: str
    least: float
    against: str
    rivals: tuple[str, ...] = ()
    limit: str = ""
    below: float = 0.0
    more: float = 0.0


def _goals() -> Iterator[Goal]:
    for pages in PAGES:
        for shape in SHAPES:
            row, limit = in_pages(saving(shape), pages), limit_of(saving(shape))
            yield Goal(row, LIMITS[0], 0.95, limit)
            yield Goal(row, "durable peer", 1.5, row, (), limit, below=0.45, more=2.0)
    for pages, least in zip(PAGES, (0.95, 0.85), strict=True):
        for shape in SHAPES:
            row, limit = in_pages(loading(shape), pages), limit_of(loading(shape))
            yield Goal(row, LIMITS[1], least, limit)
            yield Goal(row, "peer", 1.0, row, (), limit, below=0.7, more=1.3)
    for pages in PAGES:
        row = in_pages(CACHED, pages)
        yield Goal(row, "safetensors and copy", 1.0, row, ("safetensors",))
        yield Goal(row, "unverified", 0.9, row, (MEMCPY,))
    row = in_pages(FRESH, "ordinary")
    yield Goal(row, "safetensors and copy", 2.0, row, ("safetensors",))


GOALS = tuple(_goals())


class Bound(NamedTuple):
    """A call of ours may take `most` times what that of a rival takes."""

    row: str
    rival: str
    most: float


CPU = "session call, CPU of both ends"
P99 = "session call, p99"
BARE, AIO = "asyncio protocol", "grpc.aio"
BOUNDS = (Bound(CPU, AIO, 0.12), Bound(P99, AIO, 0.3), Bound(P99, BARE, 1.1))
HANDED_OVER_S = dict(zip(REGIONS, (0.0015, 0.03), strict=True))
"""How long so many regions may take."""


def judged(results: Results) -> list[Judged]:
    """Compare with every goal."""
    found = [line for one in results.transfers for line in judged_transfers(one)]
    return found + (judged_calls(results.calls) if results.calls else [])


def judged_transfers(results: Transfers) -> list[Judged]:
    """Compare with the goals of saves and loads. What is counted is no matter of noise."""
    of, share = size_text(results.size), results.written_again
    counted = [
        ("save of an unchanged layout", "bytes written", "< 1 %", f"{share:.2%}", share < 0.01)
    ]
    limit = results.extra_limit
    for verb, extra in results.extra_bytes.items():
        row, what = f"{verb}, 2,000 small", "peak extra memory"
        texts = (f"≤ {limit / 2**20:.0f} MiB", f"{extra / 2**20:.0f} MiB")
        counted.append((row, what, *texts, extra <= limit))
    return [
        *(judged_goal(of, goal, results.seconds, results.others) for goal in GOALS),
        *(Judged(of, *line, "met" if is_met else "missed") for *line, is_met in counted),
    ]


def judged_goal(of: str, goal: Goal, seconds: Rows, others: float) -> Judged:
    """Compare ours with the fastest rival; `of` says what was measured."""
    ours = seconds.get(goal.row, {}).get(OURS)
    rivals = _rivals(goal, seconds.get(goal.against, {}))
    if not ours or not rivals:
        nothing = "ours was not run" if not ours else "nothing to compare with was run"
        wanted = f"≥ {goal.least:g} x"
        return Judged(of, goal.row, goal.what, wanted, "", "not measured", nothing)
    best = fastest(rivals)
    least, why = goal.least, ""
    if goal.limit and (limits := seconds.get(goal.limit)):
        share = median(limits[fastest(limits)]) / median(rivals[best])
        least = goal.more if share < goal.below else goal.least
        why = f"{best} is at {share:.2f} of the limit"
        if share * least > 1:
            why += f", which itself is {1 / share:.2f} x as fast"
    ratio = median(rivals[best]) / median(ours)
    # A peer that needs more of the processors than we do suffers more from others than we do; a
    # probe of the disk suffers less.
    verdict, reason = decided(
        ratio / least,
        {OURS: ours, best: rivals[best]},
        others=others,
        suffers=goal.against == goal.row,
    )
    what = goal.what if best in goal.what else f"{goal.what} ({best})"
    reasons = "; ".join(filter(None, (why, reason)))
    return Judged(of, goal.row, what, f"≥ {least:g} x", f"{ratio:.2f} x", verdict, reasons)


def _rivals(goal: Goal, row: Row) -> Row:
    if goal.against != goal.row:
        return row
    names = goal.rivals or [name for name in row if name not in NO_PEERS]
    return {name: row[name] for name in names if row.get(name)}


def fastest(row: Row) -> str:
    """Give the contender with the lowest median."""
    return min(row, key=lambda name: median(row[name]))


def judged_calls(results: Calls) -> list[Judged]:
    """Compare with the goals of sessions."""
    of, rows = "sessions", {**results.seconds, CPU: both_ends(results.cpu)}
    found = [judged_bound(of, bound, rows, results.others) for bound in BOUNDS]
    for count, most in HANDED_OVER_S.items():
        row, wanted = hand_over(count), f"≤ {most * 1e3:g} ms"
        samples = rows[row]["gms"]
        taken = median(samples)
        verdict, why = decided(most / taken, {"gms": samples}, others=results.others, suffers=False)
        found.append(Judged(of, row, "time", wanted, f"{taken * 1e3:.2f} ms", verdict, why))
    return found


def judged_bound(of: str, bound: Bound, seconds: Rows, others: float) -> Judged:
    """Compare a call of ours with that of a rival."""
    ours, rival = (seconds[bound.row][name] for name in ("gms", bound.rival))
    ratio = median(ours) / median(rival)
    verdict, why = decided(
        bound.most / ratio,
        {"gms": ours, bound.rival: rival},
        others=others,
        suffers=bound.rival == AIO and bound.row == P99,
    )
    wanted = f"≤ {bound.most:g} x"
    return Judged(of, bound.row, bound.rival, wanted, f"{ratio:.2f} x", verdict, why)


def both_ends(cpu: Rows) -> dict[str, list[float]]:
    """Add what client and server take, round by round."""
    return {
        name: [sum(each) for each in zip(client, cpu["server"][name], strict=True)]
        for name, client in cpu["client"].items()
    }


# The page.

_MEMORY = "GPU memory: "

_HEAD = ("row", "contender", "huge pages, GB/s", "CPU s/GB", "ordinary pages, GB/s", "CPU s/GB")
"""A section that has another table was measured by other rules."""


def renewed(old: str, results: Results) -> str:
    """Write the sections about a run into a page, and the machine before its first section.

    What an older page says of the rules stays, and so do the sections about anything else. Another
    size stays if it was measured by the same rules.
    """
    head, *older = common.split(old or "# Benchmarks\n")
    rules = " | ".join(_HEAD)
    kept = [part for part in older if not part.startswith(_MEMORY) or rules in part]
    prose = head.partition("\nThe machine:\n")[0].rstrip()
    machine = "\n".join(common.listed(results.machine))
    return common.joined(f"{prose}\n\nThe machine:\n\n{machine}", kept, list(_sections(results)))


def _sections(results: Results) -> Iterator[str]:
    """Write each section from its title on."""
    for one in results.transfers:
        yield "\n".join(_transfer_lines(one))
    if results.calls:
        yield "\n".join(_call_lines(results.calls))


def _goal_lines(found: Sequence[Judged]) -> Iterator[str]:
    rows = ((x.row, x.what, x.wanted, x.found, x.verdict, x.why) for x in found)
    return common.table(("row", "against", "goal", "found", "", "why"), rows)


def _rounds(rows: Rows) -> int:
    """Return how many turns those have had that have one a round."""
    return min((len(samples) for row in rows.values() for samples in row.values()), default=0)


def _transfer_lines(results: Transfers) -> Iterator[str]:
    yield f"{_MEMORY}save and load of {size_text(results.size)}\n"
    yield (
        f"{_rounds(results.seconds)} rounds, medians. Others took {results.others:.0%} of the "
        f"processors.\n{_reported(results.reported)}"
    )
    if not any(in_pages(saving(shape), "huge") in results.seconds for shape in SHAPES):
        yield "\nNothing was measured in huge pages: the host could not set enough of them aside."
    if results.absent:
        yield ""
    for name, why in results.absent.items():
        yield f"- {name} was not run: {why}"
    found = judged_transfers(results)
    yield from _goal_lines(found)
    yield from _profiles(results, found)
    yield from common.table(_HEAD, _sample_rows(results))


def _reported(reported: int | None) -> str:
    if reported is None:
        return "The kernel does not say how much free memory it reported to a host."
    return f"The kernel reported {reported / 2**20:,.0f} MiB of free memory to the host meanwhile."


def _sample_rows(results: Transfers) -> Iterator[Sequence[str]]:
    """Put the same contender in huge and in ordinary pages side by side, row by row.

    A probe of the disk uses memory of its own in huge pages, whatever the region is in.
    """
    suffixes = {pages: in_pages("", pages) for pages in PAGES}
    bare = dict.fromkeys(
        next((row.removesuffix(s) for s in suffixes.values() if row.endswith(s)), row)
        for row in results.seconds
    )
    for row in bare:
        keys = [in_pages(row, pages) for pages in PAGES]
        if row in results.seconds:
            keys[0] = row
        names = dict.fromkeys(name for key in keys for name in results.seconds.get(key, {}))
        for name in names:
            yield row, name, *(cell for key in keys for cell in _cells(results, key, name))


def _cells(results: Transfers, row: str, name: str) -> tuple[str, str]:
    samples = results.seconds.get(row, {}).get(name)
    if not samples:
        return "", ""
    speeds = [results.size / 1e9 / seconds for seconds in samples]
    cpu = results.cpu.get(row, {}).get(name)
    return common.cell(speeds, "{:.2f}"), f"{_per_gb(results, cpu):.2f}" if cpu else ""


def _per_gb(results: Transfers, samples: Sequence[float]) -> float:
    return 1e9 * median(samples) / results.size


def _profiles(results: Transfers, found: Sequence[Judged]) -> Iterator[str]:
    """Say what the time goes to of each transfer that is too far from the limit."""
    rows = []
    for line in found:
        verb = line.row.partition(",")[0]
        steps = results.seconds.get(profile_of(verb), {})
        if line.verdict not in ("missed", "inconclusive") or not line.what.startswith(LIMITS):
            continue
        limits = results.seconds.get(_limits_beside(line.row), {})
        alone = limits.get(probe_of(results.threads.get(verb, 0)))
        if alone and all(steps.get(name) for name in STEPS):
            ours = results.seconds[line.row][OURS]
            times = [limits[fastest(limits)], alone, *(steps[name] for name in STEPS), ours]
            rows.append((line.row, *(f"{_per_gb(results, each):.2f}" for each in times)))
    if rows:
        yield (
            "\nWhere the time of these goes, in s/GB: the fastest probe, then the disk with as\n"
            "many threads as ours has, the same with a digest of each chunk, and with a copy to\n"
            "or from ordinary pages, too. The last two take turns with one large allocation.\n\n"
            "Traced on 2026-11-26 with 1 GiB and two processors: of what is left of a save, 10 ms\n"
            "are its begin and its end, where folders, files and manifest are made durable. In\n"
            "turns without peers no more was left out of huge pages, and 0.04 s out of ordinary\n"
            "ones, where half as many bytes are on their way (55 MiB of 116). Beside peers a save\n"
            "out of huge pages took 34 ms longer than the disk with digests: 22 ms before the\n"
            "first seventh was written, 3 ms in the next five, and 9 ms at the end; one out of\n"
            "ordinary pages took 14 ms longer."
        )
        yield from common.table(("row", "limit", "alone", *STEPS, OURS), rows)


def _limits_beside(row: str) -> str:
    for pages in PAGES:
        row = row.removesuffix(in_pages("", pages))
    return limit_of(row)


def _call_lines(results: Calls) -> Iterator[str]:
    yield "GMS sessions\n"
    yield (
        f"{_rounds(results.seconds)} rounds, medians, the order rotates. Client and server are two "
        "processes.\nThe call lists 16 allocations; `gms` is the real service with its synchronous "
        "client, the\nothers only answer. A sample is the percentile of "
        f"{results.calls:,} calls; processor time is that of all\nthreads of a process. Others "
        f"took {results.others:.0%} of the processors."
    )
    yield from _goal_lines(judged_calls(results))
    head = ("row", "contender", "µs (median)", "fastest … slowest")
    yield from common.table((*head, "CPU µs, client", "CPU µs, server"), _call_rows(results))


def _call_rows(results: Calls) -> Iterator[Sequence[str]]:
    for row, contenders in results.seconds.items():
        for name, samples in contenders.items():
            cpu = [results.cpu[end][name] for end in ("client", "server")]
            # What a call costs is the same whatever the percentile.
            costs = (common.middle(x, scale=1e6) if row.endswith("p50") else "" for x in cpu)
            yield (
                row,
                name,
                common.middle(samples, scale=1e6),
                common.ends(samples, scale=1e6),
                *costs,
            )
