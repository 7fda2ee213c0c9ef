"""`python -m scenario.run`: many seeds, over all cores; what fails is shortened and printed."""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.scenario.faults import Fault, faults_of, settings_of
from tests.scenario.rules import KINDS, Kind
from tests.scenario.world import World

REGRESSIONS = Path(__file__).with_name("regressions.txt")


class Outcome(NamedTuple):
    """What became of one seed."""

    seed: int
    broken: list[str]
    kinds: set[Kind]
    captures: int
    restores: int
    virtual_s: float
    steps: int


def run_seed(seed: int, faults: Sequence[Fault] | None = None) -> Outcome:
    """Run the world of a seed, with its own faults or with these."""
    world = _world(seed, faults_of(seed) if faults is None else list(faults))
    rules, loop = world.rules, world.loop
    return Outcome(
        seed, rules.broken, rules.kinds, rules.captures, rules.restores, loop.now, loop.steps
    )


def _world(seed: int, faults: list[Fault]) -> World:
    world = World(seed, settings_of(seed), faults)
    world.run()
    return world


def shortened(seed: int) -> list[Fault]:
    """Leave out one fault after another while a rule is still broken."""
    faults = faults_of(seed)
    index = 0
    while index < len(faults):
        fewer = faults[:index] + faults[index + 1 :]
        if run_seed(seed, fewer).broken:
            faults = fewer
        else:
            index += 1
    return faults


def explain(seed: int, *, diary: bool = False) -> str:
    """Tell how a seed fails: the shortest list of faults, and which rules they break."""
    faults = shortened(seed)
    world = _world(seed, faults)
    lines = [f"seed {seed} of {_commit()}", f"  {settings_of(seed)}", "  faults:"]
    lines += [f"    {fault}" for fault in faults] or ["    none"]
    lines += ["  broken:", *(f"    {line}" for line in world.rules.broken)]
    if diary:
        lines += ["  diary:", *(f"    {line}" for line in world.notes)]
    return "\n".join(lines)


def regressions() -> list[int]:
    """Give the seeds that have failed once."""
    lines = REGRESSIONS.read_text(encoding="utf-8").splitlines()
    return [int(line.split()[0]) for line in lines if line and not line.startswith("#")]


def _commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return found.stdout.strip() or "an unknown commit"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run seeds and say what they showed; status 1 when a rule was broken."""
    parser = argparse.ArgumentParser(prog="make scenarios", description=__doc__)
    parser.add_argument("--seeds", type=int, default=2000, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="run one seed and tell its story")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    options = parser.parse_args(arguments)
    if os.environ.get("PYTHONHASHSEED") != "0":
        # The order of sets of words must not differ from run to run.
        os.environ["PYTHONHASHSEED"] = "0"
        os.execv(sys.executable, [sys.executable, "-W", "ignore", *sys.orig_argv[1:]])
    logging.disable(logging.CRITICAL)
    if options.seed is not None:
        sys.stdout.write(explain(options.seed, diary=True) + "\n")
        return 1 if run_seed(options.seed).broken else 0
    return _many(options)


def _many(options: argparse.Namespace) -> int:
    seeds = sorted({*regressions(), *range(options.first, options.first + options.seeds)})
    began, failed, done = time.monotonic(), [], []
    with multiprocessing.Pool(options.jobs, maxtasksperchild=500) as pool:
        for outcome in pool.imap_unordered(run_seed, seeds, chunksize=4):
            done.append(outcome)
            if outcome.broken:
                failed.append(outcome.seed)
                sys.stdout.write(f"seed {outcome.seed}: {outcome.broken[0].strip()}\n")
            if len(done) % 500 == 0:
                rate = len(done) / (time.monotonic() - began)
                sys.stdout.write(f"{len(done)} of {len(seeds)}, {rate:.0f} a second\n")
                sys.stdout.flush()
    _sum_up(done, time.monotonic() - began, options.jobs)
    for seed in failed[:5]:
        sys.stdout.write(explain(seed) + "\n")
    return 1 if failed else 0


def _sum_up(done: Sequence[Outcome], took: float, jobs: int) -> None:
    captures, restores = sum(o.captures for o in done), sum(o.restores for o in done)
    virtual = sum(o.virtual_s for o in done) / 3600
    counts = Counter(kind for outcome in done for kind in outcome.kinds)
    broken = sorted(outcome.seed for outcome in done if outcome.broken)
    sys.stdout.write(
        f"{len(done)} schedules: {captures} captures committed, {restores} workers restored\n"
        f"{', '.join(f'{counts[kind]} {kind}' for kind in KINDS)}\n"
        f"{virtual:.1f} virtual hours in {took:.1f} s, "
        f"{len(done) / took / jobs:.1f} schedules a second a core ({jobs} cores)\n"
    )
    if broken:
        sys.stdout.write(f"seeds that broke a rule: {' '.join(map(str, broken))}\n")


if __name__ == "__main__":
    sys.exit(main())
