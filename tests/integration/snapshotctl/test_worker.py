"""The example worker and the template, with a real GPU memory service and the test as agent."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import json
import shutil
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from snapshotctl.adapters.worker_socket import WorkerClient
from tests.integration.snapshotctl.conftest import EXAMPLES
from tests.integration.snapshotctl.place import PATIENCE_S, Node, Place, process
from tests.support.waiting import until

ASKED = ("What is my name?", "When does the harbour open?", "My name is")


def _has_watch(pid: int) -> bool:
    # A file may be closed meanwhile.
    with contextlib.suppress(FileNotFoundError):
        return any("inotify wd" in fd.read_text() for fd in Path(f"/proc/{pid}/fdinfo").iterdir())
    return False


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, with few sentences to train a text model on."""
    folder = tmp_path_factory.mktemp("examples")
    shutil.copytree(EXAMPLES, folder, dirs_exist_ok=True)
    sentences = folder / "text" / "sentences.txt"
    lines = sentences.read_text().splitlines(keepends=True)
    few = [line for line in lines if "clone" in line or "harbour" in line]
    assert 0 < len(few) < 10
    sentences.write_text("".join(few))
    return folder


async def _talk(place: Place) -> list[bytes]:
    client = await place.connect()
    try:
        return [await client.ask(question) for question in ASKED]
    finally:
        await client.close()


async def test_a_text_model_is_the_same_wherever_it_is_trained(
    node: Node, programs: Path, tmp_path: Path
) -> None:
    answers = []
    for name in ("one", "another"):
        place = node.place(tmp_path / name)
        async with process([str(programs / "text_worker.py")], place.worker(PASSES="2")):
            answers.append(await _talk(place))
    assert answers[0] == answers[1]


SENSELESS = (
    b"{}",
    b"no json",
    b'{"op": "ask"}',
    b'{"op": "other", "prompt": "x"}',
    b"[1]",
    b"[" * 9000,
)


async def test_a_question_that_makes_no_sense_is_answered_and_does_no_harm(
    place: Place, programs: Path
) -> None:
    async with process([str(programs / "worker.py")], place.worker()):
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


async def test_a_worker_sleeps_through_each_capture_and_goes_on_as_it_was(
    place: Place, programs: Path
) -> None:
    ends = ("snapshot-complete", "snapshot-complete", "snapshot-aborted", "snapshot-aborted")
    async with process([str(programs / "worker.py")], place.worker()):
        client = await place.connect()
        await client.chat("I am Ada")
        before = await _talk(place)
        for attempt, end in enumerate(ends, 1):
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


async def _writes_on(client: WorkerClient) -> None:
    """A text is written on from sentences and from what was learned."""
    known = json.loads(await client.ask("The clone answers"))
    assert known["answer"] == "as its source did, word for word."
    unknown = json.loads(await client.ask("My name is"))
    await client.chat("My name is Ada.")
    learned = json.loads(await client.ask("My name is"))
    assert (learned["answer"], unknown["answer"] != "Ada.") == ("Ada.", True)
    assert "answer" in json.loads(await client.ask("zygote"))


async def _remembers(client: WorkerClient) -> None:
    """A chat moves what an ask only reads."""
    fresh = await client.ask("hello?")
    assert await client.ask("hello?") == fresh
    said = json.loads(await client.chat("I am Ada"))
    moved = await client.ask("hello?")
    assert moved != fresh
    assert (said["turns"], json.loads(moved)["turns"]) == (1, 1)


@pytest.mark.parametrize(
    ("program", "learns"), [("worker.py", _remembers), ("text_worker.py", _writes_on)]
)
async def test_a_worker_learns_and_a_restored_one_answers_byte_for_byte_as_its_source(
    place: Place, programs: Path, program: str, learns: Callable[[WorkerClient], Awaitable[None]]
) -> None:
    async with process([str(programs / program)], place.worker(PASSES="1")):
        client = await place.connect()
        await learns(client)
        assert (await place.said("ready-for-snapshot"))["attempt"] == 0
        before = [await client.ask(question) for question in ASKED]
        await client.close()
        place.say("quiesce", 1)
        await place.said("quiesced")
    place.forget("quiesce", "quiesced", "ready-for-snapshot")
    (place.pod_sockets / "worker.sock").unlink()
    async with process([str(programs / program)], place.worker(SNAPSHOT_RESTORE_STANDBY="1")):
        place.say("restore-complete", 7)
        assert (await place.said("restored"))["attempt"] == 7
        assert await _talk(place) == before
        await place.said("ready-for-snapshot")


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_standby_starts_cold_when_its_restore_fails_or_has_failed(
    place: Place, programs: Path, is_late: bool
) -> None:
    environment = place.worker(SNAPSHOT_RESTORE_STANDBY="1", WARMUP_SECONDS="0.1")
    # What one before it has said is taken back.
    place.say("restored", 1)
    if not is_late:
        place.say("restore-failed", 2)
    async with process([str(programs / "worker.py")], environment):
        await place.withdrawn("restored")
        place.say("restore-failed", 2)
        await place.said("ready-for-snapshot")
        assert (await place.said("restored"))["attempt"] == 2
        assert len(await _talk(place)) == len(ASKED)


@pytest.mark.parametrize("is_late", [False, True])
async def test_the_template_starts_cold_when_its_restore_fails_or_has_failed(
    place: Place, programs: Path, is_late: bool
) -> None:
    if not is_late:
        place.say("restore-failed", 2)
    environment = place.worker(SNAPSHOT_RESTORE_STANDBY="1")
    async with process([str(programs / "worker_template.py")], environment) as worker:
        if is_late:
            await until(lambda: _has_watch(worker.pid), within_s=PATIENCE_S)
            place.say("restore-failed", 2)
        assert (await place.said("restored"))["attempt"] == 2
        await place.said("ready-for-snapshot")


async def test_the_template_is_captured_twice_and_restored(place: Place, programs: Path) -> None:
    async with process([str(programs / "worker_template.py")], place.worker()):
        for attempt in (1, 2):
            await place.said("ready-for-snapshot")
            place.forget("quiesced", "snapshot-complete")
            place.say("quiesce", attempt)
            assert (await place.said("quiesced"))["attempt"] == attempt
            place.say("snapshot-complete", attempt)
    place.forget("quiesce", "quiesced", "snapshot-complete", "ready-for-snapshot")
    place.say("restore-complete", 3)
    standby = place.worker(SNAPSHOT_RESTORE_STANDBY="1")
    async with process([str(programs / "worker_template.py")], standby):
        assert (await place.said("restored"))["attempt"] == 3
        await place.said("ready-for-snapshot")


def test_the_template_is_short() -> None:
    source = (EXAMPLES / "worker_template.py").read_text()
    tree = ast.parse(source)
    spared: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.FunctionDef) and ast.get_docstring(node):
            spared.update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    lines = enumerate(source.splitlines(), 1)
    code = [line for n, line in lines if line.strip() and n not in spared and line[0] != "#"]
    assert len(code) <= 14
