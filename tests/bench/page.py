"""The page about a run, in Markdown. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median

from tests.bench import common
from tests.bench.common import NOISE, OTHERS, Judged, Rows
from tests.bench.goals import (
    LIMITS,
    OURS,
    PAGES,
    SHAPES,
    STEPS,
    TURNS,
    TURNS_WITH_LIMITS,
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

DEVICES = """
## Devices

`gms conformance --device simulated`: all rules hold. Nothing here was run on a GPU: service,
client and transfers have only met a fake of the driver, in the tests.
[`make accept`](how-to/accept-on-a-gpu.md) is what a GPU is tried with first.
"""
"""What is known of devices, which no benchmark on this machine finds out."""

RULES = f"""\
Written by `make bench-gms`. Figures hold for one machine and one run of each section;
what carries over is ratios.

- Contenders take turns, and the order rotates from round to round. Saves end in fsync; loads
  end with the bytes in the region. Ours are digested on the way; peers do not verify, and no
  figure is corrected for that. numpy has the region as one array, also where it is 2,000 small
  ones, and tensorizer takes part only where it is one. Cold means that the files were dropped
  from the page cache.
- `posix-direct, encrypted` is the same save or load of a part in AES-256-GCM.
- Each contender runs on recycled pages: right before it is timed, as much memory as it may need
  and 512 MiB more are touched and released. For the file in the page cache, a copy of its own
  and new memory to load into that is its bytes each time. A virtual machine may give free pages
  back to its host, and a program that gets such a page pays for having it brought again.
- A byte of each page of all regions is read right before, too. A host may also take away what was
  not used for a minute: reading 1 GiB in ordinary pages then took 0.6 processor-seconds once,
  without a page fault, and 0.06 the second time.
- The limit of the disk is the fastest of fio, where it is installed, and of a raw probe past
  the page cache with as many files as a save has and 4, 8 and 16 threads.
- A region is in huge pages that the host has set aside (`vm.nr_hugepages`), as the memory of a
  GPU is there before it is asked for, or in ordinary ones of 4 KiB. A run sets aside what is
  missing, and gives it back. Ratios to peers are of equal pages.
- What is compared with that limit, and its probes, have {TURNS_WITH_LIMITS} turns a round: the
  speed of a disk changes within seconds by more than what is looked for.
- A ratio is *inconclusive* after fewer than {TURNS} turns. One that is missed is, too, where the
  middle half of the samples spreads over more than {NOISE:.0%} of their median. Where others took
  more than {OTHERS:.0%} of the processors, every missed ratio is, and so is every ratio to a peer:
  most peers need more of the processors than we do.
"""

CORRECTION = """\
Earlier editions of this page were wrong where they compared with peers. They said that a save of
1 GiB is 8.6 times as fast as the best peer. The peers wrote into pages that the virtual machine
had given back to its host: such a buffered write was seen to take 2.5 processor-seconds a GB
and to reach 0.11 GB/s, and one into pages just released 0.2 and 1.3 to 1.7 GB/s. Ours writes past
the page cache and needs no such pages. Against the fastest samples of numpy and safetensors
it was 1.3 and 1.7 times as fast. The limit was that of one file and four threads, and a save
exceeded it by up to 19 %, so it was none. The order was fixed, with the limit first and the
peers last. Loads were compared in huge pages alone, of which a host has none unless its
administrator sets them aside; in ordinary ones a cold load was 0.92 to 1.02 times as fast as
that of torch. The host had also taken pages of regions that waited for their turn: saves out of
ordinary pages, of all contenders, were shown with up to three times their processor-seconds, and
ours at 0.59 to 0.76 of the limit.
"""

_HEAD = ("row", "contender", "huge pages, GB/s", "CPU s/GB", "ordinary pages, GB/s", "CPU s/GB")
"""A section that has another table was measured by other rules."""


def page(results: Results) -> str:
    """Write the page about a run, in Markdown."""
    return "\n".join(_lines(results)) + "\n" + DEVICES


def renewed(old: str, results: Results) -> str:
    """Write the page about a run, and keep what an older page has about anything else.

    Another size stays where it was measured by the same rules.
    """
    head, *new = common.split(page(results))
    _, *older = common.split(old)
    rules = " | ".join(_HEAD)
    kept = [part for part in older if not part.startswith(_MEMORY) or rules in part]
    return common.joined(head, kept, new)


def _lines(results: Results) -> Iterator[str]:
    yield "# Benchmarks\n"
    yield RULES
    yield CORRECTION
    yield "The machine:\n"
    yield from common.listed(results.machine)
    for one in results.transfers:
        yield from _transfer_lines(one)
    if results.calls:
        yield from _call_lines(results.calls)


def _goal_lines(found: Sequence[Judged]) -> Iterator[str]:
    rows = ((x.row, x.what, x.wanted, x.found, x.verdict, x.why) for x in found)
    return common.table(("row", "against", "goal", "found", "", "why"), rows)


def _rounds(rows: Rows) -> int:
    """Return how many turns those have had that have one a round."""
    return min((len(samples) for row in rows.values() for samples in row.values()), default=0)


def _transfer_lines(results: Transfers) -> Iterator[str]:
    yield f"\n## {_MEMORY}save and load of {size_text(results.size)}\n"
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
    yield "\n## GMS sessions\n"
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
