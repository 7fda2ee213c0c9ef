"""The command schema: the JSON Schemas of messages and objects."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from snapshot_api.manifests import message_schemas
from snapshotctl.command import command, new_app
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.tools import Tools
from snapshotctl.views.tables import Table

app = new_app()


def _complete() -> list[str]:
    return list(message_schemas())


@command(
    app,
    "snapshotctl schema",
    "snapshotctl schema dump_order",
    "snapshotctl schema snapshotcontent | jq .required",
)
async def schema(
    tools: Tools,
    type_: Annotated[
        str | None,
        typer.Argument(
            metavar="TYPE",
            help="A type of message or object.",
            show_default=False,
            autocompletion=_complete,
        ),
    ] = None,
) -> None:
    """Print the JSON Schema of a message or object, or list all.

    It needs no server.
    """
    known = message_schemas()
    if type_ is not None:
        tools.screen.value(known[named(type_, known)])
    elif tools.screen.wants_table:
        rows = [(name, _about(found)) for name, found in sorted(known.items())]
        tools.screen.table(Table(("TYPE", "WHAT"), list(rows)))
    else:
        tools.screen.value(sorted(known))


def _about(schema: dict[str, Any]) -> str:
    """Return the first line of the description of a type."""
    name = schema.get("$ref", "").rpartition("/")[2]
    text = schema.get("$defs", {}).get(name, schema).get("description", "")
    return str(text).partition("\n")[0] or "-"


def named(text: str, known: Iterable[str]) -> str:
    """Return a type by `report.v1`, `report`, `snapback.v1.report` or a kind. WrongArguments."""
    names = sorted(known)
    wanted = text.lower()
    if wanted.startswith("snapback.v1."):
        wanted = wanted.removeprefix("snapback.v1.") + ".v1"
    found = [name for name in names if wanted in (name, name.partition(".")[0])]
    if found:
        return found[0]
    close = difflib.get_close_matches(
        wanted.partition(".")[0], [n.partition(".")[0] for n in names]
    )
    meant = f"did you mean {' or '.join(close)}? " if close else ""
    raise WrongArguments(
        f"no message or object is of type {text[:80]!r}",
        next_step=f"{meant}list all of them: snapshotctl schema",
    )
