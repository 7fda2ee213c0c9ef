"""Reports from their stream: acknowledged when their effect is stored, and never the end of all."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace

from snapshot_operator.runtime.cluster import key_of
from snapshot_operator.runtime.manager import Input
from snapshot_operator.runtime.reports import MAX_VALUES_BYTES, OPERATOR, Reports
from snapshot_shared import subjects
from snapshot_shared.errors import Failure
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.objects.meta import OrderStatus
from snapshot_shared.orders import TERMINAL, DeadLetter, Report
from tests.scenario.bus import SimBus, SimServer
from tests.support import builders
from tests.support.operator_world import world_of


def report_on(order: OrderStatus, kind: str = "failed", **fields: Any) -> Report:
    return builders.report(order, kind, n=1, at=0.0, **fields)


class Intake:
    """A world whose reports come over a bus."""

    async def start(self) -> None:
        self.world, self.server = await world_of(1, answered=()), SimServer()
        self.bus = await SimBus(self.server, "operator").connect()
        await self.bus.ensure_assets()
        world = self.world
        self.reports = Reports(self.bus, world.cluster, world.manager, world.clock)  # type: ignore[arg-type]
        self.task = asyncio.ensure_future(self.reports.run())

    async def stop(self) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def send(self, order: OrderStatus, data: bytes, kind: str = "failed") -> None:
        subject = subjects.report(NodeName(order.node), OrderId(order.order), kind)  # type: ignore[arg-type]
        await self.bus.publish(subject, data)
        await asyncio.sleep(1.0)
        await self.world.settle()
        await asyncio.sleep(1.0)

    async def letters(self) -> list[DeadLetter]:
        found = await self.bus.replay(subjects.DEAD, subjects.dead(OPERATOR))
        return [msgspec.json.decode(delivery.data, type=DeadLetter) for delivery in found]


@pytest.fixture
async def intake(virtual_time: None) -> AsyncIterator[Intake]:
    found = Intake()
    await found.start()
    yield found
    await found.stop()


def hostile(order: OrderStatus, values: str) -> bytes:
    data = msgspec.json.encode(
        report_on(order, failure=Failure(reason="Bad", message="x", values={"v": "HERE"}))
    )
    return data.replace(b'"HERE"', values.encode())


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
    (order,) = intake.world.open("run")
    await intake.send(order, hostile(order, values))
    assert not intake.task.done()
    (letter,) = await intake.letters()
    assert letter.failure.reason == "InvalidMessage"
    assert (await intake.world.get("DynamoCheckpoint", "llm")).status.phase == "Creating"
    started = msgspec.json.encode(report_on(order, TERMINAL["run"]))
    await intake.send(order, started, TERMINAL["run"])
    (pod,) = intake.world.cluster.page("Pod")
    assert pod.status.phase == "Running"  # type: ignore[union-attr]


async def test_a_failure_whose_values_are_lists_is_taken(intake: Intake) -> None:
    (order,) = intake.world.open("run")
    await intake.send(order, hostile(order, '["a session", 7, null]'))
    assert await intake.letters() == []
    (pod,) = intake.world.cluster.page("Pod")
    assert pod.status.phase == "Failed"  # type: ignore[union-attr]


async def test_a_report_of_another_subject_than_it_says_is_a_dead_letter(intake: Intake) -> None:
    (order,) = intake.world.open("run")
    await intake.send(order, msgspec.json.encode(report_on(order, "started")), "failed")
    (letter,) = await intake.letters()
    assert "came on" in letter.failure.message


async def test_a_report_for_an_object_that_is_gone_is_acknowledged_and_changes_nothing(
    intake: Intake,
) -> None:
    (order,) = intake.world.open("run")
    gone = "00000000-0000-0000-0000-000000000009"
    stray = replace(order, order=f"run-{gone}")
    await intake.send(stray, msgspec.json.encode(report_on(stray, "started")), "started")
    assert await intake.letters() == []
    (durable,) = intake.server.streams[subjects.REPORTS].durables.values()
    assert not durable.pending


@pytest.mark.parametrize("kind", ["Node", "Job", "Snapshot"])
async def test_a_report_for_an_object_of_a_kind_without_orders_is_acknowledged(
    intake: Intake, kind: str
) -> None:
    (order,) = intake.world.open("run")
    await intake.world.answer_well(order)
    (named,) = intake.world.cluster.all(kind)
    forged = replace(order, order=f"run-{named.metadata.uid}")
    await intake.send(forged, msgspec.json.encode(report_on(forged, "started")), "started")
    (durable,) = intake.server.streams[subjects.REPORTS].durables.values()
    assert not durable.pending
    assert await intake.letters() == []
    assert intake.world.cluster.by_uid(named.metadata.uid) == named


async def test_a_report_is_acknowledged_when_its_effect_is_stored_and_not_before(
    intake: Intake,
) -> None:
    (order,) = intake.world.open("run")
    subject = subjects.report(NodeName(order.node), OrderId(order.order), "started")
    await intake.bus.publish(subject, msgspec.json.encode(report_on(order, "started")))
    await asyncio.sleep(1.0)
    (durable,) = intake.server.streams[subjects.REPORTS].durables.values()
    assert durable.pending
    await intake.world.settle()
    await asyncio.sleep(1.0)
    assert not durable.pending


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


async def test_an_attempt_below_that_of_the_nodes_journal_is_raised_above_it() -> None:
    """As after the store was restored from a backup."""
    world = await world_of(1, answered=("run",))
    (prepare,) = world.open("prepare")
    superseded = Failure(reason="Superseded", message="older", values={"attempt": 7})
    await world.report(prepare, "rejected", failure=superseded)
    await world.answer("abort")
    (again,) = world.open("prepare")
    assert again.attempt == 8
    await world.answer_all()
    found = await world.get("DynamoCheckpoint", "llm")
    assert found.status.phase == "Ready"
    await world.cluster.delete(found)
    await world.settle()
    (stop,) = world.open("stop")
    stopped = Failure(reason="Superseded", message="older", values={"attempt": 3})
    await world.report(stop, "rejected", failure=stopped)
    (stop,) = world.open("stop")
    assert stop.attempt == 4
