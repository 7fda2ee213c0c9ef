"""`snapshotctl keys`: what it writes, on a nats-server that reads it."""

import contextlib
import re
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_shared.bus import Bus
from snapshot_shared.errors import NotPermitted
from snapshot_shared.nkey import public_key
from snapshot_shared.permissions import User
from tests.integration.snapshotctl.conftest import Cli
from tests.support.nats_server import nats_server_binary


def _bus(url: str, seed: Path) -> Bus:
    user = User("operator")
    return Bus(url, user.name, credentials=str(seed), inbox=user.inbox)


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextlib.contextmanager
def _server(configuration: Path) -> Iterator[None]:
    words = [str(nats_server_binary()), "-c", str(configuration)]
    with subprocess.Popen(words, stderr=subprocess.DEVNULL) as server:
        try:
            yield
        finally:
            server.terminate()


async def test_the_server_lets_in_users_with_a_key_and_no_others(cli: Cli, tmp_path: Path) -> None:
    folder = tmp_path / "keys"
    address = f"127.0.0.1:{_free_port()}"
    url = f"nats://{address}"
    where = ("--listen", address, "--store", str(tmp_path / "store"))
    out = cli.program("keys", "--folder", str(folder), "--node", "node-1", *where).out
    seeds = {Path(line.split()[-1]) for line in out.splitlines() if line.endswith("seed.nk")}
    assert {seed.parent.name for seed in seeds} == {
        *("operator", "snapshotctl", "viewer", "agent-node-1", "gms-node-1")
    }
    assert {seed.stat().st_mode & 0o777 for seed in seeds} == {0o600}
    stranger = tmp_path / "stranger.nk"
    public_key(stranger)
    with _server(folder / "nats-server" / "nats.conf"):
        known = _bus(url, folder / "operator" / "seed.nk")
        await known.connect()
        await known.ensure_assets()
        await known.close()
        with pytest.raises(NotPermitted):
            await _bus(url, stranger).connect(patiently=False)


def test_a_node_that_is_added_leaves_all_other_keys_as_they_are(cli: Cli, tmp_path: Path) -> None:
    words = ("keys", "--folder", str(tmp_path / "keys"), "--node", "node-1")
    cli.ok(*words)
    before = {path: path.read_bytes() for path in tmp_path.rglob("seed.nk")}
    out = cli.ok(*words, "--node", "node-2").out
    assert {path: path.read_bytes() for path in before} == before
    assert re.search(r"^agent-node-2 +/.*/seed\.nk$", out, re.MULTILINE)
