"""Put every bug of the list into a copy of the tree and see that the tests catch it.

`python -m tests.mutants [--jobs N] [--only NAME ...]`. Status 1 when a bug survives, cannot be put
in, or has tests that cannot be run or fail without it.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.trials import (
    Mutant,
    Outcome,
    check_unharmed,
    copy_sources,
    read_list,
    try_out,
)

ROOT = Path(__file__).resolve().parents[2]
LIST = Path(__file__).with_name("mutants.toml")
TAIL = 40
"""How many lines of the tests' output are shown of what went wrong."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials; the status of the program."""
    parser = argparse.ArgumentParser(prog="make mutants", description=__doc__)
    parser.add_argument("--jobs", type=int, default=2, help="how many at a time (2)")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="only these bugs of the list")
    parser.add_argument("--list", type=Path, default=LIST, help="the list of bugs")
    parser.add_argument("--root", type=Path, default=ROOT, help="the tree to copy")
    options = parser.parse_args(arguments)
    try:
        mutants = read_list(options.list)
    except ValueError as error:
        _say(f"{options.list}: {error}")
        return 1
    if unknown := set(options.only or ()) - {mutant.name for mutant in mutants}:
        parser.error(f"the list has no {', '.join(sorted(unknown))}")
    mutants = [found for found in mutants if not options.only or found.name in options.only]
    try:
        return asyncio.run(_all(mutants, options.root, options.jobs))
    except KeyboardInterrupt:
        _say("interrupted; everything was removed")
        return 130


async def _all(mutants: list[Mutant], root: Path, jobs: int) -> int:
    # So that an end by SIGTERM cleans up as one by ctrl-C does.
    if this := asyncio.current_task():
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, this.cancel)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder, "tree")
        copy_sources(root, tree)
        _say("first the tests of all bugs, without any")
        if output := await check_unharmed(tree, mutants):
            _say(_tail(output))
            _say("these tests fail without any bug, so they say nothing")
            return 1
        _say(f"they pass, in {time.monotonic() - began:.0f} s; now {len(mutants)} bugs")
        outcomes = await _try_out_all(mutants, tree, Path(folder), jobs)
    for outcome in outcomes:
        if outcome.verdict != "caught":
            _say(f"\n{outcome.mutant.name}: {outcome.mutant.what}\n{_tail(outcome.output)}")
    _print_table(outcomes, time.monotonic() - began)
    return 0 if all(outcome.verdict == "caught" for outcome in outcomes) else 1


async def _try_out_all(mutants: list[Mutant], tree: Path, folder: Path, jobs: int) -> list[Outcome]:
    turn = asyncio.Semaphore(jobs)
    done = 0

    async def one(mutant: Mutant) -> Outcome:
        nonlocal done
        async with turn:
            outcome = await try_out(mutant, tree, folder / mutant.name)
        done += 1
        _say(f"[{done:2}/{len(mutants)}] {outcome.verdict:8} {mutant.name}")
        return outcome

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one(mutant)) for mutant in mutants]
    return [task.result() for task in tasks]


def _print_table(outcomes: list[Outcome], seconds: float) -> None:
    rows = [("BUG", "", "CAUGHT BY", "SECONDS")]
    rows += [
        (o.mutant.name, "" if o.verdict == "caught" else o.verdict, _short(o), f"{o.seconds:.1f}")
        for o in outcomes
    ]
    widths = [max(len(row[index]) for row in rows) for index in range(4)]
    for name, verdict, by, took in rows:
        line = f"{name:{widths[0]}}  {verdict:{widths[1]}}  {by:{widths[2]}}  {took:>{widths[3]}}"
        print(line)
    caught = sum(outcome.verdict == "caught" for outcome in outcomes)
    print(f"{caught} of {len(outcomes)} bugs were caught, in {seconds:.0f} s")


def _short(outcome: Outcome) -> str:
    """Name a test by its file and function; say anything else in full."""
    if outcome.verdict != "caught":
        return outcome.by
    path, _, test = outcome.by.partition("::")
    return f"{Path(path).stem}: {test}"


def _tail(output: str) -> str:
    return "\n".join(f"    {line}" for line in output.splitlines()[-TAIL:])


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
