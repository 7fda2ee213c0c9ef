"""Saves and loads whose bytes are objects: a real S3 server, real agents."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

import snapback_client as client
from gms.adapters.part_files import verify_part
from gms.transfer_child.save import save
from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_shared import errors
from snapshot_shared.codec import encode_json
from snapshot_shared.object_storage import (
    BucketMissing,
    ObjectStorage,
    ObjectStorageDenied,
    ObjectStorageUnavailable,
    ObjectStorageUnset,
    check_url,
)
from tests.support.forks import forks
from tests.support.gms_rig import MIB, TRANSFERS, committed
from tests.support.s3_server import ROOT, S3Server, s3_server
from tests.support.weights import OTHER, PART, PLACE, UID, Weights, digests_of

# They share a server, which takes seconds to start.
pytestmark = [pytest.mark.turns, pytest.mark.xdist_group("object_storage")]


@pytest.fixture(scope="module")
def server() -> Iterator[S3Server]:
    with s3_server() as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        yield server


@pytest.fixture(params=["s3", "folder"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "folder":
        return (tmp_path / "a store").as_uri()
    request.getfixturevalue("server")
    return f"s3://bucket/{tmp_path.name}"


class Capture(Weights):
    """Weights, and the storage that their part goes to."""

    def __init__(self, service: Any, folder: Path, url: str) -> None:
        arrays = {"big": (20 * MIB + 3, "u1"), "zeros": (16 * MIB, "u1")}
        root = folder / "artifacts"
        super().__init__(service, root, arrays, backend="object", object_storage=url)
        self.url = url
        self.agent = ArtifactRoot(root, url)

    def objects(self) -> dict[str, int]:
        return ObjectStorage(self.url).sizes("default")


@pytest.fixture
def capture(service: Any, tmp_path: Path, url: str) -> Capture:
    return Capture(service, tmp_path, url)


def test_the_bytes_go_to_the_storage_and_come_back(capture: Capture) -> None:
    saved = capture.run(capture.save_task())
    assert {path.name for path in capture.path.iterdir()} == {"part.json", "objects.json"}
    # A chunk of zeros has no object, and the others have one each.
    found = capture.objects()
    assert all(key.startswith(f"{PART}/shard-") for key in found)
    assert sum(len(entry.chunks) for entry in capture.manifest().files) > len(found)
    assert 20 * MIB < sum(found.values()) < 32 * MIB
    loaded = capture.run(capture.load_task())
    assert (saved.backend, loaded.backend) == ("object", "object")
    assert saved.moved == loaded.moved < saved.bytes, "zeros are not moved"
    capture.service.publish("l1")
    with client.restore(capture.state, device=1) as pool:
        assert digests_of(pool) == capture.digests
    # Where the bytes are is said by a relative key alone.
    objects = capture.manifest().objects
    assert objects
    assert (objects.backend, objects.prefix) == ("object", PART)
    for file in capture.path.iterdir():
        text = file.read_text()
        assert "://" not in text
        assert capture.url.partition("//")[2] not in text


def test_a_part_that_is_all_zeros_has_no_objects_and_is_one_all_the_same(
    capture: Capture,
) -> None:
    committed(1, size=9 * MIB).close()
    layout = capture.service.layout(1)
    capture.run(capture.save_task(layout=layout, device=layout.device, fence_token=None))
    assert capture.objects() == {}
    capture.verified()
    asyncio.run(capture.agent.remove(PLACE))
    assert not capture.path.exists()


def test_the_same_save_again_gives_the_same_result(capture: Capture) -> None:
    first = capture.run(capture.save_task())
    again = capture.run(capture.save_task())
    assert again == msgspec.structs.replace(first, moved=0, backend="")
    with pytest.raises(errors.ArtifactExists):
        capture.run(capture.save_task(order=f"save-{UID}-gpu-1"))


def test_a_load_goes_where_the_save_has_left_the_bytes_whatever_is_chosen_now(
    capture: Capture,
) -> None:
    capture.run(capture.save_task())
    assert capture.run(capture.load_task(backend="posix-direct")).backend == "object"
    capture.service.drop(1, "l1")
    asyncio.run(capture.agent.remove(PLACE))
    capture.layout = capture.fence("f2")
    capture.run(capture.save_task(backend="posix-buffered", fence_token="f2"))
    assert capture.run(capture.load_task(load_token="l2")).backend.startswith("posix")


def test_a_save_that_fails_leaves_no_object(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise errors.NoSpace("the disk is full")

    monkeypatch.setattr("gms.transfer_child.save.write_new", full)
    with pytest.raises(errors.NoSpace):
        save(capture.save_task(), lambda _: None)
    assert not capture.path.exists()
    assert capture.objects() == {}


KILLED = """
import os, signal, sys
from gms.transfer_child import __main__ as transfer_child
from snapshot_shared.object_storage import ObjectStorage
real, left = ObjectStorage.put, [int(sys.argv[1])]
def put(self, key, data):
    if left[0] == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    left[0] -= 1
    real(self, key, data)
