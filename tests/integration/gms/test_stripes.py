"""Saves and loads over several folders, and real agents."""

from __future__ import annotations

import asyncio
import itertools
import os
import tempfile
from collections.abc import AsyncGenerator, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gms.adapters.part_files import verify_part
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent, TransferProgress
from gms.handlers.transfers import whole_or_nothing
from gms.transfer_child.save import save
from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_agent.ports import GenerationRef
from snapshot_shared import errors
from snapshot_shared.artifact import ROOT_MANIFEST
from snapshot_shared.stripes import IDENTITY, MARK, StripeMissing, StripeRoots
from tests.support import builders
from tests.support.gms_rig import MIB, committed
from tests.support.weights import OTHER, PART, PLACE, UID, Weights

OTHER_PLACE = GenerationRef("default", OTHER, 1)


class Capture(Weights):
    """Weights, and the folders that their part goes to."""

    def __init__(self, service: Any, folder: Path) -> None:
        self.stripes = {name: str(folder / name) for name in ("fast", "other")}
        for path in self.stripes.values():
            Path(path).mkdir()
        arrays = {"big": (20 * MIB + 3, "u1"), "zeros": (8 * MIB, "u1")}
        fields = {"stripe_roots": self.stripes}
        super().__init__(service, folder / "artifacts", arrays, **fields)
        self.agent = self.agent_with(self.stripes)

    def agent_with(self, stripes: dict[str, str]) -> ArtifactRoot:
        return ArtifactRoot(self.root, stripes=StripeRoots(stripes))

    def save_task(self, **changes: Any) -> SaveTask:
        return super().save_task(**{"shard_bytes": 4 * MIB, **changes})

    def shards(self, stripe: str = "") -> set[str]:
        """The names of the shards in a stripe root, or in the artifact root."""
        folder = Path(self.stripes[stripe] if stripe else self.root) / PART
        return {path.name for path in folder.glob("shard-*")}

    def left(self) -> list[str]:
        """Everything in the stripe roots besides their identities and the namespace.

        The name under which an identity is made may stay until the next save.
        """
        return sorted(
            str(path)
            for stripe in self.stripes.values()
            for path in Path(stripe).rglob("*")
            if path.name != "default" and not path.name.startswith((IDENTITY, f".{IDENTITY}."))
        )

    def used(self, place: GenerationRef = PLACE) -> set[str]:
        """Read everything by an agent; return the stripe roots that the manifest names."""
        return {entry.stripe or "" for entry in self.verified(place).files}

    def remove(self) -> None:
        asyncio.run(self.agent.remove(PLACE))


@pytest.fixture
def capture(service: Any, tmp_path: Path) -> Capture:
    return Capture(service, tmp_path)


@pytest.fixture
def saved(capture: Capture) -> Capture:
    """Weights whose part is in all folders."""
    capture.run(capture.save_task())
    return capture


def test_files_are_spread_over_all_folders_and_come_back(saved: Capture) -> None:
    counts = [len(saved.shards(stripe)) for stripe in ("", "fast", "other")]
    assert sum(counts) == len(saved.manifest().files) == 8
    assert max(counts) - min(counts) <= 1
    assert saved.load() == saved.digests


