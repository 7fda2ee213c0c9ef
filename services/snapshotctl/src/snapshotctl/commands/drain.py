"""The command drain: the labelled pods of a node are captured there and restored elsewhere."""

from __future__ import annotations

import asyncio
from typing import Annotated, Any, Literal, NamedTuple

import typer

from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_shared.errors import DeadlineExceeded, RemoteFailure, SnapbackError
from snapshot_shared.tasks import undisturbed
from snapshotctl import objects
from snapshotctl.adapters import machine
from snapshotctl.command import Node, Timeout, command, new_app
from snapshotctl.commands.cordon import mark
from snapshotctl.commands.watch import Display, until_ended
from snapshotctl.domain import draining, formats, targets
from snapshotctl.domain.documents import Document
from snapshotctl.domain.draining import Candidate
from snapshotctl.domain.exits import NotDrained, WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator, Parts
from snapshotctl.tools import Tools
from snapshotctl.views.state import ObjectState, failure_of

SETTLES_S = 60.0
"""How long the end of a capture may take after its deadline, in seconds."""

LONGEST_S = 86_400
"""The longest deadline that a snapshot may have, in seconds."""

State = Literal["moved", "failed", "late", "left"]

app = new_app()


class Outcome(NamedTuple):
    """What became of a pod of the node: `moved`, `failed`, `late` or `left`, and why."""

    pod: Candidate
    state: State
    why: str = ""
    next_step: str = ""
    node: str = ""

    @property
    def line(self) -> str:
        """Why the pod is not moved, and what to do."""
        step = f". Next: {self.next_step}" if self.next_step else ""
        return f"{self.pod.name}: {self.why}{step}"


@command(
    app,
    "snapshotctl drain node-1 --capture",
    "snapshotctl drain node-1 --capture --deadline 110s --parallel 8",
    "snapshotctl drain node-1 --capture --dry-run",
)
async def drain(
    tools: Tools,
    node: Node,
    capture: Annotated[
        bool, typer.Option("--capture", help="Capture what is labelled for it. Required.")
    ] = False,
    deadline: Annotated[
        str | None,
        typer.Option(
            "--deadline", metavar="TIME", help="When the node goes: captures end by then, as in 2m."
        ),
    ] = None,
    parallel: Annotated[
        int, typer.Option("--parallel", min=1, max=64, help="Captures at a time.")
    ] = 4,
    timeout: Timeout = "1h",
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say what would be done, and do nothing.")
    ] = False,
) -> None:
    """Capture the pods of a node that are labelled for it, and restore them elsewhere.

    The node is cordoned. Each pod there with the label nvidia.com/capture-on-drain=true is captured
    and ended, restored on another node as a pod of a new name, and deleted. Every other pod is
    named and left alone, and then the exit code is 1. A pod whose capture fails, or is not done by
    the deadline, goes on. To go on with a drain that was interrupted, repeat it.
    """
    name = targets.node_named(node)
    if not capture:
        without = (
            f"snapshotctl cordon {name}" if tools.kubernetes is None else f"kubectl drain {name}"
        )
        raise WrongArguments(
            "a drain without --capture ends workers without their state",
            next_step=f"snapshotctl drain {name} --capture; to do without: {without}",
        )
    within_s = formats.parse_duration(timeout)
    captured_s = min(within_s, formats.parse_duration(deadline) if deadline else within_s)
    began = tools.monotonic()
    async with tools.operator(patiently=True) as operator:
        await objects.existing(operator, Target(KINDS["Node"], None, name))
        if not dry_run:
            changed = await mark(operator, name, unschedulable=True)
            _say(tools, f"node/{name} {'cordoned' if changed else 'already cordoned'}")
        found = await _candidates(operator, name)
        if dry_run:
            for each in found:
                _show_plan(tools, each)
            return
        with tools.screen.parts() as parts:
            work = _Drain(tools, operator, parts, began + captured_s, began + within_s, parallel)
            try:
                # So that an interrupt waits for all: each aborts its capture.
                ended = await asyncio.gather(*map(work.outcome, found), return_exceptions=True)
            except asyncio.CancelledError:
                tools.screen.note(
                    f"{name} stays cordoned; go on: snapshotctl drain {name} --capture; "
                    f"or let it take work again: snapshotctl uncordon {name}"
                )
                raise
    outcomes = []
    for became in ended:
        if isinstance(became, BaseException):
            raise became
        outcomes.append(became)
    _end(tools, name, outcomes, deadline or timeout)


