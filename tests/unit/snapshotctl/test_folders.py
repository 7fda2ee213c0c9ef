"""Where things stand, and finding the server there."""

import json
import tempfile
from pathlib import Path

import pytest

from snapshot_shared.errors import BusUnavailable, InvalidInput
from snapshotctl.adapters import folders
from snapshotctl.adapters.folders import Folders
from snapshotctl.domain.cluster import MARKER, ClusterRecord
from snapshotctl.domain.exits import WrongArguments
from tests.unit.snapshotctl.conftest import cluster_record


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return {
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "XDG_RUNTIME_DIR": str(tmp_path / "run"),
    }


@pytest.fixture
def where(environment: dict[str, str]) -> Folders:
    return Folders(environment)


def _record(where: Folders, name: str, url: str) -> ClusterRecord:
    state = where.state(name)
    state.mkdir(parents=True)
    record = cluster_record(state, url=url)
    folders.write_record(record)
    return record


def _select_context(environment: dict[str, str], name: str, url: str) -> None:
    folder = Path(environment["XDG_CONFIG_HOME"]) / "nats"
    (folder / "context").mkdir(parents=True)
    (folder / "context" / f"{name}.json").write_text(json.dumps({"url": url}))
    (folder / "context.txt").write_text(f"{name}\n")


@pytest.mark.parametrize("value", ["/a/../b", "/a/./b", "/a "])
@pytest.mark.parametrize("name", ["XDG_STATE_HOME", "XDG_CONFIG_HOME"])
def test_a_folder_that_no_service_would_take_is_refused_by_name(
    environment: dict[str, str], name: str, value: str
) -> None:
    with pytest.raises(InvalidInput, match=name) as refused:
        Folders(environment | {name: value})
    assert repr(value) in refused.value.message


def test_the_selected_context_comes_before_the_default_cluster(
    environment: dict[str, str], where: Folders
) -> None:
    record = _record(where, "default", "nats://127.0.0.1:9")
    assert where.find_server(None, None).url == record.url
    _select_context(environment, "prod", "nats://prod:1")
    found = where.find_server(None, None)
    assert (found.url, "prod" in found.source) == ("nats://prod:1", True)
    assert where.find_server(None, "default").url == record.url


def test_a_cluster_that_is_not_there_says_how_it_is_started(where: Folders) -> None:
    _record(where, "default", "")
    for name, command in ((None, "snapshotctl up"), ("big", "snapshotctl up --cluster big")):
        with pytest.raises(BusUnavailable) as refused:
            where.find_server(None, name)
        assert command in refused.value.next_step


def test_the_address_of_a_local_cluster_is_reached_with_its_key(
    environment: dict[str, str], where: Folders
) -> None:
    _record(where, "other", "nats://127.0.0.1:8")
    _record(where, "mine", "nats://127.0.0.1:9")
    key = str(where.state("mine") / "keys" / "snapshotctl.nk")
    for address in ("127.0.0.1:9", "nats://127.0.0.1:9/", "localhost:9"):
        assert where.find_server(address, None).credentials == key
    assert where.find_server("127.0.0.1:7", None).credentials is None
    named = Folders({**environment, "NATS_NKEY": "/k"})
    assert named.find_server("127.0.0.1:9", None).credentials == "/k"


@pytest.mark.parametrize("name", ["missing", "../x", "a/b", ".."])
def test_a_context_that_is_not_there_is_refused_by_name(
    environment: dict[str, str], name: str
) -> None:
    with pytest.raises(WrongArguments, match="context"):
        Folders({**environment, "NATS_CONTEXT": name}).find_server(None, None)


def test_a_context_of_ours_is_read_like_any_other(
    environment: dict[str, str], where: Folders
) -> None:
    name = where.write_context(_record(where, "default", "nats://127.0.0.1:9"))
    found = Folders({**environment, "NATS_CONTEXT": name}).find_server(None, None)
    assert found.url == "nats://127.0.0.1:9"
    assert found.credentials == str(where.state("default") / "keys" / "snapshotctl.nk")
    assert found.inbox == "_INBOX.snapshotctl"
    where.remove_context("default")
    where.remove_context("default")


@pytest.mark.parametrize("data", [b"", b"{", b'{"type": "other"}', b"\xff" * 10])
def test_a_broken_record_is_no_record(where: Folders, data: bytes) -> None:
    record = _record(where, "default", "nats://127.0.0.1:9")
    (Path(record.state_dir) / "cluster.json").write_bytes(data)
    assert where.record("default") is None


def test_a_relative_base_folder_is_ignored(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    where = Folders({"XDG_STATE_HOME": "relative"})
    assert where.states == tmp_path / ".local" / "state" / "snapback"


def test_sockets_stand_below_the_runtime_folder_unless_it_is_too_long(tmp_path: Path) -> None:
    deep = tmp_path / ("x" * 60)
    deep.mkdir()
    with tempfile.TemporaryDirectory(dir="/tmp") as short:
        for runtime, parent in ((short, short), (str(deep), "/tmp")):
            found = Folders({"XDG_RUNTIME_DIR": runtime}).new_sockets()
            mode = found.stat().st_mode & 0o777
            found.rmdir()
            assert (str(found.parent), mode) == (parent, 0o700)


def test_a_folder_that_is_not_ours_is_never_removed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    precious.mkdir()
    folders.remove_sockets(precious)
    assert precious.is_dir()
    (precious / MARKER).write_text("r\n")
    folders.remove_sockets(precious)
    assert not precious.exists()


def test_a_look_finds_folders_of_sockets_by_their_run(where: Folders, tmp_path: Path) -> None:
    sockets = tmp_path / "run" / "snapback-x"
    sockets.mkdir(parents=True)
    (sockets / MARKER).write_text("run-x\n")
    assert (sockets, "run-x") in where.inventory().socket_folders


def test_pids_of_another_boot_mean_nothing(where: Folders) -> None:
    record = _record(where, "default", "")
    assert not folders.is_this_boot(record)
    assert folders.alive(record) == frozenset()
