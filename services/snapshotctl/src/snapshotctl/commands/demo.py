"""The command demo: capture a live worker, lose its node, restore it on another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from snapshot_shared import figures
from snapshot_shared.errors import NotFound
from snapshot_shared.ids import check_uid
from snapshot_shared.objects.kinds import KINDS, AnyObject
from snapshot_shared.objects.kubernetes import Job, Pod
from snapshot_shared.objects.meta import is_true
from snapshot_shared.objects.snapback import DynamoCheckpoint, SnapshotContent, restore_name
from snapshot_shared.spans import SpanRecord
from snapshot_shared.tasks import end_all
from snapshotctl import objects
from snapshotctl.adapters import machine, worker_socket
from snapshotctl.command import WorkerDriver, command, new_app
from snapshotctl.commands.trace import show
from snapshotctl.domain import criu_host, demo_engines, demo_script, formats
from snapshotctl.domain.criu_host import DRIVERS, CriuHost
from snapshotctl.domain.demo_engines import Engine
from snapshotctl.domain.demo_script import Answer
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import DemoFailed
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Conversation, DemoCluster, Operator, Screen
from snapshotctl.tools import Connect, Tools
from snapshotctl.views.progress import ProgressDisplay
from snapshotctl.views.related import trace_of
from snapshotctl.views.state import failure_of

T = TypeVar("T")

NAMESPACE = "default"
START_S = 300.0
CAPTURE_S = 600.0
RESTORE_S = 600.0
REFUSAL_S = 60.0
REMOVAL_S = 60.0
SPANS_S = 10.0

app = new_app()


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What the demo uses. `connect` reaches the operator of the cluster once it runs."""

    tools: Tools
    cluster: DemoCluster
    connect: Connect
    examples: Path
    driver: str
    engine: Engine

    @property
    def screen(self) -> Screen:
        """The terminal."""
        return self.tools.screen


class Captured(NamedTuple):
    """The first half. `cold_s` is the time from apply to the first answer."""

    checkpoint: str
    content: SnapshotContent
    trace_id: str
    cold_s: float
    answers: list[Answer]


class Restored(NamedTuple):
    """The second half. `seconds` is the time from apply to the first answer."""

    pod: Pod
    trace_id: str
    seconds: float


class Worker(NamedTuple):
    """A pod of the demo that serves: where it is, and when it was applied (monotonic s)."""

    pod: Pod
    sockets: Path
    applied_at: float


@command(
    app,
    "snapshotctl demo",
    "snapshotctl demo --size-mib 2048 --keep",
    "snapshotctl demo --engine onnx",
    "sudo .venv/bin/snapshotctl demo --driver criu",
)
async def demo(
    tools: Tools,
    size_mib: Annotated[
        int | None,
        typer.Option(
            "--size-mib",
            metavar="MIB",
            envvar="SIZE_MIB",
            help="Size of the worker's weights.",
            show_default="512",
        ),
    ] = None,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the cluster running at the end.")
    ] = False,
    on: Annotated[
        Path | None,
        typer.Option("--on", metavar="FOLDER", help="Use a cluster that runs; see below."),
    ] = None,
    via: Annotated[
        str, typer.Option("--via", metavar="WORDS", help="With --on: what you type first.")
    ] = "",
    driver: WorkerDriver = DRIVERS[0],
    engine: Annotated[
        str,
        typer.Option("--engine", metavar="ENGINE", help="numpy, or onnx, a trained model."),
    ] = "numpy",
) -> None:
    """Capture a worker, lose its node, restore it on another.

    Everything runs on this machine, in a cluster of its own that is gone afterwards. The answers
    of the worker before and after have to be the same, byte for byte.

    With --on nothing is started. The cluster is that of --server or NATS_URL; FOLDER/node-1 and
    FOLDER/node-2 are the folders of the sockets of its nodes, and the processes of node-1, which
    the demo kills, have to be visible here.

    With --driver criu the worker does not save its own state: its process goes on in another pod.

    With --engine onnx the worker is onnxruntime with a trained model, which says what type 20 files
    of the checkout have; `make engines` installs it. It is not for --on.
    """
    shown_engine = demo_engines.engine_of(engine, is_started_here=on is None)
    size = demo_engines.check_size(shown_engine, size_mib)
    examples = machine.examples_folder()
    host = machine.look_for_criu() if criu_host.check_driver(driver) else None
    if on is None:
        cluster, connect = tools.demo_cluster(examples.parent.parent, host and host.tools)
    else:
        cluster, connect = tools.running_cluster(on, via)
    setup = Setup(
        tools=tools,
        cluster=cluster,
        connect=connect,
        examples=examples,
        driver=driver,
        engine=shown_engine,
    )
    _title(tools.screen, 1, "Preflight")
    if on is None:
        _check_machine(setup, size, host)
    else:
        tools.screen.line("  nothing is started here: the cluster runs already")
    try:
        await _run(setup, size, keep=keep)
    except (asyncio.CancelledError, BrokenPipeError):
        # Ctrl-C ends the reader of a pipe as well, and perhaps before us.
        await cluster.stop(purge=True)
        raise
    except BaseException:
        with contextlib.suppress(NotFound):
            # Without a record nothing was started, and the first error is the one that counts.
            await _stop_and_keep_logs(setup)
        raise
    await _end(setup, keep=keep)


