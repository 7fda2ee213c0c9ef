"""Applies the CustomResourceDefinitions of our kinds, unless others have some of their names.

Dynamo defines a DynamoCheckpoint, too. A definition that does not bear our label belongs to another
product: it is left alone, and the operator waits until it is gone or may be taken over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Literal, NamedTuple

import msgspec

from snapshot_api.schema.definitions import PART_OF, VERSION_ANNOTATION
from snapshot_operator.kube.rbac import NAME
from snapshot_shared.errors import Failure, InvalidManifest, SnapbackError
from snapshot_shared.kube_client import (
    APPLY_PATCH,
    MAX_RETRY_S,
    KubeClient,
    back_off,
    decoded,
)
from snapshot_shared.kube_watch import Bare, Listed, WatchEvent, changes
from snapshot_shared.tasks import any_set, end_all

log = logging.getLogger(__name__)

Mode = Literal["apply", "adopt", "keep"]

PATH = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
WATCH_S = 600

_HELM_RELEASE = "meta.helm.sh/release-name"


class _Meta(msgspec.Struct, frozen=True, rename="camel"):
    name: str
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}
    resource_version: str = ""


class _Row(msgspec.Struct, frozen=True):
    type: str
    status: str


class _Status(msgspec.Struct, frozen=True):
    conditions: list[_Row] | None = None


class Found(msgspec.Struct, frozen=True):
    """What is read of a definition that the API server has."""

    metadata: _Meta
    status: _Status = _Status()

    @property
    def is_established(self) -> bool:
        """Whether objects of the kind are served."""
        # Null where Go had no slice.
        rows = self.status.conditions or []
        return any((row.type, row.status) == ("Established", "True") for row in rows)

    @property
    def owner(self) -> str:
        """The product that the definition is part of, as its labels and annotations have it."""
        meta = self.metadata
        named = meta.labels.get(PART_OF[0]) or meta.annotations.get(_HELM_RELEASE)
        return named or "another product"


_LIST = msgspec.json.Decoder(Listed[Found])
_CHANGE = msgspec.json.Decoder(WatchEvent[Bare])


class Step(NamedTuple):
    """What is to be done about the definitions that there are.

    `apply` names those to write, `problem` says why nothing is written, and `waits_for` names those
    that have to change first. With none of them all are served.
    """

    apply: tuple[str, ...] = ()
    waits_for: tuple[str, ...] = ()
    problem: Failure | None = None


def next_step(
    wanted: Sequence[dict[str, Any]],
    found: dict[str, Found],
    mode: Mode,
    applied: frozenset[str] = frozenset(),
) -> Step:
    """Return what is to be done. `applied` were written by this operator since it started."""
    names = [document["metadata"]["name"] for document in wanted]
    others = [name for name in names if name in found and not _is_ours(found[name])]
    if others and mode != "adopt":
        return Step(waits_for=tuple(others), problem=_owned_by_other(others, found))
    missing = [name for name in names if name not in found]
    if missing and mode == "keep":
        return Step(waits_for=tuple(missing), problem=_missing(missing))
    if mode != "keep":
        due = [
            document["metadata"]["name"]
            for document in wanted
            if document["metadata"]["name"] not in applied and _may_write(document, found)
        ]
        if due:
            return Step(apply=tuple(due))
    return Step(waits_for=tuple(n for n in names if n in found and not found[n].is_established))


def _is_ours(found: Found) -> bool:
    return found.metadata.labels.get(PART_OF[0]) == PART_OF[1]


def _may_write(document: dict[str, Any], found: dict[str, Found]) -> bool:
    """Whether a definition is not newer than ours: an older operator may start beside a newer."""
    meta = document["metadata"]
    there = found.get(meta["name"])
    if there is None or not _is_ours(there):
        return True
    newest = version_of(there.metadata.annotations.get(VERSION_ANNOTATION, ""))
    return newest <= version_of(meta["annotations"][VERSION_ANNOTATION])


def version_of(text: str) -> tuple[int, ...]:
    """Return a version as numbers that can be compared; empty for a text that has none."""
    return tuple(int(number) for number in re.findall(r"\d+", text)[:3])


def _owned_by_other(names: list[str], found: dict[str, Found]) -> Failure:
    shown = ", ".join(f"{name} (of {found[name].owner})" for name in names)
    return Failure(
        reason="CRDsOwnedByOther",
        message=f"{shown}: the definition does not have our label, and nothing is touched",
        next_step="remove that product, or set SNAPBACK_CRDS=adopt to take its definitions over",
    )


def _missing(names: list[str]) -> Failure:
    return Failure(
        reason="CRDsMissing",
        message=f"{', '.join(names)}: not defined, and SNAPBACK_CRDS=keep applies none",
        next_step="kubectl apply --server-side -f deploy/crds, or set SNAPBACK_CRDS=apply",
    )


def _refused(error: InvalidManifest) -> Failure:
    return Failure(
        reason="CRDsRefused",
        message=f"the API server refuses a definition: {error}",
        next_step="remove what the message names, such as versions that still have objects",
    )


class Definitions:
    """The definitions of our kinds in one API server."""

    def __init__(
        self,
        client: KubeClient,
        wanted: Sequence[dict[str, Any]],
        mode: Mode,
        jitter: Callable[[], float],
        report: Callable[[Failure | None], Awaitable[None]],
    ) -> None:
        """Use an API server. `report` gets why the operator waits, and None when it does not."""
        self._client = client
        self._wanted = {document["metadata"]["name"]: document for document in wanted}
        self._mode = mode
        self._jitter = jitter
        self._report = report

    async def ensure(self) -> None:
        """Return when all kinds are served by definitions of ours; wait for as long as not."""
        applied: frozenset[str] = frozenset()
        failures = 0
        while True:
            try:
                found, versions = await self._found()
                step = next_step(list(self._wanted.values()), found, self._mode, applied)
                if step.problem is not None:
                    await self._report(step.problem)
                if not step.apply and not step.waits_for:
                    await self._report(None)
                    return
                if step.apply:
                    await self._apply(step.apply)
                    applied |= set(step.apply)
                else:
                    await self._changed({name: versions[name] for name in step.waits_for})
                failures = 0
            except InvalidManifest as error:
                await self._report(_refused(error))
                await self._changed_or_later()
            except SnapbackError as error:
                log.warning("the definitions cannot be read or applied: %s", error)
                failures += 1
                await back_off(failures, self._jitter())

    async def _found(self) -> tuple[dict[str, Found], dict[str, str]]:
        """Return the definitions that are there, and the version from which each may be watched."""
        found: dict[str, Found] = {}
        versions: dict[str, str] = {}
        for name in self._wanted:
            # One list a name: rights can be limited to it.
            params = {"fieldSelector": f"metadata.name={name}"}
            page = decoded(_LIST, await self._client.request("GET", PATH, params=params))
            versions[name] = page.metadata.resource_version
            found |= {item.metadata.name: item for item in page.items or ()}
        return found, versions

    async def _apply(self, names: Sequence[str]) -> None:
        for name in names:
            # Forced: what has our label is ours, whichever tool wrote it first.
            params = {"fieldManager": NAME, "force": "true"}
            await self._client.request(
                "PATCH",
                f"{PATH}/{name}",
                params=params,
                body=self._wanted[name],
                content_type=APPLY_PATCH,
            )
            log.info("definition %s is applied", name)

    async def _changed_or_later(self) -> None:
        """Wait until some definition changes."""
        with contextlib.suppress(SnapbackError):
            _, versions = await self._found()
            await self._changed(versions)
            return
        await any_set(MAX_RETRY_S)

    async def _changed(self, versions: dict[str, str]) -> None:
        """Return when one of the definitions has changed after its version, or watches ended."""
        watches = [asyncio.ensure_future(self._watch(*item)) for item in versions.items()]
        try:
            done, _ = await asyncio.wait(watches, return_when=asyncio.FIRST_COMPLETED)
            for watch in done:
                await watch
        finally:
            await end_all(*watches)

    async def _watch(self, name: str, version: str) -> None:
        named = {"fieldSelector": f"metadata.name={name}"}
        found = changes(self._client, PATH, _CHANGE, version, named, within_s=WATCH_S)
        async with contextlib.aclosing(found):
            async for change, _ in found:
                if change is not None:
                    return
