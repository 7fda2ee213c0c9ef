"""The product's disk protocols on a simulated disk: what is done, promised, and left by a crash.

A story is a list of steps on a disk. A step that returns has promised something; `recorded` runs a
story and keeps, after every single call that changes the disk, the states that a power loss may
leave, each with the promises given by then. `violations` says what is wrong with one of them.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import functools
import sys
import types
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gms.adapters import posix, sharing, staging, striping, syscalls
from gms.transfer_child import save
from snapshot_agent.adapters import artifacts, control_dir, copying, library
from snapshot_shared import files, journal, stripes, tasks
from snapshot_shared.errors import SnapbackError
from tests.scenario.disk import SimDisk

T = TypeVar("T")
Site = tuple[str, str, int]
"""Where the product calls fsync: file, function, line."""

MODULES: tuple[types.ModuleType, ...] = (
    files,
    journal,
    stripes,
    tasks,
    artifacts,
    library,
    copying,
    control_dir,
    posix,
    sharing,
    staging,
    striping,
    syscalls,
    save,
)
SOURCES = "/src/"


class _InlineLoop(asyncio.SelectorEventLoop):
    """Runs at once, and in order, what is handed to threads."""

    def run_in_executor(  # type: ignore[override]
        self, executor: Any, func: Callable[..., T], *args: Any
    ) -> asyncio.Future[T]:
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - it belongs to whoever waits
            future.set_exception(error)
        return future


@functools.cache
def _loop() -> _InlineLoop:
    loop = _InlineLoop()
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
            for name, stand_in in (("os", disk.os), ("fcntl", disk.fcntl)):
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


@dataclass
class Recording:
    """What may be left at some moment of a run, with the promises given by then."""

    states: list[tuple[str, dict[str, Any], SimDisk]] = field(default_factory=list)
    sites: set[Site] = field(default_factory=set)
    operations: int = 0


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
    seen: set[tuple[int, int]] | None = None,
) -> Recording:
    """Run a story and keep what each of its prefixes may leave.

    `skipped` is a call site of fsync that does nothing. With `dies_at` the process is killed before
    that call, another one recovers and begins the step again, and what each step leaves is kept.
    A state that is in `seen` with the same promises is not kept again.
    """
    story, disk = prepared(make)
    kept = Recording()
    seen = set() if seen is None else seen

    def keep(operation: str) -> None:
        promises = dict(story.promises)
        for state in disk.legal_states():
            if (key := (hash(repr(sorted(promises.items()))), state.key())) not in seen:
                seen.add(key)
                again = "" if dies_at is None else f", killed at call {dies_at} before"
                when = f"{story.name}: after call {disk.operations} ({operation}){again}"
                kept.states.append((when, promises, state))

    def on_fsync() -> bool:
        here = site()
        kept.sites.add(here)
        return here != skipped

    disk.on_fsync = on_fsync
    start = disk.operations
    with mounted(disk):
        if dies_at is None:
            disk.after = keep
            story.play()
            keep("the end")
        else:
            _play_until(disk, story, start + dies_at)
            story.recover()
            story.play(after=keep)
    kept.operations = disk.operations - start
    return kept


def _play_until(disk: SimDisk, story: Story, last: int) -> None:
    def gate(operation: str) -> None:
        if disk.operations > last:
            raise Died

    disk.gate = gate
    with contextlib.suppress(Died):
        story.play()
    disk.gate = None
    disk.process_died(disk.owner())


def violations(story: Story, recording: Recording) -> Iterator[str]:
    """Say which states break a promise, and how."""
    for when, promises, state in recording.states:
        with mounted(state):
            try:
                story.check(promises)
            except (AssertionError, SnapbackError, OSError) as error:
                yield f"{when}: {type(error).__name__}: {error}"
