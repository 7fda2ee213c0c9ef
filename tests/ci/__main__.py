"""Run the steps of a landing, or all proofs: `python -m tests.ci [--proofs] [--list] [STEP ...]`.

If a step fails, its failed tests run once more, one at a time. If they pass then, CI passes and
names the step at its end: the test, or the product, has a race.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.ci.steps import STEPS, Due, Landing, Lane, Step, When, due, lacking, landing_of

ROOT = Path(__file__).resolve().parents[2]
LOGS = ROOT / ".ci" / "logs"
FAREWELL_S = 30.0
"""What an interrupted step gets to clean up, in seconds."""


class Ran(NamedTuple):
    """How a step ended. `raced` passed only when it was run again."""

    step: Step
    verdict: str
    seconds: float = 0.0
    cpu_s: float = 0.0


class Runner:
    """Runs steps in lanes; an interruption ends what runs."""

    def __init__(self, landing: Landing, *, proofs: bool) -> None:
        self._landing = landing
        self._proofs = proofs
        self._began = time.monotonic()
        self._print = threading.Lock()
        self._begin_or_stop = threading.Lock()
        self.running: dict[str, subprocess.Popen[bytes]] = {}
        self._stopping = threading.Event()
        self.ran: list[Ran] = []

    def lane(self, steps: Sequence[Step]) -> None:
        """Run the steps of one lane in their order."""
        for step in steps:
            if self._stopping.is_set():
                return
            reason = lacking(step.needs, os.environ, ROOT)
            ran = Ran(step, f"left out: {reason}") if reason else self._run(step)
            self.ran.append(ran)

    def stop(self, number: signal.Signals = signal.SIGINT) -> None:
        """Send the steps that run a signal, and begin no others."""
        # A step that begins at this moment would be neither sent the signal nor left out.
        with self._begin_or_stop:
            self._stopping.set()
            for running in self.running.values():
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, number)

    def say(self, line: str) -> None:
        """Print a line with the time since the beginning."""
        minutes, seconds = divmod(int(time.monotonic() - self._began), 60)
        with self._print:
            print(f"[{minutes:2}:{seconds:02}] {line}", flush=True)

    def _run(self, step: Step) -> Ran:
        first = self._make(step, repeated=False)
        if first.verdict == "passed" or not step.runs_again or self._stopping.is_set():
            return first
        self.say(f"{step.name} failed; only the tests that failed are run again")
        again = self._make(step, repeated=True)
        return Ran(
            step,
            "raced" if again.verdict == "passed" else "failed",
            first.seconds + again.seconds,
            first.cpu_s + again.cpu_s,
        )

    def _make(self, step: Step, *, repeated: bool) -> Ran:
        cache = ROOT / ".pytest_cache" / step.name
        options = f"-o cache_dir={cache} --durations=40 --durations-min=5"
        if repeated:
            ungroup(cache / "v" / "cache" / "lastfailed")
            options += " --last-failed --last-failed-no-failures=none"
        words = step.words(self._landing)
        if self._proofs:
            words = [word for word in words if not word.startswith("TURN=")]
        words += ["JOBS=0"] if repeated else []
        log = LOGS / f"{step.name}{'.again' if repeated else ''}.log"
        self.say(f"{step.name} begins: make {' '.join(words)}")
        began = time.monotonic()
        with log.open("wb") as out:
            with self._begin_or_stop:
                if self._stopping.is_set():
                    return Ran(step, "left out: interrupted")
                process = subprocess.Popen(
                    ["make", "--no-print-directory", *words],
                    cwd=ROOT,
                    env=os.environ | ({"PYTEST_ADDOPTS": options} if step.runs_again else {}),
                    stdin=subprocess.DEVNULL,
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
                self.running[step.name] = process
            # Popen.wait would not say how much CPU time the step and its children took.
            _, status, usage = os.wait4(process.pid, 0)
            process.returncode = os.waitstatus_to_exitcode(status)
            with self._begin_or_stop:
                del self.running[step.name]
        ran = Ran(
            step,
            "failed" if process.returncode else "passed",
            time.monotonic() - began,
            usage.ru_utime + usage.ru_stime,
        )
        self._show(ran, log)
        return ran

    def _show(self, ran: Ran, log: Path) -> None:
        text = log.read_text("utf-8", "replace")
        with self._print:
            print(f"\n===== {ran.step.name}: {log.relative_to(ROOT)} =====\n{text}", flush=True)
        self.say(f"{ran.step.name} {ran.verdict} in {ran.seconds:.0f} s, CPU {ran.cpu_s:.0f} s")


def ungroup(last_failed: Path) -> None:
    """Remove the names of groups from what the cache of pytest says failed.

    pytest-xdist adds `@GROUP` to the names of tests that share a process. By such a name a run
    finds no test, so it would pass without the tests that failed.
    """
    if last_failed.exists():
        failed = json.loads(last_failed.read_text("utf-8"))
        names = {re.sub(r"@[^@\]]*$", "", name): True for name in failed}
        last_failed.write_text(json.dumps(names), "utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the steps; the status of the program."""
    parser = argparse.ArgumentParser(prog="python -m tests.ci", description=__doc__)
    parser.add_argument("--proofs", action="store_true", help="run every step, and all faults")
    parser.add_argument("--list", action="store_true", help="only say what would run")
    parser.add_argument("steps", nargs="*", metavar="STEP", help="run only these steps")
    options = parser.parse_args(arguments)
    if unknown := set(options.steps) - {step.name for step in STEPS}:
        parser.error(f"no step is called {', '.join(sorted(unknown))}; --list --proofs names all")
    try:
        landing = _landing()
    except ValueError as error:
        parser.error(str(error))
    chosen = Due(STEPS, []) if options.proofs or options.steps else due(landing)
    now = [step for step in chosen.now if not options.steps or step.name in options.steps]
    if options.list:
        print(*(f"{step.lane.value:8}  {' '.join(step.words(landing))}" for step in now), sep="\n")
        return 0
    LOGS.mkdir(exist_ok=True)
    runner = Runner(landing, proofs=options.proofs)
    interrupted = _run_lanes(runner, now)
    _print_table(runner.ran)
    _print_left(landing, chosen)
    for ran in runner.ran:
        if ran.verdict == "raced":
            print(f"{ran.step.name} failed once and passed when it was run again: see FAILED above")
    failed = [ran.step.name for ran in runner.ran if ran.verdict == "failed"]
    if failed:
        print(f"failed: {', '.join(failed)}")
    return 130 if interrupted else int(bool(failed))


