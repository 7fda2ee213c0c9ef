"""The command exec: run a program beside a worker, as in its container."""

from __future__ import annotations

from typing import Annotated

import typer

from snapshotctl.command import Namespace, RunningPod, WorkerContainer, command, new_app
from snapshotctl.domain import targets
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl exec my-worker -- env",
    "snapshotctl exec my-worker -- python deploy/examples/ask.py 'What is my name?'",
    "snapshotctl exec my-worker --container main -- sh",
)
async def exec_(
    tools: Tools,
    pod: RunningPod,
    program: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROGRAM", help="What to run there."),
    ] = None,
    container: WorkerContainer = None,
    namespace: Namespace = "default",
) -> int:
    """Run a program beside a worker, as in its container.

    It has the environment, the working directory and the namespaces of the worker, and this
    terminal: Ctrl-C there is for the program. Its exit code is that of the command. In a local
    cluster no operator has to run.
    """
    name, space = targets.pod_named(pod), targets.checked_namespace(namespace)
    if not program:
        raise WrongArguments(
            "the program to run is missing", next_step=f"snapshotctl exec {name} -- env"
        )
    return await tools.workers().run(space, name, container, program)
