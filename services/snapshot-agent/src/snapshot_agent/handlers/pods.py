"""Pods as local processes: the orders `run` and `stop`, and the port `Workers`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from snapshot_agent.domain import control
from snapshot_agent.domain.control import ContainerPaths, container_paths
from snapshot_agent.domain.gate import ObservedPod
from snapshot_agent.domain.recovery import PodRecovery, run_row
from snapshot_agent.domain.spec import (
    NodeEnvironment,
    is_apart,
    process_spec,
    shared_out,
    waits,
)
from snapshot_agent.handlers.background import Background, first
from snapshot_agent.ports import Machine, Orders, Process, ResolvedContainer, SetProcess, Worker
from snapshot_api.facts import PodSpec
from snapshot_shared.codec import decode_json, digest, encode_json
from snapshot_shared.courier import OrderContext, Result
from snapshot_shared.errors import (
    Internal,
    InvalidMessage,
    InvalidName,
    OutcomeUnknown,
    SnapbackError,
    SourceExited,
    StalePodReference,
    Superseded,
    failure_of,
)
from snapshot_shared.ids import OrderId, Uid, check_label, check_uid, order_id, owner_of
from snapshot_shared.ledger import Entry, Noted
from snapshot_shared.orders import PodRef, RunOrder, StopOrder
from snapshot_shared.runner import Step
from snapshot_shared.telemetry import current_traceparent

log = logging.getLogger(__name__)

MAX_ATTEMPT = 1_000_000
SIBLINGS_GRACE_S = 5.0
"""The grace period of the other containers when one of their pod has failed, in seconds."""

DISCARD_GRACE_S = 5.0
"""The grace period of a pod that has no object any more, in seconds."""

END_MARGIN_S = 15.0
"""What the end of a pod takes in addition to its grace period, in seconds."""


class StartedContainer(msgspec.Struct, frozen=True, kw_only=True):
    """The note of a started container in the journal, under the key `container:<name>`."""

    pid: int
    start: int
    image: str = ""
    command: list[str] = []
    gpus: list[str] = []


@dataclass
class RunningPod:
    """A pod that was started here. `codes` has the exit codes of the containers that ended.

    `replaced` has an event for each container whose process is being replaced, set when that is
    over.
    """

    order: RunOrder
    entry: Entry
    workers: dict[str, Worker] = field(default_factory=dict)
    origins: dict[str, StartedContainer] = field(default_factory=dict)
    codes: dict[str, int | None] = field(default_factory=dict)
    replaced: dict[str, asyncio.Event] = field(default_factory=dict)

    def add(self, name: str, started: StartedContainer, where: ContainerPaths) -> Worker:
        """Add the process of a container, or replace it."""
        pod = msgspec.structs.replace(self.order.pod, container=name)
        worker = Worker(pod, Process(started.pid, started.start), where, started.gpus)
        self.workers[name], self.origins[name] = worker, started
        return worker


class Pods:
    """The pods of this node, and the orders `run` and `stop`."""

    def __init__(
        self,
        machine: Machine,
        orders: Orders,
        background: Background,
        environment: NodeEnvironment,
        state_dir: Path,
    ) -> None:
        """Keep the files of pods below `state_dir`; `recover` adds those of an earlier agent."""
        self._machine = machine
        self._orders = orders
        self._background = background
        self.environment = environment
        self._state_dir = state_dir
        self._launcher = machine.launcher
        self.known: dict[str, RunningPod] = {}

    def paths(self, pod_uid: str, container: str) -> ContainerPaths:
        """Return the paths of a container."""
        return container_paths(
            self._state_dir, Path(self.environment.socket_dir), pod_uid, container
        )

    def paths_in(self, order: RunOrder, container: str) -> ContainerPaths:
        """Return the paths of a container as its pod is run."""
        where = self.paths(order.pod.uid, container)
        is_placeholder = is_apart(order) and waits(order, container)
        return where._replace(placeholder=where.home / "init") if is_placeholder else where

    async def run(self, order: RunOrder, ctx: OrderContext) -> Result:
        """Start a pod's containers."""
        self._machine.driver(order.driver)
        if self._orders.journal.ledger.entry(order_id("stop", Uid(order.pod.uid))):
            raise Superseded(f"pod {order.pod.name} was stopped already")
        pod = RunningPod(order, ctx.entry)
        steps = _RunSteps(self, self._machine, pod, ctx)
        await ctx.steps(
            "run",
            [
                Step("resolve", steps.resolve, 45.0),
                Step("spawn", steps.spawn, 30.0, undo=steps.undo, replayable=False),
            ],
        )
        await ctx.report("started")
        self._follow(pod)
        return {}

    async def stop(self, order: StopOrder, ctx: OrderContext) -> Result:
        """End a pod's containers and every process that they started."""

        async def terminate() -> None:
            grace = max(0.0, min(order.grace_s, ctx.remaining_s() - END_MARGIN_S))
            await self._stop(order.pod.uid, grace)

        table = [Step("terminate", terminate, order.grace_s + END_MARGIN_S)]
        await ctx.steps("stop", table)
        return {}

    async def _stop(self, pod_uid: str, grace_s: float) -> None:
        await self._orders.cancel(order_id("run", Uid(pod_uid)), MAX_ATTEMPT)
        await self.end_pod(pod_uid, grace_s)
        self.known.pop(pod_uid, None)

    async def all_uids(self) -> list[str]:
        """Return the uids of all pods in memory, in the journal or with a folder here."""
        runs = await self._orders.journal.entries_of("run")
        noted = {owner_of(OrderId(entry.order)) for entry in runs if run_row(entry).may_run}
        folders = await self._launcher.folders(self._state_dir / "pods")
        return sorted({*self.known, *noted, *filter(_is_uid, folders)})

    async def discard(self, pod_uid: str) -> None:
        """End a pod that has no object any more, and remove its folder."""
        await self._stop(pod_uid, DISCARD_GRACE_S)
        await self._launcher.remove(self._state_dir / "pods" / pod_uid)

    def _workers(self, pod_uid: str) -> dict[str, Worker]:
        pod = self.known.get(pod_uid)
        return pod.workers if pod else {}

    def _noted_names(self, pod_uid: str) -> list[str]:
        entry = self._orders.journal.ledger.entry(order_id("run", Uid(pod_uid)))
        return list(entry.notes.get("containers", [])) if entry else []

    async def resolve(self, pod: PodRef) -> ResolvedContainer:
        known = self.known.get(pod.uid)
        if known is None:
            return ResolvedContainer(ObservedPod(pod, None))
        seen = ObservedPod(
            pod,
            known.order.pod,
            containers=tuple(known.workers),
            alive=pod.container in known.workers and pod.container not in known.codes,
            exit_code=known.codes.get(pod.container),
            standby=known.order.standby,
        )
        origin = known.origins.get(pod.container, StartedContainer(pid=0, start=0))
        return ResolvedContainer(
            seen, known.workers.get(pod.container), origin.image, origin.command
        )

    def is_alive(self, process: Process) -> bool:
        return self._launcher.adopt(process)

    async def ended(self, process: Process) -> int | None:
        return await self._launcher.ended(process)

    async def end(self, worker: Worker) -> None:
        await self._launcher.terminate(worker.process, worker.paths, 0.0)

    async def end_pod(self, pod_uid: str, grace_s: float) -> None:
        found = {name: worker.process for name, worker in self._workers(pod_uid).items()}
        home = self._state_dir / "pods" / pod_uid
        where: dict[str, ContainerPaths] = {}
        # Without its journal entry a pod is still found by its folders and environments. These come
        # last: processes of others that hang delay them, and when too many do they are not read.
        for names in (self._launcher.folders, self._launcher.running):
            known = {*found, *self._noted_names(pod_uid), *filter(_is_label, await names(home))}
            added = {name: self.paths(pod_uid, name) for name in known - where.keys()}
            await asyncio.gather(
                *(
                    self._launcher.terminate(found.get(name), place, grace_s)
                    for name, place in added.items()
                )
            )
            where |= added
        for place in where.values():
            await _tidied(self._machine.control.clear(place, control.STATE))
            await _tidied(self._launcher.remove(place.sockets))

    @contextlib.asynccontextmanager
    async def replacing(self, worker: Worker) -> AsyncIterator[SetProcess]:
        pod, name = self.known.get(worker.pod.uid), worker.pod.container
        if pod is None:
            raise SourceExited(f"pod {worker.pod.name} was stopped", pod=worker.pod.uid)
        over = pod.replaced[name] = asyncio.Event()

        async def set_process(process: Process) -> Worker:
            if process == worker.process:
                return worker
            started = msgspec.structs.replace(
                pod.origins[name], pid=process.pid, start=process.start
            )
            await self._note(pod.entry, name, started)
            return pod.add(name, started, worker.paths)

        try:
            yield set_process
        finally:
            del pod.replaced[name]
            over.set()

    async def _note(self, entry: Entry, name: str, started: StartedContainer) -> None:
        """Journal the process of a container."""
        note = Noted(
            order=entry.order,
            attempt=entry.attempt,
            key=f"container:{name}",
            value=msgspec.to_builtins(started),
        )
        await self._orders.journal.append(note)

    def _follow(self, pod: RunningPod) -> None:
        uid = pod.order.pod.uid
        self.known[uid] = pod
        self._background.start(self._live(pod), f"life of pod {uid}")

    async def _live(self, pod: RunningPod) -> None:
        is_reported = any(report.kind == "ready" for report in pod.entry.reports)
        ready = None
        if not is_reported and not pod.order.standby:
            ready = asyncio.create_task(self._report_ready(pod))
        try:
            await self._until_over(pod)
        finally:
            if ready is not None:
                ready.cancel()
                await asyncio.gather(ready, return_exceptions=True)
        for worker in pod.workers.values():
            await _tidied(self._launcher.remove(worker.paths.sockets))
        bad = [name for name, code in pod.codes.items() if code != 0]
        name = bad[0] if bad else next(iter(pod.codes))
        code = pod.codes[name]
        shown = "an unknown exit code" if code is None else f"exit code {code}"
        log_path = pod.workers[name].paths.log
        message = f"container {name} ended with {shown}; its log is {log_path}"
        codes = {key: each for key, each in pod.codes.items() if each is not None}
        await self._orders.report(
            pod.entry, "exited", exit_code=code, exit_codes=codes, message=message
        )

    async def _report_ready(self, pod: RunningPod) -> None:
        appears = self._machine.control.appears
        index, _ = await first(
            *(
                appears(worker.paths, control.READY, lambda _: True)
                for worker in pod.workers.values()
            )
        )
        name = list(pod.workers)[index]
        await self._orders.report(pod.entry, "ready", message=f"container {name} is ready")

    async def _until_over(self, pod: RunningPod) -> None:
        """Wait for the end of every container; when one fails, end the others."""
        waiting = {
            asyncio.create_task(self._container_ended(pod, name)): name for name in pod.workers
        }
        try:
            while waiting:
                done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    await self._ended(pod, waiting.pop(task), task.result())
        finally:
            for task in waiting:
                task.cancel()

    async def _container_ended(self, pod: RunningPod, name: str) -> int | None:
        """Return the exit code of a container, waiting through replacements of its process."""
        while True:
            worker = pod.workers[name]
            code = await self._launcher.ended(worker.process)
            if over := pod.replaced.get(name):
                await over.wait()
            if pod.workers[name] is worker:
                return code

    async def _ended(self, pod: RunningPod, name: str, code: int | None) -> None:
        pod.codes[name] = code
        worker = pod.workers[name]
        await self._launcher.terminate(worker.process, worker.paths, 0.0)
        if code == 0:
            return
        others = [other for key, other in pod.workers.items() if key not in pod.codes]
        await asyncio.gather(
            *(self._launcher.terminate(w.process, w.paths, SIBLINGS_GRACE_S) for w in others)
        )

    async def recover(self, entry: Entry) -> None:
        """Adopt the processes of a run order, or report what became of them."""
        recovery = run_row(entry).recovery
        if recovery is PodRecovery.NOTHING:
            return
        order = decode_json(bytes(entry.accepted.payload), RunOrder)
        pod = RunningPod(order, entry)
        for name in entry.notes.get("containers", []):
            if started := await self._find(entry, name):
                pod.add(name, started, self.paths_in(order, name))
        if recovery is PodRecovery.FOLLOW or await self._finish_start(pod):
            self._follow(pod)

    async def _find(self, entry: Entry, name: str) -> StartedContainer | None:
        """Return the process of a container, journalled or started just before that."""
        noted = entry.notes.get(f"container:{name}")
        if noted is not None:
            found = msgspec.convert(noted, StartedContainer)
            self._launcher.adopt(Process(found.pid, found.start))
            return found
        process = await self._launcher.find(self.paths(owner_of(OrderId(entry.order)), name))
        if process is None or not self._launcher.adopt(process):
            return None
        found = StartedContainer(pid=process.pid, start=process.start)
        await self._note(entry, name, found)
        return found

    async def _finish_start(self, pod: RunningPod) -> bool:
        """Finish an interrupted start; whether every container runs."""
        names = pod.entry.notes["containers"]
        if len(pod.workers) == len(names) and all(
            self._launcher.adopt(worker.process) for worker in pod.workers.values()
        ):
            await self._orders.report(pod.entry, "started")
            return True
        for name in names:
            worker = pod.workers.get(name)
            where = self.paths(pod.order.pod.uid, name)
            await self._launcher.terminate(worker.process if worker else None, where, 0.0)
        error = OutcomeUnknown("the agent was restarted while it started the pod", step="spawn")
        await self._orders.report(pod.entry, "failed", failure=failure_of(error))
        return False


