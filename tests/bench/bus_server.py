"""`python -m tests.bench.bus_server CONTENDER URL FOLDER`: one who carries out orders.

`snapback` is the courier of the product with its order book, journal, runner and spans. The others
take the same orders from the same stream, ack them and publish the same two reports, and keep no
journal. Each has a node of its own, and ends when standard input closes. `snapback` also answers
requests of core NATS.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import nats
from nats.aio.msg import Msg
from nats.js import JetStreamContext

from snapshot_shared import subjects
from snapshot_shared.bus import Bus
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.courier import Courier, OrderContext, Result
from snapshot_shared.ids import NodeName, OrderId
from snapshot_shared.journal import Journal
from snapshot_shared.order_book import OrderBook
from snapshot_shared.orders import AnyOrder, Order, Report, VerifyOrder
from snapshot_shared.runner import Runner, Step
from snapshot_shared.tasks import end_all
from snapshot_shared.telemetry import Telemetry
from tests.bench.common import use_peers

ECHO = "bench.echo"
SERVICE = "agent"
TOGETHER = 100
"""How many orders a contender carries out at a time."""
BATCH = 64
"""How many messages a contender pulls at a time."""

Publish = Callable[[str, bytes], Awaitable[object]]


def stamp() -> int:
    """Give the microseconds of the clock that all processes of a machine share."""
    return time.monotonic_ns() // 1000


@asynccontextmanager
async def snapback(url: str, folder: Path) -> AsyncIterator[None]:
    node = NodeName("snapback")
    bus = await Bus(url, "bench").connect()
    journal = Journal.open(folder / "journal", wall=time.time)
    telemetry = Telemetry("snap-agent", node, "0")
    clocks = Clocks(time.monotonic, time.time, "boot")
    book = OrderBook(node=node, service=SERVICE, journal=journal, clocks=clocks)
    runner = Runner(journal, telemetry)

    async def verify(_order: VerifyOrder, context: OrderContext) -> Result:
        begun: list[int] = []

        async def step() -> None:
            begun.append(stamp())

        await context.steps("verify", [Step("read-all", step, deadline_s=10.0)])
        return {"bytes": begun[0]}

    courier = Courier(book, bus, telemetry=telemetry, runner=runner, handlers={VerifyOrder: verify})
    echo = await nats.connect(url)

    async def answer(message: Msg) -> None:
        await message.respond(message.data)

    await echo.subscribe(ECHO, cb=answer)
    await echo.flush()
    serving = [
        asyncio.ensure_future(courier.serve()),
        asyncio.ensure_future(telemetry.publish_to(bus)),
    ]
    try:
        yield
    finally:
        await end_all(*serving)
        await book.drain()
        await echo.close()
        await bus.close()
        journal.close()


async def carry_out(node: str, data: bytes, publish: Publish) -> None:
    """Do what carrying out an order comes to without a journal: two reports of it."""
    order: Order = decode_json(data, cast("type[Any]", AnyOrder))
    for number, kind in ((1, "accepted"), (2, "verified")):
        report = Report(
            order=order.order,
            attempt=order.attempt,
            n=number,
            kind=kind,  # type: ignore[arg-type]
            node=node,
            service=SERVICE,
            at=time.time(),
            bytes=stamp() if number == 2 else 0,
        )
        subject = subjects.report(NodeName(node), OrderId(order.order), kind)
        await publish(subject, encode_json(report))


@asynccontextmanager
async def nats_py(url: str, _folder: Path) -> AsyncIterator[None]:
    """Pull in batches, and carry out the orders of a batch together."""
    node = NodeName("nats-py")
    client = await nats.connect(url)
    stream = client.jetstream()
    source = await stream.pull_subscribe(
        subjects.orders_of(node, SERVICE), subjects.durable(node, SERVICE), subjects.ORDERS
    )
    room = asyncio.Semaphore(TOGETHER)

    async def one(message: Msg) -> None:
        async with room:
            await carry_out(node, message.data, stream.publish)
            await message.ack_sync()

    async def serve() -> None:
        async with asyncio.TaskGroup() as tasks:
            async for message in pulled(source):
                tasks.create_task(one(message))

    serving = asyncio.ensure_future(serve())
    try:
        yield
    finally:
        await end_all(serving)
        await client.close()


async def pulled(source: JetStreamContext.PullSubscription) -> AsyncIterator[Msg]:
    """Give the messages of one pull after another, however many come to nothing."""
    while True:
        try:
            messages: Iterable[Msg] = await source.fetch(BATCH, timeout=5)
        except TimeoutError:
            # Of nats-py, or of asyncio if the server's answer came as the time was over.
            continue
        for message in messages:
            yield message


@asynccontextmanager
async def faststream(url: str, _folder: Path) -> AsyncIterator[None]:
    """A subscriber with as many workers as orders are under way, which acks by itself."""
    from faststream import AckPolicy
    from faststream.nats import JStream, NatsBroker, PullSub

    node = NodeName("faststream")
    broker = NatsBroker(url, logger=None, apply_types=False)
    orders = JStream(subjects.ORDERS, declare=False)

    async def publish(subject: str, data: bytes) -> None:
        await broker.publish(data, subject, stream=subjects.REPORTS)

    @broker.subscriber(  # type: ignore[untyped-decorator]
        subjects.orders_of(node, SERVICE),
        stream=orders,
        durable=subjects.durable(node, SERVICE),
        pull_sub=PullSub(batch_size=BATCH, timeout=5),
        max_workers=TOGETHER,
        ack_policy=AckPolicy.ACK,
        decoder=_undecoded,
    )
    async def handle(data: bytes) -> None:
        await carry_out(node, data, publish)

    async with broker:
        await broker.start()
        yield


async def _undecoded(message: Any) -> bytes:
    """Leave the decoding to msgspec, which is faster than what faststream does by itself."""
    return bytes(message.body)


CONTENDERS = {"snapback": snapback, "nats-py": nats_py, "faststream": faststream}


async def main(contender: str, url: str, folder: Path) -> None:
    async with CONTENDERS[contender](url, folder):
        sys.stdout.write("ready\n")
        sys.stdout.flush()
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
        )
        await reader.read()


if __name__ == "__main__":
    use_peers()
    asyncio.run(main(sys.argv[1], sys.argv[2], Path(sys.argv[3])))
