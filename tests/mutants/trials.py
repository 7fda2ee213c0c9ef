"""One-line bugs, and what the tests say to each of them in a copy of the tree."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import msgspec
from msgspec import Meta

COPIED = (
    *("shared/src", "services/*/src", "tests", "pyproject.toml"),
    *("deploy/crds", "deploy/examples", "deploy/helm", "docs/generate"),
)
LIMIT_S = 180.0
"""How long the tests of one bug may take, in seconds."""
FAREWELL_S = 10.0
"""What tests that are interrupted get to clean up, in seconds."""

Verdict = Literal["caught", "survived", "broken"]


class CannotApply(ValueError):
    """A bug cannot be put in where the list says."""


class Mutant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A bug: in `file`, the one place that reads `find` becomes `replace`.

    One of the tests `caught_by` has to fail, and to show the text `shows`: that is how we know
    that it fails because of this bug.
    """

    name: Annotated[str, Meta(pattern="^[a-z0-9-]{3,48}$")]
    what: Annotated[str, Meta(min_length=10)]
    file: str
    find: Annotated[str, Meta(min_length=3)]
    replace: str
    caught_by: Annotated[list[str], Meta(min_length=1)]
    shows: Annotated[str, Meta(min_length=5)]

    def apply(self, root: Path) -> None:
        """Put the bug into a copy of the tree. CannotApply names the file and the text."""
        path = root / self.file
        source = path.read_text("utf-8") if path.is_file() else ""
        if (count := source.count(self.find)) != 1:
            raise CannotApply(f"{self.file} has this text {count} times, not once: {self.find!r}")
        changed = source.replace(self.find, self.replace)
        try:
            compile(changed, self.file, "exec")
        except SyntaxError as error:
            raise CannotApply(f"{self.file} is no Python any more: {error}") from error
        write_source(path, changed)


class Outcome(NamedTuple):
    """What became of one bug. `by` is the test that failed, or what went wrong."""

    mutant: Mutant
    verdict: Verdict
    by: str
    seconds: float
    output: str = ""


class Ran(NamedTuple):
    """How a run of pytest ended; `status` is None when it took too long."""

    status: int | None
    output: str
    seconds: float

    @property
    def failed(self) -> list[str]:
        """The tests that failed; not those that could not begin."""
        lines = [line for line in self.output.splitlines() if line.startswith("FAILED ")]
        return [line.removeprefix("FAILED ").partition(" - ")[0] for line in lines]


class _List(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: list[Mutant]


def read_list(path: Path) -> list[Mutant]:
    """Read the list. ValueError names what is wrong with it."""
    mutants = msgspec.toml.decode(path.read_bytes(), type=_List).mutant
    names = [mutant.name for mutant in mutants]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ValueError(f"these names are given twice: {', '.join(twice)}")
    return mutants


def write_source(path: Path, text: str) -> None:
    """Change a file of a copy. What Python made of it before may look as new as it is."""
    path.write_text(text, "utf-8")
    for stale in path.parent.glob(f"__pycache__/{path.stem}.*.pyc"):
        stale.unlink()


def copy_sources(root: Path, to: Path) -> None:
    """Copy what the tests need: the packages, the tests and their configuration."""
    for pattern in COPIED:
        for source in sorted(root.glob(pattern)):
            target = to / source.relative_to(root)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_file():
                shutil.copy2(source, target)
            else:
                shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"))


async def check_unharmed(tree: Path, mutants: Iterable[Mutant]) -> str:
    """Run all named tests without any bug; give what they printed if they do not pass."""
    names = dict.fromkeys(name for mutant in mutants for name in mutant.caught_by)
    ran = await run_tests(tree, [*names], limit_s=10 * LIMIT_S)
    return "" if ran.status == 0 else ran.output


async def try_out(mutant: Mutant, tree: Path, work: Path) -> Outcome:
    """Copy the tree to `work`, put the bug in, run its tests, and judge."""
    await asyncio.to_thread(shutil.copytree, tree, work)
    try:
        mutant.apply(work)
    except CannotApply as error:
        return Outcome(mutant, "broken", str(error), 0.0)
    ran = await run_tests(work, ["-x", *mutant.caught_by], limit_s=LIMIT_S)
    await asyncio.to_thread(shutil.rmtree, work)
    verdict, by = _judge(mutant, ran)
    return Outcome(mutant, verdict, by, ran.seconds, ran.output)


def _judge(mutant: Mutant, ran: Ran) -> tuple[Verdict, str]:
    if ran.status is None:
        return "broken", f"its tests took more than {LIMIT_S:.0f} s"
    if ran.status == 0:
        return "survived", "no test"
    if ran.status != 1 or not ran.failed:
        return "broken", f"its tests cannot be run: pytest ended with {ran.status}"
    if mutant.shows not in ran.output:
        return "broken", f"{ran.failed[0]} fails, but does not show {mutant.shows!r}"
    return "caught", ran.failed[0]


async def run_tests(tree: Path, arguments: list[str], *, limit_s: float) -> Ran:
    """Run pytest in a copy of the tree, on the product that is in it."""
    sources = [str(path) for pattern in COPIED[:2] for path in sorted(tree.glob(pattern))]
    environment = {
        **os.environ,
        # Before the editable installs, for the tests and for every process that they start.
        "PYTHONPATH": os.pathsep.join(sources),
        "PYTHONHASHSEED": "0",
    }
    environment.pop("PYTEST_ADDOPTS", None)
    options = ["-q", "-vv", "--tb=short", "--color=no", "-p", "no:cacheprovider", "-rfE"]
    began = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "pytest", *options, *arguments),
        cwd=tree,
        env=environment,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        async with asyncio.timeout(limit_s):
            output, _ = await process.communicate()
        status = process.returncode
    except TimeoutError:
        output, status = b"", None
    finally:
        await _end(process)
    return Ran(status, output.decode(errors="replace"), time.monotonic() - began)


async def _end(process: asyncio.subprocess.Process) -> None:
    """Let tests that still run clean up after themselves, and end what is left."""
    if process.returncode is None:
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await process.communicate()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await process.wait()
