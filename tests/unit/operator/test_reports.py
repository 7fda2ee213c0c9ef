"""Reports from their stream: acknowledged when their effect is stored, and never the end of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_api.meta import OrderStatus
from snapshot_operator.runtime.cluster import key_of
from snapshot_operator.runtime.manager import Input
from snapshot_operator.runtime.reports import OPERATOR, Reports
from snapshot_shared import subjects
from snapshot_shared.errors import MAX_VALUES_BYTES, Failure
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.orders import DeadLetter, Report
from snapshot_shared.tasks import end_all
from tests.scenario.bus import SimBus
from tests.support import builders
from tests.support.operator_world import row_of, world_of


def report_on(order: OrderStatus, kind: str = "failed", **fields: Any) -> Report:
    return builders.report(order, kind, n=1, at=0.0, **fields)


class Intake:
    """A world whose reports come over a bus."""

    def __init__(self, bus: SimBus) -> None:
        self.bus = bus

    async def start(self) -> None:
        self.world = world = await world_of(1, answered=())
        self.reports = Reports(self.bus, world.cluster, world.manager, world.clock)  # type: ignore[arg-type]
        self.task = asyncio.ensure_future(self.reports.run())
        (self.run,) = world.open("run")

    async def come(self, order: OrderStatus, data: bytes, kind: str) -> None:
        """Have a message come on the subject of a report of this kind."""
        subject = subjects.report(NodeName(order.node), OrderId(order.order), kind)  # type: ignore[arg-type]
        await self.bus.publish(subject, data)
        await asyncio.sleep(1.0)

    async def send(self, order: OrderStatus, data: bytes, kind: str = "failed") -> None:
        await self.come(order, data, kind)
        await self.world.settle()
        await asyncio.sleep(1.0)

    async def letters(self) -> list[DeadLetter]:
        found = await self.bus.replay(subjects.DEAD, subjects.dead(OPERATOR))
        return [msgspec.json.decode(delivery.data, type=DeadLetter) for delivery in found]

    @property
    def pending(self) -> Any:
        """What is not acknowledged."""
        (durable,) = self.bus._server.streams[subjects.REPORTS].durables.values()
        return durable.pending

    @property
    def phase(self) -> str:
        """The phase of the pod that is ordered to run."""
        (pod,) = self.world.cluster.page("Pod")
        return pod.status.phase  # type: ignore[union-attr]


@pytest.fixture
async def intake(bus: SimBus) -> AsyncIterator[Intake]:
    found = Intake(bus)
    await found.start()
    yield found
    await end_all(found.task)


def told(order: OrderStatus, kind: str = "failed", **fields: Any) -> bytes:
    return msgspec.json.encode(report_on(order, kind, **fields))


def hostile(order: OrderStatus, values: str) -> bytes:
    failure = Failure(reason="Bad", message="x", values={"v": "HERE"})
    return told(order, failure=failure).replace(b'"HERE"', values.encode())


@pytest.mark.parametrize(
    "values",
    [
        pytest.param("[" * 900 + "]" * 900, id="deep-list"),
        pytest.param('{"a":' * 800 + "1" + "}" * 800, id="deep-object"),
        pytest.param('{"a": 1}', id="object"),
        pytest.param("[[1]]", id="list-of-lists"),
        pytest.param('"' + "x" * MAX_VALUES_BYTES + '"', id="large"),
    ],
)
async def test_values_that_are_not_plain_are_a_dead_letter_and_the_operator_goes_on(
    intake: Intake, values: str
) -> None:
    await intake.send(intake.run, hostile(intake.run, values))
    assert not intake.task.done()
    (letter,) = await intake.letters()
    assert letter.failure.reason == "InvalidMessage"
    assert (await intake.world.get("DynamoCheckpoint", "llm")).status.phase == "Creating"
    await intake.send(intake.run, told(intake.run, "started"), "started")
    assert intake.phase == "Running"


async def test_a_pod_whose_worker_runs_and_says_nothing_names_what_is_waited_for(
    intake: Intake,
) -> None:
    await intake.send(intake.run, told(intake.run, "started"), "started")
    (pod,) = intake.world.cluster.page("Pod")
    row = row_of(pod)
    assert (row.status, row.reason) == ("False", "WorkerStarting")
    assert "Worker.ready()" in row.message


async def test_a_failure_whose_values_are_lists_is_taken(intake: Intake) -> None:
    await intake.send(intake.run, hostile(intake.run, '["a session", 7, null]'))
    assert await intake.letters() == []
    assert intake.phase == "Failed"


async def test_a_report_of_another_subject_than_it_says_is_a_dead_letter(intake: Intake) -> None:
    await intake.send(intake.run, told(intake.run, "started"), "failed")
    (letter,) = await intake.letters()
    assert "came on" in letter.failure.message


async def test_a_report_for_an_object_that_is_gone_is_acknowledged_and_changes_nothing(
    intake: Intake,
) -> None:
    stray = replace(intake.run, order="run-00000000-0000-0000-0000-000000000009")
    await intake.send(stray, told(stray, "started"), "started")
    assert await intake.letters() == []
    assert not intake.pending


@pytest.mark.parametrize("kind", ["Node", "Job", "Snapshot"])
async def test_a_report_for_an_object_of_a_kind_without_orders_is_acknowledged(
    intake: Intake, kind: str
) -> None:
    await intake.world.answer_well(intake.run)
    (named,) = intake.world.cluster.all(kind)
    forged = replace(intake.run, order=f"run-{named.metadata.uid}")
    await intake.send(forged, told(forged, "started"), "started")
    assert not intake.pending
    assert await intake.letters() == []
    assert intake.world.cluster.by_uid(named.metadata.uid) == named


async def test_a_report_is_acknowledged_when_its_effect_is_stored_and_not_before(
    intake: Intake,
) -> None:
    await intake.come(intake.run, told(intake.run, "started"), "started")
    assert intake.pending
    await intake.world.settle()
    await asyncio.sleep(1.0)
    assert not intake.pending


async def test_reports_that_come_together_are_one_write_of_the_status() -> None:
    world = await world_of(1, answered=("run", "prepare"))
    before = int((await world.content()).metadata.resource_version)
    stored: list[Report] = []
    reports = [report_on(save, "leased") for save in world.open("save")]
    content = await world.content()
    world.manager.take(
        key_of(content),
        *(Input(r, lambda r=r: stored.append(r)) for r in reports),  # type: ignore[misc]
    )
    assert stored == []
    await world.settle()
    assert stored == reports
    after = int((await world.content()).metadata.resource_version)
    assert after - before == 1


async def test_a_lost_report_of_a_cleaning_order_delays_the_deletion_and_does_not_end_it() -> None:
    world = await world_of(1, captured=True)
    await world.delete("DynamoCheckpoint", "llm")
    (stop,) = world.open("stop")
    await world.report(stop, "accepted")
    world.answered.add((stop.order, stop.attempt))  # Its `stopped` is lost with the stream.
    await world.advance(stop.deadline.timestamp() - world.now - 1.0)
    assert not world.open("stop")
    await world.advance(1.0)
    (again,) = world.open("stop")
    assert again.attempt == 2
    await world.answer_all()
    assert not world.cluster.page("Pod")


def superseded_by(attempt: int) -> Failure:
    return Failure(reason="Superseded", message="older", values={"attempt": attempt})


async def test_an_attempt_below_that_of_the_nodes_journal_is_raised_above_it() -> None:
    """As after the store was restored from a backup."""
    world = await world_of(1, answered=("run",))
    (prepare,) = world.open("prepare")
    await world.report(prepare, "rejected", failure=superseded_by(7))
    await world.answer("abort")
    (again,) = world.open("prepare")
    assert again.attempt == 8
    await world.answer_all()
    assert (await world.get("DynamoCheckpoint", "llm")).status.phase == "Ready"
    await world.delete("DynamoCheckpoint", "llm")
    (stop,) = world.open("stop")
    await world.report(stop, "rejected", failure=superseded_by(3))
    (stop,) = world.open("stop")
    assert stop.attempt == 4
