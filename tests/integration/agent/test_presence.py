"""What a node says of itself, and its fault switch, which is there only if it was asked for."""

import asyncio
import json
import platform

import pytest

from snapshot_shared import subjects
from snapshot_shared.api import FactsReply, Fault, SimReply, SimRequest
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import NotFound
from snapshot_shared.orders import ArtifactRef, Presence
from tests.support.agent_rig import PATIENCE_S, Rig, killed

MIB = 1024 * 1024


async def test_a_node_is_present_at_once_and_names_its_devices_as_soon_as_gms_is_up(
    rig: Rig,
) -> None:
    subject = f"$KV.{subjects.NODES_BUCKET}.{rig.node}"
    async with rig.bus.listening(subject) as queue, rig.agent():
        first = decode_json((await asyncio.wait_for(queue.get(), PATIENCE_S)).data, Presence)
        assert first.node == rig.node
        assert first.devices == []
        assert first.drivers == ["cooperative", "respawn"]
        assert first.artifact_root == str(rig.root)
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
    uid = "00000000-0000-4000-8000-000000000001"
    gone = ArtifactRef(
        namespace="default", content_uid=uid, generation=1, root_digest="sha256:" + "0" * 64
    )
    question = subjects.rpc(rig.node, "agent", "status")
    async with rig.agent():
        plain = decode_json(await rig.bus.request(question, b""), FactsReply)
        asked = decode_json(await rig.bus.request(question, encode_json(gone)), FactsReply)
        noise = decode_json(await rig.bus.request(question, b"[]"), FactsReply)
    assert (plain.facts.arch, plain.facts.kernel) == (platform.machine(), platform.release())
    assert (plain.source, plain.failure) == (None, None)
    assert asked.facts == plain.facts
    assert asked.failure is not None
    assert asked.failure.reason == "ArtifactRootEmpty"
    assert noise.failure is not None
    assert noise.failure.reason == "InvalidMessage"


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
