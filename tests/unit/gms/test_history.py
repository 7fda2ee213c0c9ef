"""The history of a server: a slow reader learns how many events it missed."""

from __future__ import annotations

import pytest

from gms.domain.history import History
from gms.domain.sessions import Peer, Waiter
from snapback_client.frames import Attach, LockMode, MemoryDomain
from snapshot_shared.frames import MAX_EVENTS, EventKind


@pytest.fixture
def history() -> History:
    """One event more than is kept, from 1 on."""
    made = History()
    for number in range(MAX_EVENTS + 1):
        made.add(next(iter(EventKind)), float(number), "GPU-a")
    return made


def test_a_reader_that_has_seen_all_or_more_has_missed_nothing(
    history: History,
) -> None:
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
