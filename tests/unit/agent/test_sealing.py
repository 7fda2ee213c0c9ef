"""Which parts make an artifact, what the root manifest over them says, and where they fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from snapshot_agent.adapters.artifacts import Room
from snapshot_agent.domain.sealing import check_part, check_plan, check_proven, root_manifest
from snapshot_shared.artifact import Facts, SavedLayout
from snapshot_shared.codec import encode_pretty
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing
from snapshot_shared.orders import PartResult, PodRef, SealOrder, VectorEntry
from tests.support import builders
from tests.support.builders import UID
from tests.unit.tables import each

OTHER = "00000000-0000-4000-8000-000000000002"
D1 = "sha256:" + "1" * 64
D2 = "sha256:" + "2" * 64
LAYOUT = builders.layout(device="GPU-a", bytes=8)
VECTOR = [VectorEntry(part="process"), VectorEntry(part="gpu-0", ordinal=0, layout=LAYOUT)]
PROCESS = builders.part_manifest(generation=2, vector=VECTOR, facts=Facts(driver="cooperative"))
GPU = builders.part_manifest(
    part="gpu-0", generation=2, layout=SavedLayout(source=LAYOUT, allocations=[])
)
ORDER = builders.work_order(
    SealOrder,
    attempt=2,
    namespace="default",
    content_uid=UID,
    pod=PodRef(namespace="default", name="llm", uid=UID),
    vector=VECTOR,
    parts=[
        PartResult(part="process", bytes=0, digest=D1),
        PartResult(part="gpu-0", bytes=0, digest=D2),
    ],
)


def test_the_plan_the_staged_parts_and_the_disk_must_be_the_same() -> None:
    check_plan(ORDER, ["gpu-0", "process"])
    with pytest.raises(ArtifactMissing, match="gpu-0"):
        check_plan(ORDER, ["process"])
    with pytest.raises(ArtifactCorrupt, match="gpu-1"):
        check_plan(ORDER, ["gpu-0", "gpu-1", "process"])
    with pytest.raises(ArtifactCorrupt, match="were staged"):
        check_plan(replace(ORDER, parts=ORDER.parts[:1]), ["gpu-0", "process"])


OF_ANOTHER: list[tuple[dict[str, Any], str]] = [
    ({"content_uid": OTHER}, "content"),
    ({"namespace": "other"}, "namespace"),
    ({"generation": 1}, "generation"),
    ({"part": "gpu-0"}, "part"),
    ({"kind": "gms"}, "kind"),
    ({"bytes": 5}, "bytes"),
]


@each(
    ("change", "what"),
    [
        *OF_ANOTHER,
        ({"vector": VECTOR[:1]}, "another vector"),
        ({"vector": []}, "another vector"),
        ({"layout": GPU.layout}, "another layout"),
    ],
)
def test_a_process_part_of_another_capture_is_refused(change: dict[str, Any], what: str) -> None:
    check_part(ORDER, ORDER.parts[0], PROCESS, D1)
    with pytest.raises(ArtifactCorrupt, match=what):
        check_part(ORDER, ORDER.parts[0], replace(PROCESS, **change), D1)


def test_a_part_whose_manifest_is_not_the_one_reported_is_refused_with_both_digests() -> None:
    with pytest.raises(ArtifactCorrupt) as caught:
        check_part(ORDER, ORDER.parts[0], PROCESS, D2)
    assert (caught.value.values["expected"], caught.value.values["found"]) == (D1, D2)


def test_a_device_part_holds_the_layout_that_was_fenced() -> None:
    later = SavedLayout(source=replace(LAYOUT, generation=9), allocations=[])
    check_part(ORDER, ORDER.parts[1], GPU, D2)
    for layout in (later, None):
        with pytest.raises(ArtifactCorrupt, match="another layout"):
            check_part(ORDER, ORDER.parts[1], replace(GPU, layout=layout), D2)


def test_a_device_part_that_carries_a_vector_carries_the_one_that_was_planned() -> None:
    check_part(ORDER, ORDER.parts[1], replace(GPU, vector=VECTOR[::-1]), D2)
    with pytest.raises(ArtifactCorrupt, match="another vector"):
        check_part(ORDER, ORDER.parts[1], replace(GPU, vector=VECTOR[:1]), D2)


def test_the_root_manifest_does_not_depend_on_the_order_of_the_parts() -> None:
    parts = [(PROCESS, D1), (replace(GPU, bytes=8), D2)]
    root = root_manifest(ORDER, parts)
    assert encode_pretty(root) == encode_pretty(root_manifest(ORDER, parts[::-1]))
    assert root.parts == [
        builders.root_part("gpu-0", digest=D2, bytes=8, layout=LAYOUT),
        builders.root_part("process", digest=D1, bytes=0),
    ]
    assert (root.bytes, root.facts) == (8, PROCESS.facts)


@each(("change", "digest"), [*((change, D1) for change, _ in OF_ANOTHER), ({}, D2)])
def test_a_part_on_disk_must_be_the_one_that_the_root_proves(
    change: dict[str, Any], digest: str
) -> None:
    root = root_manifest(ORDER, [(PROCESS, D1)])
    check_proven(root, root.parts[0], PROCESS, D1)
    with pytest.raises(ArtifactCorrupt):
        check_proven(root, root.parts[0], replace(PROCESS, **change), digest)


ROOT = Path("/artifacts")


@each(
    ("shares", "of", "share", "fits"),
    [(1, 1, 100, 90), (1, 3, 34, 270), (2, 3, 67, 135), (3, 3, 100, 90), (1, 0, 0, 90)],
)
def test_a_file_system_takes_its_shares_of_the_weights(
    shares: int, of: int, share: int, fits: int
) -> None:
    room = Room(ROOT, free=90, shares=shares, of=of)
    assert room.share_of(100) == share
    assert room.for_weights == fits


@given(st.integers(0, 2**50), st.integers(1, 9), st.integers(0, 9))
def test_what_is_said_to_fit_fits_and_a_share_more_does_not(
    free: int, shares: int, others: int
) -> None:
    room = Room(ROOT, free=free, shares=shares, of=shares + others)
    assert room.share_of(room.for_weights) <= free
    assert room.share_of(room.for_weights + room.of) > free
