"""Frames of the GMS sockets: the bytes of every released frame stay what they are.

A new field has a default, so a recorded frame still decodes to what it meant. Recorded files are
never changed; `python tests/golden/test_frames.py` writes those that are missing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from snapback_client import frames
from snapback_client.frames import (
    Access,
    AllocationInfo,
    AllocationSpec,
    GenerationRef,
    LockMode,
    MemoryDomain,
    MetadataItem,
    Reply,
    Request,
)
from snapshot_shared import frames as calls
from snapshot_shared.codec import MAX_FRAME_BYTES, decode_msgpack, encode_msgpack
from snapshot_shared.errors import (
    Failure,
    InvalidMessage,
    RemoteFailure,
    StaleLayout,
    UnsupportedVersion,
)
from snapshot_shared.orders import LayoutRef
from tests.unit.tables import each

FOLDER = Path(__file__).parent / "data" / "frames"
MANY = 3000
DEVICE = "GPU-2f26acd4-f975-56ae-85be-f9f11cb1cb1c"
INCARNATION = "7c9e6679-7425-40de-944b-e07fc1f90ae7"
BEFORE = GenerationRef(incarnation=INCARNATION, generation=3)
WEIGHTS: dict[str, Any] = {"device": DEVICE, "domain": MemoryDomain.WEIGHTS}
OF_SERVICE: dict[str, Any] = {"node": "node-1", "incarnation": INCARNATION}


def _id(number: int) -> str:
    return f"model.layers.{number // 12}.block.{number % 12}.weight"


def _info(number: int) -> AllocationInfo:
    size = 4096 * (number + 1)
    return AllocationInfo(
        id=_id(number), size=size, aligned=-(-size // 2**21) * 2**21, tag="array", slot=number
    )


COMMITTED: dict[str, Any] = {
    "layout_id": "layout-1",
    "structure_hash": "ab" * 32,
    "bytes": 123_456_789,
}
LAYOUT = LayoutRef(device=DEVICE, incarnation=INCARNATION, generation=4, **COMMITTED)
ENTRY = MetadataItem(key="embedding", allocation=_id(0), offset=8, value=b"\x00\xff")

REQUESTS: dict[str, Request] = {
    "attach": frames.Attach(
        **WEIGHTS,
        lock=LockMode.RW,
        deadline_s=60.0,
        if_match=BEFORE,
        replace=True,
        load_token="load-1",
        client="worker",
        traceparent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    ),
    "attach_save": frames.Attach(
        **WEIGHTS, lock=LockMode.RO, deadline_s=5.0, fence_token="fence-1"
    ),
    "attach_kv": frames.Attach(
        device=DEVICE, domain=MemoryDomain.KV, lock=LockMode.RW_OR_RO, deadline_s=0.5
    ),
    "attach_again": frames.Attach(
        **WEIGHTS, lock=LockMode.RO, deadline_s=60.0, client="worker", incarnation=INCARNATION
    ),
    "allocate_many": frames.AllocateMany(
        allocations=[
            AllocationSpec(id=_id(n), size=4096 * (n + 1), tag="array") for n in range(MANY)
        ],
        wait_s=2.5,
    ),
    "export_many": frames.ExportMany(ids=[_id(n) for n in range(MANY)], access=Access.RO),
    "free_many": frames.FreeMany(ids=[_id(0), _id(1)]),
    "metadata_put": frames.MetadataPut(entries=[ENTRY]),
    "metadata_get": frames.MetadataGet(keys=["embedding"]),
    "metadata_get_prefix": frames.MetadataGet(prefix="layer.1."),
    "metadata_get_all": frames.MetadataGet(),
    "list_allocations": frames.ListAllocations(),
    "commit": frames.Commit(if_match=BEFORE, layout_id="layout-1"),
    "commit_hidden": frames.Commit(hidden=True, layout_id="layout-1"),
    "detach": frames.Detach(),
}

ATTACHED: dict[str, Any] = {
    "session": 17,
    "granted": Access.RO,
    "device": DEVICE,
    "index": 1,
    "product": "Snapback Simulated GPU",
    "capacity": 2**36,
    "free": 2**35,
    "granularity": 2**21,
    "incarnation": INCARNATION,
    "generation": 4,
    **COMMITTED,
}

REPLIES: dict[str, Reply] = {
    "attached_kind": frames.Attached(**ATTACHED, device_kind="cuda"),
    "allocated": frames.Allocated(allocations=[_info(n) for n in range(MANY)], part=1, parts=2),
    "exported": frames.Exported(allocations=[_info(n) for n in range(128)], part=24, parts=24),
    "allocations": frames.Allocations(allocations=[_info(0)]),
    "metadata": frames.Metadata(entries=[ENTRY]),
    "done": frames.Done(),
    "committed": frames.Committed(incarnation=INCARNATION, generation=5, **COMMITTED),
    "error": frames.ErrorReply(
        reason="StaleLayout",
        message="another layout is committed",
        values={"expected": "a", "found": "b", "bytes": 3},
        next_step="connect again",
    ),
}

EVENT = calls.EventRecord(
    seq=8,
    at_s=11.25,
    kind=calls.EventKind.COMMIT,
    device=DEVICE,
    session=3,
    client="worker",
    pid=4,
    generation=2,
    bytes=1000,
)

BODIES: dict[str, msgspec.Struct] = {
    "grpc_fence_request": calls.FenceRequest(
        token="fence-1", devices=[DEVICE], wait_s=10.0, deadline_s=600.0
    ),
    "grpc_fence_reply": calls.FenceReply(vector=[LAYOUT]),
    "grpc_unfence_request": calls.UnfenceRequest(token="fence-1"),
    "grpc_unfence_reply": calls.UnfenceReply(ended=True),
    "grpc_drop_layout_request": calls.DropLayoutRequest(device=DEVICE, layout_id="layout-1"),
    "grpc_drop_layout_reply": calls.DropLayoutReply(dropped=False),
    "grpc_status_request": calls.StatusRequest(),
    "grpc_status_reply": calls.StatusReply(
        **OF_SERVICE,
        devices=[
            calls.DeviceStatus(
                uuid=DEVICE,
                index=0,
                product="Snapback Simulated GPU",
                endpoint="node-1-gpu0",
                capacity=100,
                used=60,
                free=40,
                retired=10,
                domains=[
                    calls.DomainStatus(
                        domain=MemoryDomain.WEIGHTS,
                        lock="reading",
                        sessions=[
                            calls.SessionStatus(
                                session=1, access=Access.RO, client="w", pid=2, state="active"
                            )
                        ],
                        waiting=[calls.WaitingStatus(lock=LockMode.RW, client="x", pid=3)],
                        layout=LAYOUT,
                    )
                ],
                fence=calls.FenceStatus(phase="leased", ends_in_s=1.5),
                loads=[
                    calls.LoadStatus(
                        load_token="t", layout_id="layout-1", structure_hash="cd", bytes=5
                    )
                ],
            )
        ],
    ),
    "grpc_status_request_events": calls.StatusRequest(events=20),
    "grpc_status_reply_events": calls.StatusReply(
        **OF_SERVICE, devices=[], events=[EVENT], now_s=12.5
    ),
    "grpc_status_reply_missing": calls.StatusReply(
        **OF_SERVICE,
        devices=[],
        missing=[
            calls.MissingDevice(
                uuid=DEVICE,
                index=1,
                failure=Failure(reason="DeviceProcessGone", message="gone", retryable=True),
            )
        ],
    ),
    "grpc_watch_request": calls.WatchRequest(after=7, status=True),
    "grpc_watch_reply": calls.WatchReply(events=[EVENT], missed=3),
    "grpc_save_request": calls.SaveRequest(device=DEVICE, content_uid=INCARNATION),
    "grpc_load_request": calls.LoadRequest(
        device=DEVICE,
        content_uid=INCARNATION,
        part="gpu-0",
        part_digest="sha256:" + "ef" * 32,
        layout_id="layout-1",
        structure_hash="ab" * 32,
        load_token="load-1",
        publish=True,
        if_match=BEFORE,
    ),
    "grpc_transfer_update_progress": calls.TransferUpdate(
        stage=calls.TransferStage.PROGRESS, done=5, total=9
    ),
    "grpc_transfer_update_done": calls.TransferUpdate(
        stage=calls.TransferStage.DONE,
        done=9,
        total=9,
        digest="sha256:" + "ef" * 32,
        path="/artifacts/default/uid/gen-1/gpu-0",
        layout=LAYOUT,
    ),
    "grpc_publish_request": calls.PublishRequest(device=DEVICE, load_token="load-1"),
    "grpc_publish_reply": calls.PublishReply(layout=LAYOUT),
    "grpc_forget_request": calls.ForgetRequest(device=DEVICE, load_token="load-1"),
    "grpc_forget_reply": calls.ForgetReply(),
}

FORMER: dict[str, Reply] = {"attached": frames.Attached(**ATTACHED)}
"""What an earlier release wrote, as it is understood now."""

SAMPLES: dict[str, Request | Reply | msgspec.Struct] = {**REQUESTS, **REPLIES, **BODIES}


def _recorded(name: str) -> bytes:
    return (FOLDER / f"{name}.msgpack").read_bytes()


@each(("name", "sample"), SAMPLES.items())
def test_a_frame_has_the_bytes_that_were_recorded(name: str, sample: msgspec.Struct) -> None:
    assert encode_msgpack(sample) == _recorded(name)


@each(("name", "sample"), {**SAMPLES, **FORMER}.items())
def test_a_recorded_frame_means_what_it_meant(name: str, sample: msgspec.Struct) -> None:
    data = _recorded(name)
    if name in BODIES:
        assert decode_msgpack(data, type(sample)) == sample
    else:
        assert (frames.decode_request if name in REQUESTS else frames.decode_reply)(data) == sample


def test_every_frame_has_a_sample_and_every_file_belongs_to_one() -> None:
    sampled = {type(sample) for sample in (*REQUESTS.values(), *REPLIES.values())}
    assert sampled == set(Request.__args__) | set(Reply.__args__)
    assert {file.stem for file in FOLDER.iterdir()} == set(SAMPLES) | set(FORMER)


def test_three_thousand_entries_are_one_frame() -> None:
    sizes = {name: len(_recorded(name)) for name in ("allocate_many", "export_many", "allocated")}
    assert {name: size for name, size in sizes.items() if size >= MAX_FRAME_BYTES} == {}


def _raw(name: str) -> dict[str, Any]:
    found: dict[str, Any] = msgspec.msgpack.decode(_recorded(name))
    return found


@each("name", [*REQUESTS, *REPLIES])
def test_every_frame_carries_its_type_and_the_version(name: str) -> None:
    assert (_raw(name)["v"], type(_raw(name)["type"])) == (1, str)


@each(("name", "request_"), REQUESTS.items())
def test_an_unknown_field_is_ignored(name: str, request_: Request) -> None:
    later = _raw(name) | {"invented_later": [1, {"a": None}]}
    assert frames.decode_request(msgspec.msgpack.encode(later)) == request_


@each("name", REQUESTS)
def test_another_version_is_refused_by_name(name: str) -> None:
    with pytest.raises(UnsupportedVersion) as caught:
        frames.decode_request(msgspec.msgpack.encode(_raw(name) | {"v": 3}))
    assert caught.value.values == {"offered": [3, 3], "supported": [1, 2]}


@each(("name", "request_"), REQUESTS.items())
def test_a_frame_of_the_second_version_is_that_of_the_first_but_for_its_number(
    name: str, request_: Request
) -> None:
    second = frames.encode_frame(request_, 2)
    assert msgspec.msgpack.decode(second) == _raw(name) | {"v": 2}
    assert frames.decode_request(second) == msgspec.structs.replace(request_, v=2)


def frame(kind: str, **fields: Any) -> bytes:
    return msgspec.msgpack.encode({"type": kind, "v": 1, **fields})


@each(
    ("offered", "spoken", "found"),
    [
        ((1, 1), (1, 2), 1),
        ((1, 2), (1, 1), 1),
        ((1, 2), (1, 2), 2),
        ((2, 9), (1, 3), 3),
        ((1, 1), (2, 3), None),
        ((4, 5), (1, 3), None),
    ],
)
def test_the_highest_version_that_both_sides_speak_is_used(
    offered: frames.Versions, spoken: frames.Versions, found: int | None
) -> None:
    if found is not None:
        assert frames.negotiated(offered, spoken, "the protocol") == found
        return
    with pytest.raises(UnsupportedVersion) as caught:
        frames.negotiated(offered, spoken, "the protocol")
    assert caught.value.values == {"offered": list(offered), "supported": list(spoken)}


def test_a_first_frame_that_does_not_decode_is_refused_for_the_versions_that_it_offers() -> None:
    with pytest.raises(UnsupportedVersion, match="8 to 9, and here 1 to 2") as caught:
        frames.decode_request(frame("attach_v9", v=8, versions=[8, 9]))
    assert caught.value.values == {"offered": [8, 9], "supported": [1, 2]}


def test_a_frame_of_a_later_version_that_does_not_decode_is_refused_for_its_version() -> None:
    with pytest.raises(UnsupportedVersion):
        frames.decode_request(frame("attach_v9", v=9))


@each(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\x01\x02",
        frame("attach"),
        frame("attached"),
        frame("allocate_many", allocations=[]),
        frame("allocate_many", allocations=[["a", 0, ""]]),
        frame("allocate_many", allocations=[["", 1, ""]]),
        frame("allocate_many", allocations=[["a\n", 1, ""]]),
        frame("export_many", ids=["a"], access="WO"),
        frame("export_many", ids=["a"] * 8193, access="RO"),
        b"\x81" * 5000,
        bytes(MAX_FRAME_BYTES + 1),
    ],
)
def test_what_is_no_request_is_refused(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        frames.decode_request(data)


def test_batches_keep_the_order_and_both_limits() -> None:
    entries = list(range(10))
    assert list(frames.batches(entries, cost=lambda _: 1, most=4)) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
        [8, 9],
    ]
    half = frames.MESSAGE_BUDGET // 2
    assert list(frames.batches([1, 2, 3], cost=lambda _: half)) == [[1, 2], [3]]
    assert list(frames.batches([1], cost=lambda _: 10 * half)) == [[1]]
    assert list(frames.batches([], cost=len)) == [[]]


@pytest.mark.parametrize(
    "entry", [_info(2999), AllocationSpec(id="a" * 128, size=2**50, tag="t" * 64)]
)
def test_the_cost_of_an_allocation_is_never_less_than_its_bytes(
    entry: AllocationInfo | AllocationSpec,
) -> None:
    assert frames.cost_of_allocation(entry) >= len(encode_msgpack(entry))


def test_the_cost_of_metadata_is_never_less_than_its_bytes() -> None:
    entry = MetadataItem(key="k" * 256, allocation="a" * 128, offset=2**50, value=bytes(65536))
    assert frames.cost_of_metadata(entry) >= len(encode_msgpack(entry))


def test_an_error_crosses_the_wire_and_is_caught_by_its_own_class() -> None:
    failure = Failure(
        reason=StaleLayout.reason, message="no", values={"message": "odd"}, next_step="go"
    )
    reply = frames.decode_reply(frames.encode_frame(frames.ErrorReply.of(failure)))
    assert isinstance(reply, frames.ErrorReply)
    error = frames.error_of(reply.to_failure())
    assert isinstance(error, StaleLayout)
    assert error.to_failure() == failure


def test_an_error_that_nobody_here_knows_keeps_its_reason() -> None:
    error = frames.error_of(Failure(reason="InventedLater", message="m", retryable=True))
    assert isinstance(error, RemoteFailure)
    assert error.to_failure().reason == "InventedLater"


if __name__ == "__main__":
    for name, sample in SAMPLES.items():
        file = FOLDER / f"{name}.msgpack"
        if not file.exists():
            file.write_bytes(encode_msgpack(sample))
