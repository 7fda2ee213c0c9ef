"""Memory that only its device addresses is encrypted between its bounce buffers and the files."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from gms.adapters.backends import find_backend
from gms.adapters.bounce_buffers import BounceBuffered
from gms.adapters.encrypted import Ciphers, Encrypted
from gms.adapters.parallel import STREAMS
from gms.adapters.staging import Staging, staged
from gms.domain.resume import note_of, read_notes
from gms.domain.task_rules import part_manifest, path_of
from gms.domain.tasks import SaveTask
from gms.domain.transfer import PAGE, FilePlan, place, plan_files
from gms.ports import Buffers, Moved
from snapback_client.frames import AllocationInfo
from snapshot_shared.artifact import FileEntry, PartManifest, check_part_manifest
from snapshot_shared.files import open_root, opened
from snapshot_shared.keys import ArtifactKeys
from snapshot_shared.object_storage import zeros_digest
from snapshot_shared.orders import LayoutRef
from tests.support.artifact_keys import put_encryption
from tests.support.direct_backend import DirectExample

UID = "11111111-2222-3333-4444-555555555555"
GRANULE = 2 * 1024 * 1024
SIZES = [GRANULE, 3 * PAGE + 17, 100, 11 * PAGE]
PLACES = [index * GRANULE for index in range(len(SIZES))]
SHARD = 64 * PAGE
INFOS = [
    AllocationInfo(id=f"a{slot}", size=size, aligned=GRANULE, tag="", slot=slot)
    for slot, size in enumerate(SIZES)
]
ENTRIES, LENGTHS = place(INFOS, shard_bytes=SHARD)
PLANS = plan_files(ENTRIES, LENGTHS, chunk_bytes=[8 * PAGE] * len(LENGTHS))


class HostDevice:
    """The `DeviceMemory` port over memory of the host, and its own `Copier`."""

    def __init__(self) -> None:
        self.memory = bytearray(GRANULE * len(SIZES))

    def copier(self, size: int) -> HostCopier:
        return HostCopier(memoryview(self.memory), size)

    def values(self) -> list[bytes]:
        return [bytes(self.memory[at:][:size]) for at, size in zip(PLACES, SIZES, strict=True)]


class HostCopier:
    def __init__(self, memory: memoryview, size: int) -> None:
        self._memory = memory
        self.buffer = memoryview(bytearray(size))

    def read(self, offset: int, into: memoryview) -> None:
        into[:] = self._memory[offset:][: len(into)]

    def write(self, offset: int, source: memoryview) -> None:
        self._memory[offset:][: len(source)] = source

    def flush(self) -> None:
        pass

    def close(self) -> None:
        pass


@pytest.fixture
def task(tmp_path: Path) -> SaveTask:
    put_encryption(tmp_path / "keys")
    layout = LayoutRef(
        device="d", incarnation="i", generation=1, layout_id="l", structure_hash="h", bytes=1
    )
    return SaveTask(
        socket_dir="/",
        root=str(tmp_path / "artifacts"),
        device="d",
        namespace="default",
        content_uid=UID,
        generation=1,
        part="gpu-0",
        deadline_s=1.0,
        order=f"save-{UID}-gpu-0",
        layout=layout,
        artifact_keys=str(tmp_path / "keys"),
        encrypt=True,
    )


def filled() -> HostDevice:
    device = HostDevice()
    for at, size in zip(PLACES, SIZES, strict=True):
        device.memory[at : at + size] = Random(size).randbytes(size)
    device.memory[32 * PAGE : 48 * PAGE] = bytes(16 * PAGE)
    return device


def write(
    task: SaveTask, device: HostDevice, staging: Staging, plans: list[FilePlan]
) -> tuple[Ciphers, Moved]:
    ciphers = Ciphers(ArtifactKeys(Path(task.artifact_keys)), task)
    ciphers.begin(staging)
    backend = Encrypted(find_backend("posix-direct", in_place=True), ciphers)
    with BounceBuffered(backend, device, PLACES, len(device.memory)) as bounced:
        moved = bounced.write_missing(
            staging.directory, plans, [], threads=2, advance=lambda _: None, notes=staging
        )
    return ciphers, moved


def read(task: SaveTask, manifest: PartManifest, directory: int) -> list[bytes]:
    ciphers = Ciphers(ArtifactKeys(Path(task.artifact_keys)), task)
    ciphers.open(manifest)
    backend = Encrypted(find_backend("posix-direct", in_place=True), ciphers)
    device = HostDevice()
    with BounceBuffered(backend, device, PLACES, len(device.memory)) as bounced:
        bounced.read_files(directory, PLANS, manifest.files, [], threads=2, advance=lambda _: None)
    return device.values()


def test_what_is_encrypted_is_not_read_into_a_device_past_the_host(
    task: SaveTask, tmp_path: Path
) -> None:
    # Its copies of the host have no address of a device to lend.
    device = filled()
    backend = Encrypted(
        DirectExample(), ciphers := Ciphers(ArtifactKeys(Path(task.artifact_keys)), task)
    )
    with (
        opened(open_root(task.root, create=True)) as root,
        staged(root, replace(task, note_bytes=SHARD)) as staging,
        BounceBuffered(backend, device, PLACES, len(device.memory)) as bounced,
    ):
        ciphers.begin(staging)
        moved = bounced.write_files(staging.directory, PLANS, [], threads=2, advance=lambda _: None)
        written = [ciphers.finished(entry) for entry in moved.files]
        before = device.values()
        device.memory[:] = bytes(len(device.memory))
        bounced.read_files(staging.directory, PLANS, written, [], threads=2, advance=lambda _: None)
    assert device.values() == before


class Watched:
    """A backend that keeps every buffer that it is given, so that none has the place of another."""

    def __init__(self) -> None:
        self._backend = find_backend("posix-direct")
        self.buffers: list[Any] = []

    def write_files(
        self, directory: int, plans: Sequence[FilePlan], buffers: Buffers, **how: Any
    ) -> Moved:
        self.buffers += buffers
        return self._backend.write_files(directory, plans, buffers, **how)

    def read_files(
        self,
        directory: int,
        plans: Sequence[FilePlan],
        entries: Sequence[FileEntry],
        buffers: Buffers,
        **how: Any,
    ) -> Moved:
        self.buffers += buffers
        return self._backend.read_files(directory, plans, entries, buffers, **how)

    def places(self) -> int:
        """How many different buffers they were."""
        return len({ctypes.addressof(ctypes.c_char.from_buffer(each)) for each in self.buffers})


def test_files_that_come_one_at_a_time_share_the_buffers_of_their_streams(
    task: SaveTask, tmp_path: Path
) -> None:
    device, watched = filled(), Watched()
    ciphers = Ciphers(ArtifactKeys(Path(task.artifact_keys)), task)
    backend = Encrypted(watched, ciphers)
    with (
        opened(open_root(task.root, create=True)) as root,
        staged(root, replace(task, note_bytes=SHARD)) as staging,
        BounceBuffered(backend, device, PLACES, len(device.memory)) as bounced,
    ):
        ciphers.begin(staging)
        moved = bounced.write_files(staging.directory, PLANS, [], threads=2, advance=lambda _: None)
        assert [entry.name for entry in moved.files] == [plan.name for plan in PLANS]
        assert len(watched.buffers) == len(PLANS) > STREAMS
        assert watched.places() <= STREAMS
        written = [ciphers.finished(entry) for entry in moved.files]
        before = device.values()
        device.memory[:] = bytes(len(device.memory))
        bounced.read_files(staging.directory, PLANS, written, [], threads=2, advance=lambda _: None)
        assert device.values() == before
        assert watched.places() <= STREAMS


def test_a_save_that_was_cut_off_goes_on_and_is_loaded_again(task: SaveTask) -> None:
    device = filled()
    task = replace(task, note_bytes=2 * SHARD)
    with opened(open_root(task.root, create=True)) as root:
        path = path_of(task)
        try:
            with staged(root, task) as staging:
                write(task, device, staging, PLANS[:5])
                notes = Path(task.root, *path, ".notes").read_bytes()
                kept = {
                    name: data.read_bytes()
                    for name in (".notes", *(plan.name for plan in PLANS[:5]))
                    if (data := Path(task.root, *path, name)).exists()
                }
                raise KeyboardInterrupt
        except KeyboardInterrupt:
            # What a killed process leaves; one that fails removes it.
            folder = Path(task.root, *path)
            folder.mkdir(mode=0o700)
            for name, data in kept.items():
                (folder / name).write_bytes(data)
        noted = read_notes(notes, note_of(task))
        assert len(noted.written) == 4, "two files at a time are noted"
        with staged(root, task) as staging:
            ciphers, moved = write(task, device, staging, PLANS)
            assert ciphers.cipher.encryption == noted.encryption
            files = {entry.name: ciphers.finished(entry) for entry in moved.files}
            manifest = part_manifest(
                task,
                ENTRIES,
                [files[plan.name] for plan in PLANS],
                [],
                ciphers.cipher.encryption,
            )
            check_part_manifest(manifest)
            for name, tags in noted.tags.items():
                entry = files[name]
                assert entry.encryption
                for index, tag in tags.items():
                    is_hole = entry.chunks[index] == zeros_digest(8 * PAGE)
                    assert is_hole or entry.encryption.tags[index] == tag
            assert moved.bytes < sum(plan.size for plan in PLANS[4:]) + PAGE
            assert read(task, manifest, staging.directory) == device.values()
