"""The page about a run, in Markdown. Pure.

The rules stand before its first section, in docs/benchmarks.md, and are no part of a run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from tests.bench import common
from tests.bench.common import Judged, Rows
from tests.bench.goals import (
    LIMITS,
    OURS,
    PAGES,
    SHAPES,
    STEPS,
    Calls,
    Results,
    Transfers,
    fastest,
    in_pages,
    judged_calls,
    judged_transfers,
    limit_of,
    probe_of,
    profile_of,
    saving,
    size_text,
)

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
            cpu = [results.cpu.get(end, {}).get(name) for end in ("client", "server")]
            # What a call costs is the same whatever the percentile.
            costs = (common.middle(x, scale=1e6) if x and row.endswith("p50") else "" for x in cpu)
            yield (
                row,
                name,
                common.middle(samples, scale=1e6),
                common.ends(samples, scale=1e6),
                *costs,
            )
