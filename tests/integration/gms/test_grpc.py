"""The gRPC socket, as agents and tools use it: fences, status, health, and streams of updates."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

import snapback_client as client
from gms.adapters.grpc_client import GmsCaller
from gms.adapters.transfer_process import TransferProcesses
from snapback_client.frames import MemoryDomain
from snapshot_agent.adapters.gms_grpc import GmsClient
from snapshot_shared import frames
from snapshot_shared.codec import decode_msgpack, encode_msgpack
from snapshot_shared.errors import Failure
from snapshot_shared.steps import all_names
from snapshot_shared.telemetry import Telemetry
from tests.support.gms_rig import MIB, children_of, committed
from tests.support.waiting import wait_until
from tests.support.weights import UID

T = TypeVar("T")


class Caller:
    """Calls the service as another program does."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel

    def __call__(self, method: str, body: object, reply: type[T]) -> T:
        ask = self.channel.unary_unary(frames.grpc_method(method))
        return decode_msgpack(ask(encode_msgpack(body), timeout=20), reply)

    def open(self, method: str, body: object) -> Any:
        data = body if isinstance(body, bytes) else encode_msgpack(body)
        return self.channel.unary_stream(frames.grpc_method(method))(data, timeout=30)

    def updates(self, method: str, body: object) -> list[frames.TransferUpdate]:
        return [decode_msgpack(data, frames.TransferUpdate) for data in self.open(method, body)]

    def refused(self, method: str, body: object) -> tuple[grpc.StatusCode, Failure]:
        """How a call is refused; a stream that ends before its first update looks the same."""
        with pytest.raises(grpc.RpcError) as caught:
            list(self.open(method, body))
        trailers = dict(caught.value.trailing_metadata())
        return caught.value.code(), decode_msgpack(trailers[frames.FAILURE_TRAILER], Failure)


@contextlib.contextmanager
def calls(service: Any) -> Iterator[Caller]:
    with grpc.insecure_channel(f"unix:{service.folder}/gms-grpc.sock") as channel:
        yield Caller(channel)


@pytest.fixture
def call(service: Any) -> Iterator[Caller]:
    with calls(service) as caller:
        yield caller


build = functools.partial(committed, value=1, size=1000, name="worker")


def fence(
    service: Any, token: str = "f", *, wait_s: float = 10.0, deadline_s: float = 60.0
) -> frames.FenceRequest:
    return frames.FenceRequest(
        token=token, devices=list(service.uuids), wait_s=wait_s, deadline_s=deadline_s
    )


def test_a_fence_is_held_when_the_worker_sleeps_and_gives_the_vector(
    service: Any, call: Caller
) -> None:
    pools = [build(0), build(1)]
    with ThreadPoolExecutor(1) as background:
        held = background.submit(call, "Fence", fence(service), frames.FenceReply)
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
    assert call("Fence", fence(service), frames.FenceReply).vector == vector
    assert call("Unfence", frames.UnfenceRequest(token="f"), frames.UnfenceReply).ended
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
    call("Fence", fence(service, deadline_s=0.2), frames.FenceReply)
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
        pending = call.channel.unary_unary(frames.grpc_method("Fence")).future(request)
        while service.device().fence is None:
            assert not pending.done()
        pending.cancel()
        with client.connect(0, lock="RW", domain="kv", deadline_s=10.0):
            assert service.device().fence is None


def test_unfence_before_fence_wins(service: Any, call: Caller) -> None:
    assert not call("Unfence", frames.UnfenceRequest(token="f"), frames.UnfenceReply).ended
    _, failure = call.refused("Fence", fence(service))
    assert failure.reason == "Superseded"


def test_an_unknown_device_is_refused_with_those_that_are_served(
    service: Any, call: Caller
) -> None:
    request = frames.FenceRequest(token="f", devices=["GPU-z"], wait_s=0, deadline_s=1)
    code, failure = call.refused("Fence", request)
    assert code is grpc.StatusCode.NOT_FOUND
    assert failure.values["served"] == sorted(service.uuids)


def test_status_says_who_holds_what(service: Any, call: Caller) -> None:
    with build() as pool:
        status = call("Status", frames.StatusRequest(), frames.StatusReply)
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


def test_the_standard_health_service_answers(service: Any, call: Caller) -> None:
    stub = health_pb2_grpc.HealthStub(call.channel)
    for name in ("", frames.GRPC_SERVICE):
        found = stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=10)
        assert found.status == health_pb2.HealthCheckResponse.SERVING


@pytest.fixture
def sums(service: Any) -> dict[str, int]:
    """Weights on device 0, and what their arrays add up to."""
    return big_weights()


def big_weights() -> dict[str, int]:
    with client.connect(lock="RW") as pool:
        rng = np.random.default_rng(7)
        for array in pool.allocate_many({"big": (20 * MIB + 3, "u1"), "m": (9000, "f4")}).values():
            array[...] = rng.integers(0, 256, array.shape, "u1")
        pool.commit()
        return sums_of(pool)