def _landing() -> Landing:
    counted = subprocess.run(
        ["git", "rev-list", "--count", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    recorded = (ROOT / ".ci" / "landings").read_text("utf-8")
    return landing_of(recorded, int(counted.stdout))


def _run_lanes(runner: Runner, steps: Sequence[Step]) -> bool:
    """Run both lanes to their ends; return whether they were interrupted."""
    stopped = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stopped.set())
    lanes = [
        threading.Thread(target=runner.lane, args=([s for s in steps if s.lane is lane],))
        for lane in Lane
    ]
    for lane in lanes:
        lane.start()
    said = time.monotonic()
    while any(lane.is_alive() for lane in lanes) and not stopped.wait(0.5):
        if time.monotonic() - said > 60:
            said = time.monotonic()
            runner.say(f"under way: {' and '.join(sorted(runner.running))}")
    if stopped.is_set():
        runner.stop()
        for lane in lanes:
            lane.join(FAREWELL_S)
        runner.stop(signal.SIGKILL)
    for lane in lanes:
        lane.join()
    return stopped.is_set()


def _print_table(ran: Sequence[Ran]) -> None:
    print(f"\n{'STEP':18} {'SECONDS':>7} {'CPU-S':>6}  LANE      RESULT")
    for step, verdict, seconds, cpu_s in ran:
        print(f"{step.name:18} {seconds:7.0f} {cpu_s:6.0f}  {step.lane.value:8}  {verdict}")
    for lane in Lane:
        total = sum(each.seconds for each in ran if each.step.lane is lane)
        print(f"{'in this lane':18} {total:7.0f} {'':6}  {lane.value}")


def _print_left(landing: Landing, chosen: Due) -> None:
    if not chosen.left:
        return
    print(f"This is landing {landing.number}, from {landing.since[:12]}. It leaves", end=" ")
    numbers = sorted({number for _, number in chosen.left})
    parts = [
        f"{', '.join(step.name for step, at in chosen.left if at == number)} to landing {number}"
        for number in numbers
    ]
    later = [step.name for step in STEPS if step.when is When.PROOFS]
    print(f"{'; '.join(parts)}; and {', '.join(later)} to `make proofs`.")


if __name__ == "__main__":
    sys.exit(main())
