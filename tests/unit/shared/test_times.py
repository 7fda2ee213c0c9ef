"""Times of messages as people read them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snapshot_shared.api import (
    ApplyReply,
    GetReply,
    InventoryReply,
    PodsReply,
    RetentionReply,
    SimReply,
)
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.orders import Presence
from tests.unit.tables import each

NODE = {"type": "snapback.v1.presence", "node": "n", "boot_id": "b", "version": "1"}


def _presence(**fields: Any) -> Presence:
    return decode_json(json.dumps(NODE | fields).encode(), Presence)


def test_a_message_says_when_it_was_sent_as_rfc_3339() -> None:
    sent = Presence(node="n", boot_id="b", version="1", at=1795303109.7018)
    shown = json.loads(encode_json(sent))
    assert shown["time"] == "2026-11-21T23:18:29.701Z"
    assert shown["at"] == 1795303109.7018


@pytest.mark.parametrize("at", [1e300, -1e300, 1e18])
def test_a_time_of_no_calendar_is_left_empty(at: float) -> None:
    assert _presence(at=at).time == ""


def test_the_text_of_a_time_is_that_of_the_number_whatever_was_sent() -> None:
    assert _presence(at=0.0, time="2099-01-01T00:00:00Z").time == "1970-01-01T00:00:00.000Z"
    assert _presence(at=0.0).time == "1970-01-01T00:00:00.000Z"


@each(
    ("reply", "field"),
    [
        (ApplyReply(), "results"),
        (GetReply(), "items"),
        (RetentionReply(), "artifacts"),
        (InventoryReply(), "verdicts"),
        (PodsReply(), "unknown"),
        (SimReply(), "armed"),
    ],
)
def test_an_empty_list_is_a_list(reply: Any, field: str) -> None:
    assert json.loads(encode_json(reply))[field] == []
    assert decode_json(b"{}", type(reply)) == reply
