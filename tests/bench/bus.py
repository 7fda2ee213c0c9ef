"""How soon an order begins and is answered, and how many orders a second are carried out.

`python -m tests.bench.bus` starts a nats-server and a process for each contender, which take turns
in every round. The status is 1 when a goal is missed, and 2 when a request makes no sense.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from statistics import median

import nats
from nats.aio.client import Client
from nats.aio.msg import Msg

from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.files import opened
from snapshot_shared.ids import NodeName, OrderId, Uid, order_id
from snapshot_shared.orders import ArtifactRef, Report, VerifyOrder
from snapshot_shared.tasks import end_all
from tests.bench import common
from tests.bench.bus_server import CONTENDERS, ECHO, SERVICE, TOGETHER, stamp
from tests.bench.common import OTHERS, Benchmark, Judged, Results, goal
from tests.support.nats_server import running_nats_server

TITLE = "Orders and reports"
BEGINS, BACK = 2.5, 4.0
"""How many times a request over core NATS an order may take to begin, and to be answered."""
LEAST_A_SECOND = 3000
OVER_PEER = 1.3
OURS, PEER = "snapback", "faststream"
REQUEST, BEGIN, ANSWER, FSYNC = "request and reply", "order → begins", "order → report", "fdatasync"
A_SECOND, CPU = "orders a second", "CPU-seconds of an order"
WAIT_S = 60.0
RECORDS_BYTES = 700
"""About what one write of the journal holds for one order."""


class Orders:
    """Orders to verify an artifact, each with an id of its own."""

    def __init__(self) -> None:
        self._made = 0

    def next(self, node: NodeName) -> tuple[str, bytes]:
        """Give the subject and the bytes of one more."""
        self._made += 1
        owner = Uid(f"00000000-0000-0000-0000-{self._made:012x}")
        name = order_id("verify", owner)
        order = VerifyOrder(
            order=name,
            attempt=1,
            node=node,
            owner=owner,
            deadline_s=60.0,
            artifact=ArtifactRef(
                namespace="default",
                content_uid=owner,
                generation=1,
                root_digest="sha256:" + "0" * 64,
            ),
        )
        return subjects.order(node, SERVICE, OrderId(name)), encode_json(order)


async def measure(options: argparse.Namespace, folder: Path) -> Results:
    """Let all contenders take turns in every round."""
    calls, orders, made = options.calls, options.orders, Orders()
    with common.measuring(folder, calls=calls, orders=orders) as found:
        async with running_nats_server(folder / "nats") as nats_server:
            bus = await Bus(nats_server.url, "bench").connect()
            await bus.ensure_assets()
            client = await nats.connect(nats_server.url)
            with contextlib.ExitStack() as stack:
                servers: list[tuple[str, common.Contender]] = []
                for name in common.present(CONTENDERS, PEER, options.peers):
                    words = ("bus_server", name, nats_server.url, folder)
                    server = stack.enter_context(common.contender(*words, peers=options.peers))
                    servers.append((name, server))
                for name, _ in servers:
                    await _together(client, NodeName(name), made, TOGETHER)
                await _empty(client)
                for number in range(options.rounds):
                    common.say(f"round {number + 1} of {options.rounds}")
                    # To and fro, so that none always follows the one that uses most processors.
                    await _latencies(bus, client, folder, made, found, forwards=number % 2 == 0)
                    for name, server in servers[:: -1 if number % 2 else 1]:
                        before = server.cpu_s
                        took = await _together(client, NodeName(name), made, orders)
                        found.add(A_SECOND, name, orders / took)
                        found.add(CPU, name, (server.cpu_s - before) / orders)
                        await _empty(client)
            await client.close()
            await bus.close()
    return found


async def _empty(client: Client) -> None:
    """Take the messages of a turn away, so that every turn finds the same streams."""
    for stream in (subjects.ORDERS, subjects.REPORTS, subjects.SPANS):
        await client.jetstream().purge_stream(stream)


# One order at a time.


async def _latencies(
    bus: Bus, client: Client, folder: Path, made: Orders, found: Results, *, forwards: bool
) -> None:
    calls = found.facts["calls"]
    requests = _requests(client, made, calls)
    if forwards:
        times = {REQUEST: await requests, **await _answers(bus, made, calls)}
    else:
        times = {**await _answers(bus, made, calls), REQUEST: await requests}
    times[FSYNC] = _fsyncs(folder, calls)
    for name in (REQUEST, BEGIN, ANSWER, FSYNC):
        for share in (50, 99):
            taken = sorted(times[name])[(calls - 1) * share // 100]
            found.add(f"{name}, p{share}", OURS, taken)


async def _requests(client: Client, made: Orders, calls: int) -> list[float]:
    """Send what an order is as a request over core NATS, which comes back as it is."""
    times = []
    for _ in range(calls):
        _, data = made.next(NodeName(OURS))
        begin = time.perf_counter()
        await client.request(ECHO, data, timeout=WAIT_S)
        times.append(time.perf_counter() - begin)
    return times


async def _answers(bus: Bus, made: Orders, calls: int) -> dict[str, list[float]]:
    """Publish orders as the operator does, and take their reports as it does."""
    begins: list[float] = []
    answers: list[float] = []
    async with _reports(bus) as ended:
        for _ in range(calls):
            subject, data = made.next(NodeName(OURS))
            published = stamp()
            await bus.publish(subject, data, expected_last=0)
            begun, heard = await asyncio.wait_for(ended.get(), WAIT_S)
            begins.append((begun - published) / 1e6)
            answers.append((heard - published) / 1e6)
    return {BEGIN: begins, ANSWER: answers}


@asynccontextmanager
async def _reports(bus: Bus) -> AsyncIterator[asyncio.Queue[tuple[int, int]]]:
    """Collect when each order began and when its last report came, in microseconds."""
    ended: asyncio.Queue[tuple[int, int]] = asyncio.Queue()

    async def follow() -> None:
        filter_ = _reports_of(NodeName(OURS))
        async with aclosing(bus.consume(subjects.REPORTS, "operator", filter_)) as source:
            async for delivery in source:
                report = decode_json(delivery.data, Report)
                if report.is_terminal:
                    ended.put_nowait((report.bytes, stamp()))
                await delivery.ack()

    following = asyncio.ensure_future(follow())
    try:
        yield ended
    finally:
        await end_all(following)


def _reports_of(node: NodeName) -> str:
    return f"snap.report.{subjects.token(node)}.*.*"


def _fsyncs(folder: Path, calls: int) -> list[float]:
    """Append to a file of the same disk, as the journal does, without anything around it."""
    times = []
    path = folder / "fsyncs"
    with opened(os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)) as fd:
        for _ in range(calls):
            begin = time.perf_counter()
            os.write(fd, bytes(RECORDS_BYTES))
            os.fdatasync(fd)
            times.append(time.perf_counter() - begin)
    return times


# Many at a time.


async def _together(client: Client, node: NodeName, made: Orders, count: int) -> float:
    """Give the seconds until so many orders are answered, with 100 of them under way.

    Orders go out and reports are heard as cheaply as can be, for the processes share a machine.
    """
    waiting = [made.next(node) for _ in range(count)]
    waiting.reverse()
    left = count
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def publish() -> None:
        if waiting:
            await client.publish(*waiting.pop(), reply=acks)

    async def hear(message: Msg) -> None:
        nonlocal left
        if message.subject.endswith(".verified"):
            left -= 1
            await publish()
            if not left:
                done.set_result(None)

    async def check(message: Msg) -> None:
        if b'"error"' in message.data and not done.done():
            done.set_exception(RuntimeError(message.data.decode()))

    acks = client.new_inbox()
    heard = [
        await client.subscribe(_reports_of(node), cb=hear),
        await client.subscribe(acks, cb=check),
    ]
    await client.flush()
    begin = time.perf_counter()
    for _ in range(TOGETHER):
        await publish()
    await asyncio.wait_for(done, WAIT_S)
    took = time.perf_counter() - begin
    for each in heard:
        await each.unsubscribe()
    return took


# What was wanted of it.


def judged(found: Results) -> Iterator[Judged]:
    rows, others, row = found.samples, found.others, f"{TOGETHER} under way"
    request = rows[f"{REQUEST}, p99"][OURS]
    for name, most in ((f"{BEGIN}, p99", BEGINS), (f"{ANSWER}, p99", BACK)):
        ours = rows[name][OURS]
        ratio, against = median(ours) / median(request), f"{REQUEST}, p99"
        yield goal("orders", name, against, ratio, ours, request, most=most, others=others)
    ours, peer = rows[A_SECOND][OURS], rows[A_SECOND].get(PEER)
    value = median(ours)
    yield goal(
        "orders",
        row,
        A_SECOND,
        value,
        ours,
        least=LEAST_A_SECOND,
        wanted="{:,}",
        found="{:,.0f}",
        others=others,
    )
    if not peer:
        yield Judged("orders", row, PEER, f"≥ {OVER_PEER:g} x", "", "not measured")
        return
    ratio = value / median(peer)
    beside = goal("orders", row, PEER, ratio, ours, peer, least=OVER_PEER, others=others)
    # A peer that needs more of the processors suffers more from others.
    yield beside._replace(verdict="inconclusive") if others > OTHERS else beside


def lines(found: Results) -> Iterator[str]:
    yield (
        f"Written by `make bench-bus`: {found.rounds} rounds, contenders in turn, medians. All\n"
        "processes are on one machine with one nats-server. `snapback` is the courier with its\n"
        "journal on the disk, its runner and its spans; an order has one step. It fsyncs before\n"
        "the ack and before the step, so two fsyncs come before a step begins. The others decode\n"
        "the same orders with msgspec, ack them, publish the same two reports and keep no\n"
        f"journal. One order at a time: percentiles of {found.facts['calls']:,} calls by one\n"
        "clock; the request over core NATS has the bytes of an order and comes back as it is. A\n"
        f"turn with {TOGETHER} under way is {found.facts['orders']:,} orders. Others took\n"
        f"{found.others:.0%} of the processors; above {OTHERS:.0%}, or where samples spread, a\n"
        "missed goal is inconclusive, and so is every ratio to a peer above it. The machine:\n"
    )
    yield from common.listed(found.machine)
    yield from common.goal_table(judged(found))
    head = ("one at a time", "contender", "µs (median)", "fastest … slowest")
    one = {row: each for row, each in found.samples.items() if row not in (A_SECOND, CPU)}
    yield from common.sample_table(head, one, scale=1e6)
    yield from common.table(
        (f"{TOGETHER} under way", A_SECOND, "slowest … fastest", "µs of CPU an order"),
        (
            (name, common.middle(each), common.ends(each), common.middle(cpu, scale=1e6))
            for name, each in found.samples[A_SECOND].items()
            for cpu in [found.samples[CPU][name]]
        ),
    )


NUMBERS = {
    "rounds": (5, 1, ""),
    "calls": (500, 100, "one at a time, a round (500)"),
    "orders": (3000, TOGETHER, "a turn of a contender (3000)"),
}
BENCH = Benchmark("bus", TITLE, __doc__, NUMBERS, measure, lines, judged, peers=PEER)

if __name__ == "__main__":
    common.run(BENCH.main)
