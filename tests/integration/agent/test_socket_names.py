"""Unix sockets whose files were renamed keep their names across a restore."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.criu_source import RenamedSocket
from snapshot_agent.helper import observe, socket_names
from snapshot_shared.errors import SnapbackError
from snapshot_shared.files import open_root, opened


@pytest.fixture
def bound(tmp_path: Path) -> Iterator[Path]:
    """The folder of a socket of this process, which was bound to the name `first`."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "first"))
        yield tmp_path


def renamed() -> list[RenamedSocket]:
    """Return what is found of the sockets of this process."""
    own = procfs.read(os.getpid())
    assert own is not None
    return socket_names.renamed(own.pid, observe.tree(*own.key, cgroups=Path("/nowhere")))


def test_a_socket_with_its_first_name_is_not_renamed(bound: Path) -> None:
    assert renamed() == []


def test_a_socket_that_was_renamed_is_found_by_its_file(bound: Path) -> None:
    (bound / "first").rename(bound / "second")
    (bound / "first").touch()
    assert renamed() == [RenamedSocket(path=str(bound / "first"), name="second")]


def test_a_socket_whose_file_is_gone_has_no_name(bound: Path) -> None:
    (bound / "first").unlink()
    assert renamed() == []


def test_a_restored_socket_gets_the_name_that_it_had(bound: Path) -> None:
    with opened(open_root(bound)) as root:
        socket_names.rename(root, [RenamedSocket(path="/first", name="second")])
    assert stat.S_ISSOCK((bound / "second").stat().st_mode)
    assert [each.name for each in bound.iterdir()] == ["second"]


def test_what_is_no_socket_is_not_renamed(tmp_path: Path) -> None:
    (tmp_path / "first").touch()
    with opened(open_root(tmp_path)) as root:
        socket_names.rename(root, [RenamedSocket(path="/first", name="second")])
    assert [each.name for each in tmp_path.iterdir()] == ["first"]


def test_no_link_leads_out_of_a_container(
    bound: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    root_folder = tmp_path_factory.mktemp("root")
    (root_folder / "tmp").symlink_to(bound)
    with opened(open_root(root_folder)) as root, pytest.raises(SnapbackError, match="tmp"):
        socket_names.rename(root, [RenamedSocket(path="/tmp/first", name="second")])
    assert (bound / "first").exists()
