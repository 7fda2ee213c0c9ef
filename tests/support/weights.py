"""Weights on a device of a real GPU memory service, and the tasks that save and load them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

import snapback_client as client
from gms.adapters.part_files import read_part
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent
from snapshot_shared.artifact import PART_MANIFEST, ROOT_MANIFEST, PartManifest
from snapshot_shared.codec import digest, encode_pretty
from snapshot_shared.frames import FenceRequest
from snapshot_shared.orders import LayoutRef
from tests.support.gms_rig import RunningGms, carried_out

UID = "11111111-2222-3333-4444-555555555555"
OTHER = UID.replace("1", "6")
PART = f"default/{UID}/gen-1/gpu-0"


class Weights:
    """Arrays that are committed and fenced on the first device, and the root of their part."""

    def __init__(
        self, service: RunningGms, root: Path, arrays: Mapping[str, tuple[Any, Any]], **fields: Any
    ) -> None:
        """Fill `arrays` (name: shape, type) at random; one that is called `zeros` has none else.

        `fields` are those of each task, of either kind.
        """
        self.service = service
        self.root = root
        self.path = root / PART
        self._fields = fields
        with client.connect(lock="RW") as pool:
            rng = np.random.default_rng(7)
            for name, array in pool.allocate_many(arrays).items():
                array[...] = 0 if name == "zeros" else rng.integers(0, 256, array.shape, "u1")
            pool.commit()
            self.sums = sums_of(pool)
            self.state = pool.save_state()
        self.layout = self.fence("f1")

    def fence(self, token: str) -> LayoutRef:
        """Fence the first device."""
        request = FenceRequest(
            token=token, devices=self.service.uuids[:1], wait_s=5.0, deadline_s=600.0
        )
        (layout,) = self.service.run(self.service.control.fence(request)).vector
        return layout

    def save_task(self, **changes: Any) -> SaveTask:
        """Return the task that saves the first device under the fence."""
        task = SaveTask(
            socket_dir=str(self.service.folder),
            root=str(self.root),
            device=self.service.uuids[0],
            namespace="default",
            content_uid=UID,
            generation=1,
            part="gpu-0",
            deadline_s=10.0,
            order=f"save-{UID}-gpu-0",
            fence_token="f1",
            layout=self.layout,
            shard_bytes=16 * 1024 * 1024,
        )
        return replace(task, **{**self._fields, **changes})

    def load_task(self, **changes: Any) -> LoadTask:
        """Return the task that loads the part, which is saved, onto the second device."""
        task = LoadTask(
            socket_dir=str(self.service.folder),
            root=str(self.root),
            device=self.service.uuids[1],
            namespace="default",
            content_uid=UID,
            generation=1,
            part="gpu-0",
            deadline_s=10.0,
            part_digest=digest((self.path / PART_MANIFEST).read_bytes()),
            load_token="l1",
            layout_id=self.layout.layout_id,
            structure_hash=self.layout.structure_hash,
        )
        return replace(task, **{**self._fields, **changes})

    def run(self, task: SaveTask | LoadTask) -> TransferDone:
        """Carry out a task in this process; return its result."""
        return carried_out(task)

    def events(self, task: SaveTask | LoadTask) -> list[TransferEvent]:
        """Carry out a task in a process of its own, as the service does."""

        async def collect() -> list[TransferEvent]:
            return [event async for event in TransferProcesses().run(task)]

        return self.service.run(collect())

    def load(self, **changes: Any) -> dict[str, int]:
        """Load the part, publish it and return the sums that a worker finds at its addresses."""
        task = self.load_task(**changes)
        self.run(task)
        self.service.publish(task.load_token)
        with client.restore(self.state, device=1) as pool:
            return sums_of(pool)

    def seal_and_save_again(self, **changes: Any) -> SaveTask:
        """Save and seal; return the task of another capture, `OTHER`, of the same layout."""
        self.run(self.save_task(**changes))
        (self.path.parent / ROOT_MANIFEST).write_text("{}")
        self.layout = self.fence("f2")
        return self.save_task(content_uid=OTHER, fence_token="f2")

    def manifest(self) -> PartManifest:
        return read_part(self.path)[0]

    def forge(self, change: Callable[[PartManifest], PartManifest]) -> str:
        """Replace the manifest; return its new digest."""
        data = encode_pretty(change(self.manifest()))
        (self.path / PART_MANIFEST).write_bytes(data)
        return digest(data)


def sums_of(pool: client.MemoryPool) -> dict[str, int]:
    return {name: int(array.sum(dtype="i8")) for name, array in pool.arrays().items()}


def flip(path: Path, offset: int = 0) -> None:
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
