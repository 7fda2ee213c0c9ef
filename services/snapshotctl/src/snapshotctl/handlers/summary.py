"""What the demo plays with, what it found, and how that is summed up at its end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from snapshot_shared.objects import Pod, SnapshotContent
from snapshot_shared.spans import SpanRecord
from snapshotctl.domain import demo, formats
from snapshotctl.domain.demo import Answer
from snapshotctl.domain.documents import Document
from snapshotctl.domain.exits import DemoFailed
from snapshotctl.domain.preflight import Machine
from snapshotctl.handlers.traces import show
from snapshotctl.ports import Ground, Operator, Screen, Workers

if TYPE_CHECKING:
    from snapshot_shared.telemetry import Telemetry

SPANS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Stage:
    """What the demo plays with. `connect` reaches the operator of the cluster once it is up.

    `machine` is None where nothing is to be started on it.
    """

    screen: Screen
    cluster: Ground
    workers: Workers
    telemetry: Telemetry
    connect: Callable[[], AbstractAsyncContextManager[Operator]]
    monotonic: Callable[[], float]
    machine: Machine | None
    examples: Path
    documents: Callable[[Path], list[Document]]


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


async def sum_up(
    stage: Stage,
    operator: Operator,
    captured: Captured,
    restored: Restored,
    refused: Pod | None,
    *,
    keep: bool,
) -> None:
    """Show times, the artifact, both traces, and how to look at everything."""
    _show_times(stage.screen, captured, restored)
    _show_artifact(stage, captured.content)
    for trace_id, last in ((captured.trace_id, "capture"), (restored.trace_id, "restoration")):
        stage.screen.line()
        show(stage.screen, trace_id, await _spans(operator, trace_id, last))
    names = demo.Names(
        captured.checkpoint,
        captured.content.metadata.name,
        restored.pod.metadata.name,
        refused.metadata.name if refused else None,
        captured.trace_id,
    )
    _show_twins(stage, names, keep=keep)
    times = captured.cold_s / restored.seconds if restored.seconds else 0.0
    stage.screen.line()
    stage.screen.line(
        f"  Restored {times:.1f} times as fast as it started cold, and every answer is the same.",
        strong=True,
    )


def _show_times(screen: Screen, captured: Captured, restored: Restored) -> None:
    cold, restore = formats.span_time(captured.cold_s), formats.span_time(restored.seconds)
    times = captured.cold_s / restored.seconds if restored.seconds else 0.0
    screen.line("  from apply to the first answer:")
    screen.line(f"    cold start {cold}, restore {restore}: {times:.1f} times as fast", strong=True)


def _show_artifact(stage: Stage, content: SnapshotContent) -> None:
    committed = content.status.committed
    if committed is None:
        raise DemoFailed(f"{content.metadata.name} names no committed generation")
    artifacts = stage.cluster.handle.artifacts
    folder = Path(content.spec.source.namespace) / content.artifact_uid
    stage.screen.line("  artifact:")
    stage.screen.line(f"    {artifacts / folder / f'gen-{committed.generation}'}")
    stage.screen.line(f"    {committed.bytes} bytes ({formats.size(committed.bytes)})")
    stage.screen.line(f"    {committed.root_digest}")


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


def _show_twins(stage: Stage, names: demo.Names, *, keep: bool) -> None:
    screen, handle = stage.screen, stage.cluster.handle
    screen.line()
    if keep or not handle.is_ours:
        screen.line("  Look around, with snapshotctl or with the nats CLI:", strong=True)
    else:
        screen.line("  With KEEP=1 it stays, and two commands each show it:", strong=True)
    for twin in demo.twins(names, handle):
        screen.line(f"  {twin.what}")
        screen.line(f"    {twin.ours}")
        screen.line(f"    {twin.stock}")
