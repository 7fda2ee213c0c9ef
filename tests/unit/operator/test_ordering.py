"""The orders of a capture and a restore: their time, their tries, and what children get of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.facts import ContainerStatus
from snapshot_api.meta import time_of
from snapshot_operator.core import ordering
from snapshot_operator.core.checkpoint import CheckpointView, job_name, reconcile
from snapshot_operator.core.fold import ANSWER_GRACE_S
from snapshot_operator.core.plan import FINALIZER, Create
from snapshot_operator.core.restore import restore_for
from snapshot_shared.ids import check_name
from snapshot_shared.orders import ArtifactRef, DeviceRef, Driver, PodRef, RunOrder, StopOrder
from tests.support import builders
from tests.support.builders import UID, with_meta, with_spec, with_status
from tests.support.objects import checkpoint, checkpoint_document, restore_document
from tests.support.operator_world import DIGEST, World, payload, world_of

TRACE = f"00-{'a' * 32}-{'b' * 16}-01"
BUDGETS_S = {
    "run": 60.0,
    "prepare": 300.0,
    "dump": 600.0,
    "save": 1800.0,
    "seal": 120.0,
    "release": 60.0,
    "load": 1800.0,
    "commit": 60.0,
    "restore": 600.0,
    "stop": 60.0,
    "drop": 60.0,
    "delete": 600.0,
}


@pytest.fixture
async def world() -> World:
    return await world_of(2)


async def test_every_order_has_the_time_of_its_verb_and_begins_with_its_first_try(
    world: World,
) -> None:
    await world.capture()
    await world.perform(restore_document(node="node-2"))
    await world.delete("Pod", "restored")
    await world.remove("DynamoCheckpoint", "llm")
    found = {item.verb: item for item in world.orders.history}
    assert {verb: payload(item)["deadline_s"] for verb, item in found.items()} == BUDGETS_S
    for verb, item in found.items():
        given_s = item.deadline.timestamp() - item.ordered_at.timestamp()
        assert given_s == BUDGETS_S[verb] + ANSWER_GRACE_S
        assert (item.attempt, item.tries) == (1, 1)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        (f"registry.example/llm@{DIGEST}", DIGEST),
        (f"docker-pullable://registry.example:5000/llm@{DIGEST}", DIGEST),
        (DIGEST, DIGEST),
        ("registry.example/llm:latest", ""),
        ("", ""),
    ],
)
async def test_a_capture_is_told_the_digest_of_the_image_that_its_container_runs(
    name: str, known: str
) -> None:
    world = await world_of(1, answered=("run",))
    content, pod = await world.content(), world.cluster.page("Pod")[0]
    aside = ContainerStatus(name="aside", image_id="x")
    main = ContainerStatus(name="main", image_id=name)
    seen: Any = with_status(pod, container_statuses=[aside, main])
    order = ordering.prepare(content, seen, 1, TRACE, 0.0)
    assert payload(order)["image_digest"] == known
    assert payload(ordering.prepare(content, None, 1, TRACE, 0.0))["image_digest"] == ""


@pytest.mark.parametrize(("driver", "more_s"), [("criu", 0.0), ("criu+cuda", 310.0)])
async def test_an_agent_has_time_to_give_a_worker_its_cuda_memory_before_it_goes_on(
    driver: Driver, more_s: float
) -> None:
    world = await world_of(1, answered=("run",))
    held = with_spec(await world.content(), driver=driver)
    release = ordering.release(held, TRACE, 0.0)
    abort, of_memory = ordering.abort_capture(held, "why", TRACE, 0.0, "Resume")
    for order in (release, abort):
        assert payload(order)["deadline_s"] == 60.0 + more_s
        assert order.deadline == time_of(60.0 + more_s + ANSWER_GRACE_S)
    assert (of_memory.service, payload(of_memory)["deadline_s"]) == ("gms", 60.0)


COMMON: dict[str, Any] = {
    "attempt": 3,
    "node": "node-1",
    "owner": UID,
    "deadline_s": 60.0,
    "pod": PodRef(namespace="default", name="p", uid=UID, container="main"),
}


def run_order(traceparent: str = TRACE) -> RunOrder:
    return RunOrder(
        order=f"run-{UID}",
        traceparent=traceparent,
        template_digest=DIGEST,
        devices=[DeviceRef(ordinal=0, uuid="GPU-a")],
        **COMMON,
    )


def test_the_next_try_of_an_order_is_the_same_order_with_a_span_of_its_own() -> None:
    first = ordering.status_of(run_order(), "agent", 100.0, tries=2)
    again: Any = ordering.again(first, 500.0)
    assert (again.attempt, again.tries, again.ordered_at) == (4, 3, time_of(500.0))
    assert again.deadline == time_of(500.0 + 60.0 + ANSWER_GRACE_S)
    before, after = payload(first), payload(again)
    assert after["traceparent"] != before["traceparent"]
    assert after["traceparent"].split("-")[1] == "a" * 32
    assert {**after, "attempt": 3, "traceparent": TRACE} == before


def test_an_order_without_a_trace_has_none_in_its_next_try() -> None:
    item = ordering.status_of(run_order(traceparent=""), "agent", 100.0)
    again: Any = ordering.again(item, 500.0)
    assert payload(again).get("traceparent", "") == ""
    assert ordering.order_span("", f"run-{UID}", 1) == ""


def test_an_order_of_an_unknown_version_is_not_given_again() -> None:
    item = ordering.status_of(run_order(), "agent", 100.0)
    unknown = replace(item, payload=msgspec.Raw(b'{"type": "snapback.v9.run_order"}'))
    assert ordering.again(unknown, 500.0) is None


@pytest.mark.parametrize(("namespace", "named"), [("team", "team"), (None, "default")])
def test_an_order_names_the_pod_in_its_namespace(namespace: str | None, named: str) -> None:
    pod = with_meta(builders.pod(source="llm"), namespace=namespace, uid=UID)
    assert ordering.pod_ref(pod, "main").namespace == named
    artifact = ArtifactRef(namespace="x", content_uid=UID, generation=1, root_digest=DIGEST)
    value = with_status(with_meta(restore_for(pod), uid=UID), attempt=1, node_name="node-1")
    assert payload(ordering.restore(value, artifact, "", 0.0))["pod"]["namespace"] == named


def test_only_what_cleans_and_is_due_is_given_again() -> None:
    run = ordering.status_of(run_order(), "agent", 100.0)
    stop = ordering.status_of(StopOrder(order=f"stop-{UID}", **COMMON), "agent", 100.0)
    assert ordering.renewed([run, stop], 174.0) is None
    assert ordering.renewed([run, stop], 175.0, besides="stop") is None
    kept, again = ordering.renewed([run, stop], 175.0) or []
    assert (kept, again.attempt) == (run, 4)


@pytest.mark.parametrize(("after_s", "left_s"), [(400.0, 600), (999.5, 1)])
async def test_a_child_gets_the_time_that_its_owner_has_left_and_one_second_at_least(
    world: World, after_s: float, left_s: int
) -> None:
    await world.apply(checkpoint_document(activeDeadlineSeconds=1000))
    (run,) = world.open("run")
    world.now += after_s
    await world.answer_well(run)
    snapshot = await world.get("Snapshot", "llm")
    assert snapshot.spec.deadline_seconds == left_s
    assert (await world.content()).spec.deadline_seconds == left_s
    assert snapshot.metadata.finalizers == [FINALIZER]
    assert FINALIZER in (await world.content()).metadata.finalizers


async def test_a_snapshot_that_a_checkpoint_makes_is_adopted_from_the_first_moment_on() -> None:
    world = await world_of(1, answered=("run",))
    value, job = await world.get("DynamoCheckpoint", "llm"), await world.get("Job", "llm")
    young = with_status(value, snapshot_name="")
    plan = reconcile(CheckpointView(young, job, world.cluster.page("Pod")[0]), world.now)
    (made,) = [write.value for write in plan.writes if isinstance(write, Create)]
    assert made.metadata.finalizers == [FINALIZER]


@pytest.mark.parametrize(("policy", "limit"), [("Resume", None), ("Terminate", 1000)])
async def test_the_job_of_a_worker_that_goes_on_has_no_deadline(
    world: World, policy: str, limit: int | None
) -> None:
    await world.apply(checkpoint_document(activeDeadlineSeconds=1000, sourcePolicy=policy))
    assert (await world.get("Job", "llm")).spec.active_deadline_seconds == limit


@pytest.mark.parametrize("kind", ["Job", "Snapshot"])
async def test_a_name_that_something_else_has_fails_the_checkpoint(world: World, kind: str) -> None:
    await world.capture("first")
    child = await world.get(kind, "first")
    stranger = replace(child.metadata, name="llm", owner_references=[], uid="", finalizers=[])
    await world.cluster.create(replace(child, metadata=stranger))
    await world.apply(checkpoint_document())
    await world.advance(1.0)
    found = await world.get("DynamoCheckpoint", "llm")
    rows = found.status.conditions
    assert (found.status.phase, rows[0].reason) == ("Failed", f"{kind}NameConflict")
    assert f"{kind} llm exists and belongs to something else" in rows[0].message


LONGEST = f"{'a' * 62}.{'b' * 190}"


@pytest.mark.parametrize("name", ["llm", "a" * 63, "a.b"])
def test_the_job_of_a_checkpoint_has_its_name_where_a_label_can_have_it(name: str) -> None:
    assert job_name(checkpoint(name)) == name


@pytest.mark.parametrize(
    "name", ["a" * 64, LONGEST, f"{'a' * 45}.{'b' * 20}", f"{'a' * 44}--{'b' * 20}"]
)
def test_the_job_of_a_longer_one_has_a_name_of_63_characters_at_most(name: str) -> None:
    found = job_name(checkpoint(name))
    assert len(check_name(found)) <= 63
    assert found[:40] == name[:40]
    assert ".-" not in found
    assert found == job_name(checkpoint(name))
    assert found != job_name(checkpoint(name[:-1] + "c"))


async def test_a_checkpoint_and_a_pod_of_the_longest_names_are_captured_and_restored() -> None:
    world = await world_of(2)
    await world.capture(LONGEST)
    assert (await world.get("DynamoCheckpoint", LONGEST)).status.phase == "Ready"
    pod = f"{'p' * 62}.{'q' * 190}"
    await world.perform(restore_document(LONGEST, pod))
    assert (await world.restore(pod)).status.phase == "Restored"
