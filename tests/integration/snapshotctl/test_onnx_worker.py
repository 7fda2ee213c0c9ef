"""An engine as it is, with a trained model in GPU memory, and the test as its snapshot agent."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import socket
import sys
from pathlib import Path
from typing import Any

from snapshotctl.adapters import inotify
from snapshotctl.domain.demo_engines import ENGINES as DEMO
from tests.integration.snapshotctl.conftest import ENGINES, EXAMPLES, ROOT, needs_engines
from tests.integration.snapshotctl.place import PATIENCE_S, Place, process

WORKER = [str(EXAMPLES / "onnx_worker.py")]
FILES = [ROOT / name for name in DEMO["onnx"].asked]

pytestmark = needs_engines


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


async def test_a_trained_model_answers_the_same_after_a_capture_and_after_a_restore(
    place: Place,
) -> None:
    home = place.folder / "home"
    home.mkdir()
    more = {"HOME": str(home), "WARMUP_REQUESTS": "2"}
    async with process(WORKER, environment(place, **more)) as worker:
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

        place.say("quiesce", 1)
        await place.said("quiesced")
        _has_its_weights_in_gpu_memory(place)
        late = asyncio.create_task(asyncio.to_thread(labels, place))
        assert await asyncio.to_thread(asked, place, "GET", "/health") == (200, {})
        place.say("snapshot-complete", 1)
        await place.said("ready-for-snapshot")
        assert await asyncio.wait_for(late, PATIENCE_S) == before
    place.forget("quiesce", "quiesced", "snapshot-complete", "ready-for-snapshot")
    (place.pod_sockets / "worker.sock").unlink()
    place.say("restore-complete", 2)
    async with process(WORKER, environment(place, SNAPSHOT_RESTORE_STANDBY="1")):
        assert (await place.said("restored"))["attempt"] == 2
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


async def test_it_can_be_started_again_on_a_port_that_has_just_been_used(place: Place) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    # The first leaves its weights on its device, as nobody says here that its pod has ended.
    for device in place.devices:
        more = {"HTTP_PORT": str(port), "NVIDIA_VISIBLE_DEVICES": device}
        async with process(WORKER, environment(place, **more)):
            await place.said("ready-for-snapshot")
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
            with contextlib.closing(connection):
                connection.request("GET", "/health")
                # The side that closes first, as this server does, keeps the port for a minute.
                assert (await asyncio.to_thread(connection.getresponse)).status == 200
