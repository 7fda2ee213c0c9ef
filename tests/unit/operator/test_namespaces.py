"""Objects of namespaces that are not selected are read and left as they are."""

from __future__ import annotations

from collections.abc import Callable

from snapshot_operator.core.plan import FINALIZER
from snapshot_operator.core.retention import Limits
from snapshot_operator.runtime.world import Selection
from tests.support import builders
from tests.support.objects import checkpoint_document, presence, snapshot_document
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
        await world.deliver(builders.report(run, "started", n=1))
    # A report that is not acknowledged would keep those of other namespaces back.
    assert len(world.stored) == 3
    selected.select("default")
    await world.settle()
    assert len(world.stored) == 3
    world.answered.add((run.order, run.attempt))
    await world.report(run, "ready")
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"


async def test_retention_deletes_nothing_in_a_namespace_that_is_not_selected() -> None:
    selected = Some("default")
    world = World(Limits(count=1), namespaces=selected)
    await world.join(presence("node-1"))
    await world.capture()
    (pod,) = world.cluster.all("Pod")
    for name in ("older", "newer"):
        await world.perform(snapshot_document(name, pod.metadata.name))
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
