"""What happened, from the store, the reports and the spans."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import OwnerReference, time_of
from snapshot_operator.core.restore import restore_for
from snapshot_shared.errors import Failure
from snapshot_shared.ids import derived_uid
from snapshot_shared.spans import SpanRecord
from snapshotctl.domain.targets import Target
from snapshotctl.views import related, timeline
from snapshotctl.views.related import ObjectChanged, RelatedObjects
from tests.support import builders
from tests.support.builders import NOW, job, order, report, row
from tests.support.objects import checkpoint
from tests.unit.tables import each

UID, OTHER = derived_uid("content", "snap"), derived_uid("pod", "other")
SEAL = order("seal", UID)


def _texts(*objects: AnyObject, reports: list[object] = []) -> list[str]:  # noqa: B006 - not changed
    names = timeline.names_of(objects)
    return [item.text for item in timeline.timeline(objects, reports, [], names)]  # type: ignore[arg-type]


def test_a_report_of_both_the_store_and_the_stream_is_one_event_also_of_what_is_gone() -> None:
    item = builders.ended(SEAL, "sealed")
    assert item.final is not None
    shown = _texts(builders.content(orders=[item]), reports=[item.final])
    assert [line for line in shown if "sealed" in line] == ["seal sealed by agent@node-1"]
    found = timeline.timeline([], [report(SEAL, "accepted")], [], {})
    assert [item.object for item in found] == [f"(gone) {UID}"]


def test_all_is_in_order_and_a_condition_comes_after_what_led_to_it() -> None:
    late = replace(SEAL, ordered_at=time_of(NOW - 10 + 0.5))
    value = builders.content(orders=[late], conditions=[row("Ready", "False", "Capturing", "m")])
    accepted = report(late, "accepted", n=1, at=NOW - 10 + 0.6)
    assert _texts(value, reports=[accepted]) == [
        "created",
        "seal ordered from agent@node-1",
        "seal accepted by agent@node-1",
        "Ready is False: Capturing: m",
    ]


def test_a_pod_is_placed_before_its_orders_of_the_same_second() -> None:
    run = order("run", derived_uid("pod", "worker"), at=NOW - 10 + 0.2)
    rows = [row("PodScheduled", "True", "Scheduled", "on node-1")]
    assert _texts(builders.pod(orders=[run], conditions=rows)) == [
        "created",
        "PodScheduled is True: Scheduled: on node-1",
        "run ordered from agent@node-1",
    ]


def test_the_end_of_a_worker_is_not_told_at_the_time_at_which_it_was_made_unready() -> None:
    run = builders.ended(order("run", derived_uid("pod", "worker"), at=NOW - 10 + 0.2), "exited")
    rows = [row("Ready", "False", "ContainerExited", "exit 1")]
    shown = _texts(builders.pod(orders=[run], conditions=rows))
    assert not [line for line in shown if "Ready is False" in line]
    assert shown[-1].startswith("run exited by agent@node-1")


def test_a_failure_a_later_attempt_and_an_exit_code_are_shown() -> None:
    failure = Failure(reason="NoSpace", message="full")
    again = builders.ended(replace(SEAL, attempt=2), "failed", failure)
    shown = _texts(builders.content(orders=[again]))
    assert "seal failed by agent@node-1 (attempt 2): NoSpace: full" in shown
    run = order("run", derived_uid("pod", "worker"))
    exited = builders.ended(run, "exited", exit_code=3)
    assert "run exited by agent@node-1 with exit code 3" in _texts(builders.pod(orders=[exited]))
    lost = replace(SEAL, state="lost", ended_at=time_of(NOW))
    assert "seal was lost with its node: NodeLost" in _texts(builders.content(orders=[lost]))


def _span(name: str, error: str = "", **attributes: str) -> SpanRecord:
    times = {"start_ns": int(NOW * 1e9), "end_ns": int(NOW * 1e9) + 2_000_000_000}
    return builders.span(name=name, error=error, attributes=attributes, **times)


@each(
    ("span", "is_ours"),
    [
        (_span("write-root", "no", **{"snapback.order.id": SEAL.order}), True),
        (_span("spawn", "no", **{"snapback.order.id": f"run-{OTHER}"}), False),
        (_span("capture", **{"snapback.content": builders.content().metadata.name}), True),
        (_span("capture", **{"snapback.content": "c"}), False),
        (_span("apply"), True),
    ],
)
def test_a_trace_that_others_share_tells_of_them_nothing(span: SpanRecord, is_ours: bool) -> None:
    assert timeline.is_about(span, [builders.content()]) is is_ours


def test_a_span_is_an_event_when_its_step_failed_or_when_it_is_the_whole() -> None:
    names = {UID: "content/x"}
    by_order = {"snapback.order.id": SEAL.order}
    failed = list(timeline.of_span(_span("write-root", "no", **by_order), names))
    assert [(item.object, item.text) for item in failed] == [
        ("content/x", "step write-root of seal failed after 2.00 s: no")
    ]
    [gone] = timeline.of_span(_span("write-root", "no", **by_order), {})
    assert gone.object == f"(gone) {UID}"
    [whole] = timeline.of_span(_span("capture", **{"snapback.content": "c"}), names)
    assert (whole.object, whole.text) == ("snapshotcontent/c", "the capture ended after 2.00 s")
    assert not list(timeline.of_span(_span("write-root", **by_order), names))


def test_an_event_is_one_flat_value_without_what_is_empty() -> None:
    [happening] = timeline.timeline([], [report(SEAL, "accepted", n=1)], [], {UID: "content/x"})
    assert happening.value() == {
        "time": "1970-01-12T13:46:36.000Z",
        "source": "report",
        "object": "content/x",
        "what": "seal accepted by agent@node-1",
        "node": "node-1",
        "order": SEAL.order,
        "attempt": 1,
    }


@pytest.mark.parametrize(
    ("name", "where"),
    [
        (f"snapshotcontent/snapshotcontent-{UID}", f"content {UID[:8]}…"),
        (f"snapshotrestore/restore-{UID}", f"restore {UID[:8]}…"),
        ("snapshot/restore-it", "snapshot/restore-it"),
    ],
)
def test_a_name_that_holds_a_whole_uid_is_cut_for_lists(name: str, where: str) -> None:
    [item] = timeline.timeline([], [report(SEAL, "accepted")], [], {UID: name})
    assert (item.object, item.where) == (name, where)


def _linked(value: AnyObject, root: AnyObject) -> list[str]:
    return [str(link) for link in related.links(value, root)]


def test_the_story_of_a_restored_pod_leads_to_its_restore_and_what_that_reads() -> None:
    target, restore = builders.pod(source="snap"), builders.restore("snap")
    assert _linked(target, target) == [f"snapshotrestore/{restore.metadata.name}"]
    # The name that the operator gives it.
    assert restore.metadata.name == restore_for(target).metadata.name
    assert _linked(restore, target) == ["snapshot/snap", "dynamocheckpoint/snap"]
    named = builders.restore("snap", content_name="c")
    assert _linked(named, target) == ["snapshotcontent/c"]
    assert _linked(named, named) == ["pod/worker", "snapshotcontent/c"]


def test_the_stories_of_a_restore_and_of_a_snapshot_end_at_what_they_read() -> None:
    target, restore = builders.pod(source="snap"), builders.restore()
    snapshot = builders.snapshot(bound_snapshot_content_name="c")
    for root in (target, restore):
        assert _linked(snapshot, root) == ["snapshotcontent/c"]
        assert _linked(builders.content(), root) == []
    assert _linked(target, snapshot) == []
    assert _linked(snapshot, snapshot) == ["pod/worker", "snapshotcontent/c"]


def test_a_pod_and_its_restore_share_their_events_without_those_of_the_capture() -> None:
    run = order("run", derived_uid("pod", "worker"))
    load = order("load", derived_uid("restore", "r"), part="gpu-0", at=NOW)
    target = builders.pod(source="snap", orders=[run])
    restore = builders.restore("snap", orders=[load])
    read = builders.content(orders=[SEAL])
    for members in ([target, restore, read], [restore, target, read]):
        found = RelatedObjects(members[0], members)
        assert [item.verb for _, item in found.orders] == ["run", "load"]
        assert found.restore is restore
    assert RelatedObjects(read, [read, target]).restore is None


OF_JOB = OwnerReference(
    api_version="batch/v1", kind="Job", name="llm", uid=derived_uid("job", "llm")
)


def _pod_of(uid: str, *owners: OwnerReference) -> Pod:
    return builders.with_meta(builders.pod(), uid=uid, owner_references=[*owners])


def test_the_pods_of_a_job_are_those_that_it_owns() -> None:
    active = job(active=1)
    [link] = related.links(active, active)
    assert (link.kind.name, link.namespace, link.name) == ("Pod", "default", None)
    assert related.owns(active, _pod_of("u", OF_JOB))
    assert not related.owns(active, _pod_of("u"))


def test_a_pod_that_only_has_the_name_of_the_one_in_the_story_does_not_belong() -> None:
    source, newer = builders.pod(), _pod_of(derived_uid("pod", "newer"))
    for story in ([builders.restore()], [builders.snapshot(), builders.content()]):
        assert not related.is_namesake(source, [*story, source])
        assert related.is_namesake(newer, [*story, newer])
    # A try of the job that failed belongs to the story of its capture.
    first = _pod_of(derived_uid("pod", "try"), OF_JOB)
    members = [builders.snapshot(), source, first, builders.content()]
    assert not related.is_namesake(first, [*members, job(failed=1)])
    assert related.is_namesake(first, members)


@pytest.mark.parametrize(("failed", "links"), [(0, []), (1, ["pod/*"])])
def test_the_only_try_of_a_job_is_named_by_the_snapshot_and_others_are_looked_for(
    failed: int, links: list[str]
) -> None:
    root = checkpoint()
    assert _linked(job(failed=failed), root) == ["pod/*"]
    root = builders.with_status(root, snapshot_name="llm")
    assert _linked(job(failed=failed), root) == links


def test_a_change_belongs_to_an_object_and_to_what_owns_it_or_is_named_by_its_label() -> None:
    uid, owner = derived_uid("x", "1"), derived_uid("x", "2")
    target = Target(KINDS["Pod"], "default", "worker")
    news = ObjectChanged("ADDED", target, uid, frozenset({owner}))
    assert news.concerns({uid})
    assert news.concerns({owner})
    assert not news.concerns({derived_uid("x", "3")})
    snapshot = derived_uid("snapshot", "snap")
    meta = replace(builders.content().metadata, labels={"nvidia.com/snapshot-uid": snapshot})
    assert related.owners_of(meta) == {snapshot}
    assert related.owners_of(builders.restore().metadata) == {derived_uid("pod", "worker")}


def test_a_namespace_holds_its_contents_and_every_node() -> None:
    assert related.is_in(builders.content(), "default")
    assert not related.is_in(builders.content(), "other")
    assert related.is_in(builders.with_meta(builders.node(), namespace=None), "other")
