"""A worker that can be captured and restored.

    from snapback_client import Worker

    with Worker() as worker:
        weights = worker.pool("weights", build)
        worker.ready()
        while question := receive():
            with worker.request():
                answer(weights, question)

The same program starts cold, is captured and goes on, and is restored. After a restore by the
driver `cooperative` it begins anew, with what `on_quiesce` has saved in the folder `worker.state`;
after one by `criu` the process goes on as it is. Outside of Snapback, where no variable names a
control directory, it is never captured, and all else is the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import logging
import os
import select
import shutil
import signal
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from concurrent import futures
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, TypeVar

import msgspec

from snapback_client.codec import decode_json, encode_json
from snapback_client.control import (
    ABORTED,
    COMPLETE,
    CONTEXT,
    CONTROL_DIR,
    MAX_BODY_BYTES,
    OWNER,
    QUIESCE,
    QUIESCE_FAILED,
    QUIESCED,
    QUIESCING,
    READY,
    RESTORE_COMPLETE,
    RESTORE_FAILED,
    RESTORED,
    STANDBY,
    STATE,
    Owner,
    RestoreContext,
    Signal,
)
from snapback_client.errors import (
    InvalidMessage,
    InvalidValue,
    NotEligible,
    NotFound,
    SnapbackError,
)
from snapback_client.identity import Identity, identity_of
from snapback_client.pool import MemoryPool, connect, restore
from snapback_client.torch import TorchMemory
from snapback_client.torch_devices import import_torch

log = logging.getLogger(__name__)

Outcome = Literal["complete", "aborted", "restored"]
_OUTCOMES: dict[str, Outcome] = {
    COMPLETE: "complete",
    ABORTED: "aborted",
    RESTORE_COMPLETE: "restored",
}
_SUFFIX = ".pool"
_MAX_CONTEXT_BYTES = 4 * 1024 * 1024
_MAX_MESSAGE = 2000
"""How many characters of an error the agent gets: a control file is at most 64 KiB."""
_WAITS_AGAIN_S = 1.0
"""How often a worker writes what it waits for, in seconds."""
_Body = TypeVar("_Body", Signal, RestoreContext, Owner)
_Module = TypeVar("_Module", bound=Any)
"""A `torch.nn.Module`, which is not named here as PyTorch is optional."""
_IN_MOVED_TO = 0x80


class RestoreFailed(SnapbackError):
    """The process was restored, and what it needs to go on was not."""

    default_next_step = "let the worker start again: it starts cold"


class Resumed(NamedTuple):
    """Why a worker goes on: its capture is over, or its process was restored in another place.

    `devices` has the uuid of the device that a restored process has now for each that it had, and
    `identity` who it is there; None where it goes on in its own place. Read the fields by their
    names: later versions may have more of them.
    """

    outcome: Outcome
    devices: Mapping[str, str]
    identity: Identity | None = None


class Worker:
    """A worker, whose captures are carried out in a thread while its other threads wait.

    A worker that cannot go on after a capture ends its process with SIGTERM, and the block that it
    was entered for raises `failure`.
    """

    def __init__(
        self,
        on_quiesce: Callable[[Path], object] | None = None,
        on_resume: Callable[[Resumed], object] | None = None,
        *,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Make a worker, which has to be started.

        `on_quiesce` is called when a capture begins, with the folder for what the worker has to
        find again after a restore. If it raises an error, the capture fails with that error at
        once, and the worker goes on. No request is answered until `on_resume` has returned. Both
        may be set later, as attributes. Pools that `pool` returns need neither. `resume_from` is
        the argument `--resume-from` that the driver `respawn` gives. InvalidInput: the control
        directory cannot be followed.
        """
        self.state: Path | None = None
        """After a restore the folder with what `on_quiesce` has saved; None after a cold start."""
        self.devices: Mapping[str, str] = {}
        """After a restore the uuid of the device here for each that the source had."""
        self.identity: Identity | None = None
        """After a restore who this process is; None as long as it is what was started."""
        self.failure: BaseException | None = None
        """Why the worker could not go on."""
        path = os.environ.get(CONTROL_DIR, "")
        self.on_quiesce = on_quiesce
        self.on_resume = on_resume
        self._control = _ControlDirectory(path) if path else None
        self._resume_from = Path(resume_from) if resume_from else None
        self._pools: dict[str, MemoryPool] = {}
        self._owed: int | None = None
        self._attempt = 0
        self._requests = 0
        self._is_stopped = False
        self._is_closed = False
        self._turn = threading.Condition()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Wait, where the worker is in standby, until it is restored or has to start cold.

        NotEligible: another worker follows the same control directory.
        """
        control, saved = self._control, self._resume_from
        if control is None:
            return
        control.claim(replaces=saved is not None)
        # Of a process before this one: it would be believed while this one is built.
        control.withdraw(READY)
        if os.environ.get(STANDBY) == "1":
            # Its container was started again: after a failure nothing comes.
            control.withdraw(RESTORED)
            found = control.news(RESTORE_FAILED) or control.wait(RESTORE_COMPLETE, RESTORE_FAILED)
            self._owed = found.body.attempt
            if found.name == RESTORE_COMPLETE:
                self.state, self.devices = saved or control.state, found.body.devices
                self.identity = identity_of(found.body, control.context())
            else:
                log.warning("starting cold, for the restore failed: %s", found.body.message)
        elif saved is not None:
            # In the midst of the capture of the process that this one replaces.
            control.put(QUIESCED, control.wait(QUIESCE).body.attempt)
            control.wait(COMPLETE, ABORTED)
            self.state = saved

    def pool(
        self,
        name: str,
        build: Callable[[MemoryPool], object] | None = None,
        *,
        device: int | str = 0,
        domain: str = "weights",
    ) -> MemoryPool:
        """Return the pool that was saved under a name, or a new one.

        A new one is filled by `build`, and committed after it if it is one of weights and `build`
        has not committed it, as `TorchMemory.publish` does. It sleeps while the worker is captured,
        and is closed with the worker.
        """
        if name in self._pools:
            raise InvalidValue(f"the worker has a pool {name!r} already", name=name)
        if self.state is not None:
            try:
                saved = (self.state / f"{name}{_SUFFIX}").read_bytes()
            except FileNotFoundError:
                raise NotFound(
                    f"no pool {name!r} was saved with what is restored here",
                    next_step="restore with the program that was captured",
                    name=name,
                ) from None
            made = restore(saved, name=name)
        else:
            made = connect(device, lock="RW", domain=domain, name=name)
            try:
                if build is not None:
                    build(made)
                if domain == "weights" and made.access == "RW":
                    made.commit()
            except BaseException:
                made.close()
                raise
        self._pools[name] = made
        return made

    def torch(
        self,
        name: str,
        build: Callable[[], _Module],
        load: Callable[[_Module], object] | None = None,
        *,
        device: int | str = 0,
    ) -> _Module:
        """Return a model of PyTorch whose parameters lie in the pool that has a name.

        `build` makes the modules, and `load` reads their weights. A cold start calls both, and the
        parameters are read-only afterwards. After a restore `build` is called on the device `meta`,
        which has no memory, `load` is not called, and the parameters come from the pool.
        TorchUnavailable; the errors of `pool`, `TorchMemory.publish` and `TorchMemory.materialise`.
        """
        made: list[_Module] = []

        def publish(pool: MemoryPool) -> None:
            memory = TorchMemory({name: pool})
            with memory.region(name):
                model = build().to(memory.device)
            # What reading needs besides the parameters is not to lie in the pool.
            if load is not None:
                load(model)
            memory.publish(model, name)
            made.append(model)

        pool = self.pool(name, publish, device=device)
        if not made:
            memory = TorchMemory({name: pool})
            with import_torch().device("meta"):
                made.append(build())
            memory.materialise(made[0], name)
        return made[0]

    def ready(self) -> None:
        """Say that the worker serves, and that it may be captured from now on."""
        if self._control is None or self._thread is not None:
            return
        if self._owed is not None:
            self._control.put(RESTORED, self._owed)
        self._control.put(READY)
        arguments = (self._control,)
        self._thread = threading.Thread(target=self._follow, args=arguments, daemon=True)
        self._thread.start()

    @contextlib.contextmanager
    def request(self) -> Iterator[None]:
        """Wait while the worker is captured. No capture begins before the end of the block.

        NotEligible when the worker is closed meanwhile.
        """
        with self._turn:
            self._turn.wait_for(lambda: self._is_closed or not self._is_stopped)
            if self._is_stopped:
                raise _closed()
            self._requests += 1
        try:
            yield
        finally:
            with self._turn:
                self._requests -= 1
                self._turn.notify_all()

    def show_waiting(self, text: str) -> None:
        """Show what the worker waits for before it is quiet, in `snapshotctl` and on the page.

        Call it from `on_quiesce` if that takes long.
        """
        if self._control is not None:
            with contextlib.suppress(OSError):
                self._control.put(QUIESCING, self._attempt, text)

    def close(self) -> None:
        """Close the pools. The worker is captured no more."""
        self._end_requests()
        if self._control is not None:
            self._control.end()
        if self._thread is not None:
            self._thread.join()
        if self._control is not None:
            self._control.release()
        for pool in self._pools.values():
            pool.close()

    def __enter__(self) -> Self:
        """Start; the worker is closed at the end of the block."""
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.close()
        if self.failure is not None:
            raise self.failure

    def _end_requests(self) -> None:
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()

    def _follow(self, control: _ControlDirectory) -> None:
        """Carry out captures, one after another."""
        try:
            found = control.wait(QUIESCE)
            while True:
                end = self._captured(control, found)
                if end.name != QUIESCE:
                    control.put(READY)
                    end = control.wait(QUIESCE)
                found = end
        except _Ended:
            return
        except BaseException as error:
            log.exception("the worker cannot go on")
            self.failure = error
            self._end_requests()
            os.kill(os.getpid(), signal.SIGTERM)
            if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
                # The kernel sends the first process of a container nothing that it does not handle.
                os._exit(128 + signal.SIGTERM)

    def _finish_requests(self) -> None:
        """Begin no request any more, and wait for those under way. _Ended."""
        with self._turn:
            self._is_stopped = True
            while not self._turn.wait_for(
                lambda: self._is_closed or not self._requests, _WAITS_AGAIN_S
            ):
                self.show_waiting(_under_way(self._requests))
            if self._is_closed:
                raise _Ended

    def _captured(self, control: _ControlDirectory, asked: _News) -> _News:
        """Be quiet until a capture is over; return what has ended it."""
        control.withdraw(READY)
        attempt = self._attempt = asked.body.attempt
        self._finish_requests()
        try:
            control.state.mkdir(mode=0o700, exist_ok=True)
            if self.on_quiesce is not None:
                self.on_quiesce(control.state)
            for name, pool in self._pools.items():
                pool.sleep()
                (control.state / f"{name}{_SUFFIX}").write_bytes(pool.save_state())
            control.put(QUIESCED, attempt)
        except Exception as error:
            log.exception("the worker cannot be captured, and waits for the end of the capture")
            # It may have filled the disk, which is needed to say that the worker goes on.
            control.empty_state()
            with contextlib.suppress(OSError):
                control.put(QUIESCE_FAILED, attempt, f"{type(error).__name__}: {error}")
        # The agent removes what ended a capture when it begins the next one.
        end = control.wait(*_OUTCOMES, RESTORE_FAILED, QUIESCE)
        if end.name == RESTORE_FAILED:
            raise RestoreFailed(end.body.message)
        devices = end.body.devices
        for pool in self._pools.values():
            if pool.is_asleep:
                pool.wake(device=devices.get(pool.device, ""))
        is_restored = end.name == RESTORE_COMPLETE
        here = identity_of(end.body, control.context()) if is_restored else None
        self.identity = here or self.identity
        if self.on_resume is not None:
            self.on_resume(Resumed(_outcome_of(end), devices, here))
        if end.name == RESTORE_COMPLETE:
            control.put(RESTORED, end.body.attempt)
        with self._turn:
            self._is_stopped = False
            self._turn.notify_all()
        return end


class AsyncWorker:
    """A `Worker` of a program on asyncio; what is called when it is captured may be async."""

    def __init__(
        self,
        on_quiesce: Callable[[Path], object] | None = None,
        on_resume: Callable[[Resumed], object] | None = None,
        *,
        resume_from: str | os.PathLike[str] | None = None,
    ) -> None:
        """Make a worker, which has to be started. As `Worker`."""
        self._worker = Worker(self._quiesce, self._resume, resume_from=resume_from)
        self.on_quiesce = on_quiesce
        self.on_resume = on_resume
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turn = asyncio.Condition()
        self._requests = 0
        self._is_stopped = False
        self._is_closed = False

    @property
    def state(self) -> Path | None:
        """After a restore the folder with what `on_quiesce` has saved; None after a cold start."""
        return self._worker.state

    @property
    def devices(self) -> Mapping[str, str]:
        """After a restore the uuid of the device here for each that the source had."""
        return self._worker.devices

    @property
    def identity(self) -> Identity | None:
        """After a restore who this process is; None as long as it is what was started."""
        return self._worker.identity

    async def start(self) -> None:
        """Wait, where the worker is in standby, until it is restored or has to start cold."""
        self._loop = asyncio.get_running_loop()
        await self._in_thread(self._worker.start)

    async def pool(self, name: str, *arguments: Any, **more: Any) -> MemoryPool:
        """Return a pool, as `Worker.pool`; `build` is called in another thread."""
        return await asyncio.to_thread(self._worker.pool, name, *arguments, **more)

    async def torch(self, name: str, *arguments: Any, **more: Any) -> Any:
        """Return a model of PyTorch, as `Worker.torch`; the callbacks run in another thread."""
        return await asyncio.to_thread(self._worker.torch, name, *arguments, **more)

    def ready(self) -> None:
        """Say that the worker serves, and that it may be captured from now on."""
        self._worker.ready()

    def show_waiting(self, text: str) -> None:
        """Show what the worker waits for before it is quiet. As `Worker.show_waiting`."""
        self._worker.show_waiting(text)

    @contextlib.asynccontextmanager
    async def request(self) -> AsyncIterator[None]:
        """Wait while the worker is captured. No capture begins before the end of the block."""
        async with self._turn:
            await self._turn.wait_for(lambda: self._is_closed or not self._is_stopped)
            if self._is_stopped:
                raise _closed()
            self._requests += 1
        try:
            yield
        finally:
            async with self._turn:
                self._requests -= 1
                self._turn.notify_all()

    async def close(self) -> None:
        """Close the pools. The worker is captured no more."""
        async with self._turn:
            self._is_closed = True
            self._turn.notify_all()
        await asyncio.to_thread(self._worker.close)

    async def __aenter__(self) -> Self:
        """Start; the worker is closed at the end of the block."""
        await self.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        await self.close()

    async def _in_thread(self, function: Callable[[], None]) -> None:
        """Wait for a function that waits for a file; a cancellation ends its wait."""
        task = asyncio.ensure_future(asyncio.to_thread(function))
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError:
            await self.close()
            with contextlib.suppress(_Ended):
                await task
            raise
        await task

    # In the thread of the worker.

    def _quiesce(self, state: Path) -> None:
        quiet = self._begin(self._quiesced(state))
        while not futures.wait([quiet], _WAITS_AGAIN_S).done:
            if self._requests:
                self._worker.show_waiting(_under_way(self._requests))
        quiet.result()

    def _resume(self, resumed: Resumed) -> None:
        self._begin(self._resumed(resumed)).result()

    def _begin(self, work: Coroutine[Any, Any, None]) -> futures.Future[None]:
        if self._loop is None:
            raise InvalidValue("the worker was not started")
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _quiesced(self, state: Path) -> None:
        async with self._turn:
            self._is_stopped = True
            await self._turn.wait_for(lambda: self._is_closed or not self._requests)
        if self.on_quiesce is not None:
            await _done(self.on_quiesce(state))

    async def _resumed(self, resumed: Resumed) -> None:
        if self.on_resume is not None:
            await _done(self.on_resume(resumed))
        async with self._turn:
            self._is_stopped = False
            self._turn.notify_all()


def _under_way(requests: int) -> str:
    return f"{requests} request{'' if requests == 1 else 's'} under way"


async def _done(result: object) -> None:
    if isinstance(result, Awaitable):
        await result


def _closed() -> NotEligible:
    return NotEligible(
        "the worker was closed while it was captured", next_step="start the worker again"
    )


class _Ended(Exception):
    """The worker was closed."""


class _News(NamedTuple):
    """A file that was put into the control directory."""

    name: str
    body: Signal


def _outcome_of(end: _News) -> Outcome:
    """Return how a capture has ended: by its own file, or as the next request says."""
    if end.name in _OUTCOMES:
        return _OUTCOMES[end.name]
    return "aborted" if end.body.previous == "aborted" else "complete"


_claimed: set[Path] = set()
"""The control directories that workers of this process follow."""


def _is_alive(owner: Owner | None) -> bool:
    return owner is not None and _start_of(owner.pid) == owner.start


def _start_of(pid: int) -> int | None:
    """Return when a process was started, in clock ticks since the boot; None if it has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The name of the program is in parentheses, and may have any character.
    state, *fields = text.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


