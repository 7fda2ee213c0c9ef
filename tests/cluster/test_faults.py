"""The operator program killed and paused between its writes, and its bus wiped, in real captures.

Each capture is of a worker in a pod of a real kubelet, by the agent of its node.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube import rbac
from snapshot_shared.errors import NotFound, StoreBusy
from tests.cluster.agents import worker
from tests.cluster.cluster import Cluster
from tests.cluster.kubectl import Kubectl, KubectlError
from tests.cluster.simulated import pod
from tests.cluster.test_agent import artifacts, events_of, nodes, placeholder
from tests.cluster.test_operator import SECONDS, polled
from tests.cluster.test_program import Program, Rig, program, rig, started
from tests.support.nats_server import NatsServer, nats_server

__all__ = ["artifacts", "nodes", "rig"]
pytestmark = pytest.mark.cluster

DEATH_S = 30.0
NEVER = 1000
EVERY, FIRST = (int(os.environ.get(name, "1")) for name in ("FAULTS_EVERY", "FAULTS_FIRST"))
"""After which of the writes something fails: after every third one from the second, for example."""
LEAST_WRITES = 15
"""Fewer writes of a capture and a restore are a mistake of the test."""
CONTENTS = "/apis/nvidia.com/v1alpha1/snapshotcontents"
LEASES = "/apis/coordination.k8s.io/v1/namespaces/{}/leases/" + rbac.NAME


@pytest.fixture
def server(own_cluster: Cluster, tmp_path: Path) -> Iterator[NatsServer]:
    """A nats-server that pods and this host reach."""
    with nats_server(tmp_path / "nats", address=own_cluster.host_address) as running:
        yield running


@pytest.fixture
def nats_url(server: NatsServer) -> str:
    return server.url


class Captures(NamedTuple):
    """Checkpoints of workers, each in a pod of its own, and what became of them."""

    rig: Rig
    nodes: Kubectl
    artifacts: Path

    async def apply(self, name: str) -> None:
        """Ask for a capture on one node and for a restore from it on the other."""
        source = pod("source", worker("--answer", "42"), nodeName="node-1")

        async def is_applied() -> bool:
            # An operator that starts applies the definitions of its kinds.
            with contextlib.suppress(StoreBusy):
                await self.rig.apply(name, {"spec": source["spec"]}, sourcePolicy="Resume")
                return True
            return False

        await polled(is_applied)
        again = placeholder(f"{name}-again", name, "node-2")
        await asyncio.to_thread(self.nodes.apply, again)

    async def items(self, path: str) -> list[Any]:
        return list((await self.rig.get(path))["items"])

    async def outcome(self, name: str) -> dict[str, Any]:
        """Return what is there of a checkpoint, without what differs from run to run."""
        checkpoint = await self.rig.get(self.rig.path("dynamocheckpoints", name))
        snapshots = await self.items(self.rig.path("snapshots"))
        mine = (self.rig.namespace, name)
        contents = [
            item
            for item in await self.items(CONTENTS)
            if (item["spec"]["snapshotRef"]["namespace"], item["spec"]["snapshotRef"]["name"])
            == mine
        ]
        jobs = await self.items(self.rig.path("jobs"))
        pods = await self.items(f"/api/v1/namespaces/{self.rig.namespace}/pods")
        restores = await self.items(self.rig.path("snapshotrestores"))
        return {
            "checkpoint": [_shown(checkpoint), checkpoint.get("status", {}).get("phase")],
            "snapshots": [
                _shown(item) for item in snapshots if item["metadata"]["name"].startswith(name)
            ],
            "contents": [(_shown(item), _capture(item)) for item in contents],
            "generations": [
                path.name
                for item in contents
                for path in sorted(self.artifacts.glob(f"*/{item['metadata']['uid']}/*"))
            ],
            "jobs": len([job for job in jobs if job["metadata"]["name"].startswith(name)]),
            "workers": len([item for item in pods if _job_of(item).startswith(name)]),
            "restores": [
                (_shown(item), *map(item.get("status", {}).get, ("state", "attempt")))
                for item in restores
                if item["spec"]["source"] == name
            ],
            "restored": [
                _shown(item)["conditions"].get(RESTORED)
                for item in pods
                if item["metadata"]["name"] == f"{name}-again"
            ],
        }

    async def ended(self, name: str) -> dict[str, Any]:
        """Wait until it is captured and restored and nothing is owed; return the outcome."""

        async def settled() -> dict[str, Any]:
            try:
                found = await self.outcome(name)
            except StoreBusy:
                return {}
            is_released = [
                capture["orders"].get("release") == "released" and not capture["readers"]
                for _, capture in found["contents"]
            ]
            is_restored = found["restored"] == [("True", "RestoreSucceeded")]
            is_over = is_restored and found["checkpoint"][1] == "Ready"
            return found if is_over and is_released == [True] else {}

        return await polled(settled)

    async def reaches(self, name: str, wanted: dict[str, Any]) -> None:
        """Wait until the outcome of a checkpoint is as wanted."""
        found: dict[str, Any] = {}
        try:
            async with asyncio.timeout(SECONDS):
                while found != wanted:
                    await asyncio.sleep(0.2)
                    with contextlib.suppress(StoreBusy):
                        found = await self.outcome(name)
        except TimeoutError:
            # It shows where they differ.
            assert found == wanted

    async def events(self, pod: str) -> list[str]:
        """Return what a worker has written; a kubelet that starts anew is waited for."""

        async def read() -> list[str]:
            with contextlib.suppress(KubectlError):
                return await events_of(self.nodes, pod)
            return []

        return await polled(read)

    async def end(self, name: str) -> None:
        """End the workers of a checkpoint, each of which was captured or restored once."""
        again = f"{name}-again"
        words = ("pods", f"--selector=job-name={name}")
        [source] = await asyncio.to_thread(self.nodes.list, *words)
        events = await self.events(source["metadata"]["name"])
        assert [event.split()[0] for event in events[1:]] == ["quiesced", "snapshot-complete"]
        events = await self.events(again)
        assert events[-1:] == ["restored 42 1024"]
        names = (f"job/{name}", f"pod/{again}")
        await asyncio.to_thread(self.nodes.run, "delete", *names, "--wait=false")


def _shown(item: dict[str, Any]) -> dict[str, Any]:
    rows = item.get("status", {}).get("conditions", [])
    return {
        "finalizers": item["metadata"].get("finalizers", []),
        "conditions": {row["type"]: (row["status"], row.get("reason")) for row in rows},
    }


def _job_of(item: dict[str, Any]) -> str:
    return str(item["metadata"].get("labels", {}).get("job-name", ""))


def _capture(content: dict[str, Any]) -> dict[str, Any]:
    status = content.get("status", {})
    keys = ("capture", "attempt", "retries", "generations", "failure", "readers")
    return {
        **{key: status.get(key) for key in keys},
        "committed": status.get("committed", {}).get("generation"),
        "orders": {item["verb"]: item.get("state") for item in status.get("orders", [])},
    }


@pytest.fixture
def captures(rig: Rig, nodes: Kubectl, artifacts: Path) -> Captures:
    return Captures(rig, nodes, artifacts)


class Crew:
    """Operators, which may be killed; none is left at the end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.running: list[Program] = []

    async def start(self) -> Program:
        operator = await started(self.rig)
        self.running.append(operator)
        return operator

    async def gone(self, operator: Program) -> None:
        """Wait for the end of an operator."""
        async with asyncio.timeout(DEATH_S):
            await operator.process.wait()
        self.running.remove(operator)

    async def holder(self) -> str:
        """Return the identity of the active operator; nothing where there is none."""
        with contextlib.suppress(NotFound):
            lease = await self.rig.get(LEASES.format(self.rig.namespace))
            return str(lease["spec"].get("holderIdentity") or "")
        return ""

    async def free_the_lease(self) -> None:
        """Let another operator be the active one at once."""
        with contextlib.suppress(NotFound):
            await self.rig.direct.request("DELETE", LEASES.format(self.rig.namespace))


