"""The command install: the systemd units of a machine, and what they read."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated

import typer

from snapback_client.folders import check_folder
from snapshot_shared.errors import InvalidInput
from snapshot_shared.permissions import User
from snapshotctl.adapters.installed import Installed, install_files, read_given
from snapshotctl.adapters.machine import nats_server_binary
from snapshotctl.command import command, new_app
from snapshotctl.domain import targets, units
from snapshotctl.domain.cluster import NATS, NATS_CONFIGURATION
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.domain.servers import address
from snapshotctl.domain.units import File, NodeOptions, Programs, RoleName
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl install --role operator --keys keys --nats tls://10.0.0.1:4222",
    "snapshotctl install --role node --node node-1 --keys keys --nats tls://10.0.0.1:4222 "
    "--artifacts /mnt/artifacts",
)
async def install(
    tools: Tools,
    role: Annotated[RoleName, typer.Option("--role", help="What this machine does.")],
    keys: Annotated[
        Path,
        typer.Option("--keys", metavar="FOLDER", help="What `snapshotctl keys` has written."),
    ],
    nats: Annotated[
        str, typer.Option("--nats", metavar="URL", help="Where all machines reach NATS.")
    ],
    node: Annotated[
        str | None, typer.Option("--node", metavar="NAME", help="The name of this node.")
    ] = None,
    artifacts: Annotated[
        Path | None,
        typer.Option(
            "--artifacts", metavar="FOLDER", help="Of a node: where all nodes have the artifacts."
        ),
    ] = None,
    devices: Annotated[
        int | None,
        typer.Option(
            "--devices",
            min=0,
            max=64,
            help="Of a node: so many simulated GPUs instead of those that CUDA shows.",
        ),
    ] = None,
    root: Annotated[
        Path, typer.Option("--root", metavar="FOLDER", help="Write below it instead of /.")
    ] = Path("/"),
) -> None:
    """Write the systemd units of a machine, with their settings and keys.

    With KEYS/ca.pem, certificates in PEM format, NATS is known by these over TLS. Units are
    replaced. Files of settings (/etc/snapback/*.env) that are there already are kept, so run it
    again after an upgrade. Nothing is started: the commands that do so are printed.
    """
    url = address(nats, "--nats")
    programs, authorities = Programs(sys.executable), keys / units.CA.name
    has_ca = authorities.exists()
    given = {units.CA: authorities} if has_ca else dict[PurePosixPath, Path]()
    if role == "operator":
        _refuse_options_of_nodes({"--node": node, "--artifacts": artifacts, "--devices": devices})
        programs = programs._replace(nats_server=nats_server_binary())
        services = units.operator_services(programs, url, has_ca=has_ca)
        given[units.SERVER_CONFIGURATION] = keys / NATS / NATS_CONFIGURATION
        users = units.users_of(role, None)
    else:
        options = _node_options(node, artifacts, devices)
        services = units.node_services(programs, url, options, has_ca=has_ca)
        users = units.users_of(role, options.name)
    files = [*_given(keys, users, given), *units.files_of(services)]
    done = install_files(root, files)
    if not tools.screen.wants_table:
        tools.screen.value({"files": [each.value() for each in done]})
        return
    for each in done:
        tools.screen.line(f"{each.what:9} {each.path}")
    _say_next(tools, done, units.next_steps(services))


def _say_next(tools: Tools, done: list[Installed], steps: list[str]) -> None:
    if kept := [str(each.path) for each in done if each.what == "kept"]:
        tools.screen.line(f"Kept as they are, with settings of yours: {', '.join(kept)}")
    tools.screen.line("Next, as root:")
    for step in steps:
        tools.screen.line(f"  {step}")


def _refuse_options_of_nodes(options: Mapping[str, object]) -> None:
    if given := [name for name, value in options.items() if value is not None]:
        raise WrongArguments(
            f"{', '.join(given)}: the machine of the operator is no node",
            next_step="leave them out, or install --role node beside it",
        )


def _node_options(node: str | None, artifacts: Path | None, devices: int | None) -> NodeOptions:
    if not node or artifacts is None:
        raise WrongArguments(
            "--role node needs --node and --artifacts",
            next_step="name the node as `snapshotctl keys` was given it, and the folder that all "
            "nodes share",
        )
    try:
        check_folder("--artifacts", str(artifacts))
    except InvalidInput as error:
        raise WrongArguments(error.message, next_step=error.next_step) from error
    return NodeOptions(targets.node_named(node), artifacts, devices)


def _given(keys: Path, users: list[User], others: Mapping[PurePosixPath, Path]) -> list[File]:
    """Return the files that are copied. WrongArguments names one that is missing."""
    seeds = {units.seed_path(user): keys / user.name / "seed.nk" for user in users}
    return [File(path, read_given(source), 0o640) for path, source in {**others, **seeds}.items()]
