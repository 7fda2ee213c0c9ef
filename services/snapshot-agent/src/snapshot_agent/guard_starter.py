"""Starts the guards of a node's agent: `python -m snapshot_agent.guard_starter`.

A container ends with all its processes, so in a cluster guards are in a container beside that of
their agent. An agent connects to the socket `SNAPBACK_GUARD_STARTER` and sends the arguments of one
guard, and the descriptor of its link; the answer is the pid. A starter that has to stop waits for
the end of the guards that it has started.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import sys
from pathlib import Path

from snapshot_agent.adapters import guard
from snapshot_agent.adapters.guards import spawn
from snapshot_shared.service import run
from snapshot_shared.settings import Common, load
from snapshot_shared.telemetry import log_to_stderr

log = logging.getLogger(__name__)

SERVICE = "snap-guard"


class StarterSettings(Common, frozen=True, kw_only=True):
    """The settings of a starter; `state_dir` is that of the agent, which has the guards' folder."""

    node: str
    guard_starter: Path


class Starter:
    """The socket, and the guards that run."""

    def __init__(self, settings: StarterSettings) -> None:
        """Listen, for our own user and root alone."""
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._guards: set[int] = set()
        self._ended = asyncio.Event()
        settings.guard_starter.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Under its name it listens already, so that no agent is refused in between.
        temporary = settings.guard_starter.with_suffix(".new")
        temporary.unlink(missing_ok=True)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(temporary))
        self._listener.listen(16)
        temporary.rename(settings.guard_starter)
        self._loop.add_reader(self._listener, self._accept)
        self._loop.add_signal_handler(signal.SIGCHLD, self._reap)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            caller = guard.let_in(self._listener)
            if caller is not None:
                self._loop.add_reader(caller, self._answer, caller)

    def _answer(self, caller: socket.socket) -> None:
        self._loop.remove_reader(caller)
        with caller, contextlib.suppress(OSError):
            words, links, _, _ = socket.recv_fds(caller, guard.MESSAGE_BYTES, 1)
            try:
                if words and links:
                    folder = self._settings.state_dir / "guards"
                    pid = spawn(folder, self._settings.run, guard.split(words), links[0])
                    self._guards.add(pid)
                    caller.send(str(pid).encode())
            except OSError:
                log.exception("a guard could not be started")
            finally:
                for link in links:
                    os.close(link)

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while (found := os.waitpid(-1, os.WNOHANG))[0]:
                self._guards.discard(found[0])
        self._ended.set()

    async def close(self) -> None:
        """Start no more guards, and wait for the end of those that run."""
        self._loop.remove_reader(self._listener)
        self._listener.close()
        self._settings.guard_starter.unlink(missing_ok=True)
        while self._guards:
            self._ended.clear()
            await self._ended.wait()


async def serve(stop: asyncio.Event) -> None:
    """Run until `stop` is set and the last guard has ended."""
    settings = load(StarterSettings)
    log_to_stderr(SERVICE, settings.node, settings.log_level)
    starter = Starter(settings)
    log.info("guards are started at %s", settings.guard_starter)
    await stop.wait()
    await starter.close()


if __name__ == "__main__":
    sys.exit(run(serve))
