"""The commands: their arguments, their help, and which handler carries them out."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from snapshot_shared.errors import SnapbackError
from snapshot_shared.permissions import users_of
from snapshot_shared.service import VERSION
from snapshotctl.adapters import machine, nkeys
from snapshotctl.adapters.render import Output
from snapshotctl.domain import arguments, exits, formats, targets
from snapshotctl.domain.cluster import CONTEXT_PREFIX, NATS, NATS_CONFIGURATION, NatsServer
from snapshotctl.domain.demo import check_size
from snapshotctl.domain.exits import Exit
from snapshotctl.domain.waiting import parse_goal
from snapshotctl.handlers import clusters, demo, identities, objects, traces, verifying
from snapshotctl.main import completing, inspect, operate, sim
from snapshotctl.main.running import example, failed
from snapshotctl.main.wiring import Tools, read_documents, run_work

_EXITS = "\b\nExit codes:\n" + exits.help_text()
WHERE = (
    "Where the server is: --server, --cluster, NATS_URL, SNAPBACK_CLUSTER, NATS_CONTEXT, the "
    "selected nats context, the local cluster 'default'; the first that is set counts."
)
"""How a command finds its server."""

app = typer.Typer(
    name="snapshotctl",
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


File = Annotated[
    Path, typer.Option("--filename", "-f", metavar="FILE", help="A YAML file; - for stdin.")
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the objects.")]
Name = Annotated[
    str | None, typer.Option("--name", help="Name of the local cluster.", show_default="default")
]
Words = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND NAME",
        help="KIND NAME or KIND/NAME.",
        autocompletion=completing.kinds_and_names,
    ),
]


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"snapshotctl {VERSION}")
        raise typer.Exit


@app.callback(epilog=f"{WHERE}\n\n{_EXITS}")
def common(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Address of NATS; several with commas."),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option("--cluster", metavar="NAME", help="Use this local cluster.")
    ] = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="Form of the result.")] = "table",
    version: Annotated[  # noqa: ARG001 - its callback has shown it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Capture warm GPU workers, restore them in seconds, and look at what is going on."""
    context.obj = Tools(server, cluster, output)


@app.command(
    epilog=example(
        "snapshotctl apply -f deploy/examples/checkpoint.yaml",
        "cat *.yaml | snapshotctl apply -f -",
    )
)
def apply(context: typer.Context, file: File) -> None:
    """Store the manifests of a file, all or none."""
    tools: Tools = context.obj

    async def work() -> None:
        documents = read_documents(file)
        async with tools.operator() as operator:
            await objects.apply(operator, tools.screen, tools.telemetry, documents)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl identity -f deploy/examples/checkpoint.yaml",
        "snapshotctl identity -f checkpoint.yaml -o json | jq -r '.[].identityHash'",
    )
)
def identity(context: typer.Context, file: File) -> None:
    """Print the identity hash of each DynamoCheckpoint of a file, without a server.

    It is what status.checkpointID will be. Artifacts of equal hashes are interchangeable. Only
    spec.identity is read; manifests of other kinds are passed over.
    """
    tools: Tools = context.obj

    async def work() -> None:
        identities.show(tools.screen, read_documents(file))

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl get dynamocheckpoints",
        "snapshotctl get pod my-worker -o yaml",
        "snapshotctl get snapshots -A",
    )
)
def get(
    context: typer.Context,
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="KIND [NAME]",
            help="What to show; KIND/NAME also works.",
            autocompletion=completing.kinds_and_names,
        ),
    ],
    namespace: Namespace = "default",
    everywhere: Annotated[
        bool, typer.Option("--all-namespaces", "-A", help="Show all namespaces.")
    ] = False,
) -> None:
    """Show one object, or all of a kind.

    The kinds are dynamocheckpoints, snapshots, snapshotcontents, restores, jobs, pods and nodes.
    A pod is Unknown while its node is silent: its worker may well run.
    """
    tools: Tools = context.obj

    async def work() -> None:
        target = targets.target(words, namespace)
        if everywhere:
            target = targets.everywhere(target)
        async with tools.operator() as operator:
            await objects.get(
                operator, tools.screen, target, now=machine.now(), everywhere=everywhere
            )

    run_work(tools, work())


