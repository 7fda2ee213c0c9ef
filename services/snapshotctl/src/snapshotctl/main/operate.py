"""The commands of whoever is on call: what goes on, what is wrong, and what can be done."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from snapshot_shared.manifests import message_schemas
from snapshotctl.adapters import archive, machine, observer
from snapshotctl.domain import bundle as contents
from snapshotctl.domain import formats, queue, schemas, targets
from snapshotctl.domain.cluster import Places
from snapshotctl.domain.exits import Exit, WrongArguments
from snapshotctl.handlers import bundling, oncall, queues
from snapshotctl.handlers import doctor as findings
from snapshotctl.main import completing
from snapshotctl.main.running import example
from snapshotctl.main.wiring import Tools, run_work

app = typer.Typer(rich_markup_mode=None)
dead = typer.Typer(
    name="dead",
    help="Look at what no service could take as an order.",
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=example("snapshotctl dead ls", "snapshotctl dead show 3", "snapshotctl dead requeue 3"),
)
app.add_typer(dead)

Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the objects.")]
Node = Annotated[
    str,
    typer.Argument(
        metavar="NODE", help="The node, as in: snapshotctl nodes.", autocompletion=completing.nodes
    ),
]
MaybeNode = Annotated[
    str | None,
    typer.Argument(
        metavar="NODE",
        help="Only those of this node.",
        show_default=False,
        autocompletion=completing.nodes,
    ),
]
Number = Annotated[
    int, typer.Argument(metavar="NUMBER", min=1, help="Its number, as in: snapshotctl dead ls.")
]


@app.command(
    epilog=example(
        "snapshotctl orders",
        "snapshotctl orders node-1 --all",
        "snapshotctl orders show dump-0a1b2c3d-0000-4000-8000-000000000000",
    )
)
def orders(
    context: typer.Context,
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="NODE | show ORDER",
            help="Of one node; or one order's life.",
            autocompletion=completing.queue_words,
        ),
    ] = None,
    answered: Annotated[bool, typer.Option("--all", help="Show answered orders, too.")] = False,
) -> None:
    """Show the orders under way, and where each stands.

    By node and service. An order is queued until its service has it in the journal, then accepted,
    working at a step, and answered. `show` tells the whole life of one: what was ordered, and every
    report.
    """
    tools: Tools = context.obj
    found = words or []
    is_one = found[:1] == ["show"]
    if len(found) > (2 if is_one else 1):
        raise WrongArguments(
            f"expected a node, or show ORDER, found {len(found)} words",
            next_step="for example: snapshotctl orders node-1",
        )
    if is_one and len(found) == 1:
        raise WrongArguments(
            "which order? its id is missing",
            next_step="list them with: snapshotctl orders --all",
        )

    async def work() -> None:
        order = queue.order_id(found[1]) if is_one else None
        node = targets.node_named(found[0]) if found and not is_one else None
        async with tools.operator() as operator:
            if order:
                await queues.show_order(operator, tools.screen, order, now=machine.now())
            else:
                await queues.orders(
                    operator, tools.screen, node, now=machine.now(), answered=answered
                )

    run_work(tools, work())


@dead.command("ls", epilog=example("snapshotctl dead ls", "snapshotctl dead ls node-1 -o json"))
def list_dead(context: typer.Context, node: MaybeNode = None) -> None:
    """List the dead letters: copies of what was no order."""
    tools: Tools = context.obj

    async def work() -> None:
        wanted = targets.node_named(node) if node else None
        async with tools.operator() as operator:
            await queues.dead(operator, tools.screen, wanted, now=machine.now())

    run_work(tools, work())


@dead.command("show", epilog=example("snapshotctl dead show 3", "snapshotctl dead show 3 -o yaml"))
def show_dead(context: typer.Context, number: Number) -> None:
    """Show one dead letter, and why it was refused."""
    tools: Tools = context.obj

    async def work() -> None:
        async with tools.operator() as operator:
            await queues.show_dead(operator, tools.screen, number, now=machine.now())

    run_work(tools, work())


@dead.command("requeue", epilog=example("snapshotctl dead requeue 3"))
def requeue(context: typer.Context, number: Number) -> None:
    """Have the order of a dead letter sent again.

    The operator publishes the order that it wants now, never what the letter says, and refuses
    when nobody waits for that order any more.
    """
    tools: Tools = context.obj

    async def work() -> None:
        async with tools.operator() as operator:
            await queues.requeue(operator, tools.screen, number)

    run_work(tools, work())


@app.command(epilog=example("snapshotctl cordon node-1"))
def cordon(context: typer.Context, node: Node) -> None:
    """Let nothing new begin on a node; what runs there goes on.

    No pod is placed there, no capture begins, and nobody verifies there, until it is uncordoned.
    """
    _set_unschedulable(context.obj, node, unschedulable=True)


@app.command(epilog=example("snapshotctl uncordon node-1"))
def uncordon(context: typer.Context, node: Node) -> None:
    """Let new work begin on a node again."""
    _set_unschedulable(context.obj, node, unschedulable=False)


def _set_unschedulable(tools: Tools, node: str, *, unschedulable: bool) -> None:
    async def work() -> None:
        wanted = targets.node_named(node)
        async with tools.operator() as operator:
            await oncall.cordon(operator, tools.screen, wanted, unschedulable=unschedulable)

    run_work(tools, work())


@app.command(
    epilog=example("snapshotctl abort demo-llm", "snapshotctl abort snapshot/demo --timeout 30s")
)
def abort(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A checkpoint, snapshot or content; KIND/NAME.",
            autocompletion=completing.captured,
        ),
    ],
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long to wait: 90s, 5m.")
    ] = "2m",
    namespace: Namespace = "default",
) -> None:
    """End a capture that is under way, now.

    The worker goes on, what was staged is removed, and the capture is Failed with the reason
    Aborted and who asked. What is committed is not aborted any more; delete it. A restore ends
    with its pod: snapshotctl delete pod NAME.
    """
    tools: Tools = context.obj

    async def work() -> None:
        wanted, within_s = targets.aborted(name, namespace), formats.parse_duration(timeout)
        async with tools.operator(patiently=True) as operator:
            by = machine.person()
            await oncall.abort(operator, tools.screen, wanted, by=by, within_s=within_s)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl schema",
        "snapshotctl schema dump_order",
        "snapshotctl schema snapshotcontent | jq .required",
    )
)
def schema(
    context: typer.Context,
    type_: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE",
            help="A type of message or object.",
            show_default=False,
            autocompletion=completing.schemas,
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a message or object, or list all.

    It needs no server.
    """
    tools: Tools = context.obj

    async def work() -> None:
        known = message_schemas()
        if type_ is None:
            oncall.list_schemas(tools.screen, known)
        else:
            tools.screen.value(known[schemas.named(type_, known)])

    run_work(tools, work())


