"""What arrives at the operator: requests of people, reports of services, presence of nodes."""

from __future__ import annotations

import json
import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

import msgspec
from msgspec.structs import replace

from snapshot_operator.domain import fold, quarantine
from snapshot_operator.domain.nodes import absences, node_absent, node_from
from snapshot_operator.domain.ordering import template_digest
from snapshot_operator.domain.plan import FINALIZER, orders_of
from snapshot_operator.domain.retention import Limits, Verdict
from snapshot_operator.handlers.answering import Endpoint, answering
from snapshot_operator.ports import Cluster
from snapshot_shared import subjects
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
    TemplateReply,
    TemplateRequest,
    VerifyReply,
    VerifyRequest,
)
from snapshot_shared.bus import ASKED
from snapshot_shared.codec import encode_json
from snapshot_shared.errors import (
    AlreadyExists,
    Conflict,
    Forbidden,
    InvalidManifest,
    NoSpace,
    NotEligible,
    NotFound,
    StalePodReference,
    StoreBusy,
)
from snapshot_shared.ids import OrderId, check_node, owner_of
from snapshot_shared.manifests import parse
from snapshot_shared.objects import (
    TRACEPARENT,
    AnyObject,
    DynamoCheckpoint,
    Kind,
    Node,
    Pod,
    Snapshot,
    SnapshotContent,
    find_kind,
    is_true,
    kind_of,
)
from snapshot_shared.orders import Presence, Report

log = logging.getLogger(__name__)

MAX_REPLY_BYTES = 900 * 1024
RETENTION_PAGE = 1000
"""Artifacts in one reply: names are bounded, so that they fit."""


class Retention(NamedTuple):
    """What is kept, what that means for each artifact now, and how the rest is let go."""

    limits: Limits
    judge: Callable[[], Awaitable[list[Verdict]]]
    run: Callable[[], Awaitable[None]]


