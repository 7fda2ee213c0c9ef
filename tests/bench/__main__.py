"""`python -m tests.bench gms` measures, `python -m tests.bench check FILE` judges what was found.

The status is 1 when a ratio is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import msgspec

from tests.bench.gms import SMALL, Bench
from tests.bench.results import Results, judged, page


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    gms = commands.add_parser("gms", help="save and load GPU memory beside the raw disk and peers")
    gms.add_argument("--size-mib", type=int, default=1024, help="of the weights (1024)")
    gms.add_argument("--rounds", type=int, default=5)
    gms.add_argument("--folder", type=Path, default=Path(), help="on the disk to measure (here)")
    gms.add_argument("--json", type=Path, help="where to write what was found")
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
    if arguments.size_mib < 16 or arguments.rounds < 1:
        parser.error(
            f"--size-mib is {arguments.size_mib} and --rounds {arguments.rounds}: "
            f"{SMALL} allocations need 16 MiB at least, and one round"
        )
    if not arguments.folder.is_dir():
        parser.error(f"--folder {arguments.folder}: there is no such folder")
    with tempfile.TemporaryDirectory(prefix=".bench-", dir=arguments.folder) as folder:
        size = arguments.size_mib * 2**20
        results = Bench(Path(folder), size, arguments.rounds, _say).run()
    if arguments.json:
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(results)) + b"\n")
    if arguments.page:
        arguments.page.write_text(page(results))
    return report(results)


def report(results: Results) -> int:
    """Print every verdict and give the exit status."""
    found = judged(results)
    for line in found:
        print(f"{line.verdict:13} {line.row:32} {line.what:34} {line.wanted:10} {line.found}")
    return 1 if any(line.verdict == "missed" for line in found) else 0


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
