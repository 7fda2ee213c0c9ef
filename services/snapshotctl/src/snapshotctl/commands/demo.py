"""The command demo: capture a live worker, lose its node, restore it on another."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import typer

from snapshot_api import figures
from snapshot_api.facts import Job, Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import is_true
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import restore_name
from snapshot_shared.errors import NotFound
from snapshot_shared.spans import SpanRecord
from snapshot_shared.tasks import end_all
from snapshotctl import objects
from snapshotctl.adapters import machine, worker_socket
from snapshotctl.command import WorkerDriver, command, new_app
from snapshotctl.commands.trace import show
from snapshotctl.domain import criu_host, demo_engines, demo_script, demo_story, formats
from snapshotctl.domain.criu_host import DRIVERS, CriuHost
from snapshotctl.domain.demo_engines import Engine
from snapshotctl.domain.demo_script import Answer
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import DemoFailed
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Conversation, DemoCluster, Operator, Screen
from snapshotctl.tools import Connect, Tools
from snapshotctl.views.progress import PartProgress, ProgressDisplay
from snapshotctl.views.related import trace_of
from snapshotctl.views.state import failure_of

T = TypeVar("T")

NAMESPACE = "default"
START_S = 300.0
TRAINING_S_PER_MIB = 0.6
"""Five times what a machine with two cores needs."""
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
    size_mib: int
    variables: Mapping[str, str]
    keeps: bool
    """Whether the cluster goes on afterwards."""

    @property
    def screen(self) -> Screen:
        """The terminal."""
        return self.tools.screen

    def detail(self, lines: Sequence[str]) -> None:
        """Print details of a step."""
        for line in lines:
            self.screen.line(line)


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


class Played(NamedTuple):
    """What a demo has shown; `refused` is the reason where a node was too small, or empty."""

    captured: Captured
    restored: Restored
    refused: str


class Worker(NamedTuple):
    """A pod of the demo that serves: where it is, and when it was applied (monotonic s)."""

    pod: Pod
    sockets: Path
    applied_at: float


@command(
    app,
    "snapshotctl demo",
    "snapshotctl demo --size-mib 2048 --keep",
    "snapshotctl demo --trace",
    "snapshotctl demo --engine onnx",
    "sudo .venv/bin/snapshotctl demo --engine vllm --driver criu",
    "sudo .venv/bin/snapshotctl demo --driver criu",
)
async def demo(  # noqa: PLR0913, PLR0917 - its options, each of which a person may want
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
        typer.Option("--engine", metavar="ENGINE", help="text, onnx (a trained model) or vllm."),
    ] = "text",
    warm_up: Annotated[
        str,
        typer.Option(
            "--warm-up",
            metavar="HOW",
            envvar="WARM_UP",
            help="full, 20 s of training or more on a busy machine, or short.",
        ),
    ] = "full",
    trace: Annotated[
        bool, typer.Option("--trace", help="Show both traces: where the time went.")
    ] = False,
) -> None:
    """Capture a worker, lose its node, restore it on another.

    Everything runs on this machine, in a cluster of its own that is gone afterwards. The worker is
    a small language model that is trained when it starts. Its answers before and after have to be
    the same, byte for byte.

    With --on nothing is started. The cluster is that of --server or NATS_URL; FOLDER/node-1 and
    FOLDER/node-2 are the folders of the sockets of its nodes, and the processes of node-1, which
    the demo kills, have to be visible here.

    With --driver criu the worker does not save its own state: its process goes on in another pod.

    With --engine onnx the worker is onnxruntime with a trained model, which says what type 20 files
    of the checkout have; `make engines` installs it. It is not for --on.

    With --engine vllm, which needs --driver criu, it is vLLM as it is, on CPUs, with a small model
    of random weights; `make engines ENGINE=vllm` installs it. What is compared are token ids.
    """
    host = machine.look_for_criu() if criu_host.check_driver(driver) else None
    shown_engine = demo_engines.engine_of(engine, driver, is_started_here=on is None)
    size = demo_engines.check_size(shown_engine, size_mib)
    variables = demo_engines.variables(shown_engine, size, warm_up)
    if shown_engine.asks == "completions":
        variables[demo_engines.PORT_VARIABLE] = str(machine.free_port())
    examples = machine.examples_folder()
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
        size_mib=size,
        variables=variables,
        keeps=keep or on is not None,
    )
    if on is None:
        _check_machine(setup, host)
    try:
        played = await _run(setup, shows_traces=trace)
    except (asyncio.CancelledError, BrokenPipeError):
        # Ctrl-C ends the reader of a pipe as well, and perhaps before us.
        await _leave_nothing(setup)
        raise
    except BaseException:
        with contextlib.suppress(NotFound):
            # Without a record nothing was started, and the first error is the one that counts.
            await _stop_and_keep_logs(setup)
        raise
    await _end(setup, played)


async def _leave_nothing(setup: Setup) -> None:
    with contextlib.suppress(NotFound):
        # Without a record nothing was started.
        await setup.cluster.stop(purge=True)
        if setup.cluster.access.is_ours:
            setup.screen.note("everything that the demo has started is ended and removed")


async def _end(setup: Setup, played: Played) -> None:
    if setup.keeps:
        setup.cluster.keep()
        pod = played.restored.pod.metadata.name
        setup.detail(demo_story.look_around(setup.cluster.access, pod, setup.engine))
    else:
        await setup.cluster.stop(purge=True)
        setup.screen.line(demo_story.REMOVED)
        setup.screen.line(demo_story.WITHOUT_KEEP)
    if not setup.screen.wants_table:
        setup.screen.value(_result(setup, played))


def _result(setup: Setup, played: Played) -> dict[str, Any]:
    """Return what a program reads of a demo."""
    captured, restored, refused = played
    committed = captured.content.status.committed
    times = figures.capture_times(captured.content.status)
    return {
        "cluster": setup.cluster.access.name,
        "checkpoint": captured.checkpoint,
        "pod": restored.pod.metadata.name,
        "coldSeconds": round(captured.cold_s, 3),
        "restoreSeconds": round(restored.seconds, 3),
        "pausedSeconds": times.paused_s,
        "capturedSeconds": times.captured_s,
        "capturedBytes": committed.bytes if committed else 0,
        "rootDigest": committed.root_digest if committed else "",
        "answers": [
            {"question": asked, "answer": said}
            for asked, said in _shown(setup.engine, captured.answers)
        ],
        "refused": refused,
    }


def _shown(engine: Engine, answers: Sequence[Answer]) -> list[tuple[str, str]]:
    return [(a.question, demo_script.checked_answer(engine, a.line)) for a in answers]


async def _stop_and_keep_logs(setup: Setup) -> None:
    await setup.cluster.stop(purge=False)
    access = setup.cluster.access
    if access.is_ours:
        setup.screen.note(f"the logs are kept in {access.logs}")
        setup.screen.note(access.end)
    else:
        setup.screen.note(f"the reason may stand in {access.logs}")


async def _run(setup: Setup, *, shows_traces: bool) -> Played:
    screen, cluster = setup.screen, setup.cluster
    screen.line(demo_story.START, strong=True)
    began = setup.tools.monotonic()
    await _meanwhile(setup, "starting", cluster.start(demo_script.nodes(setup.size_mib)))
    if cluster.access.is_ours:
        setup.detail(demo_story.started(cluster.access.name, setup.tools.monotonic() - began))
    else:
        setup.detail(demo_story.wrapped(demo_story.STARTED_ELSEWHERE))
    async with setup.connect() as operator:
        played = await _Demo(setup, operator).run()
        if shows_traces:
            await _show_traces(setup, operator, played)
    captured, restored, _ = played
    screen.line(demo_story.conclusion(captured.cold_s, restored.seconds), strong=True)
    return played


async def _show_traces(setup: Setup, operator: Operator, played: Played) -> None:
    captured, restored, _ = played
    for trace_id, last in ((captured.trace_id, "capture"), (restored.trace_id, "restoration")):
        setup.screen.line()
        show(setup.screen, trace_id, await _spans(operator, trace_id, last))
    setup.screen.line()


def _check_machine(setup: Setup, host: CriuHost | None) -> None:
    """Raise Unready with everything that is missing, each with its fix."""
    states = setup.tools.folders.states
    seen = machine.look(states, setup.examples, setup.engine)
    found = demo_script.checks(seen, setup.engine, setup.size_mib)
    found += criu_host.checks(host) if host else []
    criu_host.require(found, "the demo")


async def _meanwhile(
    setup: Setup, what: str, work: Coroutine[Any, Any, T], moved: Moved | None = None
) -> T:
    """Do work, and show now and then for how long already, and how far it is."""
    began = setup.tools.monotonic()
    task = asyncio.ensure_future(work)
    try:
        with setup.screen.activity() as activity:
            while not (await asyncio.wait([task], timeout=activity.interval_s))[0]:
                lasted = setup.tools.monotonic() - began
                activity.show(demo_story.waiting(what, lasted, moved.share if moved else ""))
    finally:
        await end_all(task)
    return task.result()


class Moved:
    """How far a capture or a restore is."""

    def __init__(self) -> None:
        """Know of no part yet."""
        self._parts: dict[str, PartProgress] = {}

    def show(self, part: PartProgress) -> None:
        """Take in one part as it is now."""
        self._parts[part.part] = part

    @property
    def share(self) -> str:
        """The bytes of all parts that are done, of all that there are; empty before any moved."""
        done = sum(max(0, part.done) for part in self._parts.values())
        total = sum(part.total for part in self._parts.values())
        return f"{formats.size(done)} of {formats.size(total)}" if done else ""


class _Demo:
    """Parts 2 to 5, on a cluster that is up."""

    def __init__(self, setup: Setup, operator: Operator) -> None:
        self._setup = setup
        self._screen = setup.screen
        self._operator = operator
        self._engine = setup.engine
        self._checkpoint = self._example(setup.engine.checkpoint)
        self._restore = self._example(setup.engine.restore)

    def _example(self, name: str) -> Document:
        documents = self._setup.tools.documents(self._setup.examples / name)
        if len(documents) != 1:
            raise DemoFailed(f"{name} holds {len(documents)} documents, one was expected")
        [found] = documents
        value = demo_script.with_variables(found.value, self._setup.variables)
        return Document(found.where, demo_script.driven(value, self._setup.driver))

    async def run(self) -> Played:
        """Capture, lose the node, restore, see one restore refused."""
        await self._remove_earlier()
        captured = await self._capture()
        self._screen.line(demo_story.RESTORE, strong=True)
        restored = await self._restoration(captured)
        refused = await self._refusal(captured)
        return Played(captured, restored, refused)

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
            self._screen.note(f"removing {target} of an earlier demo")
            await self._operator.delete(target, found.metadata.uid)
            await objects.until(
                self._operator, target, _is_gone, within_s=REMOVAL_S, what=f"{target} is removed"
            )

    async def _capture(self) -> Captured:
        self._screen.line(demo_story.cold_start(self._engine, self._setup.size_mib), strong=True)
        name = self._name(self._checkpoint)
        checkpoint = _target("DynamoCheckpoint", name)
        applied_at, trace_id = await self._apply(self._checkpoint)
        job = await self._until(checkpoint, _job_name, START_S, "the checkpoint gets its Job")
        begun = await self._until(_target("Job", job), _begun, START_S, "the Job gets its pod")
        worker = await self._placed(await self._pod_of(begun), applied_at)
        moved = Moved()
        async with self._progress("capture", moved) as display:
            cold_s = await self._warm_up(worker)
            self._screen.line(demo_story.CAPTURE, strong=True)
            content = await _meanwhile(
                self._setup, "capturing", self._captured(checkpoint, display), moved
            )
        self._setup.detail(demo_story.captured(content))
        answers = await self._ask(worker)
        self._show(answers)
        killed = await self._setup.cluster.kill_node(demo_script.SOURCE_NODE)
        self._screen.line(demo_story.lost(killed), strong=True)
        return Captured(name, content, trace_id, cold_s, answers)

    async def _apply(self, document: Document) -> tuple[float, str]:
        applied_at = self._setup.tools.monotonic()
        sent = await objects.send(self._operator, self._setup.tools.telemetry, [document])
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
        return Worker(pod, self._setup.cluster.sockets(node), applied_at)

    async def _warm_up(self, worker: Worker) -> float:
        """Ask one question, give what is to be learned; return the seconds to the first answer."""
        async with contextlib.AsyncExitStack() as stack:
            first = self._engine.asked[0]

            async def served() -> tuple[Conversation, bytes]:
                limit = START_S + TRAINING_S_PER_MIB * self._setup.size_mib
                client = await stack.enter_async_context(self._connected(worker, limit))
                return client, await client.ask(first)

            client, line = await _meanwhile(self._setup, "the worker warms up", served())
            cold_s = self._setup.tools.monotonic() - worker.applied_at
            self._setup.detail(demo_story.cold(cold_s))
            self._show([Answer(first, line)])
            for said in self._engine.said:
                demo_script.checked_answer(self._engine, await client.chat(said))
                self._setup.detail(demo_story.learned(said))
        return cold_s

    def _show(self, answers: Sequence[Answer]) -> None:
        self._setup.detail(demo_story.answers(_shown(self._engine, answers)))

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
        async with self._connected(worker, START_S) as client:
            return [Answer(asked, await client.ask(asked)) for asked in self._engine.asked]

    async def _restoration(self, captured: Captured) -> Restored:
        moved = Moved()
        target = _target("Pod", self._name(self._restore))
        async with (
            self._progress("restore", moved) as display,
            contextlib.AsyncExitStack() as stack,
        ):
            applied_at, trace_id = await self._apply(self._restore)
            worker = await self._placed(target, applied_at)
            display.begin(await self._restore_of(worker.pod), {})
            first, *others = self._engine.asked

            async def served() -> tuple[Conversation, bytes]:
                client = await stack.enter_async_context(self._connected(worker, RESTORE_S))
                return client, await client.ask(first)

            client, line = await _meanwhile(self._setup, "restoring", served(), moved)
            seconds = self._setup.tools.monotonic() - applied_at
            answers = [Answer(first, line), *[Answer(q, await client.ask(q)) for q in others]]
        self._setup.detail(demo_story.restored(seconds))
        if wrong := demo_script.differences(captured.answers, answers):
            raise DemoFailed(f"{len(wrong)} answers differ after the restore", problems=wrong)
        self._show(answers)
        self._setup.detail(demo_story.same(len(answers)))
        pod = await self._until(target, _ready_pod, RESTORE_S, "the restored pod becomes Ready")
        return Restored(pod, trace_of(pod) or trace_id, seconds)

    async def _restore_of(self, pod: Pod) -> str:
        """Return the uid of the restore of a pod, which is there before the pod is placed."""
        name = restore_name(pod.metadata.uid)
        restore = await self._operator.get(_target("SnapshotRestore", name))
        if restore is None:
            raise DemoFailed(f"pod {pod.metadata.name} is placed and has no restore {name}")
        return restore.metadata.uid

    async def _refusal(self, captured: Captured) -> str:
        layouts = [entry.layout for entry in captured.content.status.vector]
        needed = max((layout.bytes for layout in layouts if layout), default=0)
        if not needed:
            # It has nothing in GPU memory, so no node is too small for it.
            return ""
        small = demo_script.small_node(needed)
        if not await self._setup.cluster.add_node(small):
            self._setup.detail(demo_story.wrapped(demo_story.NO_SMALL_NODE))
            return ""
        # With the suffix at most 63 characters.
        name = f"{self._name(self._restore)[:50]}-too-small"
        value = demo_script.moved_to(self._restore.value, name, small.name)
        await self._apply(Document("the refused pod", value))
        pod = await self._until(
            _target("Pod", name), _failed_pod, REFUSAL_S, "the restore is refused", is_expected=True
        )
        demo_script.check_refusal(pod.status.reason, pod.status.message, needed, small.gpu_memory)
        self._setup.detail(demo_story.refused(pod.status.reason))
        return pod.status.reason

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
        if self._engine.asks == "completions":
            # It imports aiohttp, which no other command needs.
            from snapshotctl.adapters import worker_http  # noqa: PLC0415

            return await worker_http.connect(self._setup.variables[demo_engines.PORT_VARIABLE])
        if self._engine.asks == "files":
            files = self._setup.examples.parent.parent
            return await worker_socket.connect_with_files(worker.sockets, uid, files)
        return await worker_socket.connect(worker.sockets, uid)

    @contextlib.asynccontextmanager
    async def _progress(self, phase: str, moved: Moved) -> AsyncIterator[ProgressDisplay]:
        """Follow progress for the length of the block. Messages that come early are kept."""
        async with self._operator.progress() as messages:
            display = ProgressDisplay(phase, moved.show, self._setup.tools.monotonic)
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
