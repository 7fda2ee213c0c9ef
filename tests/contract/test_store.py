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

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.facts import Node, NodeSpec, NodeStatus, Pod
from snapshot_api.kinds import KINDS
from snapshot_api.meta import ObjectMeta
from snapshot_operator.core.conditions import seconds, timestamp
from snapshot_operator.kube.store import KubeStore
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.ports import Event, Store
from snapshot_shared.errors import AlreadyExists, Conflict, NotFound
from snapshot_shared.kube_client import KubeClient, load_configuration
from snapshot_shared.tasks import end_all
from tests.scenario.faults import Settings
from tests.scenario.store import SimStore
from tests.support.builders import with_meta, with_status
from tests.support.objects import checkpoint, checkpoint_document, pod_document
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
            is_apart=lambda _process: False,
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


async def test_create_gives_identity(store: Store) -> None:
    stored = await store.create(checkpoint())
    meta = stored.metadata
    assert meta.uid
    assert meta.generation == 1
    assert abs(seconds(meta.creation_timestamp) - time.time()) < 60
    assert await store.read("DynamoCheckpoint", "default", "llm") == stored
    assert await store.find(meta.uid) == stored


async def test_a_document_is_stored_once_and_read_whole(store: Store) -> None:
    document = checkpoint_document()
    template = document["spec"]["job"]["podTemplateSpec"]
    template["metadata"] = {"labels": {"app": "llm"}, "annotations": {}}
    assert await store.read_document(document) is None
    stored = await store.create_document(document)
    assert stored is not None
    assert await store.find(stored.metadata.uid) == stored
    found = await store.read_document(document) or {}
    assert found["metadata"]["uid"] == stored.metadata.uid
    assert found["spec"]["job"]["podTemplateSpec"]["metadata"]["labels"] == {"app": "llm"}
    with pytest.raises(AlreadyExists):
        await store.create_document(document)


async def test_the_spec_of_a_pod_is_read_whole_until_that_pod_is_gone(store: Store) -> None:
    document = pod_document(name="of-a-spec")
    (container,) = document["spec"]["containers"]
    container |= {"image": "worker:1", "args": ["--model", "llama"]}
    pod = await store.create(msgspec.convert(document, Pod))
    assert isinstance(pod, Pod)
    (found,) = (await store.spec_of(pod) or {})["containers"]
    assert (found["image"], found["args"]) == ("worker:1", ["--model", "llama"])
    await store.delete(pod)
    assert await store.spec_of(pod) is None


async def test_labels_and_annotations_are_set_beside_the_others_and_need_the_newest_version(
    store: Store,
) -> None:
    found = [await store.create(checkpoint())]
    for write in (store.label, store.annotate):
        for name, value in (("nvidia.com/a", "1"), ("nvidia.com/b", "2")):
            found.append(await write(found[-1], name, value))
    wanted = {"nvidia.com/a": "1", "nvidia.com/b": "2"}
    assert found[-1].metadata.labels == wanted
    assert wanted.items() <= found[-1].metadata.annotations.items()
    assert found[-1].spec == found[0].spec
    found.append(await store.label(found[-1], "nvidia.com/a", None))
    assert found[-1].metadata.labels == {"nvidia.com/b": "2"}
    versions = [int(value.metadata.resource_version) for value in found]
    assert versions == sorted(set(versions))
    for write in (store.label, store.annotate):
        with pytest.raises(Conflict):
            await write(found[0], "nvidia.com/a", "3")


async def test_a_name_is_taken_until_its_object_of_any_version_is_deleted_and_then_by_another(
    store: Store,
) -> None:
    first = await store.create(checkpoint())
    with pytest.raises(AlreadyExists):
        await store.create(checkpoint())
    await store.update_status(with_status(first, message="newer"))
    assert await store.delete(first) is None
    assert await store.list("DynamoCheckpoint") == []
    second = await store.create(checkpoint())
    assert first.metadata.uid != second.metadata.uid
    assert await store.find(first.metadata.uid) is None
    assert await store.delete(first) is None
    assert await store.find(second.metadata.uid) == second


async def test_a_stale_status_write_is_a_conflict_and_changes_nothing(store: Store) -> None:
    first = await store.create(checkpoint())
    newer = await store.update_status(with_status(first, message="newer"))
    with pytest.raises(Conflict):
        await store.update_status(with_status(first, message="stale"))
    assert await store.find(newer.metadata.uid) == newer
    await store.delete(newer)
    with pytest.raises(NotFound):
        await store.update_status(with_status(newer, message="late"))


async def test_a_status_write_keeps_spec_and_metadata(store: Store) -> None:
    first: Any = await store.create(checkpoint())
    forged = with_meta(first, labels={"a": "b"})
    stored = await store.update_status(with_status(forged, message="x"))
    assert stored.metadata.labels == {}
    assert stored.spec == first.spec


async def test_a_spec_write_keeps_status_raises_the_generation_and_needs_the_newest_version(
    tmp_path: Path,
) -> None:
    """In standalone mode, where the operator itself writes Nodes."""
    with sqlite(tmp_path / "objects.sqlite") as store:
        node: Any = await store.create(Node(metadata=ObjectMeta(name="node-1")))
        seen: Any = await store.update_status(replace(node, status=NodeStatus(version="1")))
        spec = NodeSpec(unschedulable=True)
        wanted = replace(seen, spec=spec, status=NodeStatus(version="forged"))
        stored: Any = await store.update_spec(wanted)
        assert stored.spec.unschedulable
        assert stored.status.version == "1"
        assert stored.metadata.generation == 2
        assert await store.read("Node", None, "node-1") == stored
        with pytest.raises(Conflict):
            await store.update_spec(wanted)
        await store.delete(stored)
        with pytest.raises(NotFound):
            await store.update_spec(stored)


async def test_a_finalizer_keeps_a_deleted_object_until_it_is_taken_off(store: Store) -> None:
    first = await store.create(with_meta(checkpoint(), finalizers=[KEEP]))
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


async def test_a_list_has_all_objects_of_a_kind_and_no_other(store: Store) -> None:
    values = [await store.create(checkpoint(name)) for name in ("a", "b", "c")]
    listed = await store.list("DynamoCheckpoint")
    assert sorted(listed, key=lambda value: value.metadata.name) == values
    assert await store.list("Snapshot") == []


async def test_every_change_of_an_object_is_reported_in_order(store: Store) -> None:
    # A cluster has other objects, such as nodes, whose changes are reported among these.
    reported: list[Event] = []
    store.subscribe(reported.append)
    first = await store.create(checkpoint())
    second = await store.update_status(with_status(first, message="x"))
    await store.delete(second)

    def own() -> list[Event]:
        return [each for each in reported if each.value.metadata.uid == first.metadata.uid]

    await until(lambda: own() and own()[-1].change == "DELETED", "the last change")
    versions = [int(event.value.metadata.resource_version) for event in own()]
    assert versions == sorted(versions)
    assert own()[-1].value == second


async def test_what_was_written_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "objects.sqlite"
    with sqlite(path) as before:
        stored = await before.create(checkpoint())
    with sqlite(path) as after:
        assert await after.find(stored.metadata.uid) == stored
        again = await after.create(checkpoint("other"))
        assert int(again.metadata.resource_version) > int(stored.metadata.resource_version)
