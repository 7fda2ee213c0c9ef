"""The command completion: the script by which a shell completes commands and names."""

from __future__ import annotations

from typing import Annotated, Literal

import typer
from typer.completion import get_completion_script  # type: ignore[attr-defined]

from snapshotctl.command import command, new_app
from snapshotctl.tools import Tools

PROGRAM = "snapshotctl"
VARIABLE = "_SNAPSHOTCTL_COMPLETE"
"""The variable by which the script of a shell asks us, as typer and click name it."""

app = new_app()


@command(
    app,
    "source <(snapshotctl completion bash)",
    "snapshotctl completion zsh > ~/.zfunc/_snapshotctl",
    "snapshotctl completion fish > ~/.config/fish/completions/snapshotctl.fish",
)
async def completion(
    tools: Tools,  # noqa: ARG001 - the script is the same in each form
    shell: Annotated[
        Literal["bash", "zsh", "fish"], typer.Argument(metavar="bash|zsh|fish", help="The shell.")
    ],
) -> None:
    """Print the script by which a shell completes commands and names.

    `snapshotctl --install-completion` puts it where the shell finds it.
    """
    typer.echo(get_completion_script(prog_name=PROGRAM, complete_var=VARIABLE, shell=shell))
