"""Captured artifacts as lists, and how two of them differ."""

from __future__ import annotations

from typing import Any

import pytest

from snapshot_shared.artifact import (
    Facts,
    FileEntry,
    PartManifest,
    RootManifest,
    SavedLayout,
)
from snapshot_shared.ids import derived_uid
from snapshot_shared.objects.kubernetes import Node, NodeStatus
from snapshot_shared.orders import LayoutRef, PodRef
from snapshotctl.views import artifact_tables
from snapshotctl.views.artifact_tables import Manifests
from tests.support import stories
from tests.support.stories import NOW, row

UID = derived_uid("content", "snap")
CHUNK = 4096


def _file(*chunks: str, size: int | None = None, name: str = "shard", chunk: int = CHUNK) -> Any:
    digests = [digit * 32 for digit in chunks]
    total = size if size is not None else chunk * len(chunks)
    return FileEntry(name=name, size=total, chunk_bytes=chunk, chunks=digests)


def _part(*files: FileEntry, part: str = "gpu-0", structure: str = "s") -> PartManifest:
    layout = LayoutRef(
        device="d", incarnation="i", generation=1, layout_id="l", structure_hash=structure, bytes=1
    )
    return PartManifest(
        kind="gms",
        part=part,
        namespace="default",
        content_uid=UID,
        generation=1,
        order=f"save-{UID}-{part}",
        bytes=sum(file.size for file in files),
        files=list(files),
        layout=SavedLayout(source=layout, allocations=[]),
    )


def _manifests(*parts: PartManifest, **facts: Any) -> Manifests:
    source = PodRef(namespace="default", name="w", uid=UID)
    root = RootManifest(
        namespace="default",
        content_uid=UID,
        generation=1,
        source=source,
        bytes=1,
        parts=[],
        facts=Facts(**facts),
    )
    return Manifests(root, parts)


@pytest.mark.parametrize(
    ("left", "right", "differing"),
    [
        (_file("a", "b"), _file("a", "b"), 0),
        (_file("a", "b"), _file("a", "c"), CHUNK),
        (_file("a", "b", size=CHUNK + 10), _file("a", "c", size=CHUNK + 10), 10),
        (_file("a", "b", size=CHUNK + 10), _file("a", "c"), CHUNK),
        (_file("a"), _file("a", "b", "c"), 2 * CHUNK),
        (_file("a"), _file("a", name="other"), 2 * CHUNK),
        (_file("a"), _file("a", chunk=2 * CHUNK), None),
    ],
)
def test_the_bytes_that_differ_are_those_of_the_chunks_that_differ(
    left: FileEntry, right: FileEntry, differing: int | None
) -> None:
    [part] = artifact_tables.difference(_manifests(_part(left)), _manifests(_part(right))).parts
    assert part.differing == differing
    [back] = artifact_tables.difference(_manifests(_part(right)), _manifests(_part(left))).parts
    assert back.differing == differing


def test_facts_that_differ_have_both_values() -> None:
    left, right = _manifests(arch="x86_64", devices=2), _manifests(arch="aarch64", devices=2)
    assert artifact_tables.difference(left, right).facts == {"arch": ("x86_64", "aarch64")}


def test_the_same_bytes_are_no_difference_and_another_structure_is_one() -> None:
    one = _manifests(_part(_file("a")))
    assert artifact_tables.difference(one, one).is_none
    other = _manifests(_part(_file("a"), structure="t"))
    found = artifact_tables.difference(one, other)
    assert not found.is_none
    assert found.parts[0].structure == "differs: 0 and 0 allocations"


def test_a_part_that_only_one_has_differs_as_a_whole() -> None:
    left = _manifests(_part(_file("a")), _part(_file("b"), part="gpu-1"))
    right = _manifests(_part(_file("a")))
    found = artifact_tables.difference(left, right).parts[1]
    assert (found.part, found.differing, found.structure) == ("gpu-1", CHUNK, "only in the first")
    assert artifact_tables.difference(right, left).parts[1].structure == "only in the second"


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ({}, "not verified"),
        ({"conditions": [row("Verified", "True", "DigestsMatch")]}, "verified"),
        ({"verifications": 1}, "verifying"),
        ({"conditions": [row("Quarantined", "True", "ArtifactCorrupt")]}, "quarantined"),
    ],
)
def test_the_list_says_whether_an_artifact_was_verified(status: dict[str, Any], state: str) -> None:
    held = stories.content("held", committed=stories.committed(), **status)
    node = Node(metadata=stories.meta("node", "node-1"), status=NodeStatus(artifact_root="/data"))
    found = artifact_tables.artifacts([held, stories.content("pending")], [], [node])
    [(space, name, size, generation, where, identity, *_, shown, root)] = artifact_tables.table(
        found, NOW
    ).rows
    assert (space, name, size, generation) == ("default", "held", "10 B", "gen-1")
    assert (where, identity, shown, root) == ("node-1", "pod worker", state, "/data")
    assert found[0].folder == f"/data/default/{held.metadata.uid}/gen-1"
