"""The commands by their names, and the parsing of a command line.

A command named `explain` is `snapshotctl.commands.explain`, which is imported when it is called.
The table below holds what `--help` needs without importing them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from snapshotctl.domain import exits
from snapshotctl.domain.exits import Exit
from snapshotctl.domain.formats import OutputFormat
from snapshotctl.tools import Tools

GROUPS: dict[str, dict[str, str]] = {
    "Try it on this machine": {
        "demo": "Capture a worker, lose its node, restore it on another.",
        "up": "Start a local cluster whose nodes have simulated GPUs.",
        "down": "End a local cluster and its workers.",
        "clusters": "Show the local clusters of this machine: state, processes, address, folder.",
        "open": "Print the address of the page, and open it in the browser.",
        "sim": "Break a local cluster on purpose: crash, stall or fail a service at a step.",
        "leftovers": "Show what local clusters left behind.",
    },
    "Capture and restore": {
        "checkpoint": "Capture a running pod, or the pod of a manifest.",
        "restore": "Start a pod from what was captured, and wait until it serves.",
        "watch": "Show a capture or a restore phase by phase and part by part, until it is over.",
        "abort": "End a capture that is under way, now.",
        "verify": "Have every byte of a captured artifact read and compared.",
        "artifacts": "List, show, verify and compare captured artifacts; apply retention.",
    },
    "Objects": {
        "get": "Show one object, or all of a kind.",
        "describe": "Show all that is known of one object, and what happened to it.",
        "explain": "Explain an object: what was asked, what happened, its state, what to do.",
        "events": "Show what happened to one object and what belongs to it, or to all.",
        "wait": "Wait until a condition comes true, or cannot any more.",
        "delete": "Delete objects and what belongs to them.",
    },
    "Manifests": {
        "apply": "Store the manifests of files, all or none.",
        "validate": "Check the manifests of a file by the rules of the operator, without a server.",
        "render": "Print the manifests of a file with all that an operator puts into pods.",
        "identity": (
            "Print the identity hash of each DynamoCheckpoint of a file, without a server."
        ),
        "schema": "Print the JSON Schema of a message or object, or list all.",
    },
    "Workers and services": {
        "ask": "Put one question to a worker, and print its answer.",
        "exec": "Run a program beside a worker, as in its container.",
        "logs": "Show what a worker or a service has written.",
    },
    "Nodes": {
        "nodes": "Show the nodes, their GPUs, and when each was last seen.",
        "cordon": "Let nothing new begin on a node; what runs there goes on.",
        "uncordon": "Let new work begin on a node again.",
        "drain": (
            "Capture the pods of a node that are labelled for it, and restore them elsewhere."
        ),
    },
    "Find out what is wrong": {
        "doctor": "Check this machine and the cluster; print the fix of each problem.",
        "upgrade-check": "Say what an upgrade of the cluster would meet now.",
        "orders": "Show the orders under way, and the state of each.",
        "dead": "Look at messages that no service could take as an order.",
        "trace": "Show what was done for an object as a waterfall of spans.",
        "bundle": "Collect what a bug report needs into one archive.",
    },
    "Set up": {
        "keys": "Make the keys of a NATS of your own, and the configuration of its server.",
        "install": "Write the systemd units of a machine, with their settings and keys.",
        "completion": "Print the script by which a shell completes commands and names.",
        "version": "Show the versions of this program, of the services that answer, and of NATS.",
    },
}
"""The commands by what they are for, in the order in which `--help` lists them."""

COMMANDS = {name: about for group in GROUPS.values() for name, about in group.items()}
"""The first sentence of the help of each command."""

WHERE = (
    "Where the server is: --server, --context or --kubeconfig (the Snapback of a Kubernetes "
    "cluster, by kubectl), --cluster, NATS_URL, SNAPBACK_CLUSTER, NATS_CONTEXT, the "
    "selected nats context, the local cluster 'default'; the first that is set counts. With "
    "--server beside --context or --kubeconfig NATS is there, and kubectl changes the cluster."
)
"""How a command finds its server."""

OWN_OPERATOR = "--own-operator"
PLUGIN = "kubectl snapback"
"""How people call the program as a plug-in of kubectl."""
_GLOBAL_OPTIONS = ("--server", "--cluster", "--context", "--kubeconfig", "--output", "-o")
"""Each takes a value."""


def module_of(command: str) -> str:
    """Return the name of the module of a command."""
    return f"snapshotctl.commands.{command.replace('-', '_')}"


class _Modules(Mapping[str, Any]):
    """The commands by their names; each is imported when it is first asked for."""

    def __getitem__(self, name: str) -> Any:
        if name not in COMMANDS:
            raise KeyError(name)
        module = importlib.import_module(module_of(name))
        return typer.main.get_command(module.app)

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(TyperGroup):
    """All commands, without importing them to list their names or their summaries."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options | {"commands": {}})
        self.commands = _Modules()  # type: ignore[assignment]  # nothing adds a command to it

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        # One width for all groups, so that the texts stand below one another.
        width = max(map(len, COMMANDS))
        for title, commands in GROUPS.items():
            with formatter.section(title):
                rows = [(name.ljust(width), about) for name, about in commands.items()]
                formatter.write_dl(rows)


