"""What every object store must do: the rules of a kube-apiserver that the operator leans on."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from snapshot_operator.core.conditions import seconds, timestamp
from snapshot_operator.kube.store import KubeStore
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.ports import Event, Store
from snapshot_shared.errors import AlreadyExists, Conflict, NotFound
from snapshot_shared.kube_client import KubeClient, load_configuration
from snapshot_shared.objects.kinds import KINDS
from snapshot_shared.objects.kubernetes import Node, NodeSpec, NodeStatus
from snapshot_shared.objects.meta import ObjectMeta
from snapshot_shared.tasks import end_all
from tests.scenario.faults import Settings
from tests.scenario.store import SimStore
from tests.support.objects import checkpoint
from tests.support.waiting import until

KEEP = "test/keep"


@contextlib.contextmanager
def sqlite(path: Path | None) -> Iterator[Store]:
    store = SqliteStore(path, timestamp=lambda: timestamp(time.time())).open()
    yield store
    store.close()


class Running(NamedTuple):
    """A process that does not end."""

    name: str = "operator"

    def at_exit(self, *_: Any) -> None: ...


@contextlib.contextmanager
def late() -> Iterator[Store]:
    """The store of the scenarios, whose events come late, in the time of this test."""
    with sqlite(None) as shared:
        world: Any = SimpleNamespace(
            store=shared,
            stores={},
            loop=asyncio.get_running_loop(),
            rng=random.Random(1),
            settings=Settings(stale_s=0.1, lease="lease"),
            apart=set(),
            is_healed=False,
        )
        process: Any = Running()
        found = SimStore(world, process)
        shared.subscribe(found.stored)
        yield found


@contextlib.asynccontextmanager
async def kubernetes(kubeconfig: str) -> AsyncIterator[Store]:
    """A real API server with our CRDs, without objects of ours before and after."""
    async with KubeClient(await load_configuration(kubeconfig)) as client:
        store = KubeStore(client, random.random)
        await emptied(store)
        for kind in KINDS:
            await store.list(kind)
        following = asyncio.ensure_future(store.run())
        try:
            yield store
        finally:
            await end_all(following)
            await emptied(store)


async def emptied(store: Store) -> None:
    for value in await store.list("DynamoCheckpoint"):
        left = await store.delete(value)
        for finalizer in left.metadata.finalizers if left is not None else ():
            await store.remove_finalizer(left, finalizer)


@pytest.fixture(
    params=["memory", "file", "late", pytest.param("kubernetes", marks=pytest.mark.cluster)]
)
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Store]:
    if request.param == "kubernetes":
        kubeconfig = request.getfixturevalue("kubeconfig")
        async with kubernetes(kubeconfig) as store:
            yield store
    elif request.param == "late":
        with late() as store:
            yield store
    else:
        with sqlite(tmp_path / "objects.sqlite" if request.param == "file" else None) as store:
            yield store


@pytest.fixture
def local_store(tmp_path: Path) -> Iterator[Store]:
    """The store of standalone mode, where the operator itself writes Nodes."""
    with sqlite(tmp_path / "objects.sqlite") as store:
        yield store


def with_finalizer(value: Any) -> Any:
    return replace(value, metadata=replace(value.metadata, finalizers=[KEEP]))


def with_message(value: Any, message: str) -> Any:
    return replace(value, status=replace(value.status, message=message))


async def test_create_gives_identity(store: Store) -> None:
    stored = await store.create(checkpoint())
    meta = stored.metadata
    assert meta.uid
    assert meta.generation == 1
    assert abs(seconds(meta.creation_timestamp) - time.time()) < 60
    assert await store.read("DynamoCheckpoint", "default", "llm") == stored
    assert await store.find(meta.uid) == stored


async def test_a_name_is_taken_once(store: Store) -> None:
    await store.create(checkpoint())
    with pytest.raises(AlreadyExists):
        await store.create(checkpoint())


async def test_a_label_is_set_and_removed(store: Store) -> None:
    first = await store.label(await store.create(checkpoint()), "nvidia.com/a", "1")
    second = await store.label(first, "nvidia.com/b", "2")
    assert second.metadata.labels == {"nvidia.com/a": "1", "nvidia.com/b": "2"}
    third = await store.label(second, "nvidia.com/a", None)
    assert third.metadata.labels == {"nvidia.com/b": "2"}
    assert third.spec == first.spec
    with pytest.raises(Conflict):
        await store.label(first, "nvidia.com/a", "3")


async def test_a_name_used_again_has_another_uid(store: Store) -> None:
    first = await store.create(checkpoint())
    assert await store.delete(first) is None
    second = await store.create(checkpoint())
    assert first.metadata.uid != second.metadata.uid
    assert await store.find(first.metadata.uid) is None


async def test_every_write_raises_the_resource_version(store: Store) -> None:
    first = await store.create(checkpoint())
    second = await store.update_status(with_message(first, "one"))
    third = await store.annotate(second, "a", "b")
    versions = [int(value.metadata.resource_version) for value in (first, second, third)]
    assert versions == sorted(set(versions))


async def test_a_stale_status_write_is_a_conflict_and_changes_nothing(store: Store) -> None:
    first = await store.create(checkpoint())
    newer = await store.update_status(with_message(first, "newer"))
    with pytest.raises(Conflict):
        await store.update_status(with_message(first, "stale"))
    assert await store.find(newer.metadata.uid) == newer


async def test_a_status_write_keeps_spec_and_metadata(store: Store) -> None:
    first: Any = await store.create(checkpoint())
    forged = replace(first, metadata=replace(first.metadata, labels={"a": "b"}))
    stored = await store.update_status(with_message(forged, "x"))
    assert stored.metadata.labels == {}
    assert stored.spec == first.spec


async def test_a_spec_write_keeps_status_and_raises_the_generation(local_store: Store) -> None:
    store = local_store
    node: Any = await store.create(Node(metadata=ObjectMeta(name="node-1")))
    seen: Any = await store.update_status(replace(node, status=NodeStatus(version="1")))
    wanted = replace(seen, spec=NodeSpec(unschedulable=True), status=NodeStatus(version="forged"))
    stored: Any = await store.update_spec(wanted)
    assert stored.spec.unschedulable
    assert stored.status.version == "1"
    assert stored.metadata.generation == 2
    assert await store.read("Node", None, "node-1") == stored


async def test_a_stale_spec_write_is_a_conflict_and_one_to_what_is_gone_is_not_found(
    local_store: Store,
) -> None:
    store = local_store
    node: Any = await store.create(Node(metadata=ObjectMeta(name="node-1")))
    newer = await store.update_status(replace(node, status=NodeStatus(version="1")))
    wanted = replace(node, spec=NodeSpec(unschedulable=True))
    with pytest.raises(Conflict):
        await store.update_spec(wanted)
    await store.delete(newer)
    with pytest.raises(NotFound):
        await store.update_spec(wanted)


async def test_a_status_write_to_a_deleted_object_is_not_found(store: Store) -> None:
    first = await store.create(checkpoint())
    await store.delete(first)
    with pytest.raises(NotFound):
        await store.update_status(with_message(first, "late"))


async def test_an_annotation_is_set_beside_the_others_and_needs_the_newest_version(
    store: Store,
) -> None:
    first = await store.create(checkpoint())
    second = await store.annotate(first, "nvidia.com/a", "1")
    third = await store.annotate(second, "nvidia.com/b", "2")
    wanted = {"nvidia.com/a": "1", "nvidia.com/b": "2"}
    assert wanted.items() <= third.metadata.annotations.items()
    with pytest.raises(Conflict):
        await store.annotate(first, "nvidia.com/a", "3")


async def test_a_finalizer_keeps_a_deleted_object_until_it_is_taken_off(store: Store) -> None:
    first = await store.create(with_finalizer(checkpoint()))
    marked = await store.delete(first)
    assert marked is not None
    assert marked.metadata.deletion_timestamp
    assert await store.remove_finalizer(marked, KEEP) is None
    assert await store.read("DynamoCheckpoint", "default", "llm") is None


async def test_a_finalizer_is_put_on_once_an_object_exists_but_not_once_it_goes(
    store: Store,
) -> None:
    first = await store.create(checkpoint())
    kept = await store.add_finalizer(first, KEEP)
    assert kept.metadata.finalizers == [KEEP]
    with pytest.raises(Conflict):
        await store.add_finalizer(first, "test/stale")
    marked = await store.delete(kept)
    assert marked is not None
    with pytest.raises(Conflict):
        await store.add_finalizer(marked, "test/late")


async def test_delete_spares_a_later_object_of_the_same_name(store: Store) -> None:
    first = await store.create(checkpoint())
    await store.delete(first)
    second = await store.create(checkpoint())
    assert await store.delete(first) is None
    assert await store.find(second.metadata.uid) == second


async def test_delete_takes_whatever_version_this_incarnation_has(store: Store) -> None:
    first = await store.create(checkpoint())
    await store.update_status(with_message(first, "newer"))
    assert await store.delete(first) is None
    assert await store.list("DynamoCheckpoint") == []


async def test_a_list_has_all_objects_of_a_kind_and_no_other(store: Store) -> None:
    values = [await store.create(checkpoint(name)) for name in ("a", "b", "c")]
    listed = await store.list("DynamoCheckpoint")
    assert sorted(listed, key=lambda value: value.metadata.name) == values
    assert await store.list("Snapshot") == []


async def test_every_change_of_an_object_is_reported_in_order(store: Store) -> None:
    reported: list[Event] = []
    store.subscribe(reported.append)
    first = await store.create(checkpoint())
    second = await store.update_status(with_message(first, "x"))
    await store.delete(second)
    await until(lambda: reported and reported[-1].change == "DELETED", "the last change")
    versions = [int(event.value.metadata.resource_version) for event in reported]
    assert versions == sorted(versions)
    assert {event.value.metadata.uid for event in reported} == {first.metadata.uid}
    assert reported[-1].value == second


async def test_what_was_written_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "objects.sqlite"
    before = SqliteStore(path, timestamp=lambda: timestamp(time.time())).open()
    stored = await before.create(checkpoint())
    before.close()
    after = SqliteStore(path, timestamp=lambda: timestamp(time.time())).open()
    assert await after.find(stored.metadata.uid) == stored
    again = await after.create(checkpoint("other"))
    assert int(again.metadata.resource_version) > int(stored.metadata.resource_version)
    after.close()
