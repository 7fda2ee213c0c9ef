"""A world says how an object of a plan looks in it: documents made from that of its owner."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from snapshot_api.facts import Node
from snapshot_operator.core.owning import require_own
from snapshot_operator.core.plan import FINALIZER
from snapshot_operator.kube.shaping import JobShape
from snapshot_shared.errors import Conflict, InvalidManifest
from tests.support import builders
from tests.support.objects import checkpoint_document, pod_document, presence
from tests.support.operator_world import World
from tests.unit.tables import each


def beside(job: Any, _owner: dict[str, Any], nodes: Iterable[Node]) -> list[dict[str, Any]]:
    """Return a Job behind a pod that it needs, whose name is that of the first node."""
    manifest = {"kind": "Job", "metadata": {}, "spec": {}} | msgspec.to_builtins(job)
    owners = manifest["metadata"]["ownerReferences"]
    pod = pod_document(name=min(node.metadata.name for node in nodes))
    pod["metadata"] |= {"namespace": "default", "ownerReferences": owners}
    return [pod, manifest]


async def world_with(*documents: dict[str, Any]) -> World:
    world = World(shapes={"Job": beside})
    await world.join(presence("node-1"))
    await world.apply(*documents)
    return world


async def test_what_a_job_needs_is_made_before_it_and_only_once() -> None:
    world = await world_with(checkpoint_document())
    (pod, job) = (await world.get("Pod", "node-1"), await world.get("Job", "llm"))
    assert pod.metadata.owner_references == job.metadata.owner_references
    # The Job is away, and the pod is there: as after the end of an operator between the two.
    left = await world.store.delete(job)
    assert await world.store.remove_finalizer(left, FINALIZER) is None
    another = world.another()
    await another.sync()
    value = builders.with_meta(job, uid="", resource_version="")
    another.interpreter._shapes = {"Job": beside}
    await another.interpreter._create(value)
    assert await another.get("Job", "llm") is not None


async def test_a_name_that_another_object_has_fails_the_checkpoint_before_its_job() -> None:
    world = await world_with(pod_document(name="node-1"), checkpoint_document())
    row = await world.row("DynamoCheckpoint", type_="Failed")
    assert "there is a Pod node-1 that does not belong to DynamoCheckpoint llm" in row.message
    assert await world.get("Job", "llm") is None


def owned(*owners: tuple[str, str]) -> dict[str, Any]:
    rows = [{"kind": kind, "name": "llm", "uid": uid} for kind, uid in owners]
    return {"kind": "Pod", "metadata": {"name": "p", **({"ownerReferences": rows} if rows else {})}}


@each(
    ("there", "error"),
    [
        (owned(("Job", "1")), None),
        (owned(("ReplicaSet", "2"), ("Job", "1")), None),
        (owned(("Job", "2")), Conflict),
        (owned(("ReplicaSet", "1x")), InvalidManifest),
        (owned(), InvalidManifest),
    ],
)
def test_an_object_that_is_there_is_taken_from_its_own_owner_alone(
    there: dict[str, Any], error: type[Exception] | None
) -> None:
    if error is None:
        require_own(owned(("Job", "1")), there)
        return
    with pytest.raises(error):
        require_own(owned(("Job", "1")), there)


def test_a_template_that_is_none_is_refused_by_its_field() -> None:
    document = checkpoint_document()
    document["spec"]["job"]["podTemplateSpec"] = {"spec": {"containers": [1]}}
    with pytest.raises(InvalidManifest, match=r"spec\.job\.podTemplateSpec is no template"):
        JobShape()(builders.job(), document, ())
