"""What is going on now: followed only while there are readers.

One observer serves all readers. It reads the objects and the streams once, then follows changes,
and offers each section of the view when it has changed. There is no queue of old views: a slow
reader gets the newest one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, NamedTuple

from snapshot_operator.api.page.flow import Known, details
from snapshot_operator.api.page.view import (
    Entry,
    Facts,
    GmsAnswer,
    by_owner,
    entry_of,
    family,
    key_of,
    moved,
    revision,
    sections,
    settled,
    traced,
)
from snapshot_operator.core.plan import orders_of
from snapshot_operator.core.restore import restore_name, source_of
from snapshot_operator.runtime.cluster import Cluster
from snapshot_shared import subjects
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
from snapshot_shared.objects import KINDS, AnyObject, Pod, SnapshotRestore
from snapshot_shared.orders import DeadLetter, Presence, Progress, Report
from snapshot_shared.spans import SpanRecord
from snapshot_shared.tasks import end_all, yield_turn

log = logging.getLogger(__name__)

TURN = 200
"""Objects that are reduced before other work of the process has its turn."""

MOST_KEPT = 200
"""Objects whose reports and spans are kept."""

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


class Update(NamedTuple):
    """Sections as JSON by name, and the version that they are of."""

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
        """Keep nothing for the time without readers."""
        self._sections.clear()

    def since(self, version: int) -> Update:
        """Return the sections that changed after a version; all of them after 0."""
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
    """The observer. It begins with the first reader and ends with the last."""

    def __init__(self, cluster: Cluster, bus: Bus, clocks: Clocks, life: str, context: str) -> None:
        """Use the objects and a bus; nothing is read yet. `context` is a nats context, or empty."""
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
        """Return the time here, in seconds since the epoch: what ages are counted from."""
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

    def _changed(self, old: AnyObject | None, new: AnyObject | None) -> None:
        """Take a change of an object; free while there are no readers."""
        value = new or old
        if self._task is None or value is None:
            return
        if new is not None:
            self._take_object(new)
        else:
            self._entries.pop(key_of(value), None)
            self._kept.pop(key_of(value), None)
        if isinstance(value, SnapshotRestore):
            pod = self._cluster.by_uid(value.spec.pod_ref.uid)
            if pod is not None:
                self._take_object(pod)
        self._dirty.set()

    def _take_object(self, value: AnyObject) -> None:
        self._entries[key_of(value)] = read_entry(self._cluster, value)

    async def _run(self) -> None:
        """Observe for as long as there are readers, also after a connection that has ended."""
        never = asyncio.Event()
        self._entries.clear()
        await self._read_objects()
        while True:
            self._offer()
            self._followers = [asyncio.create_task(work) for work in self._works()]
            # The last reader ends them, too: a cancellation of this task cannot be relied upon to
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
            self._read_streams(),
            self._ask_services(),
            self._read_letters(),
            self._keep_offering(),
        ]

    async def _read_objects(self) -> None:
        values = [value for kind in KINDS for value in self._cluster.all(kind)]
        for number, value in enumerate(values, 1):
            # What has changed since was taken as a change.
            if self._cluster.by_uid(value.metadata.uid) is value:
                self._take_object(value)
            if number % TURN == 0:
                await yield_turn()

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
        """Return the details of one object as JSON, for those who are `looking`. NotFound."""
        entry = self._entries.get(f"{plural}/{namespace}/{name}")
        if entry is None:
            raise NotFound(
                f"there is no {plural[:80]}/{namespace[:80]}/{name[:80]}",
                next_step="go back to the page; it lists what there is",
            )
        led_to = by_owner(self._entries.values())
        entry = traced(entry, led_to)
        found = (self._cluster.by_uid(one.uid) for one in family(entry, led_to))
        values = [value for value in found if value is not None]
        kept = await self._read(entry, values, revision(entry, self._facts(), led_to))
        known = Known(values, kept.reports, kept.spans, self._progress)
        return encode_json({**details(entry, known, self._context), "revision": kept.revision})

    async def _read(self, entry: Entry, values: list[AnyObject], now: str) -> _Kept:
        """Read reports and spans, unless none came for the object since the last revision."""
        kept = self._kept.get(entry.key)
        if kept is not None and settled(kept.revision) == settled(now):
            return kept._replace(revision=now)
        orders = {item.order for value in values for item in orders_of(value)}
        try:
            reports = [r for order in sorted(orders) for r in await self._reports(order)]
            spans = await self._spans(entry.trace) if entry.trace else []
        except BusUnavailable as error:
            log.info("the page shows what the store knows of %s: %s", entry.key, error)
            return _Kept(now, kept.reports if kept else [], kept.spans if kept else [])
        if len(self._kept) >= MOST_KEPT:
            self._kept.pop(next(iter(self._kept)))
        self._kept[entry.key] = _Kept(now, reports, spans)
        return self._kept[entry.key]

    async def _reports(self, order: str) -> list[Report]:
        deliveries = await self._bus.replay(subjects.REPORTS, subjects.reports_of(OrderId(order)))
        return [report for found in deliveries if (report := _decoded(found, Report))]

    async def _spans(self, trace: str) -> list[SpanRecord]:
        deliveries = await self._bus.replay(subjects.SPANS, subjects.spans_of(trace))
        return [span for found in deliveries if (span := _decoded(found, SpanRecord))]


def read_entry(cluster: Cluster, value: AnyObject) -> Entry:
    """Return the entry of an object; that of a pod with its restore."""
    restore = None
    if isinstance(value, Pod) and source_of(value):
        restore = cluster.get("SnapshotRestore", value.metadata.namespace, restore_name(value))
    return entry_of(value, restore if isinstance(restore, SnapshotRestore) else None)


def _decoded(delivery: Delivery, type_: type[Any]) -> Any:
    try:
        return decode_json(delivery.data, type_)
    except InvalidMessage:
        return None