async def _end(setup: Setup, *, keep: bool) -> None:
    access = setup.cluster.access
    if keep or not access.is_ours:
        setup.cluster.keep()
        if access.page:
            setup.screen.line(f"  page {access.page}")
        setup.screen.line(f"  {access.end}")
    else:
        await setup.cluster.stop(purge=True)
        setup.screen.line("  Everything is ended and removed.")


async def _stop_and_keep_logs(setup: Setup) -> None:
    await setup.cluster.stop(purge=False)
    access = setup.cluster.access
    if access.is_ours:
        setup.screen.note(f"the logs are kept in {access.logs}")
        setup.screen.note(access.end)
    else:
        setup.screen.note(f"the reason may stand in {access.logs}")


async def _run(setup: Setup, size_mib: int, *, keep: bool) -> None:
    _title(setup.screen, 2, "A cluster: nats-server, the operator, two nodes")
    await setup.cluster.start(demo_script.nodes(size_mib))
    if setup.cluster.access.is_ours:
        setup.screen.line(f"  logs: {setup.cluster.access.logs}")
    async with setup.connect() as operator:
        await _Demo(setup, operator, size_mib, keep=keep).run()


def _title(screen: Screen, number: int, text: str) -> None:
    screen.line()
    screen.line(f"{number}/6 {text}", strong=True)


def _check_machine(setup: Setup, size_mib: int, host: CriuHost | None) -> None:
    """Raise Unready with everything that is missing, each with its fix."""
    states = setup.tools.folders.states
    found = demo_script.checks(machine.look(states, setup.examples, setup.engine), size_mib)
    found += criu_host.checks(host) if host else []
    for check in found:
        setup.screen.line(f"  {'ok     ' if check.ok else 'MISSING'} {check.what}")
    criu_host.require(found, "the demo")


