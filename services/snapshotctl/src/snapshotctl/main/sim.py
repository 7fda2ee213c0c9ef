"""The commands below `snapshotctl sim`: break a local cluster on purpose, and mend it."""

from __future__ import annotations

from typing import Annotated

import typer

from snapshot_shared.api import FaultAction
from snapshotctl.adapters.fault_switch import FaultSwitch
from snapshotctl.domain import faults as places
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.handlers import faults
from snapshotctl.main import completing
from snapshotctl.main.running import example
from snapshotctl.main.wiring import Tools, run_work

app = typer.Typer(
    name="sim",
    help="Break a local cluster on purpose: crash, stall or fail a service at a step.",
    rich_markup_mode=None,
    no_args_is_help=True,
    epilog=example(
        "snapshotctl sim crash node-1 --at copy-state",
        "snapshotctl sim restart node-1",
    ),
)

Node = Annotated[
    str,
    typer.Argument(
        metavar="NODE", help="The node, as in: snapshotctl nodes.", autocompletion=completing.nodes
    ),
]
At = Annotated[
    str | None, typer.Option("--at", metavar="STEP", help="The step at whose beginning it happens.")
]
Service = Annotated[
    str | None,
    typer.Option(
        "--service", metavar="agent|gms", help="The service. Without: the one that has the step."
    ),
]
Verb = Annotated[
    str | None,
    typer.Option("--verb", metavar="VERB", help="The verb, where several have such a step."),
]
Clear = Annotated[
    bool, typer.Option("--clear", help="Disarm all faults of the node (or of --service) instead.")
]
Name = Annotated[
    str | None, typer.Option("--name", help="Name of the local cluster.", show_default="default")
]


def _switch(
    context: typer.Context,
    node: str,
    action: FaultAction,
    chosen: tuple[str | None, str | None, str | None],
    *,
    clear: bool,
) -> None:
    tools: Tools = context.obj
    at, verb, service = chosen

    async def work() -> None:
        if clear:
            if at or verb:
                raise WrongArguments("--clear disarms everything; --at and --verb exclude it")
            services = places.services(service)
            async with tools.operator() as operator:
                await faults.clear(FaultSwitch(operator.bus), tools.screen, node, services)
            return
        if not at:
            raise WrongArguments("--at STEP is missing", next_step="name one, such as copy-state")
        place = places.place(at, verb, service)
        async with tools.operator() as operator:
            await faults.arm(FaultSwitch(operator.bus), tools.screen, node, action, place)

    run_work(tools, work())


@app.command(
    epilog=example(
        "snapshotctl sim crash node-1 --at copy-state",
        "snapshotctl sim crash node-2 --at check --verb load",
    )
)
def crash(
    context: typer.Context,
    node: Node,
    at: At = None,
    service: Service = None,
    verb: Verb = None,
    clear: Clear = False,
) -> None:
    """Kill a service with SIGKILL, once, when a step begins."""
    _switch(context, node, "crash", (at, verb, service), clear=clear)


@app.command(
    epilog=example(
        "snapshotctl sim stall node-1 --at quiesce", "snapshotctl sim stall node-1 --clear"
    )
)
def stall(
    context: typer.Context,
    node: Node,
    at: At = None,
    service: Service = None,
    verb: Verb = None,
    clear: Clear = False,
) -> None:
    """Let a step wait, once, until its deadline ends it."""
    _switch(context, node, "stall", (at, verb, service), clear=clear)


@app.command(
    epilog=example(
        "snapshotctl sim fail node-1 --at write", "snapshotctl sim fail node-2 --at read"
    )
)
def fail(
    context: typer.Context,
    node: Node,
    at: At = None,
    service: Service = None,
    verb: Verb = None,
    clear: Clear = False,
) -> None:
    """Let a step fail, once, with the reason InjectedFault."""
    _switch(context, node, "fail", (at, verb, service), clear=clear)


@app.command(
    epilog=example("snapshotctl sim restart node-1", "snapshotctl sim restart node-2 --service gms")
)
def restart(context: typer.Context, node: Node, service: Service = None, name: Name = None) -> None:
    """Start a killed agent or GPU memory service again, on its state.

    Returns when it answers, with its recovery behind it. What still runs is left alone.
    """
    tools: Tools = context.obj

    async def work() -> None:
        services = places.services(service)
        await faults.restart(tools.local_cluster(name), tools.screen, node, services)

    run_work(tools, work())
