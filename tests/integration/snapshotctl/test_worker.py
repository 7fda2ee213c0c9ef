"""The example workers and the template, with a real GPU memory service and the test as agent."""

from __future__ import annotations

import ast
import asyncio
import contextlib
import http.client
import itertools
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from gms.adapters.simulated import simulated_uuid
from snapshotctl.adapters import inotify, worker_socket
from snapshotctl.adapters.worker_socket import WorkerClient
from snapshotctl.domain.demo_engines import ENGINES as DEMO
from tests.integration.snapshotctl.conftest import ENGINES, EXAMPLES, ROOT, needs_engines
from tests.support.agent_rig import watches
from tests.support.ports import free_port
from tests.support.torch_site import VARIABLE, torch_for
from tests.support.waiting import until, wait_until

pytestmark = pytest.mark.turns

NODE = "node-1"
PATIENCE_S = 60.0


class Place:
    """The folders of one pod, and the environment of what runs in it, on two GPUs of its own."""

    def __init__(self, folder: Path, sockets: Path, number: int) -> None:
        self.folder = folder
        self.sockets = sockets
        self.control = folder / "control"
        self.uid = f"{number:08}-0000-0000-0000-000000000000"
        self.pod_sockets = sockets / self.uid[:8]
        self.devices = [simulated_uuid(NODE, index) for index in (2 * number, 2 * number + 1)]
        (self.control / "state").mkdir(parents=True)
        self.pod_sockets.mkdir()

    def worker(self, **more: str) -> dict[str, str]:
        return {
            **os.environ,
            "SNAPSHOT_CONTROL_DIR": str(self.control),
            "GMS_SOCKET_DIR": str(self.sockets),
            "NVIDIA_VISIBLE_DEVICES": ",".join(self.devices),
            "POD_SOCKET_DIR": str(self.pod_sockets),
            "SIZE_MIB": "8",
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

    async def said(self, name: str, attempt: int = 0) -> None:
        """Wait until the worker has said this, of this attempt."""
        async with asyncio.timeout(PATIENCE_S):
            await inotify.appears(self.control / name)
        assert json.loads((self.control / name).read_text())["attempt"] == attempt

    async def quiet(self, attempt: int) -> None:
        """Have a worker that is ready be quiet."""
        await self.said("ready-for-snapshot")
        self.forget("quiesced", "snapshot-complete", "snapshot-aborted")
        self.say("quiesce", attempt)
        await self.said("quiesced", attempt)

    def restore(self, attempt: int) -> None:
        """Have a standby that starts begin with what the captured worker has saved."""
        self.forget("quiesce", "quiesced", "snapshot-complete", "ready-for-snapshot")
        self.say("restore-complete", attempt)

    async def withdrawn(self, name: str) -> None:
        await until(lambda: not (self.control / name).exists(), name, within_s=PATIENCE_S)

    async def connect(self) -> WorkerClient:
        async with asyncio.timeout(PATIENCE_S):
            return await worker_socket.connect(self.sockets, self.uid)


@contextlib.asynccontextmanager
async def process(
    program: list[str], environment: dict[str, str], out: IO[str] | None = None
) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, *program, env=environment, stdout=out
    )
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await asyncio.wait_for(process.wait(), PATIENCE_S)


Places = Callable[[Path], Place]
"""Makes the place of a pod below a folder."""


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Places]:
    """A node with a GPU memory service, which the tests of a file share."""
    folder = tmp_path_factory.mktemp("node")
    with tempfile.TemporaryDirectory(prefix="sb", dir="/tmp") as sockets:
        environment = {
            **os.environ,
            "SNAPBACK_NODE": NODE,
            # Without a bus there are no orders, and no processes wait for them.
            "SNAPBACK_NATS_URL": "",
            "SNAPBACK_STATE_DIR": str(folder / "gms"),
            "SNAPBACK_ARTIFACT_ROOT": str(folder / "artifacts"),
            "SNAPBACK_SOCKET_DIR": sockets,
            "SNAPBACK_DEVICES": "64",
            "SNAPBACK_DEVICE_BYTES": str(32 * 1024 * 1024),
        }
        with subprocess.Popen([sys.executable, "-m", "gms.main"], env=environment) as gms:
            try:
                wait_until((Path(sockets) / "gms.sock").exists, within_s=PATIENCE_S)
                numbers = itertools.count()
                yield lambda below: Place(below, Path(sockets), next(numbers))
            finally:
                gms.terminate()


