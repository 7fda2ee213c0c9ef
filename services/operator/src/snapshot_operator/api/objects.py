"""Requests about objects: `snap.api.apply`, `get`, `view`, `delete`, `verify` and `retention`."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import Node
from snapshot_api.kind import Kind
from snapshot_api.kinds import AnyObject, find_kind, kind_of
from snapshot_api.manifests import parse
from snapshot_api.meta import TRACEPARENT, is_true
from snapshot_api.redaction import names_secret, redacted
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_api.validate import repetitions
from snapshot_api.well_known import POD_SPEC, VERIFY
from snapshot_operator.api.answering import Endpoint, answering
from snapshot_operator.core.content import content_behind
from snapshot_operator.core.retention import Decision
from snapshot_operator.runtime.cluster import Cluster
from snapshot_operator.runtime.upkeep import Retention
from snapshot_shared.api import (
    Applied,
    ApplyReply,
    ApplyRequest,
    DeleteReply,
    DeleteRequest,
    GetReply,
    GetRequest,
    Retained,
    RetentionReply,
    RetentionRequest,
    VerifyReply,
    VerifyRequest,
)
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    InvalidManifest,
    NotEligible,
    NotFound,
)
from snapshot_shared.tasks import in_thread

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 900 * 1024
MAX_SHOWN = 60
"""How many characters of a value are shown in a message."""
IN_THREADS = 2
"""How many manifests are checked and pages of objects are built at a time, in threads."""
LAST_APPLIED = "kubectl.kubernetes.io/last-applied-configuration"
"""The annotation that has the whole manifest, with all that is secret in it."""
RETENTION_PAGE = 1000
"""Artifacts in one reply: names are bounded, so that they fit."""


class Api:
    """Answers `snap.api.*`. Every failure becomes a reply; nothing is stored by halves."""

    def __init__(
        self,
        cluster: Cluster,
        retention: Retention,
        wall: Callable[[], float],
        new_id: Callable[[], str],
        *,
        is_in_cluster: bool = False,
    ) -> None:
        """Use the objects and the clock. `new_id` returns an id that was never used.

        In a cluster people write with their own rights, and not with those of the operator.
        """
        self._is_in_cluster = is_in_cluster
        self._cluster = cluster
        self._retention = retention
        self._wall = wall
        self._new_id = new_id
        self._threads = asyncio.Semaphore(IN_THREADS)

    def endpoints(self) -> dict[str, Endpoint]:
        """Return the handler of each `snap.api.<verb>`."""
        wall = self._wall
        return {
            "apply": answering(ApplyRequest, ApplyReply, self.apply, wall),
            "get": answering(GetRequest, GetReply, self.get),
            "view": answering(GetRequest, GetReply, self.view),
            "delete": answering(DeleteRequest, DeleteReply, self.delete, wall),
            "verify": answering(VerifyRequest, VerifyReply, self.verify, wall),
            "retention": answering(RetentionRequest, RetentionReply, self.retention, wall),
        }

    async def apply(self, request: ApplyRequest) -> ApplyReply:
        """Check all documents, then create them. InvalidManifest lists every problem of all."""
        if self._is_in_cluster and not request.dry_run:
            raise Forbidden(
                "the operator of a cluster stores nothing for others: it would do so with its own "
                "rights",
                next_step="kubectl apply -f FILE",
            )
        async with self._threads:
            values = await in_thread(_parse_all, request.documents)
        existing = [self._existing(value) for value in values]
        results: list[Applied] = []
        for value, found in zip(values, existing, strict=True):
            if found is not None:
                results.append(_applied(found, "unchanged"))
            elif request.dry_run:
                results.append(_applied(value, "created"))
            else:
                stored = await self._cluster.create(_prepared(value, request.traceparent))
                results.append(_applied(stored, "created"))
        return ApplyReply(results=results)

    def _existing(self, value: AnyObject) -> AnyObject | None:
        """Return the object of this name. AlreadyExists with another spec: specs never change."""
        kind = kind_of(value)
        found = self._cluster.get(kind.name, value.metadata.namespace, value.metadata.name)
        if found is None:
            return None
        name = value.metadata.name
        if found.metadata.deletion_timestamp:
            raise Conflict(
                f"{kind.name} {name} is being deleted",
                next_step=f"wait until it is gone: snapshotctl wait {kind.short}/{name} "
                "--for=delete",
            )
        if differing := _differing(found, value):
            raise AlreadyExists(
                f"{kind.name} {name} exists with another spec, and a spec never changes",
                next_step="delete it first, or use another name",
                kind=kind.name,
                name=name,
                lines=differing,
            )
        return found

    async def get(self, request: GetRequest) -> GetReply:
        """Read one object, or a page of a kind that fits into one message."""
        return await self._read(request, lambda value: value)

    async def view(self, request: GetRequest) -> GetReply:
        """Read as `get` does, without secrets. It is what a viewer's `get` comes to."""
        return await self._read(request, lambda value: redacted(json.loads(encode_json(value))))

    async def _read(self, request: GetRequest, shown: Callable[[AnyObject], Any]) -> GetReply:
        kind = find_kind(request.kind)
        if request.name is not None:
            value = named(self._cluster, kind, request.namespace, request.name)
            return GetReply(items=[shown(value)])
        limit = min(max(request.limit, 1), 1000)
        namespace = request.namespace if kind.namespaced else None
        found = self._cluster.page(kind.name, namespace, after=request.after, limit=limit + 1)
        async with self._threads:
            return await in_thread(_page, found, limit, shown)

    async def delete(self, request: DeleteRequest) -> DeleteReply:
        """Mark one object for deletion. NotFound when it is not there."""
        kind = find_kind(request.kind)
        if self._is_in_cluster and not kind.is_ours:
            space = f" --namespace {request.namespace or 'default'}" if kind.namespaced else ""
            raise Forbidden(
                f"the operator of a cluster deletes no {kind.name} for others: it would do so with "
                "its own rights",
                next_step=f"kubectl delete {kind.name.lower()} {request.name}{space}",
            )
        value = named(self._cluster, kind, request.namespace, request.name)
        check_uid(value, request.uid)
        if isinstance(value, Node) and not is_true(value.status.conditions, "Lost"):
            raise Forbidden(
                f"node {request.name} is not lost",
                next_step="stop its agent first; after 90 s without presence it may be deleted",
            )
        return DeleteReply(gone=await self._cluster.delete(value))

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Ask for a verification. NotFound, and NotEligible where nothing is captured (any more).

        The request is an annotation of the content, so that no restart can forget it.
        """
        kind = find_kind(request.kind)
        value = named(self._cluster, kind, request.namespace, request.name)
        check_uid(value, request.uid)
        content = self._artifact(value)
        status, name = content.status, content.metadata.name
        if status.verifications > status.verified:
            return VerifyReply(content=name, verification=status.verifications)
        await self._cluster.annotate(content, VERIFY, self._new_id())
        return VerifyReply(content=name, verification=status.verified + 1)

    async def retention(self, request: RetentionRequest) -> RetentionReply:
        """Return what goes now and why the other artifacts stay; delete first if requested."""
        if request.run:
            await self._retention.run()
        limits = self._retention.limits
        found = sorted(
            map(_retained, self._retention.judged()), key=lambda artifact: artifact.content
        )
        wanted = [
            artifact
            for artifact in found
            if artifact.content > request.after and request.namespace in (None, artifact.namespace)
        ]
        page = wanted[:RETENTION_PAGE]
        return RetentionReply(
            artifacts=page,
            limits={k: v for k, v in msgspec.structs.asdict(limits).items() if v is not None},
            next=page[-1].content if len(wanted) > len(page) else "",
        )

    def _artifact(self, value: AnyObject) -> SnapshotContent:
        """Return the committed content behind an object that people name."""
        found = content_behind(self._cluster.get, value)
        shown = f"{kind_of(value).name} {value.metadata.name}"
        if found is None or found.status.committed is None:
            raise NotEligible(
                f"{shown} holds no captured artifact",
                next_step="name a checkpoint, snapshot or content that is Ready",
            )
        if found.metadata.deletion_timestamp:
            raise NotEligible(f"{shown} is being deleted")
        return found


def named(cluster: Cluster, kind: Kind, namespace: str | None, name: str) -> AnyObject:
    """Return an object that a request names. NotFound."""
    space = (namespace or "default") if kind.namespaced else None
    value = cluster.get(kind.name, space, name)
    if value is None:
        where = f" in namespace {space}" if space else ""
        raise NotFound(
            f"{kind.name} {name} does not exist{where}",
            next_step=f"list what there is: snapshotctl get {kind.plural}",
            kind=kind.name,
            name=name,
        )
    return value


def check_uid(value: AnyObject, uid: str) -> None:
    """Raise Conflict when a request names another incarnation than there is."""
    if uid and value.metadata.uid != uid:
        raise Conflict(
            f"{kind_of(value).name} {value.metadata.name} was made again since it was read",
            expected=uid,
            found=value.metadata.uid,
        )


def _page(found: list[AnyObject], limit: int, shown: Callable[[AnyObject], Any]) -> GetReply:
    """Return as many of the first `limit` objects as fit into one message."""
    items: list[Any] = []
    size = 0
    for value in found[:limit]:
        item = shown(value)
        size += len(encode_json(item))
        if items and size > MAX_REPLY_BYTES:
            break
        items.append(item)
    more = items and len(found) > len(items)
    return GetReply(items=items, next=_page_key(found[len(items) - 1]) if more else "")


def _page_key(value: AnyObject) -> str:
    return f"{value.metadata.namespace or ''}/{value.metadata.name}"


def _differing(found: AnyObject, wanted: AnyObject) -> list[str]:
    """Return the fields in which a manifest differs from what is stored, each with both values.

    Values that may be secret are not shown.
    """
    notes = found.metadata.annotations
    lines = [
        f"metadata.annotations[{key}]: it differs, and is not shown"
        if key in (LAST_APPLIED, POD_SPEC) or names_secret(key)
        else f"metadata.annotations[{key}]: {_short(text)} is wanted, "
        f"{_short(notes.get(key))} is there"
        for key, text in wanted.metadata.annotations.items()
        if notes.get(key) != text
    ]
    if found.spec == wanted.spec:
        return lines
    there, given = (redacted(json.loads(encode_json(each)))["spec"] for each in (found, wanted))
    shown = list(_differences("spec", there, given))
    return lines + (shown or ["spec: it differs in values that are not shown"])


def _differences(path: str, there: Any, wanted: Any) -> Iterator[str]:
    """Yield each innermost field that differs; values are those of JSON."""
    if isinstance(there, dict) and isinstance(wanted, dict):
        for key in [*there, *(key for key in wanted if key not in there)]:
            yield from _differences(f"{path}.{key}", there.get(key), wanted.get(key))
    elif isinstance(there, list) and isinstance(wanted, list) and len(there) == len(wanted):
        for index, pair in enumerate(zip(there, wanted, strict=True)):
            yield from _differences(f"{path}[{index}]", *pair)
    elif there != wanted:
        yield f"{path}: {_short(wanted)} is wanted, {_short(there)} is there"


def _short(value: Any) -> str:
    text = "nothing" if value is None else json.dumps(value)
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}…"


def _parse_all(documents: list[msgspec.Raw]) -> list[AnyObject]:
    problems: list[str] = []
    values: list[AnyObject] = []
    decoded: list[Any] = []
    for index, raw in enumerate(documents):
        where = f"[{index}] " if len(documents) > 1 else ""
        decoded.append(None)
        try:
            decoded[index] = json.loads(bytes(raw))
            values.append(_with_namespace(parse(decoded[index], where=where)))
        except InvalidManifest as error:
            problems += error.values["problems"]
        except (ValueError, RecursionError) as error:
            problems.append(f"{where}not JSON: {error}")
    problems += [f"[{index}] {problem}" for index, problem in repetitions(decoded)]
    if problems:
        raise InvalidManifest(
            f"{len(problems)} problem{'s' if len(problems) != 1 else ''}: " + "; ".join(problems),
            next_step="correct the fields and apply again; nothing was stored",
            problems=problems,
        )
    return values


def _with_namespace(value: AnyObject) -> AnyObject:
    if not kind_of(value).namespaced or value.metadata.namespace:
        return value
    changed: Any = replace(value, metadata=replace(value.metadata, namespace="default"))
    return changed  # type: ignore[no-any-return]


def _prepared(value: AnyObject, traceparent: str) -> AnyObject:
    meta = value.metadata
    annotations = dict(meta.annotations)
    if traceparent:
        annotations.setdefault(TRACEPARENT, traceparent)
    meta = replace(meta, annotations=annotations)
    changed: Any = replace(value, metadata=meta)
    return changed  # type: ignore[no-any-return]


def _retained(verdict: Decision) -> Retained:
    meta, committed = verdict.value.metadata, verdict.content.status.committed
    return Retained(
        kind=kind_of(verdict.value).name,
        namespace=meta.namespace or "default",
        name=meta.name,
        content=verdict.content.metadata.name,
        bytes=committed.bytes if committed is not None else 0,
        goes=verdict.goes,
        why=verdict.why,
    )


def _applied(value: AnyObject, action: Any) -> Applied:
    meta = value.metadata
    return Applied(
        kind=kind_of(value).name,
        namespace=meta.namespace,
        name=meta.name,
        uid=meta.uid,
        action=action,
    )
