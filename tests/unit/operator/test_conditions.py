"""Conditions as Kubernetes has them, that of deprecated fields, and the Events of them all."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer
from kubernetes_asyncio.client import Configuration
from msgspec.structs import replace

from snapshot_api.meta import Condition, OwnerReference
from snapshot_api.v1alpha1.checkpoint import DynamoCheckpoint
from snapshot_operator.core import conditions
from snapshot_operator.core.checkpoint import CheckpointView
from snapshot_operator.core.plan import FINALIZER, NOTHING, Adopt, SetStatus
from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube.controllers import DEPRECATED, deprecated, reconcile_checkpoint
from snapshot_operator.kube.events import MAX_WAITING, EventRecorder, happenings
from snapshot_shared.errors import Failure
from snapshot_shared.kube_client import KubeClient
from snapshot_shared.tasks import end_all
from tests.support import builders
from tests.support.builders import with_meta, with_spec, with_status
from tests.support.objects import checkpoint
from tests.support.operator_world import row_of, written
from tests.unit.tables import each

OWNER = checkpoint()


def told(rows: list[Condition]) -> dict[str, tuple[str, str, str]]:
    return {row.type: (row.status, row.reason, row.message) for row in rows}


def test_a_time_has_whole_seconds_and_can_be_read_back() -> None:
    assert conditions.timestamp(1.9) == "1970-01-01T00:00:01Z"
    assert conditions.seconds("1970-01-01T00:00:01Z") == 1.0


@pytest.mark.parametrize("stamp", ["", "soon", "1970-13-01T00:00:00Z"])
def test_what_is_no_time_is_never_reached(stamp: str) -> None:
    assert conditions.seconds(stamp) == math.inf


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = conditions.pending([], OWNER, 1.0, "Waiting", "for a node")
    again = conditions.pending(first, OWNER, 2.0, "Waiting", "for a pod")
    assert again[0].last_transition_time == first[0].last_transition_time
    assert told(again) == {"Ready": ("False", "Waiting", "for a pod")}
    ready = conditions.ready(again, OWNER, 3.0, "Captured", "all of it")
    assert ready[0].last_transition_time == conditions.timestamp(3.0)
    assert told(ready) == {
        "Ready": ("True", "Captured", "all of it"),
        "Failed": ("False", "Captured", ""),
    }


@pytest.mark.parametrize(
    ("next_step", "message"), [("", "it is full"), ("free some", "it is full. Next: free some")]
)
def test_a_failure_says_what_to_do_next(next_step: str, message: str) -> None:
    failure = Failure(reason="NoSpace", message="it is full.", next_step=next_step)
    rows = conditions.failed([], OWNER, 1.0, failure)
    assert told(rows) == {
        "Ready": ("False", "NoSpace", message),
        "Failed": ("True", "NoSpace", message),
    }


def test_a_message_has_a_limit() -> None:
    rows = conditions.pending([], OWNER, 1.0, "Waiting", "x" * 5000)
    assert len(rows[0].message) == 4096


NOW = 1_000_000.0


def adopted(**job: Any) -> DynamoCheckpoint:
    return with_meta(checkpoint(**job), uid="u", finalizers=[FINALIZER])


def test_those_that_are_not_set_or_ask_for_what_happens_anyway_are_not_named() -> None:
    assert deprecated(adopted()) == []
    assert deprecated(adopted(backoffLimit=0)) == []


def test_each_is_named_by_its_path() -> None:
    value = adopted(backoffLimit=3)
    value = with_spec(value, job=replace(value.spec.job, ttl_seconds_after_finished=0))
    value = with_status(value, location="/checkpoints/a", storage_type="pvc")
    assert deprecated(value) == [
        "spec.job.backoffLimit",
        "spec.job.ttlSecondsAfterFinished",
        "status.location",
        "status.storageType",
    ]


def test_the_condition_comes_with_the_first_status_and_is_written_once() -> None:
    value = adopted(backoffLimit=3)
    plan = reconcile_checkpoint(CheckpointView(value), NOW)
    stored: Any = next(found.new for found in plan.writes if isinstance(found, SetStatus))
    row = row_of(stored, DEPRECATED)
    assert (row.status, row.reason) == ("True", DEPRECATED)
    assert "spec.job.backoffLimit" in row.message
    assert "Next: " in row.message
    assert stored.status.job_name == "llm"
    ready = with_status(stored, phase="Ready")
    assert reconcile_checkpoint(CheckpointView(ready), NOW + 5.0) == NOTHING


def test_one_that_is_over_and_was_written_by_another_product_is_named_too() -> None:
    value = with_status(adopted(), phase="Ready", location="/checkpoints/a")
    new = written(reconcile_checkpoint(CheckpointView(value), NOW))
    assert (new.status.phase, new.status.location) == ("Ready", "/checkpoints/a")


def test_a_checkpoint_is_adopted_after_its_condition_is_written() -> None:
    fresh = replace(adopted(backoffLimit=1), metadata=checkpoint().metadata)
    new = written(reconcile_checkpoint(CheckpointView(fresh), NOW))
    (then,) = reconcile_checkpoint(CheckpointView(new), NOW).writes
    assert isinstance(then, Adopt)


def test_a_checkpoint_does_not_mirror_the_snapshot_of_another_that_has_its_name() -> None:
    ready = with_status(adopted(), phase="Ready")
    stranger = builders.snapshot("llm", conditions=[builders.row("Ready", "False", "Damaged")])
    assert reconcile_checkpoint(CheckpointView(ready, snapshot=stranger), NOW) == NOTHING
    owners = [OwnerReference(api_version="v1", kind="DynamoCheckpoint", name="llm", uid="u")]
    own = with_meta(stranger, owner_references=owners)
    new = written(reconcile_checkpoint(CheckpointView(ready, snapshot=own), NOW))
    assert row_of(new).reason == "Damaged"


def test_nothing_is_said_at_one_that_is_being_deleted() -> None:
    going = with_meta(adopted(backoffLimit=1), deletion_timestamp="2026-01-01T00:00:00Z")
    plan = reconcile_checkpoint(CheckpointView(going), NOW)
    assert not any(isinstance(write, SetStatus) for write in plan.writes)


Row = tuple[str, bool, str, str]


def standing(*rows: Row) -> DynamoCheckpoint:
    return with_status(OWNER, conditions=conditions.with_conditions([], OWNER, 0.0, *rows))


@each(
    ("rows", "type_"),
    [
        ([("Ready", False, "PodPending", "soon")], "Normal"),
        ([("Ready", False, "WorkerNotReady", "see")], "Warning"),
        ([("Ready", False, "Refused", "no quota")], "Warning"),
        ([("Ready", True, "Captured", "1 byte"), ("Failed", False, "Captured", "")], "Normal"),
        ([("Ready", False, "JobGone", "no job"), ("Failed", True, "JobGone", "no job")], "Warning"),
        ([("DeprecatedFieldSet", True, "DeprecatedFieldSet", "one")], "Warning"),
        ([("nvidia.com/Restored", False, "LoadFailed", "no room")], "Warning"),
    ],
)
def test_a_condition_that_gets_another_reason_says_so_once(rows: list[Row], type_: str) -> None:
    _, _, reason, message = rows[0]
    assert list(happenings(standing(), standing(*rows))) == [(type_, reason, message)]
    assert not list(happenings(standing(*rows), standing(*rows)))


@each(("reason", "type_"), [("WaitingForSnapshot", "Normal"), ("NoAgentOnNode", "Warning")])
def test_a_wait_for_a_restore_says_so(reason: str, type_: str) -> None:
    rows = conditions.with_truth([], OWNER, 0.0, RESTORED, "Unknown", reason, "it waits")
    waiting = with_status(OWNER, conditions=rows)
    assert list(happenings(standing(), waiting)) == [(type_, reason, "it waits")]


def test_another_message_for_the_same_reason_is_no_news() -> None:
    rows = [standing(("Ready", False, "PodPending", text)) for text in ("1", "2")]
    assert not list(happenings(*rows))


def test_what_is_in_no_namespace_says_nothing() -> None:
    row = ("Ready", True, "Captured", "1 byte")
    assert not list(happenings(standing(), with_meta(standing(row), namespace=None)))


async def test_events_are_posted_in_order_and_one_that_is_refused_ends_nothing() -> None:
    answers, got = [500, 201, 201], asyncio.Queue[Any]()

    async def answer(request: web.BaseRequest) -> web.Response:
        await got.put((request.path, await request.json()))
        return web.json_response({"code": answers[0]}, status=answers.pop(0))

    reasons = ["PodPending", "WorkerStarting", "Captured"]
    async with (
        RawTestServer(answer) as server,
        KubeClient(Configuration(host=f"http://127.0.0.1:{server.port}")) as client,
    ):
        recorder = EventRecorder(client, lambda: 0.0)
        for reason in reasons:
            recorder.changed(standing(), standing(("Ready", True, reason, "x" * 2000)))
        running = asyncio.ensure_future(recorder.run())
        async with asyncio.timeout(10.0):
            seen = [await got.get() for _ in reasons]
        await end_all(running)
    assert [body["reason"] for _, body in seen] == reasons
    path, body = seen[1]
    assert path == "/api/v1/namespaces/default/events"
    assert body["involvedObject"]["kind"] == "DynamoCheckpoint"
    assert len(body["message"]) == 1024
    assert body["lastTimestamp"] == "1970-01-01T00:00:00Z"


async def test_a_warning_about_an_object_is_posted_once_until_it_is_another() -> None:
    async with KubeClient(Configuration(host="http://127.0.0.1:1")) as client:
        recorder = EventRecorder(client, lambda: 0.0)
        full, denied = (Failure(reason="Refused", message=why) for why in ("full", "denied"))
        for failure in (full, full, denied, denied):
            recorder.warned(standing(), failure)
        # People look at the snapshot of a content.
        recorder.warned(builders.content(), full)
        said = [recorder._waiting.get_nowait() for _ in range(recorder._waiting.qsize())]
    assert {each.type for _, each in said} == {"Warning"}
    assert [(about["kind"], each.reason, each.message[:4]) for about, each in said] == [
        ("DynamoCheckpoint", "Refused", "full"),
        ("DynamoCheckpoint", "Refused", "deni"),
        ("Snapshot", "Refused", "full"),
    ]


async def test_a_warning_that_could_not_wait_is_posted_when_it_comes_again() -> None:
    async with KubeClient(Configuration(host="http://127.0.0.1:1")) as client:
        recorder = EventRecorder(client, lambda: 0.0)
        for number in range(MAX_WAITING):
            recorder.changed(standing(), standing(("Ready", False, f"Reason{number}", "")))
        full = Failure(reason="Refused", message="full")
        recorder.warned(standing(), full)
        recorder._waiting.get_nowait()
        recorder.warned(standing(), full)
        assert recorder._waiting.qsize() == MAX_WAITING
