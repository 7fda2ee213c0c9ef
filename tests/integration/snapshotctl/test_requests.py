"""Requests to the operator's API over a real server: how old they are, and what they are about."""

from __future__ import annotations

import io
from collections.abc import AsyncIterator

import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.errors import RemoteFailure
from snapshot_shared.ids import NodeName
from snapshot_shared.objects.kinds import KINDS, AnyObject
from snapshotctl.adapters.operator_client import OperatorClient
from snapshotctl.adapters.terminal import Terminal
from snapshotctl.commands.cordon import set_unschedulable
from snapshotctl.commands.delete import delete_as_read
from snapshotctl.domain.servers import Server
from snapshotctl.domain.targets import Target
from tests.support.objects import pod_template, presence
from tests.support.operator_world import World

POD = Target(KINDS["Pod"], "default", "w")
DOCUMENT = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "w"}, **pod_template()}


@pytest.fixture
async def world() -> World:
    """An operator with one pod, for which there is no node."""
    made = World()
    await made.apply(DOCUMENT)
    return made


@pytest.fixture
async def bus(nats_url: str, world: World) -> AsyncIterator[Bus]:
    found = await Bus(nats_url, "operator").connect()
    answers = world.api.endpoints() | world.operations.endpoints()
    endpoints = {subjects.api(verb): handler for verb, handler in answers.items()}
    await found.serve("operator", "0.0.1", {}, endpoints)
    yield found
    await found.close()


class Overtaken(OperatorClient):
    """A client of whom others always get ahead between its reading and its writing."""

    def __init__(self, bus: Bus, world: World) -> None:
        super().__init__(bus, Server("", "test"), world.clock)
        self._world = world

    async def get(self, target: Target) -> AnyObject | None:
        found = await super().get(target)
        if target.kind.name == "Node":
            await super().cordon(NodeName(target.name or ""), unschedulable=True)
        else:
            await super().delete(target)
            await self._world.settle()
            await self._world.apply(DOCUMENT)
        return found


def _screen() -> Terminal:
    return Terminal("json", io.StringIO(), io.StringIO())


async def test_a_request_that_came_in_time_is_carried_out(bus: Bus, world: World) -> None:
    client = OperatorClient(bus, Server("", "test"), lambda: world.now - 1)
    await client.delete(POD)
    assert (await world.get("Pod", "w")).metadata.deletion_timestamp


async def test_a_request_whose_client_has_given_up_is_refused(bus: Bus, world: World) -> None:
    client = OperatorClient(bus, Server("", "test"), lambda: world.now - 60)
    with pytest.raises(RemoteFailure) as refused:
        await client.delete(POD)
    assert refused.value.failure.reason == "RequestExpired"
    assert "compare the clocks" in refused.value.failure.next_step
    assert not (await world.get("Pod", "w")).metadata.deletion_timestamp


async def test_what_was_made_again_since_it_was_read_is_not_deleted(bus: Bus, world: World) -> None:
    before = (await world.get("Pod", "w")).metadata.uid
    with pytest.raises(RemoteFailure) as refused:
        await delete_as_read(Overtaken(bus, world), POD)
    assert refused.value.failure.reason == "Conflict"
    assert "snapshotctl describe pod/w" in refused.value.failure.next_step
    found = (await world.get("Pod", "w")).metadata
    assert found.uid != before
    assert found.deletion_timestamp is None


async def test_a_node_that_was_cordoned_meanwhile_is_not_uncordoned(bus: Bus, world: World) -> None:
    await world.join(presence("node-1"))
    node = NodeName("node-1")
    with pytest.raises(RemoteFailure) as refused:
        await set_unschedulable(Overtaken(bus, world), _screen(), node, unschedulable=False)
    assert refused.value.failure.reason == "Conflict"
    assert "snapshotctl describe node/node-1" in refused.value.failure.next_step
    client = OperatorClient(bus, Server("", "test"), world.clock)
    await set_unschedulable(client, _screen(), node, unschedulable=False)
    (found,) = world.cluster.all("Node")
    assert not found.spec.unschedulable