app = typer.Typer(
    name="snapshotctl",
    cls=_Group,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)


def _clusters() -> list[str]:
    from snapshotctl.command import complete_clusters  # noqa: PLC0415 - costs start-up time

    return complete_clusters()


def _version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version  # noqa: PLC0415 - costs start-up time

        typer.echo(f"snapshotctl {version('snapback-ctl')}")
        raise typer.Exit


@app.callback(epilog=f"{WHERE}\n\n\b\nExit codes:\n{exits.help_text()}")
def common(
    context: typer.Context,
    server: Annotated[
        str | None,
        typer.Option("--server", metavar="URL", help="Address of NATS; several with commas."),
    ] = None,
    cluster: Annotated[
        str | None,
        typer.Option(
            "--cluster",
            metavar="NAME",
            help="Use this local cluster.",
            autocompletion=_clusters,
        ),
    ] = None,
    context_name: Annotated[
        str | None,
        typer.Option(
            "--context", metavar="NAME", help="Use the Snapback of this context of kubectl."
        ),
    ] = None,
    kubeconfig: Annotated[
        str | None,
        typer.Option("--kubeconfig", metavar="FILE", help="The same, of this kubeconfig."),
    ] = None,
    own_operator: Annotated[
        bool,
        typer.Option(
            OWN_OPERATOR,
            help="Run the operator here until the command ends, where such a cluster has none.",
        ),
    ] = False,
    output: Annotated[
        OutputFormat, typer.Option("--output", "-o", help="Form of the result.")
    ] = "table",
    version: Annotated[  # noqa: ARG001 - its callback has shown it
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Capture warm GPU workers, restore them in seconds, and look at what is going on."""
    is_plugin = context.obj == PLUGIN
    tools = Tools(server, cluster, output, kubeconfig, context_name, own_operator, is_plugin)
    context.call_on_close(tools.close)
    context.obj = tools


def run(words: Sequence[str], *, is_plugin: bool = False) -> int:
    """Parse a command line, run its command, and return the exit code.

    A plug-in of kubectl uses its current context if nothing else is named.
    """
    name, obj = (PLUGIN, PLUGIN) if is_plugin else ("snapshotctl", None)
    try:
        # Not standalone, or typer would print errors and exit by itself.
        code = app(hoisted(words), prog_name=name, standalone_mode=False, obj=obj)
    except typer.TyperException as error:
        return int(_misunderstood(error))
    except typer.Abort:
        return int(Exit.INTERRUPTED)
    return int(code or Exit.OK)


def complete(words: Sequence[str]) -> int:
    """Print what may stand in the place of the last word, each on a line, as kubectl reads it."""
    from click.shell_completion import ShellComplete  # noqa: PLC0415 - for this alone

    root: Any = typer.main.get_command(app)
    *before, last = words or [""]
    found = ShellComplete(root, {}, PLUGIN, "").get_completions(before, last)
    for item in found:
        typer.echo(f"{item.value}\t{item.help}" if item.help else item.value)
    # kubectl offers no files besides.
    typer.echo(":4")
    return Exit.OK


def hoisted(words: Sequence[str]) -> list[str]:
    """Move the options that all commands have in front of the command, and a namespace behind it.

    `-o=json` and `-n=team-a` are read as kubectl reads them.
    """
    front: list[str] = []
    rest: list[str] = []
    behind: list[str] = []
    left = list(reversed(words))
    while left:
        word = left.pop()
        if word == "--":
            behind += [word, *reversed(left)]
            break
        if word.startswith(("-o=", "-n=")):
            left += [word[3:], word[:2]]
        elif word in _GLOBAL_OPTIONS:
            front += [word, *([left.pop()] if left else [])]
        elif word.partition("=")[0] in _GLOBAL_OPTIONS or word == OWN_OPERATOR or _is_short(word):
            front.append(word)
        elif word in ("-n", "--namespace") and not rest:
            behind += [word, *([left.pop()] if left else [])]
        else:
            rest.append(word)
    return front + rest + behind


def _is_short(word: str) -> bool:
    return word.startswith("-o") and not word.startswith("--") and len(word) > 2


def _misunderstood(error: typer.TyperException) -> Exit:
    """Print what is wrong with a command line, its usage and its examples."""
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        sys.stderr.write(f"{error.format_message()}\n")
        return Exit.USAGE
    # Typer puts two words before what is wrong with a value.
    wrong = error.format_message().replace("Value error, ", "")
    sys.stderr.write(f"error: {wrong}\n")
    if context is not None:
        sys.stderr.write(f"{context.get_usage()}\n")
        examples, _, _ = (context.command.epilog or "").partition("\n\n")
        if context.parent is not None:
            sys.stderr.write(f"{examples.removeprefix(chr(8)).strip()}\n")
        sys.stderr.write(f"next: {context.command_path} --help says more\n")
    return Exit.USAGE