@app.command(epilog=example("snapshotctl delete pod my-worker", "snapshotctl delete snap/demo"))
def delete(context: typer.Context, words: Words, namespace: Namespace = "default") -> None:
    """Delete an object and what belongs to it."""
    tools: Tools = context.obj

    async def work() -> None:
        target = targets.one_target(words, namespace)
        async with tools.operator() as operator:
            await objects.delete(operator, tools.screen, target)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl wait dynamocheckpoint/demo-llm --for condition=Ready --timeout 5m",
        "snapshotctl wait pod my-worker --for delete",
    )
)
def wait(
    context: typer.Context,
    words: Words,
    goal: Annotated[
        str,
        typer.Option("--for", metavar="GOAL", help="condition=TYPE, condition=TYPE=False, delete."),
    ] = "condition=Ready",
    timeout: Annotated[
        str, typer.Option("--timeout", metavar="TIME", help="How long at most: 90s, 5m, 1h30m.")
    ] = "5m",
    namespace: Namespace = "default",
) -> None:
    """Wait until a condition comes true, or cannot any more."""
    tools: Tools = context.obj

    async def work() -> None:
        target = targets.one_target(words, namespace)
        wanted, within_s = parse_goal(goal), formats.parse_duration(timeout)
        async with tools.operator(patiently=True) as operator:
            await objects.wait(operator, tools.screen, target, wanted, within_s=within_s)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl verify demo-llm",
        "snapshotctl verify snapshot/demo-llm --timeout 10m -o json",
    )
)
def verify(
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
        str, typer.Option("--timeout", metavar="TIME", help="How long at most: 90s, 5m, 1h30m.")
    ] = "1h",
    namespace: Namespace = "default",
) -> None:
    """Have every byte of a captured artifact read and compared.

    Damage brings it into quarantine, where nobody begins to restore from it; a verification that
    finds none lifts that. Damage, and an artifact that nobody could read to its end, are failures
    (exit code 1).
    """
    tools: Tools = context.obj

    async def work() -> None:
        wanted, within_s = targets.verified(name, namespace), formats.parse_duration(timeout)
        async with tools.operator(patiently=True) as operator:
            await verifying.verify(operator, tools.screen, wanted, within_s=within_s)

    run_work(tools, work())


@app.command(epilog=example("snapshotctl nodes"))
def nodes(context: typer.Context) -> None:
    """Show the nodes, their GPUs, and when they were last heard of."""
    tools: Tools = context.obj

    async def work() -> None:
        async with tools.operator() as operator:
            await objects.nodes(operator, tools.screen, now=machine.now())

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl trace demo-llm",
        "snapshotctl trace pod/demo-llm-restored",
        "snapshotctl trace demo-llm -o json | jq '.[].name'",
    )
)
def trace(
    context: typer.Context,
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A checkpoint, snapshot, content or pod; KIND/NAME; a trace id.",
            autocompletion=completing.traced,
        ),
    ],
    namespace: Namespace = "default",
) -> None:
    """Show what was done for an object as a waterfall of spans."""
    tools: Tools = context.obj

    async def work() -> None:
        async with tools.operator() as operator:
            await traces.trace(operator, tools.screen, name, namespace)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl up", "snapshotctl up --nodes 3 --gpus 4 --gpu-memory 1GiB --name big"
    )
)
def up(
    context: typer.Context,
    count: Annotated[int, typer.Option("--nodes", metavar="N", help="How many nodes.")] = 2,
    gpus: Annotated[int, typer.Option("--gpus", metavar="N", help="Simulated GPUs a node.")] = 2,
    gpu_memory: Annotated[
        str, typer.Option("--gpu-memory", metavar="SIZE", help="Memory a GPU.")
    ] = "4GiB",
    name: Name = None,
) -> None:
    """Start a local cluster whose nodes have simulated GPUs.

    Its nats-server, its operator, and the agent and GPU memory service of each node are processes
    of their own; they go on when this command has ended.
    """
    tools: Tools = context.obj

    async def work() -> None:
        specs = clusters.specs(count, gpus, formats.parse_size(gpu_memory))
        await clusters.up(tools.local_cluster(name), tools.screen, specs)

    run_work(tools, work())