class _ControlDirectory:
    """A control directory, followed by inotify, so that no wait polls or misses a file."""

    def __init__(self, path: str) -> None:
        self.state = Path(path) / STATE
        self._path = Path(path)
        self._seen: dict[str, tuple[int, int]] = {}
        libc = ctypes.CDLL(None, use_errno=True)
        self._changes = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        if libc.inotify_add_watch(self._changes, os.fsencode(path), _IN_MOVED_TO) < 0:
            code = ctypes.get_errno()
            raise InvalidValue(
                f"{CONTROL_DIR} is {path!r}, which cannot be followed: {os.strerror(code)}",
                next_step="leave the variable as it was set for the container",
                path=path,
            )
        self._is_claimed = False
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        # An engine may have more files open than select(2) can take.
        self._poll = select.poll()
        for descriptor in (self._changes, self._end):
            self._poll.register(descriptor, select.POLLIN)

    def claim(self, *, replaces: bool) -> None:
        """Claim the directory for this worker. NotEligible: another worker follows it.

        If two workers followed it, the agent would capture both as soon as the first is quiet. A
        worker that `replaces` another process starts while that process lives.
        """
        own = Owner(os.getpid(), _start_of(os.getpid()) or 0)
        found = None if replaces else self._read(OWNER, Owner, MAX_BODY_BYTES)
        # A program that called execv(2) has the pid and the start of the program before it.
        is_taken = self._path in _claimed if found == own else _is_alive(found)
        if found is not None and is_taken:
            whose = "this process" if found == own else f"process {found.pid}"
            raise NotEligible(
                f"another Worker, of {whose}, follows {self._path}",
                next_step="make one Worker in a container, in the process that starts the others",
                path=str(self._path),
            )
        self._replace(OWNER, own)
        self._is_claimed = True
        _claimed.add(self._path)

    def release(self) -> None:
        """Leave the directory to the next process."""
        if not self._is_claimed:
            return
        _claimed.discard(self._path)
        # The probes of the container would believe them before the next process has begun.
        for name in (READY, RESTORED, OWNER):
            with contextlib.suppress(OSError):
                self.withdraw(name)

    def news(self, *names: str) -> _News | None:
        """Return the first of the files that is another one than was returned before."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found = os.lstat(self._path / name)
                identity = (found.st_ino, found.st_mtime_ns)
                if self._seen.get(name) == identity:
                    continue
                self._seen[name] = identity
                if (body := self._read(name, Signal, MAX_BODY_BYTES)) is not None:
                    return _News(name, body)
        return None

    def context(self) -> dict[str, str | None]:
        """Return the variables that a placeholder has written down; none without one."""
        found = self._read(CONTEXT, RestoreContext, _MAX_CONTEXT_BYTES)
        return found.env if found is not None else {}

    def _read(self, name: str, body: type[_Body], limit: int) -> _Body | None:
        """Return what a file says; None of what no agent or placeholder has put there."""
        path = self._path / name
        try:
            # A pipe would be waited for, and a link followed.
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW)
            with os.fdopen(descriptor, "rb") as file:
                data = file.read(limit + 1) or b""
            return decode_json(data, body, limit=limit)
        except FileNotFoundError:
            return None
        except (OSError, InvalidMessage) as error:
            log.warning("%s is no file of Snapback, and is left alone: %s", path, error)
            return None

    def wait(self, *names: str) -> _News:
        """Wait until one of the files is new. _Ended."""
        while (found := self.news(*names)) is None:
            if any(ready == self._end for ready, _ in self._poll.poll()):
                raise _Ended
            with contextlib.suppress(BlockingIOError):
                os.read(self._changes, MAX_BODY_BYTES)
        return found

    def put(self, name: str, attempt: int = 0, message: str = "") -> None:
        """Put a file in place as a whole."""
        # An error may name a file whose name is no text.
        text = message[:_MAX_MESSAGE].encode(errors="replace").decode()
        self._replace(name, Signal(attempt=attempt, message=text))

    def _replace(self, name: str, body: msgspec.Struct) -> None:
        temporary = self._path / f".{name}.tmp"
        temporary.write_bytes(encode_json(body))
        temporary.rename(self._path / name)

    def withdraw(self, name: str) -> None:
        (self._path / name).unlink(missing_ok=True)

    def empty_state(self) -> None:
        """Remove what was saved, as far as that can be done."""
        with contextlib.suppress(OSError):
            for path in self.state.iterdir():
                with contextlib.suppress(OSError):
                    if path.is_dir() and not path.is_symlink():
                        shutil.rmtree(path, ignore_errors=True)
                    else:
                        path.unlink()

    def end(self) -> None:
        """End every wait, now and later."""
        os.eventfd_write(self._end, 1)
