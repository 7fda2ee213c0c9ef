"""Files beneath a root: durable, exclusive, and never through a link."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from snapshot_shared import files
from snapshot_shared.errors import ArtifactCorrupt, ArtifactExists, ArtifactMissing, NoSpace
from tests.support.limits import no_descriptor_left


@pytest.fixture
def root(tmp_path: Path) -> Iterator[int]:
    with files.opened(files.open_root(str(tmp_path))) as fd:
        yield fd


def test_directories_are_private_and_the_last_can_be_exclusive(root: int, tmp_path: Path) -> None:
    os.close(files.make_dir(root, ("a", "b"), exclusive=True))
    assert (tmp_path / "a/b").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ArtifactExists):
        files.make_dir(root, ("a", "b"), exclusive=True)


def test_a_linked_directory_is_not_followed(root: int, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("/etc")
    with pytest.raises(ArtifactCorrupt):
        files.open_dir(root, ("link",))


def test_a_folder_of_others_is_opened_below_links_and_not_through_one(tmp_path: Path) -> None:
    (tmp_path / "real" / "main").mkdir(parents=True)
    (tmp_path / "above").symlink_to("real")
    with files.opened(files.open_own(tmp_path / "above" / "main")) as fd:
        assert os.path.samestat(os.fstat(fd), (tmp_path / "real" / "main").stat())
    (tmp_path / "real" / "link").symlink_to("main")
    with pytest.raises(ArtifactCorrupt):
        files.open_own(tmp_path / "above" / "link")
    with pytest.raises(ArtifactMissing):
        files.open_own(tmp_path / "above" / "lost")


ODD: dict[str, Callable[[Path], None]] = {
    "symlink": lambda path: path.symlink_to("real"),
    "hardlink": lambda path: path.hardlink_to(path.with_name("real")),
    "fifo": os.mkfifo,
    "directory": Path.mkdir,
}
"""What may stand in the place of a file, and how it is made."""


@pytest.mark.parametrize("make", ODD.values(), ids=ODD)
def test_what_is_no_plain_file_is_refused(
    root: int, tmp_path: Path, make: Callable[[Path], None]
) -> None:
    (tmp_path / "real").write_bytes(b"x")
    make(tmp_path / "odd")
    with pytest.raises(ArtifactCorrupt):
        files.open_regular(root, "odd")


def test_a_file_that_may_be_shared_may_have_a_second_name(root: int, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"x")
    (tmp_path / "second").hardlink_to(tmp_path / "f")
    os.close(files.open_regular(root, "f", size=1, shared=True))
    (tmp_path / "linked").symlink_to("f")
    with pytest.raises(ArtifactCorrupt):
        files.open_regular(root, "linked", shared=True)


def test_a_wrong_size_is_refused_with_both(root: int, tmp_path: Path) -> None:
    (tmp_path / "f").write_bytes(b"12345")
    with pytest.raises(ArtifactCorrupt, match="5 bytes, its manifest says 4"):
        files.open_regular(root, "f", size=4)
    with pytest.raises(ArtifactCorrupt, match="limit is 3"):
        files.read_bounded(root, "f", 3)
    with pytest.raises(ArtifactMissing):
        files.open_regular(root, "none")


def test_a_manifest_is_never_replaced_but_an_equal_one_is_success(
    root: int, tmp_path: Path
) -> None:
    files.write_new(root, "root.json", b"one")
    files.write_new(root, "root.json", b"one")
    with pytest.raises(ArtifactExists):
        files.write_new(root, "root.json", b"two")
    assert (tmp_path / "root.json").read_bytes() == b"one"
    assert sorted(os.listdir(root)) == ["root.json"]


def test_removing_a_tree_spares_what_links_point_to(root: int, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.mkdir()
    (kept / "file").write_bytes(b"x")
    tree = tmp_path / "tree/deep"
    tree.mkdir(parents=True)
    (tree / "link").symlink_to(kept)
    files.remove_tree(root, "tree")
    files.remove_tree(root, "tree")
    assert not (tmp_path / "tree").exists()
    assert (kept / "file").exists()


def test_a_tree_may_be_as_deep_as_it_likes(root: int, tmp_path: Path) -> None:
    tmp_path.joinpath("tree").mkdir()
    folder = os.open(tmp_path / "tree", os.O_RDONLY)
    for _ in range(3000):
        os.mkdir("down", dir_fd=folder)
        below = os.open("down", os.O_RDONLY, dir_fd=folder)
        os.close(folder)
        folder = below
    os.close(folder)
    used = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    try:
        with no_descriptor_left(below=used + 8):
            files.remove_tree(root, "tree")
            assert os.listdir(root) == []
    finally:
        # What is left is too deep for pytest to remove.
        subprocess.run(["rm", "-rf", tmp_path / "tree"], check=True)


def test_folders_of_a_tree_may_have_any_names(root: int, tmp_path: Path) -> None:
    for path in ("tree/.0/.0/.1", "tree/.1/.0/.2/x", "tree/a/.0/.1", "tree/a/b/c"):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / "file").write_bytes(b"x")
    (tmp_path / "tree" / ".2").write_bytes(b"x")
    files.remove_tree(root, "tree")
    assert os.listdir(root) == []


@pytest.mark.parametrize(("durable", "synced"), [(True, 1), (False, 0)])
def test_one_fsync_makes_the_end_of_a_whole_tree_durable(
    root: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool, synced: int
) -> None:
    for number in range(20):
        (tmp_path / "tree" / f"folder-{number}" / "deep").mkdir(parents=True)
    calls: list[int] = []
    monkeypatch.setattr(os, "fsync", calls.append)
    files.remove_tree(root, "tree", durable=durable)
    assert calls == [root] * synced
    assert os.listdir(root) == []


def test_too_little_room_names_both_numbers(root: int) -> None:
    with pytest.raises(NoSpace, match="1125899906842624 bytes"):
        files.require_space(root, 2**50, "the artifact")


def test_a_tree_of_which_something_vanishes_while_it_is_removed_is_not_called_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tree").mkdir()
    (tmp_path / "tree" / "file").write_bytes(b"")
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda where: ["vanished", *listed(where)])
    with files.opened(files.open_root(tmp_path)) as root, pytest.raises(FileNotFoundError):
        files.remove_tree(root, "tree")
    assert (tmp_path / "tree" / "file").exists()


def test_the_error_of_a_full_disk_says_which_file_and_how_many_bytes() -> None:
    with Path("/dev/full").open("wb", buffering=0) as file, pytest.raises(NoSpace) as raised:
        files.write_all(file.fileno(), b"twelve bytes")
    assert raised.value.values["path"] == "/dev/full"
    assert raised.value.values["needed"] == 12
    assert "/dev/full: 12 more bytes are needed" in raised.value.message