@app.command(epilog=example("snapshotctl down", "snapshotctl down --name big --purge"))
def down(
    context: typer.Context,
    name: Name = None,
    purge: Annotated[
        bool, typer.Option("--purge", help="Remove its state, logs and artifacts, too.")
    ] = False,
) -> None:
    """End a local cluster and its workers.

    Its state stays for the next `up`, unless --purge removes it.
    """
    tools: Tools = context.obj

    async def work() -> None:
        await clusters.down(tools.local_cluster(name), tools.screen, purge=purge)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl keys --folder keys --node node-1 --node node-2",
        "snapshotctl keys --folder keys --node node-1 --listen 0.0.0.0:4222",
    )
)
def keys(
    context: typer.Context,
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Where to write.")],
    node: Annotated[list[str], typer.Option("--node", metavar="NAME", help="A node; repeat it.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where nats-server will listen.")
    ] = "127.0.0.1:4222",
    monitor: Annotated[
        str | None, typer.Option("--monitor", metavar="HOST:PORT", help="Its HTTP port, if any.")
    ] = None,
    store: Annotated[
        Path, typer.Option("--store", metavar="FOLDER", help="Where it will keep its streams.")
    ] = Path("/var/lib/nats"),
) -> None:
    """Make the keys of a NATS of your own, and the configuration of its server.

    Writes FOLDER/USER/seed.nk for the operator, for snapshotctl, for viewers, and for the agent and
    the GPU memory service of each node, and FOLDER/nats-server/nats.conf, which lets exactly these
    in. Seeds that are there already are kept, so run it again when a node is added.
    """
    tools: Tools = context.obj

    async def work() -> None:
        server = NatsServer(CONTEXT_PREFIX + folder.resolve().name, listen, store, monitor=monitor)
        users = users_of(clusters.node_names(node))
        seeds = {user: folder / user.name / "seed.nk" for user in users}
        configuration = folder / NATS / NATS_CONFIGURATION
        nkeys.admit(configuration, server, seeds)
        for user, seed in seeds.items():
            tools.screen.line(f"{user.name:20} {seed}")
        tools.screen.line(f"{NATS:20} {configuration}")

    run_work(tools, work())


@app.command("demo", epilog=example("snapshotctl demo", "snapshotctl demo --size-mib 2048 --keep"))
def show_demo(
    context: typer.Context,
    size_mib: Annotated[
        int,
        typer.Option(
            "--size-mib", metavar="MIB", envvar="SIZE_MIB", help="Size of the worker's weights."
        ),
    ] = 512,
    keep: Annotated[
        bool, typer.Option("--keep", help="Leave the cluster running at the end.")
    ] = False,
    on: Annotated[
        Path | None,
        typer.Option("--on", metavar="FOLDER", help="Play on a cluster that runs; see below."),
    ] = None,
    via: Annotated[
        str, typer.Option("--via", metavar="WORDS", help="With --on: what you type first.")
    ] = "",
) -> None:
    """Capture a worker, lose its node, restore it on another.

    Everything runs on this machine, in a cluster of its own that is gone afterwards. The answers
    of the worker before and after have to be the same, byte for byte.

    With --on nothing is started. The cluster is that of --server or NATS_URL; FOLDER/node-1 and
    FOLDER/node-2 are the folders of the sockets of its nodes, and the processes of node-1, which
    the demo kills, have to be visible here.
    """
    tools: Tools = context.obj

    async def work() -> None:
        size = check_size(size_mib)
        stage = tools.stage_on(on, via) if on else tools.stage()
        await demo.run(stage, size_mib=size, keep=keep)

    run_work(tools, work())


@app.command(epilog=example("snapshotctl leftovers"))
def leftovers(context: typer.Context) -> None:
    """Show what local clusters left behind.

    Lists processes, folders of sockets and folders of state that belong to no running cluster.
    """
    tools: Tools = context.obj

    async def work() -> Exit:
        return clusters.show_leftovers(tools.screen, tools.folders.look())

    run_work(tools, work())


app.add_typer(operate.app)
app.add_typer(sim.app)
inspect.register(app)


def run(words: Sequence[str]) -> int:
    """Parse a command line, run it, and give its exit code."""
    try:
        code = app(arguments.hoisted(words), prog_name="snapshotctl", standalone_mode=False)
    except typer.TyperException as error:
        return int(_misunderstood(error))
    except typer.Abort:
        return int(Exit.INTERRUPTED)
    except SnapbackError as error:
        return int(failed(error, Tools(None, None, "table").screen))
    return int(code or Exit.OK)


def _misunderstood(error: typer.TyperException) -> Exit:
    """Say what is wrong with the command line, and how it is right."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error.format_message()}\n")
        return Exit.USAGE
    sys.stderr.write(f"error: {error.format_message()}\n")
    if context is not None:
        sys.stderr.write(f"{context.get_usage()}\n")
        examples, _, _ = (context.command.epilog or "").partition("\n\n")
        if context.parent is not None:
            sys.stderr.write(f"{examples.removeprefix(chr(8)).strip()}\n")
        sys.stderr.write(f"next: {context.command_path} --help says more\n")
    return Exit.USAGE
