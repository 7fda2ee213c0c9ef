"""Events of a watch, as the API server sends them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import msgspec
import pytest

from snapshot_shared.errors import StoreBusy
from snapshot_shared.kube_client import ResourceExpired
from snapshot_shared.kube_watch import WatchEvent, changes
from tests.unit.tables import each


class Meta(msgspec.Struct, frozen=True, rename="camel"):
    """Lenient: a bookmark and an error decode as an object, too."""

    name: str = ""
    resource_version: str = ""


class Lenient(msgspec.Struct, frozen=True):
    metadata: Meta = Meta()


class Strict(msgspec.Struct, frozen=True):
    metadata: Meta
    spec: str


class Client:
    """Sends these events on each watch."""

    def __init__(self, *events: Any) -> None:
        self._lines = [json.dumps(event).encode() for event in events]
        self.asked: list[Mapping[str, str]] = []

    async def watch(self, _path: str, params: Mapping[str, str]) -> AsyncGenerator[bytes, None]:
        self.asked.append(params)
        for line in self._lines:
            yield line


def event(type_: str, version: str, **fields: Any) -> dict[str, Any]:
    named = {"name": "a"} if type_ != "BOOKMARK" else {}
    return {"type": type_, "object": {"metadata": {"resourceVersion": version} | named} | fields}


async def followed(client: Any, kind: Any, version: str = "") -> list[tuple[str, str]]:
    decoder = msgspec.json.Decoder(WatchEvent[kind])
    found = []
    async with contextlib.aclosing(changes(client, "/p", decoder, version)) as events:
        async for change, at in events:
            found.append((change.type if change is not None else "", at))
    return found


@each("kind", [Lenient, Strict])
async def test_a_bookmark_is_a_version_and_no_change(kind: Any) -> None:
    client = Client(event("ADDED", "5", spec="s"), event("BOOKMARK", "7"))
    assert await followed(client, kind, "4") == [("ADDED", "5"), ("", "7")]
    assert client.asked[0]["resourceVersion"] == "4"


async def test_a_watch_without_a_version_begins_with_what_is_there() -> None:
    client = Client()
    await followed(client, Lenient)
    assert "resourceVersion" not in client.asked[0]


@each("kind", [Lenient, Strict])
@each(
    ("status", "expected"),
    [
        ({"code": 410, "reason": "Expired", "message": "too old"}, ResourceExpired),
        ({"code": 500, "reason": "InternalError", "message": "no"}, StoreBusy),
    ],
)
async def test_an_error_in_a_watch_is_raised(kind: Any, status: Any, expected: Any) -> None:
    client = Client({"type": "ERROR", "object": {"kind": "Status", "metadata": {}} | status})
    with pytest.raises(expected, match=status["message"]):
        await followed(client, kind, "4")


async def test_an_object_that_cannot_be_read_ends_the_watch() -> None:
    with pytest.raises(StoreBusy, match="an event ADDED of a watch cannot be read"):
        await followed(Client(event("ADDED", "5", spec=7)), Strict)
