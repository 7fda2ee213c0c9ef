"""The product's disk protocols on a simulated disk: what is done, promised, and left by a crash.

A story is a list of steps on a disk. A step that returns has promised something; `recorded` runs a
story and keeps, after every single call that changes the disk, the states that a power loss may
leave, each with the promises given by then. `violations` says what is wrong with one of them.

A state that keeps its promises is checked once: `Sound` remembers it for later runs of the story.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from gms.adapters import posix, sharing, staging, striping, syscalls
from gms.transfer_child import save
from snapshot_agent.adapters import artifacts, control_dir, copying, library
from snapshot_shared import files, finished, holes, journal, reserve, stripes, tasks
from snapshot_shared.errors import SnapbackError
from tests.scenario.disk import SimDisk
from tests.support.brokers import InlineLoop

T = TypeVar("T")
Site = tuple[str, str, int]
"""Where the product calls fsync: file, function, line."""

MODULES: tuple[types.ModuleType, ...] = (
    *(files, finished, holes, journal, reserve, stripes, tasks, artifacts, library, copying),
    *(control_dir, posix, sharing, staging, striping, syscalls, save),
)
SOURCES = "/src/"


@functools.cache
def _loop() -> InlineLoop:
    loop = InlineLoop()
    atexit.register(loop.close)
    return loop


def run(work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end on this thread alone."""
    return _loop().run_until_complete(work)


@contextlib.contextmanager
def mounted(disk: SimDisk) -> Iterator[None]:
    """Put a disk under the product for the length of a block."""
    with contextlib.ExitStack() as stack:
        for module in MODULES:
            for name, stand_in in disk.modules.items():
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, stand_in)
        yield


class Died(BaseException):
    """The process was killed: nothing of it runs any more."""


class Story:
    """Steps on a disk. A subclass gives them in order and says how its promises are checked."""

    name: str
    steps: tuple[str, ...]

    def __init__(self) -> None:
        self.promises: dict[str, Any] = {}
        self.at = 0

    def prepare(self) -> None:
        """Put in place what was there long before."""

    def recover(self) -> None:
        """Do what a process does first after a crash."""

    def check(self, promises: dict[str, Any]) -> None:
        """Raise unless the disk that is mounted keeps these promises, now and after recovery."""
        raise NotImplementedError

    def play(self, after: Callable[[str], None] | None = None) -> None:
        """Do every step from the one that was under way.

        With `after`, which is told each, go on after a refusal as well.
        """
        while self.at < len(self.steps):
            step = self.steps[self.at]
            try:
                getattr(self, step)()
            except SnapbackError:
                if after is None:
                    raise
            if after is not None:
                after(step)
            self.at += 1


Sound = defaultdict[str, set[int]]
"""The keys of the states that keep their promises, by the promises."""


class Left(NamedTuple):
    """A state that a power loss may leave, and what was promised by then."""

    when: str
    promises: dict[str, Any]
    disk: SimDisk


@dataclass
class Recording:
    """What may be left at some moment of a run."""

    states: list[Left] = field(default_factory=list)
    sites: set[Site] = field(default_factory=set)
    deaths: list[int] = field(default_factory=list)
    """The calls before which a kill leaves something else than before the previous call."""


def site() -> Site:
    """Name the line of the product that is calling fsync; a helper for that is looked through."""
    frame, found = sys._getframe(1), None
    while frame is not None:
        code = frame.f_code
        if SOURCES in code.co_filename:
            found = (Path(code.co_filename).name, code.co_name, frame.f_lineno)
            if code.co_name not in ("secure", "_sync"):
                return found
        elif found is not None:
            break
        frame = frame.f_back
    assert found is not None
    return found


def prepared(make: Callable[[], Story]) -> tuple[Story, SimDisk]:
    """Give a story and the disk on which it begins, all of it secured."""
    story, disk = make(), SimDisk()
    with mounted(disk):
        story.prepare()
    disk.sync_all()
    return story, disk


def recorded(
    make: Callable[[], Story],
    *,
    skipped: Site | None = None,
    dies_at: int | None = None,
    sound: Sound | None = None,
) -> Recording:
    """Run a story and keep what each of its prefixes may leave, each different state once.

    `skipped` is a call site of fsync that does nothing. With `dies_at` the process is killed before
    that call, another one recovers and begins the step again, and what each step leaves is kept.
    A state that is `sound` is not kept.
    """
    story, disk = prepared(make)
    kept = Recording()
    known = Sound(set, {key: set(keys) for key, keys in (sound or {}).items()})
    again = "" if dies_at is None else f", killed at call {dies_at} before"
    changes = 0
    moment: tuple[object, ...] = ()

    def keep(operation: str) -> None:
        nonlocal changes
        changes += 1
        promises = dict(story.promises)
        for state in disk.legal_states(known[_said(promises)]):
            when = f"{story.name}: after call {disk.operations} ({operation}){again}"
            kept.states.append(Left(when, promises, state))

    def look(_: str) -> None:
        nonlocal moment
        now = (changes, _said(story.promises), story.at)
        if now != moment:
            moment = now
            kept.deaths.append(disk.operations - start - 1)

    def on_fsync() -> bool:
        here = site()
        kept.sites.add(here)
        return here != skipped

    disk.on_fsync = on_fsync
    start = disk.operations
    with mounted(disk):
        if dies_at is None:
            disk.gate, disk.after = look, keep
            story.play()
            keep("the end")
        else:
            _play_until(disk, story, start + dies_at)
            story.recover()
            story.play(after=keep)
    return kept


def _said(promises: dict[str, Any]) -> str:
    return repr(sorted(promises.items()))


def _play_until(disk: SimDisk, story: Story, last: int) -> None:
    def gate(operation: str) -> None:
        if disk.operations > last:
            raise Died

    disk.gate = gate
    with contextlib.suppress(Died):
        story.play()
    disk.gate = None
    disk.process_died(disk.owner())


def violations(story: Story, recording: Recording, sound: Sound | None = None) -> Iterator[str]:
    """Say which states break a promise, and how; add the others to `sound`."""
    for when, promises, disk in recording.states:
        key = disk.key()
        with mounted(disk):
            try:
                story.check(promises)
            except (AssertionError, SnapbackError, OSError) as error:
                yield f"{when}: {type(error).__name__}: {error}"
                continue
        if sound is not None:
            sound[_said(promises)].add(key)