def load_request(service: Any, saved: frames.TransferUpdate, **changes: Any) -> frames.LoadRequest:
    assert saved.layout is not None
    fields: dict[str, Any] = {
        "device": service.uuids[1],
        "content_uid": UID,
        "part": "gpu-0",
        "part_digest": saved.digest,
        "layout_id": saved.layout.layout_id,
        "structure_hash": saved.layout.structure_hash,
        "load_token": "l1",
    }
    return frames.LoadRequest(**fields | changes)


def sums_of(pool: client.MemoryPool) -> dict[str, int]:
    return {name: int(array.sum(dtype="i8")) for name, array in pool.arrays().items()}


def sums_on(device: int) -> dict[str, int]:
    with client.connect(device, lock="RO", deadline_s=5.0) as pool:
        return sums_of(pool)


def parts_below(root: Path) -> list[str]:
    # A folder may be removed meanwhile, at which `rglob` ends with an error.
    found = [*os.walk(root)]
    files = [name for _, _, names in found for name in names]
    return sorted([*files, *(name for _, names, _ in found for name in names if name == "gpu-0")])


def test_a_save_streams_its_progress_and_a_load_publishes_the_same_bytes(
    service: Any, call: Caller, sums: dict[str, int]
) -> None:
    saved = call.updates("Save", frames.SaveRequest(device=service.uuids[0], content_uid=UID))
    assert saved[0].stage is frames.TransferStage.LEASED
    steps = [update.done for update in saved if update.stage is frames.TransferStage.PROGRESS]
    assert steps == sorted(steps)
    assert (steps[0], steps[-1]) == (0, saved[-1].total)
    done = saved[-1]
    assert done.stage is frames.TransferStage.DONE
    assert (Path(done.path) / "part.json").is_file()
    loaded = call.updates("Load", load_request(service, done, publish=True))[-1]
    assert loaded.layout is not None
    assert (loaded.layout.generation, loaded.was_there) == (1, False)
    assert sums_on(1) == sums


def test_a_save_reads_beside_a_worker_that_serves(
    service: Any, call: Caller, sums: dict[str, int]
) -> None:
    with client.connect(0, lock="RO") as pool:
        request = frames.SaveRequest(device=service.uuids[0], content_uid=UID)
        done = call.updates("Save", request)[-1]
        assert done.stage is frames.TransferStage.DONE
        assert int(pool["big"].sum(dtype="i8")) == sums["big"]


def test_a_save_of_nothing_is_refused(service: Any, call: Caller) -> None:
    _, failure = call.refused("Save", frames.SaveRequest(device=service.uuids[0], content_uid=UID))
    assert failure.reason == "NotEligible"


def test_a_finished_save_is_not_written_again_by_a_repeat_and_not_lost_by_another(
    service: Any, call: Caller, sums: dict[str, int]
) -> None:
    request = frames.SaveRequest(device=service.uuids[0], content_uid=UID)
    first = call.updates("Save", request)[-1]
    assert call.updates("Save", request)[-1].digest == first.digest
    committed(1).close()
    other = frames.SaveRequest(device=service.uuids[1], content_uid=UID, part="gpu-0")
    assert call.refused("Save", other)[1].reason == "ArtifactExists"
    assert (Path(first.path) / "part.json").is_file()


@pytest.mark.parametrize("verb", ["Save", "Load"])
def test_a_caller_that_hangs_up_after_the_last_update_keeps_what_it_asked_for(
    service: Any, call: Caller, sums: dict[str, int], verb: str
) -> None:
    request: Any = frames.SaveRequest(device=service.uuids[0], content_uid=UID)
    if verb == "Load":
        request = load_request(service, call.updates("Save", request)[-1])
    stream = call.open(verb, request)
    for data in stream:
        update = decode_msgpack(data, frames.TransferUpdate)
        if update.stage is frames.TransferStage.DONE:
            break
    stream.cancel()
    # The service has ended the call before it ends itself.
    service.run(service.grpc.close())
    if verb == "Save":
        assert (Path(update.path) / "part.json").is_file()
    else:
        assert [load.load_token for load in service.device(1).loads] == ["l1"]


@pytest.mark.parametrize("verb", ["Save", "Load"])
def test_a_cancelled_call_ends_its_process_and_leaves_nothing(
    launch: Any, verb: str, tmp_path: Path
) -> None:
    service = launch(transfers=TransferProcesses())
    big_weights()
    with calls(service) as call:
        cancelled(service, call, verb, tmp_path)


def cancelled(service: Any, call: Caller, verb: str, tmp_path: Path) -> None:
    saved = call.updates("Save", frames.SaveRequest(device=service.uuids[0], content_uid=UID))[-1]
    before = children_of()
    request: Any = load_request(service, saved)
    if verb == "Save":
        request = frames.SaveRequest(device=service.uuids[0], content_uid=UID, root=str(tmp_path))
    stream = call.open(verb, request)
    for data in stream:
        if decode_msgpack(data, frames.TransferUpdate).stage is frames.TransferStage.PROGRESS:
            break
    stream.cancel()
    wait_until(lambda: children_of() == before)
    wait_until(lambda: parts_below(tmp_path) == [])
    wait_until(lambda: service.device(1).used == 0)
    assert service.device(1).loads == []
    assert service.device(0).domains[0].sessions == []
    again = request if verb == "Save" else load_request(service, saved, load_token="l2")

    def is_done() -> bool:
        # Another call may have the part only a moment after its files are gone.
        try:
            return bool(call.updates(verb, again))
        except grpc.RpcError as error:
            if error.code() is not grpc.StatusCode.FAILED_PRECONDITION:
                raise
            return False

    wait_until(is_done)