def test_shards_are_cut_shorter_so_that_every_folder_has_some(capture: Capture) -> None:
    capture.run(capture.save_task(shard_bytes=256 * MIB))
    assert [len(capture.shards(stripe)) for stripe in ("", "fast")] == [1, 1]
    assert [entry.size // MIB for entry in capture.manifest().files] == [16, 12]


def test_a_manifest_names_stripe_roots_and_no_path(saved: Capture, tmp_path: Path) -> None:
    assert saved.used() == {"", "fast", "other"}
    for file in ("part.json", MARK):
        assert str(tmp_path) not in (saved.path / file).read_text()


def test_folders_and_files_of_all_roots_are_for_their_owner_alone(saved: Capture) -> None:
    fast = Path(saved.stripes["fast"])
    for path in (saved.root, *saved.root.rglob("*"), *fast.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize(
    "fields",
    [
        *({"threads": threads} for threads in (1, 2, 3, 16)),
        *({"backend": backend} for backend in ("posix-buffered", "pinned-host")),
    ],
)
def test_any_backend_with_any_number_of_threads_uses_all_folders(
    capture: Capture, fields: dict[str, Any]
) -> None:
    capture.run(capture.save_task(**fields))
    assert capture.shards("fast")
    capture.run(capture.load_task(**fields))
    capture.verified()


def test_a_part_of_one_file_uses_the_artifact_root_alone(capture: Capture) -> None:
    committed(1, size=3 * MIB).close()
    layout = capture.service.layout(1)
    other = {"layout": layout, "device": layout.device, "fence_token": None}
    capture.run(capture.save_task(**other, shard_bytes=64 * MIB))
    assert {path.name for path in capture.path.iterdir()} == {"part.json", "shard-0000.bin"}
    assert capture.left() == []
    capture.remove()
    assert not capture.path.exists()


def test_an_artifact_from_before_the_setting_is_loaded_verified_and_removed(
    capture: Capture,
) -> None:
    capture.run(capture.save_task(stripe_roots={}))
    assert b"stripe" not in (capture.path / "part.json").read_bytes()
    capture.run(capture.load_task())
    capture.verified()
    capture.remove()
    assert not capture.path.exists()


def test_a_verification_reads_all_folders(saved: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    saved.verified()
    setting = ":".join(f"{name}={path}" for name, path in saved.stripes.items())
    monkeypatch.setenv("SNAPBACK_STRIPE_ROOTS", setting)
    verify_part(saved.path, saved.manifest(), lambda _: None)
    entry = next(entry for entry in saved.manifest().files if entry.stripe == "other")
    with (Path(saved.stripes["other"]) / PART / entry.name).open("r+b") as file:
        file.write(b"damaged")
    with pytest.raises(errors.ArtifactCorrupt, match=entry.name):
        saved.verified()
    with pytest.raises(errors.ArtifactCorrupt, match=entry.name):
        verify_part(saved.path, saved.manifest(), lambda _: None)


def test_a_file_that_is_missing_in_a_stripe_root_is_named(saved: Capture) -> None:
    entry = next(entry for entry in saved.manifest().files if entry.stripe == "other")
    (Path(saved.stripes["other"]) / PART / entry.name).unlink()
    with pytest.raises(errors.ArtifactMissing, match=entry.name):
        asyncio.run(saved.agent.read_part(PLACE, "gpu-0"))
    with pytest.raises(errors.ArtifactMissing, match=entry.name):
        saved.run(saved.load_task())


def gone(capture: Capture, how: str) -> dict[str, str]:
    """Take a stripe root away. Return the setting of the node."""
    disk = Path(capture.stripes["other"])
    if how == "not named":
        return {"fast": capture.stripes["fast"]}
    disk.rename(disk.with_name("elsewhere"))
    if how != "no folder":
        disk.mkdir()
    if how == "another disk":
        (disk / IDENTITY).write_text(f'{{"id": "{"0" * 32}"}}')
    return capture.stripes


@pytest.mark.parametrize("how", ["not named", "no folder", "not mounted", "another disk"])
def test_a_load_or_a_deletion_without_a_stripe_root_fails_before_it_begins(
    saved: Capture, how: str
) -> None:
    stripes = gone(saved, how)
    with pytest.raises(errors.SnapbackError, match="'other'") as caught:
        saved.run(saved.load_task(stripe_roots=stripes))
    assert caught.value.to_failure().reason == "StripeMissing"
    agent = saved.agent_with(stripes)
    with pytest.raises(StripeMissing, match="'other'"):
        asyncio.run(agent.read_part(PLACE, "gpu-0"))
    with pytest.raises(StripeMissing, match="'other'") as refused:
        asyncio.run(agent.remove(PLACE))
    assert (saved.path / MARK).exists()
    assert "SNAPBACK_STRIPE_ROOTS" in refused.value.next_step
    assert refused.value.values["setting"] == "SNAPBACK_STRIPE_ROOTS"
    assert not refused.value.retryable


def test_a_capture_without_a_stripe_root_is_refused_before_it_begins_and_leaves_nothing(
    capture: Capture,
) -> None:
    asyncio.run(capture.agent.require_space(1, 1))
    Path(capture.stripes["other"]).rmdir()
    with pytest.raises(StripeMissing, match="'other'"):
        asyncio.run(capture.agent.require_space(1, 1))
    with pytest.raises(errors.SnapbackError, match="'other'") as caught:
        capture.run(capture.save_task())
    assert caught.value.to_failure().reason == "StripeMissing"
    assert not capture.path.exists()
    assert capture.left() == []


def test_a_capture_is_refused_where_two_stripe_roots_are_one_folder(capture: Capture) -> None:
    other = Path(capture.stripes["other"])
    other.rmdir()
    other.symlink_to(capture.stripes["fast"])
    with pytest.raises(errors.InvalidInput, match="'fast' and stripe root 'other'"):
        asyncio.run(capture.agent.require_space(1, 1))


def test_what_no_manifest_names_in_a_stripe_root_is_found(saved: Capture) -> None:
    (Path(saved.stripes["other"]) / PART / "extra").touch()
    with pytest.raises(errors.ArtifactCorrupt, match="'extra'"):
        asyncio.run(saved.agent.read_part(PLACE, "gpu-0"))


def test_a_save_that_fails_at_its_end_leaves_nothing(
    capture: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        assert capture.shards("fast")
        raise errors.NoSpace("the disk is full")

    monkeypatch.setattr("gms.transfer_child.save.write_new", full)
    with pytest.raises(errors.NoSpace):
        save(capture.save_task(), lambda _: None)
    assert not capture.path.exists()
    assert [path for path in capture.left() if "gpu-0" in path] == []
    capture.remove()
    assert capture.left() == []


def test_a_saver_or_loader_in_a_pod_is_given_no_stripe_roots(saved: Capture) -> None:
    with pytest.raises(errors.SnapbackError, match="no loader in a pod is given"):
        saved.run(saved.load_task(staged=str(saved.root.parent)))
    task = saved.save_task()
    written = saved.root.parent / f"{task.order}.{task.attempt}" / PART
    written.mkdir(parents=True)
    (written / "part.json").write_bytes((saved.path / "part.json").read_bytes())
    saved.remove()
    with pytest.raises(
        errors.SnapbackError, match="the saver of the pod has put files of gpu-0 into"
    ):
        saved.run(saved.save_task(staged=str(saved.root.parent)))
    assert saved.left() == []


def test_what_a_saver_in_a_pod_has_written_stays_in_the_artifact_root(capture: Capture) -> None:
    capture.run(capture.save_task(stripe_roots={}))
    task = capture.save_task()
    written = capture.root.parent / f"{task.order}.{task.attempt}" / PART
    written.parent.mkdir(parents=True)
    capture.path.rename(written)
    capture.run(capture.save_task(staged=str(capture.root.parent)))
    capture.verified()
    assert capture.left() == []


def test_object_storage_is_not_spread(capture: Capture) -> None:
    url = (capture.root.parent / "store").as_uri()
    capture.run(capture.save_task(backend="object", object_storage=url))
    assert {path.name for path in capture.path.iterdir()} == {"part.json", "objects.json"}
    assert capture.left() == []


def test_a_call_for_a_save_that_ends_early_leaves_nothing(capture: Capture) -> None:
    async def save_a_little() -> None:
        events = whole_or_nothing(TransferProcesses(), capture.save_task(threads=1))
        async for event in events:
            if isinstance(event, TransferProgress):
                break
        await events.aclose()

    capture.service.run(save_a_little())
    assert not capture.path.exists()
    assert [path for path in capture.left() if "gpu-0" in path] == []


class UnheardTransfers:
    """Transfers of which a save has made its folder, and is cancelled before it has said so."""

    def __init__(self, path: Path, *names: str) -> None:
        self.path, self.names = path, names
        self.has_begun = asyncio.Event()

    async def run(self, _task: SaveTask | LoadTask) -> AsyncGenerator[TransferEvent, None]:
        self.path.mkdir(parents=True)
        for name in self.names:
            (self.path / name).touch()
        self.has_begun.set()
        await asyncio.Event().wait()
        yield TransferProgress(done=0, total=1)


@pytest.mark.parametrize(
    ("names", "stays"), [((), False), (("shard-0",), False), (("shard-0", "part.json"), True)]
)
async def test_a_save_that_is_cancelled_before_it_is_heard_leaves_no_half_part(
    tmp_path: Path, names: tuple[str, ...], *, stays: bool
) -> None:
    task = builders.save_task(root=str(tmp_path))
    path = tmp_path / task.namespace / task.content_uid / f"gen-{task.generation}" / task.part
    transfers = UnheardTransfers(path, *names)
    save = asyncio.ensure_future(anext(whole_or_nothing(transfers, task)))
    await transfers.has_begun.wait()
    save.cancel()
    await asyncio.wait([save])
    assert path.exists() == stays


def test_a_node_shows_the_room_of_the_disks_that_are_there(
    capture: Capture, caplog: pytest.LogCaptureFixture
) -> None:
    before = asyncio.run(capture.agent.free_bytes())
    disk = Path(capture.stripes["other"])
    disk.rmdir()
    for _ in range(3):
        assert asyncio.run(capture.agent.free_bytes()) > before // 2
    assert len([each for each in caplog.messages if "'other'" in each]) == 1
    disk.mkdir()
    assert asyncio.run(capture.agent.free_bytes()) > 0
    disk.rmdir()
    assert asyncio.run(capture.agent.free_bytes()) > 0
    assert len([each for each in caplog.messages if "'other'" in each]) == 2


def saved_again(capture: Capture) -> TransferDone:
    """Seal what was saved and save the same layout as another capture."""
    (capture.path.parent / ROOT_MANIFEST).write_text("{}")
    capture.layout = capture.fence("f2")
    task = capture.save_task(content_uid=OTHER, order=f"save-{OTHER}-gpu-0", fence_token="f2")
    return capture.run(task)


def test_files_that_did_not_change_are_shared_within_their_stripe_root(capture: Capture) -> None:
    first = capture.run(capture.save_task())
    again = saved_again(capture)
    assert (again.bytes, again.moved) == (first.bytes, 0)
    capture.remove()
    assert capture.used(OTHER_PLACE) == {"", "fast", "other"}
    asyncio.run(capture.agent.remove(OTHER_PLACE))
    assert capture.left() == []


def test_a_file_that_is_shared_from_elsewhere_is_found_where_it_is(capture: Capture) -> None:
    capture.run(capture.save_task(stripe_roots={}))
    assert saved_again(capture).moved == 0
    assert capture.used(OTHER_PLACE) == {""}
    asyncio.run(capture.agent.remove(OTHER_PLACE))
    assert capture.left() == []


def saves_that_die(capture: Capture, calls: Iterable[int]) -> Iterator[bool]:
    """Kill saves by SIGKILL, each at one of the calls that change the disk, counted from 1.

    Each has written what it can by then. False, and the end, for one that lives.
    """
    for last in calls:
        done = capture.doomed(capture.save_task(note_bytes=1, threads=1), last).done
        yield done is None
        if done:
            return


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_save_that_is_killed_anywhere_leaves_nothing_after_its_removal(
    capture: Capture,
) -> None:
    deaths = 0
    # Every call until the first bytes are written, and some of the others.
    for died in saves_that_die(capture, itertools.chain(range(1, 50), range(50, 2000, 40))):
        deaths += died
        capture.remove()
        assert not capture.path.exists()
        assert capture.left() == []
    assert deaths > 50
    for stripe in capture.stripes.values():
        assert {path.name for path in Path(stripe).iterdir()} == {IDENTITY, "default"}


def test_a_save_that_was_killed_goes_on_in_all_folders(capture: Capture) -> None:
    kills = saves_that_die(capture, range(60, 200, 5))
    while not capture.shards("fast"):
        next(kills)
    done = capture.run(capture.save_task(note_bytes=1))
    assert 0 < done.moved < done.bytes // 2
    capture.verified()
    capture.remove()
    assert capture.left() == []


def test_a_resumed_save_with_other_stripe_roots_begins_again(capture: Capture) -> None:
    kills = saves_that_die(capture, range(60, 200, 20))
    while not capture.shards("other"):
        next(kills)
    assert not (capture.path / "part.json").exists()
    fast = {"fast": capture.stripes["fast"]}
    with pytest.raises(errors.SnapbackError, match="'other'"):
        capture.run(capture.save_task(stripe_roots=fast))
    assert (capture.path / MARK).exists()
    third = capture.root.parent / "third"
    third.mkdir()
    capture.run(capture.save_task(stripe_roots=capture.stripes | {"third": str(third)}))
    found = {entry.stripe or "" for entry in capture.manifest().files}
    assert found == {"", "fast", "other", "third"}


def test_two_saves_that_begin_at_once_agree_who_a_stripe_root_is(capture: Capture) -> None:
    roots = StripeRoots(capture.stripes)
    seen = set()
    for number in range(2):
        folder = capture.root.parent / f"part-{number}"
        folder.mkdir()
        directory = os.open(folder, os.O_RDONLY)
        root = os.open(folder.parent, os.O_RDONLY)
        with roots.writing(root, directory, ("default", UID, "gen-1", f"gpu-{number}"), ["fast"]):
            seen.add((folder / MARK).read_text())
        os.close(directory)
        os.close(root)
    assert len(seen) == 1


def test_a_save_needs_room_on_each_disk(capture: Capture, tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as small:
        if Path(small).stat().st_dev == tmp_path.stat().st_dev:
            pytest.skip("/dev/shm is no file system of its own here")
        capture.stripes["other"] = small
        agent = capture.agent_with(capture.stripes)
        free = asyncio.run(agent.free_bytes())
        disk, shm = os.statvfs(tmp_path), os.statvfs(small)
        room = min(disk.f_bavail * disk.f_frsize // 2, shm.f_bavail * shm.f_frsize) * 3
        assert abs(free - room) < room / 10
        asyncio.run(agent.require_space(1, 1))
        with pytest.raises(errors.NoSpace, match="the capture, below"):
            asyncio.run(agent.require_space(1, free + free // 8))
        capture.run(capture.save_task())
        assert capture.shards("other")
        asyncio.run(agent.remove(PLACE))
        assert capture.left() == []
