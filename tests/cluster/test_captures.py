"""Real captures: the operator program killed and paused between its writes, and its bus wiped.

Each capture is of a worker in a pod of a real kubelet, by the agent of its node. And what the API
server has written down of one: who has asked for what.
"""

from __future__ import annotations

import json
import shutil
import signal
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from snapshot_operator.kube import rbac
from snapshot_operator.kube.controllers import CONTROLLERS
from snapshot_operator.kube.store import RESOURCES
from tests.cluster.captures import CONTENTS, Captures, Crew, after_writes, first_of
from tests.cluster.cluster import Cluster
from tests.cluster.lying_proxy import Lie
from tests.cluster.rig import Program, Rig, polled, program
from tests.support.nats_server import NatsServer
from tests.support.turns import TURN

pytestmark = pytest.mark.cluster

NEVER = 1000
LEAST_WRITES = 15
"""Fewer writes of a capture and a restore are a mistake of the test."""


@pytest.fixture
def rig(site: Rig) -> Rig:
    return site


async def after_each_write(captures: Captures, act: Callable[[], None]) -> AsyncIterator[str]:
    """Act after each write of a capture and a restore in turn, and yield the name of each."""
    number = TURN.first
    while True:
        name = f"llm-{number:02}"
        reached = after_writes(captures.rig, {number: act})
        await captures.apply(name)
        await first_of(reached.wait(), captures.ended(name))
        if not reached.is_set():
            break
        yield name
        await captures.end(name)
        number += TURN.every
    assert number > LEAST_WRITES


@pytest.mark.timeout(1200)
async def test_an_operator_killed_between_any_two_writes_goes_on_where_it_was(
    captures: Captures, crew: Crew, rig: Rig
) -> None:
    await (await crew.start()).until_ready()
    wanted = await captures.example()
    assert (wanted["jobs"], wanted["workers"], wanted["generations"]) == (1, 1, ["gen-1"])

    def kill() -> None:
        crew.running[0].process.kill()

    async for name in after_each_write(captures, kill):
        await crew.gone(crew.running[0])
        await crew.free_the_lease()
        await crew.start()
        await captures.reaches(name, wanted)


async def paused(
    captures: Captures,
    crew: Crew,
    name: str,
    wanted: dict[str, Any],
    *,
    after: int,
    until: int,
    expires: bool = False,
) -> bool:
    """Stop the first operator after a write and let it go on after a later one, or at the end.

    It ends, another takes its place, and a third stands by. False when there was no such write.
    """
    leader, held = crew.running[0], await crew.holder()
    stop = partial(leader.process.send_signal, signal.SIGSTOP)
    wake = partial(leader.process.send_signal, signal.SIGCONT)
    reached = after_writes(crew.rig, {after: stop, until: wake})
    await captures.apply(name)
    await first_of(reached.wait(), captures.ended(name))
    if not reached.is_set():
        return False
    if not expires:
        await crew.free_the_lease()
    await captures.reaches(name, wanted)
    if leader.process.returncode is None:
        wake()
    await crew.gone(leader)
    assert leader.process.returncode == 0
    # One that starts before the one that stands by has the lease could get it first.
    await polled(crew.holder, lambda found: found not in ("", held))
    await (await crew.start()).until_ready()
    await captures.reaches(name, wanted)
    await captures.end(name)
    return True


@pytest.mark.timeout(1200)
async def test_a_leader_paused_between_any_two_writes_does_no_harm_when_it_wakes(
    captures: Captures, crew: Crew
) -> None:
    """It wakes while the next one works, or afterwards, and believes to be the leader still."""
    for _ in range(2):
        await (await crew.start()).until_ready()
    wanted = await captures.example()
    number = TURN.first
    while await paused(
        captures,
        crew,
        f"llm-{number:02}",
        wanted,
        after=number,
        until=number + 2 if number % 2 else NEVER,
    ):
        number += TURN.every
    assert number > LEAST_WRITES


@pytest.mark.turns
async def test_a_leader_that_is_paused_for_longer_than_its_lease_ends_when_it_wakes(
    captures: Captures, crew: Crew
) -> None:
    for _ in range(2):
        await (await crew.start()).until_ready()
    wanted = await captures.example()
    assert await paused(captures, crew, "llm-01", wanted, after=9, until=NEVER, expires=True)


def wipe(server: NatsServer) -> None:
    """End a nats-server, and start it where it has nothing."""
    server.kill()
    shutil.rmtree(server.store)
    server.start()


@pytest.mark.timeout(1200)
async def test_a_bus_that_loses_all_between_any_two_writes_delays_work_and_loses_none(
    captures: Captures, rig: Rig, server: NatsServer
) -> None:
    async with program(rig):
        wanted = await captures.example()
        async for name in after_each_write(captures, partial(wipe, server)):
            await captures.reaches(name, wanted)


