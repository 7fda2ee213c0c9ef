"""A bus of several servers: any of them is a way in, and one without a leader is waited for."""

import asyncio
from pathlib import Path

import pytest

from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.errors import BusUnavailable
from snapshot_shared.tasks import end_all
from tests.chaos.machines import SERVERS, machines
from tests.support.nats_server import running_nats_server
from tests.support.waiting import until

ALONE = (
    "--name=alone",
    "--cluster_name=alone",
    "--cluster=nats://127.0.0.1:-1",
    "--routes=nats://127.0.0.1:1",
)
"""A member of a cluster whose other members never come, so that JetStream has no leader."""


async def test_a_server_that_is_away_is_passed_over(nats_url: str) -> None:
    bus = Bus(f"nats://127.0.0.1:1,{nats_url}", "test")
    await bus.connect()
    try:
        await bus.ensure_assets()
        assert await bus.subjects_in(subjects.ORDERS, ">") == {}
    finally:
        await bus.close()


async def test_jetstream_without_a_leader_is_unavailable_and_no_defect(tmp_path: Path) -> None:
    async with running_nats_server(tmp_path / "nats", arguments=ALONE) as server:
        bus = Bus(server.url, "test")
        await bus.connect()
        try:
            with pytest.raises(BusUnavailable):
                await bus.ensure_assets()
        finally:
            await bus.close()


async def test_a_consumer_goes_on_at_once_when_its_leader_changes() -> None:
    with machines(0) as found:
        bus = Bus(found.url, "test", credentials=found.root, replicas=3)
        try:
            found.start(*SERVERS)
            await bus.connect()
            await _ensured(bus)
            deliveries = bus.consume(subjects.ORDERS, "agent-n", "snap.order.n.agent.*")
            first = asyncio.ensure_future(anext(deliveries))
            await _stored(bus, "snap.order.n.agent.stop-1")
            await (await first).ack()
            waiting = asyncio.ensure_future(anext(deliveries))
            step_down = f"$JS.API.CONSUMER.LEADER.STEPDOWN.{subjects.ORDERS}.agent-n"
            async with bus.listening("$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.>") as elected:
                # News of a subscription takes its time from server to server: ask on.
                async with asyncio.timeout(30.0):
                    while elected.empty():
                        await bus.request(step_down, b"")
                        await asyncio.sleep(1.0)
            await _stored(bus, "snap.order.n.agent.stop-2")
            async with asyncio.timeout(8.0):
                assert (await waiting).subject.endswith("stop-2")
            await deliveries.aclose()  # type: ignore[attr-defined]
        finally:
            await bus.close()
            await found.end()


async def _ensured(bus: Bus) -> None:
    async with asyncio.timeout(30.0):
        while True:
            try:
                return await bus.ensure_assets()
            except BusUnavailable:
                await asyncio.sleep(0.2)


async def _stored(bus: Bus, subject: str) -> None:
    async with asyncio.timeout(20.0):
        while True:
            try:
                await bus.publish(subject, b"{}")
                return
            except BusUnavailable:
                await asyncio.sleep(0.2)


async def test_assets_that_could_not_be_ensured_are_ensured_again_soon(nats_url: str) -> None:
    class Electing(Bus):
        """A bus whose JetStream has no leader at the first try."""

        tries = 0

        async def ensure_assets(self) -> None:
            self.tries += 1
            if self.tries == 1:
                raise BusUnavailable("no leader")
            await super().ensure_assets()

    bus = Electing(nats_url, "test")
    await bus.connect()
    keeping = asyncio.ensure_future(bus.keep_assets())
    try:
        await until(lambda: bus.tries == 2, "the second try", within_s=5.0)
        await _stored(bus, "snap.order.n.agent.stop-1")
    finally:
        await end_all(keeping)
        await bus.close()


async def test_who_listens_hears_on_a_connection_that_was_built_again(nats_url: str) -> None:
    bus, other = Bus(nats_url, "test"), Bus(nats_url, "other")
    await bus.connect()
    await other.connect()
    try:
        async with bus.listening("snap.event.>") as heard, asyncio.timeout(10.0):
            again = bus.reconnections()
            # As nats-py does it when the server says that a user is revoked or too much was sent.
            await bus.client.close()
            await again.wait()
            await bus.client.flush()
            await other.announce("snap.event.pods.default.x", b"news")
            assert (await heard.get()).data == b"news"
    finally:
        await bus.close()
        await other.close()
