"""An agent with real processes, files and NATS, and the operator's side of it played by the test.

The agent runs in the test's event loop (`Rig.agent`) or as a process of its own (`Rig.process`),
the same program either way.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from snapshot_agent.adapters import procfs
from snapshot_agent.domain import control
from snapshot_agent.main import serve
from snapshot_api.facts import PodSpec
from snapshot_shared import subjects
from snapshot_shared.api import (
    FactsReply,
    Fault,
    FaultAction,
    PodsReply,
    PodsRequest,
    SimReply,
    SimRequest,
    TemplateReply,
    TemplateRequest,
)
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.codec import decode_json, digest, encode_json
from snapshot_shared.errors import BusUnavailable, Failure, NotFound
from snapshot_shared.frames import GRPC_SOCKET
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.journal import read_records
from snapshot_shared.ledger import Noted
from snapshot_shared.orders import (
    AbortOrder,
    ArtifactRef,
    DeleteOrder,
    DeviceRef,
    Driver,
    DumpOrder,
    Order,
    PartResult,
    PlaceOrder,
    PodRef,
    PrepareOrder,
    ReleaseOrder,
    Report,
    RestoreOrder,
    RunOrder,
    SealOrder,
    StopOrder,
    VectorEntry,
    VerifyOrder,
    service_of,
)
from tests.support import forks
from tests.support.builders import UID
from tests.support.waiting import until

AgentProcess = forks.Forked | asyncio.subprocess.Process
WORKER = Path(__file__).with_name("tiny_worker.py")
PATIENCE_S = 20.0
NOWHERE = ArtifactRef(
    namespace="default", content_uid=UID, generation=1, root_digest="sha256:" + "0" * 64
)
"""An artifact that no node has."""
T = TypeVar("T", bound=msgspec.Struct)


async def ignored(_done: int) -> None:
    """Take progress and do nothing with it."""


def fresh_uid() -> str:
    return str(uuid.uuid4())


def worker_spec(*arguments: str, **more: Any) -> dict[str, Any]:
    """The JSON of a pod's spec with the tiny worker in it."""
    container = {"name": "main", "command": [sys.executable, str(WORKER), *arguments], **more}
    return msgspec.to_builtins(msgspec.convert({"containers": [container]}, PodSpec))  # type: ignore[no-any-return]