class _Demo:
    """Parts 3 to 6, on a cluster that is up."""

    def __init__(self, setup: Setup, operator: Operator, size_mib: int, *, keep: bool) -> None:
        self._setup = setup
        self._screen = setup.screen
        self._operator = operator
        self._size_mib = size_mib
        self._keep = keep
        self._engine = setup.engine
        self._checkpoint = self._example(setup.engine.checkpoint)
        self._restore = self._example(setup.engine.restore)

    def _example(self, name: str) -> Document:
        documents = self._setup.tools.documents(self._setup.examples / name)
        if len(documents) != 1:
            raise DemoFailed(f"{name} holds {len(documents)} documents, one was expected")
        [found] = documents
        value = found.value
        if self._engine.is_sized:
            value = demo_script.sized(value, self._size_mib)
        return Document(found.where, demo_script.driven(value, self._setup.driver))

    async def run(self) -> None:
        """Capture, lose the node, restore, see one restore refused, print the summary."""
        await self._remove_earlier()
        captured = await self._capture()
        _title(self._screen, 5, "Restore on the other node")
        restored = await self._restoration(captured)
        refused = await self._refusal(captured)
        _title(self._screen, 6, "What was shown")
        await _sum_up(self._setup, self._operator, captured, restored, refused, keep=self._keep)

    async def _remove_earlier(self) -> None:
        """Remove what an earlier demo left on a cluster that was there before."""
        earlier = [
            _target("Pod", self._name(self._restore)),
            _target("DynamoCheckpoint", self._name(self._checkpoint)),
        ]
        for target in earlier:
            found = await self._operator.get(target)
            if found is None:
                continue
            self._screen.line(f"  removing {target} of an earlier demo")
            await self._operator.delete(target, found.metadata.uid)
            await objects.until(
                self._operator, target, _is_gone, within_s=REMOVAL_S, what=f"{target} is removed"
            )

    async def _capture(self) -> Captured:
        _title(self._screen, 3, "A live worker on node-1")
        name = self._name(self._checkpoint)
        checkpoint = _target("DynamoCheckpoint", name)
        applied_at, trace_id = await self._apply(self._checkpoint)
        job = await self._until(checkpoint, _job_name, START_S, "the checkpoint gets its Job")
        begun = await self._until(_target("Job", job), _begun, START_S, "the Job gets its pod")
        worker = await self._placed(await self._pod_of(begun), applied_at)
        async with self._progress("capture") as display:
            cold_s = await self._warm_up(worker)
            _title(self._screen, 4, "Capture it while it lives, then lose its node")
            content = await self._captured(checkpoint, display)
        answers = await self._ask(worker)
        killed = await self._setup.cluster.kill_node(demo_script.SOURCE_NODE)
        self._screen.line(f"  killed {demo_script.SOURCE_NODE} with SIGKILL: {', '.join(killed)}")
        return Captured(name, content, trace_id, cold_s, answers)

    async def _apply(self, document: Document) -> tuple[float, str]:
        applied_at = self._setup.tools.monotonic()
        sent = await objects.send(self._operator, self._setup.tools.telemetry, [document])
        for result in sent.results:
            self._screen.line(f"  applied {result.kind} {result.name}")
        return applied_at, sent.traceparent.split("-")[1]

    async def _pod_of(self, job: Job) -> Target:
        """Return the pod that a Job has made."""
        found = await objects.gather(self._operator, job)
        names = [value.metadata.name for value in found.members if isinstance(value, Pod)]
        if not names:
            raise DemoFailed(f"the pod of Job {job.metadata.name} was deleted")
        return _target("Pod", names[-1])

    async def _placed(self, target: Target, applied_at: float) -> Worker:
        pod = await self._until(target, _placed_pod, START_S, "the pod is placed on a node")
        node = pod.status.node_name
        sockets = self._setup.cluster.sockets(node)
        uid = check_uid(pod.metadata.uid)
        self._screen.line(f"  pod {pod.metadata.name} is on {node}, sockets in {sockets}/{uid[:8]}")
        return Worker(pod, sockets, applied_at)

    async def _warm_up(self, worker: Worker) -> float:
        """Send all sentences; return the seconds from apply to the first answer."""
        cold_s = 0.0
        async with self._connected(worker, START_S) as client:
            for said in self._engine.said:
                line = await client.chat(said)
                if not cold_s:
                    cold_s = self._setup.tools.monotonic() - worker.applied_at
                    self._screen.line(f"  first answer after {formats.span_time(cold_s)}")
                self._show(">", said, line)
        return cold_s

    def _show(self, mark: str, words: str, line: bytes) -> None:
        answer = demo_script.checked_answer(self._engine, line)
        for shown in demo_script.exchange_lines(mark, words, answer):
            self._screen.line(shown)

    async def _captured(self, checkpoint: Target, display: ProgressDisplay) -> SnapshotContent:
        """Show the capture part by part; return its content once it is committed."""
        name = await self._until(checkpoint, _content_name, CAPTURE_S, "the capture begins")
        target = Target(KINDS["SnapshotContent"], None, name)
        content = await self._until(target, _planned, CAPTURE_S, "the capture has a plan")
        plan = {e.part: e.layout.bytes if e.layout else 0 for e in content.status.vector}
        display.begin(content.metadata.uid, plan)
        await self._until(checkpoint, _is_ready, CAPTURE_S, "the checkpoint becomes Ready")
        content = await self._until(target, _planned, CAPTURE_S, "the artifact is committed")
        if content.status.committed is None:
            raise DemoFailed(f"{name} is Ready and names no committed generation")
        for part in content.status.committed.parts:
            display.complete(part.part, part.bytes)
        return content

    async def _ask(self, worker: Worker) -> list[Answer]:
        answers = []
        async with self._connected(worker, START_S) as client:
            for question in self._engine.asked:
                line = await client.ask(question)
                self._show("?", question, line)
                answers.append(Answer(question, line))
        return answers

    async def _restoration(self, captured: Captured) -> Restored:
        async with self._progress("restore") as display:
            applied_at, trace_id = await self._apply(self._restore)
            target = _target("Pod", self._name(self._restore))
            worker = await self._placed(target, applied_at)
            display.begin(await self._restore_of(worker.pod), {})
            async with self._connected(worker, RESTORE_S) as client:
                first, *others = self._engine.asked
                answers = [Answer(first, await client.ask(first))]
                seconds = self._setup.tools.monotonic() - applied_at
                answers += [Answer(q, await client.ask(q)) for q in others]
        self._screen.line(f"  first answer after {formats.span_time(seconds)}")
        if wrong := demo_script.differences(captured.answers, answers):
            raise DemoFailed(f"{len(wrong)} answers differ after the restore", problems=wrong)
        for answer in answers:
            self._show("?", *answer)
        self._screen.line(f"  all {len(answers)} answers are the same, byte for byte", strong=True)
        pod = await self._until(target, _ready_pod, RESTORE_S, "the restored pod becomes Ready")
        return Restored(pod, trace_of(pod) or trace_id, seconds)

    async def _restore_of(self, pod: Pod) -> str:
        """Return the uid of the restore of a pod, which is there before the pod is placed."""
        name = restore_name(pod.metadata.uid)
        restore = await self._operator.get(_target("SnapshotRestore", name))
        if restore is None:
            raise DemoFailed(f"pod {pod.metadata.name} is placed and has no restore {name}")
        return restore.metadata.uid

    async def _refusal(self, captured: Captured) -> Pod | None:
        layouts = [entry.layout for entry in captured.content.status.vector]
        needed = max((layout.bytes for layout in layouts if layout), default=0)
        small = demo_script.small_node(needed)
        if not await self._setup.cluster.add_node(small):
            self._screen.line("  no node can be added here, so none that is too small is tried")
            return None
        # With the suffix at most 63 characters.
        name = f"{self._name(self._restore)[:50]}-too-small"
        value = demo_script.moved_to(self._restore.value, name, small.name)
        await self._apply(Document("the refused pod", value))
        pod = await self._until(
            _target("Pod", name), _failed_pod, REFUSAL_S, "the restore is refused", is_expected=True
        )
        demo_script.check_refusal(pod.status.reason, pod.status.message, needed, small.gpu_memory)
        self._screen.line(f"  refused, as it must be: {pod.status.reason}: {pod.status.message}")
        return pod

    async def _until(
        self,
        target: Target,
        decide: Callable[[Any], T | None],
        within_s: float,
        what: str,
        *,
        is_expected: bool = False,
    ) -> T:
        """Wait for an object; its failure ends the demo unless it is expected."""

        def decided(found: AnyObject | None) -> T | None:
            if found is None:
                return None
            answer = decide(found)
            if answer is None and not is_expected and (why := failure_of(found)):
                raise DemoFailed(f"{what}: {target} failed: {why}")
            return answer

        return await objects.until(self._operator, target, decided, within_s=within_s, what=what)

    @contextlib.asynccontextmanager
    async def _connected(self, worker: Worker, within_s: float) -> AsyncIterator[Conversation]:
        """Connect to a worker once it listens, but stop as soon as its pod has failed."""
        pod = _target("Pod", worker.pod.metadata.name)
        what = f"the worker of {pod} serves"
        calling = asyncio.ensure_future(self._connect(worker))
        failing: asyncio.Future[None] = asyncio.ensure_future(
            self._until(pod, _never, within_s, what)
        )
        try:
            either: list[asyncio.Future[Any]] = [calling, failing]
            # A worker whose pod has failed never listens.
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                await failing
            client = await calling
        finally:
            await end_all(failing, calling)
        try:
            yield client
        finally:
            await client.close()

    async def _connect(self, worker: Worker) -> Conversation:
        uid = worker.pod.metadata.uid
        if self._engine.takes_files:
            files = self._setup.examples.parent.parent
            return await worker_socket.connect_with_files(worker.sockets, uid, files)
        return await worker_socket.connect(worker.sockets, uid)

    @contextlib.asynccontextmanager
    async def _progress(self, phase: str) -> AsyncIterator[ProgressDisplay]:
        """Show progress for the length of the block. Messages that come early are kept."""
        async with self._operator.progress() as messages:
            with self._screen.parts() as parts:
                display = ProgressDisplay(phase, parts.show, self._setup.tools.monotonic)
                task = asyncio.create_task(display.receive(messages))
                try:
                    yield display
                finally:
                    await end_all(task)

    @staticmethod
    def _name(document: Document) -> str:
        return str(document.value["metadata"]["name"])


