"""The example worker and the template, with a real GPU memory service and the test as agent."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gms.adapters.simulated import simulated_uuid
from snapshotctl.adapters import inotify, worker_socket
from snapshotctl.adapters.worker_socket import WorkerClient
from tests.integration.snapshotctl.conftest import EXAMPLES

ASKED = ("What is my name?", "When does the harbour open?", "My name is")
NODE = "node-1"
PATIENCE_S = 60.0
POD_UID = "12345678-0000-0000-0000-000000000000"


class Place:
    """The folders of one node, and the environment of what runs on it."""

    def __init__(self, folder: Path, sockets: Path) -> None:
        self.folder = folder
        self.sockets = sockets
        self.control = folder / "control"
        self.pod_sockets = sockets / POD_UID[:8]
        (self.control / "state").mkdir(parents=True)
        self.pod_sockets.mkdir()

    def gms(self) -> dict[str, str]:
        return {
            **os.environ,
            "SNAPBACK_NODE": NODE,
            "SNAPBACK_NATS_URL": "nats://127.0.0.1:1",
            "SNAPBACK_STATE_DIR": str(self.folder / "gms"),
            "SNAPBACK_ARTIFACT_ROOT": str(self.folder / "artifacts"),
            "SNAPBACK_SOCKET_DIR": str(self.sockets),
            "SNAPBACK_DEVICE_BYTES": str(64 * 1024 * 1024),
        }

    def worker(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "SNAPSHOT_CONTROL_DIR": str(self.control),
            "GMS_SOCKET_DIR": str(self.sockets),
            "NVIDIA_VISIBLE_DEVICES": ",".join(simulated_uuid(NODE, index) for index in (0, 1)),
            "POD_SOCKET_DIR": str(self.pod_sockets),
            "SIZE_MIB": "16",
            "WARMUP_REQUESTS": "1",
            **more,
        }

    def say(self, name: str, attempt: int) -> None:
        temporary = self.control / f".{name}.tmp"
        temporary.write_text(json.dumps({"attempt": attempt}))
        temporary.rename(self.control / name)

    def forget(self, *names: str) -> None:
        for name in names:
            (self.control / name).unlink(missing_ok=True)

    async def said(self, name: str) -> Any:
        async with asyncio.timeout(PATIENCE_S):
            await inotify.appears(self.control / name)
        return json.loads((self.control / name).read_text())

    async def withdrawn(self, name: str) -> None:
        async with asyncio.timeout(PATIENCE_S):
            while (self.control / name).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.05)

    async def connect(self) -> WorkerClient:
        async with asyncio.timeout(PATIENCE_S):
            return await worker_socket.connect(self.sockets, POD_UID)


@contextlib.asynccontextmanager
async def process(
    program: list[str], environment: dict[str, str]
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, *program, env=environment)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)


async def _watching(pid: int) -> None:
    """Wait until a process has an inotify watch."""
    async with asyncio.timeout(PATIENCE_S):
        while not _has_watch(pid):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def _has_watch(pid: int) -> bool:
    # A file may be closed meanwhile.
    with contextlib.suppress(FileNotFoundError):
        return any("inotify wd" in fd.read_text() for fd in Path(f"/proc/{pid}/fdinfo").iterdir())
    return False


@contextlib.asynccontextmanager
async def make_place(tmp_path: Path) -> AsyncIterator[Place]:
    """A node with a GPU memory service."""
    with tempfile.TemporaryDirectory(prefix="sb", dir="/tmp") as sockets:
        found = Place(tmp_path, Path(sockets))
        async with process(["-m", "gms.main"], found.gms()):
            async with asyncio.timeout(PATIENCE_S):
                await inotify.appears(Path(sockets) / "gms.sock")
            yield found


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    async with make_place(tmp_path) as found:
        yield found


def _example(name: str) -> list[str]:
    return [str(EXAMPLES / name)]


async def _talk(place: Place) -> list[bytes]:
    client = await place.connect()
    try:
        return [await client.ask(question) for question in ASKED]
    finally:
        await client.close()


async def test_a_chat_moves_what_an_ask_only_reads(place: Place) -> None:
    async with process(_example("worker.py"), place.worker()):
        client = await place.connect()
        fresh = await client.ask("hello?")
        assert await client.ask("hello?") == fresh
        said = json.loads(await client.chat("I am Ada"))
        moved = await client.ask("hello?")
        assert moved != fresh
        assert (said["turns"], json.loads(moved)["turns"]) == (1, 1)
        assert (await place.said("ready-for-snapshot"))["attempt"] == 0
        await client.close()


async def test_a_text_is_written_on_from_sentences_and_from_what_was_learned(place: Place) -> None:
    async with process(_example("text_worker.py"), place.worker(PASSES="1")):
        client = await place.connect()
        known = json.loads(await client.ask("The clone answers"))
        assert known["answer"] == "as its source did, word for word."
        unknown = json.loads(await client.ask("My name is"))
        await client.chat("My name is Ada.")
        learned = json.loads(await client.ask("My name is"))
        assert (learned["answer"], unknown["answer"] != "Ada.") == ("Ada.", True)
        assert "answer" in json.loads(await client.ask("zygote"))
        await client.close()


async def test_a_text_model_is_the_same_on_each_node_that_trains_it(
    place: Place, tmp_path: Path
) -> None:
    async with make_place(tmp_path / "another") as other:
        answers = []
        for each in (place, other):
            async with process(_example("text_worker.py"), each.worker(PASSES="2")):
                answers.append(await _talk(each))
    assert answers[0] == answers[1]


SENSELESS = (
    b"{}",
    b"no json",
    b'{"op": "ask"}',
    b'{"op": "other", "prompt": "x"}',
    b"[1]",
    b"[" * 9000,
)


async def test_a_question_that_makes_no_sense_is_answered_and_does_no_harm(place: Place) -> None:
    async with process(_example("worker.py"), place.worker()):
        client = await place.connect()
        for line in SENSELESS:
            reader, writer = await asyncio.open_unix_connection(place.pod_sockets / "worker.sock")
            writer.write(line + b"\n")
            assert "error" in json.loads(await reader.readline()), line
            writer.write(b"x" * 100_000)
            with contextlib.suppress(ConnectionError):
                assert await reader.read() == b""
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            assert "answer" in json.loads(await client.ask("still there?")), line
        await client.close()


@pytest.mark.parametrize("end", ["snapshot-complete", "snapshot-aborted"])
async def test_a_worker_sleeps_through_a_capture_and_goes_on_as_it_was(
    place: Place, end: str
) -> None:
    async with process(_example("worker.py"), place.worker()):
        client = await place.connect()
        await client.chat("I am Ada")
        before = await _talk(place)
        for attempt in (1, 2):
            await place.said("ready-for-snapshot")
            place.forget("quiesced", "snapshot-complete", "snapshot-aborted")
            place.say("quiesce", attempt)
            assert (await place.said("quiesced"))["attempt"] == attempt
            assert not (place.control / "ready-for-snapshot").exists()
            asking = asyncio.create_task(client.ask(ASKED[0]))
            saved = json.loads((place.control / "state" / "worker.json").read_text())
            assert saved["turns"] == 1
            assert not asking.done()
            place.say(end, attempt)
            assert await asyncio.wait_for(asking, PATIENCE_S) == before[0]
        assert await _talk(place) == before
        await client.close()


@pytest.mark.parametrize("program", ["worker.py", "text_worker.py"])
async def test_a_restored_worker_answers_byte_for_byte_as_its_source(
    place: Place, program: str
) -> None:
    async with process(_example(program), place.worker(PASSES="1")):
        client = await place.connect()
        await client.chat("My name is Ada.")
        await place.said("ready-for-snapshot")
        before = [await client.ask(question) for question in ASKED]
        await client.close()
        place.say("quiesce", 1)
        await place.said("quiesced")
    place.forget("quiesce", "quiesced", "ready-for-snapshot")
    (place.pod_sockets / "worker.sock").unlink()
    async with process(_example(program), place.worker(SNAPSHOT_RESTORE_STANDBY="1")):
        place.say("restore-complete", 7)
        assert (await place.said("restored"))["attempt"] == 7
        assert await _talk(place) == before
        await place.said("ready-for-snapshot")


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_standby_starts_cold_when_its_restore_fails_or_has_failed(
    place: Place, is_late: bool
) -> None:
    environment = place.worker(SNAPSHOT_RESTORE_STANDBY="1", WARMUP_SECONDS="0.1")
    # What one before it has said is taken back.
    place.say("restored", 1)
    if not is_late:
        place.say("restore-failed", 2)
    async with process(_example("worker.py"), environment):
        await place.withdrawn("restored")
        place.say("restore-failed", 2)
        await place.said("ready-for-snapshot")
        assert (await place.said("restored"))["attempt"] == 2
        assert len(await _talk(place)) == len(ASKED)


@pytest.mark.parametrize("is_late", [False, True])
async def test_the_template_starts_cold_when_its_restore_fails_or_has_failed(
    place: Place, is_late: bool
) -> None:
    if not is_late:
        place.say("restore-failed", 2)
    environment = place.worker(SNAPSHOT_RESTORE_STANDBY="1")
    async with process(_example("worker_template.py"), environment) as worker:
        if is_late:
            await _watching(worker.pid)
            place.say("restore-failed", 2)
        assert (await place.said("restored"))["attempt"] == 2
        await place.said("ready-for-snapshot")


async def test_the_template_is_captured_twice_and_restored(place: Place) -> None:
    async with process(_example("worker_template.py"), place.worker()):
        for attempt in (1, 2):
            await place.said("ready-for-snapshot")
            place.forget("quiesced", "snapshot-complete")
            place.say("quiesce", attempt)
            assert (await place.said("quiesced"))["attempt"] == attempt
            place.say("snapshot-complete", attempt)
    place.forget("quiesce", "quiesced", "snapshot-complete", "ready-for-snapshot")
    place.say("restore-complete", 3)
    standby = place.worker(SNAPSHOT_RESTORE_STANDBY="1")
    async with process(_example("worker_template.py"), standby):
        assert (await place.said("restored"))["attempt"] == 3
        await place.said("ready-for-snapshot")


def test_the_template_is_short() -> None:
    import ast

    source = (EXAMPLES / "worker_template.py").read_text()
    tree = ast.parse(source)
    spared: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            spared.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    code = [line for n, line in lines if line.strip() and n not in spared and line[0] != "#"]
    assert len(code) <= 14
