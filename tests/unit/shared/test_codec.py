"""What is encoded has one form, and nothing longer than its limit is read or sent."""

from __future__ import annotations

import pytest

from snapback_client.frames import MetadataItem, MetadataPut, encode_frame, error_of
from snapshot_shared import ids
from snapshot_shared.codec import (
    MAX_FRAME_BYTES,
    decode_json,
    decode_msgpack,
    encode_json,
    encode_msgpack,
    encode_pretty,
)
from snapshot_shared.errors import Failure, InvalidMessage, InvalidName, NoSpace, RemoteFailure


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


def test_a_failure_that_was_received_has_its_own_class_again() -> None:
    known = error_of(NoSpace("full", next_step="free some", free=3).to_failure())
    assert isinstance(known, NoSpace)
    assert (known.values, known.to_failure().next_step) == ({"free": 3}, "free some")
    unknown = error_of(Failure(reason="Later", message="m"))
    assert isinstance(unknown, RemoteFailure)
    assert unknown.to_failure().reason == "Later"


@pytest.mark.parametrize(("length", "shown"), [(80, "A" * 80), (81, "A" * 77 + "...")])
def test_a_long_name_is_shown_by_its_beginning(length: int, shown: str) -> None:
    with pytest.raises(InvalidName) as caught:
        ids.check_name("A" * length)
    assert caught.value.values["value"] == shown
