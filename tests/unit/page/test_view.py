"""What the page shows, as values: entries of objects, the sections, and the flow of orders."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from msgspec.structs import replace

from snapshot_api.facts import Node, NodeSpec, Pod
from snapshot_api.meta import OrderStatus, time_of
from snapshot_api.v1alpha1.restore import restore_name
from snapshot_api.well_known import ABORT
from snapshot_operator.core.presence import node_absent
from snapshot_page.domain import view
from snapshot_page.domain.details import details, flow, waterfall
from snapshot_page.domain.view import MAX_RUNS, Entry, Facts, entry_of, problems, sections
from snapshot_shared.errors import Failure
from snapshot_shared.orders import DeadLetter, Progress, Report
from snapshot_shared.spans import SpanRecord, message_attributes
from tests.support import builders
from tests.support.builders import report
from tests.support.objects import checkpoint_document, restore_document
from tests.support.operator_world import World, world_of
from tests.unit.tables import each

OWNER = "00000000-0000-0000-0000-000000000001"
CHECKPOINT = "dynamocheckpoints/default/llm"
RESTORED = "pods/default/restored"


async def facts_of(world: World, **more: Any) -> Facts:
    entries: dict[str, Entry] = {}
    for value in await world.everything():
        restore = None
        if isinstance(value, Pod):
            name = restore_name(value.metadata.uid)
            restore = world.cluster.get("SnapshotRestore", value.metadata.namespace, name)
        entry = entry_of(value, restore)  # type: ignore[arg-type]
        entries[entry.key] = entry
    return Facts(entries=entries, presence=world.present, now=world.now, **more)


@pytest.fixture
async def capturing() -> World:
    world = await world_of(1)
    await world.apply(checkpoint_document())
    return world


@pytest.fixture
async def captured() -> World:
    return await world_of(2, captured=True)


@pytest.fixture
async def restored(captured: World) -> World:
    """The same world a second later, once the pod `restored` was restored on node-2."""
    await captured.advance(1.0)
    await captured.apply(restore_document(node="node-2"))
    await captured.answer_all()
    return captured


async def test_no_object_of_a_capture_or_a_restore_is_titled_by_a_uid(restored: World) -> None:
    rows = sections(await facts_of(restored))["objects"]["rows"]
    assert {row["kind"] for row in rows} >= {"SnapshotContent", "SnapshotRestore", "Pod"}
    titles = {row["kind"]: row["title"] for row in rows}
    assert (titles["SnapshotContent"], titles["SnapshotRestore"]) == ("llm", "restored")
    assert not [row["title"] for row in rows if re.search(r"[0-9a-f]{8}-", row["title"])]


async def _ordered(world: World, verb: str, count: int = 1) -> list[OrderStatus]:
    """Answer all orders well until so many of a verb are open, and return these."""
    while len(found := world.open(verb)) < count:
        for item in world.open():
            await world.answer_well(item)
    return found


def rows(facts: Facts, section: str) -> list[dict[str, Any]]:
    return sections(facts)[section]["rows"]  # type: ignore[no-any-return]


def order(verb: str, part: str = "", **fields: Any) -> OrderStatus:
    return builders.order(verb, OWNER, part=part, at=100.0, **fields)


def progress(item: OrderStatus, done: int, total: int, attempt: int = 1) -> Progress:
    return builders.progress(
        order=item.order, attempt=attempt, node=item.node, part="gpu-0", done=done, total=total
    )


async def test_an_object_stands_first_and_what_it_led_to_below_it(captured: World) -> None:
    found = rows(await facts_of(captured), "objects")
    assert [(row["kind"], row["below"]) for row in found] == [
        ("DynamoCheckpoint", False),
        ("Snapshot", True),
        ("SnapshotContent", True),
        ("Pod", True),
    ]
    assert [row["phase"] for row in found] == ["Ready", "Ready", "Ready", "Running"]
    assert {row["state"] for row in found} == {"ok"}


async def test_an_empty_cluster_has_a_command_to_begin_with_and_no_problem() -> None:
    found = sections(Facts(entries={}, context="snapback-x"))
    assert found["problems"] == {"rows": [], "all": 0}
    assert found["about"]["follow"] == ""
    assert found["about"]["commands"]["start"] == [
        "NATS_CONTEXT=snapback-x snapshotctl apply -f deploy/examples/checkpoint.yaml"
    ]
    assert found["about"]["commands"]["nodes"][0] == "nats --context snapback-x kv watch snap_nodes"


async def test_what_is_under_way_comes_first_and_is_followed(captured: World) -> None:
    await captured.apply(restore_document(node="node-2"))
    facts = await facts_of(captured)
    first = rows(facts, "objects")[0]
    assert (first["key"], first["phase"]) == (RESTORED, "Loading")
    assert first["step"]["what"].startswith(("load on", "run on"))
    assert sections(facts)["about"]["follow"] == RESTORED


async def test_a_pod_shows_the_state_of_its_restore_which_stands_below_it(captured: World) -> None:
    await captured.apply(restore_document(node="node-2"))
    seen = {"Pending"}
    while captured.open():
        found = rows(await facts_of(captured), "objects")
        pod = next(row for row in found if row["key"] == RESTORED)
        below = found[found.index(pod) + 1]
        restore = await captured.restore("restored")
        assert (below["kind"], below["name"]) == ("SnapshotRestore", restore.metadata.name)
        assert below["below"]
        assert below["phase"] == pod["phase"] == restore.status.state.value
        assert pod["message"] == below["message"]
        seen.add(pod["phase"])
        await captured.answer_well(captured.open()[0])
    assert seen == {"Pending", "Loading", "Committing", "Restoring"}
    phases = {row["key"]: row["phase"] for row in rows(await facts_of(captured), "objects")}
    assert phases[RESTORED] == "Running"
    assert phases[below["key"]] == "Restored"


async def test_the_details_of_a_restored_pod_have_the_orders_of_its_restore(
    restored: World,
) -> None:
    facts = await facts_of(restored)
    led_to = view.by_owner(facts.entries.values())
    entry = view.traced(facts.entries[RESTORED], led_to)
    values = [restored.cluster.by_uid(one.uid) for one in view.family(entry, led_to)]
    restore = await restored.restore("restored")
    assert values == [await restored.get("Pod", "restored"), restore]
    found = details(entry, [value for value in values if value], [], [], {})
    assert sorted(bar["label"] for bar in found["flow"]["bars"]) == [
        "commit gpu-0",
        "commit gpu-1",
        "load gpu-0",
        "load gpu-1",
        "restore",
        "run",
    ]
    assert [(part["part"], part["total"]) for part in found["parts"]] == [
        ("process", 0),
        ("gpu-0", 1024),
        ("gpu-1", 1024),
    ]
    assert ["restores from", restore.status.content_name] in found["facts"]
    assert found["trace"] == restore.status.traceparent.split("-")[1]


async def test_a_checkpoint_leads_to_the_pods_that_its_job_owns(captured: World) -> None:
    facts = await facts_of(captured)
    found = view.family(facts.entries[CHECKPOINT], view.by_owner(facts.entries.values()))
    kinds = ["DynamoCheckpoint", "Snapshot", "SnapshotContent", "Job", "Pod"]
    assert [entry.kind for entry in found] == kinds


async def test_a_pod_on_a_silent_node_is_unknown_and_no_problem_of_its_own(captured: World) -> None:
    await captured.apply(restore_document(node="node-2"))
    del captured.present["node-2"]
    await captured.see(absent_s=95.0)
    facts = await facts_of(captured)
    pod = next(row for row in rows(facts, "objects") if row["key"] == RESTORED)
    assert (pod["phase"], pod["state"], pod["reason"]) == ("Unknown", "waiting", "NodeSilent")
    assert pod["message"] == "node node-2 is silent: its worker may well run"
    found = problems(list(facts.entries.values()), facts)
    assert [problem["what"] for problem in found] == ["Node node-2 is Lost"]


async def test_progress_of_another_attempt_is_not_shown(capturing: World) -> None:
    saves = await _ordered(capturing, "save")
    old = {saves[0].order: progress(saves[0], 1, 2, attempt=2)}
    assert "total" not in rows(await facts_of(capturing, progress=old), "objects")[0]["step"]
    new = {saves[0].order: progress(saves[0], 1, 1024)}
    step = rows(await facts_of(capturing, progress=new), "objects")[0]["step"]
    assert (step["done"], step["total"]) == (1, 2048)


async def test_what_a_worker_waits_for_is_shown_while_it_waits(capturing: World) -> None:
    (item,) = await _ordered(capturing, "prepare")
    waits = {item.order: replace(progress(item, 0, 0), awaits="1 request under way")}
    step = rows(await facts_of(capturing, progress=waits), "objects")[0]["step"]
    assert step["what"] == f"prepare on {item.node} waits: 1 request under way"
    assert "total" not in step


async def test_a_part_that_has_ended_counts_whole_while_others_go_on(capturing: World) -> None:
    saves = await _ordered(capturing, "save", 2)
    received = {item.order: progress(item, 512, 1024) for item in saves}
    before = rows(await facts_of(capturing, progress=received), "objects")[0]["step"]
    await capturing.answer_well(saves[0])
    after = rows(await facts_of(capturing, progress=received), "objects")[0]["step"]
    assert (before["done"], before["total"]) == (1024, 2048)
    assert (after["done"], after["total"]) == (1536, 2048)
    assert "2 parts" in before["what"]
    assert f"save gpu-0: write on {saves[1].node}" == after["what"]


async def test_a_list_is_bounded_and_says_how_many_there_are() -> None:
    world = World()
    await world.apply(checkpoint_document())
    [one] = [e for e in map(entry_of, await world.everything()) if e.kind == "DynamoCheckpoint"]
    entries: dict[str, Entry] = {}
    for number in range(view.MAX_OBJECTS + 50):
        key = f"dynamocheckpoints/default/llm-{number}"
        value = builders.with_meta(one.value, name=f"llm-{number}", uid=str(number))
        entries[key] = replace(one, key=key, value=value)
    found = sections(Facts(entries=entries))["objects"]
    assert (len(found["rows"]), found["all"]) == (view.MAX_OBJECTS, view.MAX_OBJECTS + 50)


async def test_an_artifact_has_its_size_generation_verdict_and_readers(captured: World) -> None:
    [row] = rows(await facts_of(captured), "artifacts")
    assert (row["generation"], row["parts"], row["verdict"]) == (1, 3, "Committed")
    assert (row["size"], row["snapshot"], row["readers"]) == (2058, "default/llm", [])
    await captured.apply(restore_document(node="node-2"))
    [row] = rows(await facts_of(captured), "artifacts")
    assert row["readers"] == ["default/restored"]


async def test_a_failed_capture_is_one_problem_with_its_next_step(capturing: World) -> None:
    found = await _ordered(capturing, "prepare")
    await capturing.fail(found[0], "NotEligible")
    await capturing.answer_all()
    facts = await facts_of(capturing)
    [problem] = problems(list(facts.entries.values()), facts)
    assert problem["what"] == "DynamoCheckpoint llm failed"
    assert problem["reason"] == "NotEligible"
    assert problem["next"]
    assert problem["open"] == CHECKPOINT


async def test_a_capture_that_a_user_has_aborted_is_no_problem(capturing: World) -> None:
    await _ordered(capturing, "prepare")
    (content,) = capturing.cluster.all("SnapshotContent")
    await capturing.cluster.annotate(content, ABORT, "joe")
    await capturing.settle()
    await capturing.answer_all()
    facts = await facts_of(capturing)
    shown = {row["key"]: row["phase"] for row in rows(facts, "objects")}
    assert shown[CHECKPOINT] == "Failed"
    assert problems(list(facts.entries.values()), facts) == []


async def test_a_damaged_artifact_is_one_problem_and_everything_that_holds_it_is_bad(
    captured: World,
) -> None:
    await captured.apply(restore_document(node="node-2"))
    for item in captured.open():
        if item.verb == "load":
            await captured.fail(item, "ArtifactCorrupt")
    await captured.answer_all()
    facts = await facts_of(captured)
    [row] = rows(facts, "artifacts")
    assert row["verdict"] == "Quarantined"
    phases = {row["key"]: row["phase"] for row in rows(facts, "objects")}
    assert phases[CHECKPOINT] == "Ready (ArtifactCorrupt)"
    assert phases["snapshots/default/llm"] == "Ready (ArtifactCorrupt)"
    found = problems(list(facts.entries.values()), facts)
    assert sorted(problem["what"] for problem in found) == [
        "DynamoCheckpoint llm is damaged",
        "Pod restored failed",
    ]


async def test_a_node_is_ready_cordoned_silent_or_lost() -> None:
    world = await world_of(1)
    [node] = [value for value in await world.everything() if isinstance(value, Node)]
    cases = {
        "Ready": node,
        "Ready,SchedulingDisabled": replace(node, spec=NodeSpec(unschedulable=True)),
        "NotReady": node_absent(node, 20.0, world.now),
        "Lost": node_absent(node_absent(node, 20.0, world.now), 95.0, world.now),
    }
    for phase, value in cases.items():
        entry = entry_of(value)
        facts = Facts(entries={entry.key: entry})
        [row] = rows(facts, "nodes")
        assert row["phase"] == phase
        assert row["seen"] is None
        assert row["gms"] is None
        found = problems([entry], facts)
        assert bool(found) == (phase in ("NotReady", "Lost"))


def test_a_dead_message_is_a_problem_for_a_day_and_its_payload_is_never_shown() -> None:
    newest = DeadLetter(
        subject="snap.order.x",
        node="node-1",
        service="agent",
        sequence=3,
        at=1000.0,
        failure=Failure(reason="Poison", message="bad"),
        payload=b"secret",
    )
    facts = Facts(
        entries={}, dead={"snap.dead.node-1": (3, newest)}, now=1000.0 + view.DEAD_SHOWN_S
    )
    [problem] = problems([], facts)
    assert problem["what"] == "3 dead letters on node-1, the newest for its agent"
    assert "secret" not in json.dumps(problem)
    assert problems([], replace(facts, now=facts.now + 1)) == []


def test_an_operator_that_does_not_answer_is_a_problem_unless_the_bus_is_the_cause() -> None:
    facts = Facts(operator="the operator does not answer: no service")
    [problem] = problems([], facts)
    assert (problem["what"], problem["message"]) == ("Operator", facts.operator)
    [problem] = problems([], replace(facts, bus="not connected to NATS"))
    assert (problem["what"], problem["reason"]) == ("NATS", "BusUnavailable")
    assert problem["message"] == "not connected to NATS"


async def test_a_revision_changes_with_the_object_what_it_led_to_and_every_message(
    captured: World,
) -> None:
    facts = await facts_of(captured)
    led_to = view.by_owner(facts.entries.values())
    entry = view.traced(facts.entries[CHECKPOINT], led_to)
    before = view.revision(entry, facts, led_to)
    content = (await captured.content()).metadata.uid
    reports = view.revision(entry, replace(facts, marks={content: 1}), led_to)
    spans = view.revision(entry, replace(facts, marks={entry.trace: 1}), led_to)
    moved = view.revision(entry, replace(facts, marks={f"{content}/progress": 1}), led_to)
    assert len({before, reports, spans, moved}) == 4
    assert view.without_progress(before) == view.without_progress(moved)
    assert view.without_progress(before) != view.without_progress(reports)


async def test_details_hold_neither_a_spec_nor_an_environment() -> None:
    world = World()
    secret = [{"name": "API_KEY", "value": "TOP-SECRET"}]
    document = restore_document()
    document["metadata"]["annotations"] = {}
    document["spec"]["containers"][0]["env"] = secret
    await world.apply(document)
    pod = await world.get("Pod", "restored")
    found = json.dumps(details(entry_of(pod), [pod], [], [], {}))
    assert "TOP-SECRET" not in found
    assert "API_KEY" not in found


async def test_of_many_captures_the_newest_are_listed_and_all_are_counted(captured: World) -> None:
    content = await captured.content()
    entries: dict[str, Entry] = {}
    for number in range(MAX_RUNS + 5):
        one = builders.with_meta(content, name=f"content-{number}", uid=str(number))
        entry = entry_of(builders.with_status(one, started_at=time_of(1000.0 + number)))
        entries[entry.key] = entry
    found = sections(Facts(entries=entries))["runs"]
    newest = [f"snapshotcontents/-/content-{MAX_RUNS + 4 - back}" for back in range(MAX_RUNS)]
    assert [row["key"] for row in found["rows"]] == newest
    assert found["all"] == MAX_RUNS + 5


# The flow of orders.


PREPARE = order("prepare")
DONE = report(PREPARE, "prepared", n=2, at=101.0)


@each(
    ("item", "reports", "arrows"),
    [
        # A report is never drawn before its order, whatever its clock says.
        (PREPARE, [replace(DONE, at=1.0)], [("prepare", 0.0), ("prepared", 0.0)]),
        # An acceptance is shown until something comes of it.
        (PREPARE, [replace(DONE, kind="accepted", n=1)], [("prepare", 0.0), ("accepted", 1.0)]),
        (
            PREPARE,
            [DONE, replace(DONE, kind="accepted", n=1)],
            [("prepare", 0.0), ("prepared", 1.0)],
        ),
        # One that came twice is one arrow, and that of another attempt is none.
        (PREPARE, [DONE, DONE, replace(DONE, attempt=2)], [("prepare", 0.0), ("prepared", 1.0)]),
        # What the stream has lost is drawn from the store.
        (replace(PREPARE, state="prepared", final=DONE), [], [("prepare", 0.0), ("prepared", 1.0)]),
    ],
)
def test_an_order_and_what_came_of_it_are_arrows(
    item: OrderStatus, reports: list[Report], arrows: list[tuple[str, float]]
) -> None:
    found = flow([item], reports, {})
    assert [(arrow["label"], arrow["at"]) for arrow in found["arrows"]] == arrows
    assert item.final is None or found["bars"][0]["end"] == 1


def test_work_under_way_has_no_end_and_what_its_node_has_not_accepted_waits() -> None:
    item = order("save", "gpu-0")
    found = flow([item], [], {item.order: progress(item, 1, 4)})
    assert found["lanes"] == ["operator", "gms node-1"]
    shown = {"lane": 1, "start": 0, "label": "save gpu-0", "state": "busy", "step": "write"}
    assert found["bars"] == [{**shown, "done": 1, "total": 4}]
    assert flow([order("stop", state="ordered")], [], {})["bars"][0]["state"] == "waiting"
    assert flow([order("stop", state="accepted")], [], {})["bars"][0]["state"] == "busy"


def test_a_failure_is_named_on_its_arrow_and_a_lost_order_is_bad() -> None:
    item, failure = order("prepare", attempt=2), Failure(reason="NotEligible", message="x")
    failed = report(item, "failed", n=1, at=101.0, failure=failure)
    found = flow([replace(item, state="failed", final=failed)], [], {})
    assert [arrow["state"] for arrow in found["arrows"]] == ["bad", "bad"]
    assert found["arrows"][0]["label"] == "prepare #2"
    assert found["arrows"][1]["label"] == "failed: NotEligible"
    assert flow([order("prepare", state="lost")], [], {})["bars"][0]["state"] == "bad"


def test_a_waterfall_gives_seconds_from_the_first_span_without_a_longer_pause() -> None:
    def lasting(name: str, start_s: int, end_s: int, parent: str = "") -> SpanRecord:
        times = {"start_ns": start_s * 10**9, "end_ns": end_s * 10**9}
        return builders.span(span_id=name, name=name, parent_id=parent, **times)

    found = waterfall([lasting("capture", 1, 3), lasting("dump", 2, 3, parent="capture")])
    assert (found["total"], found["all"]) == (2.0, 2)
    bars = [(bar["name"], bar["depth"], bar["start"]) for bar in found["bars"]]
    assert bars == [("capture", 0, 0.0), ("dump", 1, 1.0)]
    found = waterfall([lasting("capture", 0, 1), lasting("verify", 91, 92)])
    assert (found["total"], found["paused"]) == (2.0, 90.0)
    assert [bar["start"] for bar in found["bars"]] == [0.0, 1.0]


def test_a_message_in_a_waterfall_has_its_verb_and_no_placeholder() -> None:
    subject = "snap.order.{node}.gms.save-{owner}"
    attributes = message_attributes("publish", subject, client="x", order="", attempt=1)
    attributes |= {"snapback.verb": "save"}
    span = builders.span(name=f"publish {subject}", attributes=attributes)
    assert [bar["name"] for bar in waterfall([span])["bars"]] == ["publish save"]


async def test_a_node_whose_durable_is_paused_says_so_and_is_a_problem() -> None:
    world = await world_of(1)
    facts = await facts_of(world, paused=frozenset({"gms-node-1", "agent-elsewhere"}))
    [row] = rows(facts, "nodes")
    assert row["held"] == ["gms gets no orders: its durable gms-node-1 is paused"]
    [problem] = rows(facts, "problems")
    assert problem["what"] == "Node node-1 gets no orders"
    assert problem["next"] == "nats consumer resume ORDERS gms-node-1"


async def test_the_details_say_what_a_capture_and_a_restore_have_cost(captured: World) -> None:
    await captured.apply(restore_document())
    for _ in range(8):
        await captured.advance(0.25)
        for item in captured.open():
            await captured.answer_well(item)
    facts = await facts_of(captured)
    led_to = view.by_owner(facts.entries.values())

    def told(key: str) -> list[str]:
        entry = facts.entries[key]
        values = [one.value for one in view.family(entry, led_to)]
        return details(entry, values, [], [], {})["figures"]  # type: ignore[no-any-return]

    [capture], [restore] = told(CHECKPOINT), told(RESTORED)
    assert re.match(r"captured [\d.]+ \w*B\b", capture)
    assert re.match(r"restored in [\d.]+ m?s$", restore)
    # The rows of the lists say the same, each once.
    shown = {row["key"]: row.get("figure", "") for row in rows(facts, "objects")}
    assert {key: text for key, text in shown.items() if text} == {
        CHECKPOINT: capture,
        RESTORED: restore,
    }
    assert [row["figure"] for row in rows(facts, "artifacts")] == [capture]


async def test_a_search_finds_objects_by_model_node_and_gpu_of_all_that_they_led_to(
    restored: World,
) -> None:
    facts = await facts_of(restored)
    found = {row["key"]: row.get("words", "").split() for row in rows(facts, "objects")}
    checkpoint = await restored.get("DynamoCheckpoint", "llm")
    assert checkpoint.spec.identity.model in found[CHECKPOINT]
    pod = await restored.get("Pod", "restored")
    assert "node-1" in found[CHECKPOINT]
    assert {"node-2", *(device.uuid for device in pod.status.devices)} <= set(found[RESTORED])
    assert "node-1" not in found[RESTORED]
    [artifact] = rows(facts, "artifacts")
    assert artifact["words"].split() == found[CHECKPOINT]
    assert [row["words"].split() for row in rows(facts, "runs")] == [
        found[RESTORED],
        found[CHECKPOINT],
    ]


async def test_captures_and_restores_are_listed_the_newest_first_without_their_orders(
    restored: World,
) -> None:
    facts = await facts_of(restored)
    found = rows(facts, "runs")
    assert [(row["kind"], row["name"], row["node"]) for row in found] == [
        ("restore", "restored", "node-2"),
        ("capture", "llm", "node-1"),
    ]
    assert [bar["phase"] for bar in found[0]["phases"]] == ["load", "commit", "resume"]
    assert [bar["phase"] for bar in found[1]["phases"]] == ["prepare", "write", "seal"]
    assert all(row["key"] in facts.entries and "steps" not in row for row in found)


async def test_what_moves_shows_its_rate_and_what_is_left(capturing: World) -> None:
    saves = await _ordered(capturing, "save", 2)
    since = saves[0].ordered_at.timestamp()
    moved = replace(progress(saves[0], 10**9, 4 * 10**9), at=since + 1)
    [first, *_] = rows(await facts_of(capturing, progress={moved.order: moved}), "objects")
    assert first["step"]["speed"].startswith("1 GB/s, ")
