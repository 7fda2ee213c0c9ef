"""`snapshotctl install`: the files of a machine, and what is left of them when it is run again."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from snapshotctl.domain.units import Service, files_of
from tests.integration.snapshotctl.conftest import Cli
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
    return [
        "install",
        "--role",
        "operator",
        "--keys",
        str(keys),
        "--nats",
        URL,
        "--root",
        str(root),
    ]


def test_a_node_gets_its_own_keys_and_no_others(cli: Cli, keys: Path, tmp_path: Path) -> None:
    cli.run(*of_node(keys, tmp_path / "root"))
    found = {path.name for path in (tmp_path / "root/etc/snapback").glob("*.nk")}
    assert found == {"agent-node-1.nk", "gms-node-1.nk"}
    cli.run(*of_operator(keys, tmp_path / "operator"))
    found = {path.name for path in (tmp_path / "operator/etc/snapback").glob("*.nk")}
    assert found == {"operator.nk", "viewer.nk", "snapshotctl.nk"}


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


def test_no_file_with_a_key_can_be_read_by_others(cli: Cli, keys: Path, tmp_path: Path) -> None:
    cli.run(*of_operator(keys, tmp_path))
    for path in (tmp_path / "etc/snapback").iterdir():
        assert not path.stat().st_mode & 0o007, path


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--node", "node-1"], "--node: the machine of the operator is no node"),
        (["--devices", "2", "--artifacts", "/mnt"], "--artifacts, --devices: the machine of"),
    ],
)
def test_options_of_nodes_are_refused_for_the_operator(
    cli: Cli, keys: Path, tmp_path: Path, words: list[str], expected: str
) -> None:
    said = cli.run(*of_operator(keys, tmp_path / "root"), *words)
    assert (said.code, expected in said.err) == (2, True), said.err
    assert not (tmp_path / "root").exists()


def test_a_node_without_its_keys_says_how_they_are_made(cli: Cli, tmp_path: Path) -> None:
    said = cli.run(*of_node(tmp_path / "nothing", tmp_path / "root"))
    assert said.code == 2
    assert "nothing/agent-node-1/seed.nk cannot be read" in said.err
    assert "snapshotctl keys --folder keys --node NAME" in said.err
    assert not (tmp_path / "root").exists()


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        (["--artifacts", "relative"], "--artifacts='relative' is no absolute path"),
        (["--nats", "http://10.0.0.1"], "--nats 'http://10.0.0.1' is not the address"),
        (["--node", "a b"], "a b"),
    ],
)
def test_a_value_that_cannot_be_right_is_refused_by_its_option(
    cli: Cli, keys: Path, tmp_path: Path, wrong: list[str], expected: str
) -> None:
    said = cli.run(*of_node(keys, tmp_path / "root"), *wrong)
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
