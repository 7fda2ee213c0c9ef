"""Conditions and times as Kubernetes writes them."""

from __future__ import annotations

import math

import pytest

from snapshot_operator.core import conditions
from snapshot_shared.errors import Failure
from snapshot_shared.objects.meta import Condition
from tests.support.objects import checkpoint

OWNER = checkpoint()


def told(rows: list[Condition]) -> dict[str, tuple[str, str, str]]:
    return {row.type: (row.status, row.reason, row.message) for row in rows}


def test_a_time_has_whole_seconds_and_can_be_read_back() -> None:
    assert conditions.timestamp(1.9) == "1970-01-01T00:00:01Z"
    assert conditions.seconds("1970-01-01T00:00:01Z") == 1.0


@pytest.mark.parametrize("stamp", ["", "soon", "1970-13-01T00:00:00Z"])
def test_what_is_no_time_is_never_reached(stamp: str) -> None:
    assert conditions.seconds(stamp) == math.inf


def test_a_condition_keeps_its_time_until_its_status_changes() -> None:
    first = conditions.pending([], OWNER, 1.0, "Waiting", "for a node")
    again = conditions.pending(first, OWNER, 2.0, "Waiting", "for a pod")
    assert again[0].last_transition_time == first[0].last_transition_time
    assert told(again) == {"Ready": ("False", "Waiting", "for a pod")}
    ready = conditions.ready(again, OWNER, 3.0, "Captured", "all of it")
    assert ready[0].last_transition_time == conditions.timestamp(3.0)
    assert told(ready) == {
        "Ready": ("True", "Captured", "all of it"),
        "Failed": ("False", "Captured", ""),
    }


@pytest.mark.parametrize(
    ("next_step", "message"), [("", "it is full"), ("free some", "it is full. Next: free some")]
)
def test_a_failure_says_what_to_do_next(next_step: str, message: str) -> None:
    failure = Failure(reason="NoSpace", message="it is full.", next_step=next_step)
    rows = conditions.failed([], OWNER, 1.0, failure)
    assert told(rows) == {
        "Ready": ("False", "NoSpace", message),
        "Failed": ("True", "NoSpace", message),
    }


def test_a_message_has_a_limit() -> None:
    rows = conditions.pending([], OWNER, 1.0, "Waiting", "x" * 5000)
    assert len(rows[0].message) == 4096
