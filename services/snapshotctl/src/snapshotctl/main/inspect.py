"""The commands with which people look: explain, describe, events, watch, artifacts."""

from __future__ import annotations

import difflib
import secrets
from pathlib import Path
from typing import Annotated

import typer

from snapshot_shared.errors import NotFound
from snapshot_shared.objects import Framework
from snapshot_shared.reasons import REASONS, explained
from snapshotctl.adapters import machine
from snapshotctl.adapters.artifact_files import ArtifactFiles
from snapshotctl.domain import capturing, formats, targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.handlers import artifacts, describing, events, explaining, phases, verifying
from snapshotctl.handlers import capturing as sugar
from snapshotctl.main.running import example
from snapshotctl.main.wiring import Tools, read_documents, run_work

Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the objects.")]
Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="A checkpoint, snapshot, content, pod or node; KIND/NAME."),
]

Everywhere = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of all namespaces.")]
Held = Annotated[
    str, typer.Argument(metavar="NAME", help="A checkpoint, snapshot or content; KIND/NAME.")
]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="How long at most: 90s, 5m, 1h30m.")
]

app = typer.Typer(rich_markup_mode=None)


Manifest = Annotated[
    Path | None,
    typer.Option("--manifest", metavar="FILE", help="A YAML file with one Pod; - for stdin."),
]
Container = Annotated[
    str | None, typer.Option("--container", metavar="NAME", help="The container that is captured.")
]
Space = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace.", show_default="default")
]

stored = typer.Typer(
    name="artifacts",
    help="Look at captured artifacts: list, show, verify, compare, and what retention lets go.",
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=example("snapshotctl artifacts ls", "snapshotctl artifacts show demo-llm"),
)


def register(parent: typer.Typer) -> None:
    """Make the commands of this module commands of another."""
    parent.registered_commands += app.registered_commands
    parent.add_typer(stored)


@app.command(
    epilog=example(
        "snapshotctl explain demo-llm",
        "snapshotctl explain pod/demo-llm-restored",
        "snapshotctl explain DeviceTooSmall",
    )
)
def explain(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME|REASON",
            help="A checkpoint, snapshot, content, pod or node; KIND/NAME; or a reason.",
        ),
    ],
    namespace: Namespace = "default",
) -> None:
    """Tell the story of an object: what was asked, what happened, where it stands, what to do.

    A reason, which is one word such as DeviceTooSmall, is explained without a server.
    """
    tools: Tools = context.obj

    async def work() -> None:
        if name != name.lower() and "/" not in name:
            explaining.reason(tools.screen, *_reason(name))
            return
        wanted = targets.told(name, namespace)
        async with tools.operator() as operator:
            try:
                await explaining.explain(
                    operator, tools.screen, wanted, tools.logs(), now=machine.now()
                )
            except NotFound:
                found = explained(name)
                if found is None:
                    raise
                explaining.reason(tools.screen, *found)

    run_work(tools, work())


def _reason(word: str) -> explaining.Named:
    found = explained(word)
    if found is not None:
        return found
    near = difflib.get_close_matches(word, REASONS, n=3, cutoff=0.5)
    raise WrongArguments(
        f"{word!r} is no reason and no name of an object, which has no capitals",
        next_step=f"did you mean {' or '.join(near)}?"
        if near
        else "docs/troubleshooting.md lists all reasons",
    )


@app.command(
    epilog=example(
        "snapshotctl describe dynamocheckpoint demo-llm",
        "snapshotctl describe pod/demo-llm-restored",
        "snapshotctl describe node node-1 -o json",
    )
)
def describe(
    context: typer.Context,
    words: Annotated[
        list[str], typer.Argument(metavar="KIND NAME", help="KIND NAME or KIND/NAME.")
    ],
    namespace: Namespace = "default",
) -> None:
    """Show all that is known of one object, and what happened to it."""
    tools: Tools = context.obj

    async def work() -> None:
        target = targets.one_target(words, namespace)
        async with tools.operator() as operator:
            await describing.describe(operator, tools.screen, target, now=machine.now())

    run_work(tools, work())


