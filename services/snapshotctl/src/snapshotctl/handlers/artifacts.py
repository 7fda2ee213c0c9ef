"""The commands on captured artifacts: list, show, compare, and what retention lets go."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from snapshot_shared.errors import NotEligible
from snapshot_shared.objects import (
    KINDS,
    AnyObject,
    DynamoCheckpoint,
    Node,
    Snapshot,
    SnapshotContent,
    condition,
)
from snapshotctl.domain import artifacts, formats
from snapshotctl.domain.artifacts import Artifact, Manifests
from snapshotctl.domain.kin import reference
from snapshotctl.domain.rows import Table
from snapshotctl.domain.targets import Target
from snapshotctl.handlers import looking
from snapshotctl.ports import Files, Operator, Screen


async def list_all(
    operator: Operator, screen: Screen, namespace: str | None, *, now: float
) -> None:
    """Show every captured artifact of a namespace, or of all."""
    contents = await operator.all_of(KINDS["SnapshotContent"], None)
    checkpoints = await operator.all_of(KINDS["DynamoCheckpoint"], namespace)
    nodes = await operator.all_of(KINDS["Node"], None)
    found = [
        artifact
        for artifact in artifacts.artifacts(
            [value for value in contents if isinstance(value, SnapshotContent)],
            [value for value in checkpoints if isinstance(value, DynamoCheckpoint)],
            [value for value in nodes if isinstance(value, Node)],
        )
        if artifact.content.spec.snapshot_ref.namespace == (namespace or artifact.namespace)
    ]
    if not screen.wants_table:
        screen.value([artifact.value() for artifact in found])
    elif found:
        screen.table(artifacts.table(found, now))
        total = sum(artifact.bytes for artifact in found)
        screen.line(f"{len(found)} artifacts, {formats.size(total)}")
    else:
        screen.note("nothing is captured" + (f" in namespace {namespace}" if namespace else ""))


async def show(
    operator: Operator, screen: Screen, files: Files, targets: Sequence[Target], *, now: float
) -> None:
    """Show one artifact: its parts, and its files where they can be read. NotFound, NotEligible."""
    artifact = await _artifact(operator, targets)
    manifests = files.manifests(artifact)
    if not screen.wants_table:
        on_disk = msgspec.to_builtins(manifests.parts) if manifests else None
        facts = artifacts.facts(manifests) if manifests else {}
        screen.value({**artifact.value(), "facts": facts, "manifests": on_disk})
        return
    screen.line(f"{artifact.name}: {formats.size(artifact.bytes)}, {artifact.state}", strong=True)
    for title, text in _lines(artifact, now):
        screen.line(f"  {title:<12} {formats.plain(text)}")
    for name, text in artifacts.facts(manifests).items() if manifests else ():
        screen.line(f"  {name.replace('_', ' '):<12} {formats.plain(text)}")
    screen.line("Parts", strong=True)
    screen.table(artifacts.parts_table(artifact, manifests), indent="  ")
    if manifests is not None:
        screen.line("Files", strong=True)
        screen.table(artifacts.files_table(manifests), indent="  ")
        return
    screen.note(f"its files cannot be read from here; run this on {artifact.node} to see them")


def _lines(artifact: Artifact, now: float) -> list[tuple[str, str]]:
    content = artifact.content
    committed, meta = content.status.committed, content.metadata
    held = condition(content.status.conditions, "Quarantined")
    damage = held.message if held and held.status == "True" else ""
    pod, age = content.spec.source.pod_ref, formats.age_of(meta.creation_timestamp, now)
    origin = f"from pod {pod.name} on {artifact.node}" if pod else "from what was on disk"
    lines = [
        ("content", meta.name),
        ("identity", artifact.identity),
        ("captured" if pod else "imported", f"{age} ago, {origin}"),
        ("folder", artifact.folder),
        ("root digest", committed.root_digest if committed else ""),
        ("readers", ", ".join(content.status.readers) or "none"),
        ("damage", damage),
    ]
    return [(title, text) for title, text in lines if text]


async def diff(
    operator: Operator,
    screen: Screen,
    files: Files,
    left: Sequence[Target],
    right: Sequence[Target],
) -> None:
    """Compare two artifacts. NotFound, NotEligible; also when their files cannot be read here."""
    both = [await _artifact(operator, targets) for targets in (left, right)]
    first, second = (_readable(files, artifact) for artifact in both)
    found = artifacts.difference(first, second)
    if not screen.wants_table:
        values = {name: list(pair) for name, pair in found.facts.items()}
        parts = [part.value() for part in found.parts]
        screen.value({"same": found.is_none, "facts": values, "parts": parts})
        return
    rows = [(name, ours, theirs) for name, (ours, theirs) in found.facts.items()]
    if rows:
        screen.table(Table(("FACT", both[0].name, both[1].name), list(rows)))
    else:
        screen.line("The facts of both sources are the same.")
    screen.table(artifacts.difference_table(found))
    if found.is_none:
        screen.line("Both hold the same bytes.", strong=True)


def _readable(files: Files, artifact: Artifact) -> Manifests:
    manifests = files.manifests(artifact)
    if manifests is None:
        raise NotEligible(
            f"the manifests of {artifact.name} cannot be read from here: {artifact.folder}",
            next_step=f"run this on {artifact.node}, or where its artifact root is mounted",
        )
    return manifests


async def collect(
    operator: Operator, screen: Screen, namespace: str | None, *, dry_run: bool
) -> None:
    """Say what retention would delete now and why the rest stays; without `dry_run` delete it."""
    told = await operator.retention(namespace, run=False)
    going = [artifact for artifact in told.artifacts if artifact.goes]
    if not dry_run and going:
        await operator.retention(namespace, run=True)
    if not screen.wants_table:
        values = [msgspec.to_builtins(artifact) for artifact in told.artifacts]
        screen.value({"limits": told.limits, "dryRun": dry_run, "artifacts": values})
        return
    limits = ", ".join(f"{name} {value:g}" for name, value in told.limits.items())
    screen.line(
        f"limits a namespace: {limits or 'none (SNAPBACK_KEEP_COUNT and the like are unset)'}"
    )
    verbs = {True: "would go" if dry_run else "deleted", False: "stays"}
    rows = [
        (verbs[item.goes], item.namespace, item.name, formats.size(item.bytes), item.why)
        for item in told.artifacts
    ]
    if rows:
        screen.table(Table(("WHAT", "NAMESPACE", "NAME", "SIZE", "WHY"), list(rows)))
    size = formats.size(sum(item.bytes for item in going))
    screen.line(f"{len(going)} of {len(told.artifacts)} artifacts, {size}")


async def _artifact(operator: Operator, targets: Sequence[Target]) -> Artifact:
    root = await looking.find(operator, targets)
    content = root if isinstance(root, SnapshotContent) else await _content_of(operator, root)
    if content is None or content.status.committed is None:
        raise NotEligible(
            f"{reference(root)} holds no captured artifact",
            next_step=f"see why: snapshotctl explain {reference(root)}",
        )
    owner = content.spec.snapshot_ref
    checkpoint = await operator.get(Target(KINDS["DynamoCheckpoint"], owner.namespace, owner.name))
    node = await operator.get(Target(KINDS["Node"], None, artifacts.node_of(content)))
    [artifact] = artifacts.artifacts(
        [content],
        [checkpoint] if isinstance(checkpoint, DynamoCheckpoint) else [],
        [node] if isinstance(node, Node) else [],
    )
    return artifact


async def _content_of(operator: Operator, value: AnyObject) -> SnapshotContent | None:
    match value:
        case DynamoCheckpoint():
            name = value.status.content_name
        case Snapshot():
            name = value.status.bound_snapshot_content_name or ""
        case _:
            name = ""
    found = await operator.get(Target(KINDS["SnapshotContent"], None, name)) if name else None
    return found if isinstance(found, SnapshotContent) else None
