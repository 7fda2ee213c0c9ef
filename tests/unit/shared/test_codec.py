"""What is encoded has one form, and nothing longer than its limit is read or sent."""

from __future__ import annotations

import json
from typing import Any

import pytest

from snapback_client.frames import MetadataItem, MetadataPut, encode_frame
from snapshot_shared import ids
from snapshot_shared.api import (
    ApplyReply,
    GetReply,
    InventoryReply,
    PodsReply,
    RetentionReply,
    SimReply,
)
from snapshot_shared.codec import (
    MAX_FRAME_BYTES,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
    encode_pretty,
)
from snapshot_shared.errors import InvalidMessage, InvalidName
from snapshot_shared.orders import Presence
from tests.unit.tables import each


def test_equal_values_have_equal_bytes() -> None:
    assert encode_json({"b": 1, "a": [2]}) == b'{"a":[2],"b":1}'
    assert encode_pretty({"b": 1, "a": {"c": 2}}) == (
        b'{\n  "a": {\n    "c": 2\n  },\n  "b": 1\n}\n'
    )


def test_as_many_bytes_as_the_limit_are_read_and_no_more() -> None:
    assert decode_json(b'"ab"', str, limit=4) == "ab"
    assert decode_msgpack(encode_msgpack("ab"), str, limit=3) == "ab"
    with pytest.raises(InvalidMessage, match="4 bytes are over the limit of 3"):
        decode_json(b'"ab"', str, limit=3)
    with pytest.raises(InvalidMessage, match="3 bytes are over the limit of 2"):
        decode_msgpack(encode_msgpack("ab"), str, limit=2)


def test_a_frame_may_be_as_long_as_the_limit() -> None:
    def frame(size: int) -> MetadataPut:
        value = [MetadataItem(key="k", allocation="a", offset=0, value=bytes(65536))] * 15
        last = MetadataItem(key="k", allocation="a", offset=0, value=bytes(size))
        return MetadataPut(entries=[*value, last])

    left = MAX_FRAME_BYTES - len(encode_msgpack(frame(50_000))) + 50_000
    assert len(encode_frame(frame(left))) == MAX_FRAME_BYTES
    with pytest.raises(InvalidMessage, match="over the limit"):
        encode_frame(frame(left + 1))


@pytest.mark.parametrize(("length", "shown"), [(80, "A" * 80), (81, "A" * 77 + "...")])
def test_a_long_name_is_shown_by_its_beginning(length: int, shown: str) -> None:
    with pytest.raises(InvalidName) as caught:
        ids.check_name("A" * length)
    assert caught.value.values["value"] == shown


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
