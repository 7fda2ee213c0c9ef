"""One flipped bit anywhere in an artifact or a journal is found and named.

`make flips` tries 10,000; FLIPS and SEED choose how many and which.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

import pytest

from gms.adapters.backends import find_backend
from gms.domain import transfer
from gms.domain.tasks import DEFAULT_BACKEND
from gms.domain.transfer import plan_files
from snapshot_agent.adapters import copying
from snapshot_shared.artifact import PartManifest
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing
from snapshot_shared.journal import Journal, JournalCorrupt
from tests.scenario import crash_stories as stories
from tests.scenario.crash_rig import mounted, run
from tests.scenario.disk import SimDisk

FLIPS = int(os.environ.get("FLIPS", "800"))
SEED = int(os.environ.get("SEED", "1"))

pytestmark = pytest.mark.cpu(60 + FLIPS / 40)
CHUNK = 4096


class _Saved(NamedTuple):
    story: stories.Capture
    disk: SimDisk
    parts: dict[str, PartManifest]


@pytest.fixture
def saved(monkeypatch: pytest.MonkeyPatch) -> _Saved:
    """A sealed artifact on a simulated disk, in chunks of one page."""
    monkeypatch.setattr(copying, "CHUNK_BYTES", CHUNK)
    monkeypatch.setattr(transfer, "CHUNK_BYTES", CHUNK)
    story, disk = stories.Capture(), SimDisk()
    with mounted(disk):
        story.sealed()
        parts = {
            part: run(story.root.read_part(story.place, part))[0] for part in ("process", "gpu-0")
        }
    return _Saved(story, disk, parts)


def _flips(sizes: dict[str, int], count: int) -> Iterator[tuple[str, int]]:
    """Choose files, each as often as the others, and a bit in each."""
    rng = Random(SEED)
    names = sorted(name for name, size in sizes.items() if size)
    for _ in range(count):
        name = rng.choice(names)
        yield name, rng.randrange(8 * sizes[name])


def test_a_flipped_bit_of_an_artifact_is_refused_with_its_place(saved: _Saved) -> None:
    tree = saved.disk.tree()
    below = str(saved.story.where()).removeprefix("/sim")
    sizes = {path: len(data) for path, data in tree.items() if path.startswith(below)}
    hit: set[str] = set()
    for path, bit in _flips(sizes, FLIPS * 4 // 5):
        saved.disk.flip(f"/sim{path}", bit)
        hit.add(path.removeprefix(below + "/"))
        with mounted(saved.disk):
            _check_refused(saved, path, bit)
        saved.disk.flip(f"/sim{path}", bit)
    assert {"root.json", "process/part.json", "gpu-0/part.json"} < hit
    assert {"process/weights", "gpu-0/shard-0001.bin"} < hit
    with mounted(saved.disk):
        stories.verify(saved.story.root, saved.story.place, saved.story.promises["sealed"])


def _check_refused(saved: _Saved, path: str, bit: int) -> None:
    name = path.rpartition("/")[2]
    with pytest.raises((ArtifactCorrupt, ArtifactMissing)) as caught:
        stories.verify(saved.story.root, saved.story.place, saved.story.promises["sealed"])
    values = caught.value.values
    if name == "root.json":
        assert values["file"] == name
    elif name == "part.json":
        assert {"file", "path", "part", "field"} & set(values), caught.value.message
    else:
        assert (values["file"], values["chunk"]) == (name, bit // 8 // CHUNK)
        if name.startswith("shard"):
            assert _load_refusal(saved) == (name, bit // 8 // CHUNK)


def _load_refusal(saved: _Saved) -> tuple[str, int]:
    """Load the part as GMS does, and give the file and chunk at which it refuses."""
    manifest = saved.parts["gpu-0"]
    assert manifest.layout is not None
    plans = plan_files(
        manifest.layout.allocations,
        [entry.size for entry in manifest.files],
        chunk_bytes=[entry.chunk_bytes for entry in manifest.files],
    )
    memory = [memoryview(bytearray(len(view))) for view in stories.MEMORY]

    async def load() -> None:
        async with saved.story.root.open_part(saved.story.place, "gpu-0") as folder:
            find_backend(DEFAULT_BACKEND).read_files(
                folder, plans, manifest.files, memory, threads=1, advance=abs
            )

    with pytest.raises(ArtifactCorrupt) as caught:
        run(load())
    return caught.value.values["file"], caught.value.values["chunk"]


def test_a_flipped_bit_of_a_journal_is_refused_with_its_line() -> None:
    story, disk = stories.Journaling(), SimDisk()
    records = [stories.accepted(number) for number in range(1, 8)]
    with mounted(disk):
        story.open()
        assert story.journal is not None
        for record in records:
            run(story.journal.append(record))
        story.journal.close()
    path = "/sim/nodes/state/agent/journal"
    text = disk.tree()[path.removeprefix("/sim")]
    last = bytes(text).rindex(b"\n", 0, len(text) - 1) + 1  # type: ignore[arg-type]
    refused = 0
    for name, bit in _flips({path: len(text)}, FLIPS // 5):
        damaged = disk.clone()
        damaged.flip(name, bit)
        with mounted(damaged):
            try:
                found = Journal.open(story.folder, wall=lambda: stories.NOW)
            except JournalCorrupt as error:
                refused += error.values["line"] >= 1
            else:
                # Only the end of the file may look as a crash leaves it.
                assert bit // 8 >= last
                assert len(found.ledger.entries) == len(records) - 1
    assert refused > 0.95 * (FLIPS // 5)
