"""The demo: capture a live worker, lose its node, restore it on another, compare the answers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from snapshot_shared.errors import NotFound
from snapshot_shared.ids import check_uid
from snapshot_shared.objects import (
    KINDS,
    AnyObject,
    DynamoCheckpoint,
    Job,
    Pod,
    SnapshotContent,
    is_true,
    restore_name,
)
from snapshot_shared.tasks import end_all
from snapshotctl.domain import demo, formats, preflight
from snapshotctl.domain.demo import Answer
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import DemoFailed, Unready
from snapshotctl.domain.preflight import Machine
from snapshotctl.domain.targets import Target
from snapshotctl.domain.waiting import failure_of
from snapshotctl.handlers import looking
from snapshotctl.handlers.following import Following
from snapshotctl.handlers.objects import send
from snapshotctl.handlers.summary import Captured, Restored, Stage, sum_up
from snapshotctl.handlers.traces import trace_of
from snapshotctl.handlers.watching import until
from snapshotctl.ports import Conversation, Operator, Screen

T = TypeVar("T")

NAMESPACE = "default"
START_S = 300.0
CAPTURE_S = 600.0
RESTORE_S = 600.0
REFUSAL_S = 60.0
REMOVAL_S = 60.0


class Worker(NamedTuple):
    """A pod of the demo that serves: where it is, and when it was asked for (monotonic s)."""

    pod: Pod
    sockets: Path
    applied_at: float


async def run(stage: Stage, *, size_mib: int, keep: bool) -> None:
    """Play all six parts. DemoFailed and the errors of its steps say what was lost and where."""
    title(stage.screen, 1, "Preflight")
    if stage.machine is None:
        stage.screen.line("  nothing is started here: the cluster runs already")
    else:
        check_machine(stage.screen, stage.machine, size_mib)
    try:
        await _play(stage, size_mib, keep=keep)
    except (asyncio.CancelledError, BrokenPipeError):
        # Ctrl-C ends the reader of a pipe as well, and perhaps before us.
        await stage.cluster.stop(purge=True)
        raise
    except BaseException:
        with contextlib.suppress(NotFound):
            # Without a record nothing was started, and the first error is the one that counts.
            await _stop_and_keep_logs(stage)
        raise
    handle = stage.cluster.handle
    if keep or not handle.is_ours:
        stage.cluster.keep()
        if handle.page:
            stage.screen.line(f"  page {handle.page}")
        stage.screen.line(f"  {handle.end}")
    else:
        await stage.cluster.stop(purge=True)
        stage.screen.line("  Everything is ended and removed.")


async def _stop_and_keep_logs(stage: Stage) -> None:
    await stage.cluster.stop(purge=False)
    handle = stage.cluster.handle
    if handle.is_ours:
        stage.screen.note(f"the logs are kept in {handle.logs}")
        stage.screen.note(handle.end)
    else:
        stage.screen.note(f"the reason may stand in {handle.logs}")


async def _play(stage: Stage, size_mib: int, *, keep: bool) -> None:
    title(stage.screen, 2, "A cluster: nats-server, the operator, two nodes")
    await stage.cluster.start(demo.nodes(size_mib))
    if stage.cluster.handle.is_ours:
        stage.screen.line(f"  logs: {stage.cluster.handle.logs}")
    async with stage.connect() as operator:
        await Play(stage, operator, size_mib, keep=keep).play()


def title(screen: Screen, number: int, text: str) -> None:
    """Begin a part of the demo."""
    screen.line()
    screen.line(f"{number}/6 {text}", strong=True)


def check_machine(screen: Screen, machine: Machine, size_mib: int) -> None:
    """Unready lists everything that is missing, each with its fix."""
    found = preflight.checks(machine, size_mib)
    for check in found:
        screen.line(f"  {'ok     ' if check.ok else 'MISSING'} {check.what}")
    missing = [f"{check.what}: {check.fix}" for check in found if not check.ok]
    if missing:
        raise Unready(
            f"this machine lacks {len(missing)} of the things that the demo needs",
            next_step="; ".join(check.fix for check in found if not check.ok),
            problems=missing,
        )


class Play:
    """Parts 3 to 6, on a cluster that is up."""

    def __init__(self, stage: Stage, operator: Operator, size_mib: int, *, keep: bool) -> None:
        """Load the two examples and give them their size."""
        self._stage = stage
        self._screen = stage.screen
        self._operator = operator
        self._size_mib = size_mib
        self._keep = keep
        self._checkpoint = self._example("checkpoint.yaml")
        self._restore = self._example("restore.yaml")

    def _example(self, name: str) -> Document:
        documents = self._stage.documents(self._stage.examples / name)
        if len(documents) != 1:
            raise DemoFailed(f"{name} holds {len(documents)} documents, one was expected")
        [found] = documents
        return Document(found.where, demo.sized(found.value, self._size_mib))

    async def play(self) -> None:
        """Capture, lose the node, restore, be refused, sum up."""
        await self._remove_earlier()
        captured = await self._capture()
        title(self._screen, 5, "Restore on the other node")
        restored = await self._restoration(captured)
        refused = await self._refusal(captured)
        title(self._screen, 6, "What was shown")
        await sum_up(self._stage, self._operator, captured, restored, refused, keep=self._keep)

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
            await until(
                self._operator, target, _gone, within_s=REMOVAL_S, what=f"{target} is removed"
            )

    # The first half.

    async def _capture(self) -> Captured:
        title(self._screen, 3, "A live worker on node-1")
        name = self._name(self._checkpoint)
        checkpoint = _target("DynamoCheckpoint", name)
        applied_at, trace_id = await self._apply(self._checkpoint)
        job = await self._until(checkpoint, _job_name, START_S, "the checkpoint gets its Job")
        begun = await self._until(_target("Job", job), _begun, START_S, "the Job gets its pod")
        worker = await self._placed(await self._pod_of(begun), applied_at)
        async with self._progress("capture") as follow:
            cold_s = await self._warm_up(worker)
            title(self._screen, 4, "Capture it while it lives, then lose its node")
            content = await self._captured(checkpoint, follow)
        answers = await self._ask(worker)
        killed = await self._stage.cluster.kill_node(demo.SOURCE_NODE)
        self._screen.line(f"  killed {demo.SOURCE_NODE} with SIGKILL: {', '.join(killed)}")
        return Captured(name, content, trace_id, cold_s, answers)

    async def _apply(self, document: Document) -> tuple[float, str]:
        applied_at = self._stage.monotonic()
        sent = await send(self._operator, self._stage.telemetry, [document])
        for result in sent.results:
            self._screen.line(f"  applied {result.kind} {result.name}")
        return applied_at, sent.traceparent.split("-")[1]

    async def _pod_of(self, job: Job) -> Target:
        """Return the pod that a Job has made."""
        found = await looking.gather(self._operator, job)
        names = [value.metadata.name for value in found.members if isinstance(value, Pod)]
        if not names:
            raise DemoFailed(f"the pod of Job {job.metadata.name} was deleted")
        return _target("Pod", names[-1])

    async def _placed(self, target: Target, applied_at: float) -> Worker:
        pod = await self._until(target, _placed_pod, START_S, "the pod is placed on a node")
        node = pod.status.node_name
        sockets = self._stage.cluster.sockets(node)
        uid = check_uid(pod.metadata.uid)
        self._screen.line(f"  pod {pod.metadata.name} is on {node}, sockets in {sockets}/{uid[:8]}")
        return Worker(pod, sockets, applied_at)

    async def _warm_up(self, worker: Worker) -> float:
        """Say everything that there is to say; give the time from apply to the first answer."""
        cold_s = 0.0
        async with self._talking(worker, START_S) as conversation:
            for said in demo.SAID:
                answer = demo.checked_answer(await conversation.chat(said))
                if not cold_s:
                    cold_s = self._stage.monotonic() - worker.applied_at
                    self._screen.line(f"  first answer after {formats.span_time(cold_s)}")
                self._screen.line(f"  > {said}")
                self._screen.line(f"    {answer}")
        return cold_s

    async def _captured(self, checkpoint: Target, follow: Following) -> SnapshotContent:
        """Follow the capture to its end, part by part."""
        name = await self._until(checkpoint, _content_name, CAPTURE_S, "the capture begins")
        target = Target(KINDS["SnapshotContent"], None, name)
        content = await self._until(target, _planned, CAPTURE_S, "the capture has a plan")
        plan = {e.part: e.layout.bytes if e.layout else 0 for e in content.status.vector}
        follow.begin(content.metadata.uid, plan)
        await self._until(checkpoint, _is_ready, CAPTURE_S, "the checkpoint becomes Ready")
        content = await self._until(target, _planned, CAPTURE_S, "the artifact is committed")
        if content.status.committed is None:
            raise DemoFailed(f"{name} is Ready and names no committed generation")
        for part in content.status.committed.parts:
            follow.settled(part.part, part.bytes)
        return content

    async def _ask(self, worker: Worker) -> list[Answer]:
        answers = []
        async with self._talking(worker, START_S) as conversation:
            for question in demo.ASKED:
                line = await conversation.ask(question)
                self._screen.line(f"  ? {question}")
                self._screen.line(f"    {demo.checked_answer(line)}")
                answers.append(Answer(question, line))
        return answers

    # The second half.

    async def _restoration(self, captured: Captured) -> Restored:
        async with self._progress("restore") as follow:
            applied_at, trace_id = await self._apply(self._restore)
            target = _target("Pod", self._name(self._restore))
            worker = await self._placed(target, applied_at)
            follow.begin(await self._restore_of(worker.pod), {})
            async with self._talking(worker, RESTORE_S) as conversation:
                line = await conversation.ask(demo.ASKED[0])
                seconds = self._stage.monotonic() - applied_at
                answers = [Answer(demo.ASKED[0], line)]
                answers += [Answer(q, await conversation.ask(q)) for q in demo.ASKED[1:]]
        self._screen.line(f"  first answer after {formats.span_time(seconds)}")
        if wrong := demo.differences(captured.answers, answers):
            raise DemoFailed(f"{len(wrong)} answers differ after the restore", problems=wrong)
        for answer in answers:
            self._screen.line(f"  ? {answer.question}")
            self._screen.line(f"    {demo.checked_answer(answer.line)}")
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
        small = demo.small_node(self._size_mib)
        if not await self._stage.cluster.add_node(small):
            self._screen.line("  no node can be added here, so none that is too small is tried")
            return None
        name = f"{self._name(self._restore)[:50]}-too-small"
        value = demo.moved_to(self._restore.value, name, small.name)
        await self._apply(Document("the refused pod", value))
        pod = await self._until(
            _target("Pod", name), _failed_pod, REFUSAL_S, "the restore is refused", is_expected=True
        )
        layouts = [entry.layout for entry in captured.content.status.vector]
        needed = max((layout.bytes for layout in layouts if layout), default=0)
        demo.check_refusal(pod.status.reason, pod.status.message, needed, small.gpu_memory)
        self._screen.line(f"  refused, as it must be: {pod.status.reason}: {pod.status.message}")
        return pod

    # What both need.

    async def _until(
        self,
        target: Target,
        decide: Callable[[Any], T | None],
        within_s: float,
        what: str,
        *,
        is_expected: bool = False,
    ) -> T:
        """Wait for an object; one that fails ends the demo unless that is what is wanted."""

        def decided(found: AnyObject | None) -> T | None:
            if found is None:
                return None
            answer = decide(found)
            if answer is None and not is_expected and (why := failure_of(found)):
                raise DemoFailed(f"{what}: {target} failed: {why}")
            return answer

        return await until(self._operator, target, decided, within_s=within_s, what=what)

    @contextlib.asynccontextmanager
    async def _talking(self, worker: Worker, within_s: float) -> AsyncIterator[Conversation]:
        """Talk to a worker once it listens, but give up as soon as its pod has failed."""
        pod = _target("Pod", worker.pod.metadata.name)
        what = f"the worker of {pod} serves"
        calling = asyncio.ensure_future(
            self._stage.workers.call(worker.sockets, worker.pod.metadata.uid)
        )
        failing: asyncio.Future[None] = asyncio.ensure_future(
            self._until(pod, _never, within_s, what)
        )
        try:
            either: list[asyncio.Future[Any]] = [calling, failing]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not calling.done():
                await failing
            conversation = await calling
        finally:
            await end_all(failing, calling)
        try:
            yield conversation
        finally:
            await conversation.close()

    @contextlib.asynccontextmanager
    async def _progress(self, phase: str) -> AsyncIterator[Following]:
        """Show progress for the length of the block. Messages that come early are kept."""
        async with self._operator.progress() as messages:
            with self._screen.parts() as parts:
                follow = Following(phase, parts, self._stage.monotonic)
                task = asyncio.create_task(follow.listen(messages))
                try:
                    yield follow
                finally:
                    await end_all(task)

    @staticmethod
    def _name(document: Document) -> str:
        return str(document.value["metadata"]["name"])


def _never(_found: AnyObject) -> None:
    """Let a wait end only by a failure or its deadline."""


def _gone(found: AnyObject | None) -> bool | None:
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
