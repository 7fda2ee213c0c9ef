"""How a request becomes a reply: decoded, handled, and every failure an answer.

A request says when it was sent and how long its client waits. One that changes something and comes
later than that is refused: the client has given up, and may have asked for something else since.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

from snapshot_shared.api import ASKED_AT, WITHIN
from snapshot_shared.codec import decode_json, encode_json
from snapshot_shared.errors import RequestExpired, SnapbackError, failure_of

log = logging.getLogger(__name__)

_T = TypeVar("_T")

MAX_REQUEST_BYTES = 1024 * 1024

Endpoint = Callable[[bytes, Mapping[str, str]], Awaitable[bytes]]


def answering(
    request_type: type[_T],
    reply_type: type[Any],
    handler: Callable[[_T], Awaitable[Any]],
    wall: Callable[[], float] | None = None,
) -> Endpoint:
    """Return the endpoint of a handler; what the handler raises becomes the reply's `failure`.

    With a clock (`wall`, seconds since the epoch) a request that is too old is refused.
    """

    async def answer(data: bytes, headers: Mapping[str, str]) -> bytes:
        try:
            if wall is not None:
                check_age(headers, wall())
            request = decode_json(data, request_type, limit=MAX_REQUEST_BYTES)
            return encode_json(await handler(request))
        except SnapbackError as error:
            return encode_json(reply_type(failure=error.to_failure()))
        except Exception as error:
            log.exception("request failed")
            return encode_json(reply_type(failure=failure_of(error)))

    return answer


def check_age(headers: Mapping[str, str], now: float) -> None:
    """Raise RequestExpired when a request's client has stopped waiting for it."""
    try:
        asked_at, within_s = float(headers[ASKED_AT]), float(headers[WITHIN])
    except (KeyError, ValueError):
        return
    age_s = now - asked_at
    if age_s > within_s:
        raise RequestExpired(
            f"the request was sent {age_s:.1f} s ago by this clock, and its client waited for "
            f"{within_s:g} s",
            age_s=round(age_s, 3),
            within_s=within_s,
        )