class Api:
    """Answers `snap.api.*`. Every failure becomes a reply; nothing is stored by halves."""

    def __init__(self, cluster: Cluster, retention: Retention) -> None:
        """Use the object store."""
        self._cluster = cluster
        self._retention = retention

    def endpoints(self) -> dict[str, Endpoint]:
        """Give the handler of each `snap.api.<verb>`; a node asks for templates by its name."""
        return {
            "apply": answering(ApplyRequest, ApplyReply, self.apply),
            "get": answering(GetRequest, GetReply, self.get),
            "delete": answering(DeleteRequest, DeleteReply, self.delete),
            "verify": answering(VerifyRequest, VerifyReply, self.verify),
            "retention": answering(RetentionRequest, RetentionReply, self.retention),
            "template.*": self._template,
        }

    async def apply(self, request: ApplyRequest) -> ApplyReply:
        """Check all documents, then create them. InvalidManifest lists every problem of all."""
        values = _parse_all(request.documents)
        existing = [await self._existing(value) for value in values]
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

    async def _existing(self, value: AnyObject) -> AnyObject | None:
        """Find the object of this name; a different spec is a conflict, for specs never change."""
        kind = kind_of(value)
        found = await self._cluster.get(kind.name, value.metadata.namespace, value.metadata.name)
        if found is None:
            return None
        name = value.metadata.name
        if found.metadata.deletion_timestamp:
            raise Conflict(
                f"{kind.name} {name} is being deleted",
                next_step=f"wait until it is gone: snapshotctl wait {kind.short}/{name} "
                "--for=delete",
            )
        same = found.spec == value.spec and all(
            found.metadata.annotations.get(key) == text
            for key, text in value.metadata.annotations.items()
        )
        if not same:
            raise AlreadyExists(
                f"{kind.name} {name} exists with another spec, and a spec never changes",
                next_step="delete it first, or use another name",
                kind=kind.name,
                name=name,
            )
        return found

    async def get(self, request: GetRequest) -> GetReply:
        """Read one object, or a page of a kind that fits into one message."""
        kind = find_kind(request.kind)
        if request.name is not None:
            return GetReply(items=[await self._one(kind, request.namespace, request.name)])
        limit = min(max(request.limit, 1), 1000)
        namespace = request.namespace if kind.namespaced else None
        found = await self._cluster.list(kind.name, namespace, after=request.after, limit=limit + 1)
        items: list[AnyObject] = []
        size = 0
        for value in found[:limit]:
            size += len(encode_json(value))
            if items and size > MAX_REPLY_BYTES:
                break
            items.append(value)
        more = len(found) > len(items)
        return GetReply(items=list(items), next=_key(items[-1]) if more and items else "")

    async def delete(self, request: DeleteRequest) -> DeleteReply:
        """Mark one object for deletion. NotFound when it is not there."""
        kind = find_kind(request.kind)
        value = await self._one(kind, request.namespace, request.name)
        if isinstance(value, Node) and not is_true(value.status.conditions, "Lost"):
            raise Forbidden(
                f"node {request.name} is not lost",
                next_step="stop its agent first; after 90 s without presence it may be deleted",
            )
        return DeleteReply(gone=await self._cluster.delete(value))

    async def verify(self, request: VerifyRequest) -> VerifyReply:
        """Ask for a verification. NotFound, and NotEligible where nothing is captured (any more).

        The wish stands in the status of the content, so that no restart can forget it.
        """
        kind = find_kind(request.kind)
        while True:
            content = await self._content(await self._one(kind, request.namespace, request.name))
            wanted = replace(content, status=quarantine.asked(content))
            try:
                if wanted != content:
                    await self._cluster.update_status(wanted)
            except StoreBusy:
                raise
            except Conflict:
                continue
            number = wanted.status.verifications
            return VerifyReply(content=content.metadata.name, verification=number)

    async def retention(self, request: RetentionRequest) -> RetentionReply:
        """Say what goes now and why each other artifact stays; do it first when that is asked."""
        if request.run:
            await self._retention.run()
        limits = self._retention.limits
        found = sorted(
            map(_retained, await self._retention.judge()), key=lambda artifact: artifact.content
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

    async def _content(self, value: AnyObject) -> SnapshotContent:
        """Find the committed content behind an object that people name."""
        match value:
            case DynamoCheckpoint():
                name = value.status.content_name
            case Snapshot():
                name = value.status.bound_snapshot_content_name or ""
            case _:
                name = value.metadata.name
        found = await self._cluster.get("SnapshotContent", None, name) if name else None
        kind = kind_of(value).name
        if not isinstance(found, SnapshotContent) or found.status.committed is None:
            raise NotEligible(
                f"{kind} {value.metadata.name} holds no captured artifact",
                next_step="name a checkpoint, snapshot or content that is Ready",
            )
        if found.metadata.deletion_timestamp:
            raise NotEligible(f"{kind} {value.metadata.name} is being deleted")
        return found

    async def _template(self, data: bytes, headers: Mapping[str, str]) -> bytes:
        """Answer a node for its own pods only: its key lets it ask on no other's subject."""

        async def answer(request: TemplateRequest) -> TemplateReply:
            if headers.get(ASKED) != subjects.template(check_node(request.node)):
                raise Forbidden(f"this is not the subject on which {request.node} asks")
            return await self.template(request)

        return await answering(TemplateRequest, TemplateReply, answer)(data, headers)

    async def template(self, request: TemplateRequest) -> TemplateReply:
        """Give an agent the spec of a pod that was placed on its node."""
        value = await self._cluster.get("Pod", request.namespace, request.name)
        if not isinstance(value, Pod) or value.metadata.uid != request.uid:
            raise StalePodReference(f"pod {request.name} with uid {request.uid} is gone")
        if value.status.node_name != request.node:
            raise Forbidden(f"pod {request.name} is not placed on {request.node}")
        log.info("template %s of pod %s", template_digest(value), request.name)
        return TemplateReply(spec=msgspec.to_builtins(value.spec))

    async def _one(self, kind: Kind, namespace: str | None, name: str) -> AnyObject:
        space = (namespace or "default") if kind.namespaced else None
        value = await self._cluster.get(kind.name, space, name)
        if value is None:
            where = f" in namespace {space}" if space else ""
            raise NotFound(
                f"{kind.name} {name} does not exist{where}",
                next_step=f"list what there is: snapshotctl get {kind.plural}",
                kind=kind.name,
                name=name,
            )
        return value


def _key(value: AnyObject) -> str:
    return f"{value.metadata.namespace or ''}/{value.metadata.name}"


def _parse_all(documents: list[msgspec.Raw]) -> list[AnyObject]:
    problems: list[str] = []
    values: list[AnyObject] = []
    for index, raw in enumerate(documents):
        where = f"[{index}] " if len(documents) > 1 else ""
        try:
            document: Any = json.loads(bytes(raw))
            value = parse(document, where=where)
        except (ValueError, RecursionError) as error:
            problems.append(f"{where}not JSON: {error}")
        except InvalidManifest as error:
            problems += error.values["problems"]
        else:
            values.append(_with_namespace(value))
    seen: set[tuple[str, str]] = set()
    for index, value in enumerate(values):
        identity = (kind_of(value).name, _key(value))
        if identity in seen:
            problems.append(f"[{index}] metadata.name: {value.metadata.name} appears twice")
        seen.add(identity)
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
    meta = replace(meta, annotations=annotations, finalizers=[FINALIZER])
    changed: Any = replace(value, metadata=meta)
    return changed  # type: ignore[no-any-return]


def _retained(verdict: Verdict) -> Retained:
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


async def fold_report(
    cluster: Cluster, report: Report, now: float
) -> tuple[AnyObject, AnyObject] | None:
    """Fold one report into the object that its order belongs to; give it before and after.

    None when it changes nothing. A conflict is read and folded again: the effect is in the store
    before the report is acked. StoreBusy and NoSpace when it has to be tried later.
    """
    owner = owner_of(OrderId(report.order))
    while True:
        value = await cluster.by_uid(owner)
        changed = fold.fold(orders_of(value), report, now)
        if value is None or changed is None:
            return None
        status: Any = replace(value.status, orders=changed)
        new: Any = replace(value, status=status)
        try:
            return value, await cluster.update_status(new)
        except StoreBusy:
            raise
        except Conflict:
            continue
        except NotFound:
            return None


async def fold_presence(
    cluster: Cluster,
    present: Mapping[str, Presence],
    last_seen: Mapping[str, float],
    *,
    now: float,
    monotonic: float,
) -> None:
    """Make the Node objects agree with who is there. `last_seen` is monotonic seconds by node."""
    found = [node for node in await cluster.list("Node") if isinstance(node, Node)]
    for presence in present.values():
        await fold_one_presence(cluster, presence, now)
    for node, absent_s in absences(found, present, last_seen, monotonic):
        changed = node_absent(node, absent_s, now)
        if changed != node:
            await _write_node(cluster, changed, is_new=False)


async def fold_one_presence(cluster: Cluster, presence: Presence, now: float) -> None:
    """Make one Node object agree with what its agent says; equal values make no write."""
    known = await cluster.get("Node", None, presence.node)
    wanted = node_from(presence, known if isinstance(known, Node) else None, now)
    if wanted != known:
        await _write_node(cluster, wanted, is_new=known is None)


async def _write_node(cluster: Cluster, node: Node, *, is_new: bool) -> None:
    """Store a node. Another operator may be told the same, and the next presence repeats it."""
    try:
        await (cluster.create(node) if is_new else cluster.update_status(node))
    except (AlreadyExists, Conflict, NoSpace, NotFound) as error:
        log.info("node %s is not written: %s", node.metadata.name, error)
