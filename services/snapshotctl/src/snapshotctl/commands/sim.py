"""The commands of `sim`: arm a fault in a service of a local cluster, and start it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
import typer

from snapshot_shared import steps
from snapshot_shared.api import Fault, FaultAction
from snapshot_shared.errors import InvalidInput, NotFound
from snapshot_shared.steps import Place
from snapshotctl.command import ClusterName, Node, command, complete_nodes, new_app
from snapshotctl.domain import formats
from snapshotctl.domain.cluster import ALONE
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.tools import Tools

_MEANINGS: dict[FaultAction, str] = {
    "crash": "is killed with SIGKILL",
    "stall": "waits until the deadline of the step",
    "fail": "reports InjectedFault",
}
_CAPTURES = "apply -f deploy/examples/checkpoint.yaml"
_RESTORES = "apply -f deploy/examples/restore.yaml"
_TRIGGERS = {
    **dict.fromkeys(("run", "prepare", "dump", "save", "seal", "release"), _CAPTURES),
    **dict.fromkeys(("load", "commit", "place", "restore"), _RESTORES),
    "stop": "delete pod NAME",
    "delete": "delete dynamocheckpoint NAME",
}
"""What leads to an order; an abort, a drop or a check follow from something else."""

_OF_A_POD = ("stop", "load", "commit", "drop", "place", "restore")


def _complete_restarted(context: typer.Context) -> list[str]:
    return [*complete_nodes(context), *ALONE]


At = Annotated[
    str | None, typer.Option("--at", metavar="STEP", help="The step at whose beginning it happens.")
]
Service = Annotated[
    str | None,
    typer.Option(
        "--service", metavar="agent|gms", help="The service. Without: the one that has the step."
    ),
]
Ended = Annotated[
    str | None,
    typer.Option(
        "--service", metavar="agent|gms", help="The service. Without: whichever does not run."
    ),
]
Restarted = Annotated[
    str,
    typer.Argument(
        metavar="NODE|PROGRAM",
        help=f"A node, or one of {', '.join(ALONE)}.",
        autocompletion=_complete_restarted,
    ),
]
Verb = Annotated[
    str | None,
    typer.Option("--verb", metavar="VERB", help="The verb, where several have such a step."),
]
Clear = Annotated[
    bool, typer.Option("--clear", help="Disarm all faults of the node (or of --service) instead.")
]

app = new_app(
    "sim",
    "Break a local cluster on purpose: crash, stall or fail a service at a step.",
    "snapshotctl sim crash node-1 --at copy-state",
    "snapshotctl sim restart node-1",
)


@command(
    app,
    "snapshotctl sim crash node-1 --at copy-state",
    "snapshotctl sim crash node-2 --at check --verb load",
)
async def crash(
    tools: Tools,
    node: Node,
    at: At = None,
    service: Service = None,
    verb: Verb = None,
    clear: Clear = False,
) -> None:
    """Kill a service with SIGKILL, once, when a step begins."""
    await _switch(tools, node, "crash", (at, verb, service), clear=clear)


@command(
    app,
    "snapshotctl sim stall node-1 --at quiesce",
    "snapshotctl sim stall node-1 --at signal --verb restore --for 5s",
    "snapshotctl sim stall node-1 --clear",
)
async def stall(
    tools: Tools,
    node: Node,
    at: At = None,
    service: Service = None,
    verb: Verb = None,
    lasts: Annotated[
        str, typer.Option("--for", metavar="DURATION", help="How long, if not to its deadline.")
    ] = "",
    clear: Clear = False,
) -> None:
    """Stall a step, once, for a time or until its deadline ends it."""
    stall_s = formats.parse_duration(lasts) if lasts else 0.0
    await _switch(tools, node, "stall", (at, verb, service), clear=clear, stall_s=stall_s)


@command(app, "snapshotctl sim fail node-1 --at write", "snapshotctl sim fail node-2 --at read")
async def fail(
    tools: Tools,
    node: Node,
    at: At = None,
    service: Service = None,
    verb: Verb = None,
    clear: Clear = False,
) -> None:
    """Let a step fail, once, with the reason InjectedFault."""
    await _switch(tools, node, "fail", (at, verb, service), clear=clear)


@command(
    app,
    "snapshotctl sim restart node-1",
    "snapshotctl sim restart node-2 --service gms",
    "snapshotctl sim restart operator",
)
async def restart(
    tools: Tools, what: Restarted, service: Ended = None, name: ClusterName = None
) -> None:
    """Start what was killed again, on its state: of a node, the operator, the page or nats-server.

    Returns when it answers, after its recovery. What still runs is left alone.
    """
    cluster = tools.local_cluster(name)
    if what in ALONE:
        if service is not None:
            raise WrongArguments(f"{what} has no services; leave --service out")
        started = await cluster.restart_program(what)
    else:
        started = await cluster.restart(what, services(service))
    if not tools.screen.wants_table:
        tools.screen.value({"node": "" if what in ALONE else what, "started": started})
        return
    for program in started:
        tools.screen.line(f"{program} answers again.", strong=True)
    tools.screen.line("  look             snapshotctl get dynamocheckpoints")


async def _switch(
    tools: Tools,
    node: str,
    action: FaultAction,
    chosen: tuple[str | None, str | None, str | None],
    *,
    clear: bool,
    stall_s: float = 0.0,
) -> None:
    at, verb, service = chosen
    if clear:
        if at or verb:
            raise WrongArguments("--clear disarms everything; --at and --verb exclude it")
        await _clear(tools, node, services(service))
        return
    if not at:
        raise WrongArguments("--at STEP is missing", next_step="name one, such as copy-state")
    found = place(at, verb, service)
    fault = Fault(action=action, step=found.step, verb=found.verb, stall_s=stall_s)
    await _arm(tools, node, found, fault)


async def _arm(tools: Tools, node: str, at: Place, fault: Fault) -> None:
    action = fault.action
    async with tools.operator() as operator:
        armed = await operator.arm_fault(node, at.service, fault)
    screen = tools.screen
    if not screen.wants_table:
        screen.value({"node": node, "service": at.service, "armed": msgspec.to_builtins(armed)})
        return
    meaning = f"waits for {fault.stall_s:g} s" if fault.stall_s else _MEANINGS[action]
    screen.line(
        f"Armed: the {at.service} of {node} {meaning} when {at.verb} begins its step "
        f"{at.step}, once.",
        strong=True,
    )
    others = [fault for fault in armed if (fault.verb, fault.step) != (at.verb, at.step)]
    for other in others:
        screen.line(f"  armed before     {other.action} at {other.verb} {other.step}")
    for line in looks(node, at, action):
        screen.line(f"  {line}")


async def _clear(tools: Tools, node: str, chosen: Sequence[str]) -> None:
    """Disarm all faults of some services of a node. NotFound when none of them answers."""
    cleared: list[str] = []
    absent: list[NotFound] = []
    async with tools.operator() as operator:
        for service in chosen:
            try:
                await operator.clear_faults(node, service)
                cleared.append(service)
            except NotFound as error:
                # A service that was killed has nothing armed either; the other one may have.
                absent.append(error)
    if not cleared:
        raise absent[0]
    if tools.screen.wants_table:
        tools.screen.line(f"Nothing is armed in {' and '.join(cleared)} of {node}.")
    else:
        tools.screen.value({"node": node, "services": cleared, "armed": []})


def place(step: str, verb: str | None, service: str | None) -> Place:
    """Return the one place of a step. WrongArguments lists the steps, or those to choose from."""
    try:
        found = steps.find(step, verb=verb or "", service=service or "")
    except InvalidInput as error:
        raise WrongArguments(error.message) from error
    if len(found) > 1:
        choices = " or ".join(f"--verb {each.verb} ({each.service})" for each in found)
        raise WrongArguments(f"several verbs have a step {step!r}", next_step=f"add {choices}")
    return found[0]


def services(service: str | None) -> Sequence[str]:
    """Return the service that is named, or both. WrongArguments."""
    if service is None:
        return tuple(steps.VERBS_OF)
    if service not in steps.VERBS_OF:
        raise WrongArguments(f"--service {service!r} is not one of {', '.join(steps.VERBS_OF)}")
    return (service,)


def looks(node: str, at: Place, action: str) -> list[str]:
    """Return what makes the fault happen and where to look afterwards, one line each."""
    trigger = _TRIGGERS.get(at.verb)
    lines = [f"make it happen   snapshotctl {trigger}"] if trigger else []
    kind = "pods" if at.verb in _OF_A_POD else "dynamocheckpoints"
    lines.append(f"look             snapshotctl get {kind}")
    if action == "crash":
        lines.append(f"start it again   snapshotctl sim restart {node} --service {at.service}")
    return [*lines, f"think again      snapshotctl sim {action} {node} --clear"]
