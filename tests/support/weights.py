"""Weights on a device of a real GPU memory service, and the tasks that save and load them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

import snapback_client as client
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent
from snapshot_shared.codec import digest
from snapshot_shared.frames import FenceRequest
from snapshot_shared.orders import LayoutRef

UID = "11111111-2222-3333-4444-555555555555"
PART = f"default/{UID}/gen-1/gpu-0"


class Weights:
    """Arrays that are committed and fenced on the first device, and the root of their part."""

    def __init__(
        self, service: Any, root: Path, arrays: Mapping[str, tuple[Any, Any]], **fields: Any
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
                array[...] = 0 if name == "zeros" else rng.integers(0, 100, array.shape)
            pool.commit()
            self.sums = {name: int(a.sum(dtype="i8")) for name, a in pool.arrays().items()}
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
            part_digest=digest((self.path / "part.json").read_bytes()),
            load_token="l1",
            layout_id=self.layout.layout_id,
            structure_hash=self.layout.structure_hash,
        )
        return replace(task, **{**self._fields, **changes})

    def events(self, task: SaveTask | LoadTask) -> list[TransferEvent]:
        """Run a task in a process, as the service does."""

        async def collect() -> list[TransferEvent]:
            return [event async for event in TransferProcesses().run(task)]

        return self.service.run(collect())

    def run(self, task: SaveTask | LoadTask) -> TransferDone:
        """Run a task; return its result."""
        done = self.events(task)[-1]
        assert isinstance(done, TransferDone)
        return done
