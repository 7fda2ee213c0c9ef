"""Captures and restores of the example worker, with the real GPU memory service of the node."""

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from snapshot_agent.adapters.gms_grpc import GmsClient
from snapshot_agent.domain import control
from snapshot_agent.handlers import prepare
from snapshot_shared.errors import GmsUnavailable
from snapshot_shared.frames import GRPC_SOCKET
from snapshot_shared.orders import (
    ArtifactRef,
    CommitOrder,
    DeviceRef,
    Driver,
    LoadOrder,
    PartResult,
    Report,
    SaveOrder,
)
from tests.support.agent_rig import Pod, Rig, artifact_of, failure_of, fresh_uid
from tests.support.waiting import until

EXAMPLE = Path(__file__).parents[3] / "deploy" / "examples" / "worker.py"
MIB = 1024 * 1024


async def with_devices(rig: Rig, count: int) -> list[DeviceRef]:
    """Start a GPU memory service with so many devices."""
    await rig.gms(devices=count, device_bytes=256 * MIB)
    client = GmsClient(rig.sockets)
    try:
        found = await client.devices(wait_s=10.0)
    finally:
        await client.close()
    return [DeviceRef(ordinal=device.index, uuid=device.uuid) for device in found]


async def started(rig: Rig, devices: list[DeviceRef], *, standby: bool = False) -> Pod:
    variables = {"SIZE_MIB": "16", "WARMUP_REQUESTS": "0"}
    env = [{"name": name, "value": value} for name, value in variables.items()]
    pod = rig.pod(env=env, command=[sys.executable, str(EXAMPLE)])
    order = rig.run_order(pod, standby=standby, devices=devices)
    await rig.done(order, "started")
    if not standby:
        await rig.answer(order, "ready")
    return pod


def common_of(rig: Rig, verb: str, owner: str, part: str) -> dict[str, Any]:
    """Return what all orders about a part have."""
    return {**rig.common(verb, owner), "order": f"{verb}-{owner}-{part}"}


async def captured(
    rig: Rig, pod: Pod, devices: list[DeviceRef], driver: Driver = "cooperative"
) -> tuple[ArtifactRef, Report]:
    content = fresh_uid()
    prepare = rig.prepare_order(pod, content, devices=devices, driver=driver)
    prepared = await rig.done(prepare, "prepared")
    dumped = await rig.carry_out(rig.dump_order(pod, content, prepared.vector, driver=driver))
    parts: list[PartResult] = [dumped.part] if dumped.part else []
    for entry in prepared.vector:
        if entry.layout is None:
            continue
        order = common_of(rig, "save", content, entry.part)
        order |= {"namespace": "default", "content_uid": content, "fence_token": f"{content}.1"}
        saved = await rig.carry_out(SaveOrder(layout=entry.layout, part=entry.part, **order))
        assert saved.part is not None, saved.failure
        parts.append(saved.part)
    sealed = await rig.carry_out(rig.seal_order(pod, prepared, *parts))
    await rig.carry_out(rig.release_order(pod, content, driver=driver))
    return artifact_of(content, sealed), sealed


async def loaded(
    rig: Rig, pod: Pod, ref: ArtifactRef, prepared: Report, devices: list[DeviceRef]
) -> None:
    part_digests = {
        report.part.part: report.part.digest
        for report in rig.reports
        if report.part is not None and ref.content_uid in report.order
    }
    for device in devices:
        part = f"gpu-{device.ordinal}"
        layout = next(entry.layout for entry in prepared.vector if entry.part == part)
        assert layout is not None
        what: dict[str, Any] = {
            "device": device.uuid,
            "layout_id": layout.layout_id,
            "load_token": f"{pod.ref.uid}.1.{part}",
        }
        load = LoadOrder(
            artifact=ref,
            part=part,
            part_digest=part_digests[part],
            structure_hash=layout.structure_hash,
            **what,
            **common_of(rig, "load", pod.ref.uid, part),
        )
        await rig.done(load, "loaded")
        commit = CommitOrder(**what, **common_of(rig, "commit", pod.ref.uid, part))
        await rig.done(commit, "committed")


async def test_a_worker_with_weights_on_two_devices_is_captured_and_restored_onto_two_others(
    rig: Rig,
) -> None:
    everything = await with_devices(rig, 4)
    first = everything[:2]
    second = [DeviceRef(ordinal=i, uuid=d.uuid) for i, d in enumerate(everything[2:])]
    async with rig.agent():
        pod = await started(rig, first)
        ref, sealed = await captured(rig, pod, first)
        prepared = await rig.heard(lambda report: report.kind == "prepared")
        assert [entry.part for entry in prepared.vector] == ["process", "gpu-0", "gpu-1"]
        assert sealed.bytes > 16 * MIB
        await until((pod.control / control.READY).exists, "the worker's wake")

        target = await started(rig, second, standby=True)
        await loaded(rig, target, ref, prepared, second)
        await rig.done(rig.restore_order(target, ref, devices=second), "restored")

        # One device fewer than the artifact needs: refused with both values.
        small = await started(rig, second[:1], standby=True)
        order = rig.restore_order(small, ref, devices=second[:1])
        failure = await rig.refused(order, "Incompatible")
        assert failure.values["expected"] == ["gpu-0", "gpu-1"]
        assert failure.values["found"] == ["gpu-0"]


