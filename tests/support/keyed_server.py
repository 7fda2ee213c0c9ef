"""A real nats-server that knows the product's users, each with its nkey and exact subjects."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from snapshot_shared.bus import Bus
from snapshot_shared.bus.client import BusClient
from snapshot_shared.nkey import public_key
from snapshot_shared.permissions import MAIN, STREAMS, User, server_accounts
from tests.support.nats_server import running_nats_server


class KeyedServer:
    """The server and those who are connected. `root` is bound by no list; `stranger` is unknown."""

    def __init__(self, url: str, folder: Path, stack: AsyncExitStack) -> None:
        self.url = url
        self._folder = folder
        self._stack = stack
        self.complaints: list[str] = []
        """What the server has refused the raw clients, as it came."""

    def seed(self, user: User | str) -> str:
        return str(seed_of(self._folder, user))

    async def bus(self, user: User) -> Bus:
        """The bus as a service of this user has it."""
        bus = Bus(self.url, user.name, credentials=self.seed(user), inbox=user.inbox)
        await bus.connect()
        self._stack.push_async_callback(bus.close)
        return bus

    async def root(self) -> Bus:
        bus = Bus(self.url, "root", credentials=self.seed("root"))
        await bus.connect()
        self._stack.push_async_callback(bus.close)
        return bus

    async def client(self, user: User) -> BusClient:
        """A connection that sends whatever it likes, as a stolen key would be used."""
        client = BusClient(user.name)

        async def on_error(error: Exception) -> None:
            client.take_violation(error)
            self.complaints.append(str(error))

        await client.connect(
            self.url, nkeys_seed=self.seed(user), inbox_prefix=user.inbox, error_cb=on_error
        )
        self._stack.push_async_callback(client.close)
        return client


def seed_of(folder: Path, user: User | str) -> Path:
    name = user.name if isinstance(user, User) else user
    return folder / "keys" / f"{name}.nk"


def keyed_accounts(folder: Path, users: Sequence[User]) -> str:
    """Write the accounts of these users, and of a root whom no list binds, for a configuration."""
    known = [(user, public_key(seed_of(folder, user))) for user in users]
    accounts = server_accounts(known)
    accounts[MAIN]["users"].append({"nkey": public_key(seed_of(folder, "root"))})
    return f"accounts: {json.dumps(accounts)}\n"


@asynccontextmanager
async def keyed_server(folder: Path, users: Sequence[User]) -> AsyncIterator[KeyedServer]:
    """Run a server for these users, and close every connection to it at the end."""
    configuration = folder / "nats.conf"
    configuration.write_text(keyed_accounts(folder, users))
    arguments = ["--config", str(configuration)]
    async with (
        running_nats_server(folder / "nats", arguments=arguments) as server,
        AsyncExitStack() as stack,
    ):
        yield KeyedServer(server.url, folder, stack)


async def everything(root: Bus) -> Mapping[str, Any]:
    """All that the streams hold and say of themselves, and all consumers with their settings."""
    context = root.client.jetstream()

    async def of_stream(name: str) -> Any:
        info = await context.stream_info(name, subjects_filter=">")
        consumers = await context.consumers_info(name)
        state = info.state
        seen = (state.messages, state.last_seq, dict(state.subjects or {}))
        acked = [(c.name, c.config, c.ack_floor, c.num_ack_pending) for c in consumers]
        return seen, info.config, sorted(acked, key=lambda found: str(found[0]))

    names = sorted([found.config.name or "" for found in await context.streams_info()])
    assert set(names) >= set(STREAMS)
    return dict(zip(names, await asyncio.gather(*map(of_stream, names)), strict=True))
