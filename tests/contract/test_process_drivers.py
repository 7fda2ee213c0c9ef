"""What every process driver promises, on real processes and real files."""

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.control_dir import ControlDirectories
from snapshot_agent.adapters.cooperative import Cooperative
from snapshot_agent.adapters.guards import Guards
from snapshot_agent.adapters.processes import LocalProcesses
from snapshot_agent.adapters.respawn import Respawn
from snapshot_agent.domain import control
from snapshot_agent.domain.control import ContainerPaths
from snapshot_agent.domain.driving import Phase
from snapshot_agent.domain.spec import STANDBY, ProcessSpec
from snapshot_agent.ports import Dump, Process, ProcessDriver, Progress, RestoreSource, Worker
from snapshot_shared import steps
from snapshot_shared.artifact import FileEntry
from snapshot_shared.errors import ArtifactCorrupt, DeadlineExceeded, InvalidName, SourceExited
from snapshot_shared.orders import PodRef
from tests.support.agent_rig import WORKER, Home, end_everything_below, ignored, state_of
from tests.support.waiting import until

STATE_BYTES = 20 * 1024 * 1024
POD = PodRef(namespace="default", name="llm", uid="00000000-0000-4000-8000-000000000001")
BUDGET_S = 20.0


class Node:
    """What drivers need of a node, and how a guard lets their workers go."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launcher = LocalProcesses()
        self.control = ControlDirectories()
        self.guards = Guards(folder / "guards", "test")

    async def start(self, name: str, argv: Sequence[str], **env: str) -> "Source":
        places = ContainerPaths(self.folder / name, self.folder / name / "sockets")
        self.control.create(places)
        own = {**os.environ, "SNAPSHOT_CONTROL_DIR": str(places.control), **env}
        process = await self.launcher.spawn(ProcessSpec(list(argv), own, self.folder, places))
        return Source(Worker(POD, process, places))

    async def worker(self, name: str, *arguments: str, **env: str) -> "Source":
        argv = [sys.executable, str(WORKER), "--state-bytes", str(STATE_BYTES), *arguments]
        return await self.start(name, argv, **env)

    async def let_go(self, driver: ProcessDriver, worker: Worker, phase: Phase) -> None:
        await self.guards.release(worker.process, driver.release(worker, phase))

    async def close(self) -> None:
        end_everything_below(self.folder)
        self.launcher.close()
        await self.control.close()


class Source(Home):
    """A worker with its files."""

    def __init__(self, worker: Worker) -> None:
        super().__init__(worker.paths.home)
        self.worker = worker
        self.state = self.control / control.STATE

    @property
    def pid(self) -> int:
        return self.worker.process.pid

    def say(self, name: str) -> None:
        (self.control / f".{name}").write_bytes(control.body(1))
        (self.control / f".{name}").rename(self.control / name)

    async def quiet(self) -> None:
        self.say(control.QUIESCE)
        await until((self.control / control.QUIESCED).exists, "the worker's quiet")

    def saved(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in self.state.iterdir()}


DRIVERS: dict[str, Callable[[Node], ProcessDriver]] = {
    "cooperative": lambda _: Cooperative(),
    "respawn": lambda node: Respawn(node.launcher, node.control, time.monotonic),
}


@pytest.fixture
async def node(tmp_path: Path) -> AsyncIterator[Node]:
    made = Node(tmp_path)
    try:
        yield made
    finally:
        await made.close()


@pytest.fixture(params=DRIVERS)
def driver(request: pytest.FixtureRequest, node: Node) -> ProcessDriver:
    return DRIVERS[request.param](node)


@pytest.fixture
async def source(node: Node) -> Source:
    made = await node.worker("source", "--answer", "42")
    await made.quiet()
    return made


@pytest.fixture
def part(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "part").mkdir()
    fd = os.open(tmp_path / "part", os.O_RDONLY)
    yield fd
    os.close(fd)


def a_dump(source: Source, part: int, progress: Progress = ignored) -> Dump:
    return Dump(source.worker, 1, time.monotonic() + BUDGET_S, progress, part)


async def dumped(
    driver: ProcessDriver, source: Source, part: int, progress: Progress = ignored
) -> Sequence[FileEntry]:
    """Run all stages; the source has the process that it has afterwards."""
    dump = a_dump(source, part, progress)
    for stage in driver.stages:
        await stage.run(dump)
    source.worker = dump.worker
    return dump.files


def restoring(part: int, files: Sequence[FileEntry]) -> RestoreSource:
    return RestoreSource(part, (), files, {}, time.monotonic() + BUDGET_S, ignored)


def test_the_steps_of_a_driver_are_those_that_all_services_know(driver: ProcessDriver) -> None:
    dump = steps.table("dump", driver.name)
    assert [*(stage.name for stage in driver.stages), "stage"] == list(dump)
    restore = steps.table("restore", driver.name)
    assert ["check", driver.restore_step, "signal", "await-restored"] == list(restore)


async def test_a_stopped_worker_stands_still_and_goes_on_when_it_is_let_go(
    driver: ProcessDriver, node: Node, source: Source, part: int
) -> None:
    await driver.stages[0].run(a_dump(source, part))
    before = source.beats()
    await asyncio.sleep(0.05)
    assert state_of(source.pid) == "T"
    assert source.beats() == before
    for phase in (driver.stages[0].phases.after, Phase.SIGNAL):
        await node.let_go(driver, source.worker, phase)
        await source.goes_on()


A_FAMILY = (
    "import subprocess, sys, time\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
    " process_group=0)\n"
    "open('child', 'w').write(str(child.pid))\n"
    "time.sleep(600)\n"
)


async def test_every_process_of_the_session_is_stopped_and_let_go(
    driver: ProcessDriver, node: Node, part: int
) -> None:
    family = await node.start("family", [sys.executable, "-c", A_FAMILY])
    await until((node.folder / "child").exists, "the child")
    await until((node.folder / "child").read_text, "the child's pid")
    child = int((node.folder / "child").read_text())
    await driver.stages[0].run(a_dump(family, part))
    assert (state_of(family.pid), state_of(child)) == ("T", "T")
    await node.let_go(driver, family.worker, Phase.SIGNAL)
    await until(lambda: "T" not in (state_of(family.pid), state_of(child)), "the release")


async def test_a_process_that_waits_for_its_vforked_child_is_stopped_with_it(node: Node) -> None:
    # A parent cannot stop before its vforked child calls exec or ends, and a stopped child does
    # neither. libc's own vfork cannot return into Python: clone does the same with a function.
    program = """