@pytest.mark.turns
@pytest.mark.parametrize("number", [3, 10, 15, 20])
async def test_work_goes_on_when_every_stream_and_bucket_is_deleted(
    captures: Captures, rig: Rig, number: int
) -> None:
    async with program(rig):
        await captures.apply("llm-00")
        wanted = await captures.ended("llm-00")
        reached = after_writes(rig, {number: lambda: None})
        await captures.apply("llm-01")
        await reached.wait()
        for state in await rig.bus.examine():
            await rig.bus.client.jetstream().delete_stream(state.name)
        await captures.reaches("llm-01", wanted)


CONTROLLERS_OF_CLUSTER = ("system:serviceaccount:kube-system:", "system:kube-controller-manager")


class AuditLog:
    """What the API server has answered since this was made, or since `forget`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._start = 0
        self.forget()

    def forget(self) -> None:
        self._start = self._path.stat().st_size

    def read(self) -> list[Any]:
        with self._path.open("rb") as file:
            file.seek(self._start)
            return [json.loads(line) for line in file if line.endswith(b"\n")]

    def of(self, rig: Rig) -> list[Any]:
        """Return the requests of the operator."""
        return [event for event in self.read() if event["user"]["username"] == operator_of(rig)]


@pytest.fixture
def audit(own_cluster: Cluster) -> AuditLog:
    return AuditLog(own_cluster.audit_log)


def operator_of(rig: Rig) -> str:
    return f"system:serviceaccount:{rig.namespace}:{rbac.NAME}"


@pytest.mark.turns
async def test_a_status_has_one_writer_and_agents_do_not_ask_the_api_server(
    captures: Captures, rig: Rig, audit: AuditLog
) -> None:
    async with program(rig):
        await captures.apply("llm")
        await captures.ended("llm")
    requests = audit.read()
    assert not [request for request in requests if request["responseStatus"]["code"] in (401, 403)]
    writers = defaultdict(set)
    for request in requests:
        object_ = request.get("objectRef", {})
        is_write = request["verb"] in ("create", "update", "patch", "delete")
        if is_write and object_.get("subresource") == "status":
            key = (object_["resource"], object_["name"])
            writers[key].add(request["user"]["username"])
    assert {resource for resource, _ in writers} == {
        *("dynamocheckpoints", "snapshots", "snapshotcontents", "snapshotrestores", "pods")
    }
    assert {user for users in writers.values() for user in users} == {operator_of(rig)}
    # An agent has no credentials; what asks without any is anonymous. The controllers of the
    # cluster remove what goes with the namespace of an earlier test.
    accounts = {request["user"]["username"] for request in requests}
    accounts = {name for name in accounts if not name.startswith(CONTROLLERS_OF_CLUSTER)}
    assert accounts <= {operator_of(rig), "admin"}
    asked = {(each["verb"], each["objectRef"]["resource"]) for each in audit.of(rig)}
    assert not {resource for _, resource in asked} & {"secrets", "configmaps"}
    assert not {("update", "pods"), ("delete", "pods"), ("update", "nodes")} & asked


async def seen(operator: Program) -> tuple[dict[str, float], float]:
    """Return how many decisions of each kind were to change nothing, and the age of the sweep."""
    _, text = await operator.ask("/metrics")
    families = text_string_to_metric_families(text)
    samples = [sample for family in families for sample in family.samples]
    [age] = [sample.value for sample in samples if "sweep_age" in sample.name]
    counts = [sample for sample in samples if "reconcile_duration" in sample.name]
    unchanged = {
        each.kind: sum(
            sample.value
            for sample in counts
            if sample.name.endswith("_count")
            and {each.kind, "unchanged"} <= {*sample.labels.values()}
        )
        for each in CONTROLLERS
    }
    return unchanged, age


@pytest.mark.turns
async def test_objects_that_are_looked_at_again_without_a_change_cost_no_request(
    captures: Captures, rig: Rig, audit: AuditLog
) -> None:
    async with program(rig) as operator:
        await captures.apply("llm")
        await captures.ended("llm")
        (before, _), began = await seen(operator), time.monotonic()
        audit.forget()
        rig.proxy.requests.clear()
        ours = ("dynamocheckpoints", "snapshots", "snapshotrestores")
        note = {"annotations": {"nvidia.com/note": f"nothing for {rig.namespace}"}}
        for path in (*map(rig.path, (*ours, "pods")), CONTENTS, "/api/v1/nodes"):
            for item in await rig.items(path):
                await rig.patch(f"{path}/{item['metadata']['name']}", metadata=note)

        async def is_all_seen_again() -> bool:
            plurals = [resource.plural for resource in RESOURCES.values()]
            now, age = await seen(operator)
            return (
                all(now[kind] > before[kind] for kind in before)
                and all(rig.proxy.requests["WATCH", plural] > 1 for plural in plurals)
                # The stream of orders is compared with the objects every 30 s.
                and age < time.monotonic() - began
            )

        with rig.proxy.lying(Lie(410, "WATCH", reason="Expired", times=len(RESOURCES))):
            rig.proxy.cut_watches()
            await polled(is_all_seen_again)
        asked = {(each["verb"], each["objectRef"]["resource"]) for each in audit.of(rig)}
    reads = {(verb, each.plural) for verb in ("list", "watch") for each in RESOURCES.values()}
    assert asked == reads | {("update", "leases")}
