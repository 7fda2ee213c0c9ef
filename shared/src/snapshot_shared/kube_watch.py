"""Lists and watches of the Kubernetes API, as all that follows objects uses them.

A list has a version. A watch continues it: it sends what has changed after a version, and now and
then a bookmark, which has a version alone. The server ends each watch after a time; the next one
continues with the version that was seen last. If the server has no history of that version any
more, the collection is listed again. A watch without a version begins with what is there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from http import HTTPStatus
from typing import Generic, NoReturn, Protocol, TypeVar

import msgspec

from snapshot_shared.errors import SnapbackError, StoreBusy
from snapshot_shared.kube_client import (
    KubeClient,
    ResourceExpired,
    back_off,
    decoded,
    error_status,
)

log = logging.getLogger(__name__)

PAGE = "500"
_NO_CHANGES = ("BOOKMARK", "ERROR")
WATCH_S = 300.0
"""How long the server lets one watch last, in seconds."""


class _Meta(Protocol):
    @property
    def resource_version(self) -> str: ...


class Versioned(Protocol):
    """An object of the API, as it is decoded."""

    @property
    def metadata(self) -> _Meta:
        """Its metadata, of which the version is read here."""


T = TypeVar("T", bound=Versioned)


class StoreRewound(SnapbackError):
    """The API server's history is older than what was seen of it."""

    default_next_step = "nothing: the operator starts again and reads what there is"


class ListMeta(msgspec.Struct, frozen=True, rename="camel"):
    """The version of a list, and what its next page continues with."""

    resource_version: str
    # Named so by the API, and a keyword of Python.
    continue_: str = msgspec.field(default="", name="continue")


class Listed(msgspec.Struct, Generic[T], frozen=True):
    """A page of a list."""

    metadata: ListMeta
    # Null where Go had no slice.
    items: list[T] | None = None


class WatchEvent(msgspec.Struct, Generic[T], frozen=True):
    """One event of a watch, of the type ADDED, MODIFIED or DELETED."""

    type: str
    object: T


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class Bare(msgspec.Struct, frozen=True):
    """An object of which the version alone is read."""

    metadata: ListMeta


_EVENT = msgspec.json.Decoder(_Event)
_BARE = msgspec.json.Decoder(Bare)


async def pages(
    client: KubeClient,
    path: str,
    decoder: msgspec.json.Decoder[Listed[T]],
    params: Mapping[str, str] = {},
) -> AsyncGenerator[Listed[T], None]:
    """Yield a collection page by page; all pages are of the version of the first."""
    at = ""
    while True:
        more = {"limit": PAGE} | ({"continue": at} if at else {})
        answer = await client.request("GET", path, params={**params, **more})
        page = decoded(decoder, answer)
        yield page
        if not (at := page.metadata.continue_):
            return


async def changes(
    client: KubeClient,
    path: str,
    decoder: msgspec.json.Decoder[WatchEvent[T]],
    version: str = "",
    params: Mapping[str, str] = {},
    *,
    within_s: float = WATCH_S,
) -> AsyncGenerator[tuple[WatchEvent[T] | None, str], None]:
    """Yield what changes after a version, and None for a bookmark, each with its version.

    It ends when the server ends it, after `within_s` seconds. ResourceExpired, StoreBusy.
    """
    query = {
        "watch": "true",
        "allowWatchBookmarks": "true",
        "timeoutSeconds": str(int(within_s)),
        **({"resourceVersion": version} if version else {}),
        **params,
    }
    async with contextlib.aclosing(client.watch(path, query)) as lines:
        async for line in lines:
            try:
                change = decoded(decoder, line)
            except StoreBusy:
                # A bookmark is of no object, and neither is an error. Either may decode as one.
                yield None, _bookmark_in(line)
                continue
            if change.type in _NO_CHANGES:
                yield None, _bookmark_in(line)
            else:
                yield change, change.object.metadata.resource_version


def _bookmark_in(line: bytes) -> str:
    """Return the version of a bookmark; raise the error that anything else stands for."""
    event = decoded(_EVENT, line)
    if event.type == "BOOKMARK":
        return decoded(_BARE, event.object).metadata.resource_version
    if event.type != "ERROR":
        raise StoreBusy(f"an object in an event {event.type} of a watch cannot be read")
    status = error_status(bytes(event.object))
    expired = status.code == HTTPStatus.GONE or status.reason == "Expired"
    raise ResourceExpired(status.message) if expired else StoreBusy(status.message)


async def follow(
    what: str,
    version: Callable[[], str],
    watch: Callable[[], Awaitable[None]],
    list_again: Callable[[], Awaitable[None]],
    jitter: Callable[[], float],
) -> NoReturn:
    """Watch again and again, and rest longer after each watch that brought no newer version.

    StoreRewound, which `watch` raises, ends it.
    """
    failures = 0
    while True:
        before = version()
        try:
            await watch()
        except StoreRewound:
            raise
        except ResourceExpired as error:
            log.info("%s are listed again: %s", what, error)
            try:
                await list_again()
            except SnapbackError as failed:
                log.warning("%s are not listed: %s", what, failed)
        except SnapbackError as error:
            log.warning("%s are not watched: %s", what, error)
        # One that brought something was a good one, however it ended.
        failures = 0 if version() != before else failures + 1
        await back_off(failures, jitter())
