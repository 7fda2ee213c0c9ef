"""The records of a service's journal and what they add up to. Pure; `journal` does the writing.

The journal is also the outbox: a report is recorded before it is published and stays pending
until NATS has acknowledged it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import msgspec

from snapshot_shared.ids import OrderId, Uid, order_id, owner_of
from snapshot_shared.model import Message
from snapshot_shared.orders import Report


class Accepted(Message, tag="accepted"):
    """An order became ours. `deadline_s` counts from `monotonic` within boot `boot_id`."""

    order: str
    attempt: int
    payload: msgspec.Raw
    boot_id: str
    monotonic: float
    wall: float
    deadline_s: float


class Began(Message, tag="began"):
    """A step is about to begin."""

    order: str
    attempt: int
    step: str


class Ended(Message, tag="ended"):
    """A step is over."""

    order: str
    attempt: int
    step: str


class Noted(Message, tag="noted"):
    """A fact that recovery will need: a pid with its start time, a path, a token."""

    order: str
    attempt: int
    key: str
    value: Any


class Reported(Message, tag="reported"):
    """A report that has to reach the operator."""

    report: Report


class Delivered(Message, tag="delivered"):
    """A report reached the stream."""

    order: str
    attempt: int
    n: int


class Tombstoned(Message, tag="tombstoned"):
    """No attempt up to `attempt` of the work named `subject` may begin or go on."""

    subject: str
    attempt: int


Record = Accepted | Began | Ended | Noted | Reported | Delivered | Tombstoned

_OF_CAPTURES = ("prepare", "dump", "seal", "release", "abort")


class Entry:
    """All that is known of the highest attempt of one order."""

    def __init__(self, accepted: Accepted) -> None:
        """Begin with the acceptance."""
        self.order = accepted.order
        self.attempt = accepted.attempt
        self.accepted = accepted
        self.began: list[str] = []
        self.ended: list[str] = []
        self.notes: dict[str, Any] = {}
        self.reports: list[Report] = []
        self.delivered: set[int] = set()

    @property
    def terminal(self) -> Report | None:
        """Return the report that ended the order, if it has ended."""
        return next((report for report in self.reports if report.is_terminal), None)

    @property
    def open_step(self) -> str | None:
        """Return the step that began and has no end on record."""
        return self.began[-1] if len(self.began) > len(self.ended) else None

    @property
    def undelivered(self) -> list[Report]:
        """Return the reports that still have to be published, in order."""
        return [report for report in self.reports if report.n not in self.delivered]

    @property
    def is_live(self) -> bool:
        """Whether more reports can follow: a pod that runs has yet to end."""
        kinds = {report.kind for report in self.reports}
        is_running = "started" in kinds and "exited" not in kinds
        return self.terminal is None or is_running or bool(self.undelivered)

    def records(self) -> list[Record]:
        """Return the records that rebuild this entry, for compaction."""
        order, attempt = self.order, self.attempt
        records: list[Record] = [self.accepted]
        records += [
            Noted(key=name, value=value, order=order, attempt=attempt)
            for name, value in self.notes.items()
        ]
        for index, step in enumerate(self.began):
            records.append(Began(step=step, order=order, attempt=attempt))
            if index < len(self.ended):
                records.append(Ended(step=step, order=order, attempt=attempt))
        records += [Reported(report=report) for report in self.reports]
        records += [Delivered(n=n, order=order, attempt=attempt) for n in sorted(self.delivered)]
        return records


def entry_of(records: Sequence[Record]) -> Entry:
    """Return the entry that these records, which are of one order, rebuild."""
    ledger = Ledger()
    for record in records:
        ledger.apply(record)
    (entry,) = ledger.entries.values()
    return entry


class Ledger:
    """The fold of a journal: the highest attempt of every order, and the tombstones.

    `entries` are the orders in memory. `find` returns a finished order that is not in memory.
    """

    def __init__(self, find: Callable[[str], Entry | None] = lambda _: None) -> None:
        """Begin empty."""
        self.entries: dict[str, Entry] = {}
        self.tombstones: dict[str, int] = {}
        self._find = find

    def entry(self, order: str) -> Entry | None:
        """Return the highest attempt of an order, or None if the order is unknown.

        StorageFailed: the orders that are not in memory cannot be read.
        """
        return self.entries.get(order) or self._find(order)

    def apply(self, record: Record) -> None:
        """Fold one record. Records of an attempt that was superseded are ignored."""
        match record:
            case Accepted():
                if self._is_new(record):
                    self.entries[record.order] = Entry(record)
            case Tombstoned():
                if not self.is_tombstoned(record.subject, record.attempt):
                    self.tombstones[record.subject] = record.attempt
            case Reported():
                if entry := self._entry(record.report.order, record.report.attempt):
                    entry.reports.append(record.report)
                    if record.report.kind == "deleted":
                        self._forget_capture(owner_of(OrderId(entry.order)))
            case _:
                if entry := self._entry(record.order, record.attempt):
                    _apply_detail(entry, record)

    def _is_new(self, record: Accepted) -> bool:
        if known := self.entries.get(record.order):
            return record.attempt > known.attempt
        finished = self._find(record.order)
        # A crash may leave an order in both files: the journal, which is read now, counts.
        return finished is None or record.attempt >= finished.attempt

    def _entry(self, order: str, attempt: int) -> Entry | None:
        """Return the entry that a record changes; it is in memory from now on."""
        entry = self.entry(order)
        if entry is None or entry.attempt != attempt:
            return None
        return self.entries.setdefault(order, entry)

    def _forget_capture(self, content: Uid) -> None:
        """Drop what led to an artifact that is deleted: its tombstone refuses every repeat."""
        deleted = self.tombstones.get(f"capture-{content}", 0)
        for verb in _OF_CAPTURES:
            entry = self.entries.get(order_id(verb, content))
            if entry is not None and entry.attempt <= deleted and not entry.is_live:
                del self.entries[entry.order]

    def unfinished(self) -> list[Entry]:
        """Return the orders that were accepted and have no terminal report, oldest first."""
        return [entry for entry in self.entries.values() if entry.terminal is None]

    def pending_reports(self) -> list[Report]:
        """Return every report that has not been acknowledged by NATS."""
        return [report for entry in self.entries.values() for report in entry.undelivered]

    def is_tombstoned(self, subject: str, attempt: int) -> bool:
        """Whether work named `subject` was aborted at this attempt or a later one."""
        return attempt <= self.tombstones.get(subject, 0)

    def without(self, finished: Collection[str], owners: Collection[str]) -> Ledger:
        """Return a ledger without some orders.

        The tombstones of an owner go with its last order, here or among the `owners` of others.
        """
        rest = Ledger(self._find)
        rest.entries = {name: e for name, e in self.entries.items() if name not in finished}
        known = {owner_of(OrderId(order)) for order in rest.entries}.union(owners)
        rest.tombstones = {
            subject: attempt
            for subject, attempt in self.tombstones.items()
            if subject.partition("-")[2] in known
        }
        return rest

    def records(self) -> list[Record]:
        """Return the records that rebuild the ledger."""
        records: list[Record] = [
            Tombstoned(subject=subject, attempt=attempt)
            for subject, attempt in self.tombstones.items()
        ]
        for entry in self.entries.values():
            records += entry.records()
        return records


def _apply_detail(entry: Entry, record: Began | Ended | Noted | Delivered) -> None:
    match record:
        case Began():
            # A step without an end was cut off by a restart; the table began again after it.
            entry.began[len(entry.ended) :] = [record.step]
        case Ended():
            entry.ended.append(record.step)
        case Noted():
            entry.notes[record.key] = record.value
        case Delivered():
            entry.delivered.add(record.n)
