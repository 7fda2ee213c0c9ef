"""How a request becomes a reply: decoded, handled, and every failure an answer."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import SnapbackError, failure_of

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_REQUEST_BYTES = 1024 * 1024

Endpoint = Callable[[bytes, Mapping[str, str]], Awaitable[bytes]]


def answering(
    request_type: type[_T], reply_type: type[Any], handler: Callable[[_T], Awaitable[Any]]
) -> Endpoint:
    """Make the endpoint of a handler; what the handler raises becomes the reply's `failure`."""

    async def answer(data: bytes, _headers: Mapping[str, str]) -> bytes:
        try:
            request = decode_json(data, request_type, limit=MAX_REQUEST_BYTES)
            return encode_json(await handler(request))
        except SnapbackError as error:
            return encode_json(reply_type(failure=error.to_failure()))
        except Exception as error:
            log.exception("request failed")
            return encode_json(reply_type(failure=failure_of(error)))

    return answer
