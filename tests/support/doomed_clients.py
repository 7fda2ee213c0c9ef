"""Clients of a GPU memory service that die by SIGKILL, each at a point of its life or at any time.

Run as a program, so that each client is a light fork of a process with one thread. Prints how many
died at each point as JSON; a client that ends in any other way ends the program with its error.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import signal
import socket
import sys
from collections import Counter
from collections.abc import Callable

from snapback_client import frames
from snapback_client.lease import Lease
from snapback_client.wire import prepare
from snapshot_shared.errors import GenerationMismatch

SIZE = 2 * 1024 * 1024
AT_ONCE = 8
ANY_TIME = "any-time"
POINTS = (
    *("connected", "attaching", "attached", "allocating", "allocated", "exporting", "exported"),
    *("mapped", "committing", "committed", "detaching", "reading", "read", "leaving"),
)

At = Callable[[str], None]


class Doomed:
    """One client: it reads on the first device and replaces the layout of the second, for ever."""

    def __init__(self, folder: str, devices: list[str], at: At) -> None:
        self._folder = folder
        self._devices = devices
        self._at = at
        self._mapped: list[mmap.mmap] = []

    def live(self) -> None:
        while True:
            self._read()
            try:
                self._write(self._committed())
            except GenerationMismatch:
                continue  # Another was faster.

    def _open(
        self, device: str, lock: frames.LockMode, if_match: frames.GenerationRef | None = None
    ) -> Lease:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        prepare(sock)
        sock.connect(os.path.join(self._folder, frames.LEASE_SOCKET))  # noqa: PTH118
        self._at("connected")
        lease = Lease(sock, frames.PROTOCOL_VERSIONS)
        request = frames.Attach(
            device=device,
            domain=frames.MemoryDomain.WEIGHTS,
            lock=lock,
            deadline_s=50.0,
            if_match=if_match,
        )
        reply = self._ask(lease, request, "attaching")
        assert isinstance(reply, frames.Attached), reply
        lease._attached = reply
        self._at("attached")
        return lease

    def _ask(self, lease: Lease, request: frames.Request, point: str) -> frames.Reply:
        """Ask, and be where the answer is under way before it is read."""
        lease._send(request)
        self._at(point)
        reply, descriptors = lease._receive(50.0)
        if isinstance(reply, frames.ErrorReply):
            raise frames.error_of(reply.to_failure())
        for descriptor in descriptors:
            self._mapped.append(mmap.mmap(descriptor, SIZE, prot=mmap.PROT_READ))
            os.close(descriptor)
        return reply

    def _read(self) -> None:
        lease = self._open(self._devices[0], frames.LockMode.RO)
        self._ask(lease, frames.ExportMany(ids=["a0"], access=frames.Access.RO), "reading")
        assert self._mapped[-1][:5] == b"intac"
        self._at("read")
        self._leave(lease, "leaving")

    def _committed(self) -> frames.GenerationRef:
        lease = self._open(self._devices[1], frames.LockMode.RO)
        found = lease.attached
        lease.detach()
        return frames.GenerationRef(incarnation=found.incarnation, generation=found.generation)

    def _write(self, replaced: frames.GenerationRef) -> None:
        lease = self._open(self._devices[1], frames.LockMode.RW, replaced)
        specs = [frames.AllocationSpec(id="a0", size=SIZE)]
        assert isinstance(
            self._ask(lease, frames.AllocateMany(allocations=specs), "allocating"), frames.Allocated
        )
        self._at("allocated")
        lease._send(frames.ExportMany(ids=["a0"], access=frames.Access.RW))
        self._at("exporting")
        _, [descriptor] = lease._receive(50.0)
        self._at("exported")
        memory = mmap.mmap(descriptor, SIZE)
        os.close(descriptor)
        memory[:4] = b"mine"
        self._at("mapped")
        self._mapped.append(memory)
        reply = self._ask(lease, frames.Commit(if_match=replaced), "committing")
        assert isinstance(reply, frames.Committed), reply
        self._at("committed")
        self._leave(lease, "detaching")

    def _leave(self, lease: Lease, point: str) -> None:
        while self._mapped:
            self._mapped.pop().close()
        assert isinstance(self._ask(lease, frames.Detach(), point), frames.Done)
        lease.close()


def main() -> None:
    """Let `count` clients die, a few at a time, the first ones at each point in turn."""
    folder, first, second, count, seed = sys.argv[1:]
    chance = random.Random(int(seed))
    # Every other client at no point in particular.
    dooms = [
        POINTS[number // 2 % len(POINTS)] if number % 2 else ANY_TIME
        for number in range(int(count))
    ]
    living: dict[int, str] = {}
    died: Counter[str] = Counter()
    for doom in dooms:
        if len(living) == AT_ONCE:
            _collect(living, died)
        after_s = chance.uniform(0.0005, 0.03)
        pid = os.fork()
        if pid == 0:
            _die(doom, after_s, folder, [first, second])
        living[pid] = doom
    while living:
        _collect(living, died)
    json.dump(died, sys.stdout)


def _collect(living: dict[int, str], died: Counter[str]) -> None:
    pid, status = os.wait()
    doom = living.pop(pid)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL, (doom, status)
    died[doom] += 1


def _die(doom: str, after_s: float, folder: str, devices: list[str]) -> None:
    def kill(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def at(point: str) -> None:
        if point == doom:
            kill()

    if doom == ANY_TIME:
        signal.signal(signal.SIGALRM, kill)
        signal.setitimer(signal.ITIMER_REAL, after_s)
    try:
        Doomed(folder, devices, at).live()
    finally:
        # Only an error comes here; its traceback is on standard error.
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        os._exit(1)


if __name__ == "__main__":
    main()
