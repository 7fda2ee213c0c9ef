"""What commands share: how an async function becomes one, and their common options."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import os
import signal
import traceback
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from snapshot_api.kind import Kind
from snapshot_api.kinds import KINDS, find_kind
from snapshot_shared.errors import Failure, SnapbackError, failure_of
from snapshotctl.domain import targets
from snapshotctl.domain.exits import Exit, exit_of
from snapshotctl.tools import DEFAULT_NAMESPACE, Tools

if TYPE_CHECKING:
    from snapshotctl.ports import Screen

Work = TypeVar("Work", bound=Callable[..., Coroutine[Any, Any, int | None]])

SHOW_TRACEBACKS = "SNAPBACK_TRACEBACK"
COMPLETION_S = 1.0
"""How long the names of objects may take when the user pressed Tab, in seconds."""

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def new_app(name: str | None = None, help_: str = "", *examples: str) -> typer.Typer:
    """Return the app of one command, or with a name and a help text that of a group."""
    if name is None:
        return typer.Typer(rich_markup_mode=None, add_completion=False)
    return typer.Typer(
        name=name,
        help=help_,
        rich_markup_mode=None,
        add_completion=False,
        no_args_is_help=True,
        epilog=_epilog(examples),
    )


def command(app: typer.Typer, *examples: str, name: str | None = None) -> Callable[[Work], Work]:
    """Make an async function a command of `app`.

    Its first parameter is the `Tools`, the others are options and arguments as typer has them. It
    returns its exit code (an `Exit`, or that of a program that it ran), or None for success.
    """

    def register(work: Work) -> Work:
        signature = inspect.signature(work, eval_str=True)
        context = inspect.Parameter(
            "context", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context
        )
        parameters = [context, *list(signature.parameters.values())[1:]]

        def run(context: typer.Context, **values: Any) -> None:
            tools: Tools = context.obj

            async def placed() -> int | None:
                # The namespace of a context is asked for only where a command needs one.
                if values.get("namespace") == DEFAULT_NAMESPACE and _is_default(context):
                    values["namespace"] = tools.namespace
                return await work(tools, **values)

            raise typer.Exit(int(carry_out(placed(), tools.screen)))

        # `exec_` and `open_` would hide what Python has under these names.
        run.__name__, run.__doc__ = work.__name__.rstrip("_"), work.__doc__
        # typer reads both.
        run.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        run.__annotations__ = {found.name: found.annotation for found in parameters}
        app.command(name, epilog=_epilog(examples))(run)
        return work

    return register


def _is_default(context: typer.Context) -> bool:
    source = context.get_parameter_source("namespace")
    return source is not None and source.name == "DEFAULT"


def _epilog(examples: Sequence[str]) -> str:
    shown = "\n".join(f"  {line}" for line in examples)
    return (
        f"\b\nExamples:\n{shown}\n\n"
        "--server, --context, --kubeconfig, --cluster and --output (see snapshotctl --help) may "
        "stand here as well."
    )


def carry_out(work: Coroutine[Any, Any, int | None], screen: Screen) -> int:
    """Run a command and return its exit code. An interrupt cancels it; it cleans up first."""
    whole = _interruptible(work, screen)
    try:
        return asyncio.run(whole)
    except BrokenPipeError:
        raise
    except Exception as error:  # noqa: BLE001 - here every error becomes a line and a code
        failure = _described(error)
        screen.failure(failure)
        if os.environ.get(SHOW_TRACEBACKS):
            screen.note("".join(traceback.format_exception(error)))
        return exit_of(failure)
    finally:
        # An interrupt may come before either has begun, of which Python would warn.
        whole.close()
        work.close()


def _described(error: Exception) -> Failure:
    if isinstance(error, OSError) and not isinstance(error, TimeoutError):
        where = f": {error.filename}" if error.filename else ""
        return Failure(reason="OSError", message=f"{error.strerror or error}{where}")
    failure = failure_of(error)
    if isinstance(error, SnapbackError | TimeoutError):
        return failure
    return Failure(
        reason=failure.reason,
        message=f"this is a defect of snapshotctl: {failure.message}",
        next_step=f"run it again with {SHOW_TRACEBACKS}=1 and report what it prints",
    )


async def _interruptible(work: Coroutine[Any, Any, int | None], screen: Screen) -> int:
    loop = asyncio.get_running_loop()
    task = asyncio.ensure_future(work)
    interrupted = False

    def interrupt() -> None:
        nonlocal interrupted
        if interrupted:
            screen.note("cleaning up, please wait")
            return
        interrupted = True
        task.cancel()

    # A handler of the loop: KeyboardInterrupt could be raised within any clean-up.
    for number in _SIGNALS:
        loop.add_signal_handler(number, interrupt)
    try:
        return await task or Exit.OK
    except asyncio.CancelledError:
        if not interrupted:
            raise
        screen.note("interrupted")
        return Exit.INTERRUPTED


# Completion: a cluster that does not answer at once offers nothing and prints nothing.


def _names(context: typer.Context, kinds: Sequence[Kind]) -> list[str]:
    root = context.find_root().params
    if root.get("kubeconfig") or root.get("context_name"):
        # kubectl takes longer than a user waits.
        return []
    space = context.params.get("namespace") or DEFAULT_NAMESPACE
    tools = Tools(root.get("server"), root.get("cluster"), "table")

    async def look() -> list[str]:
        async with asyncio.timeout(COMPLETION_S):
            return await tools.names(kinds, space)

    with contextlib.suppress(SnapbackError, OSError, ValueError):
        return asyncio.run(look())
    return []


def _kind(text: str) -> Kind | None:
    with contextlib.suppress(SnapbackError):
        return find_kind(text)
    return None


def _kinds_and_names(context: typer.Context, incomplete: str) -> list[str]:
    """Complete `KIND NAME` and `KIND/NAME`."""
    known = context.params.get("words") or []
    if "/" in incomplete:
        typed = incomplete.partition("/")[0]
        kind = _kind(typed)
        return [f"{typed}/{name}" for name in _names(context, [kind])] if kind else []
    if known:
        kind = _kind(known[0]) if len(known) == 1 else None
        return _names(context, [kind]) if kind else []
    kinds = list(KINDS.values())
    # A name alone is enough as well.
    return [*(kind.plural for kind in kinds), *_names(context, kinds)]


def _captured(context: typer.Context, incomplete: str) -> list[str]:
    return _kind_or_name(context, incomplete, [KINDS[name] for name in targets.VERIFIABLE])


def _traced(context: typer.Context, incomplete: str) -> list[str]:
    return _kind_or_name(context, incomplete, [KINDS[name] for name in targets.TRACED])


def complete_logs(context: typer.Context, incomplete: str) -> list[str]:
    """Complete what has a log: pods, and services, of a local cluster also when it is down."""
    root = context.find_root().params
    if root.get("kubeconfig") or root.get("context_name"):
        return []
    tools = Tools(root.get("server"), root.get("cluster"), "table")
    from snapshotctl.domain.sources import known_services, pod_typed  # noqa: PLC0415

    programs: list[str] = []
    with contextlib.suppress(SnapbackError, OSError):
        if (kept := tools.logs()) is not None:
            programs = kept.programs()
    pods = _names(context, [KINDS["Pod"]])
    if incomplete.startswith("pod/"):
        return [f"pod/{name}" for name in pods]
    return [*known_services(programs), *(pod_typed(name, programs) for name in pods)]


def _pods(context: typer.Context) -> list[str]:
    return _names(context, [KINDS["Pod"]])


def complete_explained(context: typer.Context, incomplete: str) -> list[str]:
    """Complete a name that `explain` takes, or a reason, which begins with a capital."""
    if incomplete[:1].isupper():
        from snapshot_shared.reasons import REASONS  # noqa: PLC0415 - long, and rarely needed

        return list(REASONS)
    kinds = [*(KINDS[name] for name in targets.TRACED), KINDS["Node"]]
    return _kind_or_name(context, incomplete, kinds)


def _kind_or_name(context: typer.Context, incomplete: str, kinds: Sequence[Kind]) -> list[str]:
    typed, slash, _ = incomplete.partition("/")
    if not slash:
        return _names(context, kinds)
    kind = _kind(typed)
    return [f"{typed}/{n}" for n in _names(context, [kind])] if kind and kind in kinds else []


def complete_clusters() -> list[str]:
    """Complete the name of a local cluster."""
    with contextlib.suppress(SnapbackError, OSError):
        return Tools(None, None, "table").folders.names()
    return []


def complete_goals() -> list[str]:
    """Complete what can be waited for."""
    return ["condition=Ready", "condition=Failed", "delete"]


def complete_pods(context: typer.Context) -> list[str]:
    """Complete the name of a pod."""
    return _names(context, [KINDS["Pod"]])


def complete_sources(context: typer.Context) -> list[str]:
    """Complete the name of what a pod can be restored from."""
    return _names(context, [KINDS["DynamoCheckpoint"], KINDS["Snapshot"]])


def complete_nodes(context: typer.Context) -> list[str]:
    """Complete the name of a node."""
    return _names(context, [KINDS["Node"]])


# Options and arguments that several commands have.

Files = Annotated[
    list[Path],
    typer.Option(
        "--filename",
        "-f",
        metavar="FILE",
        help="A YAML file, or a folder of them; - for stdin. May be repeated.",
    ),
]
Manifest = Annotated[
    Path | None,
    typer.Option("--manifest", metavar="FILE", help="A YAML file with one Pod; - for stdin."),
]
Container = Annotated[
    str | None, typer.Option("--container", metavar="NAME", help="The container that is captured.")
]
Namespace = Annotated[str, typer.Option("--namespace", "-n", help="Namespace of the objects.")]
MaybeNamespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace.", show_default="default")
]
AllNamespaces = Annotated[bool, typer.Option("--all-namespaces", "-A", help="Of all namespaces.")]
Timeout = Annotated[
    str, typer.Option("--timeout", metavar="TIME", help="How long at most: 90s, 5m, 1h30m.")
]
WorkerDriver = Annotated[
    str, typer.Option("--driver", metavar="DRIVER", help="cooperative, or criu, as root.")
]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--name", hidden=True, help="The same as --cluster.", autocompletion=complete_clusters
    ),
]
KindAndName = Annotated[
    list[str],
    typer.Argument(
        metavar="[KIND] NAME",
        help="KIND NAME, KIND/NAME, or a name that one object has.",
        autocompletion=_kinds_and_names,
    ),
]
KindAndNames = Annotated[
    list[str],
    typer.Argument(
        metavar="[KIND] NAME...",
        help="KIND NAME..., KIND/NAME..., or names that one object each has.",
        autocompletion=_kinds_and_names,
    ),
]
KindAndMaybeName = Annotated[
    list[str],
    typer.Argument(
        metavar="KIND [NAME]",
        help="What to show; KIND/NAME, or a name that one object has.",
        autocompletion=_kinds_and_names,
    ),
]
RunningPod = Annotated[
    str, typer.Argument(metavar="POD", help="A pod that runs.", autocompletion=_pods)
]
WorkerContainer = Annotated[
    str | None,
    typer.Option("--container", "-c", metavar="NAME", help="A container of the pod."),
]
Captured = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A checkpoint, snapshot or content; KIND/NAME.",
        autocompletion=_captured,
    ),
]
Traced = Annotated[
    str,
    typer.Argument(
        metavar="NAME",
        help="A checkpoint, snapshot, content or pod; KIND/NAME.",
        autocompletion=_traced,
    ),
]
Node = Annotated[
    str,
    typer.Argument(
        metavar="NODE", help="The node, as in: snapshotctl nodes.", autocompletion=complete_nodes
    ),
]