class _RunSteps:
    """The steps of one run order."""

    def __init__(self, pods: Pods, machine: Machine, pod: RunningPod, ctx: OrderContext) -> None:
        self._pods = pods
        self._machine = machine
        self._pod = pod
        self._ctx = ctx
        self._spec: PodSpec | None = None

    async def resolve(self) -> None:
        """Ask for the spec. StalePodReference unless it has the digest of the order."""
        order = self._pod.order
        raw = await self._machine.operator.spec(order.pod)
        found = digest(encode_json(raw))
        if found != order.template_digest:
            raise StalePodReference(
                f"the spec of pod {order.pod.name} has digest {found}, the order says "
                f"{order.template_digest}",
                expected=order.template_digest,
                found=found,
            )
        try:
            self._spec = msgspec.convert(raw, PodSpec)
        except msgspec.ValidationError as error:
            raise InvalidMessage(f"the spec of pod {order.pod.name}: {error}") from error
        names = [container.name for container in self._spec.containers]
        await self._ctx.note("containers", names)

    async def spawn(self) -> None:
        """Start every container; each process is journalled before the next is started."""
        # A second run of this step would start a second worker.
        await self._ctx.note("no-replay", value=True)
        if self._spec is None:
            raise Internal("the pod was not resolved")
        order = self._pod.order
        devices = shared_out(self._spec.containers, order.devices)
        for container in self._spec.containers:
            spec = process_spec(
                container,
                order.pod,
                devices[container.name],
                self._pods.environment,
                self._pods.paths_in(order, container.name),
                standby=waits(order, container.name),
                # The trace of the worker goes on in the span of this step.
                traceparent=current_traceparent(),
                apart=is_apart(order),
            )
            self._machine.control.create(spec.paths)
            process = await self._machine.launcher.spawn(spec)
            started = StartedContainer(
                pid=process.pid,
                start=process.start,
                image=container.image,
                command=container.command,
                gpus=[device.uuid for device in devices[container.name]],
            )
            self._pod.add(container.name, started, spec.paths)
            await self._ctx.note(f"container:{container.name}", msgspec.to_builtins(started))

    async def undo(self) -> None:
        """End what was started, journalled or not."""
        for container in self._spec.containers if self._spec else ():
            worker = self._pod.workers.get(container.name)
            where = self._pods.paths(self._pod.order.pod.uid, container.name)
            await self._machine.launcher.terminate(worker.process if worker else None, where, 0.0)
            await _tidied(self._machine.launcher.remove(where.sockets))


async def _tidied(work: Awaitable[None]) -> None:
    """Await a removal. Its failure, which a worker can cause, is logged and nothing more."""
    try:
        await work
    except (SnapbackError, OSError) as error:
        log.warning("a pod that has ended is not tidied up: %s", error)


def _is_uid(name: str) -> bool:
    return _passes(check_uid, name)


def _is_label(name: str) -> bool:
    return _passes(check_label, name)


def _passes(check: Callable[[str], str], name: str) -> bool:
    try:
        check(name)
    except InvalidName:
        return False
    return True
