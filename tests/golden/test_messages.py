"""Every message ever released stays decodable, and means what it meant.

The files are never changed, only added to. A new field has a default, so old files decode; a
changed meaning needs a new `type`.
"""

from __future__ import annotations

import typing
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from snapshot_shared import orders
from snapshot_shared.artifact import (
    AllocationEntry,
    Extent,
    Facts,
    FileEntry,
    MetadataEntry,
    PartManifest,
    RootManifest,
    RootPart,
    SavedLayout,
    check_part_manifest,
)
from snapshot_shared.codec import MAX_MANIFEST_BYTES, decode_json, encode_json
from snapshot_shared.errors import Failure, InvalidMessage
from snapshot_shared.spans import SpanRecord
from tests.unit.tables import each

DATA = Path(__file__).parent / "data" / "messages"
UID = "00000000-0000-4000-8000-000000000001"
DIGEST = "sha256:" + "ab" * 32
LAYOUT = orders.LayoutRef(
    device="GPU-1", incarnation="i", generation=3, layout_id="l", structure_hash="h", bytes=4096
)
VECTOR = [
    orders.VectorEntry(part="process"),
    orders.VectorEntry(part="gpu-0", ordinal=0, layout=LAYOUT),
]
CONTENT: dict[str, Any] = {"namespace": "default", "content_uid": UID}
POD = orders.PodRef(namespace="default", name="llm-0", uid=UID)
ARTIFACT = orders.ArtifactRef(**CONTENT, generation=1, root_digest=DIGEST)
DEVICE = orders.DeviceRef(ordinal=0, uuid="GPU-1")
PART = orders.PartResult(part="gpu-0", bytes=4096, digest=DIGEST)
FAILURE = Failure(
    reason="NoSpace", message="no", retryable=True, values={"needed": 2}, next_step="free some"
)


def common(verb: str, part: str = "") -> dict[str, Any]:
    return {
        "order": f"{verb}-{UID}{part}",
        "attempt": 2,
        "node": "node-1.example",
        "owner": UID,
        "deadline_s": 30.0,
        "not_after": 1_800_000_000.0,
        "traceparent": "00-" + "a" * 32 + "-" + "b" * 16 + "-01",
    }


