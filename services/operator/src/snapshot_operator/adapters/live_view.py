"""What is going on now, for whoever looks: followed only while somebody does.

One observer serves all who look. It reads the store and the streams once, then follows changes,
and offers each section of the view when it has changed. Nobody is sent a queue of old views: who
is slow gets the newest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from snapshot_operator.domain.flow import Known, details
from snapshot_operator.domain.page import (
    Entry,
    Facts,
    GmsAnswer,
    entry_of,
    family,
    key_of,
    moved,
    revision,
    sections,
    told,
    traced,
)
from snapshot_operator.domain.plan import orders_of
from snapshot_operator.ports import Change, Cluster
from snapshot_shared import subjects
from snapshot_shared.api import MAX_EVENT_BYTES, ObjectNews
from snapshot_shared.bus import Bus, Delivery
from snapshot_shared.clocks import Clocks
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import (
    BusUnavailable,
    InvalidInput,
    InvalidMessage,
    NotFound,
    NotPermitted,
)
from snapshot_shared.ids import NodeName, OrderId, check_node, owner_of
from snapshot_shared.objects import KINDS, AnyObject, kind_of
from snapshot_shared.orders import DeadLetter, Presence, Progress, Report
from snapshot_shared.spans import SpanRecord
from snapshot_shared.tasks import end_all

log = logging.getLogger(__name__)

PAGE = 200
"""Objects that are read from the store at a time."""

REST_S = 0.2
"""The least time between two views, in seconds."""

REST_SHARE = 10
"""A view is made again after this many times the time that it took: a tenth of one CPU at most."""

LOOK_S = 5.0
"""How long until it is looked whether NATS is still there, in seconds."""

AGAIN_S = 1.0
ASK_S = 2.0
ASKED_AT_ONCE = 8
MOST_MARKS = 10_000
MOST_PROGRESS = 2_000
FIRST_VIEW_S = 10.0

_BY_PLURAL = {kind.plural: kind for kind in KINDS.values()}


class Update(NamedTuple):
    """Sections as JSON by name, and the version that whoever has them is at."""

    version: int
    sections: dict[str, bytes]


class Feed:
    """The newest value of each section, and the version at which it changed."""

    def __init__(self, life: str) -> None:
        """`life` names this process, so that a version of another one is not believed."""
        self.life = life
        self.version = 0
        self._sections: dict[str, tuple[int, bytes]] = {}
        self._news = asyncio.Event()

    def offer(self, values: dict[str, Any]) -> None:
        """Take new values; what is equal to the old is no news."""
        encoded = {name: encode_json(value) for name, value in values.items()}
        changed = {
            name: data
            for name, data in encoded.items()
            if name not in self._sections or self._sections[name][1] != data
        }
        if not changed:
            return
        self.version += 1
        self._sections |= {name: (self.version, data) for name, data in changed.items()}
        news, self._news = self._news, asyncio.Event()
        news.set()

    def forget(self) -> None:
        """Keep nothing for the time in which nobody looks."""
        self._sections.clear()

    def since(self, version: int) -> Update:
        """Give the sections that changed after a version; all of them after 0."""
        return Update(
            self.version,
            {name: data for name, (at, data) in self._sections.items() if at > version},
        )

    async def changed(self, version: int) -> None:
        """Wait until there is something newer than a version."""
        while self.version <= version or not self._sections:
            await self._news.wait()


class _Kept(NamedTuple):
    """What was read from the streams for one object, and at which revision."""

    revision: str
    reports: list[Report]
    spans: list[SpanRecord]


class LiveView:
    """The observer. It begins with the first who looks and ends with the last."""

    def __init__(self, cluster: Cluster, bus: Bus, clocks: Clocks, life: str, context: str) -> None:
        """Use the store and a bus; nothing is read yet. `context` is a nats context, or empty."""
        self._cluster = cluster
        self._bus = bus
        self._clocks = clocks
        self._context = context
        self.feed = Feed(life)
        self._lookers = 0
        self._task: asyncio.Task[None] | None = None
        self._followers: list[asyncio.Task[None]] = []
        self._dirty = asyncio.Event()
        self._to_ask: dict[NodeName, None] = {}
        self._asking = asyncio.Event()
        self._letters = asyncio.Event()
        self._reset()
        cluster.subscribe(self._changed)

    def _reset(self) -> None:
        self._entries: dict[str, Entry] = {}
        self._presence: dict[str, Presence] = {}
        self._gms: dict[str, GmsAnswer | None] = {}
        self._progress: dict[str, Progress] = {}
        self._dead: dict[str, tuple[int, DeadLetter]] = {}
        self._marks: dict[str, int] = {}
        self._kept: dict[str, _Kept] = {}
        self._to_ask.clear()

    def now(self) -> float:
        """Give the time here, in seconds since the epoch: what ages are counted from."""
        return self._clocks.wall()

    @contextlib.asynccontextmanager
    async def looking(self) -> AsyncIterator[Feed]:
        """Follow what happens for the length of the block; the feed has a view when it begins.

        TimeoutError when none could be made in FIRST_VIEW_S seconds.
        """
        self._lookers += 1
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="live-view")
        try:
            async with asyncio.timeout(FIRST_VIEW_S):
                await self.feed.changed(0)
            yield self.feed
        finally:
            self._lookers -= 1
            if not self._lookers and self._task is not None:
                tasks = [self._task, *self._followers]
                self._task, self._followers = None, []
                await end_all(*tasks)
                if self._task is None:
                    self.feed.forget()
                    self._reset()

    # What is followed.

    def _changed(self, change: Change, value: AnyObject) -> None:
        """Take a change of the store; free while nobody looks."""
        if self._task is not None:
            self._take_object(change, value)

    def _take_object(self, change: Change, value: AnyObject) -> None:
        key = key_of(kind_of(value), value.metadata.namespace, value.metadata.name)
        if change == "DELETED":
            self._entries.pop(key, None)
            self._kept.pop(key, None)
        else:
            self._entries[key] = entry_of(value)
        self._dirty.set()

    async def _run(self) -> None:
        """Observe for as long as somebody looks, also when a connection ended in the middle."""
        never = asyncio.Event()
        while True:
            self._entries.clear()
            await self._read_store()
            self._offer()
            self._followers = [asyncio.create_task(work) for work in self._works()]
            # Who leaves last ends them, too: a cancellation of this task cannot be relied upon to
            # reach them.
            done, _ = await asyncio.wait(self._followers, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                error = task.exception()
                if isinstance(error, BusUnavailable):
                    log.info("the page has to look again: %s", error)
                else:
                    log.error("the page has to look again", exc_info=error)
            await end_all(*self._followers)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), AGAIN_S)

    def _works(self) -> list[Coroutine[Any, Any, None]]:
        following: dict[str, Callable[[Delivery], None]] = {
            "snap.report.>": self._take_report,
            "snap.progress.>": self._take_progress,
            "snap.span.>": self._take_span,
            "snap.dead.>": self._take_letter,
            subjects.bucket_key(subjects.NODES_BUCKET, "*"): self._take_presence,
        }
        return [
            *(self._follow(subject, take) for subject, take in following.items()),
            self._follow_objects(),
            self._read_streams(),
            self._ask_services(),
            self._read_letters(),
            self._keep_offering(),
        ]

    async def _read_store(self) -> None:
        for kind in KINDS.values():
            after = ""
            while True:
                found = await self._cluster.list(kind.name, after=after, limit=PAGE)
                for value in found:
                    self._take_object("ADDED", value)
                if len(found) < PAGE:
                    break
                await _others_first()
                meta = found[-1].metadata
                after = f"{meta.namespace or ''}/{meta.name}"

    async def _follow(self, subject: str, take: Callable[[Delivery], None]) -> None:
        async with self._listening(subject) as heard:
            while True:
                delivery = await heard.get()
                try:
                    take(delivery)
                except (InvalidInput, InvalidMessage):
                    continue
                self._dirty.set()

    @contextlib.asynccontextmanager
    async def _listening(self, subject: str) -> AsyncIterator[asyncio.Queue[Delivery]]:
        """Listen; where that is not permitted the page has less to show, and the log says why."""
        try:
            async with self._bus.listening(subject) as heard:
                yield heard
        except NotPermitted as error:
            log.warning("the page does not hear %s: %s", subject, error)
            yield asyncio.Queue()

    def _take_report(self, delivery: Delivery) -> None:
        report = decode_json(delivery.data, Report)
        self._mark(owner_of(OrderId(report.order)))
        if report.service == "gms":
            self._ask(report.node)

    def _take_progress(self, delivery: Delivery) -> None:
        progress = decode_json(delivery.data, Progress)
        if len(self._progress) >= MOST_PROGRESS:
            self._progress.pop(next(iter(self._progress)))
        self._progress[progress.order] = progress
        self._mark(moved(owner_of(OrderId(progress.order))))

    def _take_span(self, delivery: Delivery) -> None:
        self._mark(delivery.subject.rpartition(".")[2])

    def _take_letter(self, _delivery: Delivery) -> None:
        self._letters.set()

    def _take_presence(self, delivery: Delivery) -> None:
        presence = decode_json(delivery.data, Presence)
        self._presence[presence.node] = presence
        self._ask(presence.node)

    def _mark(self, what: str) -> None:
        if what not in self._marks and len(self._marks) >= MOST_MARKS:
            self._marks.pop(next(iter(self._marks)))
        self._marks[what] = self._marks.get(what, 0) + 1

    async def _follow_objects(self) -> None:
        """Read again what another operator on this store says that it changed."""
        async with self._listening(f"{subjects.EVENTS}.>") as heard:
            while True:
                delivery = await heard.get()
                try:
                    changed = decode_json(delivery.data, ObjectNews, limit=MAX_EVENT_BYTES).object
                except InvalidMessage:
                    continue
                if (kind := KINDS.get(changed.kind)) is None:
                    continue
                meta = changed.metadata
                value = await self._cluster.get(kind.name, meta.namespace, meta.name)
                if value is not None:
                    self._take_object("MODIFIED", value)
                elif self._entries.pop(key_of(kind, meta.namespace, meta.name), None):
                    self._dirty.set()

    async def _read_streams(self) -> None:
        """Read what the streams hold now, and again after each reconnection."""
        again = self._bus.reconnections()
        while True:
            try:
                for value in (await self._bus.entries(subjects.NODES_BUCKET)).values():
                    with contextlib.suppress(InvalidMessage):
                        presence = decode_json(value, Presence)
                        self._presence[presence.node] = presence
                        self._ask(presence.node)
                for found in await self._bus.replay(subjects.PROGRESS, "snap.progress.>"):
                    with contextlib.suppress(InvalidInput):
                        self._take_progress(found)
            except NotPermitted as error:
                log.warning("the page has less to show: %s", error)
            except BusUnavailable as error:
                log.info("the page cannot read the streams yet: %s", error)
                await self._bus.pause(again)
                continue
            self._letters.set()
            self._dirty.set()
            await again.wait()
            again.clear()

    async def _read_letters(self) -> None:
        """Read the newest dead letter of each node, whenever there is one more."""
        while True:
            await self._letters.wait()
            self._letters.clear()
            try:
                counts = await self._bus.subjects_in(subjects.DEAD, "snap.dead.>")
                for subject, count in counts.items():
                    if found := await self._bus.last(subjects.DEAD, subject):
                        letter = decode_json(found[1], DeadLetter, limit=1024 * 1024)
                        self._dead[subject] = (count, letter)
            except (BusUnavailable, InvalidMessage) as error:
                log.info("the dead letters are not shown: %s", error)
            self._dirty.set()

    def _ask(self, node: str) -> None:
        with contextlib.suppress(InvalidInput):
            self._to_ask[check_node(node)] = None
            self._asking.set()

    async def _ask_services(self) -> None:
        """Ask the GPU memory services of the nodes that gave a sign of life."""
        while True:
            await self._asking.wait()
            self._asking.clear()
            while self._to_ask:
                count = min(ASKED_AT_ONCE, len(self._to_ask))
                nodes = [self._to_ask.popitem()[0] for _ in range(count)]
                await asyncio.gather(*map(self._ask_service, nodes))
                self._dirty.set()

    async def _ask_service(self, node: NodeName) -> None:
        subject = subjects.rpc(node, "gms", "status")
        try:
            answer = await self._bus.request(subject, b"", timeout_s=ASK_S)
            self._gms[node] = decode_json(answer, GmsAnswer)
        except (BusUnavailable, InvalidMessage, NotFound):
            self._gms[node] = None

    # What is offered.

    async def _keep_offering(self) -> None:
        never = asyncio.Event()
        while True:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._dirty.wait(), LOOK_S)
            self._dirty.clear()
            began = self._clocks.monotonic()
            self._offer()
            took_s = self._clocks.monotonic() - began
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(never.wait(), max(REST_S, REST_SHARE * took_s))

    def _offer(self) -> None:
        self.feed.offer(sections(self._facts()))

    def _facts(self) -> Facts:
        return Facts(
            entries=self._entries,
            presence=self._presence,
            gms=self._gms,
            progress=self._progress,
            dead=self._dead,
            bus=self._bus.not_ready(),
            marks=self._marks,
            context=self._context,
            now=self._clocks.wall(),
        )

    # One object.

    async def details(self, plural: str, namespace: str, name: str) -> bytes:
        """Give the details of one object as JSON, for whoever is `looking`. NotFound."""
        kind = _BY_PLURAL.get(plural)
        entry = self._entries.get(f"{plural}/{namespace}/{name}")
        if kind is None or entry is None:
            raise NotFound(
                f"there is no {plural[:80]}/{namespace[:80]}/{name[:80]}",
                next_step="go back to the page; it lists what there is",
            )
        entry = traced(entry, self._entries)
        values = await self._values(entry)
        if not values:
            raise NotFound(f"{kind.name} {entry.name} is gone")
        kept = await self._read(entry, values)
        known = Known(values, kept.reports, kept.spans, self._progress)
        return encode_json({**details(entry, known, self._context), "revision": kept.revision})

    async def _values(self, entry: Entry) -> list[AnyObject]:
        found = []
        for one in family(entry, self._entries):
            value = await self._cluster.get(one.kind, one.namespace or None, one.name)
            if value is not None:
                found.append(value)
            elif one.key == entry.key:
                return []
        return found

    async def _read(self, entry: Entry, values: list[AnyObject]) -> _Kept:
        """Read reports and spans, unless nothing was heard of the object since the last time."""
        now = revision(entry, self._facts(), self._entries)
        kept = self._kept.get(entry.key)
        if kept is not None and told(kept.revision) == told(now):
            return kept._replace(revision=now)
        orders = {item.order for value in values for item in orders_of(value)}
        try:
            reports = [r for order in sorted(orders) for r in await self._reports(order)]
            spans = await self._spans(entry.trace) if entry.trace else []
        except BusUnavailable as error:
            log.info("the page shows what the store knows of %s: %s", entry.key, error)
            return _Kept(now, kept.reports if kept else [], kept.spans if kept else [])
        if len(self._kept) >= PAGE:
            self._kept.pop(next(iter(self._kept)))
        self._kept[entry.key] = _Kept(now, reports, spans)
        return self._kept[entry.key]

    async def _reports(self, order: str) -> list[Report]:
        deliveries = await self._bus.replay(subjects.REPORTS, subjects.reports_of(OrderId(order)))
        return [report for found in deliveries if (report := _decoded(found, Report))]

    async def _spans(self, trace: str) -> list[SpanRecord]:
        deliveries = await self._bus.replay(subjects.SPANS, subjects.spans_of(trace))
        return [span for found in deliveries if (span := _decoded(found, SpanRecord))]


def _decoded(delivery: Delivery, type_: type[Any]) -> Any:
    try:
        return decode_json(delivery.data, type_)
    except InvalidMessage:
        return None


async def _others_first() -> None:
    """Let whatever else is ready run: orders do not wait for a page that is opened."""
    turn = asyncio.Event()
    asyncio.get_running_loop().call_soon(turn.set)
    await turn.wait()
