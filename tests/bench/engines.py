"""How soon engines answer: started cold, after their own sleep, and restored by Snapback.

`python -m tests.bench.engines` starts a local cluster, and in every round each engine once: it
starts cold, sleeps and wakes if it can, is captured and ended, and restored on another node. As
root, with `make criu init`, by CRIU, too. The status is 1 when an answer differs, and 2 when a
request makes no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import msgspec

from snapshotctl.adapters.machine import look_for_criu
from snapshotctl.domain import criu_host, formats
from snapshotctl.domain.demo_engines import ENGINES
from tests.bench import common
from tests.bench.common import ROOT, Benchmark, Results
from tests.support import live_cluster
from tests.support.live_cluster import LiveCluster, Session, find, snapshot
from tests.support.ports import free_port

TITLE = "Engines"
SOURCE, TARGET = "source", "target"
WEIGHTS, ARTIFACT = "weights in GPU memory", "artifact"
ALONE, START, NAP = "by hand, s", "cold start, s", "sleep and wake, s"
RESTORE = "restore, s"
TIMES = (ALONE, START, NAP, RESTORE)
"""By hand is only what needs no GPU, and not every engine can sleep."""
DEVICE_MIB = 64
WAIT_S = 30.0
ASK_AGAIN_S = 0.005
ASKED = "LICENSE"
"""The file that the model is asked about."""
STORED = b"what was stored"
S3 = {"Authorization": "AWS4-HMAC-SHA256 Credential=a/20260101/us-east-1/s3/aws4_request"}
# Without the folder of the script, some of whose files have names of the standard library.
SERVER = [sys.executable, "-P", str(ROOT / "tests/bench/engine_server.py")]
INSTALLED = ROOT / ENGINES["onnx"].installed
MODEL_FILES = "magika/models/*/model.onnx"
MODEL = {"PYTHONPATH": f"{INSTALLED.parent}{os.pathsep}{ROOT / 'deploy/examples'}"}


class Request(NamedTuple):
    """One request to an engine."""

    path: str
    body: bytes | None = None
    method: str = "POST"


class Engine(NamedTuple):
    """An engine under one driver; `{port}` in its words and variables is where it serves."""

    name: str
    driver: str
    program: Sequence[str]
    first: Request
    """What it is asked until it answers, after a start."""
    asked: Request
    """What it is asked until it answers, after a restore: as before the capture."""
    around: Sequence[str] = ()
    """What runs the program in a pod."""
    environment: Mapping[str, str] = {}
    prepared: Sequence[Request] = ()
    can_nap: bool = False
    needs_gpu: bool = False

    @property
    def row(self) -> str:
        return f"{self.name}, {self.driver}"


def engines() -> Iterator[Engine]:
    """Yield every engine under each driver."""
    identify = Request("/identify", (ROOT / ASKED).read_bytes())
    with_model = Engine(
        name="onnxruntime, weights in GPU memory",
        driver="",
        program=[*SERVER],
        first=identify,
        asked=identify,
        environment={**MODEL, "HTTP_PORT": "{port}"},
        can_nap=True,
        needs_gpu=True,
    )
    stock = with_model._replace(
        name="onnxruntime as it is",
        program=[*SERVER, "--stock"],
        around=["snapback-run", "--ready", "GET http://127.0.0.1:{port}/health", "--"],
        needs_gpu=False,
    )
    for engine in (with_model, stock):
        yield from (engine._replace(driver=driver) for driver in criu_host.DRIVERS)
    api = "http://127.0.0.1:{port}/moto-api/"
    replay = ["--state", "moto_recording", "--restore", f"{api}recorder/replay-recording"]
    for driver in criu_host.DRIVERS:
        is_replayed = driver == "cooperative"
        yield Engine(
            name="moto's server as it is",
            driver=driver,
            program=[sys.executable, "-m", "moto.server", "-p", "{port}"],
            around=["snapback-run", "--ready", api, *(replay if is_replayed else ()), "--"],
            environment={"MOTO_ENABLE_RECORDING": "1"} if is_replayed else {},
            first=Request("/moto-api/", method="GET"),
            asked=Request("/bucket/key", method="GET"),
            prepared=[
                Request("/bucket", method="PUT"),
                Request("/bucket/key", STORED, method="PUT"),
            ],
        )


def answer(port: int, request: Request) -> bytes:
    """Ask until the engine answers as it should."""
    end = time.monotonic() + WAIT_S
    url = f"http://127.0.0.1:{port}{request.path}"
    asking = urllib.request.Request(url, request.body, S3, method=request.method)
    while True:
        try:
            with urllib.request.urlopen(asking, timeout=WAIT_S) as found:
                return bytes(found.read())
        except (OSError, http.client.HTTPException) as error:
            if time.monotonic() > end:
                raise TimeoutError(f"{url} does not answer: {error}") from error
        time.sleep(ASK_AGAIN_S)


def pod(engine: Engine, name: str, folder: Path, port: int, source: str = "") -> dict[str, Any]:
    """Return the pod of an engine on the source node, or on the target if it is restored."""
    words = [word.format(port=port) for word in (*engine.around, *engine.program)]
    env = [
        {"name": key, "value": value.format(port=port)} for key, value in engine.environment.items()
    ]
    container: dict[str, Any] = {"name": "main", "command": words, "env": env}
    container["workingDir"] = str(folder)
    if engine.needs_gpu:
        container["resources"] = {"limits": {"nvidia.com/gpu": 1}}
    found = live_cluster.pod(name, TARGET if source else SOURCE, source or None)
    if not source:
        found["metadata"]["annotations"] = {"nvidia.com/capture-driver": engine.driver}
    found["spec"]["containers"] = [container]
    return found


class Bench:
    """One run in a folder of the disk that is measured."""

    def __init__(self, folder: Path, found: Results) -> None:
        self.folder, self.found = folder, found
        host = look_for_criu()
        lacking = [check.fix for check in criu_host.checks(host) if not check.ok]
        self.engines = []
        for engine in engines():
            if lacking and engine.driver == "criu":
                found.absent[engine.row] = "; ".join(lacking)
            else:
                self.engines.append(engine)
        self.cluster = LiveCluster(folder, tools=None if lacking else Path(host.tools))

    async def run(self, rounds: int) -> None:
        try:
            await self.cluster.up(SOURCE, TARGET, mib=DEVICE_MIB)
            async with self.cluster.session() as session:
                for number in range(rounds):
                    common.say(f"round {number + 1} of {rounds}")
                    for engine in common.rotated(self.engines, number, rounds):
                        await self._turn(session, engine, number)
        finally:
            await self.cluster.down()

    async def _turn(self, session: Session, engine: Engine, number: int) -> None:
        common.say(f"  {engine.row}")
        name = f"engine-{self.engines.index(engine)}-{number}"
        folder = self.folder / name
        folder.mkdir()
        port = free_port()
        if not engine.needs_gpu:
            taken = await asyncio.to_thread(_alone, engine, folder, free_port())
            self.found.add(engine.row, ALONE, taken)
        begin = time.monotonic()
        await session.apply(pod(engine, name, folder, port))
        await self._answered(session, name, port, engine.first)
        self.found.add(engine.row, START, time.monotonic() - begin)
        for request in engine.prepared:
            await asyncio.to_thread(answer, port, request)
        if engine.can_nap:
            said = await asyncio.to_thread(answer, port, Request("/nap", b""))
            self.found.add(engine.row, NAP, float(json.loads(said)["seconds"]))
        before = await asyncio.to_thread(answer, port, engine.asked)
        await session.reaches("Pod", name)
        await session.apply(snapshot(name, name, "Terminate", driver=engine.driver))
        made = await session.reaches("Snapshot", name)
        await session.remove("Pod", name)
        # A restored engine has only what was captured.
        (folder / "moto_recording").unlink(missing_ok=True)
        self.cluster.drop_cache()
        begin = time.monotonic()
        await session.apply(pod(engine, f"{name}-restored", folder, port, name))
        after = await self._answered(session, f"{name}-restored", port, engine.asked)
        self.found.add(engine.row, RESTORE, time.monotonic() - begin)
        if before != after:
            raise RuntimeError(f"{engine.row}: {before!r} became {after!r}")
        # It is the restored one, and not one that started cold in its place.
        await session.reaches("Pod", f"{name}-restored")
        bound = made.status.bound_snapshot_content_name
        parts = find(await session.objects(), "SnapshotContent", bound).status.committed.parts
        await session.remove("Pod", f"{name}-restored")
        await session.remove("Snapshot", name)
        self.found.add(engine.row, ARTIFACT, sum(part.bytes for part in parts))
        weights = sum(part.bytes for part in parts if part.part != "process")
        self.found.add(engine.row, WEIGHTS, weights)

    async def _answered(self, session: Session, name: str, port: int, request: Request) -> bytes:
        """Wait for the answer of a pod that was just applied."""
        try:
            return await asyncio.to_thread(answer, port, request)
        except TimeoutError as error:
            found = find(await session.objects(), "Pod", name)
            status = msgspec.json.encode(found.status).decode()
            raise TimeoutError(f"{error}; pod {name} is {status}") from error


def _alone(engine: Engine, folder: Path, port: int) -> float:
    """Give what the program takes to its first answer when it is started by hand."""
    words = [word.format(port=port) for word in engine.program]
    more = {key: value.format(port=port) for key, value in engine.environment.items()}
    quiet = subprocess.DEVNULL
    begin = time.monotonic()
    with subprocess.Popen(
        words, cwd=folder, env=os.environ | more, stdout=quiet, stderr=quiet
    ) as process:
        try:
            answer(port, engine.first)
            return time.monotonic() - begin
        finally:
            process.send_signal(signal.SIGKILL)


def lines(found: Results) -> Iterator[str]:
    yield (
        f"Written by `make bench-engines`: {found.rounds} rounds in a local cluster, GPUs\n"
        "simulated. Engines take turns, and the order rotates. Cold start and restore are from\n"
        "`apply` to the first answer: of a new pod, and of one on another node, whose artifact is\n"
        "not in the page cache; programs and libraries are, for both. By hand is the program\n"
        "alone, with no cluster. Sleep and wake is within the process, up to an answer: the\n"
        "weights leave the GPU and come back; an engine as it is can only load its model again.\n"
        "Restored answers were the same, byte for byte. The model is small: a cold start is\n"
        "mostly Python and its libraries, which `cooperative` starts again and `criu` does not.\n"
        "The machine:\n"
    )
    yield from common.listed(found.machine)
    yield from (f"- {row} was not run: {why}" for row, why in found.absent.items())
    head = ("engine, driver", "model", WEIGHTS, ARTIFACT, *TIMES, "restore is")
    yield from common.table(head, (_cells(found, row) for row in found.samples))
    yield "\nMedians, with the fastest and the slowest."


def _cells(found: Results, row: str) -> Iterator[str]:
    samples = found.samples[row]
    yield row
    # What can sleep has a model, which is the same for all.
    yield f"magika, {formats.size(found.facts['model'])}" if NAP in samples else "none"
    for name in (WEIGHTS, ARTIFACT):
        yield formats.size(int(median(samples[name]))) if any(samples[name]) else "-"
    for name in TIMES:
        yield common.cell(samples[name], "{:.3g}") if name in samples else "-"
    yield f"{median(samples[START]) / median(samples[RESTORE]):.2f} x as fast"


async def measure(options: argparse.Namespace, folder: Path) -> Results:
    model = sum(path.stat().st_size for path in INSTALLED.parent.glob(MODEL_FILES))
    with common.measuring(folder, model=model) as found:
        await Bench(folder, found).run(options.rounds)
    return found


def _lacking() -> str:
    return "" if INSTALLED.exists() else "no engines are installed: run `make engines`"


BENCH = Benchmark(
    "engines", TITLE, __doc__, {"rounds": (5, 1, "")}, measure, lines, lambda _: (), _lacking
)

if __name__ == "__main__":
    common.run(BENCH.main)