ObjectStorage.put = put
transfer_child.main(["save"])
"""


def killed(capture: Capture, written: int) -> None:
    """Kill a save after so many objects."""
    task = encode_json(capture.save_task(threads=1)) + b"\n"
    ended = forks(*TRANSFERS).run(KILLED, str(written), stdin=task)
    assert ended.returncode == -signal.SIGKILL


def test_a_save_that_was_killed_is_written_again_whole(capture: Capture) -> None:
    killed(capture, 2)
    done = capture.run(capture.save_task())
    assert done.moved == sum(capture.objects().values())
    capture.verified()
    capture.run(capture.load_task())


@pytest.mark.parametrize("written", [0, 2])
def test_a_save_that_was_killed_is_no_part_and_a_delete_removes_what_it_left(
    capture: Capture, written: int
) -> None:
    killed(capture, written)
    assert len(capture.objects()) == written
    assert not (capture.path / "part.json").exists()
    with pytest.raises(errors.ArtifactMissing):
        asyncio.run(capture.agent.read_part(PLACE, "gpu-0"))
    asyncio.run(capture.agent.remove(PLACE))
    assert capture.objects() == {}
    assert not capture.path.parent.exists()


def test_what_a_killed_save_has_left_is_gone_when_the_part_is_written_again(
    capture: Capture,
) -> None:
    storage = ObjectStorage(capture.url)
    storage.put(f"{PART}/shard-0007.bin/000000", memoryview(b"left behind"))
    capture.run(capture.save_task())
    capture.verified()
    assert f"{PART}/shard-0007.bin/000000" not in capture.objects()


def test_a_save_of_an_unchanged_layout_sends_nothing_and_outlives_its_parent(
    capture: Capture,
) -> None:
    done = capture.run(capture.seal_and_save_again())
    assert (done.moved, done.backend) == (0, "object")
    asyncio.run(capture.agent.remove(PLACE))
    assert len(capture.objects()) == 3
    capture.run(capture.load_task(content_uid=OTHER))


@pytest.mark.parametrize("is_gone", [False, True])
def test_an_object_of_the_parent_that_is_damaged_or_gone_is_sent_again(
    capture: Capture, is_gone: bool
) -> None:
    task = capture.seal_and_save_again()
    storage = ObjectStorage(capture.url)
    (_remove if is_gone else _flip)(storage, f"{PART}/shard-0000.bin/000000", 8 * MIB)
    done = capture.run(task)
    assert done.moved == (16 * MIB if is_gone else 8 * MIB), "a whole file is gone, or one chunk"
    capture.run(capture.load_task(content_uid=OTHER))


def test_a_parent_in_files_and_one_in_objects_share_nothing(capture: Capture) -> None:
    task = capture.seal_and_save_again()
    done = capture.run(msgspec.structs.replace(task, backend="posix-direct"))
    assert done.moved > 0
    capture.run(capture.load_task(content_uid=OTHER))


def test_a_delete_removes_the_objects_of_its_generation_and_no_other(capture: Capture) -> None:
    capture.run(capture.save_task())
    capture.layout = capture.fence("f2")
    capture.run(capture.save_task(content_uid=OTHER, fence_token="f2"))
    asyncio.run(capture.agent.remove(PLACE))
    assert capture.objects()
    assert all(key.startswith(f"default/{OTHER}/") for key in capture.objects())
    assert not capture.path.parent.exists()
    asyncio.run(capture.agent.remove(PLACE))


def test_a_delete_that_cannot_reach_the_storage_keeps_what_says_where_the_objects_are(
    capture: Capture,
) -> None:
    capture.run(capture.save_task())
    with pytest.raises(ObjectStorageUnset, match="SNAPBACK_OBJECT_STORAGE"):
        asyncio.run(ArtifactRoot(capture.root).remove(PLACE))
    assert (capture.path / "objects.json").exists()
    asyncio.run(capture.agent.remove(PLACE))
    assert capture.objects() == {}


def test_an_artifact_in_files_is_deleted_without_a_storage(capture: Capture) -> None:
    capture.run(capture.save_task(backend="posix-direct"))
    asyncio.run(ArtifactRoot(capture.root).remove(PLACE))
    assert not capture.path.exists()


def _flip(storage: ObjectStorage, key: str, size: int) -> None:
    data = bytearray(b"".join(storage.read(key, size)))
    data[size // 2] ^= 1
    storage.put(key, memoryview(data))


def _truncate(storage: ObjectStorage, key: str, size: int) -> None:
    storage.put(key, memoryview(b"".join(storage.read(key, size)))[:-1])


def _swap(storage: ObjectStorage, key: str, size: int) -> None:
    other = key.replace("000000", "000001")
    data = [b"".join(storage.read(each, size)) for each in (key, other)]
    storage.put(key, memoryview(data[1]))
    storage.put(other, memoryview(data[0]))


def _remove(storage: ObjectStorage, key: str, size: int) -> None:
    storage.remove(key.rpartition("/")[0])


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (_flip, errors.ArtifactCorrupt),
        (_truncate, errors.ArtifactCorrupt),
        (_swap, errors.ArtifactCorrupt),
        (_remove, errors.ArtifactMissing),
    ],
    ids=["flipped", "truncated", "swapped", "removed"],
)
def test_damage_is_found_by_a_load_and_by_both_verifications(
    capture: Capture,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[ObjectStorage, str, int], None],
    error: type[errors.SnapbackError],
) -> None:
    capture.run(capture.save_task())
    monkeypatch.setenv("SNAPBACK_OBJECT_STORAGE", capture.url)
    capture.verified()
    damage(ObjectStorage(capture.url), f"{PART}/shard-0000.bin/000000", 8 * MIB)
    with pytest.raises(error) as caught:
        capture.apart(capture.load_task())
    assert caught.value.values["file"] == "shard-0000.bin"
    assert capture.service.device(1).used == 0
    with pytest.raises(error):
        capture.verified()
    with pytest.raises(error):
        verify_part(capture.path, capture.manifest(), lambda _: None)


def test_an_object_that_the_manifest_does_not_name_keeps_a_part_from_being_sealed(
    capture: Capture,
) -> None:
    capture.run(capture.save_task())
    ObjectStorage(capture.url).put(f"{PART}/shard-0009.bin/000000", memoryview(b"more"))
    with pytest.raises(errors.ArtifactCorrupt, match=r"shard-0009\.bin"):
        asyncio.run(capture.agent.read_part(PLACE, "gpu-0"))


def test_a_manifest_that_names_the_objects_of_another_part_is_refused(capture: Capture) -> None:
    capture.run(capture.save_task())
    objects = capture.manifest().objects
    assert objects
    wrong = msgspec.structs.replace(objects, prefix=PART.replace(UID, OTHER))
    capture.forge(lambda manifest: msgspec.structs.replace(manifest, objects=wrong))
    with pytest.raises(errors.ArtifactCorrupt, match="prefix"):
        capture.run(capture.load_task())


def test_weights_that_go_elsewhere_need_no_room_below_the_artifact_root(tmp_path: Path) -> None:
    url = (tmp_path / "store").as_uri()
    asyncio.run(ArtifactRoot(tmp_path, url, weights_in_objects=True).require_space(1, 2**60))
    with pytest.raises(errors.NoSpace):
        asyncio.run(ArtifactRoot(tmp_path, url, weights_in_objects=True).require_space(2**60, 1))
    with pytest.raises(errors.NoSpace):
        asyncio.run(ArtifactRoot(tmp_path, url).require_space(1, 2**60))


# What can be wrong with a storage.


def test_each_failure_is_named_without_a_secret(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(BucketMissing) as missing:
        ObjectStorage("s3://missing/x").put("a", memoryview(b"1"))
    with pytest.raises(BucketMissing):
        ObjectStorage("s3://missing/x").sizes("a")
    with s3_server(checked_after=1) as checking:
        monkeypatch.setenv("AWS_ENDPOINT", checking.endpoint)
        with pytest.raises(ObjectStorageDenied) as denied:
            ObjectStorage("s3://bucket/x").put("a", memoryview(b"1"))
    with pytest.raises(ObjectStorageUnavailable) as down:
        ObjectStorage("s3://bucket/x").put("a", memoryview(b"1"))
    assert checking.endpoint in down.value.message
    assert down.value.retryable
    assert not denied.value.retryable
    for found in (missing, denied, down):
        text = str(found.value.to_failure()) + repr(found.value.values)
        assert found.value.next_step
        assert "AKIAEXAMPLE" not in text
        assert "the-secret" not in text
        assert "s3://" in text


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    storage = ObjectStorage((tmp_path / "store").as_uri())
    (tmp_path / "store" / "a").write_text("a file stands in the way")
    with pytest.raises((errors.SnapbackError, OSError)) as caught:
        storage.put("a/b", memoryview(b"1"))
    assert not isinstance(caught.value, errors.ArtifactMissing)


def test_a_storage_that_was_not_named_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ObjectStorageUnset, match="SNAPBACK_OBJECT_STORAGE is not set"):
        ObjectStorage("")
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    with pytest.raises(ObjectStorageUnset) as caught:
        ObjectStorage("s3://bucket/x")
    assert "pip install" in caught.value.next_step


def test_a_url_that_is_no_place_or_more_than_one_is_refused_and_not_repeated() -> None:
    for url in ("s3://bucket", "s3://bucket/a/b/", "gs://b/x", "az://c/x", "file:///srv/snapback"):
        assert check_url(url) == url
    said = {}
    for url in (
        "bucket",
        "s3://",
        "s3:///prefix",
        "ftp://host/x",
        "file://relative/x",
        "s3://key:secret@bucket/x",
        "s3://bucket/x?sig=secret",
        "az://container/x#secret",
        "s3://bucket/../x",
        "http://[",
    ):
        with pytest.raises(errors.InvalidInput, match="SNAPBACK_OBJECT_STORAGE") as caught:
            check_url(url)
        said[url] = str(caught.value.to_failure()) + repr(caught.value.values)
    assert {url: text for url, text in said.items() if "secret" in text} == {}


def test_what_a_transfer_logs_names_no_key(
    server: S3Server, service: Any, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    capture = Capture(service, tmp_path, "s3://missing/x")
    with pytest.raises(BucketMissing):
        capture.events(capture.save_task())
    assert not capture.path.exists()
    logged = capfd.readouterr().err
    assert "BucketMissing" in logged
    assert "the-secret" not in logged
    assert "AKIAEXAMPLE" not in logged


def test_the_benchmark_measures_and_judges() -> None:
    command = [sys.executable, "-m", "tests.bench.objects", "--size-mib", "16"]
    found = subprocess.run(
        command, check=False, cwd=ROOT, capture_output=True, text=True, timeout=50
    )
    assert found.returncode == 0, found.stdout + found.stderr
    lines = found.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["save", "load", "digests", "damage"]
    assert "1 of 2 chunks compared" in found.stdout