import ctypes, os, signal
libc = ctypes.CDLL(None)
stack = ctypes.create_string_buffer(65536)
top = ctypes.c_void_p((ctypes.addressof(stack) + 65536) & ~15)
CLONE_VM, CLONE_VFORK = 0x100, 0x4000
open(os.environ["SNAPSHOT_CONTROL_DIR"] + "/forking", "w").close()
libc.clone(libc.sleep, top, CLONE_VM | CLONE_VFORK | signal.SIGCHLD, 1)
signal.pause()
"""
    source = await node.start("source", [sys.executable, "-c", program])
    await until((source.control / "forking").exists, "the program")
    await until(lambda: procfs.family_of(*source.worker.process)[1:], "its child")
    driver = Cooperative()
    await driver.freeze(a_dump(source, part=-1))
    assert all(map(procfs.has_stopped, procfs.family_of(*source.worker.process)))
    await driver.thaw(a_dump(source, part=-1))


async def test_a_worker_that_has_ended_cannot_be_dumped(
    driver: ProcessDriver, node: Node, source: Source, part: int
) -> None:
    await node.launcher.terminate(source.worker.process, source.worker.paths, 0.0)
    with pytest.raises(SourceExited):
        await driver.stages[0].run(a_dump(source, part))


async def test_a_dumped_worker_is_quiet_as_before_and_goes_on_when_its_capture_is_complete(
    driver: ProcessDriver, node: Node, source: Source, part: int
) -> None:
    before = source.worker.process
    await dumped(driver, source, part)
    assert (source.worker.process != before) == any(stage.replaces for stage in driver.stages)
    await source.goes_on()
    assert control.is_of((source.control / control.QUIESCED).read_bytes(), 1)
    source.say(control.COMPLETE)
    await until(lambda: source.events()[-1] == "snapshot-complete 1", "the worker's answer")
    assert node.launcher.adopt(source.worker.process)


async def test_a_restored_process_has_what_was_dumped_and_its_end_is_followed(
    driver: ProcessDriver, node: Node, source: Source, part: int
) -> None:
    original, seen = source.saved(), []

    async def note(done: int) -> None:
        seen.append(done)

    expected = await driver.inspect(source.worker, quiet=True)
    files = await dumped(driver, source, part, note)
    assert sum(entry.size for entry in files) == seen[-1] == expected
    assert seen == sorted(seen)

    target = await node.worker("target", **{STANDBY: "1"})
    await until(lambda: target.events()[-1:] == ["standby"], "the placeholder")
    (target.state / "left-over").write_text("of before")
    process = await driver.restore(target.worker, restoring(part, files))
    assert (process != target.worker.process) == driver.replaces
    assert target.saved() == original
    assert {path.stat().st_mode & 0o777 for path in target.state.iterdir()} == {0o600}
    target.say(control.RESTORE_COMPLETE)
    restored = f"restored 42 {STATE_BYTES}"
    await until(lambda: target.events()[-1] == restored, "the worker's answer")
    await only(process, node)
    os.kill(process.pid, signal.SIGTERM)
    assert await node.launcher.ended(process) == 128 + signal.SIGTERM


async def only(process: Process, node: Node) -> None:
    """Of the container "target" no other process runs."""
    places = ContainerPaths(node.folder / "target", node.folder / "target" / "sockets")
    await until(
        lambda: [member.pid for member in procfs.carrying(places.marker)] == [process.pid],
        "the end of every other process",
    )


async def test_a_byte_that_changed_is_found_before_it_reaches_a_worker(
    driver: ProcessDriver, node: Node, source: Source, part: int
) -> None:
    files = await dumped(driver, source, part)
    with (node.folder / "part" / "weights.bin").open("r+b") as file:
        file.seek(STATE_BYTES - 1)
        file.write(b"!")
    target = await node.worker("target", **{STANDBY: "1"})
    with pytest.raises(ArtifactCorrupt) as caught:
        await driver.restore(target.worker, restoring(part, files))
    assert (caught.value.values["file"], caught.value.values["chunk"]) == ("weights.bin", 2)
    assert node.launcher.adopt(target.worker.process)


ODD: dict[str, Callable[[Path], object]] = {
    "with space": Path.touch,
    "sub": Path.mkdir,
    "link": lambda path: path.symlink_to("/etc/hostname"),
    "fifo": os.mkfifo,
    "part.json": Path.touch,
}


@pytest.mark.parametrize("name", ODD)
async def test_state_that_a_part_cannot_hold_is_refused_by_name_while_all_can_be_undone(
    driver: ProcessDriver, node: Node, source: Source, part: int, name: str
) -> None:
    ODD[name](source.state / name)
    with pytest.raises(InvalidName, match=name):
        await driver.inspect(source.worker, quiet=True)
    with pytest.raises(InvalidName, match=name):
        await dumped(driver, source, part)
    await node.let_go(driver, source.worker, Phase.SIGNAL)
    await source.goes_on()


async def test_a_cancelled_dump_has_stopped_writing_when_it_is_over(
    driver: ProcessDriver, node: Node, source: Source, part: int
) -> None:
    begun = asyncio.Event()

    async def note(_done: int) -> None:
        begun.set()

    dump = asyncio.create_task(dumped(driver, source, part, note))
    await begun.wait()
    dump.cancel()
    with pytest.raises(asyncio.CancelledError):
        await dump
    shutil.rmtree(node.folder / "part")
    await asyncio.sleep(0.05)
    assert not (node.folder / "part").exists()


async def test_a_program_that_does_not_come_back_fails_the_dump_at_its_deadline(
    node: Node, part: int
) -> None:
    source = await node.start("source", ["sh", "-c", "sleep 600", "sh"])
    dump = a_dump(source, part)
    *before, last = DRIVERS["respawn"](node).stages
    for stage in before:
        await stage.run(dump)
    with pytest.raises(DeadlineExceeded, match="did not become quiet"):
        await last.run(replace(dump, deadline=time.monotonic() + 0.3))
