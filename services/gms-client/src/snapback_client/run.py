"""Run an engine as it is, and have it captured and restored: `snapback-run -- PROGRAM`.

The engine is a child of this program, which passes signals on to it and ends as it does. What it
has to do for a capture is asked of it by hooks: URLs that it serves, or commands.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import logging
import os
import select
import shlex
import signal
import subprocess
import sys
import tarfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from snapback_client.errors import DeadlineExceeded, InvalidInput, NotEligible, SnapbackError
from snapback_client.state_files import pack, unpack
from snapback_client.worker import Resumed, Worker

log = logging.getLogger("snapback-run")

FILES = "files.tar"
"""What `--state` names, in a worker's state (snapback_client/state_files.py)."""
_METHODS = ("GET", "POST", "PUT")
_FORWARDED = (
    *(signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT),
    *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGWINCH),
)
_ASK_AGAIN_S = 0.1
_ANSWER_S = 5.0
"""How long one question of `--ready` may take: the engine may have ended meanwhile."""
END_S = 10.0
"""How long an engine may take to end by SIGTERM when this program ends it, in seconds."""
_CANNOT_START = 127
_REFUSED = 2
_FAILED = 1


class Request(NamedTuple):
    """A hook that is a request to the engine; its answer has to be 2xx."""

    method: str
    url: str


class Command(NamedTuple):
    """A hook that is a program; it has to end with 0."""

    words: tuple[str, ...]


Hook = Request | Command


class Plan(NamedTuple):
    """What was asked for on the command line and in the environment."""

    command: list[str]
    ready: Hook | None
    quiesce: Hook | None
    resume: Hook | None
    restore: Hook | None
    state: list[Path]
    ready_s: float
    hook_s: float


