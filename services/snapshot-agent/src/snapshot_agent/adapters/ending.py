"""Ends all processes of a container: SIGTERM, and SIGKILL after a grace period.

`python -m snapshot_agent.adapters.ending <marker> <grace_s>`; `marker` is an entry of their
environment. It is the release program of a worker that is half replaced, so guards start it as well
as agents.
"""

from __future__ import annotations

import select
import signal
import sys
import time

from snapshot_agent.adapters import procfs

KILLED_WITHIN_S = 5.0
"""How long the kernel may take to end a process after SIGKILL, in seconds."""


def end(marker: str, grace_s: float) -> bool:
    """End the processes with the marker; whether none is left."""
    found = procfs.carrying(marker)
    for member in found:
        procfs.send(member, signal.SIGCONT)
        procfs.send(member, signal.SIGTERM)
    _await_end(found, time.monotonic() + grace_s)
    limit = time.monotonic() + KILLED_WITHIN_S
    # A dying process may have forked just before, so list again until none is left.
    while (rest := procfs.carrying(marker)) and time.monotonic() < limit:
        for member in rest:
            procfs.send(member, signal.SIGKILL)
        _await_end(rest, limit)
    return not rest


def _await_end(members: list[procfs.Stat], deadline: float) -> None:
    for member in members:
        with procfs.opened(member.pid, member.start) as pidfd:
            if pidfd is not None:
                left = max(0.0, deadline - time.monotonic())
                poll = select.poll()
                poll.register(pidfd, select.POLLIN)
                poll.poll(left * 1000)


def main(arguments: list[str]) -> int:
    """End the container that the arguments name."""
    marker, grace_s = arguments
    return 0 if end(marker, float(grace_s)) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
