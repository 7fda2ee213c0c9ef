"""What claims of simulated devices are given, what is kept of them, and what schedulers read."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gms.domain import claims, slices
from gms.domain.plugin_devices import container_allocation
from snapshot_shared.errors import InvalidMessage, NotEligible, NotFound, UnknownDevice
from tests.unit.tables import each

GIB = 2**30
UID = "0c0c5a0b-6c5f-4a51-9d3a-7b8f3a6f2d11"
OTHER = "1c0c5a0b-6c5f-4a51-9d3a-7b8f3a6f2d11"
REF = claims.ClaimRef(namespace="default", name="worker-gpu-x7k2p", uid=UID)
DEVICES = [
    claims.ClaimableDevice(index=index, uuid=f"GPU-{index}", product="Sim", capacity=4 * GIB)
    for index in range(3)
]


def result(device: str, request: str = "gpu", **fields: Any) -> dict[str, Any]:
    return {"request": request, "driver": claims.DRIVER, "pool": "n1", "device": device, **fields}


def claim(*results: dict[str, Any], uid: str = UID) -> claims.ResourceClaim:
    found = {"metadata": {"uid": uid}, "status": {"allocation": {"devices": {"results": results}}}}
    return msgspec.convert(found, claims.ResourceClaim)


def prepared(*devices: str, uid: str = UID, admin: bool = False) -> claims.PreparedClaim:
    return claims.PreparedClaim(
        namespace="default",
        name="c",
        uid=uid,
        devices=[
            claims.PreparedDevice(
                request="gpu", pool="n1", device=device, ordinal=number, admin=admin
            )
            for number, device in enumerate(devices)
        ],
    )


def test_devices_are_numbered_over_all_requests_of_a_claim() -> None:
    found = claims.prepared_claim(
        REF,
        claim(result("gpu-2", "a"), result("gpu-0", "a/small"), result("gpu-1", "b")),
        "n1",
        DEVICES,
    )
    assert [(each.ordinal, each.request, each.device) for each in found.devices] == [
        (0, "a", "gpu-2"),
        (1, "a", "gpu-0"),
        (2, "b", "gpu-1"),
    ]


NETWORK = {"request": "nic", "driver": "net.example.com", "pool": "n1", "device": "eth1"}


def test_devices_of_other_drivers_are_left_to_them() -> None:
    found = claims.prepared_claim(REF, claim(NETWORK, result("gpu-1")), "n1", DEVICES)
    assert [(each.ordinal, each.device) for each in found.devices] == [(0, "gpu-1")]


@each(
    ("wanted", "error", "said"),
    [
        (claim(NETWORK), NotEligible, f"no device of {claims.DRIVER}"),
        (claim(result("gpu-0"), uid=OTHER), NotFound, f"has uid '{OTHER}' now, not {UID}"),
        (claim(result("gpu-7")), UnknownDevice, "pool n1 has gpu-0, gpu-1, gpu-2"),
        (claim(result("gpu-0", pool="n2")), UnknownDevice, "pool n1 has gpu-0, gpu-1, gpu-2"),
        (
            msgspec.convert({"metadata": {"uid": UID}}, claims.ResourceClaim),
            NotEligible,
            "default/worker-gpu-x7k2p",
        ),
    ],
)
def test_a_claim_that_is_not_allocated_here_is_refused_with_what_is(
    wanted: claims.ResourceClaim, error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        claims.prepared_claim(REF, wanted, "n1", DEVICES)


@pytest.mark.parametrize(
    ("ours", "theirs", "held"),
    [
        (prepared("gpu-0"), prepared("gpu-0", uid=OTHER), ["gpu-0"]),
        (prepared("gpu-0"), prepared("gpu-1", uid=OTHER), []),
        (prepared("gpu-0"), prepared("gpu-0"), []),
        (prepared("gpu-0", admin=True), prepared("gpu-0", uid=OTHER), []),
        (prepared("gpu-0"), prepared("gpu-0", uid=OTHER, admin=True), []),
    ],
    ids=["same", "another", "itself", "to look after", "looked after"],
)
def test_a_device_is_held_by_another_claim_unless_one_only_looks_after_it(
    ours: claims.PreparedClaim, theirs: claims.PreparedClaim, held: list[str]
) -> None:
    assert [device for device, _ in claims.held_by_others(ours, [theirs])] == held


def test_the_specification_has_one_mount_and_one_uuid_a_device() -> None:
    spec = claims.cdi_spec(prepared("gpu-2", "gpu-0"), "/kubelet/claims/c", DEVICES)
    assert [f"{spec['kind']}={each['name']}" for each in spec["devices"]] == [
        claims.cdi_id(UID, 0),
        claims.cdi_id(UID, 1),
    ]
    edits = [each["containerEdits"] for each in spec["devices"]]
    assert [edit["env"][-1] for edit in edits] == ["SNAPBACK_GPU_0=GPU-2", "SNAPBACK_GPU_1=GPU-0"]
    assert all("NVIDIA_VISIBLE_DEVICES=void" in edit["env"] for edit in edits)
    assert [
        (mount["hostPath"], mount["containerPath"]) for e in edits for mount in e["mounts"]
    ] == [
        ("/kubelet/claims/c/0", "/run/snapback/gpu/0"),
        ("/kubelet/claims/c/1", "/run/snapback/gpu/1"),
    ]


def changed(**fields: Any) -> bytes:
    return json.dumps(msgspec.to_builtins(prepared("gpu-0")) | fields).encode()


@each(
    ("data", "message"),
    [
        (b"", "not a valid record"),
        (b"{" * 10_000, "not a valid record"),
        (b" " * (claims.MAX_RECORD_BYTES + 1), "over the limit"),
        (changed(uid=OTHER), f"it is of claim {OTHER}"),
        (changed(uid="../../etc"), r"\$.uid"),
        (changed(namespace="a/b"), r"\$.namespace"),
        (changed(version=2), r"\$.version"),
        (changed(devices=[]), r"\$.devices"),
        (changed(devices=[{**result("gpu-0"), "ordinal": 64}]), r"\$.devices\[0\].ordinal"),
        (changed(devices=[{**result("gpu-0"), "ordinal": 1}]), r"numbered \[1\], not from 0"),
        (changed(devices=[{**result("../gpu"), "ordinal": 0}]), r"\$.devices\[0\].device"),
    ],
)
def test_a_damaged_record_is_refused_with_the_field(data: bytes, message: str) -> None:
    with pytest.raises(InvalidMessage, match=message):
        claims.decode_record(data, UID)


@given(st.binary(max_size=400))
def test_a_record_of_any_bytes_is_refused_in_one_way(data: bytes) -> None:
    with pytest.raises(InvalidMessage):
        claims.decode_record(data, UID)


def test_attributes_have_the_names_and_types_of_nvidias_driver() -> None:
    (device, *_) = slices.resource_slice("n1", "u", DEVICES, generation=1)["spec"]["devices"]
    assert device["name"] == "gpu-0"
    assert device["attributes"]["gpu.nvidia.com/uuid"] == {"string": "GPU-0"}
    assert device["attributes"]["gpu.nvidia.com/type"] == {"string": "gpu"}
    assert device["attributes"]["gpu.nvidia.com/cudaComputeCapability"] == {"version": "9.0.0"}
    assert device["attributes"]["snapback.nvidia.com/simulated"] == {"bool": True}
    assert device["capacity"] == {"gpu.nvidia.com/memory": {"value": "4Gi"}}
    # What the API server allows of a device.
    assert len(device["attributes"]) + len(device["capacity"]) <= 32


@pytest.mark.parametrize(
    ("size", "text"),
    [(2**21, "2Mi"), (4 * GIB, "4Gi"), (1500 * 2**20, "1500Mi"), (4097 * 1024 + 5, "4097Ki")],
)
def test_a_capacity_is_written_as_the_api_server_does(size: int, text: str) -> None:
    assert slices.quantity(size) == text


def found_slice(
    devices: list[claims.ClaimableDevice], name: str = f"n1-{claims.DRIVER}"
) -> slices.FoundSlice:
    body = slices.resource_slice("n1", "node-uid", devices, generation=3)
    body["metadata"] |= {"name": name, "resourceVersion": "77"}
    return msgspec.convert(body, slices.FoundSlice)


def test_a_slice_is_created_replaced_or_left() -> None:
    assert isinstance(slices.next_write([], "n1", "node-uid", DEVICES), slices.Create)
    assert slices.next_write([found_slice(DEVICES)], "n1", "node-uid", DEVICES) is None
    write = slices.next_write([found_slice(DEVICES[:1])], "n1", "node-uid", DEVICES)
    assert isinstance(write, slices.Replace)
    assert write.body["spec"]["pool"]["generation"] == 4
    assert write.body["metadata"]["resourceVersion"] == "77"


def test_another_slice_of_the_node_is_deleted_first() -> None:
    found = [found_slice(DEVICES, "aaa"), found_slice(DEVICES)]
    assert slices.next_write(found, "n1", "node-uid", DEVICES) == slices.Delete("aaa")


def test_a_container_has_the_same_numbers_however_its_devices_are_ordered() -> None:
    answers = [
        container_allocation(ids, DEVICES, "/devices")
        for ids in (["GPU-2", "GPU-1"], ["GPU-1", "GPU-2"])
    ]
    assert answers[0] == answers[1]
    assert answers[0]["envs"]["SNAPBACK_GPU_0"] == "GPU-1"
    assert answers[0]["mounts"][1] == {
        "container_path": "/run/snapback/gpu/1",
        "host_path": "/devices/GPU-2",
        "read_only": True,
    }


def test_a_container_cannot_have_a_device_that_is_not_served() -> None:
    with pytest.raises(UnknownDevice, match="'GPU-9' is not served"):
        container_allocation(["GPU-9"], DEVICES, "/devices")