@app.command(
    "events",
    epilog=example(
        "snapshotctl events",
        "snapshotctl events demo-llm --follow",
        "snapshotctl events -A -o json | jq 'select(.reason == \"NodeLost\")'",
    ),
)
def show_events(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="[NAME]", help="A checkpoint, snapshot, content, pod or node; KIND/NAME."
        ),
    ] = "",
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what happens from now on.")
    ] = False,
    namespace: Namespace = "default",
    everywhere: Everywhere = False,
) -> None:
    """Show what happened to one object and what belongs to it, or to all.

    Reports are kept for 14 days, spans for two; the rest is read from the objects. With -o json
    every event is one line.
    """
    tools: Tools = context.obj

    async def work() -> None:
        if name and everywhere:
            raise WrongArguments(
                "a name and --all-namespaces exclude each other",
                next_step="leave one of them out: events -A",
            )
        wanted = targets.told(name, namespace) if name else []
        space = None if everywhere else targets.checked_namespace(namespace)
        async with tools.operator(patiently=follow) as operator:
            if follow:
                await events.follow(operator, tools.screen, wanted, space, machine.now)
            else:
                await events.events(operator, tools.screen, wanted, space)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl watch demo-llm",
        "snapshotctl watch pod/demo-llm-restored --timeout 5m",
    )
)
def watch(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="A checkpoint, snapshot, content or pod; KIND/NAME."),
    ],
    timeout: Timeout = "1h",
    namespace: Namespace = "default",
) -> None:
    """Show a capture or a restore phase by phase and part by part, until it is over.

    Ends with exit code 1 when it failed.
    """
    tools: Tools = context.obj

    async def work() -> None:
        wanted, within_s = targets.traced(name, namespace), formats.parse_duration(timeout)
        async with tools.operator(patiently=True) as operator:
            await phases.watch(
                operator, tools.screen, wanted, within_s=within_s, clocks=tools.clocks
            )

    run_work(tools, work())


@stored.command("ls", epilog=example("snapshotctl artifacts ls", "snapshotctl artifacts ls -A"))
def list_artifacts(
    context: typer.Context, namespace: Namespace = "default", everywhere: Everywhere = False
) -> None:
    """List captured artifacts with their sizes, ages and readers."""
    tools: Tools = context.obj

    async def work() -> None:
        space = None if everywhere else targets.checked_namespace(namespace)
        async with tools.operator() as operator:
            await artifacts.list_all(operator, tools.screen, space, now=machine.now())

    run_work(tools, work())


@stored.command(
    "show",
    epilog=example(
        "snapshotctl artifacts show demo-llm", "snapshotctl artifacts show demo -o json"
    ),
)
def show_artifact(context: typer.Context, name: Held, namespace: Namespace = "default") -> None:
    """Show the parts of an artifact; its files, too, where its folder can be read from here."""
    tools: Tools = context.obj

    async def work() -> None:
        wanted = targets.verified(name, namespace)
        async with tools.operator() as operator:
            await artifacts.show(operator, tools.screen, ArtifactFiles(), wanted, now=machine.now())

    run_work(tools, work())


@stored.command("verify", epilog=example("snapshotctl artifacts verify demo-llm --timeout 10m"))
def verify_artifact(
    context: typer.Context, name: Held, timeout: Timeout = "1h", namespace: Namespace = "default"
) -> None:
    """Have every byte read and compared, as `snapshotctl verify` does."""
    tools: Tools = context.obj

    async def work() -> None:
        wanted, within_s = targets.verified(name, namespace), formats.parse_duration(timeout)
        async with tools.operator(patiently=True) as operator:
            await verifying.verify(operator, tools.screen, wanted, within_s=within_s)

    run_work(tools, work())


@stored.command("diff", epilog=example("snapshotctl artifacts diff demo-llm demo-llm-2"))
def compare_artifacts(
    context: typer.Context,
    first: Annotated[str, typer.Argument(metavar="A", help="An artifact, as in: show.")],
    second: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    namespace: Namespace = "default",
) -> None:
    """Compare two artifacts: facts, structure, and the bytes that differ, part by part.

    The digests of their chunks are compared, so that nothing but manifests is read.
    """
    tools: Tools = context.obj

    async def work() -> None:
        left, right = targets.verified(first, namespace), targets.verified(second, namespace)
        async with tools.operator() as operator:
            await artifacts.diff(operator, tools.screen, ArtifactFiles(), left, right)

    run_work(tools, work())


