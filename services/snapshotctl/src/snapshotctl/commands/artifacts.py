"""The commands of `artifacts`: list, show, verify and compare them, and apply retention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from snapshot_api.facts import Node
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import condition
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.snapshot import Snapshot
from snapshot_shared import compatibility
from snapshot_shared.errors import NotEligible, NotFound, RemoteFailure
from snapshot_shared.ids import check_node
from snapshotctl import objects
from snapshotctl.adapters.artifact_files import manifests_of
from snapshotctl.command import AllNamespaces, Captured, Namespace, command, new_app
from snapshotctl.commands.verify import verify
from snapshotctl.domain import formats, targets
from snapshotctl.domain.exits import Exit, WrongArguments
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator
from snapshotctl.tools import Tools
from snapshotctl.views import artifact_tables
from snapshotctl.views.artifact_tables import CapturedArtifact, Manifests
from snapshotctl.views.related import reference
from snapshotctl.views.tables import Table

app = new_app(
    "artifacts",
    "List, show, verify and compare captured artifacts; apply retention.",
    "snapshotctl artifacts ls",
    "snapshotctl artifacts show demo-llm",
)
command(app, "snapshotctl artifacts verify demo-llm --timeout 10m")(verify)


@command(app, "snapshotctl artifacts ls", "snapshotctl artifacts ls -A", name="ls")
async def list_(
    tools: Tools, namespace: Namespace = "default", everywhere: AllNamespaces = False
) -> None:
    """List captured artifacts with their sizes, ages and readers."""
    space = None if everywhere else targets.checked_namespace(namespace)
    async with tools.operator() as operator:
        contents = await operator.all_of(KINDS["SnapshotContent"], None)
        checkpoints = await operator.all_of(KINDS["DynamoCheckpoint"], space)
        nodes = await operator.all_of(KINDS["Node"], None)
    found = [
        artifact
        for artifact in artifact_tables.artifacts(
            [value for value in contents if isinstance(value, SnapshotContent)],
            [value for value in checkpoints if isinstance(value, DynamoCheckpoint)],
            [value for value in nodes if isinstance(value, Node)],
        )
        if space in (None, artifact.namespace)
    ]
    if not tools.screen.wants_table:
        tools.screen.value([artifact.value() for artifact in found])
    elif found:
        tools.screen.table(artifact_tables.table(found, tools.now()))
        total = sum(artifact.bytes for artifact in found)
        tools.screen.line(f"{formats.counted(len(found), 'artifact')}, {formats.size(total)}")
    else:
        tools.screen.note("nothing is captured" + (f" in namespace {space}" if space else ""))


@command(app, "snapshotctl artifacts show demo-llm", "snapshotctl artifacts show demo -o json")
async def show(tools: Tools, name: Captured, namespace: Namespace = "default") -> None:
    """Show the parts of an artifact; its files, too, where its folder can be read from here."""
    screen, wanted = tools.screen, targets.verified(name, namespace)
    async with tools.operator() as operator:
        artifact = await _artifact(operator, wanted)
    manifests = manifests_of(artifact)
    facts = artifact_tables.facts(manifests) if manifests else {}
    if not screen.wants_table:
        on_disk = msgspec.to_builtins(manifests.parts) if manifests else None
        screen.value({**artifact.value(), "facts": facts, "manifests": on_disk})
        return
    screen.line(f"{artifact.name}: {formats.size(artifact.bytes)}, {artifact.state}", strong=True)
    titled = [
        (fact.replace("_", " "), artifact_tables.shortened(fact, text))
        for fact, text in facts.items()
    ]
    for title, text in [*_lines(artifact, tools.now()), *titled]:
        screen.line(f"  {title:<12} {formats.plain(text)}")
    screen.line("Parts", strong=True)
    screen.table(artifact_tables.parts_table(artifact, manifests), indent="  ")
    if manifests is not None:
        screen.line("Files", strong=True)
        screen.table(artifact_tables.files_table(manifests), indent="  ")
        return
    screen.note(f"its files cannot be read from here; run this on {artifact.node} to see them")


def _lines(artifact: CapturedArtifact, now: float) -> list[tuple[str, str]]:
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


@command(
    app,
    "snapshotctl artifacts diff demo-llm demo-llm-2",
    "snapshotctl artifacts diff demo-llm --node node-2",
)
async def diff(
    tools: Tools,
    first: Annotated[str, typer.Argument(metavar="A", help="An artifact, as in: show.")],
    second: Annotated[str, typer.Argument(metavar="[B]", help="Another one.")] = "",
    node: Annotated[
        str,
        typer.Option("--node", metavar="NODE", help="Whether it would be restored there, instead."),
    ] = "",
    namespace: Namespace = "default",
) -> Exit:
    """Compare two artifacts, or one with a node: whether it would be restored there.

    Of two artifacts facts, structure, and the bytes that differ are shown, part by part. The
    digests of their chunks are compared, so that nothing but manifests is read. With --node each
    fact has a verdict, and the exit code is 1 when the node would refuse the artifact.
    """
    if bool(second) == bool(node):
        raise WrongArguments(
            "an artifact is compared with another one, or with a node",
            next_step=f"snapshotctl artifacts diff {first} B, or --node NODE",
        )
    if node:
        return await _fits(tools, first, node, namespace)
    await _differ(tools, first, second, namespace)
    return Exit.OK


async def _fits(tools: Tools, name: str, node: str, namespace: str) -> Exit:
    """Show whether an artifact would be restored on a node."""
    async with tools.operator() as operator:
        artifact = await _artifact(operator, targets.verified(name, namespace))
        presence = (await operator.presence()).get(check_node(node))
        if presence is None:
            raise NotFound(f"{node} is not there", next_step="see which are: snapshotctl nodes")
        reply = await operator.facts_of(node, artifact.reference)
    if reply.failure is not None:
        raise RemoteFailure(reply.failure)
    # Earlier agents do not say what is in an artifact.
    source = reply.source or _readable(artifact).root.facts
    here = artifact_tables.facts_of_node(reply.facts, presence, source)
    found, error = compatibility.verdicts(source, here), compatibility.refusal(source, here)
    if not tools.screen.wants_table:
        rows = [
            {
                "fact": each.fact.name,
                "rule": each.fact.rule,
                "source": each.source,
                "node": each.here,
                "verdict": each.outcome,
                "needed": each.needed,
            }
            for each in found
        ]
        refused = error.to_failure() if error else None
        tools.screen.value({"refused": msgspec.to_builtins(refused), "facts": rows})
    else:
        tools.screen.table(artifact_tables.verdicts_table(found, node))
        if error is None:
            tools.screen.line(f"{artifact.name} can be restored on {node}.", strong=True)
        else:
            why = formats.plain(f"{error.message}. Next: {error.next_step}")
            tools.screen.line(f"{artifact.name} would be refused on {node}: {why}", strong=True)
    return Exit.OK if error is None else Exit.FAILED


async def _differ(tools: Tools, first: str, second: str, namespace: str) -> None:
    """Show how two artifacts differ."""
    wanted = [targets.verified(name, namespace) for name in (first, second)]
    async with tools.operator() as operator:
        left, right = [await _artifact(operator, each) for each in wanted]
    found = artifact_tables.difference(_readable(left), _readable(right))
    if not tools.screen.wants_table:
        values = {name: list(pair) for name, pair in found.facts.items()}
        parts = [part.value() for part in found.parts]
        tools.screen.value({"same": found.is_none, "facts": values, "parts": parts})
        return
    rows = [(name, ours, theirs) for name, (ours, theirs) in found.facts.items()]
    if rows:
        tools.screen.table(Table(("FACT", left.name, right.name), list(rows)))
    else:
        tools.screen.line("The facts of both sources are the same.")
    tools.screen.table(artifact_tables.difference_table(found))
    if found.is_none:
        tools.screen.line("Both hold the same bytes.", strong=True)


def _readable(artifact: CapturedArtifact) -> Manifests:
    manifests = manifests_of(artifact)
    if manifests is None:
        raise NotEligible(
            f"the manifests of {artifact.name} cannot be read from here: {artifact.folder}",
            next_step=f"run this on {artifact.node}, or where its artifact root is mounted",
        )
    return manifests


@command(app, "snapshotctl artifacts gc --dry-run", "snapshotctl artifacts gc -A")
async def gc(
    tools: Tools,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would go, and why the rest stays.")
    ] = False,
    namespace: Namespace = "default",
    everywhere: AllNamespaces = False,
) -> None:
    """Have the operator delete what is over its limits now; it does so by itself every 30 s.

    The limits hold for each namespace; without --dry-run they are applied to all of them.
    """
    screen, space = tools.screen, None if everywhere else targets.checked_namespace(namespace)
    async with tools.operator() as operator:
        found = await operator.retention(space, run=False)
        going = [artifact for artifact in found.artifacts if artifact.goes]
        if not dry_run and going:
            await operator.retention(space, run=True)
    if not screen.wants_table:
        values = [msgspec.to_builtins(artifact) for artifact in found.artifacts]
        screen.value({"limits": found.limits, "dryRun": dry_run, "artifacts": values})
        return
    limits = ", ".join(f"{name} {value:g}" for name, value in found.limits.items())
    screen.line(
        f"limits a namespace: {limits or 'none (SNAPBACK_KEEP_COUNT and the like are unset)'}"
    )
    verbs = {True: "would go" if dry_run else "deleted", False: "stays"}
    rows = [
        (verbs[item.goes], item.namespace, item.name, formats.size(item.bytes), item.why)
        for item in found.artifacts
    ]
    if rows:
        screen.table(Table(("WHAT", "NAMESPACE", "NAME", "SIZE", "WHY"), list(rows)))
    size = formats.size(sum(item.bytes for item in going))
    screen.line(f"{len(going)} of {formats.counted(len(found.artifacts), 'artifact')}, {size}")


async def _artifact(operator: Operator, wanted: Sequence[Target]) -> CapturedArtifact:
    root = await objects.find(operator, wanted)
    content = root if isinstance(root, SnapshotContent) else await _content_of(operator, root)
    if content is None or content.status.committed is None:
        raise NotEligible(
            f"{reference(root)} holds no captured artifact",
            next_step=f"see why: snapshotctl explain {reference(root)}",
        )
    owner = content.spec.snapshot_ref
    checkpoint = await operator.get(Target(KINDS["DynamoCheckpoint"], owner.namespace, owner.name))
    node = await operator.get(Target(KINDS["Node"], None, artifact_tables.node_of(content)))
    [artifact] = artifact_tables.artifacts(
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