@pytest.fixture
def place(places: Places, tmp_path: Path) -> Place:
    return places(tmp_path)


ASKED = ("What is my name?", "When does the harbour open?", "My name is")


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
    places: Places, programs: Path, tmp_path: Path
) -> None:
    answers = []
    for name in ("one", "another"):
        place = places(tmp_path / name)
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
            await place.quiet(attempt)
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
        before = [await client.ask(question) for question in ASKED]
        await client.close()
        await place.quiet(1)
    place.restore(7)
    (place.pod_sockets / "worker.sock").unlink()
    async with process([str(programs / program)], place.worker(SNAPSHOT_RESTORE_STANDBY="1")):
        await place.said("restored", 7)
        assert await _talk(place) == before
        await place.said("ready-for-snapshot")


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("program", ["worker.py", "worker_template.py"])
async def test_a_standby_starts_cold_when_its_restore_fails_or_has_failed(
    place: Place, programs: Path, program: str, is_late: bool
) -> None:
    environment = place.worker(SNAPSHOT_RESTORE_STANDBY="1", WARMUP_SECONDS="0.1")
    serves = program == "worker.py"
    if serves:
        # What one before it has said is taken back.
        place.say("restored", 1)
    if not is_late:
        place.say("restore-failed", 2)
    async with process([str(programs / program)], environment) as worker:
        if serves:
            await place.withdrawn("restored")
        elif is_late:
            await until(lambda: watches(worker.pid), within_s=PATIENCE_S)
        place.say("restore-failed", 2)
        await place.said("ready-for-snapshot")
        await place.said("restored", 2)
        if serves:
            assert len(await _talk(place)) == len(ASKED)


async def test_the_template_is_captured_twice_and_restored(place: Place, programs: Path) -> None:
    async with process([str(programs / "worker_template.py")], place.worker()):
        for attempt in (1, 2):
            await place.quiet(attempt)
            place.say("snapshot-complete", attempt)
    place.restore(3)
    standby = place.worker(SNAPSHOT_RESTORE_STANDBY="1")
    async with process([str(programs / "worker_template.py")], standby):
        await place.said("restored", 3)
        await place.said("ready-for-snapshot")


async def test_a_model_of_pytorch_is_restored_with_the_weights_that_a_cold_start_has_drawn(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_for(monkeypatch)
    where = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), os.environ.get(VARIABLE))))
    said = tmp_path / "said"

    async def answered(worker: asyncio.subprocess.Process) -> str:
        said.write_text("")
        worker.send_signal(signal.SIGUSR1)
        return await until(lambda: said.read_text().partition("\n")[0], within_s=PATIENCE_S)

    with said.open("a") as out:
        program = [str(EXAMPLES / "torch_worker.py")]
        async with process(program, place.worker(PYTHONPATH=where), out) as worker:
            await place.said("ready-for-snapshot")
            drawn = await answered(worker)
            await place.quiet(1)
            place.say("snapshot-complete", 1)
            await place.said("ready-for-snapshot")
            assert await answered(worker) == drawn
        place.restore(2)
        standby = place.worker(PYTHONPATH=where, SNAPSHOT_RESTORE_STANDBY="1")
        async with process(program, standby, out) as worker:
            await place.said("restored", 2)
            assert await answered(worker) == drawn


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


# An engine as it is, with a trained model in GPU memory.

ONNX_WORKER = [str(EXAMPLES / "onnx_worker.py")]
FILES = [ROOT / name for name in DEMO["onnx"].asked]


