"""Weights on a device of a real GPU memory service, and the tasks that save and load them."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import xxhash
from msgspec.structs import replace

import snapback_client as client
from gms.adapters.part_files import read_part
from gms.domain.tasks import LoadTask, SaveTask, TransferDone, TransferEvent
from snapshot_agent.adapters.artifacts import ArtifactRoot
from snapshot_agent.ports import GenerationRef
from snapshot_shared.artifact import PART_MANIFEST, ROOT_MANIFEST, PartManifest
from snapshot_shared.codec import decode_json, digest, encode_json, encode_pretty
from snapshot_shared.frames import FenceRequest
from snapshot_shared.orders import ArtifactRef, LayoutRef, LoadOrder, SaveOrder
from tests.support.agent_rig import ignored
from tests.support.doomed_saver import COUNTS
from tests.support.forks import forks
from tests.support.gms_rig import TRANSFERS, RunningGms, apart, carried_out, events_of

UID = "11111111-2222-3333-4444-555555555555"
OTHER = UID.replace("1", "6")
PART = f"default/{UID}/gen-1/gpu-0"
PLACE = GenerationRef("default", UID, 1)


_ORDER: dict[str, Any] = {"attempt": 1, "node": "n1", "deadline_s": 20.0, "part": "gpu-0"}


def save_order(layout: LayoutRef, *, uid: str = UID, **changes: Any) -> SaveOrder:
    """Return the order to save a layout as the first part of a content."""
    fields = {"owner": uid, "namespace": "default", "content_uid": uid, "fence_token": "", **_ORDER}
    part = changes.get("part", "gpu-0")
    return SaveOrder(**{**fields, "order": f"save-{uid}-{part}", "layout": layout, **changes})


def load_order(
    *, uid: str = UID, owner: str = UID, generation: int = 1, **changes: Any
) -> LoadOrder:
    """Return the order to load the first part of a content."""
    digest = "sha256:" + "0" * 64
    artifact = ArtifactRef(
        namespace="default", content_uid=uid, generation=generation, root_digest=digest
    )
    part = changes.get("part", "gpu-0")
    fields = {"order": f"load-{owner}-{part}", "owner": owner, "load_token": "t", **_ORDER}
    return LoadOrder(**{**fields, "artifact": artifact, **changes})


def saving(sockets: Path, root: Path, layout: LayoutRef, /, **changes: Any) -> SaveTask:
    """Return the task that saves a layout as the first part of a content."""
    place = _place(sockets, root, layout)
    return replace(SaveTask(order=f"save-{UID}-gpu-0", layout=layout, **place), **changes)


def loading(
    sockets: Path, root: Path, layout: LayoutRef, /, *, path: Path | None = None, **changes: Any
) -> LoadTask:
    """Return the task that loads this part, or that of `path`, onto the device of the layout."""
    task = LoadTask(
        part_digest=digest(((path or root / PART) / PART_MANIFEST).read_bytes()),
        load_token="l1",
        layout_id=layout.layout_id,
        structure_hash=layout.structure_hash,
        **_place(sockets, root, layout),
    )
    return replace(task, **changes)


def _place(sockets: Path, root: Path, layout: LayoutRef) -> dict[str, Any]:
    return {
        "socket_dir": str(sockets),
        "root": str(root),
        "device": layout.device,
        "namespace": "default",
        "content_uid": UID,
        "generation": 1,
        "part": "gpu-0",
        "deadline_s": 10.0,
    }


class Doomed(NamedTuple):
    """How a process that saves has ended: what it did, and its result if it lived."""

    calls: int
    bytes: int
    done: TransferDone | None


class Weights:
    """Arrays that are committed and fenced on the first device, and the root of their part.

    An `agent` is given by tests of what it does with the part.
    """

    agent: ArtifactRoot

    def __init__(
        self,
        service: RunningGms,
        root: Path,
        arrays: Mapping[str, tuple[Any, Any]],
        *,
        is_fenced: bool = True,
        **fields: Any,
    ) -> None:
        """Fill `arrays` (name: shape, type) at random; one that is called `zeros` has none else.

        `fields` are those of each task, of either kind.
        """
        self.service = service
        self.root = root
        self.path = root / PART
        self._fields = fields
        rng = np.random.default_rng(7)
        self.commit(
            {
                name: np.zeros(shape, dtype)
                if name == "zeros"
                else rng.integers(0, 256, shape, "u1").astype(dtype)
                for name, (shape, dtype) in arrays.items()
            }
        )
        self.layout: LayoutRef = self.fence("f1") if is_fenced else self.service.layout()

    def commit(self, arrays: Mapping[str, Any]) -> None:
        """Commit these arrays on the first device."""
        with client.connect(lock="RW") as pool:
            wanted = {name: (array.shape, array.dtype) for name, array in arrays.items()}
            for name, array in pool.allocate_many(wanted).items():
                array[...] = arrays[name]
            pool.commit()
            self.digests = digests_of(pool)
            self.state = pool.save_state()

    def fence(self, token: str) -> LayoutRef:
        """Fence the first device."""
        request = FenceRequest(
            token=token, devices=self.service.uuids[:1], wait_s=5.0, deadline_s=600.0
        )
        (layout,) = self.service.run(self.service.control.fence(request)).vector
        return layout

    def save_task(self, **changes: Any) -> SaveTask:
        """Return the task that saves the first device under the fence."""
        fields = {"fence_token": "f1", "shard_bytes": 16 * 1024 * 1024, **self._fields}
        return saving(self.service.folder, self.root, self.layout, **fields | changes)

    def load_task(self, **changes: Any) -> LoadTask:
        """Return the task that loads the part, which is saved, onto the second device."""
        other = changes.get("content_uid")
        path = self.root / PART.replace(UID, other) if other else self.path
        fields = {"device": self.service.uuids[1], **self._fields, **changes}
        return loading(self.service.folder, self.root, self.layout, path=path, **fields)

    def run(self, task: SaveTask | LoadTask) -> TransferDone:
        """Carry out a task in this process; return its result."""
        return carried_out(task)

    def events(self, task: SaveTask | LoadTask) -> list[TransferEvent]:
        """Carry out a task in a process of its own, as the service does."""
        return self.service.run(events_of(task))

    def apart(self, task: SaveTask | LoadTask) -> TransferDone:
        """Carry out a task in a process that ends with it, as the memory of a failed load does."""
        return apart(task)

    def doomed(self, task: SaveTask, last: int = 0) -> Doomed:
        """Save in a process that dies at its `last` call that changes the disk; 0: it lives."""
        counts = self.root.parent / "counts"
        code = "from tests.support import doomed_saver; doomed_saver.main()"
        ended = forks(*TRANSFERS).run(code, str(last), str(counts), stdin=encode_json(task) + b"\n")
        assert ended.returncode in ((0, -signal.SIGKILL) if last else (0,)), ended.stderr.decode()
        done = decode_json(ended.stdout, TransferDone) if ended.stdout else None
        return Doomed(*COUNTS.unpack(counts.read_bytes()), done)

    def load(self, **changes: Any) -> dict[str, str]:
        """Load the part, publish it and return what a worker finds at its addresses."""
        task = self.load_task(**changes)
        self.run(task)
        self.service.publish(task.load_token)
        with client.restore(self.state, device=1) as pool:
            return digests_of(pool)

    def seal_and_save_again(self, **changes: Any) -> SaveTask:
        """Save and seal; return the task of another capture, `OTHER`, of the same layout."""
        self.run(self.save_task(**changes))
        (self.path.parent / ROOT_MANIFEST).write_text("{}")
        self.layout = self.fence("f2")
        return self.save_task(content_uid=OTHER, fence_token="f2")

    def verified(self, place: GenerationRef = PLACE) -> PartManifest:
        """Have an agent read a part whole; return its manifest."""
        manifest, _ = asyncio.run(self.agent.read_part(place, "gpu-0"))
        asyncio.run(self.agent.check_bytes(place, manifest, ignored))
        return manifest

    def manifest(self) -> PartManifest:
        return read_part(self.path)[0]

    def forge(self, change: Callable[[PartManifest], PartManifest]) -> str:
        """Replace the manifest; return its new digest."""
        data = encode_pretty(change(self.manifest()))
        (self.path / PART_MANIFEST).write_bytes(data)
        return digest(data)


def digests_of(pool: client.MemoryPool) -> dict[str, str]:
    return {name: xxhash.xxh3_128_hexdigest(array) for name, array in pool.arrays().items()}


def flip(path: Path, offset: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
