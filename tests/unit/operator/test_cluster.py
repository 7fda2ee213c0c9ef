"""The objects in memory: never older than they were, our own writes at once, found by index."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from snapshot_api.kinds import AnyObject
from snapshot_operator.core.controllers import Index
from snapshot_operator.local.store import SqliteStore
from snapshot_operator.ports import Event
from snapshot_operator.runtime.cluster import MAX_REMEMBERED, Cluster, Interest, Key, key_of
from tests.support.blind_store import BlindStore
from tests.support.builders import with_status
from tests.support.objects import checkpoint

KIND = "DynamoCheckpoint"
INDEXES = (
    Index("message", KIND, lambda value: [value.status.message] if value.status.message else []),
    Index("queue", KIND, lambda value: [] if value.status.message else [""], is_queue=True),
    Index("all", KIND, lambda _: [""], by_change=True),
)


class Seen:
    """A cluster, and what it has reported."""

    def __init__(self) -> None:
        self.store = BlindStore(SqliteStore(None, timestamp=lambda: "now").open(), ())
        self.cluster = Cluster(self.store, INDEXES)
        self.changes: list[tuple[AnyObject | None, AnyObject | None]] = []
        self.interests: set[Interest] = set()
        self.firsts: set[Key] = set()
        self.cluster.subscribe(lambda old, new: self.changes.append((old, new)))
        self.cluster.on_touch(self._touched)

    def _touched(self, interests: set[Interest], firsts: set[Key]) -> None:
        self.interests |= interests
        self.firsts |= firsts

    def forget(self) -> None:
        self.changes.clear()
        self.interests.clear()
        self.firsts.clear()


@pytest.fixture
async def seen() -> Seen:
    made = Seen()
    await made.cluster.sync()
    return made


async def test_our_own_write_is_read_at_once_although_no_event_came(seen: Seen) -> None:
    seen.store.hidden.add(KIND)
    stored = await seen.cluster.create(checkpoint())
    assert seen.cluster.get(KIND, "default", "llm") == stored
    newer = await seen.cluster.update_status(with_status(stored, message="x"))
    assert seen.cluster.by_uid(stored.metadata.uid) == newer


async def test_a_late_event_does_not_bring_back_an_older_version(seen: Seen) -> None:
    stored = await seen.cluster.create(checkpoint())
    newer = await seen.cluster.update_status(with_status(stored, message="x"))
    seen.forget()
    seen.store._take(Event("MODIFIED", stored))
    assert seen.cluster.by_uid(stored.metadata.uid) == newer
    assert not seen.changes


async def test_a_late_event_does_not_bring_back_what_is_gone(seen: Seen) -> None:
    stored = await seen.cluster.create(checkpoint())
    await seen.cluster.delete(stored)
    seen.store._take(Event("MODIFIED", stored))
    assert seen.cluster.get(KIND, "default", "llm") is None


async def test_a_late_deletion_spares_the_next_object_of_the_name(seen: Seen) -> None:
    seen.store.hidden.add(KIND)
    first = await seen.cluster.create(checkpoint())
    await seen.store.delete(first)
    second = await seen.store.create(checkpoint())
    assert not await seen.cluster.confirm_gone(key_of(first))
    seen.store.hidden.clear()
    seen.store._take(Event("DELETED", first))
    assert seen.cluster.get(KIND, "default", "llm") == second
    assert seen.cluster.by_uid(first.metadata.uid) is None


async def test_a_live_read_of_what_is_gone_takes_it_out_of_memory(seen: Seen) -> None:
    stored = await seen.cluster.create(checkpoint())
    seen.store.hidden.add(KIND)
    await seen.store.delete(stored)
    assert seen.cluster.get(KIND, "default", "llm") == stored
    assert await seen.cluster.confirm_gone(key_of(stored))
    assert seen.cluster.get(KIND, "default", "llm") is None


async def test_what_came_while_the_store_was_read_is_there(
    seen: Seen, monkeypatch: pytest.MonkeyPatch
) -> None:
    value, has_read, may_answer = checkpoint("one"), asyncio.Event(), asyncio.Event()

    async def read(*key: Any) -> AnyObject | None:
        found = await SqliteStore.read(seen.store._store, *key)
        has_read.set()
        await may_answer.wait()
        return found

    monkeypatch.setattr(seen.store, "read", read)
    asking = asyncio.create_task(seen.cluster.confirm_gone(key_of(value)))
    await has_read.wait()
    made = await seen.cluster.create(value)
    may_answer.set()
    assert await asking is False
    assert seen.cluster.at(key_of(value)) == made
    assert seen.cluster.by_uid(made.metadata.uid) == made


async def test_an_incarnation_is_gone_when_another_one_has_its_name(seen: Seen) -> None:
    stored = await seen.cluster.create(checkpoint())
    assert await seen.cluster.confirm_gone(key_of(stored), uid="another")
    assert not await seen.cluster.confirm_gone(key_of(stored), uid=stored.metadata.uid)


async def test_an_index_follows_every_change(seen: Seen) -> None:
    stored = await seen.cluster.create(checkpoint())
    assert seen.cluster.by_index("message", "x") == []
    newer = await seen.cluster.update_status(with_status(stored, message="x"))
    assert seen.cluster.by_index("message", "x") == [newer]
    other = await seen.cluster.update_status(with_status(newer, message="y"))
    assert seen.cluster.by_index("message", "x") == []
    assert seen.cluster.by_index("message", "y") == [other]
    await seen.cluster.delete(other)
    assert seen.cluster.by_index("message", "y") == []


async def test_a_value_is_touched_when_an_object_comes_or_goes_and_not_when_it_changes(
    seen: Seen,
) -> None:
    stored = await seen.cluster.create(checkpoint())
    newer = await seen.cluster.update_status(with_status(stored, message="x"))
    seen.forget()
    annotated = await seen.cluster.annotate(newer, "a", "b")
    assert ("message", "x") not in seen.interests
    assert ("all", "") in seen.interests
    await seen.cluster.update_status(with_status(annotated, message="y"))
    assert {("message", "x"), ("message", "y")} <= seen.interests


async def test_the_next_of_a_queue_is_woken_when_the_first_leaves_and_no_other(seen: Seen) -> None:
    values = [await seen.cluster.create(checkpoint(name)) for name in ("b", "a", "c")]
    assert seen.cluster.first("queue", "") == key_of(values[0])
    seen.forget()
    await seen.cluster.update_status(with_status(values[2], message="placed"))
    assert not seen.firsts
    await seen.cluster.update_status(with_status(values[0], message="placed"))
    assert seen.firsts == {key_of(values[1])}


async def test_pages_are_in_the_order_of_their_keys(seen: Seen) -> None:
    for name in ("c", "a", "b"):
        await seen.cluster.create(checkpoint(name))
    page = seen.cluster.page(KIND, after="default/a", limit=1)
    assert [value.metadata.name for value in page] == ["b"]
    assert seen.cluster.page(KIND, "other") == []


async def test_what_is_remembered_of_deleted_objects_is_bounded(seen: Seen) -> None:
    for number in range(MAX_REMEMBERED + 10):
        seen.cluster._remember_gone(str(number))
    assert len(seen.cluster._gone) == MAX_REMEMBERED
