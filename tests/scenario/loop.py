"""An event loop whose time jumps from event to event, and the processes that live on it.

Every callback belongs to the simulated process that scheduled it, by a context variable. A process
that is killed is never run again, not even its `finally` blocks, as after a SIGKILL; a process that
is stopped keeps its callbacks until it goes on. There are no threads: what is handed to an executor
runs in the loop, at once or a little later.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import heapq
import itertools
import math
import random
import sys
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

CURRENT: contextvars.ContextVar[Process | None] = contextvars.ContextVar("process", default=None)
"""The process that runs now; None is the world around them all."""

TERM_S = 30.0
"""How long a process may take to end that is asked to, in seconds."""
EXECUTOR_S = 0.004
"""The longest time that a call in an executor takes, in seconds."""


class Quiet(Exception):
    """Nothing is left that could ever happen."""


_AT_A_DEADLINE = asyncio.Timeout._on_timeout.__code__  # type: ignore[attr-defined]


class _Task(asyncio.Task[Any]):
    """A task whose place in a set is the same in every run of a seed."""

    def __init__(self, coro: Any, *, loop: VirtualLoop, context: Any, **options: Any) -> None:
        self.number = next(loop.numbers)
        self.process = CURRENT.get() if context is None else context.get(CURRENT)
        super().__init__(coro, loop=loop, context=context, **options)

    def __hash__(self) -> int:
        return self.number

    def cancel(self, msg: Any = None) -> bool:
        """Cancel it, and again while it ends, as often as its process says.

        A deadline is not repeated: `asyncio.timeout` takes back the one cancellation it asks for.
        """
        is_asked = super().cancel(msg)
        is_deadline = sys._getframe(1).f_code is _AT_A_DEADLINE
        if is_asked and self.process is not None and not is_deadline:
            self.process.cancel_again(self)
        return is_asked


class _Future(asyncio.Future[Any]):
    """A future whose place in a set is the same in every run of a seed."""

    def __init__(self, *, loop: VirtualLoop) -> None:
        self.number = next(loop.numbers)
        super().__init__(loop=loop)

    def __hash__(self) -> int:
        return self.number


class Machine:
    """What the processes of one computer share: its name, its clocks and its power.

    `rate` is how fast its clocks go, `jump` how far its wall clock is off, in seconds. Until
    `hangs_until`, in the world's time, calls on the artifact root do not return.
    """

    def __init__(self, name: str, *, rate: float = 1.0) -> None:
        self.name = name
        self.rate = rate
        self.jump = 0.0
        self.hangs_until = 0.0
        self.boots = 1
        self.is_on = True

    @property
    def boot_id(self) -> str:
        return f"{self.name}-boot-{self.boots}"


class Process:
    """One simulated process. Its tasks run until it is killed; `ended` tells its exit code.

    With a `fuse` it runs that many callbacks more, and then `blow` is called. A task of it that is
    cancelled is cancelled `cancels_again` times more, unless it has ended by then.
    """

    def __init__(self, loop: VirtualLoop, machine: Machine, name: str) -> None:
        self.loop = loop
        self.machine = machine
        self.name = name
        self.pid = next(loop.pids)
        self.is_alive = True
        self.is_stopped = False
        self.fuse: int | None = None
        self.blow: Callable[[], None] = self.kill
        self.resumed_at = -math.inf
        self.stopped_at = 0.0
        self.busy_until = 0.0
        self.cancels_again = 0
        self.is_ending = False
        self.on_term: Callable[[], object] = self.kill
        self.ended: asyncio.Future[int] = loop.create_future()
        self.backlog: deque[asyncio.Handle] = deque()
        self._at_exit: dict[object, Callable[[], None]] = {}

    def __repr__(self) -> str:
        return f"{self.name}({self.pid})"

    def spawn(self, work: Coroutine[Any, Any, T], name: str = "") -> asyncio.Task[T]:
        context = contextvars.Context()
        context.run(CURRENT.set, self)
        task: asyncio.Task[T] = self.loop.create_task(work, name=name or self.name, context=context)
        return task

    def at_exit(self, key: object, act: Callable[[], None]) -> None:
        """Have the world do something when the process ends; by key, so that it can be undone."""
        self._at_exit[key] = act

    def forget(self, key: object) -> None:
        """Undo `at_exit`."""
        self._at_exit.pop(key, None)

    def kill(self, code: int = 137) -> None:
        """End it at once. What it was about to do is not done."""
        if not self.is_alive:
            return
        self.is_alive = False
        self.is_stopped = False
        self.backlog.clear()
        contextvars.Context().run(self._end, code)

    def _end(self, code: int) -> None:
        self.ended.set_result(code)
        while self._at_exit:
            self._at_exit.pop(next(iter(self._at_exit)))()

    def terminate(self) -> None:
        """Ask it to end, as SIGTERM does, and end it when that takes too long."""
        if self.is_alive and not self.is_ending:
            self.is_ending = True
            self.on_term()
            self.loop.in_world(TERM_S, self.kill)

    def cancel_again(self, task: _Task) -> None:
        """Have a task be cancelled again: in one of the next turns, or later."""
        for _ in range(self.cancels_again):
            self.loop.in_world(self.loop.moment(), self._cancel, task)

    def _cancel(self, task: _Task) -> None:
        if self.is_alive and not self.is_stopped and not task.done():
            asyncio.Task.cancel(task)

    def use(self, seconds: float) -> None:
        """Use the processor for so long, during which nothing else of this process runs."""
        self.busy_until = max(self.busy_until, self.loop.now) + seconds
        self.loop.in_world(self.busy_until - self.loop.now, self._go_on)

    def _go_on(self) -> None:
        if not self.is_stopped and self.loop.now >= self.busy_until:
            self.loop.requeue(self.backlog)

    def takes(self, handle: asyncio.Handle) -> bool:
        """Whether a callback runs now; one that is stopped or busy keeps it for later."""
        if self.fuse is not None and self.is_alive and not self.is_stopped:
            self.fuse -= 1
            if self.fuse <= 0:
                self.fuse = None
                self.blow()
        is_away = self.is_stopped or self.loop.now < self.busy_until
        if is_away:
            self.backlog.append(handle)
        return self.is_alive and not is_away

    def stop(self) -> None:
        """Stop it, as SIGSTOP does."""
        if self.is_alive and not self.is_stopped:
            self.is_stopped = True
            self.stopped_at = self.loop.now

    def resume(self) -> None:
        """Let it go on, as SIGCONT does."""
        if self.is_stopped:
            self.is_stopped = False
            self.resumed_at = self.loop.now
            self.loop.requeue(self.backlog)


def current() -> Process:
    """Return the process that runs now; there must be one."""
    process = CURRENT.get()
    assert process is not None
    return process


class VirtualLoop(asyncio.BaseEventLoop):
    """The loop. `now` is the world's time in seconds; `time()` is that of the process that asks."""

    def __init__(self, rng: random.Random) -> None:
        super().__init__()
        self.now = 0.0
        self.steps = 0
        self.turns = 0
        self._rng = rng
        self.pids, self.numbers = itertools.count(101), itertools.count(1)
        """The numbers of processes, and of tasks, futures and timers."""
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._kept: list[asyncio.Task[Any]] = []
        self._clock_resolution = 1e-9

    def create_task(self, coro: Any, *, name: Any = None, context: Any = None) -> Any:
        """Make a task, and keep it: a killed one that is collected would run its `finally`."""
        task = _Task(coro, loop=self, name=name, context=context)
        self._kept.append(task)
        return task

    def create_future(self) -> Any:
        return _Future(loop=self)

    def moment(self) -> float:
        """Choose how long something waits that follows soon, in seconds."""
        return self._rng.choice((0.0, 0.0, 0.01, 5.0)) * self._rng.random()

    def time(self) -> float:
        process = CURRENT.get()
        return self.now if process is None else self.now * process.machine.rate

    def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:
        process = CURRENT.get()
        if process is not None:
            when /= process.machine.rate
        if context is None:
            context = contextvars.copy_context()
        return self._schedule(when, callback, args, context)

    def in_world(
        self, delay_s: float, act: Callable[..., object], *args: object
    ) -> asyncio.TimerHandle:
        """Do something later that belongs to no process."""
        return self._schedule(self.now + delay_s, act, args, contextvars.Context())

    def _schedule(self, when: float, act: Any, args: Any, context: Any) -> asyncio.TimerHandle:
        when = max(when, self.now)
        timer = asyncio.TimerHandle(when, act, args, self, context)
        heapq.heappush(self._timers, (when, next(self.numbers), timer))
        return timer

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """It is left out when its time comes."""

    def requeue(self, handles: deque[asyncio.Handle]) -> None:
        """Run callbacks that a stopped process could not run."""
        self._ready.extend(handles)  # type: ignore[attr-defined]
        handles.clear()

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> Any:
        future = self.create_future()

        def run() -> None:
            try:
                result = func(*args)
            except BaseException as error:  # noqa: BLE001 - it is handed on
                if not future.cancelled():
                    future.set_exception(error)
            else:
                if not future.cancelled():
                    future.set_result(result)

        chance = self._rng.random()
        process = CURRENT.get()
        # Threads of their own are those of the artifact root.
        if executor is not None and process and process.machine.hangs_until > self.now:
            self._schedule(process.machine.hangs_until, run, (), contextvars.copy_context())
        elif chance < 0.5:
            self.call_later(chance * 2 * EXECUTOR_S, run)
        else:
            run()
        return future

    def _run_once(self) -> None:
        ready: deque[asyncio.Handle] = self._ready  # type: ignore[attr-defined]
        self.turns += 1
        if not ready:
            self._advance(ready)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if handle._cancelled:  # type: ignore[attr-defined]
                continue
            context = handle._context  # type: ignore[attr-defined]
            process = context.get(CURRENT)
            if process is not None and not process.takes(handle):
                continue
            self.steps += 1
            self._run_handle(handle, context)

    def _run_handle(self, handle: asyncio.Handle, context: Any) -> None:
        """Do as `Handle._run`, which costs two calls more."""
        try:
            context.run(handle._callback, *handle._args)  # type: ignore[attr-defined]
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # noqa: BLE001 - whatever a callback raises
            message = f"Exception in callback {handle}"
            self.call_exception_handler({"message": message, "exception": error})

    def _advance(self, ready: deque[asyncio.Handle]) -> None:
        timers = self._timers
        while timers and timers[0][2].cancelled():
            heapq.heappop(timers)
        if not timers:
            raise Quiet
        self.now = timers[0][0]
        while timers and timers[0][0] <= self.now:
            ready.append(heapq.heappop(timers)[2])

    def _process_events(self, event_list: Any) -> None:
        """There are none."""

    def _write_to_self(self) -> None:
        """Nobody waits in a system call."""

    def bury(self) -> None:
        """Close what was killed, once the world is over. What that begins is closed, too."""
        asyncio._set_running_loop(self)
        while self._kept:
            task = self._kept.pop()
            task._log_destroy_pending = False  # type: ignore[attr-defined]
            # Its owner is dead: whatever its clean-up meets is nobody's concern.
            with contextlib.suppress(Exception):
                task.get_coro().close()  # type: ignore[union-attr]
        asyncio._set_running_loop(None)


async def ask(
    target: Process | None,
    make: Callable[[], Coroutine[Any, Any, T]],
    gone: Callable[[], Exception],
) -> T:
    """Have another process do something and wait for its answer, as over a socket.

    `gone()` is raised when the process is not there or ends before it has answered. A caller that
    is cancelled or killed cancels the work.
    """
    if target is None or not target.is_alive:
        raise gone()
    answer: asyncio.Future[T] = target.loop.create_future()
    task = target.spawn(_answer(make, answer))
    key, caller = object(), CURRENT.get()
    target.at_exit(key, lambda: answer.done() or answer.set_exception(gone()))
    if caller is not None:
        caller.at_exit(key, task.cancel)
    try:
        return await answer
    finally:
        target.forget(key)
        if caller is not None:
            caller.forget(key)
        task.cancel()


async def _answer(make: Callable[[], Coroutine[Any, Any, T]], answer: asyncio.Future[T]) -> None:
    try:
        result = await make()
    except Exception as error:  # noqa: BLE001 - it is the answer
        if not answer.done():
            answer.set_exception(error)
    else:
        if not answer.done():
            answer.set_result(result)
