"""What a node says of itself, and its fault switch, which is there only if it was asked for."""

import asyncio
import json
import platform
from unittest.mock import Mock

import pytest

from snapshot_agent.adapters import presence
from snapshot_agent.adapters.presence import PresencePublisher
from snapshot_operator.core.presence import LOST_AFTER_S
from snapshot_shared import subjects
from snapshot_shared.api import FactsReply, Fault, SimReply, SimRequest
from snapshot_shared.bus.assets import PRESENCE_TTL_S
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import NotFound
from snapshot_shared.orders import Presence, PresenceDevice
from tests.support.agent_rig import NOWHERE, PATIENCE_S, Rig, failure_of, killed
from tests.support.waiting import until

MIB = 1024 * 1024


async def test_a_node_is_present_at_once_and_names_its_devices_as_soon_as_gms_is_up(
    rig: Rig,
) -> None:
    subject = f"$KV.{subjects.NODES_BUCKET}.{rig.node}"
    async with rig.bus.listening(subject) as queue, rig.agent():
        first = decode_json((await asyncio.wait_for(queue.get(), PATIENCE_S)).data, Presence)
        assert (first.node, first.artifact_root) == (rig.node, str(rig.root))
        assert (first.devices, first.drivers) == ([], ["cooperative", "respawn"])
        assert first.free_bytes > 0

        await rig.gms(devices=2, device_bytes=64 * MIB)
        # Much sooner than with the next beat, which comes after ten seconds.
        second = decode_json((await asyncio.wait_for(queue.get(), 5)).data, Presence)
    assert [device.capacity_bytes for device in second.devices] == [64 * MIB, 64 * MIB]


async def test_a_node_offers_no_device_until_its_pods_were_asked_about(rig: Rig) -> None:
    subject = f"$KV.{subjects.NODES_BUCKET}.{rig.node}"
    rig.answers_pods.clear()
    await rig.gms(devices=1, device_bytes=64 * MIB)
    async with rig.bus.listening(subject) as queue, rig.agent():
        while_unknown = await asyncio.wait_for(queue.get(), PATIENCE_S)
        assert decode_json(while_unknown.data, Presence).devices == []
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(queue.get(), 1.0)
        rig.answers_pods.set()
        # Much sooner than with the next beat, which comes after ten seconds.
        known = decode_json((await asyncio.wait_for(queue.get(), 5)).data, Presence)
    assert len(known.devices) == 1


class OneDevice:
    """The devices of a node."""

    async def devices(self, *, wait_s: float) -> list[PresenceDevice]:
        return [PresenceDevice(index=0, uuid="gpu", product="", capacity_bytes=MIB)]


async def test_a_node_that_was_silent_offers_nothing_until_its_pods_are_asked_about_again(
    rig: Rig,
) -> None:
    """Its devices may have been given to other pods meanwhile."""
    may_offer, stop = asyncio.Event(), asyncio.Event()
    may_offer.set()
    doubt = Mock(side_effect=may_offer.clear)

    async def describe(devices: list[PresenceDevice]) -> Presence:
        return Presence(node=rig.node, boot_id="b", version="0", devices=devices, at=0.0)

    publisher = PresencePublisher(
        rig.bus,
        rig.node,
        OneDevice(),
        describe,
        stop,
        may_offer,
        doubt=doubt,
        every_s=0.05,
    )
    async with rig.bus.listening(f"$KV.{subjects.NODES_BUCKET}.{rig.node}") as queue:

        async def offers(number: int) -> None:
            async with asyncio.timeout(PATIENCE_S):
                while True:
                    # The mark of a removal is empty.
                    data = (await queue.get()).data
                    if data and len(decode_json(data, Presence).devices) == number:
                        return

        running = asyncio.ensure_future(publisher.run())
        await offers(1)
        await offers(1)
        assert may_offer.is_set()
        # As after its time to live.
        await rig.bus.remove(subjects.NODES_BUCKET, rig.node)
        await offers(0)
        doubt.assert_called_once_with()
        may_offer.set()
        await offers(1)
        stop.set()
        await running


async def test_a_node_that_was_silent_asks_about_its_pods_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert PRESENCE_TTL_S < LOST_AFTER_S
    monkeypatch.setattr(presence, "EVERY_S", 0.1)
    async with rig.agent():
        await until(lambda: rig.asked_pods, "the question about the pods")
        # More than once: the first presence may not be there yet.
        while len(rig.asked_pods) < 2:
            await rig.bus.remove(subjects.NODES_BUCKET, rig.node)


async def test_the_agent_is_found_as_a_nats_service(node: Rig) -> None:
    answers = []
    async with node.bus.listening("_INBOX.agents") as queue:
        await node.bus.client.publish("$SRV.INFO.snap-agent", b"", reply="_INBOX.agents")
        while True:
            delivery = await asyncio.wait_for(queue.get(), PATIENCE_S)
            answers.append(json.loads(delivery.data))
            if answers[-1]["metadata"] == {"node": node.node}:
                break
    endpoint = answers[-1]["endpoints"][0]
    assert endpoint["subject"] == f"snap.rpc.agent.{node.node}.status"
    assert (await node.status())["node"] == node.node


async def test_a_node_says_its_facts_and_why_it_cannot_read_those_of_an_artifact(rig: Rig) -> None:
    question = subjects.rpc(rig.node, "agent", "status")
    async with rig.agent():
        plain = decode_json(await rig.bus.request(question, b""), FactsReply)
        asked = decode_json(await rig.bus.request(question, encode_json(NOWHERE)), FactsReply)
        noise = decode_json(await rig.bus.request(question, b"[]"), FactsReply)
    assert (plain.facts.arch, plain.facts.kernel) == (platform.machine(), platform.release())
    assert (plain.source, plain.failure) == (None, None)
    assert asked.facts == plain.facts
    failure_of(asked, "ArtifactRootEmpty")
    failure_of(noise, "InvalidMessage")


REQUEST = encode_json(SimRequest(arm=Fault(action="crash", step="spawn")))


async def test_an_agent_has_a_fault_switch_only_in_a_simulation(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    subject = subjects.rpc(rig.node, "agent", "sim")
    process = await rig.process()
    with pytest.raises(NotFound):
        await rig.bus.request(subject, REQUEST)
    await killed(process)
    monkeypatch.setenv("SNAPBACK_SIM", "1")
    await rig.process()
    answer = await rig.bus.request(subject, REQUEST)
    assert decode_json(answer, SimReply).armed == [Fault(action="crash", step="spawn")]
