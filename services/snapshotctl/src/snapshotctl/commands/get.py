"""The command get: objects as a table, as JSON or as YAML, now and as they change."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from snapshot_api.kind import Kind
from snapshot_api.kinds import AnyObject
from snapshot_shared.errors import BusUnavailable
from snapshotctl import objects
from snapshotctl.command import AllNamespaces, KindAndMaybeName, Namespace, command, new_app
from snapshotctl.domain import formats, selectors, targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.selectors import Requirement
from snapshotctl.domain.targets import Target
from snapshotctl.ports import Operator, Screen
from snapshotctl.tools import Tools
from snapshotctl.views import tables
from snapshotctl.views.changing import ChangingTable, changes

app = new_app()


@command(
    app,
    "snapshotctl get dynamocheckpoints",
    "snapshotctl get demo-llm -o wide",
    "snapshotctl get pod my-worker -o yaml",
    "snapshotctl get dynamocheckpoint demo-llm -o yaml --version v1alpha1",
    "snapshotctl get pods -l app=llm --watch",
    "snapshotctl get snapshots -A",
)
async def get(
    tools: Tools,
    words: KindAndMaybeName,
    namespace: Namespace = "default",
    everywhere: AllNamespaces = False,
    selector: Annotated[
        str,
        typer.Option(
            "--selector",
            "-l",
            metavar="LABELS",
            help="Only objects with these labels: app=llm,tier!=dev.",
        ),
    ] = "",
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Go on with what changes, until interrupted.")
    ] = False,
    version: Annotated[
        str,
        typer.Option(
            metavar="VERSION",
            help="Write objects in this version of their kind (with -o yaml or json): v1alpha1.",
        ),
    ] = "",
) -> None:
    """Show one object, or all of a kind.

    The kinds are dynamocheckpoints, snapshots, snapshotcontents, restores, jobs, pods and nodes. A
    name without a kind is that of the object that has it. A pod is Unknown while its node is
    silent: its worker may well run.
    """
    wanted = targets.meant(words, namespace)
    if everywhere:
        wanted = [targets.everywhere(wanted[0])]
    required = _required(selector, wanted)
    async with tools.operator(patiently=watch) as operator:
        target = await objects.resolved(operator, wanted)
        written = _written(target.kind, version, tools.screen)
        if watch:
            await _follow(operator, tools, target, required, written, with_namespace=everywhere)
            return
        if target.name is None:
            found = await _all(operator, target, required)
        else:
            found = [await objects.existing(operator, target)]
    if not tools.screen.wants_table:
        values = [written(item) for item in found]
        tools.screen.value(values if target.name is None else values[0])
    elif found:
        shown = tables.table_of(
            target.kind,
            found,
            tools.now(),
            with_namespace=everywhere,
            is_wide=tools.screen.wants_wide,
        )
        tools.screen.table(shown)
    else:
        tools.screen.note(_none(target, selector))


def _written(kind: Kind, version: str, screen: Screen) -> Callable[[AnyObject], Any]:
    if version and screen.wants_table:
        raise WrongArguments(
            "--version is for objects as a whole, and a table has none",
            next_step="add -o yaml or -o json",
        )
    return objects.in_version(kind, version) if version else formats.data


def _required(selector: str, wanted: Sequence[Target]) -> list[Requirement]:
    if not selector:
        return []
    if wanted[0].name is not None:
        raise WrongArguments(
            "a name and --selector exclude each other",
            next_step=f"leave one of them out: get {wanted[0].kind.plural} -l {selector}",
        )
    return selectors.parse(selector)


async def _all(
    operator: Operator, target: Target, required: Sequence[Requirement]
) -> list[AnyObject]:
    found = await operator.all_of(target.kind, target.namespace)
    return [item for item in found if selectors.matches(required, item.metadata.labels)]


def _none(target: Target, selector: str) -> str:
    where = f" in namespace {target.namespace}" if target.namespace else ""
    return f"no {target.kind.plural}{where}" + (f" with {selector}" if selector else "")


async def _follow(
    operator: Operator,
    tools: Tools,
    target: Target,
    required: Sequence[Requirement],
    written: Callable[[AnyObject], Any],
    *,
    with_namespace: bool,
) -> None:
    """Show objects, and each again when it has changed, until cancelled.

    A server that does not answer is waited for, but not at the beginning.
    """
    screen = tools.screen
    table = ChangingTable(target.kind, with_namespace=with_namespace, is_wide=screen.wants_wide)
    # Subscribed before they are read, so that no change between the two is lost.
    async with operator.watching(target) as changing:
        known = await _read(operator, target, required)
        if target.name is not None and not known:
            await objects.existing(operator, target)
        _show(screen, table, written, "ADDED", known, tools.now())
        if not known:
            screen.note(f"{_none(target, '')} yet")
        while True:
            await changing.wait()
            with contextlib.suppress(BusUnavailable):
                found = await _read(operator, target, required)
                for kind, item in changes(known, found):
                    _show(screen, table, written, kind, [item], tools.now())
                known = found


async def _read(
    operator: Operator, target: Target, required: Sequence[Requirement]
) -> list[AnyObject]:
    if target.name is None:
        return await _all(operator, target, required)
    one = await operator.get(target)
    return [] if one is None else [one]


def _show(
    screen: Screen,
    table: ChangingTable,
    written: Callable[[AnyObject], Any],
    kind: str,
    found: Sequence[AnyObject],
    now: float,
) -> None:
    if not screen.wants_table:
        for item in found:
            screen.entry({"type": kind, "object": written(item)})
        return
    for number, line in enumerate(table.lines(found, now, is_gone=kind == "DELETED")):
        screen.line(line, strong=number == 0 and table.is_first)