@pytest.fixture
async def crew(rig: Rig) -> AsyncIterator[Crew]:
    made = Crew(rig)
    yield made
    rig.proxy.answered = lambda _: None
    for operator in [*made.running]:
        if operator.process.returncode is None:
            operator.process.kill()
        await made.gone(operator)


def after_writes(rig: Rig, acts: dict[int, Callable[[], None]]) -> asyncio.Event:
    """Act when so many writes from now on have been answered; set what is returned at the first."""
    writes: list[str] = []
    reached = asyncio.Event()

    def answered(write: str) -> None:
        writes.append(write)
        if act := acts.get(len(writes)):
            act()
            reached.set()

    rig.proxy.answered = answered
    return reached


async def first_of(*waits: Any) -> None:
    """Return when the first of some waits is over; one that fails fails this."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            await task
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.timeout(1200)
async def test_an_operator_killed_between_any_two_writes_goes_on_where_it_was(
    captures: Captures, crew: Crew, rig: Rig
) -> None:
    operator = await crew.start()
    await operator.until_ready()
    await captures.apply("llm-00")
    wanted = await captures.ended("llm-00")
    assert (wanted["jobs"], wanted["workers"], wanted["generations"]) == (1, 1, ["gen-1"])
    number = FIRST
    while True:
        name = f"llm-{number:02}"
        reached = after_writes(rig, {number: operator.process.kill})
        await captures.apply(name)
        await first_of(reached.wait(), captures.ended(name))
        if not reached.is_set():
            break
        await crew.gone(operator)
        await crew.free_the_lease()
        operator = await crew.start()
        await captures.reaches(name, wanted)
        await captures.end(name)
        number += EVERY
    assert number > LEAST_WRITES


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

    async def is_taken_over() -> bool:
        return await crew.holder() not in ("", held)

    # One that starts before the one that stands by has the lease could get it first.
    await polled(is_taken_over)
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
    await captures.apply("llm-00")
    wanted = await captures.ended("llm-00")
    await captures.end("llm-00")
    number = FIRST
    while await paused(
        captures,
        crew,
        f"llm-{number:02}",
        wanted,
        after=number,
        until=number + 2 if number % 2 else NEVER,
    ):
        number += EVERY
    assert number > LEAST_WRITES


async def test_a_leader_that_is_paused_for_longer_than_its_lease_ends_when_it_wakes(
    captures: Captures, crew: Crew
) -> None:
    for _ in range(2):
        await (await crew.start()).until_ready()
    await captures.apply("llm-00")
    wanted = await captures.ended("llm-00")
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
    async with program(rig) as operator:
        await operator.until_ready()
        await captures.apply("llm-00")
        wanted = await captures.ended("llm-00")
        await captures.end("llm-00")
        number = FIRST
        while True:
            name = f"llm-{number:02}"
            reached = after_writes(rig, {number: partial(wipe, server)})
            await captures.apply(name)
            await first_of(reached.wait(), captures.ended(name))
            if not reached.is_set():
                break
            await captures.reaches(name, wanted)
            await captures.end(name)
            number += EVERY
    assert number > LEAST_WRITES


@pytest.mark.parametrize("number", [3, 10, 15, 20])
async def test_work_goes_on_when_every_stream_and_bucket_is_deleted(
    captures: Captures, rig: Rig, number: int
) -> None:
    async with program(rig) as operator:
        await operator.until_ready()
        await captures.apply("llm-00")
        wanted = await captures.ended("llm-00")
        reached = after_writes(rig, {number: lambda: None})
        await captures.apply("llm-01")
        await reached.wait()
        for state in await rig.bus.examine():
            await rig.bus.client.jetstream().delete_stream(state.name)
        await captures.reaches("llm-01", wanted)