class Home:
    """The folder of a tiny worker, and what that has written there."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.control = home / "control"

    def events(self) -> list[str]:
        return self._text("events").splitlines()

    def beats(self) -> str:
        return self._text("beats")

    def _text(self, name: str) -> str:
        try:
            return (self.home / name).read_text()
        except FileNotFoundError:
            return ""

    async def goes_on(self) -> None:
        """Wait until the worker has written once more."""
        before = self.beats()
        await until(lambda: self.beats() != before, "another beat")


class Pod(Home):
    """A pod of the test: its reference, its spec, and where its files lie."""

    def __init__(self, rig: Rig, spec: dict[str, Any], name: str) -> None:
        self.ref = PodRef(namespace="default", name=name, uid=fresh_uid())
        self.spec = spec
        super().__init__(rig.state / "pods" / self.ref.uid / "main")

    def pid(self, journal: Path) -> int:
        """The process that the worker has now."""
        ours = (f"run-{self.ref.uid}", f"container:{self.ref.container}")
        notes = [each for each in read_records(journal) if isinstance(each, Noted)]
        pids = [each.value["pid"] for each in notes if (each.order, each.key) == ours]
        assert pids, "the journal has no process of this pod"
        return int(pids[-1])


class Rig:
    """The operator's side: templates, orders, reports; and the means to run the agent."""

    def __init__(self, folder: Path, url: str, sockets: Path) -> None:
        self.url = url
        self.node = NodeName(f"node-{uuid.uuid4().hex[:8]}")
        self.state = folder / "state"
        self.root = folder / "artifacts"
        self.sockets = sockets
        self.journal = self.state / "journal"
        self.bus = Bus(url, "test-operator")
        self.pods: dict[str, Pod] = {}
        self.settings: dict[str, str] = {}
        self.reports: list[Report] = []
        self.also_unknown: list[str] = []
        self.asked_pods: list[list[str]] = []
        self.answers_pods = asyncio.Event()
        self.answers_pods.set()
        self._news = asyncio.Condition()
        self._tasks: list[asyncio.Task[None]] = []
        self._processes: list[AgentProcess] = []

    @property
    def environment(self) -> dict[str, str]:
        return {
            "SNAPBACK_NATS_URL": self.url,
            "SNAPBACK_STATE_DIR": str(self.state),
            "SNAPBACK_ARTIFACT_ROOT": str(self.root),
            "SNAPBACK_SOCKET_DIR": str(self.sockets),
            "SNAPBACK_NODE": self.node,
            "SNAPBACK_RUN": "test",
            "SNAPBACK_WORKDIR": str(self.state.parent),
            **self.settings,
        }

    # The agent.

    @contextlib.asynccontextmanager
    async def agent(self) -> AsyncIterator[None]:
        """Run the agent in this event loop; leaving the block stops it as SIGTERM does."""
        before = dict(os.environ)
        os.environ.update(self.environment)
        stop = asyncio.Event()
        task = asyncio.create_task(serve(stop))
        try:
            await self.until_serving(task.done)
            yield
        finally:
            stop.set()
            try:
                await asyncio.wait_for(task, PATIENCE_S)
            finally:
                os.environ.clear()
                os.environ.update(before)

    async def process(self, *arguments: str) -> AgentProcess:
        """Start the agent as a process and return when it serves.

        `arguments` are those of Python, for a program that runs the agent in its own way.
        """
        log = self.state.parent / "agent.log"
        environment = {**os.environ, **self.environment}
        process: AgentProcess
        if arguments:
            with log.open("ab") as file:
                process = await asyncio.create_subprocess_exec(
                    sys.executable, *arguments, env=environment, stderr=file
                )
        else:
            process = await forks.start("snapshot_agent.main", environment, log)
        self._processes.append(process)
        await self.until_serving(lambda: process.returncode is not None)
        return process

    async def restarted(self, process: AgentProcess) -> None:
        """Kill an agent, and start the next one."""
        await killed(process)
        await self.process()

    def guards(self) -> list[int]:
        """The pids of the guards of this node."""
        return [pid for pid, text in below(self.state).items() if "adapters.guard" in text]

    async def gms(self, devices: int, device_bytes: int) -> forks.Forked:
        """Start the GPU memory service of the node as a process and wait until it serves."""
        environment = {
            **self.environment,
            "SNAPBACK_STATE_DIR": str(self.state.parent / "gms"),
            "SNAPBACK_DEVICES": str(devices),
            "SNAPBACK_DEVICE_BYTES": str(device_bytes),
        }
        log = self.state.parent / "gms.log"
        process = await forks.start("gms.main", {**os.environ, **environment}, log)
        self._processes.append(process)
        socket = self.sockets / GRPC_SOCKET
        await until(lambda: socket.exists() or process.returncode is not None, "GMS to serve")
        assert process.returncode is None
        return process

    async def until_serving(self, is_over: Callable[[], bool]) -> None:
        """Wait until the agent answers questions; its end is a failure."""
        subject = subjects.rpc(self.node, "agent", "status")
        async with asyncio.timeout(PATIENCE_S):
            while True:
                if is_over():
                    raise AssertionError("the agent ended at its start")
                try:
                    await self.bus.request(subject, b"", timeout_s=1.0)
                    return
                except (BusUnavailable, NotFound):
                    await asyncio.sleep(0.02)

    async def arm(self, verb: str, step: str, action: FaultAction = "crash") -> None:
        """Have the agent crash, or do something else, at a step of its next order."""
        request = SimRequest(arm=Fault(action=action, step=step, verb=verb))
        subject = subjects.rpc(self.node, "agent", "sim")
        answer = await self.bus.request(subject, encode_json(request), timeout_s=5.0)
        assert decode_json(answer, SimReply).failure is None

    async def status(self) -> dict[str, Any]:
        subject = subjects.rpc(self.node, "agent", "status")
        return json.loads(await self.bus.request(subject, b""))  # type: ignore[no-any-return]

    # The operator's side.

    async def open(self) -> None:
        await self.bus.connect()
        await self.bus.ensure_assets()
        for subject, take in (
            (f"snap.report.{self.node}.>", self._collect),
            (subjects.template(self.node), self._answer),
            (subjects.pods(self.node), self._answer_pods),
        ):
            self._tasks.append(asyncio.create_task(self._listen(subject, take)))

    async def _listen(self, subject: str, take: Callable[[Delivery], Awaitable[None]]) -> None:
        async with self.bus.listening(subject) as heard:
            while True:
                await take(await heard.get())

    async def _collect(self, delivery: Delivery) -> None:
        async with self._news:
            self.reports.append(decode_json(delivery.data, Report))
            self._news.notify_all()

    async def _answer(self, delivery: Delivery) -> None:
        request = decode_json(delivery.data, TemplateRequest)
        # Rigs of one nats-server hear each other's requests; each answers for its own pods.
        if request.uid in self.pods:
            reply = TemplateReply(spec=self.pods[request.uid].spec)
            await delivery.raw.respond(encode_json(reply))

    async def _answer_pods(self, delivery: Delivery) -> None:
        """Know the pods of the test and no others, while `answers_pods` is set."""
        await self.answers_pods.wait()
        request = decode_json(delivery.data, PodsRequest)
        self.asked_pods.append(request.pods)
        unknown = [uid for uid in request.pods if uid not in self.pods]
        reply = PodsReply(unknown=[*unknown, *self.also_unknown])
        await delivery.raw.respond(encode_json(reply))

    async def close(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
            await process.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self.bus.close()
        end_everything_below(self.state)

    async def send(self, order: Order) -> None:
        """Publish an order as the operator does."""
        subject = subjects.order(self.node, service_of(order), OrderId(order.order))
        await self.bus.publish(subject, encode_json(order))

    async def answer(self, order: Order, *kinds: str) -> Report:
        """Wait for a report of an order; by default for the one that ends it."""
        return await self.heard(
            lambda r: (
                (r.order, r.attempt) == (order.order, order.attempt)
                and (r.kind in kinds if kinds else r.is_terminal)
            )
        )

    async def heard(self, wanted: Any) -> Report:
        """Wait for the first report that is wanted."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            while True:
                for report in self.reports:
                    if wanted(report):
                        return report
                await self._news.wait()

    async def exited(self, pod: Pod) -> Report:
        """Wait for the end of a pod's worker."""
        return await self.answer(self.run_order(pod), "exited")

    async def carry_out(self, order: Order) -> Report:
        """Send an order and wait for its end."""
        await self.send(order)
        return await self.answer(order)

    async def done(self, order: Order, kind: str) -> Report:
        """Send an order that ends as this."""
        report = await self.carry_out(order)
        assert report.kind == kind, report
        return report

    async def refused(self, order: Order, reason: str, *, kind: str = "failed") -> Failure:
        """Send an order that ends with a failure of this reason."""
        return failure_of(await self.done(order, kind), reason)

    # Orders.

    def pod(self, *arguments: str, name: str = "worker", **more: Any) -> Pod:
        pod = Pod(self, worker_spec(*arguments, **more), name)
        self.pods[pod.ref.uid] = pod
        return pod

    def common(self, verb: str, owner: str, attempt: int = 1) -> dict[str, Any]:
        return {
            "order": f"{verb}-{owner}",
            "attempt": attempt,
            "node": self.node,
            "owner": owner,
            "deadline_s": 60.0,
        }

    def _of_pod(self, kind: type[T], pod: Pod, **fields: Any) -> T:
        """Return an order about a pod, which is named after it."""
        return self._of(kind, pod.ref.uid, pod=pod.ref, **fields)

    def _of(self, kind: type[T], owner: str, attempt: int = 1, **fields: Any) -> T:
        verb = kind.__name__.removesuffix("Order").lower()
        return kind(**{**self.common(verb, owner, attempt), **fields})

    def run_order(
        self, pod: Pod, *, standby: bool = False, devices: Sequence[DeviceRef] = ()
    ) -> RunOrder:
        wanted = digest(encode_json(pod.spec))
        of_worker = {"template_digest": wanted, "standby": standby, "devices": [*devices]}
        return self._of_pod(RunOrder, pod, **of_worker)

    def stop_order(self, pod: Pod, grace_s: float = 5.0) -> StopOrder:
        return self._of_pod(StopOrder, pod, grace_s=grace_s)

    async def running(self, *arguments: str, standby: bool = False) -> Pod:
        """Give a pod whose worker is up (and ready, unless it waits or was told otherwise)."""
        pod = self.pod(*arguments)
        order = self.run_order(pod, standby=standby)
        await self.done(order, "started")
        if not standby and "--never-ready" not in arguments:
            await self.answer(order, "ready")
        await until(lambda: len(pod.events()) > int(standby), "the start of the worker")
        return pod

    def _of_capture(self, kind: type[T], pod: Pod | None, content: str, **fields: Any) -> T:
        """Return an order about the capture of a pod, which is named after its content."""
        return self._of(kind, content, pod=pod and pod.ref, **{"content_uid": content, **fields})

    def prepare_order(
        self, pod: Pod, content: str, attempt: int = 1, **fields: Any
    ) -> PrepareOrder:
        fields = {"attempt": attempt, "fence_token": f"{content}.{attempt}", **fields}
        return self._of_capture(PrepareOrder, pod, content, **fields)

    def dump_order(
        self, pod: Pod, content: str, vector: list[VectorEntry], **fields: Any
    ) -> DumpOrder:
        return self._of_capture(DumpOrder, pod, content, vector=vector, **fields)

    def release_order(self, pod: Pod, content: str, **fields: Any) -> ReleaseOrder:
        return self._of_capture(ReleaseOrder, pod, content, **fields)

    def abort_order(self, pod: Pod | None, content: str, **fields: Any) -> AbortOrder:
        return self._of_capture(AbortOrder, pod, content, **fields)

    def restore_abort(self, pod: Pod, **fields: Any) -> AbortOrder:
        """Give up the restore of a worker."""
        return self._of_pod(AbortOrder, pod, **fields)

    def delete_order(self, content: str, attempt: int = 1) -> DeleteOrder:
        fields = {"namespace": "default", "content_uid": content, "generation": 1}
        return self._of(DeleteOrder, content, attempt, **fields)

    def verify_order(self, artifact: ArtifactRef, attempt: int = 1) -> VerifyOrder:
        return self._of(VerifyOrder, artifact.content_uid, attempt, artifact=artifact)

    def seal_order(self, pod: Pod, prepared: Report, *parts: PartResult | None) -> SealOrder:
        """Seal what was staged for the capture that this report is of."""
        content = prepared.order.removeprefix("prepare-")
        fields: dict[str, Any] = {"namespace": "default", "vector": prepared.vector}
        found = [part for part in parts if part is not None]
        return self._of_capture(SealOrder, pod, content, parts=found, **fields)

    async def staged(self, pod: Pod, content: str, **fields: Any) -> tuple[Report, Report]:
        """Prepare and dump without devices; the worker is still held."""
        prepared = await self.prepared(pod, content, **fields)
        dump = self.dump_order(pod, content, prepared.vector, **fields)
        return prepared, await self.done(dump, "staged")

    async def prepared(self, pod: Pod, content: str, **fields: Any) -> Report:
        """Prepare a capture; the worker is held."""
        return await self.done(self.prepare_order(pod, content, **fields), "prepared")

    async def held(
        self, *arguments: str, driver: Driver = "cooperative", **fields: Any
    ) -> tuple[Pod, str, DumpOrder]:
        """Give a worker that is prepared for a capture, its content, and the order to dump it."""
        pod, content = await self.running(*arguments), fresh_uid()
        prepared = await self.prepared(pod, content, driver=driver, **fields)
        return pod, content, self.dump_order(pod, content, prepared.vector, driver=driver)

    async def asked(self) -> tuple[Pod, PrepareOrder]:
        """Give a worker that was asked to be quiet and never is, and the order that asked."""
        pod = await self.running("--never-quiet")
        order = self.prepare_order(pod, fresh_uid())
        await self.send(order)
        await until((pod.control / control.QUIESCE).exists, "the request to be quiet")
        return pod, order

    async def captured(self, pod: Pod, content: str, **fields: Any) -> ArtifactRef:
        """Capture a worker whole and release it; `fields` are those of the driven orders."""
        prepared, dumped = await self.staged(pod, content, **fields)
        sealed = await self.done(self.seal_order(pod, prepared, dumped.part), "sealed")
        await self.done(self.release_order(pod, content, **fields), "released")
        return artifact_of(content, sealed)

    async def restorable(
        self, *arguments: str, waits: str = "", **fields: Any
    ) -> tuple[Pod, ArtifactRef]:
        """Capture a worker; give another one, which waits for a restore, and the artifact."""
        source = await self.running(*arguments)
        artifact = await self.captured(source, fresh_uid(), **fields)
        return await self.running(*waits.split(), standby=True), artifact

    def place_order(self, pod: Pod, artifact: ArtifactRef, **fields: Any) -> PlaceOrder:
        return self._of_pod(PlaceOrder, pod, artifact=artifact, **fields)

    def restore_order(self, pod: Pod, artifact: ArtifactRef, **fields: Any) -> RestoreOrder:
        return self._of_pod(RestoreOrder, pod, artifact=artifact, **fields)

    def generation(self, content: str) -> Path:
        return self.root / "default" / content / "gen-1"


async def killed(process: AgentProcess) -> None:
    process.kill()
    await process.wait()


def artifact_of(content: str, sealed: Report) -> ArtifactRef:
    assert sealed.root_digest is not None, sealed
    return ArtifactRef(
        namespace="default", content_uid=content, generation=1, root_digest=sealed.root_digest
    )


def failure_of(report: Report | FactsReply, *reasons: str) -> Failure:
    """Return the failure that a report has, which is for one of these reasons."""
    assert report.failure is not None, report
    assert report.failure.reason in reasons, report
    return report.failure


@contextlib.asynccontextmanager
async def rig(folder: Path, url: str) -> AsyncIterator[Rig]:
    """A rig whose processes are gone after the block."""
    sockets = Path(tempfile.mkdtemp(prefix="sb-"))
    made = Rig(folder, url, sockets)
    try:
        await made.open()
        yield made
    finally:
        await made.close()
        shutil.rmtree(sockets)


def stat_of(pid: int) -> procfs.Stat:
    """The process that has a pid now, which there must be."""
    found = procfs.read(pid)
    assert found is not None
    return found


def state_of(pid: int) -> str:
    """The state letter of a process; X when it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "X"


def watches(pid: int) -> bool:
    """Tell whether a process watches a folder by inotify."""
    # A file may be closed meanwhile, and the process may be gone.
    with contextlib.suppress(FileNotFoundError):
        return any("inotify wd" in fd.read_text() for fd in Path(f"/proc/{pid}/fdinfo").iterdir())
    return False


def catches(pid: int, number: int) -> bool:
    """Tell whether a process handles this signal."""
    caught = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return caught is not None and bool(int(caught[1], 16) >> (number - 1) & 1)


def is_gone(pid: int) -> bool:
    return state_of(pid) in "XZ"


def zombies_of(pid: int) -> set[int]:
    """The children of a process that have ended and that it has not reaped."""
    found = [procfs.read(int(each.name)) for each in Path("/proc").glob("[0-9]*")]
    return {each.pid for each in found if each and each.parent == pid and each.state == "Z"}


def below(folder: Path) -> Mapping[int, str]:
    """The running processes that have the folder in their environment or arguments."""
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
        except (OSError, ValueError):
            continue
        if os.fsencode(folder) in text and not is_gone(int(entry.name)):
            found[int(entry.name)] = text.decode(errors="replace")
    return found


def end_everything_below(state: Path) -> None:
    """Kill the processes below a folder and wait: a guard may be removing its files."""
    found = [pid for pid in below(state) if pid != os.getpid()]
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    limit = time.monotonic() + ENDED_S
    while not all(map(is_gone, found)) and time.monotonic() < limit:
        time.sleep(0.01)


ENDED_S = 5.0
"""How long processes that were killed may take to end, in seconds."""