SAMPLES: list[Any] = [
    orders.RunOrder(
        pod=POD, template_digest=DIGEST, devices=[DEVICE], standby=True, **common("run")
    ),
    orders.StopOrder(pod=POD, grace_s=3.0, **common("stop")),
    orders.PrepareOrder(
        pod=POD, content_uid=UID, devices=[DEVICE], fence_token="t", **common("prepare")
    ),
    orders.DumpOrder(pod=POD, content_uid=UID, vector=VECTOR, **common("dump")),
    orders.SaveOrder(
        **CONTENT, part="gpu-0", layout=LAYOUT, fence_token="t", **common("save", "-gpu-0")
    ),
    orders.SealOrder(**CONTENT, pod=POD, vector=VECTOR, parts=[PART], **common("seal")),
    orders.ReleaseOrder(pod=POD, content_uid=UID, policy="Terminate", **common("release")),
    orders.LoadOrder(
        artifact=ARTIFACT,
        part="gpu-0",
        part_digest=DIGEST,
        device="GPU-2",
        layout_id="l",
        structure_hash="h",
        load_token="t",
        bytes=4096,
        **common("load", "-gpu-0"),
    ),
    orders.CommitOrder(device="GPU-2", load_token="t", layout_id="l", **common("commit", "-gpu-0")),
    orders.DropOrder(device="GPU-2", load_token="t", **common("drop", "-gpu-0")),
    orders.PlaceOrder(artifact=ARTIFACT, pod=POD, devices=[DEVICE], **common("place")),
    orders.RestoreOrder(artifact=ARTIFACT, pod=POD, devices=[DEVICE], **common("restore")),
    orders.AbortOrder(
        pod=POD, content_uid=UID, fence_token="t", devices=["GPU-1"], why="w", **common("abort")
    ),
    orders.DeleteOrder(**CONTENT, generation=1, **common("delete", "-gen-1")),
    orders.VerifyOrder(artifact=ARTIFACT, **common("verify")),
    orders.Report(
        order=f"prepare-{UID}",
        attempt=1,
        n=2,
        kind="failed",
        node="node-1",
        service="agent",
        at=1.5,
        failure=FAILURE,
        vector=VECTOR,
        part=PART,
        root_digest=DIGEST,
        bytes=9,
        generation=3,
        exit_code=1,
        unconfirmed=True,
        message="m",
        steps=[orders.StepTime(step="gate", seconds=0.5)],
    ),
    orders.Progress(
        order=f"dump-{UID}",
        attempt=1,
        node="node-1",
        part="process",
        step="copy-state",
        done=1,
        total=2,
        at=1.5,
    ),
    orders.DeadLetter(
        subject="snap.order.x",
        node="node-1",
        service="gms",
        sequence=7,
        at=1.5,
        failure=FAILURE,
        payload=b"\x00noise",
    ),
    orders.Presence(
        node="node-1",
        boot_id="b",
        version="0.1.0",
        devices=[orders.PresenceDevice(index=0, uuid="GPU-1", product="sim", capacity_bytes=2**30)],
        drivers=["cooperative"],
        criu="4.1.1",
        artifact_root="/artifacts",
        free_bytes=5,
        slots=2,
        at=1.5,
    ),
    SpanRecord(
        trace_id="a" * 32,
        span_id="b" * 16,
        parent_id="c" * 16,
        name="dump",
        service="snap-agent",
        node="node-1",
        start_ns=1,
        end_ns=2,
        error="e",
        attributes={"snapback.attempt": 1},
        links=["00-" + "a" * 32 + "-" + "b" * 16 + "-01"],
    ),
    PartManifest(
        kind="gms",
        part="gpu-0",
        **CONTENT,
        generation=1,
        order=f"save-{UID}-gpu-0",
        bytes=8192,
        files=[FileEntry(name="shard-0", size=8192, chunk_bytes=8192, chunks=["0" * 32])],
        vector=VECTOR,
        layout=SavedLayout(
            source=LAYOUT,
            allocations=[
                AllocationEntry(
                    id="w",
                    slot=0,
                    size=8192,
                    tag="t",
                    extents=[Extent(file=0, file_offset=0, offset=0, size=8192)],
                )
            ],
            metadata=[MetadataEntry(key="k", allocation="w", offset=0, value=b"v")],
        ),
        facts=Facts(driver="cooperative", arch="x86_64", devices=1, command=["worker"]),
    ),
    RootManifest(
        **CONTENT,
        generation=1,
        source=POD,
        bytes=8192,
        parts=[RootPart(part="gpu-0", kind="gms", bytes=8192, digest=DIGEST, layout=LAYOUT)],
        facts=Facts(devices=1),
    ),
]


@each("sample", SAMPLES)
def test_the_released_form_still_means_the_same(sample: Any) -> None:
    data = (DATA / f"{sample.__struct_config__.tag}.json").read_bytes()
    assert decode_json(data, type(sample), limit=MAX_MANIFEST_BYTES) == sample


@each("sample", SAMPLES)
def test_a_field_that_a_newer_version_added_is_ignored_or_refused_by_name(sample: Any) -> None:
    later = encode_json({**msgspec.to_builtins(sample), "added_later": 1})
    if sample.__struct_config__.forbid_unknown_fields:
        with pytest.raises(InvalidMessage, match="added_later"):
            decode_json(later, type(sample))
    else:
        assert decode_json(later, type(sample)) == sample


def test_every_order_has_a_released_form() -> None:
    covered = {type(sample) for sample in SAMPLES}
    assert set(typing.get_args(orders.AnyOrder)) <= covered


def test_an_order_is_found_by_its_type_alone() -> None:
    given = [sample for sample in SAMPLES if isinstance(sample, typing.get_args(orders.AnyOrder))]
    found = [decode_json(encode_json(order), cast("Any", orders.AnyOrder)) for order in given]
    assert found == given


def test_the_sample_part_manifest_is_consistent() -> None:
    manifest = next(sample for sample in SAMPLES if isinstance(sample, PartManifest))
    assert check_part_manifest(manifest) is manifest
