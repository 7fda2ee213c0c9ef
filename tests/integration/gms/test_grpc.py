"""The gRPC socket: fences, status and health, as the agent and tools use them."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import snapback_client as client
from snapback_client.frames import MemoryDomain
from snapshot_shared.codec import decode_msgpack, encode_msgpack
from snapshot_shared.errors import Failure
from snapshot_shared.frames import (
    FAILURE_TRAILER,
    GRPC_SERVICE,
    DropLayoutReply,
    DropLayoutRequest,
    FenceReply,
    FenceRequest,
    StatusReply,
    StatusRequest,
    UnfenceReply,
    UnfenceRequest,
    grpc_method,
)
from tests.support.gms_rig import attach

T = TypeVar("T")


class Caller:
    """Calls the service as another program does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def raw(self, method: str, body: bytes) -> bytes:
        return self.channel.unary_unary(grpc_method(method))(body, timeout=20)

    def __call__(self, method: str, body: object, reply: type[T]) -> T:
        return decode_msgpack(self.raw(method, encode_msgpack(body)), reply)

    def refused(self, method: str, body: object) -> tuple[grpc.StatusCode, Failure]:
        data = body if isinstance(body, bytes) else encode_msgpack(body)
        with pytest.raises(grpc.RpcError) as caught:
            self.raw(method, data)
        trailers = dict(caught.value.trailing_metadata())
        return caught.value.code(), decode_msgpack(trailers[FAILURE_TRAILER], Failure)


@pytest.fixture
def call(service: Any) -> Iterator[Caller]:
    with grpc.insecure_channel(f"unix:{service.folder}/gms-grpc.sock") as channel:
        yield Caller(channel)


def build(device: int = 0) -> client.MemoryPool:
    pool = client.connect(device, lock="RW", name="worker")
    pool.allocate("w", 1000, "u1")[:] = 1
    pool.commit()
    return pool


def fence(
    service: Any, token: str = "f", *, wait_s: float = 10.0, deadline_s: float = 60.0
) -> FenceRequest:
    return FenceRequest(
        token=token, devices=list(service.uuids), wait_s=wait_s, deadline_s=deadline_s
    )


def test_a_fence_is_held_when_the_worker_sleeps_and_gives_the_vector(
    service: Any, call: Caller
) -> None:
    pools = [build(0), build(1)]
    with ThreadPoolExecutor(1) as background:
        held = background.submit(call, "Fence", fence(service), FenceReply)
        while service.device().fence is None:
            assert not held.done()
        assert service.device().fence.phase == "pending"
        pools[0].sleep()
        assert service.device().fence.phase == "pending"
        pools[1].sleep()
        vector = held.result(10).vector
    assert [ref.device for ref in vector] == service.uuids
    for ref, pool in zip(vector, pools, strict=True):
        assert (ref.layout_id, ref.structure_hash) == (pool.layout_id, pool.structure_hash)
        assert (ref.incarnation, ref.generation) == (service.gms.incarnation, 1)
        assert ref.bytes == 1000
    assert call("Fence", fence(service), FenceReply).vector == vector
    assert call("Unfence", UnfenceRequest(token="f"), UnfenceReply).ended
    for pool in pools:
        pool.wake()
        pool.close()


def test_a_worker_that_does_not_leave_is_named_and_keeps_working(
    service: Any, call: Caller
) -> None:
    with build(0) as pool, build(1):
        code, failure = call.refused("Fence", fence(service, wait_s=0.05))
        assert code is grpc.StatusCode.DEADLINE_EXCEEDED
        assert failure.reason == "DeadlineExceeded"
        assert [name.partition(" ")[0] for name in failure.values["sessions"]] == ["worker"] * 2
        assert service.device().fence is None
        pool.sleep()
        pool.wake(5.0)


def test_a_fence_ends_by_itself_at_its_deadline(service: Any, call: Caller) -> None:
    pools = [build(0), build(1)]
    for pool in pools:
        pool.sleep()
    call("Fence", fence(service, deadline_s=0.2), FenceReply)
    for pool in pools:
        pool.wake(10.0)
        pool.close()
    code, failure = call.refused("Fence", fence(service))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert failure.reason == "Superseded"


