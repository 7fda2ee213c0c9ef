"""What the command line shows of a service, and how far back its history reaches."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from gms.domain.history import History
from gms.domain.parts import Difference
from gms.domain.sessions import Peer, Waiter
from gms.domain.showing import BenchRow, bench_text, difference_text, size_text, status_text
from snapback_client.frames import Access, Attach, LockMode, MemoryDomain
from snapshot_shared.frames import (
    MAX_EVENTS,
    DeviceStatus,
    DomainStatus,
    EventKind,
    EventRecord,
    FenceStatus,
    LoadStatus,
    SessionStatus,
    StatusReply,
    WaitingStatus,
)
from tests.support import builders
from tests.unit.tables import each

LAYOUT = builders.layout(
    device="GPU-a", generation=3, structure_hash="0123456789abcdef0", bytes=1536
)
WEIGHTS = DomainStatus(
    domain=MemoryDomain.WEIGHTS,
    lock="reading",
    layout=LAYOUT,
    sessions=[
        SessionStatus(session=1, access=Access.RO, client="a", pid=7, state="active"),
        SessionStatus(session=2, access=Access.RO, client="", pid=8, state="active", fence="pidfd"),
        SessionStatus(session=3, access=Access.RO, client="c", pid=9, state="lingering", fence="x"),
    ],
    waiting=[
        WaitingStatus(lock=LockMode.RW, client="d", pid=10),
        WaitingStatus(lock=LockMode.RW, client="", pid=11, why="a fence"),
    ],
)
DEVICE = DeviceStatus(
    uuid="GPU-a",
    index=0,
    product="sim",
    endpoint="",
    capacity=2**30,
    used=2048,
    free=0,
    retired=0,
    domains=[WEIGHTS],
    fence=FenceStatus(phase="held", ends_in_s=4.4),
    loads=[LoadStatus(load_token="t", layout_id="m", structure_hash="h", bytes=1024)],
    capabilities={"peer": 1, "pages": 0},
)
EVENTS = [
    EventRecord(seq=1, at_s=90.0, kind=EventKind.COMMIT, device="GPU-a", session=1, pid=7),
    EventRecord(
        seq=2, at_s=99.5, kind=EventKind.ATTACH, device="GPU-a", reason="late", generation=2
    ),
]
STATUS = """\
node n, incarnation i

device 0  GPU-a  sim
  2 KiB of 1 GiB used, 0 B free, 0 B wait for importers
  peer 1, pages 0
  fence held, ends in 4 s
  loaded and not published: m, 1 KiB
  weights: reading
    generation 3, 1.5 KiB, layout l, structure 0123456789abcdef
    ro a (pid 7), active
    ro unnamed (pid 8), active
    ro c (pid 9), lingering, fenced by x
    waits, 1 of 2: rw d (pid 10)
    waits, 2 of 2: rw unnamed (pid 11): a fence

last events (seconds ago)
      10.0  commit   unnamed (pid 7) on weights of GPU-a
       0.5  attach   late, generation 2 on weights of GPU-a"""


def test_a_status_shows_all_that_is_held_and_waited_for() -> None:
    reply = StatusReply(node="n", incarnation="i", devices=[DEVICE], events=EVENTS, now_s=100.0)
    assert status_text(reply).lower() == STATUS.lower()


@pytest.mark.parametrize("fields", [{}, {"events": EVENTS}, {"now_s": 100.0}, {"events": []}])
def test_a_status_of_little_is_short(fields: dict[str, Any]) -> None:
    device = replace(DEVICE, domains=[], fence=None, loads=[], capabilities={})
    reply = StatusReply(node="n", incarnation="i", devices=[device], **fields)
    assert status_text(reply).splitlines()[2:] == [
        "device 0  GPU-a  sim",
        "  2 KiB of 1 GiB used, 0 B free, 0 B wait for importers",
    ]


@each(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1 KiB"),
        (1536, "1.5 KiB"),
        (1234567, "1.18 MiB"),
        (100 * 1024 + 300, "100 KiB"),
        (2**50, "1024 TiB"),
    ],
)
def test_a_size_has_three_digits(count: int, text: str) -> None:
    assert size_text(count) == text


def test_a_difference_names_the_first_eight_of_each_kind() -> None:
    names = [f"w{number}" for number in range(9)]
    found = Difference(
        equal=False,
        same_bytes=1024,
        changed_bytes=2048,
        added=names[:8],
        removed=[],
        resized=[],
        changed=names,
        metadata=["k"],
    )
    assert difference_text(found).splitlines() == [
        "2 KiB changed, 1 KiB the same",
        "    added: w0, w1, w2, w3, w4, w5, w6, w7",
        "  changed: w0, w1, w2, w3, w4, w5, w6, w7 and 1 more",
        " metadata: k",
    ]
    assert difference_text(replace(found, equal=True)) == "equal: 1 KiB"


def test_a_measurement_is_a_table() -> None:
    row = BenchRow(what="allocate", calls=10, p50_us=12.4, p99_us=100.6)
    first, second = bench_text([row]).splitlines()
    assert first.split() == ["call", "calls", "p50", "p99"]
    assert second.split() == ["allocate", "10", "12", "us", "101", "us"]
    assert len(first) == len(second)


@pytest.fixture
def history() -> History:
    """One event more than is kept, from 1 on."""
    made = History()
    for number in range(MAX_EVENTS + 1):
        made.add(next(iter(EventKind)), float(number), "GPU-a")
    return made


def test_a_reader_that_has_seen_all_or_more_has_missed_nothing(history: History) -> None:
    assert history.since(history.last) == ([], 0)
    assert history.since(history.last + 9) == ([], 0)


@pytest.mark.parametrize(("seen", "first", "forgotten"), [(0, 2, 1), (1, 2, 0), (2, 3, 0)])
def test_what_is_forgotten_is_counted(
    history: History, seen: int, first: int, forgotten: int
) -> None:
    found, missed = history.since(seen)
    assert (found[0].seq, found[-1].seq, missed) == (first, MAX_EVENTS + 1, forgotten)


def test_of_the_latest_there_are_as_many_as_are_asked_for(history: History) -> None:
    assert [record.seq for record in history.latest(2)] == [MAX_EVENTS, MAX_EVENTS + 1]
    assert history.latest(0) == []


WAITER = Waiter(
    ticket=7,
    request=Attach(
        device="GPU-a", domain=MemoryDomain.WEIGHTS, lock=LockMode.RW, deadline_s=1.0, client="c"
    ),
    peer=Peer(pid=9, uid=0),
)


def test_events_of_devices_and_of_clients_are_numbered_together_from_1_without_a_gap() -> None:
    made = History()
    for number in range(3):
        made.add(EventKind.COMMIT, float(number), "GPU-a")
        made.add_of(WAITER, EventKind.ATTACH, float(number))
    assert [record.seq for record in made.latest(6)] == [1, 2, 3, 4, 5, 6]
    assert made.last == 6


def test_an_event_says_only_what_it_was_told() -> None:
    made = History()
    made.add(EventKind.COMMIT, 1.0, "GPU-a")
    made.add_of(WAITER, EventKind.ATTACH, 2.0)
    first, second = made.latest(2)
    assert (first.reason, first.generation, first.bytes, first.session) == ("", 0, 0, 0)
    assert (second.reason, second.generation, second.bytes) == ("", 0, 0)
    assert (second.session, second.pid, second.client) == (7, 9, "c")
