"""A pod that asks for a certain source, or does not wait for any, is restored from no other."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from msgspec.structs import replace

from snapshot_api.facts import Container, Pod
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.v1alpha1.restore import SnapshotRestore
from snapshot_operator.core.restore import RestoreView, reconcile, restore_for
from snapshot_operator.core.restore_request import RestoreRequest, request_in
from snapshot_shared.orders import Driver
from snapshot_shared.transitions import Restore
from tests.support import builders
from tests.support.builders import with_meta, with_spec, with_status
from tests.support.objects import restore_document
from tests.support.operator_world import World, written
from tests.unit.tables import each


def marks(**annotations: str) -> dict[str, str]:
    return {f"nvidia.com/{name.replace('_', '-')}": text for name, text in annotations.items()}


def pod(*cold: str, **annotations: str) -> Pod:
    found = builders.pod(phase="Running", node_name="node-1", cold_containers=list(cold))
    found = with_spec(found, containers=[Container(name="main"), Container(name="engine")])
    return with_meta(found, annotations=marks(restore_from="a", **annotations))


def ended(found: Pod, content: SnapshotContent | None = None) -> Any:
    """Return the failure with which a decision ends the restore of a pod, if it does."""
    view = RestoreView(restore_for(found), found, content, missing="none yet")
    status = written(reconcile(view, 0.0)).status
    assert (status.state is Restore.FAILED) == (status.failure is not None)
    return status.failure


def test_nothing_is_restored_into_a_worker_that_was_started_cold() -> None:
    failure = ended(pod("main", "engine"))
    assert failure.reason == "NotInStandby"
    assert "SNAPSHOT_RESTORE_STANDBY=1" in failure.message
    assert "create it again" in failure.next_step


def test_another_container_of_the_pod_may_have_started_cold() -> None:
    assert ended(pod("engine")) is None
    assert ended(pod("main", restore_container="engine")) is None
    assert ended(pod("engine", restore_container="engine")).reason == "NotInStandby"


def test_a_container_that_the_pod_does_not_have_is_none_in_standby() -> None:
    failure = ended(pod(restore_container="proxy"))
    assert failure.reason == "NotInStandby"
    assert failure.message == "the container proxy is none of the pod"


@each("driver", get_args(Driver))
async def test_a_process_is_brought_into_no_container_that_runs_a_worker_of_its_own(
    world: World, driver: Driver
) -> None:
    content = await world.content()
    committed = replace(content.status.committed, driver=driver)
    content = with_status(content, committed=committed)
    assert ended(pod(), content) is None
    failure = ended(with_status(pod(), worker_containers=["main"]), content)
    assert (failure is not None) == (driver in ("criu", "criu+cuda"))
    if failure is not None:
        assert failure.reason == "NotInStandby"
        assert f"nvidia.com/restore-driver: {driver}" in failure.next_step


def test_an_annotation_without_a_value_leaves_open_what_it_is_about() -> None:
    found = request_in({"nvidia.com/restore-from": "a", "nvidia.com/restore-policy": ""})
    assert found == RestoreRequest("a")


async def restored(world: World, **pins: str) -> SnapshotRestore:
    document = restore_document()
    document["metadata"]["annotations"] |= marks(**pins)
    await world.perform(document)
    return await world.restore("restored")


async def pins_of(world: World) -> dict[str, dict[str, str]]:
    content = await world.content()
    checkpoint = await world.get("DynamoCheckpoint", "llm")
    snapshot = await world.get("Snapshot", "llm")
    return {
        "checkpoint": {"restore_from_uid": checkpoint.metadata.uid},
        "snapshot": {"restore_from_uid": snapshot.metadata.uid},
        "content": {"restore_content": content.metadata.name},
        "digest": {"restore_digest": content.status.committed.root_digest},
    }


@pytest.mark.parametrize("pin", ["checkpoint", "snapshot", "content", "digest"])
async def test_a_source_that_is_the_one_asked_for_is_restored(world: World, pin: str) -> None:
    restore = await restored(world, **(await pins_of(world))[pin])
    assert restore.status.state is Restore.RESTORED


@pytest.mark.parametrize("pin", ["checkpoint", "content", "digest"])
async def test_a_source_that_is_another_than_asked_for_is_refused_before_any_order(
    world: World, pin: str
) -> None:
    ((name, found),) = (await pins_of(world))[pin].items()
    before = len(world.orders.history)
    wanted = found[:-1] + ("0" if found[-1] != "0" else "1")
    failure = (await restored(world, **{name: wanted})).status.failure
    assert failure.reason == "SourceMismatch"
    assert failure.values["expected"] == wanted
    verbs = {order.verb for order in world.orders.history[before:]}
    assert not verbs & {"load", "restore"}


async def test_a_source_that_is_to_come_is_waited_for_whatever_it_has_to_be(world: World) -> None:
    document = restore_document(source="later")
    document["metadata"]["annotations"]["nvidia.com/restore-from-uid"] = "u"
    await world.apply(document)
    assert (await world.restore("restored")).status.state is Restore.PENDING


def test_the_container_that_is_named_is_the_one_of_the_restore() -> None:
    assert restore_for(pod(restore_container="engine")).spec.pod_ref.container == "engine"
    assert restore_for(pod()).spec.pod_ref.container == "main"
