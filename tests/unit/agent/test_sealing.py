"""Which parts make an artifact, and what the root manifest over them says."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_agent.domain.sealing import check_part, check_plan, check_proven, root_manifest
from snapshot_shared.artifact import Facts, PartManifest, SavedLayout
from snapshot_shared.codec import encode_pretty
from snapshot_shared.errors import ArtifactCorrupt, ArtifactMissing
from snapshot_shared.orders import LayoutRef, PartResult, PodRef, SealOrder, VectorEntry
from tests.unit.tables import each

UID = "00000000-0000-4000-8000-000000000001"
OTHER = "00000000-0000-4000-8000-000000000002"
D1 = "sha256:" + "1" * 64
D2 = "sha256:" + "2" * 64
LAYOUT = LayoutRef(
    device="GPU-a", incarnation="i", generation=1, layout_id="l", structure_hash="h", bytes=8
)
VECTOR = [VectorEntry(part="process"), VectorEntry(part="gpu-0", ordinal=0, layout=LAYOUT)]
PROCESS = PartManifest(
    kind="process",
    part="process",
    namespace="default",
    content_uid=UID,
    generation=2,
    order=f"dump-{UID}",
    bytes=0,
    files=[],
    vector=VECTOR,
    facts=Facts(driver="cooperative"),
)
GPU = replace(
    PROCESS,
    kind="gms",
    part="gpu-0",
    order=f"save-{UID}-gpu-0",
    vector=[],
    facts=None,
    layout=SavedLayout(source=LAYOUT, allocations=[]),
)
ORDER = SealOrder(
    order=f"seal-{UID}",
    attempt=2,
    node="node-1",
    owner=UID,
    deadline_s=60.0,
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


@each(
    ("change", "what"),
    [
        ({"content_uid": OTHER}, "content"),
        ({"namespace": "other"}, "namespace"),
        ({"generation": 1}, "generation"),
        ({"part": "gpu-0"}, "part"),
        ({"kind": "gms"}, "kind"),
        ({"bytes": 5}, "bytes"),
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
    check_part(ORDER, ORDER.parts[1], GPU, D2)
    later = SavedLayout(source=replace(LAYOUT, generation=9), allocations=[])
    with pytest.raises(ArtifactCorrupt, match="another layout"):
        check_part(ORDER, ORDER.parts[1], replace(GPU, layout=later), D2)
    with pytest.raises(ArtifactCorrupt, match="another layout"):
        check_part(ORDER, ORDER.parts[1], replace(GPU, layout=None), D2)


def test_a_device_part_that_carries_a_vector_carries_the_one_that_was_planned() -> None:
    check_part(ORDER, ORDER.parts[1], replace(GPU, vector=VECTOR[::-1]), D2)
    with pytest.raises(ArtifactCorrupt, match="another vector"):
        check_part(ORDER, ORDER.parts[1], replace(GPU, vector=VECTOR[:1]), D2)


def test_the_root_manifest_does_not_depend_on_the_order_of_the_parts() -> None:
    parts = [(PROCESS, D1), (replace(GPU, bytes=8), D2)]
    root = root_manifest(ORDER, parts)
    assert encode_pretty(root) == encode_pretty(root_manifest(ORDER, parts[::-1]))
    assert [(row.part, row.digest, row.bytes) for row in root.parts] == [
        ("gpu-0", D2, 8),
        ("process", D1, 0),
    ]
    assert root.bytes == 8
    assert root.facts == PROCESS.facts
    assert root.parts[0].layout == LAYOUT


@each(
    "change",
    [
        lambda manifest: (replace(manifest, content_uid=OTHER), D1),
        lambda manifest: (replace(manifest, namespace="other"), D1),
        lambda manifest: (replace(manifest, generation=1), D1),
        lambda manifest: (replace(manifest, part="gpu-0"), D1),
        lambda manifest: (replace(manifest, kind="gms"), D1),
        lambda manifest: (replace(manifest, bytes=5), D1),
        lambda manifest: (manifest, D2),
    ],
)
def test_a_part_on_disk_must_be_the_one_that_the_root_proves(
    change: Callable[[PartManifest], tuple[PartManifest, str]],
) -> None:
    root = root_manifest(ORDER, [(PROCESS, D1)])
    check_proven(root, root.parts[0], PROCESS, D1)
    with pytest.raises(ArtifactCorrupt):
        check_proven(root, root.parts[0], *change(PROCESS))
