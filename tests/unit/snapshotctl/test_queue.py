"""The queue of each service and the history of one order, put together from three sources."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.facts import Pod
from snapshot_api.meta import OrderStatus, time_of
from snapshot_shared import subjects
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import Failure
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.orders import DeadLetter, Progress, Report, StepTime
from snapshot_shared.spans import SpanRecord, order_context
from snapshot_shared.steps import STEPS
from snapshotctl.domain.exits import WrongArguments
from snapshotctl.views import queue
from snapshotctl.views.queue import DeadMessage, Owned, Queued
from tests.support import builders
from tests.support.builders import payload
from tests.unit.tables import each

UID = "0" * 8 + "-0000-0000-0000-" + "0" * 12
ORDER = f"run-{UID}"
NOW = 100.0
GIVEN = {"payload": payload(attempt=2), "deadline": time_of(150.0)}
ITEM = builders.order("run", UID, attempt=2, node="node.1", at=40.0, **GIVEN)
FAILURE = Failure(reason="SpawnFailed", message="no\x1b[2J such file")


def pod(*items: OrderStatus) -> Pod:
    return builders.pod("w", orders=[*items])


def message(payload: bytes = b'{"attempt": 2}', order: str = ORDER) -> Queued:
    subject = subjects.order(NodeName("node.1"), "agent", OrderId(order))
    return Queued(subject, 7, 41.0, payload)


def report(n: int, kind: Any, **fields: Any) -> Report:
    return builders.told(order=ORDER, attempt=2, n=n, kind=kind, node="node.1", at=n, **fields)


def final(kind: Any, **fields: Any) -> OrderStatus:
    return replace(ITEM, state=kind, final=report(2, kind, **fields))


@each(
    ("item", "on_stream", "step", "state"),
    [
        (ITEM, message(), "", "queued"),
        (ITEM, None, "", "not on the stream"),
        (ITEM, message(b'{"attempt": 1}'), "", "not on the stream"),
        (ITEM, message(b"\xff"), "", "not on the stream"),
        (replace(ITEM, deadline=time_of(99.0)), message(), "", "queued, late"),
        (replace(ITEM, state="accepted"), message(), "", "accepted"),
        (replace(ITEM, state="accepted", attempt=1), None, "spawn", "accepted"),
        (replace(ITEM, state="leased"), None, "", "accepted"),
        (replace(ITEM, state="accepted"), message(), "spawn", "working: spawn"),
        (
            replace(ITEM, state="accepted", deadline=time_of(99.0)),
            None,
            "spawn",
            "working: spawn, late",
        ),
        (final("started"), None, "spawn", "answered: started"),
        (final("failed", failure=FAILURE), None, "", "answered: failed (SpawnFailed)"),
        (replace(ITEM, state="lost"), None, "", "answered: lost"),
    ],
)
def test_an_order_stands_where_its_sources_say(
    item: OrderStatus, on_stream: Queued | None, step: str, state: str
) -> None:
    messages, steps = [on_stream] if on_stream else [], {(ORDER, 2): step}
    owned = [Owned(pod(), item)]
    [line] = queue.order_lines(messages, owned, steps, NOW, answered=True)
    assert line.state == state


TRACE = "a" * 32
TRACEPARENT = f"00-{TRACE}-{'b' * 16}-01"
PAYLOAD = payload(traceparent=TRACEPARENT)
TRACED = replace(ITEM, order=f"dump-{UID}", verb="dump", state="accepted", payload=PAYLOAD)
OF_DUMP = builders.progress(
    order=TRACED.order, attempt=2, node="node.1", step="copy-state", done=2, total=8, at=90.0
)


def span(name: str, attempt: int = 2) -> SpanRecord:
    parent = order_context(TRACEPARENT, TRACED.order, attempt)
    assert parent is not None
    return builders.span(trace_id=TRACE, span_id="c" * 16, parent_id=parent.span_id, name=name)


@each(
    ("spans", "progressed", "step"),
    [
        ([], [], None),
        ([span("freeze")], [], "copy-state"),
        ([span("freeze"), span("copy-state")], [], "thaw"),
        ([span("freeze", attempt=1)], [], None),
        ([span(name) for name in STEPS["dump"]], [], None),
        ([], [OF_DUMP], "copy-state 25%"),
        ([span("freeze")], [OF_DUMP], "copy-state 25%"),
        ([], [replace(OF_DUMP, total=0)], "copy-state"),
        ([], [replace(OF_DUMP, total=0, awaits="a\nb")], "copy-state (a b)"),
        # The last progress may be of a step that is over.
        ([span("freeze"), span("copy-state")], [OF_DUMP], "thaw"),
        ([], [replace(OF_DUMP, attempt=1)], None),
    ],
)
def test_the_step_of_an_order_follows_the_last_that_ended_or_is_the_one_that_moves_bytes(
    spans: list[SpanRecord], progressed: list[Progress], step: str | None
) -> None:
    found = queue.current_steps(progressed, [Owned(pod(), TRACED)], spans)
    assert found.get((TRACED.order, 2)) == step


def test_the_step_of_an_order_is_one_of_those_that_its_driver_has() -> None:
    order = builders.dump_order(order=TRACED.order, traceparent=TRACEPARENT, driver="respawn")
    item = replace(TRACED, payload=msgspec.Raw(encode_json(order)))
    found = queue.current_steps([], [Owned(pod(), item)], [span("freeze"), span("copy-state")])
    assert found == {(TRACED.order, 2): "replace"}


def test_only_the_traces_of_orders_at_work_are_read() -> None:
    queued, done = replace(TRACED, state="ordered"), replace(TRACED, state="lost")
    bare = replace(TRACED, payload=payload())
    owned = [Owned(pod(), item) for item in (TRACED, TRACED, queued, done, bare)]
    assert queue.traces(owned) == [TRACE]
    assert queue.traces(owned[2:]) == []


def test_the_queue_shows_what_is_open_and_on_demand_what_was_answered() -> None:
    other = replace(final("started"), order=f"stop-{UID}", verb="stop")
    owned = queue.owned_orders([pod(ITEM, other)])
    open_ = queue.order_lines([message()], owned, {}, NOW, answered=False)
    assert [(line.order, line.owner, line.state) for line in open_] == [(ORDER, "pod/w", "queued")]
    everything = queue.order_lines([message()], owned, {}, NOW, answered=True)
    assert [line.verb for line in everything] == ["run", "stop"]
    assert queue.table_of_lines(open_, NOW).rows[0][-1] == "60s"


def test_an_order_of_a_restore_is_shown_as_that_of_its_pod() -> None:
    load = replace(ITEM, order=f"load-{UID}-gpu-0", verb="load")
    owned = queue.owned_orders([builders.restore(orders=[load])])
    [line] = queue.order_lines([], owned, {}, NOW, answered=False)
    assert (line.order, line.owner) == (load.order, "pod/worker")


def test_a_message_that_no_object_asks_for_is_shown_and_nothing_steers_the_terminal() -> None:
    strange = Queued("snap.order.node_1.agent.noise\x1b", 9, 90.0, b"\xff{")
    [line] = queue.order_lines([strange], [], {}, NOW, answered=False)
    assert (line.node, line.state, line.owner, line.attempt) == ("node.1", "not wanted", "-", 0)
    assert "\x1b" not in "".join(queue.table_of_lines([line], NOW).rows[0])
    [row] = queue.table_of_reports([report(1, "failed", failure=FAILURE)]).rows
    assert "\x1b" not in row[-1]
    assert row[-1].startswith("SpawnFailed: no")


def test_the_history_of_an_order_has_each_report_once_and_in_order() -> None:
    started = report(2, "started", steps=[StepTime(step="spawn", seconds=0.5)])
    reports = [started, report(1, "accepted")]
    dead = [DeadMessage(3, refused()), DeadMessage(4, refused("snap.order.a.agent.b"))]
    owned = [Owned(pod(), ITEM), Owned(pod(), replace(ITEM, attempt=1))]
    found = queue.order_history(ORDER, message(), owned, [*reports, *reports], {}, dead, NOW)
    assert found is not None
    assert [r.kind for r in found.reports] == ["accepted", "started"]
    assert (found.attempt, found.sequence, found.dead) == (2, 7, [3])
    assert found.payload == {"attempt": 2}
    rows = queue.table_of_reports(found.reports).rows
    assert rows[1] == ("2", "2", "started", "+1.00 s", "spawn 500 ms")


def test_an_order_lives_on_in_its_reports_when_its_object_is_gone() -> None:
    reports = [report(1, "accepted"), report(2, "started")]
    found = queue.order_history(ORDER, None, [], reports, None, [], NOW)
    assert found is not None
    assert (found.state, found.owner) == ("answered: started, its object is gone", "-")
    assert queue.order_history(ORDER, None, [], [], {}, [], NOW) is None


def refused(subject: str | None = None, payload: bytes = b"\x00noise") -> DeadLetter:
    where = {"subject": subject or message().subject, "node": "node.1", "service": "agent"}
    return DeadLetter(**where, sequence=7, at=95.0, failure=FAILURE, payload=payload)


@pytest.mark.parametrize(
    ("payload", "shown"),
    [(b'{"a": 1}', {"a": 1}), (b"\xffno", "\ufffdno"), (b"[" * 5000, "[" * 5000)],
)
def test_any_payload_of_a_dead_message_is_shown(payload: bytes, shown: Any) -> None:
    value = queue.dead_value(DeadMessage(3, refused(payload=payload)))
    assert (value["number"], value["order"], value["payload"]) == (3, ORDER, shown)
    assert queue.table_of_dead([DeadMessage(3, refused())], NOW).rows[0][0] == "3"


def test_a_subject_that_names_no_order_has_none_and_what_is_no_id_is_refused() -> None:
    for subject in ("", "snap.order.a.b", "snap.order.a.nats.x", "snap.order.a.gms.b"):
        assert queue.order_of(subject) == ""
        assert queue.dead_value(DeadMessage(1, refused(subject or "x")))["order"] is None
    assert queue.order_id(ORDER) == ORDER
    with pytest.raises(WrongArguments) as answer:
        queue.order_id("dump-me")
    assert "<verb>-<uid>" in answer.value.next_step
