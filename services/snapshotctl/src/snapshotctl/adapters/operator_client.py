"""The operator over NATS: requests to its service, and what its streams and buckets hold."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from functools import partial
from typing import Any, Protocol, TypeVar

import msgspec

from snapshot_api.facts import Node
from snapshot_api.kind import Kind
from snapshot_api.kinds import KINDS, AnyObject, find_kind
from snapshot_api.meta import ObjectMeta, is_true
from snapshot_shared import api, subjects
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    BusUnavailable,
    Failure,
    InvalidInput,
    InvalidMessage,
    NotFound,
    NotPermitted,
    RemoteFailure,
)
from snapshot_shared.ids import NodeName, check_node, check_order_id, name_of, token
from snapshot_shared.orders import ArtifactRef, DeadLetter, Presence, Progress, Report
from snapshot_shared.spans import SpanRecord
from snapshot_shared.tasks import heeding, in_thread
from snapshotctl.domain import formats
from snapshotctl.domain.cluster import NodeSpec
from snapshotctl.domain.servers import Server, shown
from snapshotctl.domain.targets import Target
from snapshotctl.ports import News
from snapshotctl.views.queue import DeadMessage, Queued
from snapshotctl.views.related import ObjectChanged, owners_of

log = logging.getLogger(__name__)

SAFETY_S = 15.0
"""How long an event may be lost before the object is read again, in seconds."""

ASK_S = 5.0
"""How long an answer of the operator may take, in seconds; it refuses older requests."""
CONNECT_S = 10.0
DIRECTORY_S = 1.0
"""How long services are waited for that may not be there, in seconds."""
# nats-server takes 1 MB, headers included.
MAX_REQUEST_BYTES = 900 * 1024
MAX_REPLY_BYTES = 1024 * 1024
# Ends the loop for an operator whose pages do not end.
MAX_PAGES = 10_000

Reply = TypeVar(
    "Reply",
    api.ApplyReply,
    "_GetReply",
    api.DeleteReply,
    api.VerifyReply,
    api.CordonReply,
    api.AbortReply,
    api.RequeueReply,
    api.HealthReply,
    api.RetentionReply,
)
Message = TypeVar("Message", Progress, Report, SpanRecord)


class Store(Protocol):
    """The API server of a cluster, as the user may read and change it. Each call blocks."""

    def apply(
        self, documents: Sequence[msgspec.Raw], traceparent: str, *, dry_run: bool = False
    ) -> list[api.Applied]:
        """Apply manifests, which are to have the traceparent, or say what that would do."""

    def cordon(self, node: str, *, unschedulable: bool) -> bool:
        """Cordon or uncordon a node; return whether that changed it."""

    def delete(self, target: Target, uid: str) -> bool:
        """Mark an incarnation for deletion; return whether it is gone."""

    def manifest(self, target: Target) -> dict[str, Any] | None:
        """Return the whole of an object; None when it does not exist."""


class DirectoryEntry(msgspec.Struct):
    """A service as it answers `$SRV.INFO`."""

    name: str
    version: str = ""
    metadata: dict[str, str] = {}


class _GetReply(msgspec.Struct, frozen=True, kw_only=True):
    """An `api.GetReply` whose objects are decoded one by one, each as its kind."""

    items: list[msgspec.Raw] = []
    next: str = ""
    failure: Failure | None = None


class OperatorClient:
    """The operator behind one server."""

    def __init__(
        self,
        bus: Bus,
        server: Server,
        wall: Callable[[], float] = time.time,
        store: Store | None = None,
    ) -> None:
        """Use a connected `bus`. `wall` returns seconds since the epoch.

        With `store` people's objects are changed by it: the operator of a cluster changes none.
        """
        self.bus = bus
        self._store = store
        self._server = server
        self._wall = wall

    async def apply(
        self, documents: Sequence[msgspec.Raw], traceparent: str, *, dry_run: bool = False
    ) -> list[api.Applied]:
        if self._store is not None:
            apply = partial(self._store.apply, documents, traceparent, dry_run=dry_run)
            return await in_thread(apply)
        request = api.ApplyRequest(
            documents=list(documents), traceparent=traceparent, dry_run=dry_run
        )
        return (await self._ask("apply", request, api.ApplyReply)).results

    async def get(self, target: Target) -> AnyObject | None:
        request = api.GetRequest(
            kind=target.kind.name, namespace=target.namespace, name=target.name
        )
        try:
            reply = await self._ask("get", request, _GetReply)
        except RemoteFailure as error:
            if error.failure.reason == "NotFound":
                return None
            raise
        return _object(target.kind, reply.items[0]) if reply.items else None

    async def all_of(self, kind: Kind, namespace: str | None) -> list[AnyObject]:
        found: list[AnyObject] = []
        after = ""
        for _ in range(MAX_PAGES):
            request = api.GetRequest(kind=kind.name, namespace=namespace, after=after)
            reply = await self._ask("get", request, _GetReply)
            found += [_object(kind, item) for item in reply.items]
            after = reply.next
            if not after:
                break
        return found

    async def manifest(self, target: Target) -> dict[str, Any] | None:
        if self._store is not None:
            return await in_thread(self._store.manifest, target)
        found = await self.get(target)
        return None if found is None else formats.data(found)

    async def delete(self, target: Target, uid: str = "") -> bool:
        if self._store is not None and not target.kind.is_ours:
            return await in_thread(self._store.delete, target, uid)
        request = api.DeleteRequest(**_about(target), uid=uid)
        return (await self._ask("delete", request, api.DeleteReply)).gone

    async def verify(self, target: Target, uid: str = "") -> api.VerifyReply:
        request = api.VerifyRequest(**_about(target), uid=uid)
        return await self._ask("verify", request, api.VerifyReply)

    async def cordon(
        self, node: NodeName, resource_version: str = "", *, unschedulable: bool
    ) -> api.CordonReply:
        if self._store is not None:
            cordon = partial(self._store.cordon, node, unschedulable=unschedulable)
            return api.CordonReply(node=node, changed=await in_thread(cordon))
        request = api.CordonRequest(
            node=node, unschedulable=unschedulable, resource_version=resource_version
        )
        return await self._ask("cordon", request, api.CordonReply)

    async def abort(self, target: Target, by: str, uid: str = "") -> api.AbortReply:
        request = api.AbortRequest(**_about(target), uid=uid, by=by)
        return await self._ask("abort", request, api.AbortReply)

    async def requeue(self, order: str) -> api.RequeueReply:
        return await self._ask("requeue", api.RequeueRequest(order=order), api.RequeueReply)

    async def arm_fault(self, node: str, service: str, fault: api.Fault) -> list[api.Fault]:
        """Arm a fault in a service of a simulated node; return all that are armed. NotFound."""
        return await self._switch_faults(node, service, api.SimRequest(arm=fault))

    async def clear_faults(self, node: str, service: str) -> list[api.Fault]:
        """Disarm all faults of a service of a simulated node. NotFound."""
        return await self._switch_faults(node, service, api.SimRequest(clear=True))

    async def _switch_faults(
        self, node: str, service: str, request: api.SimRequest
    ) -> list[api.Fault]:
        subject = subjects.rpc(check_node(node), service, "sim")
        try:
            answer = await self.bus.request(subject, encode_json(request))
        except NotFound as error:
            raise NotFound(
                f"no fault switch of {service} on {node} answers",
                next_step=f"if it was killed: snapshotctl sim restart {node}; the nodes are in "
                "snapshotctl nodes, and only those of a local cluster have the switch",
            ) from error
        reply = decode_json(answer, api.SimReply)
        if reply.failure is not None:
            raise RemoteFailure(reply.failure)
        return reply.armed

    async def health(self) -> api.HealthReply:
        return await self._ask("health", api.HealthRequest(), api.HealthReply)

    async def is_healthy(self) -> bool:
        """Whether the operator answers."""
        try:
            await self.health()
        except (NotFound, BusUnavailable):
            return False
        return True

    async def queued(self, node: NodeName | None) -> list[Queued]:
        filter_ = f"snap.order.{token(node) if node else '*'}.*.*"
        found = await self.bus.replay(subjects.ORDERS, filter_)
        return [Queued(d.subject, d.sequence, stored_at(d), d.data) for d in found]

    async def progress_now(self, node: NodeName | None) -> list[Progress]:
        filter_ = f"snap.progress.{token(node) if node else '*'}.*"
        return await self._kept(subjects.PROGRESS, filter_, Progress)

    async def dead(self, node: NodeName | None) -> list[DeadMessage]:
        filter_ = subjects.dead(node) if node else "snap.dead.*"
        found = []
        for delivery in await self.bus.replay(subjects.DEAD, filter_):
            with contextlib.suppress(InvalidMessage):
                content = decode_json(delivery.data, DeadLetter)
                found.append(DeadMessage(delivery.sequence, content))
        return found

    async def retention(self, namespace: str | None, *, run: bool) -> api.RetentionReply:
        request = api.RetentionRequest(namespace=namespace, run=run)
        reply = await self._ask("retention", request, api.RetentionReply)
        found = list(reply.artifacts)
        while reply.next:
            request = api.RetentionRequest(namespace=namespace, after=reply.next)
            reply = await self._ask("retention", request, api.RetentionReply)
            found += reply.artifacts
        return api.RetentionReply(artifacts=found, limits=reply.limits)

    @contextlib.asynccontextmanager
    async def watching(self, target: Target) -> AsyncIterator[_Changes]:
        kind, name = target.kind, target.name
        if name is None:
            subject = f"{subjects.EVENTS}.{kind.plural}.>"
        else:
            subject = subjects.event(kind.plural, target.namespace, name)
        async with self._changes(subject) as changes:
            yield changes

    @contextlib.asynccontextmanager
    async def spans_arriving(self, trace_id: str) -> AsyncIterator[_Changes]:
        async with self._changes(subjects.spans_of(trace_id)) as changes:
            yield changes

    @contextlib.asynccontextmanager
    async def buckets_changing(self) -> AsyncIterator[_Changes]:
        """Subscribe to all buckets for the length of the block.

        Nodes write their presence to one, and the operator its schemas when it begins to serve.
        """
        async with self._changes("$KV.>") as changes:
            yield changes

    @contextlib.asynccontextmanager
    async def api_used(self) -> AsyncIterator[_Changes]:
        """Subscribe to the use of JetStream for the length of the block. Services begin with it."""
        async with self._changes("$JS.EVENT.ADVISORY.API") as changes:
            yield changes

    async def nodes_ready(self, nodes: Sequence[NodeSpec], since: float) -> None:
        """Wait until each node has published its devices since `since`, seconds since the epoch."""
        async with self.buckets_changing() as changes:
            while not await self._are_ready(nodes, since):
                await changes.wait()

    async def _are_ready(self, nodes: Sequence[NodeSpec], since: float) -> bool:
        try:
            presence = await self.presence()
            objects = await self.all_of(KINDS["Node"], None)
        except BusUnavailable:
            return False
        ready = {
            node.metadata.name
            for node in objects
            if isinstance(node, Node) and is_true(node.status.conditions, "Ready")
        }
        return all(
            node.name in ready
            and (seen := presence.get(NodeName(node.name))) is not None
            and seen.at >= since
            and len(seen.devices) >= node.gpus
            for node in nodes
        )

    async def facts_of(self, node: str, artifact: ArtifactRef) -> api.FactsReply:
        question = subjects.rpc(check_node(node), "agent", "status")
        try:
            answer = await self.bus.request(question, encode_json(artifact))
        except (NotFound, BusUnavailable) as error:
            raise BusUnavailable(
                f"the agent of {node} does not answer",
                next_step="see whether it is there: snapshotctl doctor",
            ) from error
        return decode_json(answer, api.FactsReply)

    async def answers(self, node: str, service: str) -> bool:
        """Whether a service of a node answers questions."""
        try:
            await self.bus.request(subjects.rpc(check_node(node), service, "status"), b"")
        except (NotFound, BusUnavailable):
            return False
        return True

    async def versions(self) -> list[tuple[str, str, str]]:
        """Return what answers, each with its version and where it is. BusUnavailable."""
        present = await self.presence()
        # An operator, and an agent and a GMS a node; a wrong count only costs the full wait.
        expected = 1 + 2 * len(present)
        found = [("nats-server", self.bus.server_version, shown(self._server.url))]
        for answer in await self.bus.ask_all("$SRV.INFO", expected=expected, within_s=DIRECTORY_S):
            with contextlib.suppress(InvalidMessage):
                service = decode_json(answer, DirectoryEntry)
                found.append((service.name, service.version, service.metadata.get("node", "-")))
        is_of_node = ("snap-agent", "snap-gms")
        return sorted(found, key=lambda row: (row[0] in is_of_node, row[2], row[0]))

    @contextlib.asynccontextmanager
    async def _changes(self, subject: str) -> AsyncIterator[_Changes]:
        again = self.bus.reconnections()
        async with self.bus.listening(subject) as queue:
            yield _Changes(queue, again)

    async def spans(self, trace_id: str) -> list[SpanRecord]:
        return await self._kept(subjects.SPANS, subjects.spans_of(trace_id), SpanRecord)

    async def presence(self) -> dict[NodeName, Presence]:
        found: dict[NodeName, Presence] = {}
        for key, value in (await heeding(self.bus.entries(subjects.NODES_BUCKET))).items():
            with contextlib.suppress(InvalidInput):
                found[NodeName(name_of(key))] = decode_json(value, Presence)
        return found

    async def paused(self) -> frozenset[str]:
        return await heeding(self.bus.paused(subjects.ORDERS))

    @contextlib.asynccontextmanager
    async def progress(self) -> AsyncIterator[AsyncIterator[Progress]]:
        async with self.bus.listening("snap.progress.>") as queue:
            yield _progress(queue)

    async def last_progress(self, order: str) -> Progress | None:
        filter_ = f"snap.progress.*.{check_order_id(order)}"
        found = await self._kept(subjects.PROGRESS, filter_, Progress)
        return found[-1] if found else None

    async def reports(self, orders: Collection[str] | None = None) -> list[Report]:
        if orders is None:
            return await self._kept(subjects.REPORTS, "snap.report.>", Report)
        filters = [f"snap.report.*.{check_order_id(order)}.*" for order in orders]
        return [
            report
            for filter_ in filters
            for report in await self._kept(subjects.REPORTS, filter_, Report)
        ]

    async def all_spans(self) -> list[SpanRecord]:
        return await self._kept(subjects.SPANS, "snap.span.>", SpanRecord)

    async def _kept(self, stream: str, filter_: str, type_: type[Message]) -> list[Message]:
        """Return the messages of a stream; what cannot be decoded is left out."""
        found = []
        for delivery in await heeding(self.bus.replay(stream, filter_)):
            with contextlib.suppress(InvalidMessage):
                found.append(decode_json(delivery.data, type_))
        return found

    @contextlib.asynccontextmanager
    async def news(self) -> AsyncIterator[AsyncIterator[News]]:
        again = self.bus.reconnections()
        async with (
            self.bus.listening(f"{subjects.EVENTS}.>") as events,
            self.bus.listening("snap.report.>") as reports,
            self.bus.listening("snap.span.>") as spans,
        ):
            yield _news((events, reports, spans), again)

    async def _ask(self, verb: str, request: msgspec.Struct, type_: type[Reply]) -> Reply:
        data = encode_json(request)
        if len(data) > MAX_REQUEST_BYTES:
            raise InvalidInput(
                f"the request has {len(data)} bytes as JSON; {MAX_REQUEST_BYTES} fit into one",
                next_step="split the file and apply its parts one after another",
            )
        try:
            headers = api.age_headers(self._wall(), ASK_S)
            answer = await heeding(
                self.bus.request(subjects.api(verb), data, timeout_s=ASK_S, headers=headers)
            )
        except NotFound as error:
            raise BusUnavailable(
                f"no operator answers behind {shown(self._server.url)} ({self._server.source})",
                next_step=f"start it again: {_restarted(self._server, 'operator')}"
                if self._server.cluster
                else "start it, or name another server with --server; "
                "snapshotctl up starts a local cluster",
            ) from error
        reply = decode_json(answer, type_, limit=MAX_REPLY_BYTES)
        if reply.failure is not None:
            raise RemoteFailure(reply.failure)
        return reply


class _Changes:
    """The messages of a subject, reduced to the fact that there were some."""

    def __init__(self, queue: asyncio.Queue[Delivery], again: asyncio.Event) -> None:
        self._queue = queue
        self._again = again

    async def wait(self) -> None:
        waiters = [
            asyncio.ensure_future(self._queue.get()),
            asyncio.ensure_future(self._again.wait()),
        ]
        try:
            await asyncio.wait(waiters, timeout=SAFETY_S, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for waiter in waiters:
                waiter.cancel()
        self._again.clear()
        # Events that came together cause one read.
        while not self._queue.empty():
            self._queue.get_nowait()


class _Announced(msgspec.Struct):
    """The fields of every object of an `api.ObjectEvent`, which has no specs."""

    kind: str
    metadata: ObjectMeta


async def _news(
    queues: Sequence[asyncio.Queue[Delivery]], again: asyncio.Event
) -> AsyncIterator[News]:
    """Yield what arrives, in the order of its arrival on each queue; None after a reconnection."""
    while True:
        waiters = [asyncio.ensure_future(queue.get()) for queue in queues]
        waiters_again = asyncio.ensure_future(again.wait())
        try:
            await asyncio.wait([*waiters, waiters_again], return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A waiter that is done has taken its message from the queue: it is yielded below.
            arrived = [waiter.result() for waiter in waiters if _is_there(waiter)]
            for waiter in (*waiters, waiters_again):
                waiter.cancel()
        if again.is_set():
            again.clear()
            yield None
        for delivery in arrived:
            try:
                found = _one_news(delivery)
            except (InvalidMessage, NotFound, msgspec.ValidationError) as error:
                log.info("news on %s is not understood: %s", delivery.subject, error)
            else:
                yield found


def _is_there(waiter: asyncio.Future[Any]) -> bool:
    return waiter.done() and not waiter.cancelled()


def _one_news(delivery: Delivery) -> News:
    if delivery.subject.startswith("snap.report."):
        return decode_json(delivery.data, Report)
    if delivery.subject.startswith("snap.span."):
        return decode_json(delivery.data, SpanRecord)
    event = decode_json(delivery.data, api.ObjectEvent, limit=api.MAX_EVENT_BYTES)
    announced = msgspec.convert(event.object, _Announced)
    meta = announced.metadata
    kind = find_kind(announced.kind)
    target = Target(kind, meta.namespace, meta.name)
    return ObjectChanged(event.type, target, meta.uid, owners_of(meta))


async def _progress(queue: asyncio.Queue[Delivery]) -> AsyncIterator[Progress]:
    while True:
        delivery = await queue.get()
        with contextlib.suppress(InvalidMessage):
            yield decode_json(delivery.data, Progress)


def _about(target: Target) -> dict[str, Any]:
    """Return the fields by which a request names one object."""
    return {
        "kind": target.kind.name,
        "namespace": target.namespace,
        "name": target.name or "",
    }


def stored_at(delivery: Delivery) -> float:
    """Return when the server stored a message, in seconds since the epoch, or 0.0."""
    return formats.instant(delivery.headers.get("Nats-Time-Stamp", "")) or 0.0


def _object(kind: Kind, item: msgspec.Raw) -> AnyObject:
    try:
        return msgspec.json.decode(item, type=KINDS[kind.name].type)  # type: ignore[no-any-return]
    except msgspec.ValidationError as error:
        raise InvalidMessage(
            f"the operator sent a {kind.name} that this snapshotctl cannot read: {error}",
            next_step="use the snapshotctl of the same version as the operator",
        ) from error


@contextlib.asynccontextmanager
async def connected(
    server: Server, *, patiently: bool = False, store: Store | None = None
) -> AsyncIterator[OperatorClient]:
    """Connect for the length of the block. BusUnavailable, at once, when nothing answers.

    With `patiently` a connection that is lost later on is built again.
    """
    bus = _bus(server)
    try:
        async with asyncio.timeout(CONNECT_S):
            await _open(bus, server, patiently=patiently)
    except TimeoutError:
        raise _unreachable(server, f"no answer within {CONNECT_S:.0f} s") from None
    except NotPermitted as error:
        raise NotPermitted(
            f"{error.message.replace(server.url, shown(server.url))} (from {server.source})",
            next_step="set NATS_NKEY to the path of a seed, or use --cluster or a nats context",
            **error.values,
        ) from error
    except BusUnavailable as error:
        raise _unreachable(server, error.message) from error
    try:
        yield OperatorClient(bus, server, store=store)
    finally:
        await bus.close()


def _bus(server: Server) -> Bus:
    return Bus(
        server.url,
        "snapshotctl",
        credentials=server.credentials,
        ca=server.ca,
        inbox=server.inbox,
    )


async def _open(bus: Bus, server: Server, *, patiently: bool) -> None:
    if patiently:
        # A patient connection waits without limit; a first one fails at once without a server.
        probe = _bus(server)
        await probe.connect(patiently=False)
        await probe.close()
    await bus.connect(patiently=patiently)


def _unreachable(server: Server, why: str) -> BusUnavailable:
    why = why.replace(server.url, shown(server.url))
    return BusUnavailable(
        f"cannot reach {shown(server.url)} (from {server.source}): {why}",
        next_step=f"start what is down again: {_restarted(server, 'nats-server')}"
        if server.cluster
        else "check the address, or start a local cluster with: snapshotctl up",
    )


def _restarted(server: Server, program: str) -> str:
    return f"snapshotctl sim restart {program} --cluster {server.cluster}"