async def _candidates(operator: Operator, node: str) -> list[Candidate]:
    """Return the pods of a node; of those that have ended, the ones that a drain has captured."""
    pods = [pod for pod in await operator.all_of(KINDS["Pod"], None) if isinstance(pod, Pod)]
    found = draining.candidates(pods, node)
    return [
        each
        for each in found
        if not each.is_over or await operator.get(_snapshot(each)) is not None
    ]


def _snapshot(pod: Candidate) -> Target:
    return Target(KINDS["Snapshot"], pod.pod.metadata.namespace, draining.name_of(pod.pod))


def _say(tools: Tools, text: str, *, strong: bool = False) -> None:
    if tools.screen.wants_table:
        tools.screen.line(text, strong=strong)


def _show_plan(tools: Tools, pod: Candidate) -> None:
    name = draining.name_of(pod.pod)
    if tools.screen.wants_table:
        tools.screen.line(
            Outcome(pod, "left", f"left: {pod.why}", pod.next_step).line
            if pod.why
            else f"{pod.name}: would be captured as snapshot/{name}, and restored as pod/{name}"
        )
    else:
        state = "left" if pod.why else "would move"
        tools.screen.entry(_entry(pod, state, pod.why, pod.next_step))


def _entry(pod: Candidate, state: str, why: str, next_step: str, node: str = "") -> dict[str, Any]:
    meta = pod.pod.metadata
    made = {} if pod.why else {"name": draining.name_of(pod.pod)}
    about = {"namespace": meta.namespace, "pod": meta.name, "state": state, **made}
    rest = {"node": node, "why": why, "next": next_step}
    return about | {key: text for key, text in rest.items() if text}


def _end(tools: Tools, node: str, outcomes: list[Outcome], by: str) -> None:
    """Say how it ended. DeadlineExceeded, NotDrained."""
    left = [each for each in outcomes if each.state != "moved"]
    lines = [each.line for each in left]
    if any(each.state == "late" for each in left):
        raise DeadlineExceeded(
            f"not all pods of {node} were captured within {by}; those that are named go on there",
            next_step=f"where the node stays: snapshotctl drain {node} --capture",
            lines=lines,
        )
    if left:
        many = "1 pod is" if len(left) == 1 else f"{len(left)} pods are"
        raise NotDrained(
            f"{many} left on {node}",
            next_step=f"see to them as each says, then: snapshotctl drain {node} --capture",
            lines=lines,
        )
    _say(tools, f"node/{node} drained", strong=True)


