"""The memory server: what it waits for, and what not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator

import pytest

from gms.adapters.simulated import SimulatedDevice
from gms.domain.sessions import Peer
from gms.handlers.control import GmsControl
from gms.handlers.memory_server import MemoryServer
from snapback_client.frames import AllocationSpec, Attach, LockMode, MemoryDomain
from snapshot_shared.frames import StatusRequest
from snapshot_shared.metrics import Metrics


class SlowDevice(SimulatedDevice):
    """A device that releases memory when the test lets it."""

    def __init__(self) -> None:
        super().__init__(node="n1", index=0, capacity=2**20, granularity=4096)
        self.may_end: dict[int, threading.Event] = {}

    def create(self, size: int) -> int:
        handle = super().create(size)
        self.may_end[handle] = threading.Event()
        return handle

    def release(self, handle: int) -> None:
        assert self.may_end[handle].wait(10)
        super().release(handle)


@pytest.fixture
async def device() -> AsyncIterator[SlowDevice]:
    device = SlowDevice()
    yield device
    for each in device.may_end.values():
        each.set()
    await asyncio.get_running_loop().shutdown_default_executor()


async def test_a_later_release_delays_no_caller_that_waits_for_earlier_ones(
    device: SlowDevice,
) -> None:
    gms = MemoryServer(node="n1", incarnation="inc", devices=[device])
    attach = Attach(
        device=device.info.uuid, domain=MemoryDomain.KV, lock=LockMode.RW, deadline_s=5.0
    )
    session = await gms.attach(attach, Peer(pid=1, uid=0))
    specs = [AllocationSpec(id=each, size=1) for each in ("a", "b")]
    await gms.allocate(session, specs, wait_s=0.0)
    first, second = device.may_end.values()
    gms.free(session, ["a"])
    drained = asyncio.create_task(gms.drained())
    await asyncio.sleep(0)
    gms.free(session, ["b"])
    assert not drained.done()
    first.set()
    async with asyncio.timeout(5):
        await drained
    assert not second.is_set()


class SharedDevice(SimulatedDevice):
    """A device of which others have most, and which has to be asked in a thread."""

    def __init__(self) -> None:
        super().__init__(node="n1", index=0, capacity=2**20, granularity=4096, is_shared=True)

    def free(self) -> int:
        assert threading.current_thread() is not threading.main_thread()
        return 4096


async def test_the_metric_of_free_memory_is_what_a_shared_device_has_said_last() -> None:
    metrics = Metrics("snap-gms", "n1", "0", scraped=True)
    device = SharedDevice()
    MemoryServer(node="n1", incarnation="inc", devices=[device], metrics=metrics)

    def shown() -> float:
        text = metrics.text().decode().splitlines()
        (line,) = [line for line in text if line.startswith("snapback_gms_memory_free")]
        return float(line.rpartition(" ")[2])

    assert shown() == 2**20
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    assert shown() == 4096
    await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})
    device.close()


class HangingDevice(SimulatedDevice):
    """A shared device that answers when the test lets it."""

    def __init__(self) -> None:
        super().__init__(node="n1", index=0, capacity=2**20, granularity=4096, is_shared=True)
        self.may_answer = threading.Event()
        self.asked = 0

    def free(self) -> int:
        self.asked += 1
        assert self.may_answer.wait(10)
        return 4096


async def test_no_lock_waits_for_a_device_that_hangs_and_it_is_asked_once() -> None:
    device = HangingDevice()
    gms = MemoryServer(node="n1", incarnation="inc", devices=[device])
    async with asyncio.timeout(5):
        assert [await gms.free_on(device.info.uuid) for _ in range(3)] == [2**20] * 3
    assert device.asked == 1
    device.may_answer.set()
    await asyncio.get_running_loop().shutdown_default_executor()
    device.close()


async def test_a_device_that_hangs_takes_one_thread_of_all_who_ask_at_once() -> None:
    device = HangingDevice()
    gms = MemoryServer(node="n1", incarnation="inc", devices=[device])
    try:
        async with asyncio.timeout(5):
            asked = (gms.free_on(device.info.uuid) for _ in range(20))
            assert await asyncio.gather(*asked) == [2**20] * 20
        assert device.asked == 1
    finally:
        device.may_answer.set()
        await asyncio.get_running_loop().shutdown_default_executor()
        device.close()


class MeetingDevice(SimulatedDevice):
    """A shared device that answers while another one is asked."""

    def __init__(self, index: int, meeting: threading.Barrier) -> None:
        super().__init__(node="n1", index=index, capacity=2**20, granularity=4096, is_shared=True)
        self._meeting = meeting

    def free(self) -> int:
        self._meeting.wait(10)
        return 4096


async def test_a_status_asks_its_devices_at_the_same_time() -> None:
    meeting = threading.Barrier(2)
    devices = [MeetingDevice(index, meeting) for index in range(2)]
    gms = MemoryServer(node="n1", incarnation="inc", devices=devices)
    status = await GmsControl(gms).status(StatusRequest())
    assert [(device.index, device.free) for device in status.devices] == [(0, 4096), (1, 4096)]
    await asyncio.get_running_loop().shutdown_default_executor()
    for device in devices:
        device.close()