@stored.command(
    "gc", epilog=example("snapshotctl artifacts gc --dry-run", "snapshotctl artifacts gc -A")
)
def collect_artifacts(
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only say what would go, and why the rest stays.")
    ] = False,
    namespace: Namespace = "default",
    everywhere: Everywhere = False,
) -> None:
    """Have the operator let go what is over its limits now; it does so by itself every 30 s.

    The limits hold for each namespace; without --dry-run they are applied to all of them.
    """
    tools: Tools = context.obj

    async def work() -> None:
        space = None if everywhere else targets.checked_namespace(namespace)
        async with tools.operator() as operator:
            await artifacts.collect(operator, tools.screen, space, dry_run=dry_run)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl checkpoint my-worker",
        "snapshotctl checkpoint --manifest worker.yaml --checkpoint-id llm-v2 --timeout 45m",
    )
)
def checkpoint(
    context: typer.Context,
    pod: Annotated[str, typer.Argument(metavar="[POD]", help="A running pod.")] = "",
    manifest: Manifest = None,
    container: Container = None,
    framework: Annotated[
        Framework | None,
        typer.Option(
            "--framework",
            help="Of a worker whose command runs no module dynamo.NAME.",
        ),
    ] = None,
    checkpoint_id: Annotated[
        str | None,
        typer.Option("--checkpoint-id", metavar="ID", help="Name of the snapshot or checkpoint."),
    ] = None,
    timeout: Timeout = "1h",
    namespace: Space = None,
) -> None:
    """Capture a running pod, which goes on; or the pod of a manifest, which is started and ended.

    The first makes a Snapshot, the second a DynamoCheckpoint. Its phases are shown to the end.
    """
    tools: Tools = context.obj

    async def work() -> None:
        if bool(pod) == (manifest is not None):
            raise WrongArguments(
                "name either a running POD or --manifest FILE",
                next_step="snapshotctl checkpoint my-worker",
            )
        name = targets.checked_name(checkpoint_id) if checkpoint_id is not None else None
        within_s = formats.parse_duration(timeout)
        written = capturing.pod_manifest(read_documents(manifest)) if manifest else None
        space = targets.checked_namespace(capturing.namespace_of(written, namespace))
        async with tools.operator(patiently=True) as operator:
            means = sugar.Means(operator, tools.screen, tools.telemetry, tools.clocks, within_s)
            if written is not None:
                await sugar.checkpoint_manifest(
                    means,
                    written,
                    container=container,
                    framework=framework,
                    name=name,
                    namespace=space,
                )
            else:
                running = targets.one_target(["pod", pod.removeprefix("pod/")], space)
                await sugar.checkpoint_pod(means, running, container, name)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl restore demo-llm",
        "snapshotctl restore demo-llm --manifest worker.yaml --timeout 10m",
    )
)
def restore(
    context: typer.Context,
    name: Annotated[
        str, typer.Argument(metavar="[NAME]", help="The checkpoint or snapshot to start from.")
    ] = "",
    manifest: Manifest = None,
    container: Container = None,
    checkpoint_id: Annotated[
        str | None,
        typer.Option("--checkpoint-id", metavar="ID", help="The same as NAME."),
    ] = None,
    timeout: Timeout = "1h",
    namespace: Space = None,
) -> None:
    """Start a pod from what was captured, and wait until it serves.

    Without --manifest it is as the captured pod was, on any node that fits; its name is printed.
    """
    tools: Tools = context.obj

    async def work() -> None:
        if bool(name) == (checkpoint_id is not None) and name != checkpoint_id:
            raise WrongArguments(
                "name what to restore from, once" if name else "what to restore from is missing",
                next_step="snapshotctl restore demo-llm",
            )
        source = targets.checked_name(name or checkpoint_id or "")
        within_s = formats.parse_duration(timeout)
        written = capturing.pod_manifest(read_documents(manifest)) if manifest else None
        space = targets.checked_namespace(capturing.namespace_of(written, namespace))
        async with tools.operator(patiently=True) as operator:
            means = sugar.Means(operator, tools.screen, tools.telemetry, tools.clocks, within_s)
            await sugar.restore(
                means,
                source,
                written,
                namespace=space,
                suffix=f"restored-{secrets.token_hex(3)}",
                container=container,
            )

    run_work(tools, work())
