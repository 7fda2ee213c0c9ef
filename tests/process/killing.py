"""Dumps and restores that wait in a step, and what can be killed meanwhile."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from msgspec.structs import replace

from snapshot_agent.adapters import procfs
from snapshot_shared.orders import DumpOrder, Order, Report
from tests.process.node import Container, Node, Pause, children_of, command_of
from tests.support.agent_rig import PATIENCE_S, fresh_uid, is_gone, zombies_of
from tests.support.turns import TURN
from tests.support.waiting import until, wait_until

REPEAT = int(os.environ.get("FAULTS_REPEAT", "1"))
"""How often each case runs."""

COMPENSATED_S = 10.0
"""Within how many seconds a failure has to be undone."""

MIB = 2**20

DUMP_STEPS = {
    "begun": "start",
    "frozen": "network-lock",
    "pages": "",
    "archiving": "",
    "archived": "post-dump",
    "thawing": "network-unlock",
    "over": "network-unlock",
}
"""The steps of a dump, and the action of CRIU at which it waits there.

`begun`: CRIU is not started yet. `pages`: it writes memory. `archiving`: files are archived.
`over`: it has ended, and the helper does not know it yet.
"""

RESTORE_STEPS = {
    "unpacking": "",
    "begun": "start",
    "restoring": "post-restore",
    "resumed": "post-resume",
    "over": "post-resume",
}


T = TypeVar("T")


def thinned(cases: Sequence[T]) -> list[T]:
    """Return the cases of this turn, each as often as it runs."""
    return TURN.of(cases) * REPEAT


class Halted:
    """A dump or a restore that waits in a step."""

    def __init__(self, node: Node, container: Container, order: Order) -> None:
        self.node = node
        self.container = container
        self.order = order
        self._pause: Pause | None = None
        self._stopped: list[procfs.Stat] = []

    def arm(self, action: str) -> None:
        if action:
            self._pause = Pause(self.node.programs, action)

    async def reached(self, *, over: bool) -> None:
        """Wait until CRIU waits; with `over` until it has ended, with its parent stopped."""
        assert self._pause is not None
        await self._pause.reached()
        if over:
            criu = self.criu
            self.stop(self.child)
            self._pause.end()
            self._pause = None
            await until(lambda: is_gone(criu.pid), "the end of CRIU")

    def stop(self, process: procfs.Stat) -> None:
        procfs.send(process, signal.SIGSTOP)
        self._stopped.append(process)

    def go_on(self, status: int = 0) -> None:
        """End all that waits; with another status the action of CRIU fails."""
        if self._pause is not None:
            self._pause.end(status)
        for process in self._stopped:
            procfs.send(process, signal.SIGCONT)

    @property
    def child(self) -> procfs.Stat:
        """The child of the helper that carries out the request.

        A child that says what the node has ends by itself.
        """
        [found] = wait_until(
            lambda: children if len(children := self.node.children()) == 1 else [],
            "the end of the other requests",
        )
        return found

    @property
    def criu(self) -> procfs.Stat:
        return self.node.criu()

    @property
    def archiver(self) -> procfs.Stat:
        """The process that packs or unpacks files."""
        [found] = [each for each in children_of(self.child.pid) if "helper" in _words(each)]
        return found

    @property
    def guard(self) -> procfs.Stat:
        wanted = f"control={self.container.control}"
        [found] = [each for each in procfs.running() if wanted in _words(each)]
        return found

    async def kill(self, target: str) -> None:
        """Kill a part, and start it again as its kubelet does.

        `helper` is its first process alone, `container` all of its container, as a runtime ends it.
        """
        node = self.node
        match target:
            case "agent":
                await node.kill_agent()
                self.go_on()
                await node.process()
            case "helper" | "container":
                members = [self.child, *children_of(self.child.pid)]
                node.helper.kill()
                for member in members if target == "container" else ():
                    procfs.send(member, signal.SIGKILL)
                await node.helper.wait()
                self.go_on()
                await node.start_helper()
            case _:
                procfs.send(getattr(self, target), signal.SIGKILL)
                self.go_on()

    async def answered(self) -> Report:
        return await self.node.answer(self.order)

    async def rests(self) -> None:
        """Wait until nothing is left of it on the node."""
        node = self.node

        def left() -> list[str]:
            zombies = zombies_of(node.agent_pid) | zombies_of(node.helper.pid)
            return node.left() + [f"zombie {pid}" for pid in zombies]

        await until(lambda: not left(), lambda: "\n".join(left()), within_s=5.0)


def _words(process: procfs.Stat) -> str:
    return command_of(process.pid).replace(b"\0", b" ").decode(errors="replace")


class HaltedDump(Halted):
    """A dump that waits. Its worker is prepared, and held until the operator ends that."""

    order: DumpOrder

    @property
    def part(self) -> Path:
        return self.node.part(self.order.content_uid)

    def written(self, pattern: str) -> int:
        return sum(path.stat().st_size for path in self.part.glob(pattern))

    @property
    def is_staged(self) -> bool:
        return (self.part / "part.json").exists()

    async def end(self, report: Report) -> None:
        """Do as the operator does after a report: release the worker, or abort the capture."""
        if report.kind == "staged":
            release = self.node.release_order(self.container, self.order.content_uid)  # type: ignore[arg-type]
            await self.node.done(release, "released")
        else:
            await self.abort()

    async def abort(self) -> None:
        """Abort the capture."""
        content = self.order.content_uid
        abort = self.node.abort_order(self.container, content, driver="criu")  # type: ignore[arg-type]
        await self.node.done(abort, "aborted")


async def prepared(node: Node, worker: Container, **fields: Any) -> DumpOrder:
    """Prepare a worker, and return the order to dump it."""
    report = await node.prepared(worker, content := fresh_uid())  # type: ignore[arg-type]
    return node.dump_order(worker, content, report.vector, **fields)  # type: ignore[arg-type]


async def loaded(node: Node, name: str, step: str) -> Container:
    """A worker with so much memory or so many files that what takes them is seen at work."""
    worker = await node.container(name, heap_mib=64 if step == "pages" else 8)
    if step in ("archiving", "unpacking"):
        for number in range(4096):
            (worker.data / f"small-{number}").write_bytes(b"small")
    return worker


async def dump_in(node: Node, step: str, **fields: Any) -> HaltedDump:
    """Return a dump that waits in a step."""
    worker = await loaded(node, "worker", step)
    found = HaltedDump(node, worker, await prepared(node, worker, **fields))
    found.arm(DUMP_STEPS[step])
    await node.send(found.order)
    if step == "pages":
        at_once(lambda: found.written("pages-*.img") > MIB)
        found.stop(found.criu)
    elif step == "archiving":
        at_once(lambda: found.written("files-*.tar") > MIB // 16)
        found.stop(found.archiver)
    else:
        await found.reached(over=step == "over")
    return found


async def restore_in(node: Node, step: str, **fields: Any) -> Halted:
    """Return a restore that waits in a step."""
    source = await loaded(node, "source", step)
    artifact = await node.captured(source, fresh_uid())  # type: ignore[arg-type]
    target, order = await node.waiting(artifact)
    found = Halted(node, target, replace(order, **fields))
    found.arm(RESTORE_STEPS[step])
    await node.send(found.order)
    if step == "unpacking":
        at_once(lambda: any(target.data.glob("small-*")))
        found.stop(found.archiver)
    else:
        await found.reached(over=step == "over")
    return found


async def crashed(node: Node, order: Order, verb: str, step: str) -> None:
    """Send an order, and wait for the end of the agent at a step of it."""
    await node.arm(verb, step)
    await node.send(order)
    await node.running_agent.wait()


def at_once(holds: Callable[[], bool]) -> None:
    """Wait with no pause between two looks: what is waited for is soon over."""
    limit = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < limit
