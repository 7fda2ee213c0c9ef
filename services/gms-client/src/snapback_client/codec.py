"""Bytes to typed values and back, with limits. Hostile input ends here, with a named field.

msgpack on the lease socket, JSON where people read it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, TypeVar, cast

import msgspec

from snapback_client.errors import InvalidMessage

T = TypeVar("T")
MAX_MESSAGE_BYTES = 256 * 1024
MAX_FRAME_BYTES = 1024 * 1024
_ENCODE_JSON = msgspec.json.Encoder(order="deterministic")
_ENCODE_MSGPACK = msgspec.msgpack.Encoder()


@cache
def _json_decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_)


@cache
def _msgpack_decoder(type_: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(type_)


def encode_json(value: Any) -> bytes:
    """Encode as JSON with sorted keys, so that equal values have equal bytes and digests."""
    return _ENCODE_JSON.encode(value)


def decode_json(data: bytes, type_: type[T], *, limit: int = MAX_MESSAGE_BYTES) -> T:
    """Decode JSON of at most `limit` bytes. InvalidMessage names the path of the first problem."""
    _check_size(data, limit)
    try:
        return _json_decoder(cast("Any", type_)).decode(data)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid(type_, error) from error


def encode_msgpack(value: Any) -> bytes:
    """Encode as msgpack."""
    return _ENCODE_MSGPACK.encode(value)


def decode_msgpack(data: bytes, type_: type[T], *, limit: int = MAX_FRAME_BYTES) -> T:
    """Decode msgpack of at most `limit` bytes. InvalidMessage names the path."""
    _check_size(data, limit)
    try:
        return _msgpack_decoder(cast("Any", type_)).decode(data)  # type: ignore[no-any-return]
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _invalid(type_, error) from error


def _check_size(data: bytes, limit: int) -> None:
    if len(data) > limit:
        raise InvalidMessage(
            f"{len(data)} bytes are over the limit of {limit}", size=len(data), limit=limit
        )


def _invalid(type_: Any, error: Exception) -> InvalidMessage:
    # A union has no name, and its members say nothing of the message.
    name = getattr(type_, "__name__", "message")
    return InvalidMessage(f"not a valid {name}: {error}", type=name)
