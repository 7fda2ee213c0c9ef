"""The command keys: nkeys for all users of a NATS, and the configuration of its server."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from snapshot_shared.errors import InvalidName
from snapshot_shared.ids import NodeName, check_node
from snapshot_shared.permissions import users_of
from snapshotctl.adapters import nkeys
from snapshotctl.command import command, new_app
from snapshotctl.domain.cluster import CONTEXT_PREFIX, NATS, NATS_CONFIGURATION, NatsServer
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.tools import Tools

app = new_app()


@command(
    app,
    "snapshotctl keys --folder keys --node node-1 --node node-2",
    "snapshotctl keys --folder keys --node node-1 --listen 0.0.0.0:4222",
)
async def keys(
    tools: Tools,
    folder: Annotated[Path, typer.Option("--folder", metavar="FOLDER", help="Where to write.")],
    node: Annotated[list[str], typer.Option("--node", metavar="NAME", help="A node; repeat it.")],
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where nats-server will listen.")
    ] = "127.0.0.1:4222",
    monitor: Annotated[
        str | None, typer.Option("--monitor", metavar="HOST:PORT", help="Its HTTP port, if any.")
    ] = None,
    store: Annotated[
        Path, typer.Option("--store", metavar="FOLDER", help="Where it will keep its streams.")
    ] = Path("/var/lib/nats"),
    tls_cert: Annotated[
        Path | None, typer.Option("--tls-cert", metavar="FILE", help="Its certificate, for TLS.")
    ] = None,
    tls_key: Annotated[
        Path | None, typer.Option("--tls-key", metavar="FILE", help="The key of that.")
    ] = None,
) -> None:
    """Make the keys of a NATS of your own, and the configuration of its server.

    Writes FOLDER/USER/seed.nk for the operator, for snapshotctl, for viewers, and for the agent and
    the GPU memory service of each node, and FOLDER/nats-server/nats.conf, which lets exactly these
    in. Seeds that are there already are kept, so run it again when a node is added. With a
    certificate the server speaks TLS only, and its address is tls://HOST:PORT.
    """
    if (tls_cert is None) != (tls_key is None):
        raise WrongArguments(
            "--tls-cert and --tls-key are of use together only",
            next_step="name the certificate of nats-server and the key of it, or neither",
        )
    tls = (tls_cert.absolute(), tls_key.absolute()) if tls_cert and tls_key else None
    name = CONTEXT_PREFIX + folder.resolve().name
    server = NatsServer(name, listen, store, monitor=monitor, tls=tls)
    seeds = {user: folder / user.name / "seed.nk" for user in users_of(_node_names(node))}
    configuration = folder / NATS / NATS_CONFIGURATION
    nkeys.admit(configuration, server, seeds)
    for user, seed in seeds.items():
        tools.screen.line(f"{user.name:20} {seed}")
    tools.screen.line(f"{NATS:20} {configuration}")


def _node_names(given: Sequence[str]) -> list[NodeName]:
    """Return the names of nodes, each once. WrongArguments for one that cannot be a name."""
    try:
        return [check_node(name) for name in dict.fromkeys(given)]
    except InvalidName as error:
        raise WrongArguments(f"--node: {error.message}", next_step=error.next_step) from error
