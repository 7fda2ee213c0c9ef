"""`snapshotctl keys` on a nats-server that reads them, and `install`: the files of a machine."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from snapshot_shared.bus import Bus
from snapshot_shared.errors import NotPermitted
from snapshot_shared.nkey import public_key
from snapshot_shared.permissions import User
from snapshotctl.domain.units import Service, files_of
from tests.integration.snapshotctl.conftest import Cli
from tests.support.nats_server import nats_server_binary
from tests.support.ports import free_port
from tests.support.systemctl import environment_of, words_of

URL = "nats://10.0.0.1:4222"


@pytest.fixture
def keys(cli: Cli, tmp_path: Path) -> Path:
    cli.run("keys", "--folder", str(tmp_path / "keys"), "--node", "node-1")
    return tmp_path / "keys"


def of_node(keys: Path, root: Path) -> list[str]:
    return [
        *("install", "--role", "node", "--node", "node-1", "--keys", str(keys), "--nats", URL),
        *("--artifacts", "/mnt/artifacts", "--root", str(root)),
    ]


def of_operator(keys: Path, root: Path) -> list[str]:
    words = ("install", "--role", "operator", "--keys", str(keys), "--nats", URL)
    return [*words, "--root", str(root)]


def test_a_node_gets_its_keys_alone_and_others_cannot_read_them(
    cli: Cli, keys: Path, tmp_path: Path
) -> None:
    cli.run(*of_node(keys, tmp_path / "root"))
    found = {path.name for path in (tmp_path / "root/etc/snapback").glob("*.nk")}
    assert found == {"agent-node-1.nk", "gms-node-1.nk"}
    cli.run(*of_operator(keys, tmp_path / "operator"))
    found = {path.name for path in (tmp_path / "operator/etc/snapback").glob("*.nk")}
    assert found == {"operator.nk", "viewer.nk", "snapshotctl.nk"}
    cli.run(*of_operator(keys, tmp_path))
    for path in (tmp_path / "etc/snapback").iterdir():
        assert not path.stat().st_mode & 0o007, path


def test_settings_that_were_changed_are_kept_and_units_are_replaced(
    cli: Cli, keys: Path, tmp_path: Path
) -> None:
    root = tmp_path / "root"
    cli.run(*of_node(keys, root))
    settings, unit = root / "etc/snapback/gms.env", root / "etc/systemd/system/snapback-gms.service"
    changed = settings.read_bytes() + b"# caf\xe9\nSNAPBACK_LOG_LEVEL=DEBUG\n"
    settings.write_bytes(changed)
    written = unit.read_text()
    unit.write_text("[Unit]\n")
    done = json.loads(cli.run("-o", "json", *of_node(keys, root)).out)["files"]
    what = {Path(each["path"]).name: each["what"] for each in done}
    assert (what["gms.env"], what["snapback-gms.service"]) == ("kept", "replaced")
    assert what["agent.env"] == "unchanged"
    assert (settings.read_bytes(), unit.read_text()) == (changed, written)


def test_a_node_without_its_keys_says_how_they_are_made(cli: Cli, tmp_path: Path) -> None:
    words = of_node(tmp_path / "nothing", tmp_path / "root")
    said = cli.refused(2, "nothing/agent-node-1/seed.nk cannot be read", *words)
    assert "snapshotctl keys --folder keys --node NAME" in said.err
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("of_role", "wrong", "expected"),
    [
        (of_operator, ["--node", "node-1"], "--node: the machine of the operator is no node"),
        (
            of_operator,
            ["--devices", "2", "--artifacts", "/mnt"],
            "--artifacts, --devices: the machine of",
        ),
        (of_node, ["--artifacts", "relative"], "--artifacts='relative' is no absolute path"),
        (of_node, ["--nats", "http://10.0.0.1"], "--nats 'http://10.0.0.1' is not the address"),
        (of_node, ["--node", "a b"], "a b"),
    ],
)
def test_an_option_that_cannot_be_right_is_refused_by_its_name(
    cli: Cli, keys: Path, tmp_path: Path, of_role: Any, wrong: list[str], expected: str
) -> None:
    said = cli.run(*of_role(keys, tmp_path / "root"), *wrong)
    assert (said.code, expected in said.err) == (2, True), said.err
    assert not (tmp_path / "root").exists()


def test_odd_characters_reach_the_service_as_they_are(tmp_path: Path) -> None:
    odd = '/srv/100% "of" $HOME/it'
    service = Service("x", "X", ("/bin/prog ram", odd), variables={"SNAPBACK_A": odd})
    files = {file.path.name: file.text for file in files_of([service])}
    [command] = [
        line.partition("=")[2]
        for line in files["snapback-x.service"].splitlines()
        if line.startswith("ExecStart=")
    ]
    assert words_of(command) == ["/bin/prog ram", odd]
    (tmp_path / "x.env").write_text(files["x.env"])
    assert environment_of({"EnvironmentFile": str(tmp_path / "x.env")})["SNAPBACK_A"] == odd


def test_systemd_understands_the_units(cli: Cli, keys: Path, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is missing: install systemd")
    cli.run(*of_node(keys, tmp_path / "root"))
    cli.run(*of_operator(keys, tmp_path / "root"))
    units = sorted((tmp_path / "root/etc/systemd/system").glob("*.service"))
    assert len(units) == 5
    done = subprocess.run(
        ["systemd-analyze", "verify", *units], capture_output=True, text=True, check=False
    )
    ours = [line for line in done.stderr.splitlines() if "snapback" in line]
    assert not ours


# Keys.


def _bus(url: str, seed: Path) -> Bus:
    user = User("operator")
    return Bus(url, user.name, credentials=str(seed), inbox=user.inbox)


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
    address = f"127.0.0.1:{free_port()}"
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