def _never(_found: AnyObject) -> None:
    """Let a wait end only by a failure or its deadline."""


def _is_gone(found: AnyObject | None) -> bool | None:
    return True if found is None else None


def _target(kind: str, name: str) -> Target:
    return Target(KINDS[kind], NAMESPACE, name)


def _job_name(found: DynamoCheckpoint) -> str | None:
    return found.status.job_name or None


def _begun(found: Job) -> Job | None:
    return found if found.status.active else None


def _placed_pod(found: Pod) -> Pod | None:
    return found if found.status.node_name else None


def _ready_pod(found: Pod) -> Pod | None:
    return found if is_true(found.status.conditions, "Ready") else None


def _failed_pod(found: Pod) -> Pod | None:
    if is_true(found.status.conditions, "Ready"):
        raise DemoFailed(f"pod {found.metadata.name} was restored on a node that is too small")
    return found if found.status.phase == "Failed" else None


def _content_name(found: DynamoCheckpoint) -> str | None:
    return found.status.content_name or None


def _planned(found: SnapshotContent) -> SnapshotContent | None:
    return found if found.status.vector else None


def _is_ready(found: DynamoCheckpoint) -> bool | None:
    return is_true(found.status.conditions, "Ready") or None


async def _sum_up(
    setup: Setup,
    operator: Operator,
    captured: Captured,
    restored: Restored,
    refused: Pod | None,
    *,
    keep: bool,
) -> None:
    """Show times, the artifact, both traces, and how to look at everything."""
    _show_times(setup.screen, captured, restored)
    _show_artifact(setup, captured.content)
    for trace_id, last in ((captured.trace_id, "capture"), (restored.trace_id, "restoration")):
        setup.screen.line()
        show(setup.screen, trace_id, await _spans(operator, trace_id, last))
    names = demo_script.Names(
        captured.checkpoint,
        captured.content.metadata.name,
        restored.pod.metadata.name,
        refused.metadata.name if refused else None,
        captured.trace_id,
    )
    _show_twins(setup, names, keep=keep)
    setup.screen.line()
    how = figures.comparison(captured.cold_s, restored.seconds)
    setup.screen.line(f"  Every answer is the same. The restore was {how}.", strong=True)


