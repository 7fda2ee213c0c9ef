"""Stripe roots: how the setting is read, and what is found and removed below them."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import msgspec
import pytest

from snapshot_shared.artifact import FileEntry, SavedObjects, check_part_manifest
from snapshot_shared.errors import (
    ArtifactCorrupt,
    ArtifactExists,
    ArtifactMissing,
    InvalidInput,
    SnapbackError,
)
from snapshot_shared.object_storage import ObjectStorage
from snapshot_shared.stripes import (
    IDENTITY,
    MARK,
    StripeMissing,
    StripeRoots,
    parse_stripes,
    remove_stored,
)
from tests.support.builders import UID, file_entry, part_manifest
from tests.unit.tables import each

PATH = ("default", UID, "gen-1", "gpu-0")
STRIPED = file_entry(stripe="a")
ROOT = "/var/artifacts"


def test_a_setting_has_a_folder_for_each_name() -> None:
    assert parse_stripes("", ROOT) == {}
    assert parse_stripes("nvme1=/mnt/nvme1:b=/mnt/b c", ROOT) == {
        "nvme1": "/mnt/nvme1",
        "b": "/mnt/b c",
    }


@each(
    ("text", "said"),
    [
        ("a", "'a': "),
        ("=/mnt/a", "'=/mnt/a': "),
        ("A=/mnt/a", "label"),
        ("a.b=/mnt/a", "label"),
        ("../x=/mnt/a", "label"),
        ("a=", "no absolute path"),
        ("a=mnt", "no absolute path"),
        ("a=/mnt/../etc", "no absolute path"),
        ("a=/mnt/a:", "'': "),
        ("a=/mnt/a:a=/mnt/b", "the name is there twice"),
        ("a=/mnt/a:b=/mnt/a", "that of a"),
        ("a=/mnt/a:b=/mnt/a/b", "inside the other"),
        ("a=/mnt/a/b:b=/mnt/a", "inside the other"),
        ("a=/var/artifacts", "the artifact root"),
        ("a=/var/artifacts/x", "the artifact root"),
        ("a=/var", "the artifact root"),
        (":".join(f"s{n}=/mnt/{n}" for n in range(65)), "the limit is 64"),
    ],
)
def test_what_is_wrong_with_a_setting_is_said(text: str, said: str) -> None:
    with pytest.raises(InvalidInput, match="SNAPBACK_STRIPE_ROOTS") as caught:
        parse_stripes(text, ROOT)
    assert said in caught.value.message
    assert repr(text) in caught.value.message
    assert "name=/folder" in caught.value.next_step


def test_all_that_is_wrong_with_a_setting_is_said_at_once() -> None:
    with pytest.raises(InvalidInput) as caught:
        parse_stripes("A=/a:b=c:ok=/mnt", ROOT)
    assert "'A=/a'" in caught.value.message
    assert "'b=c'" in caught.value.message


def test_a_file_may_name_a_stripe_root_where_it_can_be_in_one() -> None:
    assert check_part_manifest(part_manifest(STRIPED, part="gpu-0")).files == [STRIPED]
    for bad in (
        part_manifest(STRIPED),
        part_manifest(STRIPED, part="gpu-0", objects=SavedObjects(prefix="/".join(PATH))),
        part_manifest(STRIPED, file_entry(), part="gpu-0"),
    ):
        with pytest.raises(ArtifactCorrupt):
            check_part_manifest(bad)


@each("name", ["", "..", "../x", "/etc", "a/b", "A", "a\n", "-a", "a" * 64])
def test_a_stripe_root_that_has_no_plain_name_is_no_manifest(name: str) -> None:
    data = msgspec.json.encode(file_entry(stripe=name))
    with pytest.raises(msgspec.ValidationError, match="stripe"):
        msgspec.json.decode(data, type=FileEntry)


def test_a_manifest_without_stripe_roots_is_written_as_before() -> None:
    data = msgspec.json.encode(file_entry())
    assert b"stripe" not in data
    assert not msgspec.json.decode(data, type=FileEntry).stripe


class Places:
    """An artifact root with the folder of a part, and two stripe roots."""

    def __init__(self, base: Path) -> None:
        self.artifacts = base / "artifacts"
        self.folder = self.artifacts.joinpath(*PATH)
        self.folder.mkdir(parents=True)
        self.paths = {name: base / name for name in ("a", "b")}
        for path in self.paths.values():
            path.mkdir()
        self.roots = self.of("a", "b")
        self.root = os.open(self.artifacts, os.O_RDONLY)
        self.directory = os.open(self.folder, os.O_RDONLY)

    def of(self, *names: str) -> StripeRoots:
        return StripeRoots({name: str(self.paths[name]) for name in names})

    def stripe(self, name: str) -> Path:
        return self.paths[name].joinpath(*PATH)

    def writing(self, *names: str) -> AbstractContextManager[Mapping[str, int]]:
        return self.roots.writing(self.root, self.directory, PATH, names)

    def write(self, *names: str) -> None:
        with self.writing(*names) as folders:
            for name in names:
                assert (self.folder / MARK).exists()
                os.close(os.open("shard", os.O_CREAT | os.O_WRONLY, dir_fd=folders[name]))

    def read(self) -> None:
        """Read a file that is in the stripe root `a`, as its manifest says."""
        with self.roots.reading(self.directory, part_manifest(STRIPED, part="gpu-0")):
            pass

    def remove(self, depth: int = 4, roots: StripeRoots | None = None) -> None:
        parent = os.open(self.artifacts.joinpath(*PATH[: depth - 1]), os.O_RDONLY)
        try:
            remove_stored(parent, PATH[:depth], _no_storage, roots or self.roots)
        finally:
            os.close(parent)


def _no_storage() -> ObjectStorage:
    raise AssertionError("nothing is in object storage")


@pytest.fixture
def places(tmp_path: Path) -> Iterator[Places]:
    found = Places(tmp_path)
    yield found
    os.close(found.directory)
    os.close(found.root)


@pytest.mark.parametrize("depth", [3, 4])
def test_a_part_or_a_generation_is_removed_from_all_roots_that_its_mark_names(
    places: Places, depth: int
) -> None:
    places.write("a", "b")
    places.remove(depth)
    assert not places.folder.exists()
    assert not places.stripe("a").exists()
    assert not places.stripe("b").exists()


def test_a_generation_takes_the_empty_folders_with_it_that_a_part_has_left(places: Places) -> None:
    places.write("a", "b")
    places.remove(4)
    assert places.stripe("a").parent.exists()
    places.remove(3)
    for path in places.paths.values():
        assert {each.name for each in path.rglob("*")} == {IDENTITY, "default"}


def test_other_generations_of_a_content_stay(places: Places) -> None:
    places.write("a")
    other = places.paths["a"].joinpath("default", UID, "gen-2", "gpu-0")
    other.mkdir(parents=True)
    places.remove(3)
    assert other.exists()


def test_nothing_is_removed_until_every_root_is_found(places: Places) -> None:
    places.write("a", "b")
    with pytest.raises(StripeMissing, match="'b'"):
        places.remove(3, places.of("a"))
    assert (places.stripe("a") / "shard").exists()
    assert (places.folder / MARK).exists()


def test_nothing_of_a_generation_is_removed_until_the_roots_of_all_its_parts_are_found(
    places: Places,
) -> None:
    places.write("a")
    other = places.folder.with_name("gpu-1")
    other.mkdir()
    mark = (places.folder / MARK).read_text()
    (other / MARK).write_text(re.sub(r"[0-9a-f]{32}", "0" * 32, mark))
    with pytest.raises(StripeMissing, match=f"wanted {'0' * 32}|it is stripe root"):
        places.remove(3)
    assert (places.stripe("a") / "shard").exists()
    (other / MARK).unlink()
    places.remove(3)
    assert not places.stripe("a").exists()


def test_a_root_that_no_mark_names_is_not_needed(places: Places) -> None:
    places.write("a")
    places.paths["b"].rmdir()
    places.remove(3)
    assert not places.folder.exists()


def test_a_save_with_other_roots_removes_what_it_finds_in_those_before(places: Places) -> None:
    places.write("a")
    places.write("b")
    assert not places.stripe("a").exists()
    places.write()
    assert not (places.folder / MARK).exists()
    assert not places.stripe("b").exists()


def test_a_mark_that_cannot_be_read_keeps_what_it_marks(places: Places) -> None:
    places.write("a")
    (places.folder / MARK).write_text('{"roots": {"../../etc": "x"}}')
    with pytest.raises(ArtifactCorrupt, match=MARK):
        places.remove(3)
    assert (places.folder / MARK).exists()


def test_a_part_whose_mark_does_not_name_what_its_manifest_names_is_not_read(
    places: Places,
) -> None:
    for names in ((), ("b",)):
        places.write(*names)
        with pytest.raises(ArtifactCorrupt, match=MARK):
            places.read()


def test_a_link_in_a_stripe_root_is_not_followed(places: Places, tmp_path: Path) -> None:
    places.write("a")
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    part = places.stripe("a")
    (part / "shard").unlink()
    part.rmdir()
    part.symlink_to(outside)
    with pytest.raises(SnapbackError, match="link"):
        places.read()
    places.remove(3)
    assert not part.is_symlink()
    assert (outside / "kept").exists()


def test_a_folder_that_is_there_without_a_mark_is_of_another_part(places: Places) -> None:
    places.stripe("b").mkdir(parents=True)
    (places.stripe("b") / "shard").write_text("theirs")
    with pytest.raises(ArtifactExists, match="stripe root 'b'"):
        places.write("a", "b")
    assert not (places.folder / MARK).exists()
    assert not places.stripe("a").exists()
    assert (places.stripe("b") / "shard").read_text() == "theirs"


def test_a_mark_of_other_roots_gives_no_right_to_what_is_in_these(places: Places) -> None:
    places.write("a")
    places.stripe("b").mkdir(parents=True)
    with pytest.raises(ArtifactExists, match="stripe root 'b'"):
        places.write("b")
    assert places.stripe("b").exists()
    assert not (places.folder / MARK).exists()


def test_a_part_whose_folder_cannot_be_opened_is_not_taken_for_one_without_mark(
    places: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    places.write("a")
    real, errors = os.open, [OSError(errno.EIO, os.strerror(errno.EIO))]

    def failing_once(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == PATH[-1] and errors:
            raise errors.pop()
        return real(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", failing_once)
    with pytest.raises(OSError, match="Input/output error"):
        places.remove(3)
    assert (places.stripe("a") / "shard").exists()
    assert (places.folder / MARK).exists()
    places.remove(3)
    assert not places.stripe("a").exists()


@pytest.mark.parametrize(
    ("other", "named"), [("a", "stripe root 'a'"), ("artifacts", "the artifact root")]
)
def test_two_names_of_one_folder_are_refused(
    places: Places, tmp_path: Path, other: str, named: str
) -> None:
    (tmp_path / "again").symlink_to(tmp_path / other)
    places.paths["b"] = tmp_path / "again"
    places.roots = places.of("a", "b")
    with pytest.raises(InvalidInput, match=f"{named} and stripe root 'b'"):
        places.write("a", "b")
    assert not (places.folder / MARK).exists()
    assert not (places.artifacts / IDENTITY).exists()


@pytest.mark.parametrize("is_made_again", [False, True])
def test_a_save_whose_part_was_removed_under_it_takes_its_stripe_folders_with_it(
    places: Places, is_made_again: bool
) -> None:
    def remove_and_fail() -> None:
        shutil.rmtree(places.folder.parent)
        if is_made_again:
            places.folder.mkdir(parents=True)
        # What the deletion has removed may be there again, as another's.
        places.stripe("b").rename(places.stripe("b").with_name("old"))
        places.stripe("b").mkdir()
        raise ArtifactMissing("the folder of the part is gone")

    with pytest.raises(ArtifactMissing), places.writing("a", "b"):
        remove_and_fail()
    assert not places.stripe("a").exists()
    assert places.stripe("b").exists()


def test_a_save_that_fails_leaves_its_folders_to_what_removes_the_part(places: Places) -> None:
    with pytest.raises(ArtifactMissing), places.writing("a"):
        raise ArtifactMissing("something else")
    assert places.stripe("a").exists()
    places.remove()
    assert not places.stripe("a").exists()


def test_a_setting_is_read_without_an_artifact_root_where_none_is_known() -> None:
    assert parse_stripes("a=/var/artifacts") == {"a": "/var/artifacts"}
    with pytest.raises(InvalidInput, match="that of a"):
        parse_stripes("a=/mnt/a:b=/mnt/a")
