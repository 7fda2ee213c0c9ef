"""What all benchmarks share: turns, noise, goals, tables, the page, options, and how a run ends."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple, NoReturn, TypeVar

import msgspec

from tests.bench.machine import Watch, describe

ROOT = Path(__file__).resolve().parents[2]
MIB = 2**20
NOISE = 0.4
"""Half of the samples of a contender must lie within this share of their median."""
OTHERS = 0.2
"""Others may take this share of the processors while a benchmark runs."""
_FIRST = ("GPU memory: ", "GMS sessions")
_LAST = "Devices"
"""How the titles begin of the sections that are first and last on the page."""

T = TypeVar("T")
Verdict = Literal["met", "missed", "inconclusive", "not measured"]
Rows = dict[str, dict[str, list[float]]]
"""Samples of each contender of each row, one a round or more."""


class Judged(NamedTuple):
    """A goal, and whether it is met."""

    of: str
    row: str
    what: str
    wanted: str
    found: str
    verdict: Verdict
    why: str = ""


class Results(msgspec.Struct, kw_only=True):
    """What a benchmark has found, in seconds where nothing else is said."""

    machine: dict[str, str]
    facts: dict[str, int] = {}
    """What was measured: sizes in bytes, and how many calls."""
    samples: Rows = {}
    others: float = 0.0
    """The share of the processors that others took."""
    absent: dict[str, str] = {}
    """Why a contender was left out."""

    def add(self, row: str, contender: str, value: float) -> None:
        """Add a sample."""
        self.samples.setdefault(row, {}).setdefault(contender, []).append(value)

    @property
    def rounds(self) -> int:
        """The most samples that a contender has of a row."""
        return max(len(each) for row in self.samples.values() for each in row.values())


@contextlib.contextmanager
def measuring(folder: Path, **facts: int) -> Iterator[Results]:
    """Yield what to add samples to; `folder` is on the disk that is measured."""
    found, watch = Results(machine=describe(folder), facts=facts), Watch()
    yield found
    found.others = watch.others()
    found.machine["load average at the end"] = f"{os.getloadavg()[0]:.1f}"


def rotated(turns: Sequence[T], number: int, rounds: int) -> list[T]:
    """Return the order of a round, numbered from 0: over all rounds each begins all along it."""
    first = number * len(turns) // rounds
    return [*turns[first:], *turns[:first]]


def spread(samples: Sequence[float]) -> float:
    """Give the width of the middle half of some samples as a share of their median."""
    ordered = sorted(samples)
    cut = len(ordered) // 4
    return (ordered[len(ordered) - 1 - cut] - ordered[cut]) / median(ordered)


def goal(
    of: str,
    row: str,
    what: str,
    value: float,
    *samples: Sequence[float],
    least: float | None = None,
    most: float | None = None,
    wanted: str = "{:g} x",
    found: str = "{:.2f} x",
    others: float = 0.0,
) -> Judged:
    """Compare a value with the least or the most that is wanted.

    A missed goal is inconclusive if others had the processors or if the samples behind the value
    spread.
    """
    limit, sign = (least, "≥") if least is not None else (most, "≤")
    assert limit is not None
    verdict: Verdict = (
        "met" if (value >= limit if least is not None else value <= limit) else "missed"
    )
    if verdict == "missed" and (others > OTHERS or any(spread(each) > NOISE for each in samples)):
        verdict = "inconclusive"
    return Judged(of, row, what, f"{sign} {wanted.format(limit)}", found.format(value), verdict)


def status(found: Iterable[Judged]) -> int:
    """Return the exit status: 1 if a goal is missed."""
    return int(any(line.verdict == "missed" for line in found))


# Tables.


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[str]:
    """Write a table in Markdown, after an empty line."""
    yield f"\n| {' | '.join(head)} |".replace("  ", " ")
    yield "|---" * len(head) + "|"
    for row in rows:
        yield f"| {' | '.join(map(str, row))} |"


def goal_table(
    found: Iterable[Judged], first: str = "row", second: str = "against"
) -> Iterator[str]:
    """Write the goals of a section."""
    rows = ((line.row, line.what, line.wanted, line.found, line.verdict) for line in found)
    return table((first, second, "goal", "found", ""), rows)


def sample_table(
    head: Sequence[str], samples: Rows, shown: str = "{:,.0f}", scale: float = 1.0
) -> Iterator[str]:
    """Write a line for each contender of each row: the median, the least and the greatest."""
    rows = (
        (row, name, middle(each, shown, scale), ends(each, shown, scale))
        for row, contenders in samples.items()
        for name, each in contenders.items()
    )
    return table(head, rows)


def listed(machine: Mapping[str, str]) -> Iterator[str]:
    """Write the lines about the machine."""
    return (f"- {key}: {value}" for key, value in machine.items())


def ends(
    samples: Sequence[float],
    shown: str = "{:,.0f}",
    scale: float = 1.0,
    *,
    slowest_first: bool = False,
) -> str:
    """Write the least and the greatest sample or, of times, these two in turn."""
    both = sorted((min(samples), max(samples)), reverse=slowest_first)
    return " … ".join(shown.format(each * scale) for each in both)


def cell(
    samples: Sequence[float], shown: str, scale: float = 1.0, *, slowest_first: bool = False
) -> str:
    """Write the median and both ends."""
    of = ends(samples, shown, scale, slowest_first=slowest_first)
    return f"{middle(samples, shown, scale)} ({of})"


def middle(samples: Sequence[float], shown: str = "{:,.0f}", scale: float = 1.0) -> str:
    """Write the median."""
    return shown.format(median(samples) * scale)


# The page.


def with_section(page: str, text: str) -> str:
    """Put a section into a page, in place of the section with its title."""
    head, *parts = split(page)
    return joined(head, parts, [text.removeprefix("## ")])


def split(page: str) -> list[str]:
    """Give what comes before the first section, and every section from its title on."""
    return page.split("\n## ")


def joined(head: str, older: Sequence[str], new: Sequence[str]) -> str:
    """Put a page together; a new section replaces the older section of its title."""
    titled = {part.partition("\n")[0]: part.rstrip() for part in (*older, *new)}

    def place(title: str) -> tuple[int, str]:
        if title.startswith(_LAST):
            return len(_FIRST) + 1, title
        found = [at for at, name in enumerate(_FIRST) if title.startswith(name)]
        return (found[0], title) if found else (len(_FIRST), "")

    parts = [f"## {titled[title]}\n" for title in sorted(titled, key=place)]
    return "\n".join([f"{head.rstrip()}\n", *parts])


def say(text: str) -> None:
    """Say on standard error what is under way."""
    print(text, file=sys.stderr, flush=True)


def write(json: Path | None, page: Path | None, results: Any, section: str = "") -> None:
    """Write results as JSON, and as a section of a page for people, if that was asked for."""
    if json:
        json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if page:
        old = page.read_text() if page.exists() else "# Benchmarks\n"
        page.write_text(with_section(old, section))


# Options, and how a run begins and ends.

Numbers = Mapping[str, tuple[int | list[int], int, str]]
"""Options by name: the default, the least, and what the number is."""


def add_options(parser: argparse.ArgumentParser, numbers: Numbers) -> None:
    """Add options that are numbers, and those of all benchmarks that write a page."""
    for name, (default, _, about) in numbers.items():
        many = {"nargs": "+"} if isinstance(default, list) else {}
        parser.add_argument(f"--{name}", type=int, default=default, help=about, **many)  # type: ignore[arg-type]
    parser.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    parser.add_argument("--json", type=Path, help="where to write what was found")
    parser.add_argument("--page", type=Path, help="the page with a section about it")


def check_options(
    parser: argparse.ArgumentParser, options: argparse.Namespace, numbers: Numbers
) -> None:
    """End with status 2 if a number is too small or a folder is not there."""
    for name, (_, least, _) in numbers.items():
        given = getattr(options, name.replace("-", "_"))
        smallest = min(given) if isinstance(given, list) else given
        if smallest < least:
            parser.error(f"--{name} is {smallest}, and {least} is the least")
    for name in ("folder", "peers"):
        folder = getattr(options, name, None)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name} {folder}: there is no such folder")


class Benchmark(NamedTuple):
    """A benchmark of one section: its options, how it measures, and what its section says."""

    name: str
    title: str
    about: str | None
    numbers: Numbers
    measure: Callable[[argparse.Namespace, Path], Coroutine[Any, Any, Results]]
    """Is given the options, and a new folder on the disk that is measured."""
    lines: Callable[[Results], Iterable[str]]
    """Writes the section of the page about a run, in Markdown, below its title."""
    judged: Callable[[Results], Iterable[Judged]]
    """Compares with every goal. One that a noisy machine may have missed is inconclusive."""
    lacking: Callable[[], str] = str
    """Says why nothing can be measured here."""
    peers: str = ""
    """What pip has installed in the folder of the option `--peers`, which is there then."""

    def section(self, results: Results) -> str:
        return "\n".join([f"## {self.title}\n", *self.lines(results)]) + "\n"

    def main(self, words: Sequence[str] | None = None) -> int:
        """Measure, print and write what was found, and return the exit status."""
        parser = argparse.ArgumentParser(
            prog=f"python -m tests.bench.{self.name}", description=self.about
        )
        add_options(parser, self.numbers)
        if self.peers:
            parser.add_argument(
                "--peers", type=Path, help=f"a folder in which pip has installed {self.peers}"
            )
        options = parser.parse_args(words)
        check_options(parser, options, self.numbers)
        if why := self.lacking():
            parser.error(why)
        with tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder.resolve()) as folder:
            results = asyncio.run(self.measure(options, Path(folder)))
        text = self.section(results)
        write(options.json, options.page, results, text)
        print(text)
        return status(self.judged(results))


def run(main: Callable[[], int]) -> NoReturn:
    """Run a benchmark and end with its status, or with that of a process that a signal has ended.

    SIGTERM cleans up as ctrl-C does.
    """
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
    sys.exit(130)


# Contenders that are processes of their own.


def present(contenders: Iterable[str], peer: str, peers: Path | None) -> list[str]:
    """Leave the peer out unless it is installed, in the environment or in the folder of peers."""
    is_there = find_spec(peer) is not None or (peers is not None and (peers / peer).is_dir())
    return [name for name in contenders if name != peer or is_there]


def use_peers(folder: Path | None = None) -> None:
    """Import from a folder of peers, or from that with which a contender was started."""
    if peers := folder or os.environ.get("BENCH_PEERS"):
        # Last, so that whatever is here already stays what it is.
        sys.path.append(str(Path(peers).absolute()))


class Contender(NamedTuple):
    """A process, and the first line that it has written."""

    process: subprocess.Popen[str]
    said: str

    @property
    def cpu_s(self) -> float:
        """Processor-seconds of all its threads so far."""
        # The clock of a process is numbered by its id: CPUCLOCK_SCHED in Linux' posix-timers.h.
        return time.clock_gettime((~self.process.pid << 3) | 2)


@contextlib.contextmanager
def contender(module: str, *arguments: object, peers: Path | None = None) -> Iterator[Contender]:
    """Run a module until its standard input is closed; yield it when it has written a line."""
    process = subprocess.Popen(
        [sys.executable, "-m", f"tests.bench.{module}", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "BENCH_PEERS": str(peers.absolute()) if peers else ""},
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        if not (line := process.stdout.readline().strip()):
            raise RuntimeError(f"{module} {' '.join(map(str, arguments))} did not start")
        yield Contender(process, line)
    finally:
        process.stdin.close()
        process.wait()
        process.stdout.close()
