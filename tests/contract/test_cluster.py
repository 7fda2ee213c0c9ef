"""What every object store must do; run on SQLite in memory and in a file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_operator.adapters.sqlite import SqliteCluster
from snapshot_shared.errors import AlreadyExists, Conflict, NotFound
from snapshot_shared.objects import Node, NodeSpec, NodeStatus, ObjectMeta
from tests.support.objects import checkpoint

NOW = "2026-01-01T00:00:00Z"


@pytest.fixture(params=["memory", "file"])
def cluster(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[SqliteCluster]:
    path = tmp_path / "objects.sqlite" if request.param == "file" else None
    store = SqliteCluster(path, timestamp=lambda: NOW)
    yield store
    store.close()


def with_finalizer(value: Any) -> Any:
    return replace(value, metadata=replace(value.metadata, finalizers=["test/keep"]))


def with_message(value: Any, message: str) -> Any:
    return replace(value, status=replace(value.status, message=message))


async def test_create_gives_identity(cluster: SqliteCluster) -> None:
    stored = await cluster.create(checkpoint())
    meta = stored.metadata
    assert meta.uid
    assert (meta.generation, meta.creation_timestamp) == (1, NOW)
    assert await cluster.get("DynamoCheckpoint", "default", "llm") == stored
    assert await cluster.by_uid(meta.uid) == stored


async def test_a_name_is_taken_once(cluster: SqliteCluster) -> None:
    await cluster.create(checkpoint())
    with pytest.raises(AlreadyExists):
        await cluster.create(checkpoint())


async def test_a_name_used_again_has_another_uid(cluster: SqliteCluster) -> None:
    first = await cluster.create(checkpoint())
    await cluster.delete(first)
    second = await cluster.create(checkpoint())
    assert first.metadata.uid != second.metadata.uid


async def test_every_write_raises_the_resource_version(cluster: SqliteCluster) -> None:
    first = await cluster.create(checkpoint())
    second = await cluster.update_status(with_message(first, "one"))
    assert int(second.metadata.resource_version) > int(first.metadata.resource_version)


async def test_a_stale_status_write_is_a_conflict_and_changes_nothing(
    cluster: SqliteCluster,
) -> None:
    first = await cluster.create(checkpoint())
    newer = await cluster.update_status(with_message(first, "newer"))
    with pytest.raises(Conflict):
        await cluster.update_status(with_message(first, "stale"))
    assert await cluster.get("DynamoCheckpoint", "default", "llm") == newer


async def test_a_status_write_keeps_spec_and_metadata(cluster: SqliteCluster) -> None:
    first: Any = await cluster.create(checkpoint())
    forged = replace(first, metadata=replace(first.metadata, labels={"a": "b"}))
    stored = await cluster.update_status(with_message(forged, "x"))
    assert stored.metadata.labels == {}
    assert stored.spec == first.spec


async def test_a_spec_write_keeps_status_and_raises_the_generation(
    cluster: SqliteCluster,
) -> None:
    node: Any = await cluster.create(Node(metadata=ObjectMeta(name="node-1")))
    told: Any = await cluster.update_status(replace(node, status=NodeStatus(version="1")))
    wanted = replace(told, spec=NodeSpec(unschedulable=True), status=NodeStatus(version="forged"))
    stored: Any = await cluster.update_spec(wanted)
    assert stored.spec.unschedulable
    assert stored.status.version == "1"
    assert stored.metadata.generation == 2
    assert await cluster.get("Node", None, "node-1") == stored


async def test_a_stale_spec_write_is_a_conflict_and_one_to_what_is_gone_is_not_found(
    cluster: SqliteCluster,
) -> None:
    node: Any = await cluster.create(Node(metadata=ObjectMeta(name="node-1")))
    newer = await cluster.update_status(replace(node, status=NodeStatus(version="1")))
    wanted = replace(node, spec=NodeSpec(unschedulable=True))
    with pytest.raises(Conflict):
        await cluster.update_spec(wanted)
    assert await cluster.get("Node", None, "node-1") == newer
    await cluster.delete(newer)
    with pytest.raises(NotFound):
        await cluster.update_spec(wanted)


async def test_a_status_write_to_a_deleted_object_is_not_found(cluster: SqliteCluster) -> None:
    first = await cluster.create(checkpoint())
    await cluster.delete(first)
    with pytest.raises(NotFound):
        await cluster.update_status(with_message(first, "late"))


async def test_a_finalizer_keeps_a_deleted_object_until_it_is_taken_off(
    cluster: SqliteCluster,
) -> None:
    first = await cluster.create(with_finalizer(checkpoint()))
    assert await cluster.delete(first) is False
    marked = await cluster.get("DynamoCheckpoint", "default", "llm")
    assert marked is not None
    assert marked.metadata.deletion_timestamp == NOW
    await cluster.remove_finalizer(marked, "test/keep")
    assert await cluster.get("DynamoCheckpoint", "default", "llm") is None


async def test_delete_spares_a_later_object_of_the_same_name(cluster: SqliteCluster) -> None:
    first = await cluster.create(checkpoint())
    await cluster.delete(first)
    second = await cluster.create(checkpoint())
    await cluster.delete(first)
    assert await cluster.get("DynamoCheckpoint", "default", "llm") == second


async def test_lists_go_on_after_a_key(cluster: SqliteCluster) -> None:
    for name in ("a", "b", "c"):
        await cluster.create(checkpoint(name))
    page = await cluster.list("DynamoCheckpoint", after="default/a", limit=1)
    assert [value.metadata.name for value in page] == ["b"]
    assert len(await cluster.list("DynamoCheckpoint", "other")) == 0


async def test_every_change_is_told_in_order(cluster: SqliteCluster) -> None:
    told: list[tuple[str, str]] = []
    cluster.subscribe(lambda change, value: told.append((change, value.metadata.name)))
    first = await cluster.create(checkpoint())
    second = await cluster.update_status(with_message(first, "x"))
    await cluster.delete(second)
    assert told == [("ADDED", "llm"), ("MODIFIED", "llm"), ("DELETED", "llm")]


async def test_what_was_written_survives_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "objects.sqlite"
    before = SqliteCluster(path, timestamp=lambda: NOW)
    stored = await before.create(checkpoint())
    before.close()
    after = SqliteCluster(path, timestamp=lambda: NOW)
    assert await after.by_uid(stored.metadata.uid) == stored
    again = await after.create(checkpoint("other"))
    assert int(again.metadata.resource_version) > int(stored.metadata.resource_version)
    after.close()
