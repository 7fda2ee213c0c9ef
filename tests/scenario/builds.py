"""Builds of other versions, as they show on the wire and in the journal of a node.

The services are the product's own; what makes them older or newer happens at their edge.
"""

from __future__ import annotations

import json
import zlib
from typing import Any, NamedTuple

from snapshot_shared.bus import Delivery
from tests.scenario.bus import SimBus
from tests.scenario.streams import Stored

UNKNOWN = "added_later"
_YOUNG = {
    "snapback.v1.report": ("steps", "message", "traceparent", "schema", "exit_codes", "proven"),
    "snapback.v1.presence": ("schemas", "criu", "free_bytes", "slots"),
}
"""By type, the optional fields that an older build does not send."""
_YOUNG_OF_ORDERS = ("traceparent", "not_after", "schema")
_FREE = ("values", "value", "exit_codes")
"""Fields whose keys mean something, so that none may be added."""


class Build(NamedTuple):
    """A version of the services of a node, and the schemas that it reads.

    One that `lacks` knows no young optional fields; one that `adds` writes some that nobody knows.
    """

    name: str
    schemas: tuple[int, ...] = (1,)
    lacks: bool = False
    adds: bool = False

    def said(self, data: bytes) -> bytes:
        """Give a message as this build sends it."""
        document = json.loads(data) if self.lacks or self.adds else None
        if not isinstance(document, dict):
            return data
        if self.lacks:
            for name in _YOUNG.get(document.get("type", ""), ()):
                document.pop(name, None)
        return json.dumps(_with_more(document) if self.adds else document).encode()

    def heard(self, data: bytes) -> bytes:
        """Give an order as this build reads it; noise stays noise."""
        if not self.lacks:
            return data
        try:
            document = json.loads(data)
            return json.dumps(
                {name: value for name, value in document.items() if name not in _YOUNG_OF_ORDERS}
            ).encode()
        except (ValueError, AttributeError, RecursionError):
            return data

    def written(self, journal: bytes) -> bytes:
        """Give a journal as this build has written it; what is torn stays so."""
        if not self.adds:
            return journal
        return b"\n".join(_line(line) for line in journal.split(b"\n"))


CURRENT_BUILD = Build("current")
OLDER = Build("older", lacks=True)
NEWER = Build("newer", schemas=(1, 2), adds=True)
NEXT = Build("next", schemas=(2,), adds=True)
"""One that is so new that it does not read what the operator writes any more."""
BUILDS = {build.name: build for build in (CURRENT_BUILD, OLDER, NEWER, NEXT)}


class BuildBus(SimBus):
    build = CURRENT_BUILD

    async def publish(self, subject: str, payload: bytes, **options: Any) -> int:
        return await super().publish(subject, self.build.said(payload), **options)

    async def announce(self, subject: str, payload: bytes) -> None:
        await super().announce(subject, self.build.said(payload))

    async def put(self, bucket: str, key: str, value: bytes) -> None:
        await super().put(bucket, key, self.build.said(value))

    async def request(self, subject: str, payload: bytes, **options: Any) -> bytes:
        return await super().request(subject, self.build.said(payload), **options)

    def _delivery(self, stream: str, durable: str, message: Stored) -> Delivery:
        delivery = super()._delivery(stream, durable, message)
        return delivery._replace(data=self.build.heard(delivery.data))


def _with_more(value: Any) -> Any:
    if isinstance(value, list):
        return [_with_more(item) for item in value]
    if not isinstance(value, dict):
        return value
    more = {name: item if name in _FREE else _with_more(item) for name, item in value.items()}
    return {**more, UNKNOWN: {"is": [1]}}


def _line(line: bytes) -> bytes:
    checksum, _, body = line.partition(b" ")
    if checksum != b"%08x" % zlib.crc32(body):
        return line
    body = json.dumps(_with_more(json.loads(body))).encode()
    return b"%08x %s" % (zlib.crc32(body), body)
