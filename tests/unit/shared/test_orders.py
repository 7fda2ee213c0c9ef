"""What can be read of an order, whatever its payload is."""

import pytest

from snapshot_shared.orders import Envelope, envelope_of, order_in


@pytest.mark.parametrize(
    "payload", [b"", b"\xff", b"[]", b"3", b'{"type": "snapback.v9.stop_order"}']
)
def test_what_is_no_order_of_ours_is_none(payload: bytes) -> None:
    assert order_in(payload) is None
    assert envelope_of(payload).attempt == 0


@pytest.mark.parametrize("read", [order_in, envelope_of])
def test_a_payload_that_is_nested_without_end_is_no_order(read: object) -> None:
    assert read(b'{"x":' + b"[" * 100_000) in (None, Envelope())  # type: ignore[operator]


def test_of_an_order_of_an_unknown_version_the_envelope_can_be_read() -> None:
    payload = b'{"type": "snapback.v9.stop_order", "attempt": 4, "schema": 9, "new": {}}'
    assert envelope_of(payload) == Envelope(attempt=4, schema=9)
