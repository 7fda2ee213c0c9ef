"""What every process driver promises, on real processes and real files."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest
import pytest_asyncio

from snapshot_agent.adapters import procfs
from snapshot_agent.adapters.cooperative import Cooperative
from snapshot_agent.domain import control
from snapshot_agent.domain.spec import Places
from snapshot_agent.ports import Process, ProcessDriver, Worker
from snapshot_shared.errors import ArtifactCorrupt, InvalidName, SourceExited
from snapshot_shared.orders import PodRef
from tests.support.agent_rig import WORKER, is_gone, state_of, until

STATE_BYTES = 20 * 1024 * 1024
POD = PodRef(namespace="default", name="llm", uid="00000000-0000-4000-8000-000000000001")

DRIVERS: list[Callable[[], ProcessDriver]] = [Cooperative]


class Source:
    """A worker that is quiet: its state is saved, and it waits."""

    def __init__(self, home: Path, arguments: list[str]) -> None:
        self.places = Places(home, home / "sockets")
        self.state = self.places.control / control.STATE
        self.state.mkdir(parents=True)
        self.child = subprocess.Popen(
            [sys.executable, str(WORKER), "--state-bytes", str(STATE_BYTES), *arguments],
            env={**os.environ, "SNAPSHOT_CONTROL_DIR": str(self.places.control)},
            start_new_session=True,
        )
        found = procfs.read(self.child.pid)
        assert found is not None
        self.worker = Worker(POD, Process(found.pid, found.start), self.places)

    async def quiet(self) -> None:
        self.places.control.joinpath(".quiesce").write_bytes(control.body(1))
        self.places.control.joinpath(".quiesce").rename(self.places.control / control.QUIESCE)
        await until((self.places.control / control.QUIESCED).exists, "the worker's quiet")

    def end(self) -> None:
        for member in procfs.session_of(*self.worker.process):
            procfs.send(member, signal.SIGKILL)
        self.child.wait()


@pytest.fixture(params=DRIVERS, ids=lambda made: made.name)
def driver(request: pytest.FixtureRequest) -> ProcessDriver:
    made: ProcessDriver = request.param()
    return made


@pytest_asyncio.fixture
async def source(tmp_path: Path) -> AsyncIterator[Source]:
    made = Source(tmp_path / "source", [])
    try:
        await made.quiet()
        yield made
    finally:
        made.end()


@pytest.fixture
def part(tmp_path: Path) -> Path:
    folder = tmp_path / "part"
    folder.mkdir()
    return folder


async def told(_done: int) -> None:
    """Take progress and do nothing with it."""


async def dumped(driver: ProcessDriver, source: Source, part: Path) -> list[object]:
    fd = os.open(part, os.O_RDONLY)
    try:
        await driver.freeze(source.worker)
        try:
            return list(await driver.dump(source.worker, fd, told))
        finally:
            await driver.thaw(source.worker)
    finally:
        os.close(fd)


async def test_a_frozen_worker_stands_still_and_a_thawed_one_goes_on(
    driver: ProcessDriver, source: Source
) -> None:
    beats = source.places.home / "beats"
    await driver.freeze(source.worker)
    before = beats.read_text()
    await asyncio.sleep(0.05)
    assert state_of(source.child.pid) == "T"
    assert beats.read_text() == before
    await driver.thaw(source.worker)
    await until(lambda: beats.read_text() != before, "another beat")


def a_family() -> tuple["subprocess.Popen[bytes]", int]:
    """A process that leads a session, and its child in a process group of its own."""
    script = (
        "import os, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'],"
        " process_group=0)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", script], stdout=subprocess.PIPE, start_new_session=True
    )
    assert process.stdout is not None
    with process.stdout as output:
        return process, int(output.readline())


async def test_every_process_of_the_session_is_frozen_and_thawed(
    driver: ProcessDriver, tmp_path: Path
) -> None:
    process, child = a_family()
    found = procfs.read(process.pid)
    assert found is not None
    home = tmp_path / "session"
    worker = Worker(POD, Process(found.pid, found.start), Places(home, home))
    try:
        await driver.freeze(worker)
        assert (state_of(process.pid), state_of(child)) == ("T", "T")
        await driver.thaw(worker)
        await until(lambda: "T" not in (state_of(process.pid), state_of(child)), "the thaw")
    finally:
        for member in procfs.session_of(*worker.process):
            procfs.send(member, signal.SIGKILL)
        process.wait()


async def test_thawing_a_worker_that_is_not_frozen_changes_nothing(
    driver: ProcessDriver, source: Source
) -> None:
    await driver.thaw(source.worker)
    assert not is_gone(source.child.pid)


async def test_a_worker_that_has_ended_cannot_be_frozen(
    driver: ProcessDriver, source: Source
) -> None:
    source.end()
    with pytest.raises(SourceExited):
        await driver.freeze(source.worker)


async def test_what_was_dumped_is_given_back_byte_for_byte(
    driver: ProcessDriver, source: Source, part: Path, tmp_path: Path
) -> None:
    original = {path.name: path.read_bytes() for path in source.state.iterdir()}
    files = await dumped(driver, source, part)
    assert await driver.size(source.worker) == sum(entry.size for entry in files)  # type: ignore[attr-defined]

    target = Source(tmp_path / "target", ["--never-ready"])
    (target.state / "left-over").write_text("of before")
    fd = os.open(part, os.O_RDONLY)
    try:
        await driver.fill(target.worker, fd, files, told)  # type: ignore[arg-type]
    finally:
        os.close(fd)
        target.end()
    assert {path.name: path.read_bytes() for path in target.state.iterdir()} == original
    assert {path.stat().st_mode & 0o777 for path in target.state.iterdir()} == {0o600}


async def test_progress_rises_to_the_number_of_bytes_written(
    driver: ProcessDriver, source: Source, part: Path
) -> None:
    seen: list[int] = []

    async def tell(done: int) -> None:
        seen.append(done)

    fd = os.open(part, os.O_RDONLY)
    try:
        files = await driver.dump(source.worker, fd, tell)
    finally:
        os.close(fd)
    assert seen == sorted(seen)
    assert seen[-1] == sum(entry.size for entry in files)


async def test_a_byte_that_changed_is_found_before_it_reaches_the_worker(
    driver: ProcessDriver, source: Source, part: Path
) -> None:
    files = await dumped(driver, source, part)
    damaged = part / "weights.bin"
    with damaged.open("r+b") as file:
        file.seek(STATE_BYTES - 1)
        file.write(b"!")
    fd = os.open(part, os.O_RDONLY)
    try:
        with pytest.raises(ArtifactCorrupt) as caught:
            await driver.fill(source.worker, fd, files, told)  # type: ignore[arg-type]
    finally:
        os.close(fd)
    assert (caught.value.values["file"], caught.value.values["chunk"]) == ("weights.bin", 2)


def odd_name(state: Path) -> None:
    (state / "with space").write_text("")


def folder(state: Path) -> None:
    (state / "sub").mkdir()


def link(state: Path) -> None:
    (state / "link").symlink_to("/etc/hostname")


def fifo(state: Path) -> None:
    os.mkfifo(state / "fifo")


def manifest(state: Path) -> None:
    (state / "part.json").write_text("{}")


@pytest.mark.parametrize("make", [odd_name, folder, link, fifo, manifest])
async def test_state_that_a_part_cannot_hold_is_refused_by_name(
    driver: ProcessDriver, source: Source, part: Path, make: Callable[[Path], None]
) -> None:
    make(source.state)
    with pytest.raises(InvalidName):
        await driver.size(source.worker)
    with pytest.raises(InvalidName):
        await dumped(driver, source, part)
    assert state_of(source.child.pid) != "T"


async def test_a_cancelled_dump_has_stopped_writing_when_it_is_over(
    driver: ProcessDriver, source: Source, part: Path
) -> None:
    begun = asyncio.Event()

    async def tell(_done: int) -> None:
        begun.set()

    fd = os.open(part, os.O_RDONLY)
    try:
        dump: Awaitable[object] = asyncio.ensure_future(driver.dump(source.worker, fd, tell))
        await begun.wait()
        dump.cancel()  # type: ignore[attr-defined]
        with pytest.raises(asyncio.CancelledError):
            await dump
        shutil.rmtree(part)
        await asyncio.sleep(0.05)
        assert not part.exists()
    finally:
        os.close(fd)
