"""The command logs: what a worker or a service has written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from snapshot_api.facts import Pod
from snapshot_shared.errors import NotFound
from snapshotctl import objects
from snapshotctl.adapters.cluster_logs import LogFile, lines_of
from snapshotctl.command import Namespace, command, complete_logs, new_app
from snapshotctl.domain import formats, sources, targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.tools import Tools

if TYPE_CHECKING:
    from snapshotctl.adapters.cluster_logs import ClusterLogs

app = new_app()


@command(
    app,
    "snapshotctl logs demo-llm-restored --tail 20",
    "snapshotctl logs agent@node-1 --follow",
    "snapshotctl logs operator -f --tail 0",
)
async def logs(
    tools: Tools,
    name: Annotated[
        str,
        typer.Argument(
            metavar="POD|SERVICE",
            help="A pod, or operator, nats, page, agent@NODE, gms@NODE, helper@NODE.",
            autocompletion=complete_logs,
        ),
    ],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on with what is written from now on.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option("--tail", metavar="N", min=0, help="The last N lines.", show_default="all"),
    ] = None,
    container: Annotated[
        str | None,
        typer.Option("--container", "-c", metavar="NAME", help="One container of the pod alone."),
    ] = None,
    namespace: Namespace = "default",
) -> int | None:
    """Show what a worker or a service has written.

    The log of a worker is kept until its pod is deleted, in a local cluster the last 32 MiB of it
    at least. The logs of a local cluster are files; a service's is read also when nothing runs.
    Those of a Kubernetes cluster are shown by kubectl. A pod that is called like a service is
    pod/NAME.
    """
    service = sources.service_named(name)
    if service is not None and container is not None:
        raise WrongArguments("--container is for a pod", next_step=f"snapshotctl logs {service}")
    space = targets.checked_namespace(namespace)
    pod = "" if service else targets.one_target(["pod", name.removeprefix("pod/")], space).name
    if tools.kubernetes is not None:
        options = [*(["--follow"] if follow else []), f"--tail={-1 if tail is None else tail}"]
        if service is not None:
            return await tools.kubernetes.show(*tools.kubernetes.log_of(service), *options)
        which = [f"--container={container}"] if container else ["--all-containers", "--prefix"]
        return await tools.kubernetes.show("logs", str(pod), "--namespace", space, *which, *options)
    kept = _kept(tools)
    if service is None and container is None:
        service = sources.service_named(name, kept.programs())
    if service is not None:
        files = [kept.program(sources.program_of(service, kept.programs()))]
    else:
        files = await _of_pod(tools, kept, str(pod), space, container)
    await _show(tools, files, tail, follow=follow)
    return None


def _kept(tools: Tools) -> ClusterLogs:
    found = tools.logs()
    if found is None:
        raise NotFound(
            "the logs of this cluster are not on this machine",
            next_step="log in where its programs run, or name a Kubernetes cluster with --context",
        )
    return found


async def _of_pod(
    tools: Tools, kept: ClusterLogs, name: str, namespace: str, container: str | None
) -> list[LogFile]:
    """Return the logs of the containers of a pod. NotFound, WrongArguments."""
    target = targets.one_target(["pod", name], namespace)
    async with tools.operator() as operator:
        try:
            pod = await objects.existing(operator, target)
        except NotFound as error:
            services = ", ".join(sources.known_services(kept.programs()))
            raise NotFound(
                error.message, next_step=f"see snapshotctl get pods; services are {services}"
            ) from None
    node = pod.status.node_name if isinstance(pod, Pod) else ""
    found = kept.containers(node, pod.metadata.uid) if node else []
    if not found:
        raise NotFound(
            f"{target} has written nothing: it has not started",
            next_step=f"see why: snapshotctl explain {target.typed}",
        )
    chosen = [log for log in found if container in (None, log.name)]
    if not chosen:
        names = ", ".join(log.name for log in found)
        raise WrongArguments(
            f"{target} has no container {container!r}", next_step=f"name one of: {names}"
        )
    return chosen


async def _show(tools: Tools, files: list[LogFile], tail: int | None, *, follow: bool) -> None:
    is_one = len(files) == 1
    async for source, line in lines_of(files, tail, follow=follow):
        if tools.screen.wants_table:
            shown = formats.printable(line, coloured=tools.screen.has_colours)
            tools.screen.verbatim(shown if is_one else f"[{source}] {shown}")
        else:
            plain = formats.printable(line, coloured=False)
            tools.screen.entry({"source": source, "line": plain})