METHODS = ("Fence", "Save", "Load", "Watch", "Publish", "Forget")
BODIES = (b"", b"\xc1", encode_msgpack({"device": "", "after": -1}), b"\x81" * 9999)
OUTSIDE = encode_msgpack({"device": "d", "content_uid": UID, "namespace": "../.."})


@pytest.mark.parametrize(
    ("method", "body"), [*itertools.product(METHODS, BODIES), ("Save", OUTSIDE)]
)
def test_a_body_that_does_not_decode_is_refused_and_the_service_goes_on(
    service: Any, call: Caller, method: str, body: bytes
) -> None:
    code, failure = call.refused(method, body)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert failure.reason == "InvalidMessage"
    client.connect(lock="RW").close()


async def calls_of_tools(service: Any, parents: dict[str, str]) -> None:
    """Make every kind of call, each in a span of its own; note the spans."""
    tracer, device = Telemetry("tool", "n1", "0"), service.uuids[0]
    async with GmsCaller(service.folder) as gms:
        with tracer.span("tool") as parents["gms-status"]:
            await gms.status()
        with tracer.span("tool") as parents["gms-watch"]:
            async with aclosing(gms.watch(frames.WatchRequest(status=True))) as answers:
                await anext(answers)
        with tracer.span("tool") as parents["gms-save"]:
            request = frames.SaveRequest(device=device, content_uid=UID)
            updates = [each async for each in gms.save(request)]
        with tracer.span("tool") as parents["gms-load"]:
            async for _ in gms.load(load_request(service, updates[-1])):
                pass
        await gms.status()


def test_calls_are_in_the_trace_of_the_span_around_them(
    service: Any, call: Caller, sums: dict[str, int]
) -> None:
    parents: dict[str, str] = {}
    asyncio.run(calls_of_tools(service, parents))
    wait_until(lambda: {record.name for record in service.spans()} >= parents.keys())
    found = [record for record in service.spans() if record.name.startswith("gms-")]
    assert sorted(record.name for record in found) == sorted(parents), "one has no span around it"
    for record in found:
        assert record.kind == "server"
        assert parents[record.name].split("-")[1:3] == [record.trace_id, record.parent_id]
        assert record.name in all_names()
    (save,) = (record for record in found if record.name == "gms-save")
    within = [record for record in service.spans() if record.trace_id == save.trace_id]
    assert {record.name for record in within} >= {"attach", "export"}
    assert {record.parent_id for record in within if record.name == "attach"} == {save.span_id}


def test_a_fence_of_an_agent_is_a_span_of_its_trace(service: Any, sums: dict[str, int]) -> None:
    async def fence() -> str:
        gms = GmsClient(service.folder)
        try:
            with Telemetry("agent", "n1", "0").span("prepare") as around:
                await gms.fence("f", service.uuids[:1], wait_s=5.0, deadline_s=5.0)
                await gms.unfence("f")
        finally:
            await gms.close()
        return around

    around = asyncio.run(fence())
    found = {record.name: record for record in service.spans() if record.name.startswith("gms-")}
    assert found.keys() == {"gms-fence", "gms-unfence"}
    for record in found.values():
        assert around.split("-")[1:3] == [record.trace_id, record.parent_id]


def test_watch_shows_what_happens_and_begins_with_the_past(service: Any, call: Caller) -> None:
    stream = call.open("Watch", frames.WatchRequest(status=True))
    first = decode_msgpack(next(stream), frames.WatchReply)
    assert first.status is not None
    with client.connect(lock="RW", name="worker"):
        pass
    kinds: list[str] = []
    while len(kinds) < 3:
        reply = decode_msgpack(next(stream), frames.WatchReply)
        assert reply.status is not None
        assert reply.missed == 0
        kinds += [event.kind.value for event in reply.events]
    assert kinds == ["attach", "grant", "detach"]
    stream.cancel()
    past = call.open("Watch", frames.WatchRequest(after=1))
    assert [e.kind.value for e in decode_msgpack(next(past), frames.WatchReply).events] == kinds[1:]
    past.cancel()


def test_a_watcher_that_comes_late_learns_how_much_it_missed(service: Any, call: Caller) -> None:
    for _ in range(frames.MAX_EVENTS // 3 + 4):
        client.connect(lock="RW").close()
    stream = call.open("Watch", frames.WatchRequest())
    reply = decode_msgpack(next(stream), frames.WatchReply)
    assert len(reply.events) == frames.MAX_EVENTS
    assert reply.missed == reply.events[0].seq - 1 > 0
    stream.cancel()
