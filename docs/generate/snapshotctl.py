"""The page of all commands: their usage, their options and their examples."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from typing import Any

import typer

from snapshotctl.cli import GROUPS, WHERE, app
from snapshotctl.domain.exits import MEANINGS

PAGE = "snapshotctl.md"

_TYPE = re.compile(r" <(str|int|list\[str\])>")
"""What typer adds to a name, of no use to a reader."""

INTRO = """\
# snapshotctl

<!-- run every block: no, because these are the usage and the examples of single commands -->

The command line. Every command explains itself with `--help`; this page is made from the same
text. `-o json` and `-o yaml` give every result to programs, and may stand anywhere in the line, as
`--server` and `--cluster` may.

An object is named as `KIND NAME`, as `KIND/NAME`, or by its name alone. What another object of that
name owns is not meant then, and where several are left the command lists them and does nothing
(exit code 2). A word that is a kind is never taken for a name. Colour is for terminals, and only
where `NO_COLOR` is not set.
"""


_ANCHORS = {
    "artifacts": "artifacts-ls",
    "dead": "dead-ls",
    "sim": "sim-crash",
}
"""The first section of each command that has commands of its own."""


def page() -> str:
    """Return the whole page."""
    root = typer.main.get_command(app)
    context = typer.Context(root, info_name="snapshotctl")
    lines = [INTRO, textwrap.fill(WHERE, 100), "", "| exit code | meaning |", "|---|---|"]
    lines += [f"| {code.value} | {text} |" for code, text in MEANINGS.items()]
    lines += ["", "| to | commands |", "|---|---|"]
    for title, commands in GROUPS.items():
        linked = ", ".join(f"[{name}](#{_ANCHORS.get(name, name)})" for name in commands)
        lines.append(f"| {title} | {linked} |")
    lines += ["", "## Options of all commands", "", *_parameters(root, context)]
    for _, command in sorted(_commands(root, context), key=lambda found: found[0].command_path):
        lines += command
    return "\n".join(lines).rstrip() + "\n"


def _commands(group: Any, context: Any) -> Iterator[tuple[Any, list[str]]]:
    """Yield each command below a group, those of groups within it, too."""
    for name, command in group.commands.items():
        inner = typer.Context(command, info_name=name, parent=context)
        if hasattr(command, "commands"):
            yield from _commands(command, inner)
        else:
            yield inner, list(_section(command, inner))


def _section(command: Any, context: Any) -> Iterator[str]:
    yield f"## {context.command_path.removeprefix('snapshotctl ')}"
    yield ""
    yield command.help or ""
    yield ""
    yield "```console"
    usage = " ".join(command.collect_usage_pieces(context))
    yield f"{context.command_path} {usage.replace('{', '').replace('}', '')}"
    yield "```"
    yield ""
    yield from _parameters(command, context)
    examples, _, _ = (command.epilog or "").removeprefix("\b\nExamples:\n").partition("\n\n")
    yield "```sh"
    yield from (line.removeprefix("  ") for line in examples.splitlines())
    yield "```"
    yield ""


def _parameters(command: Any, context: Any) -> Iterator[str]:
    rows = [found.get_help_record(context) for found in command.get_params(context)]
    shown = [row for row in rows if row is not None and "--help" not in row[0]]
    if not shown:
        return
    yield "| argument or option | what |"
    yield "|---|---|"
    for name, text in shown:
        cells = (f"`{_TYPE.sub('', name.strip())}`", " ".join(text.split()))
        yield "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    yield ""
