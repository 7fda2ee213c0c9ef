"""The commands checkpoint and restore: make the object, and follow it to its end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from snapshot_shared.errors import NotEligible, NotFound
from snapshot_shared.objects import (
    KINDS,
    DynamoCheckpoint,
    Framework,
    Pod,
    Snapshot,
    SnapshotContent,
)
from snapshotctl.domain import capturing
from snapshotctl.domain.capturing import Captured, PodManifest
from snapshotctl.domain.documents import Document
from snapshotctl.domain.targets import Target
from snapshotctl.domain.waiting import failure_of
from snapshotctl.handlers.objects import existing, store
from snapshotctl.handlers.phases import Clocks, watch
from snapshotctl.ports import Operator, Screen

if TYPE_CHECKING:
    from snapshot_shared.telemetry import Telemetry


class Means(NamedTuple):
    """What both commands work with; they take at most `within_s` seconds."""

    operator: Operator
    screen: Screen
    telemetry: Telemetry
    clocks: Clocks
    within_s: float


async def checkpoint_pod(
    means: Means, pod: Target, container: str | None, name: str | None
) -> None:
    """Capture a running pod. NotFound, NotEligible, WrongArguments, and what `watch` raises."""
    found = await existing(means.operator, pod)
    if not isinstance(found, Pod):
        raise NotEligible(f"{pod} is no pod", next_step="name a pod that runs")
    names = [item.name for item in found.spec.containers]
    target = capturing.container(names, container, f"pod {found.metadata.name}")
    await _follow(means, capturing.snapshot_of(found, target, name), pod.namespace)


async def checkpoint_manifest(
    means: Means,
    pod: PodManifest,
    *,
    container: str | None,
    framework: Framework | None,
    name: str | None,
    namespace: str,
) -> None:
    """Start the worker of a manifest, capture it, and end it. Raise WrongArguments."""
    target = capturing.container(pod.containers, container, f"pod {pod.name}")
    engine = capturing.framework(pod, target, framework)
    document = capturing.checkpoint_of(pod, target, engine, name, namespace)
    await _follow(means, document, namespace)


async def restore(
    means: Means,
    name: str,
    manifest: PodManifest | None,
    *,
    namespace: str,
    suffix: str,
    container: str | None,
) -> None:
    """Start a pod from what was captured. NotFound, NotEligible, WrongArguments, and of `watch`.

    What is not captured yet is waited for; what has failed is refused before anything is made.
    """
    captured = await _captured(means.operator, name, namespace)
    document = capturing.restored(
        name, captured, manifest, namespace=namespace, suffix=suffix, target=container
    )
    await _follow(means, document, namespace)


async def _captured(operator: Operator, name: str, namespace: str) -> Captured:
    checkpoint = await operator.get(Target(KINDS["DynamoCheckpoint"], namespace, name))
    snapshot = await operator.get(Target(KINDS["Snapshot"], namespace, name))
    for value in (checkpoint, snapshot):
        if value is not None and (why := failure_of(value)):
            raise NotEligible(
                f"{name} has failed: {why}",
                next_step=f"the whole story: snapshotctl explain {name}",
            )
    if checkpoint is None and snapshot is None:
        raise NotFound(
            f"no checkpoint or snapshot is called {name} in namespace {namespace}",
            next_step="list what is captured: snapshotctl artifacts ls -A",
        )
    snapshot = snapshot if isinstance(snapshot, Snapshot) else None
    bound = snapshot.status.bound_snapshot_content_name if snapshot else None
    content = await operator.get(Target(KINDS["SnapshotContent"], None, bound)) if bound else None
    source = snapshot.spec.source.pod_ref if snapshot else None
    pod = await operator.get(Target(KINDS["Pod"], namespace, source.name)) if source else None
    is_source = source is not None and pod is not None and source.uid in (None, pod.metadata.uid)
    return Captured(
        checkpoint if isinstance(checkpoint, DynamoCheckpoint) else None,
        snapshot,
        content if isinstance(content, SnapshotContent) else None,
        pod if isinstance(pod, Pod) and is_source else None,
    )


async def _follow(means: Means, document: Document, namespace: str | None) -> None:
    """Make an object and show its phases until it settles."""
    [made] = await store(means.operator, means.telemetry, [document])
    if means.screen.wants_table:
        means.screen.line(f"{made.kind.lower()}/{made.name} {made.action}")
    else:
        means.screen.entry(msgspec.to_builtins(made))
    kind, name = KINDS[document.value["kind"]], document.value["metadata"]["name"]
    target = Target(kind, namespace, name)
    async with _going_on(means.screen, target):
        await watch(
            means.operator,
            means.screen,
            [target],
            within_s=means.within_s,
            clocks=means.clocks,
        )


@asynccontextmanager
async def _going_on(screen: Screen, target: Target) -> AsyncIterator[None]:
    """Say after an interrupt that the work does not end with the command."""
    try:
        yield
    except asyncio.CancelledError:
        screen.note(f"{target} goes on; follow it: snapshotctl watch {target.typed}")
        screen.note(f"or give it up: snapshotctl delete {target.typed}")
        raise
