"""`python -m tests.bench gms` measures, `python -m tests.bench check FILE` judges what was found.

The status is 1 when a ratio is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import contextlib
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

from snapback_client.reservation import HUGE_PAGE
from tests.bench import output, sessions
from tests.bench.gms import FILES, SMALL, Bench
from tests.bench.goals import judged
from tests.bench.machine import available_bytes, describe, huge_pages_set_aside
from tests.bench.page import renewed
from tests.bench.regions import MIB
from tests.bench.results import Results, Transfers

SHORT = {"size_mib": [256], "rounds": 1, "calls": 300}
"""What a short run measures. It decides nothing, and shows that each row works."""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gms = commands.add_parser("gms", help="save and load GPU memory beside the raw disk and peers")
    gms.add_argument(
        "--size-mib", type=int, nargs="+", default=[1024], help="of the weights, one or more (1024)"
    )
    gms.add_argument("--short", action="store_true", help="256 MiB, 1 round; decides nothing")
    gms.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    gms.add_argument("--peers", type=Path, help="a folder in which pip has installed more peers")
    gms.add_argument(
        "--no-huge-pages", action="store_true", help="do not have the host set huge pages aside"
    )
    alone = commands.add_parser("sessions", help="calls of a session beside grpc.aio alone")
    for command in (gms, alone):
        command.add_argument("--rounds", type=int, default=5)
        command.add_argument("--calls", type=int, default=1000, help="of sessions, a round (1000)")
        command.add_argument("--json", type=Path, help="where to write what was found")
    gms.add_argument("--page", type=Path, help="where to write it for people")
    check = commands.add_parser("check", help="compare with the goals")
    check.add_argument("file", type=Path)
    arguments = parser.parse_args()
    if arguments.command == "check":
        try:
            results = msgspec.json.decode(arguments.file.read_bytes(), type=Results)
        except (OSError, msgspec.MsgspecError) as error:
            parser.error(f"{arguments.file} holds no results: {error}")
        return report(results)
    if arguments.command == "gms" and arguments.short:
        vars(arguments).update(SHORT)
    check_request(parser, arguments)
    for results in measured(arguments):
        output.write(arguments.json, None, results)
        if arguments.command == "gms" and arguments.page:
            old = arguments.page.read_text() if arguments.page.exists() else ""
            arguments.page.write_text(renewed(old, results))
    return report(results)


def check_request(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    """End with status 2 when it makes no sense."""
    if arguments.rounds < 1 or arguments.calls < 100:
        parser.error(
            f"--rounds is {arguments.rounds} and --calls {arguments.calls}: "
            "at least one round and 100 calls are needed"
        )
    if arguments.command == "sessions":
        return
    if min(arguments.size_mib) < 16:
        parser.error(
            f"--size-mib is {min(arguments.size_mib)}: {SMALL} allocations need 16 MiB at least"
        )
    for name in ("folder", "peers"):
        folder = getattr(arguments, name)
        if folder is not None and not folder.is_dir():
            parser.error(f"--{name} {folder}: there is no such folder")
    largest = max(arguments.size_mib) * MIB
    needs = {
        "bytes free on the disk": (shutil.disk_usage(arguments.folder).free, FILES * largest),
        "bytes of memory available": (available_bytes(), 5 * largest),
    }
    for what, (found, needed) in needs.items():
        if found < needed:
            parser.error(
                f"--size-mib is {largest // MIB}: {needed // MIB} MiB are needed, and there are "
                f"{found // MIB} MiB of {what}"
            )


def measured(arguments: argparse.Namespace) -> Iterator[Results]:
    """Measure what is asked for, and yield all that is measured, after each size again."""
    is_alone = arguments.command == "sessions"
    machine = describe(Path() if is_alone else arguments.folder)
    calls = sessions.measure(arguments.rounds, arguments.calls, output.say)
    if is_alone:
        yield Results(machine=machine, calls=calls)
        return
    if arguments.peers:
        # Last, so that whatever is here already stays what it is.
        sys.path.append(str(arguments.peers.absolute()))
    transfers: list[Transfers] = []
    for mib in arguments.size_mib:
        transfers.append(transferred(arguments, mib * 2**20))
        yield Results(machine=machine, transfers=transfers, calls=calls)


def transferred(arguments: argparse.Namespace, size: int) -> Transfers:
    """Measure saves and loads of one size. Its memory is given back before the next."""
    with (
        huge_pages_set_aside(0 if arguments.no_huge_pages else size + HUGE_PAGE) as are_there,
        tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder) as folder,
        contextlib.closing(
            Bench(
                Path(folder),
                size,
                arguments.rounds,
                output.say,
                in_huge_pages=are_there and not arguments.no_huge_pages,
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
    return 1 if any(line.verdict == "missed" for line in found) else 0


if __name__ == "__main__":
    output.run(main)
