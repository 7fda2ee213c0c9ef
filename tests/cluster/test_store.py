"""The store of a cluster on a real API server that is cut off, refuses, or loses its history."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import pytest

from snapshot_api.facts import Node
from snapshot_api.kinds import KINDS
from snapshot_operator.kube.store import KubeStore
from snapshot_operator.ports import Event
from snapshot_shared.errors import AlreadyExists, StoreBusy
from snapshot_shared.kube_watch import StoreRewound
from snapshot_shared.tasks import end_all
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import Rig, opened
from tests.support.builders import with_meta, with_status
from tests.support.objects import checkpoint
from tests.support.waiting import until

pytestmark = pytest.mark.cluster

MINE = "dynamocheckpoints"


class Stored(NamedTuple):
    """A store behind the proxy of a rig, and what it has reported."""

    rig: Rig
    store: KubeStore
    events: list[Event]

    def seen(self, name: str) -> list[str]:
        """The changes of an object of this namespace that were reported."""
        wanted = (name, self.rig.namespace)
        found = [(each.change, each.value.metadata) for each in self.events]
        return [change for change, meta in found if (meta.name, meta.namespace) == wanted]

    def named(self, name: str) -> Any:
        return with_meta(checkpoint(name), namespace=self.rig.namespace)

    async def others_create(self, name: str) -> None:
        """Create an object as another client does, and forget its report."""
        await self.rig.post(MINE, self.named(name))
        await until(lambda: self.seen(name), "the new object")
        self.events.clear()


@pytest.fixture
async def rig(kubeconfig: str) -> AsyncIterator[Rig]:
    async with opened(kubeconfig, "store") as found:
        yield found


@pytest.fixture
async def kept(rig: Rig) -> AsyncIterator[Stored]:
    store = KubeStore(rig.client, random.random)
    events: list[Event] = []
    for kind in KINDS:
        await store.list(kind)
    store.subscribe(events.append)
    following = asyncio.ensure_future(store.run())
    yield Stored(rig, store, events)
    await end_all(following)


async def test_what_changed_while_a_watch_was_broken_is_reported(rig: Rig, kept: Stored) -> None:
    await kept.others_create("kept")
    with rig.proxy.lying(Lie("cut")):
        rig.proxy.cut_watches()
        await rig.post(MINE, kept.named("new"))
        await rig.patch(rig.path(MINE, "kept"), metadata={"labels": {"nvidia.com/test": "changed"}})
    await until(lambda: kept.seen("new") and kept.seen("kept"), "the changes", within_s=30.0)
    assert kept.seen("new") == ["ADDED"]
    assert kept.seen("kept") == ["MODIFIED"]


@pytest.mark.parametrize("status", [429, 500, 503])
async def test_a_write_that_the_server_refuses_for_now_is_busy_and_changes_nothing(
    rig: Rig, kept: Stored, status: int
) -> None:
    first: Any = await kept.store.create(kept.named("calm"))
    wanted = with_status(first, message="later")
    with rig.proxy.lying(Lie(status)), pytest.raises(StoreBusy):
        await kept.store.update_status(wanted)
    assert await kept.store.read("DynamoCheckpoint", rig.namespace, "calm") == first
    stored: Any = await kept.store.update_status(wanted)
    assert stored.status.message == "later"


async def test_a_creation_whose_answer_was_lost_is_found_by_the_next_try(
    rig: Rig, kept: Stored
) -> None:
    with rig.proxy.lying(Lie("lost", "POST")), pytest.raises(StoreBusy):
        await kept.store.create(kept.named("once"))
    with pytest.raises(AlreadyExists):
        await kept.store.create(kept.named("once"))
    assert await kept.store.read("DynamoCheckpoint", rig.namespace, "once") is not None


async def test_what_an_agent_announces_is_joined_with_what_kubernetes_says_of_its_node(
    rig: Rig, kept: Stored
) -> None:
    node, *_ = await kept.store.list("Node")
    assert node.metadata.name == "node-1"
    known: Any = await kept.store.update_status(with_status(node, version="1.2"))
    await _cordon(rig, is_on=True)
    try:
        await until(lambda: _cordons(kept.events) == [True], "the cordon")
        joined: Any = await kept.store.read("Node", None, "node-1")
        assert joined.status.version == "1.2"
        assert int(joined.metadata.resource_version) > int(known.metadata.resource_version)
    finally:
        await _cordon(rig, is_on=False)
    assert not {("PUT", "nodes/status"), ("PATCH", "nodes"), ("PATCH", "nodes/status")} & set(
        rig.proxy.requests
    )


async def _cordon(rig: Rig, *, is_on: bool) -> None:
    await rig.patch("/api/v1/nodes/node-1", spec={"unschedulable": is_on})


def _cordons(events: list[Event]) -> list[bool]:
    values = [event.value for event in events]
    return [value.spec.unschedulable for value in values if isinstance(value, Node)]


async def test_an_operator_ends_when_the_history_of_the_api_server_has_gone_back(rig: Rig) -> None:
    store = KubeStore(rig.client, random.random)
    for kind in KINDS:
        await store.list(kind)
    # As an API server whose etcd was restored from a backup: all that it has is older.
    store._versions["Pod"] = str(2**62)
    with (
        rig.proxy.lying(Lie(500, "GET", "pods", times=1)),
        pytest.raises(StoreRewound, match="pods are at version"),
    ):
        async with asyncio.timeout(30.0):
            await store.run()


@pytest.mark.parametrize("lie", [Lie(500, times=2), Lie(404, times=1), Lie("page", times=1)])
async def test_a_first_list_that_fails_is_tried_again(rig: Rig, kept: Stored, lie: Lie) -> None:
    await kept.others_create("there")
    store = KubeStore(rig.client, random.random)
    with rig.proxy.lying(lie):
        async with asyncio.timeout(30.0):
            listed = await store.list("DynamoCheckpoint")
    names = {value.metadata.name for value in listed if value.metadata.namespace == rig.namespace}
    assert names == {"there"}


async def test_a_uid_is_searched_for_once(rig: Rig, kept: Stored) -> None:
    kinds = ("snapshotcontents", "snapshotrestores")
    # Each watch begins with a request of its own.
    await until(lambda: all(rig.proxy.requests["WATCH", kind] for kind in kinds), "the watches")
    rig.proxy.requests.clear()
    gone = [str(uuid.uuid4()) for _ in range(20)]
    assert await kept.store.find(gone[0]) is None
    assert await kept.store.find(gone[0]) is None
    assert [rig.proxy.requests["GET", kind] for kind in kinds] == [1, 1]
    assert await asyncio.gather(*(kept.store.find(uid) for uid in gone)) == [None] * 20
    # Those that ask while one search runs share the next.
    assert max(rig.proxy.requests["GET", kind] for kind in kinds) <= 3


async def test_a_restore_that_was_just_created_is_found_by_its_uid(rig: Rig, kept: Stored) -> None:
    """A search that was made before an object was created says nothing of it."""
    assert await kept.store.find(str(uuid.uuid4())) is None
    reference = {"name": "p", "uid": str(uuid.uuid4())}
    body = {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "SnapshotRestore",
        "metadata": {"name": "r"},
        "spec": {"podRef": reference, "source": "llm"},
    }
    with rig.proxy.lying(Lie("cut", "WATCH")):
        rig.proxy.cut_watches()
        made = await rig.post("snapshotrestores", body)
        found = await kept.store.find(made["metadata"]["uid"])
    assert found is not None
    assert found.metadata.name == "r"


async def test_the_label_of_a_node_is_one_request_and_survives_its_heartbeats(
    rig: Rig, kept: Stored
) -> None:
    node = (await kept.store.list("Node"))[0]
    key = "nvidia.com/test-label"
    rig.proxy.requests.clear()
    labelled = await kept.store.label(node, key, "1")
    assert labelled.metadata.labels[key] == "1"
    heartbeat = {"annotations": {"example.com/heartbeat": uuid.uuid4().hex}}
    await rig.patch(f"/api/v1/nodes/{node.metadata.name}", metadata=heartbeat)
    bare = await kept.store.label(labelled, key, None)
    assert key not in bare.metadata.labels
    assert rig.proxy.requests["PATCH", "nodes"] == 2
    assert [key for key in rig.proxy.requests if key[0] not in ("PATCH", "WATCH")] == []