def hook_of(text: str) -> Hook | None:
    """Read `URL`, `METHOD URL` or a command line; None of an empty text. InvalidInput."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise InvalidInput(f"the hook {text!r} cannot be read: {error}") from error
    if not words:
        return None
    method, *rest = words if words[0] in _METHODS else ("POST", *words)
    if len(rest) == 1 and _is_url(rest[0]):
        return Request(method, rest[0])
    if words[0] in _METHODS or "://" in words[0]:
        raise InvalidInput(
            f"the hook {text!r} is no request",
            next_step="write METHOD http://HOST:PORT/PATH, just the URL for a POST, or a command",
        )
    return Command(tuple(words))


def _is_url(text: str) -> bool:
    try:
        found = urllib.parse.urlsplit(text)
        return (
            found.scheme in ("http", "https")
            and bool(found.hostname)
            and (text.isascii() and (found.port is None or found.port > 0))
        )
    except ValueError:
        return False


def plan_of(words: Sequence[str], environment: Mapping[str, str]) -> Plan:
    """Read the command line. InvalidInput; SystemExit for `--help` and wrong options."""
    parser = argparse.ArgumentParser(
        prog="snapback-run",
        usage="snapback-run [OPTIONS] -- PROGRAM [ARGUMENTS]",
        description="Run an engine as it is, and have it captured and restored.",
        epilog="A HOOK is a URL (POST), 'METHOD URL', or a command line. Each option may also be "
        "given by an environment variable: --ready by SNAPBACK_RUN_READY, and so on.",
    )

    def option(name: str, meaning: str, default: str = "", metavar: str = "HOOK") -> None:
        variable = f"SNAPBACK_RUN_{name.upper().replace('-', '_')}"
        given = environment.get(variable, default)
        parser.add_argument(f"--{name}", default=given, metavar=metavar, help=meaning)

    option("ready", "asked until it succeeds: the engine serves (a URL is a GET here)")
    option("quiesce", "called before a capture: finish requests, let the devices go")
    option("resume", "called when the engine goes on after a capture")
    option("restore", "called when it goes on after a restore (default: --resume)")
    option("state", "files or folders to find again after a restore", metavar="PATH[:PATH…]")
    option("ready-within", "how long the engine may take to start, in seconds", "600", "SECONDS")
    option("hook-within", "how long a hook may take, in seconds", "60", "SECONDS")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    given = parser.parse_args(words)
    command = given.command[1:] if given.command[:1] == ["--"] else given.command
    if not command:
        parser.error("no program is named; write it behind --")
    if given.state and not hasattr(tarfile, "data_filter"):
        raise InvalidInput(
            "--state needs Python 3.11.4 or later, whose tarfile can keep files within a folder",
            next_step="take an image with a later Python, or leave --state out",
        )
    ready = hook_of(given.ready)
    if isinstance(ready, Request) and not given.ready.startswith(_METHODS):
        ready = Request("GET", ready.url)
    resume = hook_of(given.resume)
    return Plan(
        command=command,
        ready=ready,
        quiesce=hook_of(given.quiesce),
        resume=resume,
        restore=hook_of(given.restore) or resume,
        state=[Path(path) for path in given.state.split(":") if path],
        ready_s=_seconds("--ready-within", given.ready_within),
        hook_s=_seconds("--hook-within", given.hook_within),
    )


def _seconds(name: str, text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 7 * 86400:
        raise InvalidInput(f"{name} is {text!r}, which is no number of seconds above 0")
    return found


class Engine:
    """The child, its hooks and its files."""

    def __init__(self, plan: Plan) -> None:
        """Use a plan; `start` it."""
        self._plan = plan
        self._child: subprocess.Popen[bytes] | None = None
        self._starting = threading.Lock()
        self._is_quiet = False
        self.worker = Worker(self.quiesce, self.go_on)

    @property
    def child(self) -> subprocess.Popen[bytes]:
        """The child. NotEligible before it is started."""
        if self._child is None:
            raise NotEligible("the engine was not started")
        return self._child

    def start(self) -> None:
        """Start the engine. InvalidInput: there is no such program."""
        command = self._plan.command
        try:
            with self._starting:
                self._child = subprocess.Popen(command)
        except OSError as error:
            raise InvalidInput(
                f"{command[0]} cannot be started: {error.strerror}", path=command[0]
            ) from error

    def wait_until_ready(self) -> None:
        """Wait until the engine serves. DeadlineExceeded; NotEligible: it has ended."""
        hook, within_s = self._plan.ready, self._plan.ready_s
        if hook is None:
            return
        limit = time.monotonic() + within_s
        try:
            ended = os.pidfd_open(self.child.pid)
        except ProcessLookupError:
            raise _engine_ended() from None
        try:
            self._ask_until(hook, limit, ended)
        finally:
            os.close(ended)

    def _ask_until(self, hook: Hook, limit: float, ended: int) -> None:
        while True:
            try:
                left = max(limit - time.monotonic(), _ASK_AGAIN_S)
                _carry_out(hook, min(self._plan.hook_s, _ANSWER_S, left), {})
            except NotEligible as last:
                if time.monotonic() > limit:
                    raise DeadlineExceeded(
                        f"the engine was not ready within {self._plan.ready_s:g} s: {last.message}",
                        next_step="see what the engine has printed; --ready-within gives it longer",
                        budget_s=self._plan.ready_s,
                    ) from last
            else:
                return
            if select.select([ended], [], [], _ASK_AGAIN_S)[0]:
                raise _engine_ended()

    def quiesce(self, state: Path) -> None:
        """Have the engine let go of its devices, and copy the files that it has to find again.

        NotEligible for what `put_back` could not put back.
        """
        self._is_quiet = False
        self._call("quiesce", self._plan.quiesce, {"SNAPBACK_STATE": str(state)})
        if self.child.poll() is not None:
            raise _engine_ended()
        try:
            pack(self._plan.state, state / FILES)
        except tarfile.TarError as error:
            raise NotEligible(
                f"the files of --state could not be put back: {error}",
                next_step="name folders with plain files, and links that stay in them",
            ) from error
        self._is_quiet = True

    def put_back(self, state: Path) -> None:
        """Put the files back where the engine looks for them. NotEligible says why it cannot."""
        try:
            unpack(state / FILES, self._plan.state)
        except (OSError, tarfile.TarError, ValueError, LookupError) as error:
            raise NotEligible(
                f"the files of --state cannot be put back: {error}",
                next_step="restore what was captured under snapback-run, with the same --state",
            ) from error

    def go_on(self, resumed: Resumed) -> None:
        """Have the engine serve again after a capture, or as the process that was restored."""
        if resumed.outcome == "restored":
            self.restored({})
            return
        try:
            self._call("resume", self._plan.resume, {})
        except NotEligible as error:
            if self._is_quiet:
                raise
            log.warning("the engine was not quiet, and refuses to go on: %s", error)
        self.wait_until_ready()

    def restored(self, environment: Mapping[str, str | None]) -> None:
        """Have the engine take up what belongs to it, and wait until it serves.

        A command finds in its environment who the engine is now.
        """
        identity = self.worker.identity
        here = identity.environment() if identity is not None else {}
        self._call("restore", self._plan.restore, {**here, **environment})
        self.wait_until_ready()

    def forward(self, number: int) -> None:
        """Pass a signal on; end this program if there is no engine yet, as in a standby."""
        with self._starting:
            child = self._child
        if child is None:
            # The main thread waits in a system call, and nothing of a standby has to be cleaned up.
            os._exit(128 + number)
        child.send_signal(number)
        if self.worker.failure is not None:
            threading.Thread(target=self._kill_later, daemon=True).start()

    def end(self) -> None:
        """End the engine, by SIGKILL if it does not end by SIGTERM."""
        self.child.terminate()
        self._kill_later()
        self.child.wait()

    def _kill_later(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(self.child.pid)
            if not select.select([ended], [], [], END_S)[0]:
                signal.pidfd_send_signal(ended, signal.SIGKILL)
            os.close(ended)

    def _call(self, name: str, hook: Hook | None, environment: Mapping[str, str | None]) -> None:
        if hook is not None:
            log.info("%s: %s", name, " ".join(hook.words if isinstance(hook, Command) else hook))
            _carry_out(hook, self._plan.hook_s, environment)


def _carry_out(hook: Hook, within_s: float, environment: Mapping[str, str | None]) -> None:
    """Carry a hook out. NotEligible says what it has answered.

    A command has the variables of `environment` besides its own, without those that are None.
    """
    match hook:
        case Request(method, url):
            # What is in the environment for other programs is no way to the engine.
            opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
            data = None if method == "GET" else b""
            request = urllib.request.Request(url, data=data, method=method)  # noqa: S310
            try:
                with opener.open(request, timeout=within_s):
                    return
            except urllib.error.HTTPError as error:
                said = ""
                with contextlib.suppress(OSError, http.client.HTTPException):
                    said = error.read(500).decode(errors="replace").strip()
                raise NotEligible(f"{method} {url} was answered {error.code}: {said}") from error
            except (OSError, http.client.HTTPException) as error:
                why = getattr(error, "reason", None) or error
                raise NotEligible(f"{method} {url} was not answered: {why}") from error
        case Command(words):
            try:
                given = {**os.environ, **environment}.items()
                process = subprocess.Popen(
                    words,
                    env={name: value for name, value in given if value is not None},
                    start_new_session=True,
                )
            except OSError as error:
                raise NotEligible(f"{shlex.join(words)}: {error}") from error
            try:
                status = process.wait(within_s)
            except subprocess.TimeoutExpired as error:
                # With what it has started, which would be captured as well.
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
                raise NotEligible(f"{shlex.join(words)}: {error}") from error
            if status:
                raise NotEligible(f"{shlex.join(words)} ended with {status}")


def main(words: Sequence[str] | None = None) -> int:
    """Run an engine; return the status to end with: that of the engine."""
    logging.basicConfig(level=logging.INFO, format="snapback-run: %(message)s", stream=sys.stderr)
    try:
        engine = Engine(plan_of(sys.argv[1:] if words is None else words, os.environ))
    except InvalidInput as error:
        return _ended_by(error, _REFUSED)
    _forward_signals(engine)
    try:
        return _run(engine)
    except InvalidInput as error:
        return _ended_by(error, _CANNOT_START)


def _forward_signals(engine: Engine) -> None:
    """Pass signals on in a thread of their own.

    A handler of Python runs in the main thread, between two instructions. A signal that comes just
    before the main thread begins to wait for a file or for the end of the engine, or that another
    thread takes, would be passed on only when that wait is over. The kernel calls the handler of
    the interpreter at once, in whatever thread, and that writes the number of the signal to a pipe.
    """
    reader, writer = os.pipe2(os.O_CLOEXEC)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in _FORWARDED:
        signal.signal(number, lambda *_: None)

    def follow() -> None:
        while True:
            for number in os.read(reader, 64):
                engine.forward(number)

    threading.Thread(target=follow, name="signals", daemon=True).start()


def _engine_ended() -> NotEligible:
    return NotEligible("the engine has ended", next_step="see what it has printed")


def _ended_by(error: SnapbackError, status: int) -> int:
    sys.stderr.write(f"snapback-run: {error.to_failure()}\n")
    return status


def _run(engine: Engine) -> int:
    worker = engine.worker
    try:
        worker.start()
        if worker.state is not None:
            engine.put_back(worker.state)
    except NotEligible as error:
        return _ended_by(error, _FAILED)
    engine.start()
    try:
        engine.wait_until_ready()
        if worker.state is not None:
            engine.restored({"SNAPBACK_STATE": str(worker.state)})
        worker.ready()
    except SnapbackError as error:
        _ended_by(error, _FAILED)
        if engine.child.poll() is None:
            engine.end()
            return _FAILED
        return _exit_status(engine.child.wait()) or _FAILED
    except BaseException:
        engine.end()
        raise
    status = _exit_status(engine.child.wait())
    worker.close()
    return status or (_FAILED if worker.failure else 0)


def _exit_status(status: int) -> int:
    """Return the status of a child as that of this process."""
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    sys.exit(main())
