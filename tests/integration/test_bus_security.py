"""What the keys of one node are good for, on a real nats-server with the product's users.

The attacker holds the keys of the agent and of the GPU memory service of node a. An attack counts
as refused when the server complained, the attacker heard nothing, and no stream, message, consumer
or bucket is other than before.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from nats.js.api import DiscardPolicy

from snapshot_operator.runtime.nats import NatsOrders
from snapshot_shared import subjects
from snapshot_shared.bus import ASKED, Bus
from snapshot_shared.bus.assets import PRESENCE_TTL_S
from snapshot_shared.bus.streams import Binding
from snapshot_shared.errors import BusUnavailable, InvalidInput, NotFound, NotPermitted
from snapshot_shared.ids import NodeName, OrderId, token
from snapshot_shared.nkey import public_key
from snapshot_shared.orders import Presence
from snapshot_shared.permissions import User, users_of
from snapshotctl.adapters.observer import Written, unstored
from tests.support import builders
from tests.support.keyed_server import KeyedServer, everything, keyed_server

A, B = NodeName("node-a"), NodeName("node.b")
ORDER = OrderId("dump-00000000-0000-0000-0000-000000000001")
OTHER = OrderId("save-00000000-0000-0000-0000-000000000002-gpu-0")
TRACE = "a" * 32
TO_A, TO_B = (subjects.order(node, "agent", ORDER) for node in (A, B))
B_TOKEN = token(B)
ATTACKERS = [User("agent", A), User("gms", A)]

CONSUMERS = "$JS.API.CONSUMER"
STREAM = "$JS.API.STREAM"
PRESENCES = "$JS.API.DIRECT.GET.KV_snap_nodes"
SPY = {"stream_name": "ORDERS", "config": {"ack_policy": "none", "filter_subject": "snap.order.>"}}
NAMED = {**SPY, "config": {**SPY["config"], "name": "spy", "durable_name": "spy"}}  # type: ignore[dict-item]
TAKEN = {"config": {"name": f"agent-{B_TOKEN}", "durable_name": f"agent-{B_TOKEN}"}}

SENT: dict[str, tuple[str, Any]] = {
    "report as b": (subjects.report(B, ORDER, "dumped"), {}),
    "progress as b": (subjects.progress(B, ORDER), {}),
    "span as b": (subjects.span(B, TRACE), {}),
    "dead letter as b": (subjects.dead(B), {}),
    "presence as b": (subjects.bucket_key("snap_nodes", B_TOKEN), {}),
    "order to b": (TO_B, {}),
    "order to itself": (subjects.order(A, "gms", OTHER), {}),
    "order to all": ("snap.order.*.agent.x", {}),
    "event of an object": ("snap.event.pods.default.x", {}),
    "object in the mirror": (subjects.bucket_key("snap_objects", "pods.default.x"), {}),
    "schema": (subjects.bucket_key("snap_schemas", "x.1"), {}),
    "bucket of its own": (subjects.bucket_key("mine", "x"), {}),
    "apply": (subjects.api("apply"), {"documents": []}),
    "delete": (subjects.api("delete"), {"kind": "Pod", "name": "x"}),
    "verify": (subjects.api("verify"), {"kind": "Snapshot", "name": "x"}),
    "cordon b": (subjects.api("cordon"), {"node": B, "unschedulable": True}),
    "uncordon itself": (subjects.api("cordon"), {"node": A, "unschedulable": False}),
    "abort a capture": (subjects.api("abort"), {"kind": "Snapshot", "name": "x", "by": "me"}),
    "requeue an order": (subjects.api("requeue"), {"order": ORDER}),
    "the operator's health": (subjects.api("health"), {}),
    "retention": (subjects.api("retention"), {"run": True}),
    "get": (subjects.api("get"), {"kind": "Pod"}),
    "the specs of b": (subjects.template(B), {"name": "x"}),
    "what b may keep": (subjects.inventory(B), {"node": "x"}),
    "which pods b has to end": (subjects.pods(B), {"node": "x"}),
    "fault in b": (subjects.rpc(B, "agent", "sim"), {"arm": {"action": "crash", "step": "seal"}}),
    "question to b": (subjects.rpc(B, "agent", "status"), None),
    "discovery": ("$SRV.INFO", None),
    "answer to b": (f"{User('agent', B).inbox}.x", {}),
    "answer to the operator": (f"{User('operator').inbox}.x", {}),
    "presence of b directly": (f"{PRESENCES}.$KV.snap_nodes.{B_TOKEN}", None),
    "presence of all directly": (PRESENCES, {"last_by_subj": "$KV.snap_nodes.>"}),
    "pull from the consumer of b": (f"{CONSUMERS}.MSG.NEXT.ORDERS.agent-{B_TOKEN}", {"batch": 1}),
    "pull reports": (f"{CONSUMERS}.MSG.NEXT.REPORTS.operator", {"batch": 1}),
    "ack an order of b": (f"$JS.ACK.ORDERS.agent-{B_TOKEN}.1.1.1.0.0", None),
    "durable on orders": (f"{CONSUMERS}.CREATE.ORDERS.spy.snap.order.>", NAMED),
    "durable on orders, unfiltered": (f"{CONSUMERS}.CREATE.ORDERS.spy", NAMED),
    "durable on orders, the old way": (f"{CONSUMERS}.DURABLE.CREATE.ORDERS.spy", NAMED),
    "consumer without a name on orders": (f"{CONSUMERS}.CREATE.ORDERS", SPY),
    "ordered consumer on reports": (f"{CONSUMERS}.CREATE.REPORTS", SPY),
    "durable on reports": (f"{CONSUMERS}.CREATE.REPORTS.spy.snap.report.>", NAMED),
    "take over the consumer of b": (
        f"{CONSUMERS}.CREATE.ORDERS.agent-{B_TOKEN}.snap.order.node-a.agent.*",
        TAKEN,
    ),
    "own consumer for the orders of b": (
        f"{CONSUMERS}.CREATE.ORDERS.agent-node-a.snap.order.{B_TOKEN}.agent.*",
        {},
    ),
    "delete the consumer of b": (f"{CONSUMERS}.DELETE.ORDERS.agent-{B_TOKEN}", None),
    "pause the consumer of b": (f"{CONSUMERS}.PAUSE.ORDERS.agent-{B_TOKEN}", {}),
    "look at the consumer of b": (f"{CONSUMERS}.INFO.ORDERS.agent-{B_TOKEN}", None),
    "list consumers": (f"{CONSUMERS}.LIST.ORDERS", None),
    "delete a stream": (f"{STREAM}.DELETE.ORDERS", None),
    "purge a stream": (f"{STREAM}.PURGE.ORDERS", None),
    "change a stream": (f"{STREAM}.UPDATE.ORDERS", {"name": "ORDERS", "max_msgs": 1}),
    "copy a stream": (f"{STREAM}.CREATE.COPY", {"name": "COPY", "sources": [{"name": "ORDERS"}]}),
    "back a stream up": (f"{STREAM}.SNAPSHOT.ORDERS", {"deliver_subject": "_INBOX.x"}),
    "look at a stream": (f"{STREAM}.INFO.ORDERS", {"subjects_filter": ">"}),
    "list streams": (f"{STREAM}.NAMES", None),
    "delete a message": (f"{STREAM}.MSG.DELETE.ORDERS", {"seq": 1}),
    "get a message": (f"{STREAM}.MSG.GET.ORDERS", {"seq": 1}),
    "get an order of b directly": (f"$JS.API.DIRECT.GET.ORDERS.{TO_B}", None),
    "get orders directly": ("$JS.API.DIRECT.GET.ORDERS", {"seq": 1, "batch": 9}),
    "get presence directly": ("$JS.API.DIRECT.GET.KV_snap_nodes", {"seq": 1, "batch": 9}),
    "move the leader": (f"{STREAM}.LEADER.STEPDOWN.ORDERS", None),
    "account": ("$JS.API.INFO", None),
    "the system's servers": ("$SYS.REQ.SERVER.PING", None),
    "the system's connections": ("$SYS.REQ.SERVER.PING.CONNZ", None),
}
"""What the attacker sends: to which subject, and with what body."""

HEARD: dict[str, tuple[str, str]] = {
    "all orders": ("snap.order.>", TO_B),
    "orders of b": (f"snap.order.{B_TOKEN}.>", TO_B),
    "own orders beside the stream": ("snap.order.node-a.>", TO_A),
    "everything": (">", TO_B),
    "one level of everything": ("*", "anything"),
    "acks": ("$JS.ACK.>", f"$JS.ACK.ORDERS.agent-{B_TOKEN}.1.1.1.0.0"),
    "requests to JetStream": ("$JS.API.>", "$JS.API.CONSUMER.MSG.NEXT.ORDERS.x"),
    "answers to b": (f"{User('agent', B).inbox}.>", f"{User('agent', B).inbox}.x"),
    "answers to all": ("_INBOX.>", f"{User('operator').inbox}.x"),
    "reports": ("snap.report.>", subjects.report(B, ORDER, "dumped")),
    "requests of people": ("snap.api.>", subjects.api("apply")),
    "requests for specs": (f"{subjects.API}.template.*", subjects.template(B)),
    "what others hold": (f"{subjects.API}.inventory.*", subjects.inventory(B)),
    "which pods others have": (f"{subjects.API}.pods.*", subjects.pods(B)),
    "questions to b": (f"snap.rpc.agent.{B_TOKEN}.*", subjects.rpc(B, "agent", "status")),
    "buckets": ("$KV.>", subjects.bucket_key("snap_objects", "pods.default.x")),
    "events": ("snap.event.>", "snap.event.pods.default.x"),
    "advisories": ("$JS.EVENT.>", "$JS.EVENT.ADVISORY.API"),
    "the system": ("$SYS.>", "$SYS.REQ.SERVER.PING"),
}
"""What the attacker listens to, and a subject that it would have heard."""


class World:
    """A cluster of two nodes at work: an order under way to each, a report, both present."""

    def __init__(self, server: KeyedServer, root: Bus) -> None:
        self.server = server
        self.root = root
        self.before: Any = None

    async def unchanged(self) -> bool:
        return bool(await everything(self.root) == self.before)

    async def answering(self, *questions: str) -> Bus:
        """Let the operator answer questions with themselves."""
        operator = await self.server.bus(User("operator"))
        await operator.serve("snap-operator", "1.0.0", {}, dict.fromkeys(questions, _echo))
        return operator


async def _echo(data: bytes, headers: Any) -> bytes:
    return data


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    async with keyed_server(tmp_path, users_of([A, B])) as server:
        operator = await server.bus(User("operator"))
        await operator.ensure_assets()
        for node, subject in ((A, TO_A), (B, TO_B)):
            await operator.publish(subject, b'{"attempt": 1}', expected_last=0)
            agent = await server.bus(User("agent", node))
            presence = await agent.put(subjects.NODES_BUCKET, token(node), b"{}")
            assert await agent.revision(subjects.NODES_BUCKET, token(node)) == presence
            await agent.publish(subjects.report(node, ORDER, "accepted"), b"{}")
            await _take_one(agent, node)
        found = World(server, await server.root())
        found.before = await everything(found.root)
        yield found


async def _take_one(bus: Bus, node: NodeName) -> None:
    """Make the durable of a node and take an order from it, which stays unacknowledged."""
    durable, filter_ = subjects.durable(node, "agent"), subjects.orders_of(node, "agent")
    async with asyncio.timeout(10), aclosing(bus.consume("ORDERS", durable, filter_)) as source:  # type: ignore[type-var]
        await anext(source)


def _body(value: Any) -> bytes:
    return b"" if value is None else json.dumps(value).encode()


def _named(complaints: list[str], subject: str) -> bool:
    return any("permissions violation" in text and subject.lower() in text for text in complaints)


@pytest.mark.parametrize("attacker", ATTACKERS, ids=lambda user: user.name)
async def test_whatever_a_node_sends_beyond_its_subjects_is_refused(
    world: World, attacker: User
) -> None:
    assert len(SENT) + len(HEARD) >= 60
    client = await world.server.client(attacker)
    answers: list[str] = []

    async def take(message: Any) -> None:
        answers.append(message.subject)

    for name, (subject, value) in SENT.items():
        world.server.complaints.clear()
        inbox = client.new_inbox()
        heard = await client.subscribe(inbox, cb=take)
        await client.publish(subject, _body(value), reply=inbox)
        # The server complains before it answers the flush.
        await client.flush()
        await heard.unsubscribe()
        assert _named(world.server.complaints, subject), name
        assert answers == [], name
    assert await world.unchanged()


@pytest.mark.parametrize("attacker", ATTACKERS, ids=lambda user: user.name)
async def test_whatever_a_node_listens_to_beyond_its_subjects_stays_silent(
    world: World, attacker: User
) -> None:
    client = await world.server.client(attacker)
    heard: list[str] = []

    async def take(message: Any) -> None:
        heard.append(message.subject)

    for name, (subject, sample) in HEARD.items():
        for queue in ("", "q"):
            world.server.complaints.clear()
            await client.subscribe(subject, queue=queue, cb=take)
            await client.flush()
            assert _named(world.server.complaints, subject), name
        await world.root.client.publish(sample, b"secret")
    await world.root.client.flush()
    await client.flush()
    assert heard == []


@pytest.mark.parametrize(
    ("stream", "config"),
    [
        ("ORDERS", {"filter_subject": f"snap.order.{B_TOKEN}.agent.*"}),
        ("ORDERS", {"filter_subject": "snap.order.>"}),
        ("ORDERS", {"filter_subjects": ["snap.order.>"]}),
        ("ORDERS", {"filter_subject": None}),
        ("ORDERS", {"name": f"agent-{B_TOKEN}", "durable_name": f"agent-{B_TOKEN}"}),
        ("ORDERS", {"deliver_subject": TO_B}),
        ("REPORTS", {"durable_name": None}),
    ],
    ids=json.dumps,
)
async def test_the_body_of_a_request_cannot_say_more_than_its_subject(
    world: World, stream: str, config: dict[str, Any]
) -> None:
    client = await world.server.client(User("agent", A))
    filter_ = subjects.orders_of(A, "agent")
    own = {"name": "agent-node-a", "durable_name": "agent-node-a", "filter_subject": filter_}
    wanted = {k: v for k, v in ({**own, **config}).items() if v is not None}
    if "filter_subjects" in wanted:
        del wanted["filter_subject"]
    body = {"stream_name": stream, "config": {"ack_policy": "explicit", **wanted}}
    subject = f"{CONSUMERS}.CREATE.ORDERS.agent-node-a.{filter_}"
    answer = await client.request(subject, _body(body), timeout=5)
    assert json.loads(answer.data)["error"]["code"] in (400, 500)
    assert await world.unchanged()


async def test_a_rollup_of_its_own_key_does_not_wipe_the_keys_of_others(world: World) -> None:
    client = await world.server.client(User("agent", A))
    for rollup in ("all", "sub"):
        headers = {"Nats-Rollup": rollup}
        subject = subjects.bucket_key("snap_nodes", "node-a")
        answer = await client.request(subject, b"", timeout=5, headers=headers)
        assert json.loads(answer.data)["error"]
    assert await world.unchanged()


async def test_the_operator_does_not_carry_a_message_where_only_it_may_send(world: World) -> None:
    operator = await world.answering(f"{subjects.API}.template.*")
    client = await world.server.client(User("agent", A))
    for target in (TO_B, subjects.bucket_key("snap_objects", "pods.default.x")):
        await client.publish(subjects.template(A), b'{"attempt": 9}', reply=target)
    # Questions are answered one after another, so these were dealt with before.
    answer = await client.request(subjects.template(A), b"honest", timeout=5)
    assert answer.data == b"honest"
    await operator.client.flush()
    assert await world.unchanged()


async def test_an_order_that_an_acknowledgement_has_replaced_is_published_again(
    world: World,
) -> None:
    client = await world.server.client(User("agent", A))
    waiting = subjects.order(B, "gms", OTHER)
    operator = await world.server.bus(User("operator"))
    orders = NatsOrders(operator)
    owner = "00000000-0000-0000-0000-000000000002"
    given = builders.payload(attempt=1)
    order = builders.order("save", owner, part="gpu-0", node=B, payload=given)
    assert order.order == OTHER
    await orders.publish(order)
    async with asyncio.timeout(10), world.root.listening(waiting) as replaced:
        await client.publish(subjects.report(A, ORDER, "dumped"), b"{}", reply=waiting)
        assert b"REPORTS" in (await replaced.get()).data
    await orders.publish(order)
    found = await operator.last(subjects.ORDERS, waiting)
    assert found is not None
    assert json.loads(found[1]) == {"attempt": 1}


async def test_nothing_that_answers_a_viewer_reaches_a_stream(world: World) -> None:
    operator = await world.answering(subjects.api("view"))
    client = await world.server.client(User("viewer"))
    questions = [subjects.api("get"), "$SRV.PING", f"{STREAM}.INFO.ORDERS", f"{STREAM}.NAMES"]
    for target in (TO_B, subjects.bucket_key("snap_nodes", B_TOKEN), "_R_.x.y"):
        for question in questions:
            await client.publish(question, b'{"attempt": 9}', reply=target)
    # Questions are answered one after another, so these were dealt with before.
    assert (await client.request(subjects.api("get"), b"honest", timeout=5)).data == b"honest"
    await operator.client.flush()
    assert await world.unchanged()


async def test_a_viewer_asks_for_what_is_shown_without_secrets(world: World) -> None:
    operator = await world.server.bus(User("operator"))

    async def answer(data: bytes, headers: Any) -> bytes:
        return str(headers[ASKED]).encode()

    endpoints = {subjects.api(verb): answer for verb in ("get", "view")}
    await operator.serve("snap-operator", "1.0.0", {}, endpoints)
    viewer, cli = [await world.server.bus(User(role)) for role in ("viewer", "snapshotctl")]
    assert await viewer.request(subjects.api("get"), b"") == b"snap.api.view"
    assert await cli.request(subjects.api("get"), b"") == b"snap.api.get"


async def test_a_service_answers_only_who_asked_it_and_once(world: World) -> None:
    agent = await world.server.client(User("agent", A))
    cli = await world.server.client(User("snapshotctl"))
    asked = asyncio.get_running_loop().create_future()

    async def take(message: Any) -> None:
        asked.set_result(message.reply)

    await agent.subscribe(subjects.rpc(A, "agent", "status"), cb=take)
    await agent.flush()
    question = asyncio.ensure_future(cli.request(subjects.rpc(A, "agent", "status"), timeout=5))
    reply = await asyncio.wait_for(asked, 5)
    await agent.publish(reply, b"answer")
    assert (await question).data == b"answer"
    await agent.publish(reply, b"another")
    await agent.publish(f"{User('snapshotctl').inbox}.guess", b"forged")
    await agent.flush()
    assert len([text for text in world.server.complaints if "violation" in text]) == 2


@pytest.mark.parametrize("user", [User("viewer"), User("snapshotctl")], ids=lambda u: u.name)
async def test_who_may_look_cannot_give_orders_or_touch_streams(world: World, user: User) -> None:
    client = await world.server.client(user)
    allowed = {"get", "question to b", "discovery", "look at the consumer of b", "list consumers"}
    allowed |= {"look at a stream", "list streams", "get a message", "account"}
    allowed |= {name for name in SENT if name.endswith("directly")}
    if user.role == "snapshotctl":
        allowed |= {"apply", "delete", "verify", "fault in b", "cordon b", "uncordon itself"}
        allowed |= {"abort a capture", "requeue an order", "the operator's health", "retention"}
        allowed |= {"pause the consumer of b"}
    for name, (subject, value) in SENT.items():
        world.server.complaints.clear()
        await client.publish(subject, _body(value))
        await client.flush()
        assert _named(world.server.complaints, subject) == (name not in allowed), name
    assert await world.unchanged()


async def test_a_node_that_was_paused_stays_so_when_its_agent_binds_again(world: World) -> None:
    cli = await world.server.client(User("snapshotctl"))
    until = json.dumps({"pause_until": "2999-01-01T00:00:00Z"}).encode()
    answer = await cli.request(f"{CONSUMERS}.PAUSE.ORDERS.agent-node-a", until, timeout=5)
    assert json.loads(answer.data)["paused"]
    agent = await world.server.bus(User("agent", A))
    durable, filter_ = subjects.durable(A, "agent"), subjects.orders_of(A, "agent")
    async with agent._pulling(subjects.ORDERS, durable, filter_, 256, 30.0, Binding()):
        pass
    found = await cli.request(f"{CONSUMERS}.INFO.ORDERS.agent-node-a", b"", timeout=5)
    assert json.loads(found.data)["paused"]


async def test_nobody_gets_in_without_a_key_that_the_server_knows(
    world: World, tmp_path: Path
) -> None:
    stranger = tmp_path / "stranger.nk"
    public_key(stranger)
    for credentials in (None, str(stranger)):
        with pytest.raises(NotPermitted) as refused:
            await Bus(world.server.url, "stranger", credentials=credentials).connect(
                patiently=False
            )
        assert "stranger" in refused.value.message
    broken = tmp_path / "broken.nk"
    for content in (None, "", "SUA", "nonsense", "SU" + "a" * 56):
        if content is not None:
            broken.write_text(content)
        with pytest.raises(InvalidInput, match=r"broken\.nk"):
            await Bus(world.server.url, "x", credentials=str(broken)).connect(patiently=False)


async def test_a_key_with_the_inbox_of_another_user_is_told_so_at_once(world: World) -> None:
    seed = world.server.seed(User("viewer"))
    bus = Bus(world.server.url, "x", credentials=seed, inbox=User("snapshotctl").inbox)
    await bus.connect()
    try:
        async with asyncio.timeout(2):
            with pytest.raises(NotPermitted, match=r"answers below _INBOX\.snapshotctl"):
                await bus.request(subjects.rpc(A, "agent", "status"), b"")
    finally:
        await bus.close()


async def test_a_refused_subject_is_named_at_once_with_the_user(world: World) -> None:
    agent = await world.server.bus(User("agent", A))
    subject = subjects.report(B, ORDER, "dumped")
    async with asyncio.timeout(2):
        with pytest.raises(NotPermitted) as refused:
            await agent.publish(subject, b"{}")
        assert refused.value.values == {"subject": subject, "user": "agent-node-a"}
        with pytest.raises(NotPermitted, match=r"snap\.api\.apply"):
            await agent.request(subjects.api("apply"), b"{}")
        with pytest.raises(NotPermitted, match=r"STREAM\.MSG\.GET\.ORDERS"):
            await agent.last(subjects.ORDERS, TO_B)
        with pytest.raises(NotPermitted, match=r"DIRECT\.GET\.KV_snap_nodes"):
            await agent.entries(subjects.NODES_BUCKET)
        with pytest.raises(NotPermitted, match=r"subscribe to snap\.order\.>"):
            async with agent.listening("snap.order.>"):
                pass
        await agent.publish(subjects.report(A, ORDER, "dumped"), b"{}")


# What each user must be able to do.


def _complained(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "violation" in r.getMessage()]


@pytest.mark.parametrize("role", ["agent", "gms"])
async def test_a_service_of_a_node_can_do_all_its_work(
    world: World, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    user = User(role, A)  # type: ignore[arg-type]
    bus = await world.server.bus(user)
    verbs = ("template", "inventory", "pods") if role == "agent" else ()
    operator = await world.answering(*(f"{subjects.API}.{verb}.*" for verb in verbs))
    cli = await world.server.bus(User("snapshotctl"))
    await operator.publish(subjects.order(A, user.role, OTHER), b"{}")  # type: ignore[arg-type]
    durable = subjects.durable(A, user.role)  # type: ignore[arg-type]
    filter_ = subjects.orders_of(A, user.role)  # type: ignore[arg-type]
    async with asyncio.timeout(10), aclosing(bus.consume("ORDERS", durable, filter_)) as source:  # type: ignore[type-var]
        async for delivery in source:
            await delivery.ack()
            if OTHER in delivery.subject:
                break
    await bus.publish(subjects.report(A, OTHER, "staged"), b"{}", message_id=f"{OTHER}.1.1")
    await bus.announce(subjects.progress(A, OTHER), b"{}")
    await bus.publish(subjects.span(A, TRACE), b"{}")
    await bus.publish(subjects.dead(A), b"{}")
    if role == "agent":
        await bus.put(subjects.NODES_BUCKET, "node-a", b"there")
        assert await bus.request(subjects.template(A), b"which?") == b"which?"
        assert await bus.request(subjects.inventory(A), b"whose?") == b"whose?"
        assert await bus.request(subjects.pods(A), b"which?") == b"which?"
    question = subjects.rpc(A, user.role, "status")  # type: ignore[arg-type]
    await bus.serve(f"snap-{role}", "1.0.0", {"node": A}, {question: _echo})
    assert await cli.request(question, b"how?") == b"how?"
    found = json.loads(await cli.request(f"$SRV.INFO.snap-{role}", b""))
    assert found["metadata"] == {"node": A}
    await bus.client.flush()
    assert _complained(caplog) == []


async def test_the_operator_can_do_all_its_work(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bus = await world.server.bus(User("operator"))
    agent = await world.server.bus(User("agent", A))
    await world.root.client.jetstream().delete_stream("SPANS")
    await world.root.client.jetstream().delete_stream("KV_snap_schemas")
    await bus.ensure_assets()
    found = await bus.last(subjects.ORDERS, TO_B)
    assert found is not None
    await bus.delete(subjects.ORDERS, found[0])
    assert TO_B not in await bus.subjects_in(subjects.ORDERS, "snap.order.>")
    async with asyncio.timeout(10):
        async for delivery in bus.consume("REPORTS", "operator", "snap.report.>"):
            await delivery.ack()
            if B_TOKEN in delivery.subject:
                break
        async with bus.listening(subjects.bucket_key(subjects.NODES_BUCKET, "*")) as changes:
            await agent.put(subjects.NODES_BUCKET, "node-a", b"again")
            assert (await changes.get()).data == b"again"
    assert set(await bus.entries(subjects.NODES_BUCKET)) == {"node-a", B_TOKEN}
    key = subjects.object_key("pods", "default", "x")
    await bus.put(subjects.OBJECTS_BUCKET, key, b"{}")
    subject = subjects.bucket_key(subjects.OBJECTS_BUCKET, key)
    stream = subjects.stream_of_bucket(subjects.OBJECTS_BUCKET)
    assert await bus.subjects_in(stream, subjects.bucket_key(subjects.OBJECTS_BUCKET, ">")) == {
        subject: 1
    }
    await bus.remove(subjects.OBJECTS_BUCKET, key)
    await bus.put(subjects.SCHEMAS_BUCKET, "snapback.v1.report.1", b"{}")
    await bus.announce(subjects.event("pods", "default", "x"), b"{}")
    await bus.publish(subjects.span("operator", TRACE), b"{}")
    await bus.client.flush()
    assert _complained(caplog) == []


@pytest.mark.parametrize("role", ["viewer", "snapshotctl"])
async def test_who_may_look_sees_every_stream_bucket_object_and_service(
    world: World, role: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    bus = await world.server.bus(User(role))  # type: ignore[arg-type]
    verbs = ("get" if role == "snapshotctl" else "view", "apply", "delete", "retention")
    operator = await world.answering(*map(subjects.api, verbs))
    assert {d.subject for d in await bus.replay("ORDERS", "snap.order.>")} == {TO_A, TO_B}
    assert len(await bus.replay("REPORTS", "snap.report.>")) == 2
    assert await bus.last("ORDERS", TO_B) == (2, b'{"attempt": 1}')
    assert set(await bus.entries(subjects.NODES_BUCKET)) == {"node-a", B_TOKEN}
    context = bus.client.jetstream()
    assert len(await context.streams_info()) == 8
    durables = [consumer.name for consumer in await context.consumers_info("ORDERS")]
    assert sorted(map(str, durables)) == ["agent-node-a", f"agent-{B_TOKEN}"]
    assert await bus.request(subjects.api("get"), b"?") == b"?"
    assert json.loads(await bus.request("$SRV.INFO.snap-operator", b""))["name"] == "snap-operator"
    async with asyncio.timeout(10), bus.listening("snap.order.>") as orders:
        await operator.publish(subjects.order(B, "gms", OTHER), b"seen")
        assert (await orders.get()).data == b"seen"
    if role == "snapshotctl":
        assert await bus.request(subjects.api("apply"), b"a") == b"a"
        assert await bus.request(subjects.api("delete"), b"d") == b"d"
        assert await bus.request(subjects.api("retention"), b"r") == b"r"
        await bus.publish(subjects.span("cli", TRACE), b"{}")
        with pytest.raises(NotFound):
            await bus.request(subjects.rpc(A, "agent", "sim"), b"{}")
        watcher = await (await context.key_value("snap_nodes")).watchall()
        names: set[str] = set()
        # `keys()` of nats-py finds none if all are delivered before it asks how many are left.
        while names != {"node-a", B_TOKEN}:
            entry = await watcher.updates()
            names |= {entry.key} if entry is not None else set()
        await watcher.stop()
    await bus.client.flush()
    assert _complained(caplog) == []


@pytest.mark.parametrize("role", ["viewer", "snapshotctl"])
async def test_who_may_look_can_examine_every_stream_and_durable(world: World, role: str) -> None:
    bus = await world.server.bus(User(role))  # type: ignore[arg-type]
    found = {state.name: state for state in await bus.examine()}
    assert [state for state in found.values() if not state.exists or state.differs] == []
    assert found["ORDERS"].messages == 2
    assert 0 < found["ORDERS"].fill < 0.001
    assert dict(found["ORDERS"].durables) == {
        f"agent-{token(node)}": subjects.orders_of(node, "agent") for node in (A, B)
    }
    context = world.root.client.jetstream()
    brake = f"$JS.API.CONSUMER.PAUSE.ORDERS.agent-{token(A)}"
    await world.root.client.request(brake, b'{"pause_until": "2999-01-01T00:00:00Z"}')
    await context.delete_stream("DEAD")
    spans = (await context.stream_info("SPANS")).config
    await context.update_stream(spans.evolve(max_age=600.0))
    for number in range(300):
        await context.add_consumer("SPANS", durable_name=f"reader-{number}", ack_policy="none")
    found = {state.name: state for state in await bus.examine()}
    assert not found["DEAD"].exists
    assert found["SPANS"].differs == ("max_age",)
    assert len(found["SPANS"].durables) == 300
    assert found["ORDERS"].paused == {f"agent-{token(A)}"}
    assert await bus.paused("ORDERS") == {f"agent-{token(A)}"}
    assert bus.server_version.startswith("2.")


async def test_all_who_serve_are_asked_at_once_and_late_ones_are_not_waited_for(
    world: World,
) -> None:
    await world.answering(subjects.api("health"))
    for node in (A, B):
        agent = await world.server.bus(User("agent", node))
        question = subjects.rpc(node, "agent", "status")
        await agent.serve("snap-agent", "1.0.0", {"node": node}, {question: _echo})
    cli = await world.server.bus(User("snapshotctl"))
    answers = await cli.ask_all("$SRV.INFO", expected=3, within_s=10.0)
    names = sorted(json.loads(answer)["name"] for answer in answers)
    assert names == ["snap-agent", "snap-agent", "snap-operator"]
    assert len(await cli.ask_all("$SRV.INFO", expected=4, within_s=0.5)) == 3
    assert await cli.ask_all("$SRV.INFO.nobody", expected=1, within_s=0.5) == []


async def test_a_right_to_read_a_presence_that_is_missing_is_named(world: World) -> None:
    """As that of an agent on a nats-server whose permissions are older, within an upgrade."""
    gms = await world.server.bus(User("gms", A))
    with pytest.raises(NotPermitted):
        await gms.revision(subjects.NODES_BUCKET, token(A))


async def test_the_doctor_notices_that_nothing_is_stored(world: World) -> None:
    doctor, viewer = [await world.server.bus(User(role)) for role in ("snapshotctl", "viewer")]
    assert await unstored(doctor, {}) is None
    refused = await unstored(viewer, {})
    assert refused is not None
    assert refused.reason == "NotPermitted"
    manager = world.root.client.jetstream()
    config = (await manager.stream_info("SPANS")).config
    # As long as the disk is full.
    await manager.update_stream(config.evolve(max_msgs=1, discard=DiscardPolicy.NEW))
    told = await unstored(doctor, {})
    assert told is not None
    assert "maximum messages exceeded" in told.message


@pytest.mark.parametrize(("age_s", "is_stuck"), [(PRESENCE_TTL_S, False), (90.0, True)])
async def test_the_doctor_notices_a_presence_that_nats_does_not_drop(
    world: World, age_s: float, is_stuck: bool
) -> None:
    doctor = await world.server.bus(User("snapshotctl"))
    presence = Presence(node=A, boot_id="b", version="0", devices=[], at=0.0)
    told = await unstored(doctor, {A: Written(presence, time.time() - age_s)})
    assert (told is not None) == is_stuck


async def test_a_service_waits_for_streams_that_only_the_operator_makes(tmp_path: Path) -> None:
    async with keyed_server(tmp_path, users_of([A])) as server:
        agent = await server.bus(User("agent", A))
        with pytest.raises(BusUnavailable):
            await agent.publish(subjects.report(A, ORDER, "accepted"), b"{}")
        with pytest.raises(NotPermitted):
            await agent.ensure_assets()
        taking = asyncio.ensure_future(_take_one(agent, A))
        operator = await server.bus(User("operator"))
        await operator.ensure_assets()
        await operator.publish(TO_A, b"{}")
        await taking