def test_a_caller_that_hangs_up_leaves_no_fence_that_waits_for_ever(
    service: Any, call: Caller
) -> None:
    with build(0), build(1):
        request = encode_msgpack(fence(service, wait_s=0.3))
        pending = call.channel.unary_unary(grpc_method("Fence")).future(request)
        while service.device().fence is None:
            assert not pending.done()
        pending.cancel()
        with client.connect(0, lock="RW", domain="kv", deadline_s=10.0):
            assert service.device().fence is None


def test_unfence_before_fence_wins(service: Any, call: Caller) -> None:
    assert not call("Unfence", UnfenceRequest(token="f"), UnfenceReply).ended
    _, failure = call.refused("Fence", fence(service))
    assert failure.reason == "Superseded"


def test_a_fence_over_nothing_is_refused(service: Any, call: Caller) -> None:
    code, failure = call.refused("Fence", fence(service))
    assert code is grpc.StatusCode.FAILED_PRECONDITION
    assert failure.reason == "NotEligible"


def test_an_unknown_device_is_refused_with_those_that_are_served(
    service: Any, call: Caller
) -> None:
    request = FenceRequest(token="f", devices=["GPU-z"], wait_s=0, deadline_s=1)
    code, failure = call.refused("Fence", request)
    assert code is grpc.StatusCode.NOT_FOUND
    assert failure.values["served"] == sorted(service.uuids)


@pytest.mark.parametrize("body", [b"", b"\xc1", encode_msgpack({"token": ""}), b"\x81" * 9999])
def test_a_body_that_does_not_decode_is_refused_as_such(
    service: Any, call: Caller, body: bytes
) -> None:
    code, failure = call.refused("Fence", body)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.reason == "InvalidMessage"


def test_status_says_who_holds_what(service: Any, call: Caller) -> None:
    with build() as pool:
        status = call("Status", StatusRequest(), StatusReply)
        assert (status.node, status.incarnation) == ("n1", service.gms.incarnation)
        first, second = status.devices
        assert [device.endpoint for device in status.devices] == ["n1-gpu0", "n1-gpu1"]
        assert first.capacity == first.used + first.free
        assert first.capabilities["virtual-memory-management"] == 1
        assert (first.used, second.used) == (2 * 1024 * 1024, 0)
        weights = first.domains[0]
        assert (weights.domain, weights.lock) == (MemoryDomain.WEIGHTS, "reading")
        assert [(s.client, s.state) for s in weights.sessions] == [("worker", "active")]
        assert weights.layout is not None
        assert weights.layout.layout_id == pool.layout_id


def test_a_layout_whose_users_are_gone_can_be_dropped(service: Any, call: Caller) -> None:
    pool = build()
    request = DropLayoutRequest(device=service.uuids[0])
    _, failure = call.refused("DropLayout", request)
    assert failure.reason == "NotEligible"
    pool.close()
    assert call("DropLayout", request, DropLayoutReply).dropped
    assert not call("DropLayout", request, DropLayoutReply).dropped
    assert service.device().used == 0


def test_the_standard_health_service_answers(service: Any, call: Caller) -> None:
    stub = health_pb2_grpc.HealthStub(call.channel)
    for name in ("", GRPC_SERVICE):
        found = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert found.status == health_pb2.HealthCheckResponse.SERVING


def test_a_save_lease_frees_the_device_for_readers_when_it_is_given_back(
    service: Any, call: Caller
) -> None:
    for pool in (build(0), build(1)):
        pool.close()
    call("Fence", fence(service), FenceReply)
    save = attach(service, "RO", deadline_s=1.0, fence_token="f")
    assert service.device(0).fence.phase == "leased"
    assert service.device(1).fence.phase == "held"
    save.detach()
    assert service.device(0).fence is None
    assert service.device(1).fence.phase == "held"