@app.command(
    epilog=example(
        "source <(snapshotctl completion bash)",
        "snapshotctl completion zsh > ~/.zfunc/_snapshotctl",
        "snapshotctl completion fish > ~/.config/fish/completions/snapshotctl.fish",
    )
)
def completion(
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", help="The shell.")
    ],
) -> None:
    """Print the script by which a shell completes commands and names.

    `snapshotctl --install-completion` puts it where the shell finds it.
    """
    typer.echo(
        get_completion_script(
            prog_name=completing.PROGRAM, complete_var=completing.VARIABLE, shell=shell
        )
    )


@app.command(epilog=example("snapshotctl doctor", "snapshotctl doctor -o json"))
def doctor(context: typer.Context) -> None:
    """Check this machine and the cluster; say how to mend each.

    Every line says ok, warn or fail, what was looked at, and the fix. It changes nothing, but
    writes a span to see whether NATS stores it, and ends with exit code 1 when something fails.
    """
    tools: Tools = context.obj

    async def work() -> Exit:
        seen = await observer.observe(tools.folders, tools.server, tools.cluster)
        return findings.show(tools.screen, seen)

    run_work(tools, work())


@app.command(
    epilog=example("snapshotctl bundle", "snapshotctl bundle -o report.tar.gz --reports 2000")
)
def bundle(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Option("-o", "--file", metavar="FILE.tar.gz", help="Where it goes."),
    ] = None,
    reports: Annotated[
        int, typer.Option("--reports", metavar="N", min=0, help="How many of the last reports.")
    ] = 500,
) -> None:
    """Collect what a bug report needs into one archive.

    Versions, the doctor's findings, all objects, nodes, orders, reports, dead letters, traces,
    settings, and the ends of a local cluster's logs. Values of environment variables, keys and
    passwords are taken out. What cannot be had is named, and the rest is taken.
    """
    tools: Tools = context.obj

    async def work() -> None:
        now = machine.now()
        stamp = datetime.fromtimestamp(now, UTC).strftime("%Y%m%dT%H%M%SZ")
        path = Path(contents.file_name(file, stamp))
        collection = bundling.Collection()
        seen = await observer.observe(tools.folders, tools.server, tools.cluster)
        collection.add("versions.json", archive.versions())
        collection.add("settings.json", contents.settings(os.environ))
        bundling.add_findings(collection, seen)
        if seen.unreachable is None:
            async with tools.operator() as operator:
                await bundling.add_cluster(collection, operator, last=reports)
        else:
            why = seen.unreachable.message
            collection.missing.append(contents.Missing("everything of the cluster", why))
        if record := tools.local_record(seen.local.cluster):
            collection.add("cluster.json", record)
            for name, data in archive.log_ends(Places(Path(record.state_dir), Path()).logs):
                collection.add_text(name, data)
        files = collection.files(seen.version)
        size = archive.write(path, files, now=now)
        bundling.show(tools.screen, str(path), size, files, collection.missing)

    run_work(tools, work())
