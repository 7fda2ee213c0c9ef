"""`python -m tests.bench gms` measures saves, loads and calls, `sessions` the calls alone.

The status is 1 when a ratio is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from snapback_client.reservation import HUGE_PAGE
from tests.bench import common, sessions
from tests.bench.common import MIB
from tests.bench.gms import FILES, Bench
from tests.bench.goals import Results, Transfers, judged, renewed
from tests.bench.machine import available_bytes, describe, huge_pages_set_aside

SHORT = {"size_mib": [256], "rounds": 1, "calls": 300}
"""What a short run measures. It decides nothing, and shows that each row works."""
CALLS: common.Numbers = {
    "rounds": (5, 1, ""),
    "calls": (1000, 100, "of sessions, a round (1000)"),
}
NUMBERS: common.Numbers = {"size-mib": ([1024], 16, "of the weights, one or more (1024)"), **CALLS}
"""16 MiB is the least for 2,000 allocations."""


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gms = commands.add_parser("gms", help="save and load GPU memory beside the raw disk and peers")
    common.add_options(gms, NUMBERS)
    gms.add_argument("--short", action="store_true", help="256 MiB, 1 round; decides nothing")
    gms.add_argument("--peers", type=Path, help="a folder in which pip has installed more peers")
    gms.add_argument(
        "--no-huge-pages", action="store_true", help="do not have the host set huge pages aside"
    )
    common.add_options(commands.add_parser("sessions", help="calls beside grpc.aio alone"), CALLS)
    options = parser.parse_args(words)
    if options.command == "gms" and options.short:
        vars(options).update(SHORT)
    common.check_options(parser, options, NUMBERS if options.command == "gms" else CALLS)
    if options.command == "gms":
        check_room(parser, options)
    for results in measured(options):
        common.write(options.json, None, results)
        if options.page:
            old = options.page.read_text() if options.page.exists() else ""
            options.page.write_text(renewed(old, results))
    return report(results)


def check_room(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """End with status 2 if the disk or the memory is too small."""
    largest = max(options.size_mib) * MIB
    needs = {
        "bytes free on the disk": (shutil.disk_usage(options.folder).free, FILES * largest),
        "bytes of memory available": (available_bytes(), 5 * largest),
    }
    for what, (found, needed) in needs.items():
        if found < needed:
            parser.error(
                f"--size-mib is {largest // MIB}: {needed // MIB} MiB are needed, and there are "
                f"{found // MIB} MiB of {what}"
            )


def measured(options: argparse.Namespace) -> Iterator[Results]:
    """Measure what is asked for, and yield all that is measured, after each size again."""
    machine = describe(options.folder)
    calls = sessions.measure(options.rounds, options.calls)
    if options.command == "sessions":
        yield Results(machine=machine, calls=calls)
        return
    common.use_peers(options.peers)
    transfers: list[Transfers] = []
    for mib in options.size_mib:
        transfers.append(transferred(options, mib * MIB))
        yield Results(machine=machine, transfers=transfers, calls=calls)


def transferred(options: argparse.Namespace, size: int) -> Transfers:
    """Measure saves and loads of one size. Its memory is given back before the next."""
    with (
        huge_pages_set_aside(0 if options.no_huge_pages else size + HUGE_PAGE) as are_there,
        tempfile.TemporaryDirectory(prefix=".bench-", dir=options.folder) as folder,
        contextlib.closing(
            Bench(
                Path(folder),
                size,
                options.rounds,
                in_huge_pages=are_there and not options.no_huge_pages,
            )
        ) as bench,
    ):
        return bench.run()


def report(results: Results) -> int:
    """Print every verdict and give the exit status."""
    found = judged(results)
    for line in found:
        what = f"{line.row:46} {line.what:34} {line.wanted:10} {line.found}"
        why = f" ({line.why})" if line.why else ""
        print(f"{line.verdict:13} {line.of:9} {what}{why}")
    return common.status(found)


if __name__ == "__main__":
    common.run(main)