def _show_times(screen: Screen, captured: Captured, restored: Restored) -> None:
    cold, restore = formats.span_time(captured.cold_s), formats.span_time(restored.seconds)
    screen.line("  from apply to the first answer:")
    screen.line(f"    cold start {cold}, restore {restore}", strong=True)
    if numbers := figures.capture_text(captured.content):
        screen.line(f"    {numbers}")


def _show_artifact(setup: Setup, content: SnapshotContent) -> None:
    committed = content.status.committed
    if committed is None:
        raise DemoFailed(f"{content.metadata.name} names no committed generation")
    artifacts = setup.cluster.access.artifacts
    folder = Path(content.spec.source.namespace) / content.artifact_uid
    setup.screen.line("  artifact:")
    setup.screen.line(f"    {artifacts / folder / f'gen-{committed.generation}'}")
    setup.screen.line(f"    {committed.bytes} bytes ({formats.size(committed.bytes)})")
    setup.screen.line(f"    {committed.root_digest}")


async def _spans(operator: Operator, trace_id: str, last: str) -> Sequence[SpanRecord]:
    """Read a trace once it is whole up to the span that ends it, or after a while as it is."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(SPANS_S), operator.spans_arriving(trace_id) as changes:
            while True:
                spans = await operator.spans(trace_id)
                known = {span.span_id for span in spans}
                is_whole = all(not s.parent_id or s.parent_id in known for s in spans)
                if is_whole and any(span.name == last for span in spans):
                    return spans
                await changes.wait()
    return await operator.spans(trace_id)


def _show_twins(setup: Setup, names: demo_script.Names, *, keep: bool) -> None:
    screen, access = setup.screen, setup.cluster.access
    screen.line()
    if keep or not access.is_ours:
        screen.line("  Look around, with snapshotctl or with the nats CLI:", strong=True)
    else:
        screen.line("  With KEEP=1 it stays, and two commands each show it:", strong=True)
    for twin in demo_script.twins(names, access):
        screen.line(f"  {twin.what}")
        screen.line(f"    {twin.ours}")
        screen.line(f"    {twin.stock}")