class UnixConnection(http.client.HTTPConnection):
    """HTTP over a unix socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("worker", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(self._path))


def asked(place: Place, method: str, path: str, body: bytes | None = None) -> tuple[int, Any]:
    with contextlib.closing(UnixConnection(place.pod_sockets / "worker.sock")) as connection:
        connection.request(method, path, body)
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())


def labels(place: Place) -> dict[str, Any]:
    found = {}
    for path in FILES:
        name = str(path.relative_to(ROOT))
        status, found[name] = asked(place, "POST", "/identify", path.read_bytes())
        assert status == 200
    return found


def environment(place: Place, **more: str) -> dict[str, str]:
    path = f"{ENGINES}{os.pathsep}{EXAMPLES}"
    return place.worker(**{"PYTHONPATH": path, "WARMUP_REQUESTS": "0", **more})


@needs_engines
async def test_a_trained_model_answers_the_same_after_a_capture_and_after_a_restore(
    place: Place,
) -> None:
    home = place.folder / "home"
    home.mkdir()
    more = {"HOME": str(home), "WARMUP_REQUESTS": "2"}
    async with process(ONNX_WORKER, environment(place, **more)) as worker:
        await _warms_up(place)
        before = await asyncio.to_thread(labels, place)
        assert before["README.md"]["label"] == "markdown"
        assert before["Makefile"]["label"] == "makefile"
        assert len({found["label"] for found in before.values()}) > 3
        assert [each["label"] for each in before.values()] == await _labels_of_the_package(place)
        # It keeps no file of the node open that others write.
        opened = [str(fd.resolve()) for fd in Path(f"/proc/{worker.pid}/fd").iterdir()]
        assert [path for path in opened if path.endswith(".db")] == []
        assert list(home.iterdir()) == []

        await place.quiet(1)
        _has_its_weights_in_gpu_memory(place)
        late = asyncio.create_task(asyncio.to_thread(labels, place))
        assert await asyncio.to_thread(asked, place, "GET", "/health") == (200, {})
        place.say("snapshot-complete", 1)
        await place.said("ready-for-snapshot")
        assert await asyncio.wait_for(late, PATIENCE_S) == before
    place.restore(2)
    (place.pod_sockets / "worker.sock").unlink()
    async with process(ONNX_WORKER, environment(place, SNAPSHOT_RESTORE_STANDBY="1")):
        await place.said("restored", 2)
        assert await asyncio.to_thread(labels, place) == before


async def _warms_up(place: Place) -> None:
    """A cold start is ready for a capture once it has answered twice, and not before."""
    await inotify.appears(place.pod_sockets / "worker.sock")
    for _ in range(2):
        assert not (place.control / "ready-for-snapshot").exists()
        assert (await asyncio.to_thread(asked, place, "POST", "/identify", b"words"))[0] == 200
    await place.said("ready-for-snapshot")


def _has_its_weights_in_gpu_memory(place: Place) -> None:
    state = place.control / "state"
    pool = json.loads((state / "weights.pool").read_text())
    in_pool = sum(slot["size"] for slot in pool["slots"])
    assert in_pool > 2_500_000
    assert sum(path.stat().st_size for path in state.iterdir()) < in_pool / 10


async def _labels_of_the_package(place: Place) -> list[str]:
    """What the package says by itself of the same files."""
    script = (
        "import sys, json, pathlib; from magika import Magika; m = Magika()\n"
        "found = [m.identify_bytes(pathlib.Path(p).read_bytes()) for p in sys.argv[1:]]\n"
        "print(json.dumps([str(each.output.label) for each in found]))"
    )
    stock = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", script, *map(str, FILES)),
        env=environment(place, ORT_DISABLE_TELEMETRY="1"),
        stdout=asyncio.subprocess.PIPE,
    )
    out, _ = await stock.communicate()
    return json.loads(out)  # type: ignore[no-any-return]


@needs_engines
async def test_it_can_be_started_again_on_a_port_that_has_just_been_used(place: Place) -> None:
    port = free_port()
    # The first leaves its weights on its device, as nobody says here that its pod has ended.
    for device in place.devices:
        more = {"HTTP_PORT": str(port), "NVIDIA_VISIBLE_DEVICES": device}
        async with process(ONNX_WORKER, environment(place, **more)):
            await place.said("ready-for-snapshot")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                # The side that closes first, as this server does, keeps the port for a minute.
                assert (await asyncio.to_thread(connection.getresponse)).status == 200