async def test_a_worker_with_weights_on_a_device_is_started_again_with_them(rig: Rig) -> None:
    everything = await with_devices(rig, 2)
    first, second = everything[:1], [DeviceRef(ordinal=0, uuid=everything[1].uuid)]
    async with rig.agent():
        pod = await started(rig, first)
        before = pod.pid(rig.journal)
        ref, _ = await captured(rig, pod, first, "respawn")
        await until((pod.control / control.READY).exists, "the worker's wake")
        assert pod.pid(rig.journal) != before

        target = await started(rig, second, standby=True)
        prepared = await rig.heard(lambda report: report.kind == "prepared")
        await loaded(rig, target, ref, prepared, second)
        await rig.done(rig.restore_order(target, ref, devices=second, driver="respawn"), "restored")


async def test_an_abort_lets_the_worker_go_while_gms_hangs_and_ends_the_fence_afterwards(
    rig: Rig,
) -> None:
    devices = await with_devices(rig, 1)
    async with rig.agent():
        pod, content = await started(rig, devices), fresh_uid()
        await rig.prepared(pod, content, devices=devices)
        [gms] = rig._processes
        gms.send_signal(signal.SIGSTOP)
        try:
            await rig.done(rig.abort_order(pod, content), "aborted")
            assert (pod.control / control.ABORTED).exists()
            assert (await rig.status())["captures"] == []
        finally:
            gms.send_signal(signal.SIGCONT)
        # No client can attach to a fenced device.
        await until((pod.control / control.READY).exists, "the worker's wake")


async def test_a_killed_agent_ends_the_fence_of_a_capture_that_it_cannot_go_on_with(
    rig: Rig,
) -> None:
    devices = await with_devices(rig, 1)
    process = await rig.process()
    pod, content = await started(rig, devices), fresh_uid()
    await rig.prepared(pod, content, devices=devices)
    # The guard acts, and the agent does not come back in time.
    os.kill(process.pid, signal.SIGSTOP)
    (guard,) = rig.guards()
    os.kill(guard, signal.SIGTERM)
    await until((pod.control / control.ABORTED).exists, "the guard's release")
    await rig.restarted(process)
    assert (await rig.carry_out(rig.release_order(pod, content))).unconfirmed
    await until((pod.control / control.READY).exists, "the worker's wake")


async def test_a_device_with_nothing_committed_is_not_captured_by_a_driver_that_brings_none(
    rig: Rig,
) -> None:
    devices = await with_devices(rig, 1)
    await rig.process()
    pod = await rig.running()
    order = rig.prepare_order(pod, fresh_uid(), devices=devices)
    refused = await rig.refused(order, "NotEligible", kind="rejected")
    assert refused.message == f"nothing is committed on {devices[0].uuid}"
    assert "criu+cuda" in refused.next_step
    await until(lambda: "snapshot-aborted 1" in pod.events(), "the worker's release")


async def test_a_memory_service_that_starts_after_its_agent_is_waited_for(rig: Rig) -> None:
    devices = await with_devices(rig, 1)
    [gms] = rig._processes
    gms.kill()
    await gms.wait()
    async with rig.agent():
        pod = await rig.running()
        order = rig.prepare_order(pod, fresh_uid(), devices=devices)
        await rig.send(order)
        await asyncio.sleep(0.5)
        assert await with_devices(rig, 1) == devices
        # It has been asked, and is another one.
        failure = failure_of(await rig.answer(order), "NotEligible")
        assert failure.message == f"nothing is committed on {devices[0].uuid}"


async def test_without_the_memory_service_no_worker_is_asked_to_be_quiet(
    node: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare, "GMS_STARTS_S", 0.1)
    pod = await node.running()
    device = DeviceRef(ordinal=0, uuid="GPU-of-no-node")
    order = node.prepare_order(pod, fresh_uid(), devices=[device])
    assert (await node.refused(order, "GmsUnavailable")).retryable
    assert not any("quiesce" in event for event in pod.events())


async def test_a_service_that_is_away_is_named_and_holds_no_fence(tmp_path: Path) -> None:
    client = GmsClient(tmp_path)
    try:
        with pytest.raises(GmsUnavailable):
            await client.devices(wait_s=0.0)
        await client.unfence("any")
    finally:
        await client.close()


async def test_a_service_that_is_slow_to_answer_a_new_connection_is_waited_for(
    rig: Rig, tmp_path: Path
) -> None:
    """As on a node whose processors are all taken."""
    await with_devices(rig, 1)

    relays: list[asyncio.Task[Any] | None] = []

    async def late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        relays.append(asyncio.current_task())
        await asyncio.sleep(0.5)
        answers, asks = await asyncio.open_unix_connection(rig.sockets / GRPC_SOCKET)
        try:
            await asyncio.gather(copied(reader, asks), copied(answers, writer))
        finally:
            for each in (asks, writer):
                each.close()

    async def copied(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)

    client = GmsClient(tmp_path)
    async with await asyncio.start_unix_server(late, tmp_path / GRPC_SOCKET):
        assert len(await client.devices(wait_s=0.0)) == 1
        await client.close()
        for relay in filter(None, relays):
            relay.cancel()
        await asyncio.gather(*filter(None, relays), return_exceptions=True)
        # The transports end in the next turns of the loop.
        await asyncio.sleep(0.1)
