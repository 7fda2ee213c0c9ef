"""Objects of namespaces that are not selected are read and left as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from snapshot_operator.core.plan import FINALIZER
from snapshot_operator.core.retention import Limits
from snapshot_operator.runtime.cluster import key_of
from snapshot_operator.runtime.manager import Input, owner_uid
from snapshot_operator.runtime.world import Selection
from snapshot_shared.orders import Report
from tests.support.objects import checkpoint_document, presence
from tests.support.operator_world import World


class Some(Selection):
    """A selection that a test changes."""

    def __init__(self, *names: str) -> None:
        self.names = set(names)
        self._listeners: list[Callable[[str], None]] = []

    def has(self, namespace: str) -> bool:
        return namespace in self.names

    def subscribe(self, listener: Callable[[str], None]) -> None:
        self._listeners.append(listener)

    def select(self, namespace: str) -> None:
        self.names.add(namespace)
        for listener in self._listeners:
            listener(namespace)


async def test_nothing_is_written_to_an_object_before_its_namespace_is_selected() -> None:
    selected = Some("other")
    world = World(namespaces=selected)
    await world.join(presence("node-1"))
    await world.apply(checkpoint_document())
    left = await world.get("DynamoCheckpoint", "llm")
    assert left.metadata.finalizers == []
    assert left.metadata.generation == 1
    assert await world.get("Job", "llm") is None
    selected.select("default")
    await world.settle()
    assert (await world.get("DynamoCheckpoint", "llm")).metadata.finalizers == [FINALIZER]
    assert await world.get("Job", "llm") is not None


async def test_an_object_whose_namespace_is_selected_no_more_goes_on_where_it_stopped() -> None:
    selected = Some("default")
    world = World(namespaces=selected)
    await world.join(presence("node-1"))
    await world.apply(checkpoint_document())
    (run,) = world.open("run")
    selected.names.clear()
    for _ in range(3):
        owner = world.cluster.by_uid(owner_uid(_started(run.order)))
        assert owner is not None
        item = Input(_started(run.order), lambda: world.stored.append(_started(run.order)))
        world.manager.take(key_of(owner), item)
        await world.settle()
    # A report that is not acknowledged would keep those of other namespaces back.
    assert len(world.stored) == 3
    selected.select("default")
    await world.settle()
    assert len(world.stored) == 3
    world.answered.add((run.order, run.attempt))
    await world.report(run, "ready")
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


def _started(order: str) -> Report:
    return Report(order=order, attempt=1, n=1, kind="started", node="node-1", service="agent", at=0)


async def test_retention_deletes_nothing_in_a_namespace_that_is_not_selected() -> None:
    selected = Some("default")
    world = World(Limits(count=1), namespaces=selected)
    await world.join(presence("node-1"))
    await world.apply(checkpoint_document())
    await world.answer_all()
    (pod,) = world.cluster.all("Pod")
    for name in ("older", "newer"):
        await world.apply(snapshot_document(name, pod.metadata.name))
        await world.answer_all()
        await world.advance(60.0)

    async def retained() -> int:
        await world.retention.run()
        await world.settle()
        snapshots = world.cluster.all("Snapshot")
        return sum(not found.metadata.deletion_timestamp for found in snapshots)

    selected.names.clear()
    assert await retained() == 3
    selected.select("default")
    assert await retained() < 3


def snapshot_document(name: str, pod: str) -> dict[str, Any]:
    return {
        "apiVersion": "nvidia.com/v1alpha1",
        "kind": "Snapshot",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"source": {"podRef": {"name": pod}}},
    }
