"""A view of the cluster over NATS, with the permissions of a viewer.

All readers share one observer, which runs while there are any. It lists the objects from the
operator once and then applies their announcements, which carry identity and status; a spec never
changes but for that of a node, which is read again. Announcements may be lost, so the objects are
listed again after a reconnection, and when the operator is another one or has not answered.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, Literal, NamedTuple, TypeVar

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import Node, Pod
from snapshot_api.kind import Kind
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.meta import ObjectMeta
from snapshot_api.v1alpha1.restore import SnapshotRestore, restore_name
from snapshot_api.views import orders_of
from snapshot_page.domain import view
from snapshot_page.domain.details import details
from snapshot_page.domain.view import Entry, Facts, GmsAnswer
from snapshot_page.ports import Feed
from snapshot_shared import subjects
from snapshot_shared.api import MAX_EVENT_BYTES, GetRequest
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    BusUnavailable,
    Failure,
    InvalidInput,
    InvalidMessage,
    NotFound,
)
from snapshot_shared.ids import NodeName, OrderId, check_node, owner_of
from snapshot_shared.orders import DeadLetter, Presence, Progress, Report
from snapshot_shared.spans import SpanRecord
from snapshot_shared.tasks import end_all

log = logging.getLogger(__name__)

MAX_KEPT = 200
"""Objects whose reports and spans are kept."""

REST_S = 0.2
"""The least time between two views, in seconds."""

REST_SHARE = 10
"""A view is made again after this many times the time that it took: a tenth of one CPU at most."""

PING_S = 5.0
"""How often the operator is asked for a sign of life while there are readers, in seconds."""

AGAIN_S = 1.0
REQUEST_S = 2.0
MAX_REQUESTS = 8
MAX_MARKS = 10_000
MAX_PROGRESS = 2_000
FIRST_VIEW_S = 10.0
PING = "$SRV.PING.snap-operator"
"""What each NATS service called snap-operator answers with its id."""

PLURALS = {kind.plural: kind for kind in KINDS.values()}

T = TypeVar("T")


class _GetReply(msgspec.Struct, frozen=True, kw_only=True):
    """An `api.GetReply` whose objects are decoded one by one, each as its kind."""

    items: list[msgspec.Raw] = []
    next: str = ""
    failure: Failure | None = None


class _Announced(msgspec.Struct, frozen=True):
    """The object in an `api.ObjectEvent`: without its spec."""

    metadata: ObjectMeta
    status: msgspec.Raw = msgspec.Raw(b"{}")


class _Event(msgspec.Struct, frozen=True):
    """An `api.ObjectEvent` whose status is decoded once its kind is known."""

    type: Literal["ADDED", "MODIFIED", "DELETED"]
    object: _Announced


class _Kept(NamedTuple):
    """What was read from the streams for one object, and at which revision."""

    revision: str
    reports: list[Report]
    spans: list[SpanRecord]


class LiveView:
    """The `View` over a bus. It reads nothing and keeps nothing while there are no readers."""

    def __init__(self, bus: Bus, clocks: Clocks, life: str, context: str) -> None:
        """Use the bus of a viewer; `context` is a nats context, `life` the name of the feed."""
        self._bus = bus
        self._clocks = clocks
        self._context = context
        self.feed = Feed(life)
        self._readers = 0
        self._task: asyncio.Task[None] | None = None
        self._followers: list[asyncio.Task[None]] = []
        self._reconnected = (bus.reconnections(), bus.reconnections())
        self._reset()

    def _reset(self) -> None:
        self._facts = Facts(context=self._context)
        self._changes: dict[str, Delivery] = {}
        self._is_stale = True
        self._kept: dict[str, _Kept] = {}
        self._nodes_to_ask: dict[NodeName, None] = {}
        self._objects_due = asyncio.Event()
        self._gms_due = asyncio.Event()
        self._dead_due = asyncio.Event()
        self._paused_due = asyncio.Event()
        self._view_due = asyncio.Event()
        self._first_list = asyncio.Event()

    def now(self) -> float:
        return self._clocks.wall()

    @contextlib.asynccontextmanager
    async def reading(self) -> AsyncIterator[Feed]:
        self._readers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live-view")
        try:
            async with asyncio.timeout(FIRST_VIEW_S):
                await self.feed.changed(0)
            yield self.feed
        finally:
            self._readers -= 1
            if not self._readers and self._task is not None:
                tasks = [self._task, *self._followers]
                self._task, self._followers = None, []
                await end_all(*tasks)
                # A reader may have come meanwhile.
                if self._task is None:
                    self.feed.forget()
                    self._reset()

    async def _run(self) -> None:
        """Observe while there are readers, also after a connection that has ended."""
        while True:
            self._followers = [asyncio.create_task(work) for work in self._works()]
            # `reading` ends the followers, too: nats-py can swallow the cancellation of this task.
            done, _ = await asyncio.wait(self._followers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                cause = None if isinstance(error, BusUnavailable) else error
                level = logging.ERROR if cause else logging.INFO
                log.log(level, "the cluster is followed again: %s", error, exc_info=cause)
            await end_all(*self._followers)
            self._offer()
            await _rest(AGAIN_S)

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        following: dict[str, Callable[[Delivery], None]] = {
            "snap.report.>": self._take_report,
            "snap.progress.>": self._take_progress,
            "snap.span.>": lambda found: self._mark(found.subject.rpartition(".")[2]),
            "snap.dead.>": lambda _: self._dead_due.set(),
            subjects.pauses(subjects.ORDERS): lambda _: self._paused_due.set(),
            subjects.bucket_key(subjects.NODES_BUCKET, "*"): self._take_presence,
        }
        return [
            *(self._follow(subject, take) for subject, take in following.items()),
            # The subscription comes first, or a change between the list and it would be lost.
            self._follow(f"{subjects.EVENTS}.>", self._take_event, begun=self._list_again),
            self._keep_objects(),
            self._ping_operator(),
            self._read_streams(),
            self._ask_gms(),
            self._read_dead(),
            self._read_paused(),
            self._keep_offering(),
        ]

    async def _follow(
        self,
        subject: str,
        take: Callable[[Delivery], None],
        begun: Callable[[], None] = lambda: None,
    ) -> None:
        async with self._bus.listening(subject) as received:
            begun()
            while True:
                delivery = await received.get()
                try:
                    take(delivery)
                except (InvalidInput, InvalidMessage):
                    continue
                self._view_due.set()

    # Objects.

    def _take_event(self, delivery: Delivery) -> None:
        # Only the newest of an object is kept, so that the number waiting is bounded.
        self._changes[delivery.subject] = delivery
        self._objects_due.set()

    def _list_again(self) -> None:
        self._is_stale = True
        self._objects_due.set()

    async def _keep_objects(self) -> None:
        """List the objects when that is due, and apply what is announced."""
        while True:
            await self._objects_due.wait()
            self._objects_due.clear()
            try:
                if self._is_stale:
                    await self._list_objects()
                while self._changes:
                    await self._apply(self._changes.pop(next(iter(self._changes))))
            except (BusUnavailable, NotFound) as error:
                self._facts.operator = f"the operator does not answer: {error.message}"
                self._list_again()
            self._first_list.set()
            self._view_due.set()
            if self._is_stale:
                await self._bus.pause(self._reconnected[0])

    async def _list_objects(self) -> None:
        self._is_stale = False
        found: dict[str, Entry] = {}
        for kind in KINDS.values():
            request = GetRequest(kind=kind.name)
            while True:
                values, following = await self._get(kind, request)
                for value in values:
                    _store(found, value)
                if not following:
                    break
                request = GetRequest(kind=kind.name, after=following)
        self._facts.entries = found
        self._facts.operator = ""
        self._kept.clear()

    async def _get(self, kind: Kind, request: GetRequest) -> tuple[list[AnyObject], str]:
        """Return the objects of one reply, and the `after` of the next page.

        NotFound when no operator runs, BusUnavailable when it does not answer.
        """
        reply = await self._request(subjects.api("get"), encode_json(request), _GetReply)
        if reply.failure is not None and reply.failure.reason != "NotFound":
            raise BusUnavailable(reply.failure.message)
        found = (_decoded(bytes(item), kind.type) for item in reply.items)
        return [value for value in found if value is not None], reply.next

    async def _apply(self, delivery: Delivery) -> None:
        """Apply one announcement. As `_get` when the object has to be read."""
        kind = PLURALS.get(delivery.subject.split(".")[2])
        event = _decoded(delivery.data, _Event)
        if kind is None or event is None:
            return
        meta = event.object.metadata
        key = view.key_of(kind.plural, meta.namespace, meta.name)
        entry = self._facts.entries.get(key)
        known = entry.value if entry is not None and entry.uid == meta.uid else None
        if event.type == "DELETED":
            # Not when the name belongs to another object by now.
            if known is not None:
                del self._facts.entries[key]
                self._kept.pop(key, None)
            return
        if known is None or isinstance(known, Node):
            request = GetRequest(kind=kind.name, namespace=meta.namespace, name=meta.name)
            values, _ = await self._get(kind, request)
        else:
            status = _decoded(bytes(event.object.status), type(known.status))
            values = [replace(known, metadata=meta, status=status)] if status is not None else []
        for value in values:
            _store(self._facts.entries, value)

    async def _ping_operator(self) -> None:
        """List the objects again when the operator is another one, or does not answer."""
        last = ""
        while True:
            try:
                found = str((await self._request(PING, b"", dict[str, Any])).get("id"))
            except (BusUnavailable, NotFound, InvalidMessage):
                found = ""
            is_other = bool(found and last and found != last)
            if is_other or not (found or self._facts.operator):
                self._list_again()
            last = found or last
            await _rest(PING_S)

    async def _request(self, subject: str, data: bytes, type_: type[T]) -> T:
        answer = await self._bus.request(subject, data, timeout_s=REQUEST_S)
        return decode_json(answer, type_, limit=MAX_EVENT_BYTES)

    # Streams and services.

    def _take_report(self, delivery: Delivery) -> None:
        report = decode_json(delivery.data, Report)
        self._mark(owner_of(OrderId(report.order)))
        if report.service == "gms":
            self._ask_soon(report.node)

    def _take_progress(self, delivery: Delivery) -> None:
        progress = decode_json(delivery.data, Progress)
        if len(self._facts.progress) >= MAX_PROGRESS:
            self._facts.progress.pop(next(iter(self._facts.progress)))
        self._facts.progress[progress.order] = progress
        self._mark(view.progress_mark(owner_of(OrderId(progress.order))))

    def _take_presence(self, delivery: Delivery) -> None:
        presence = decode_json(delivery.data, Presence)
        self._facts.presence[presence.node] = presence
        self._ask_soon(presence.node)

    def _mark(self, what: str) -> None:
        if what not in self._facts.marks and len(self._facts.marks) >= MAX_MARKS:
            self._facts.marks.pop(next(iter(self._facts.marks)))
        self._facts.marks[what] = self._facts.marks.get(what, 0) + 1

    async def _read_streams(self) -> None:
        """Read what the streams hold now, and again after each reconnection."""
        again = self._reconnected[1]
        while True:
            try:
                for value in (await self._bus.entries(subjects.NODES_BUCKET)).values():
                    if presence := _decoded(value, Presence):
                        self._facts.presence[presence.node] = presence
                        self._ask_soon(presence.node)
                for found in await self._bus.replay(subjects.PROGRESS, "snap.progress.>"):
                    with contextlib.suppress(InvalidInput):
                        self._take_progress(found)
            except BusUnavailable as error:
                log.info("the streams cannot be read yet: %s", error)
                await self._bus.pause(again)
                continue
            self._dead_due.set()
            self._paused_due.set()
            self._view_due.set()
            await again.wait()
            again.clear()
            self._list_again()

    async def _read_dead(self) -> None:
        """Read the newest dead letter of each node, whenever there is one more."""
        while True:
            await self._dead_due.wait()
            self._dead_due.clear()
            try:
                counts = await self._bus.subjects_in(subjects.DEAD, "snap.dead.>")
                for subject, count in counts.items():
                    if found := await self._bus.last(subjects.DEAD, subject):
                        message = decode_json(found[1], DeadLetter, limit=MAX_EVENT_BYTES)
                        self._facts.dead[subject] = (count, message)
            except (BusUnavailable, InvalidMessage) as error:
                log.info("the dead letters are not shown: %s", error)
            self._view_due.set()

    async def _read_paused(self) -> None:
        """Read which durables of orders are paused, whenever one was paused or resumed."""
        while True:
            await self._paused_due.wait()
            self._paused_due.clear()
            try:
                self._facts.paused = await self._bus.paused(subjects.ORDERS)
            except BusUnavailable as error:
                log.info("which durables are paused is not shown: %s", error)
            self._view_due.set()

    def _ask_soon(self, node: str) -> None:
        with contextlib.suppress(InvalidInput):
            self._nodes_to_ask[check_node(node)] = None
            self._gms_due.set()

    async def _ask_gms(self) -> None:
        """Request the status of the GPU memory services of nodes that published something."""
        while True:
            await self._gms_due.wait()
            self._gms_due.clear()
            nodes, self._nodes_to_ask = list(self._nodes_to_ask), {}
            for first in range(0, len(nodes), MAX_REQUESTS):
                await asyncio.gather(*map(self._ask_one, nodes[first : first + MAX_REQUESTS]))
                self._view_due.set()

    async def _ask_one(self, node: NodeName) -> None:
        try:
            answer = await self._request(subjects.rpc(node, "gms", "status"), b"", GmsAnswer)
        except (BusUnavailable, InvalidMessage, NotFound):
            self._facts.gms[node] = None
        else:
            self._facts.gms[node] = answer

    # What is offered.

    async def _keep_offering(self) -> None:
        await self._first_list.wait()
        while True:
            began = self._clocks.monotonic()
            self._offer()
            took_s = self._clocks.monotonic() - began
            await _rest(max(REST_S, REST_SHARE * took_s))
            # No event reports that the connection is lost.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._view_due.wait(), PING_S)
            self._view_due.clear()

    def _offer(self) -> None:
        self._facts.bus = self._bus.not_ready()
        self._facts.now = self._clocks.wall()
        found = view.sections(self._facts)
        self.feed.offer({name: encode_json(section) for name, section in found.items()})

    # One object.

    async def details(self, plural: str, namespace: str, name: str) -> bytes:
        entry = self._facts.entries.get(f"{plural}/{namespace}/{name}")
        if entry is None:
            raise NotFound(f"there is no {plural[:80]}/{namespace[:80]}/{name[:80]}")
        led_to = view.by_owner(self._facts.entries.values())
        entry = view.traced(entry, led_to)
        values = [one.value for one in view.family(entry, led_to)]
        kept = await self._read(entry, values, view.revision(entry, self._facts, led_to))
        found = details(entry, values, kept.reports, kept.spans, self._facts.progress)
        commands = view.commands_of(entry, self._context)
        return encode_json({**found, "commands": commands, "revision": kept.revision})

    async def _read(self, entry: Entry, values: list[AnyObject], now: str) -> _Kept:
        """Read reports and spans, unless none came for the object since the last revision."""
        kept = self._kept.get(entry.key)
        if kept is not None and view.without_progress(kept.revision) == view.without_progress(now):
            return kept._replace(revision=now)
        orders = {OrderId(item.order) for value in values for item in orders_of(value)}
        filters = [subjects.reports_of(order) for order in sorted(orders)]
        try:
            reports = [r for f in filters for r in await self._stored(subjects.REPORTS, f, Report)]
            spans = subjects.spans_of(entry.trace)
            found = await self._stored(subjects.SPANS, spans, SpanRecord) if entry.trace else []
        except BusUnavailable as error:
            log.info("what the store has of %s is shown: %s", entry.key, error)
            return _Kept(now, kept.reports if kept else [], kept.spans if kept else [])
        if len(self._kept) >= MAX_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[entry.key] = _Kept(now, reports, found)
        return self._kept[entry.key]

    async def _stored(self, stream: str, filter_: str, type_: type[T]) -> list[T]:
        deliveries = await self._bus.replay(stream, filter_)
        found = (_decoded(delivery.data, type_) for delivery in deliveries)
        return [message for message in found if message is not None]


def _store(entries: dict[str, Entry], value: AnyObject) -> None:
    """Put an object among the entries; that of a pod depends on its restore, too."""
    meta, restore = value.metadata, None
    if isinstance(value, Pod):
        found = entries.get(view.key_of("snapshotrestores", meta.namespace, restore_name(meta.uid)))
        restore = found.value if found else None
    entry = view.entry_of(value, restore if isinstance(restore, SnapshotRestore) else None)
    entries[entry.key] = entry
    if isinstance(value, SnapshotRestore):
        target = value.spec.pod_ref
        pod = entries.get(view.key_of("pods", meta.namespace, target.name))
        if pod is not None and pod.uid == target.uid:
            entries[pod.key] = view.entry_of(pod.value, value)


async def _rest(seconds: float) -> None:
    """Let other work of the process run for a while."""
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(asyncio.Event().wait(), seconds)


def _decoded(data: bytes, type_: type[T]) -> T | None:
    try:
        return decode_json(data, type_, limit=MAX_EVENT_BYTES)
    except InvalidMessage as error:
        log.info("a message is left out: %s", error)
        return None