class _Drain:
    """One drain under way. Times are in seconds of the monotonic clock."""

    def __init__(
        self,
        tools: Tools,
        operator: Operator,
        parts: Parts,
        captured_by: float,
        over_by: float,
        parallel: int,
    ) -> None:
        self._tools = tools
        self._operator = operator
        self._parts = parts
        self._captured_by = captured_by
        self._over_by = over_by
        self._slots = asyncio.Semaphore(parallel)

    async def outcome(self, pod: Candidate) -> Outcome:
        """Move one pod and say what became of it."""
        try:
            found = await self._moved(pod)
        except SnapbackError as error:
            failure = error.to_failure()
            found = Outcome(pod, "failed", failure.message, failure.next_step)
        if not self._tools.screen.wants_table:
            self._tools.screen.entry(
                _entry(pod, found.state, found.why, found.next_step, found.node)
            )
        elif found.state == "moved":
            name = draining.name_of(pod.pod)
            self._tools.screen.line(f"{pod.name} goes on as pod/{name} on {found.node}")
        else:
            self._tools.screen.line(f"{pod.name}: {found.state}: {found.why}")
        return found

    async def _moved(self, pod: Candidate) -> Outcome:
        if pod.why:
            return Outcome(pod, "left", pod.why, pod.next_step)
        meta = pod.pod.metadata
        source, snapshot = Target(KINDS["Pod"], meta.namespace, meta.name), _snapshot(pod)
        # Read before the capture, which ends it.
        manifest = await self._operator.manifest(source)
        if manifest is None:
            return Outcome(pod, "failed", "it was deleted meanwhile")
        async with self._slots:
            captured = await self._captured(pod, snapshot)
        if isinstance(captured, Outcome):
            return captured
        if captured.word == "failed":
            state: State = "late" if captured.reason == "DeadlineExceeded" else "failed"
            why = f"{captured.reason}: {captured.message}"
            return Outcome(pod, state, why, f"snapshotctl explain {snapshot.typed}")
        again = source._replace(name=snapshot.name)
        try:
            return await self._restored(pod, draining.restored(pod.pod, manifest), source, again)
        except asyncio.CancelledError:
            self._tools.screen.note(f"{pod.name} is captured; go on with it by another drain")
            raise

    async def _captured(self, pod: Candidate, snapshot: Target) -> ObjectState | Outcome:
        found = await self._operator.get(snapshot)
        if found is not None and failure_of(found) and not pod.is_over:
            # Of an earlier drain, after which the pod went on.
            await self._deleted(snapshot, found.metadata.uid)
            found = None
        left_s = int(self._captured_by - self._tools.monotonic())
        if found is None and left_s < 1:
            why = "its capture did not begin before the deadline"
            return Outcome(pod, "late", why, "more time, or more captures at a time: --parallel")
        try:
            if found is None:
                within_s = min(left_s, LONGEST_S)
                await self._stored(pod, draining.snapshot_of(pod.pod, within_s))
            return await self._ended("capture", pod, snapshot, self._captured_by + SETTLES_S)
        except asyncio.CancelledError:
            # Nothing would restore a worker that its capture ends.
            await undisturbed(self._given_up(pod, snapshot))
            raise

    async def _given_up(self, pod: Candidate, snapshot: Target) -> None:
        note = self._tools.screen.note
        try:
            found = await self._operator.get(snapshot)
            if isinstance(found, Snapshot) and found.status.bound_snapshot_content_name:
                await self._operator.abort(snapshot, machine.person(), found.metadata.uid)
            elif found is not None:
                await self._operator.delete(snapshot, found.metadata.uid)
            note(f"{pod.name} goes on: its capture is being aborted")
        except SnapbackError as error:
            failure = error.to_failure()
            note(f"{pod.name}: its capture is not aborted: {failure.message}")
            note(f"  look at it: snapshotctl explain {snapshot.typed}; or drain again")

    async def _restored(
        self, pod: Candidate, document: Document, source: Target, again: Target
    ) -> Outcome:
        if await self._operator.get(again) is None:
            await self._stored(pod, document)
        # Its captured process has ended. What its kubelet may start in its place has no state.
        await self._deleted(source, pod.pod.metadata.uid)
        ended = await self._ended("restore", pod, again, self._over_by)
        if ended.word == "failed":
            why = f"captured, and {again} has failed: {ended.reason}: {ended.message}"
            step = f"snapshotctl explain {again.typed}; its state is in snapshot/{again.name}"
            return Outcome(pod, "failed", why, step)
        found = await self._operator.get(again)
        node = found.status.node_name if isinstance(found, Pod) else ""
        return Outcome(pod, "moved", node=node)

    async def _stored(self, pod: Candidate, document: Document) -> None:
        [made] = await objects.store(self._operator, self._tools.telemetry, [document])
        _say(self._tools, f"{pod.name}: {made.kind.lower()}/{made.name} {made.action}")

    async def _deleted(self, target: Target, uid: str) -> None:
        """Delete one incarnation and wait until it is gone."""
        try:
            await self._operator.delete(target, uid)
        except RemoteFailure as error:
            if error.failure.reason not in ("NotFound", "Conflict"):
                raise

        def is_gone(found: AnyObject | None) -> Literal[True] | None:
            return True if found is None or found.metadata.uid != uid else None

        within_s = self._over_by - self._tools.monotonic()
        what = f"deleting {target}"
        await objects.until(self._operator, target, is_gone, within_s=within_s, what=what)

    async def _ended(self, phase: str, pod: Candidate, target: Target, by: float) -> ObjectState:
        """Show an object until it is ready or has failed. DeadlineExceeded, NeverTrue."""
        display = Display(self._tools, self._parts, phase, pod.name)
        left_s = by - self._tools.monotonic()
        try:
            async with asyncio.timeout(left_s):
                return await until_ended(self._operator, display, target)
        except TimeoutError:
            raise DeadlineExceeded(
                f"{target} is not over in time",
                next_step=f"see where it is: snapshotctl explain {target.typed}",
                budget_s=left_s,
            ) from None
