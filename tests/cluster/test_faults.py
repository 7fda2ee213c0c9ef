"""The operator program killed and paused between its writes, and its bus wiped, in real captures.

Each capture is of a worker in a pod of a real kubelet, by the agent of its node.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import pytest

from tests.cluster.captures import Captures, Crew, after_writes, first_of
from tests.cluster.rig import Rig, polled, program
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.cluster

NEVER = 1000
EVERY, FIRST = (int(os.environ.get(name, "1")) for name in ("FAULTS_EVERY", "FAULTS_FIRST"))
"""After which of the writes something fails: after every third one from the second, for example."""
LEAST_WRITES = 15
"""Fewer writes of a capture and a restore are a mistake of the test."""


@pytest.fixture
def rig(site: Rig) -> Rig:
    return site


async def after_each_write(captures: Captures, act: Callable[[], None]) -> AsyncIterator[str]:
    """Act after each write of a capture and a restore in turn, and yield the name of each."""
    number = FIRST
    while True:
        name = f"llm-{number:02}"
        reached = after_writes(captures.rig, {number: act})
        await captures.apply(name)
        await first_of(reached.wait(), captures.ended(name))
        if not reached.is_set():
            break
        yield name
        await captures.end(name)
        number += EVERY
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
    async with program(rig) as operator:
        await operator.until_ready()
        wanted = await captures.example()
        async for name in after_each_write(captures, partial(wipe, server)):
            await captures.reaches(name, wanted)


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
