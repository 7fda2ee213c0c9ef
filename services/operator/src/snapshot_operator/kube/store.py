"""The object store of a cluster: the Kubernetes API, read by one list and one watch a kind.

Every write names the uid and the resourceVersion that were read. Reads of a decision come from
memory; `read` and `find` ask the API server itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable
from hashlib import sha256
from typing import Any, NamedTuple, cast

import msgspec
from msgspec.structs import replace

from snapshot_api.facts import Node, Pod
from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.meta import ObjectMeta
from snapshot_operator.kube.shaping import without_ours
from snapshot_operator.kube.wire import (
    OURS,
    Decode,
    Sent,
    decoder,
    job_in,
    new_meta,
    node_in,
    pod_in,
)
from snapshot_operator.ports import Change, Document, Event
from snapshot_shared.errors import (
    Conflict,
    Forbidden,
    Internal,
    InvalidManifest,
    NotFound,
    StoreBusy,
)
from snapshot_shared.kube_client import (
    MERGE_PATCH,
    STRATEGIC_PATCH,
    KubeClient,
    ResourceExpired,
    back_off,
    decoded,
)
from snapshot_shared.kube_watch import (
    WATCH_S,
    Listed,
    StoreRewound,
    WatchEvent,
    changes,
    follow,
    pages,
)
from snapshot_shared.service import until_stopped

log = logging.getLogger(__name__)

MAX_REMEMBERED = 10_000
"""How many uids are remembered that no object has."""

_METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_OWNERS_OF_ORDERS = ("SnapshotContent", "SnapshotRestore")
"""The kinds that are looked for by a uid that is not in memory."""


class Resource(NamedTuple):
    """Where objects of a kind are in the API, and how one is decoded."""

    kind: str
    base: str
    plural: str
    namespaced: bool
    decode: Decode | None

    def path(self, namespace: str | None = None, name: str = "", subresource: str = "") -> str:
        """Return the path of one object, or of all without a name."""
        space = ("namespaces", namespace) if self.namespaced and namespace else ()
        words = (self.base, *space, self.plural, name, subresource)
        return "/".join(word for word in words if word)

    def path_of(self, value: AnyObject, subresource: str = "") -> str:
        """Return the path of an object."""
        return self.path(value.metadata.namespace, value.metadata.name, subresource)

    def value_of(self, sent: Sent, same: AnyObject | None = None) -> AnyObject:
        """Return an object as it is kept, as `Decode` says."""
        if self.decode is None:
            raise Internal(f"a {self.kind} is not read")
        return self.decode(sent, same)

    def value_in(self, answer: bytes) -> AnyObject:
        """Return the object that was read. msgspec.DecodeError for one that is none of the kind."""
        return self.value_of(_SENT.decode(answer))


_FACTS: dict[str, Decode] = {"Pod": pod_in, "Job": job_in, "Node": node_in}


def _resource_of(document: Document) -> Resource:
    kind = document["kind"]
    return RESOURCES.get(kind) or _UNREAD[kind]


def _resource(name: str) -> Resource:
    kind = KINDS[name]
    group = kind.api_version
    decode = _FACTS.get(name) or decoder(kind.type)
    base = f"/apis/{group}" if "/" in group else f"/api/{group}"
    return Resource(name, base, kind.plural, kind.namespaced, decode)


RESOURCES = {name: _resource(name) for name in KINDS}

_UNREAD = {
    "ResourceClaimTemplate": Resource(
        "ResourceClaimTemplate",
        "/apis/resource.k8s.io/v1",
        "resourceclaimtemplates",
        namespaced=True,
        decode=None,
    )
}
"""The kinds of which the operator makes objects, and keeps none in memory."""


class DRAUnavailable(InvalidManifest):
    """A pod cannot claim devices in this cluster."""

    default_next_step = (
        "use Kubernetes 1.34 or later with a DRA driver for its GPUs, or leave out "
        "spec.gpuMemoryService"
    )


_NOT_SERVED = {
    "ResourceClaimTemplate": lambda: DRAUnavailable(
        "this cluster has no resource.k8s.io/v1, by which a memory server gets devices"
    )
}
"""By kind, the error if an API server does not serve it. Such a kind may be missing."""


class Place(NamedTuple):
    """What `read` takes."""

    kind: str
    namespace: str | None
    name: str


class _Known(NamedTuple):
    """An object as it is known, and the newest version of the API server that was seen of it."""

    version: int
    value: AnyObject
    spec: bytes
    """The SHA-256 of its spec as it was sent: equal bytes are not decoded again."""


_LIST = msgspec.json.Decoder(Listed[Sent])
_DOCUMENT = msgspec.json.Decoder(dict[str, Any])
_SENT = msgspec.json.Decoder(Sent)
_CHANGE = msgspec.json.Decoder(WatchEvent[Sent])


class KubeStore:
    """The `Store` port over the Kubernetes API."""

    def __init__(self, client: KubeClient, jitter: Callable[[], float]) -> None:
        """Use an API server. `jitter` returns a random number from 0 to 1."""
        self._client = client
        self._jitter = jitter
        self._listeners: list[Callable[[Event], None]] = []
        self._presences = 0
        self._known: dict[str, dict[str, _Known]] = {kind: {} for kind in RESOURCES}
        """By kind and uid, the newest version that was listed, watched or written."""
        self._versions: dict[str, str] = {}
        """By kind, the version up to which changes have been seen."""
        self._uids = _UidSearch(client)

    def subscribe(self, listener: Callable[[Event], None]) -> None:
        """Report every change that a watch brings."""
        self._listeners.append(listener)

    async def list(self, kind: str) -> list[AnyObject]:
        """Return all objects of a kind; `run` reports what has changed after that.

        An API server that is away, or does not serve the kind yet, is waited for.
        """
        resource, failures = RESOURCES[kind], 0
        while True:
            try:
                await self._read_all(resource, self._keep)
                return [known.value for known in self._known[kind].values()]
            except (NotFound, ResourceExpired, StoreBusy) as error:
                log.warning("%s are not listed: %s", resource.plural, error)
            failures += 1
            await back_off(failures, self._jitter())

    async def read(self, kind: str, namespace: str | None, name: str) -> AnyObject | None:
        """Return an object as the API server has it now."""
        resource = RESOURCES[kind]
        try:
            answer = await self._client.request("GET", resource.path(namespace, name))
        except NotFound:
            return None
        value = self._keep(resource, decoded(_SENT, answer))
        if value is None:
            # It is there: that it cannot be decoded must not pass for its absence.
            raise StoreBusy(f"{resource.kind} {name} is there and cannot be read by this version")
        return value

    async def find(self, uid: str) -> AnyObject | None:
        """Return the object with a uid as the API server has it now."""
        known = next((found[uid] for found in self._known.values() if uid in found), None)
        if known is not None:
            place = _place_of(known.value)
        elif (found := await self._uids.find(uid)) is not None:
            place = found
        else:
            return None
        return self._incarnation(await self.read(*place), uid)

    async def spec_of(self, pod: Pod) -> dict[str, Any] | None:
        """Return the spec of a pod as the API server has it now; None if the pod is gone.

        Variables that are put into each pod of ours are left out.
        """
        found = await self.read_document(
            {
                "kind": "Pod",
                "metadata": {"name": pod.metadata.name, "namespace": pod.metadata.namespace},
            }
        )
        is_it = found is not None and found["metadata"]["uid"] == pod.metadata.uid
        return without_ours(found["spec"]) if found and is_it else None

    async def read_document(self, named: Document) -> Document | None:
        """Return the whole object of the kind and name of a document; None if there is none."""
        resource, meta = _resource_of(named), named["metadata"]
        path = resource.path(meta.get("namespace"), meta["name"])
        try:
            return decoded(_DOCUMENT, await self._client.request("GET", path))
        except NotFound:
            return None

    def _incarnation(self, value: AnyObject | None, uid: str) -> AnyObject | None:
        """Return an object that was read if it has the uid; another one of its name is reported."""
        if value is not None and value.metadata.uid != uid:
            self._report("MODIFIED", value)
            return None
        return value

    async def create(self, value: AnyObject) -> AnyObject:
        """Store a new object. AlreadyExists when the name is taken."""
        if isinstance(value, Node):
            raise NotFound(f"no Node is called {value.metadata.name}", kind="Node")
        resource, meta = RESOURCES[kind_of(value).name], new_meta(value.metadata)
        body: Any = replace(value, metadata=meta)
        path = resource.path(meta.namespace)
        return self._written(resource, await self._client.request("POST", path, body=body))

    async def create_document(self, document: Document) -> AnyObject | None:
        """Store a new object. AlreadyExists when the name is taken.

        InvalidManifest, too, if the API server does not serve a kind that it may lack.
        """
        resource = _resource_of(document)
        path = resource.path(document["metadata"].get("namespace"))
        try:
            answer = await self._client.request("POST", path, body=document)
        except NotFound as error:
            if (lacking := _NOT_SERVED.get(resource.kind)) is None:
                raise
            raise lacking() from error
        return self._written(resource, answer) if resource.decode is not None else None

    async def update_status(self, value: AnyObject) -> AnyObject:
        """Replace the status. That of a Node stays in memory; of a pod, our condition is set."""
        if isinstance(value, Node):
            return self._announced(value)
        if isinstance(value, Pod):
            return await self._set_conditions(value)
        kind, meta = kind_of(value), value.metadata
        body = {
            "apiVersion": kind.api_version,
            "kind": kind.name,
            "metadata": {"name": meta.name, "namespace": meta.namespace, **_as_read(meta)},
            "status": value.status,
        }
        resource = RESOURCES[kind.name]
        path = resource.path_of(value, "status")
        return self._written(resource, await self._client.request("PUT", path, body=body))

    async def _set_conditions(self, pod: Pod) -> AnyObject:
        """Set our conditions of a pod, and leave those of its kubelet as they are.

        Its version is not compared: the kubelet writes the status of the same pod.
        """
        rows = [
            {
                "type": row.type,
                "status": row.status,
                "reason": row.reason,
                "message": row.message,
                "lastTransitionTime": row.last_transition_time,
            }
            for row in pod.status.conditions
            if row.type.startswith(OURS)
        ]
        resource = RESOURCES["Pod"]
        body = {"metadata": {"uid": pod.metadata.uid}, "status": {"conditions": rows}}
        path = resource.path_of(pod, "status")
        answer = await self._client.request("PATCH", path, body=body, content_type=STRATEGIC_PATCH)
        return self._written(resource, answer)

    async def update_spec(self, value: AnyObject) -> AnyObject:
        """Raise Forbidden: the specs of a cluster's objects belong to people."""
        raise Forbidden(
            f"the operator does not write the spec of {kind_of(value).name} {value.metadata.name}",
            next_step="use kubectl, such as kubectl cordon for a node",
        )

    async def annotate(self, value: AnyObject, key: str, text: str) -> AnyObject:
        """Set one annotation."""
        return await self._patch(value, {"annotations": {key: text}})

    async def label(self, value: AnyObject, key: str, text: str | None) -> AnyObject:
        """Set one label, or remove it without a text."""
        return await self._patch(value, {"labels": {key: text}})

    async def add_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject:
        """Put a finalizer on. Conflict, too, when the object is being deleted."""
        if value.metadata.deletion_timestamp is not None:
            raise Conflict(f"{value.metadata.name} is being deleted")
        return await self._patch(value, {"finalizers": [*value.metadata.finalizers, finalizer]})

    async def remove_finalizer(self, value: AnyObject, finalizer: str) -> AnyObject | None:
        """Take a finalizer off. None when the object is gone with it."""
        left = [name for name in value.metadata.finalizers if name != finalizer]
        changed = await self._patch(value, {"finalizers": left})
        if left or value.metadata.deletion_timestamp is None:
            return changed
        # Its deletion may have been watched before the answer came.
        self._known[kind_of(value).name].pop(value.metadata.uid, None)
        return None

    async def delete(self, value: AnyObject) -> AnyObject | None:
        """Mark the object with this uid for deletion. None when it is gone."""
        kind, meta = kind_of(value).name, value.metadata
        options = {"propagationPolicy": "Background", "preconditions": {"uid": meta.uid}}
        # NotFound: it is gone. Conflict: it is gone, and another incarnation has its name.
        with contextlib.suppress(NotFound, Conflict):
            path = RESOURCES[kind].path_of(value)
            await self._client.request("DELETE", path, body=options)
        return self._incarnation(await self.read(kind, meta.namespace, meta.name), meta.uid)

    async def _patch(self, value: AnyObject, metadata: dict[str, Any]) -> AnyObject:
        """Change metadata of the version that was read."""
        resource = RESOURCES[kind_of(value).name]
        read = _as_read(value.metadata)
        if isinstance(value, Node):
            # Its version is one of ours, and its kubelet writes it every few seconds.
            del read["resourceVersion"]
        body = {"metadata": {**metadata, **read}}
        answer = await self._client.request(
            "PATCH", resource.path_of(value), body=body, content_type=MERGE_PATCH
        )
        return self._written(resource, answer)

    def _written(self, resource: Resource, answer: bytes) -> AnyObject:
        value = self._keep(resource, decoded(_SENT, answer))
        if value is None:
            raise Internal(f"a {resource.kind} that was written cannot be read again")
        return value

    # How memory is filled.

    async def run(self) -> None:
        """Follow every kind that was listed, until it is cancelled. StoreRewound."""
        await until_stopped(asyncio.Event(), *(self._follow(kind) for kind in RESOURCES.values()))

    async def _follow(self, resource: Resource) -> None:
        """Watch a kind, again and again; list it where the server has no history any more."""
        await follow(
            resource.plural,
            lambda: self._versions[resource.kind],
            lambda: self._watch(resource),
            lambda: self._read_all(resource, self._take),
            self._jitter,
        )

    async def _require_history(self, resource: Resource) -> None:
        """Raise StoreRewound when etcd was restored from an older backup since the last watch.

        A watch from a version that is yet to come is silent, and versions that are given again mean
        other values: what is in memory is of no use then.
        """
        answer = await self._client.request("GET", resource.path(), params={"limit": "1"})
        now, seen = decoded(_LIST, answer).metadata.resource_version, self._versions[resource.kind]
        if int(now) < int(seen):
            raise StoreRewound(f"{resource.plural} are at version {now} and were at {seen}")

    async def _watch(self, resource: Resource) -> None:
        """Report the changes after the version that was seen last, until the server ends it."""
        await self._require_history(resource)
        kind, path = resource.kind, resource.path()
        # Spread, so that the watches of all kinds do not end together.
        lasts_s = WATCH_S * (1 + self._jitter())
        found = changes(self._client, path, _CHANGE, self._versions[kind], within_s=lasts_s)
        async with contextlib.aclosing(found):
            async for change, version in found:
                if change is not None and change.type == "DELETED":
                    self._forget(resource, change.object.metadata.uid)
                elif change is not None:
                    self._take(resource, change.object)
                self._versions[kind] = version

    def _take(self, resource: Resource, sent: Sent) -> None:
        """Report what is there, unless it is known already, such as a write of our own."""
        known = self._known[resource.kind].get(sent.metadata.uid)
        value = self._keep(resource, sent)
        if value is not None and (known is None or value is not known.value):
            self._report("MODIFIED" if known else "ADDED", value)

    async def _read_all(self, resource: Resource, take: Callable[[Resource, Sent], object]) -> None:
        """Take all objects of a kind page by page, then forget those that are not there any more.

        What was taken before an error stays known: it was there.
        """
        known = self._known[resource.kind]
        version, listed = "", set[str]()
        async for page in pages(self._client, resource.path(), _LIST):
            for sent in page.items or ():
                take(resource, sent)
                listed.add(sent.metadata.uid)
            version = page.metadata.resource_version
        for uid in known.keys() - listed:
            # What was created after the list was made is in no list yet.
            if known[uid].version <= int(version):
                self._forget(resource, uid)
        self._versions[resource.kind] = version

    def _keep(self, resource: Resource, sent: Sent) -> AnyObject | None:
        """Return the newest known version of an object that was received.

        None for one that cannot be decoded: the API server may hold what an older schema let in.
        """
        uid, version = sent.metadata.uid, int(sent.metadata.resource_version)
        before = self._known[resource.kind].get(uid)
        if before is not None and before.version >= version:
            return before.value
        spec = sha256(sent.spec).digest()
        same = before.value if before is not None and before.spec == spec else None
        try:
            value = resource.value_of(sent, same)
        except (msgspec.DecodeError, RecursionError) as error:
            log.warning("%s %s is left out: %s", resource.kind, sent.metadata.name, error)
            return None
        if isinstance(value, Node):
            value = self._joined(value, before)
        elif before is not None and resource.kind in _FACTS and _same(value, before.value):
            value = before.value
        self._known[resource.kind][uid] = _Known(version, value, spec)
        return value

    def _joined(self, node: Node, before: _Known | None) -> Node:
        """Return what Kubernetes says of a node together with what its agent announced.

        Versions are counted here: a presence changes a Node although the API server has no new
        version of it, and most new versions that it has are heartbeats.
        """
        if before is None:
            return self._numbered(node)
        known = cast("Node", before.value)
        joined = replace(node, status=known.status)
        return known if _same(joined, known) else self._numbered(joined)

    def _announced(self, value: Node) -> Node:
        """Take what an agent announces of its node; the Node itself belongs to its kubelet."""
        known = self._known["Node"].get(value.metadata.uid)
        if known is None:
            raise NotFound(f"Node {value.metadata.name} is gone", kind="Node")
        if known.value.metadata.resource_version != value.metadata.resource_version:
            raise Conflict(f"Node {value.metadata.name} changed since it was read")
        joined = self._numbered(value)
        self._known["Node"][value.metadata.uid] = known._replace(value=joined)
        return joined

    def _numbered(self, node: Node) -> Node:
        self._presences += 1
        meta = replace(node.metadata, resource_version=str(self._presences))
        return replace(node, metadata=meta)

    def _forget(self, resource: Resource, uid: str) -> None:
        if (known := self._known[resource.kind].pop(uid, None)) is not None:
            self._report("DELETED", known.value)

    def _report(self, change: Change, value: AnyObject) -> None:
        for listener in self._listeners:
            listener(Event(change, value))


class _UidSearch:
    """Finds objects by a uid that is not in memory, for the API server can only be asked by name.

    One search lists the metadata of all objects that orders are given for. Those who ask while one
    runs share the next: what it finds is newer than their questions. A uid never comes back, and
    nothing has it before it is given: one that was found, or not, is not searched for again.
    """

    def __init__(self, client: KubeClient) -> None:
        self._client = client
        self._lock = asyncio.Lock()
        self._asked: set[str] = set()
        self._found: dict[str, Place] = {}
        self._gone: OrderedDict[str, None] = OrderedDict()

    async def find(self, uid: str) -> Place | None:
        """Return where the object with a uid is, if there is one."""
        self._asked.add(uid)
        async with self._lock:
            if uid not in self._found and uid not in self._gone:
                asked, self._asked = self._asked, set()
                try:
                    self._found = {found: place async for found, place in self._all()}
                except BaseException:
                    self._asked |= asked
                    raise
                self._remember_gone(asked - self._found.keys())
            return self._found.get(uid)

    def _remember_gone(self, uids: Iterable[str]) -> None:
        self._gone.update(dict.fromkeys(uids))
        while len(self._gone) > MAX_REMEMBERED:
            self._gone.popitem(last=False)

    async def _all(self) -> AsyncIterator[tuple[str, Place]]:
        for kind in _OWNERS_OF_ORDERS:
            answer = await self._client.request(
                "GET", RESOURCES[kind].path(), accept=_METADATA_ONLY
            )
            for found in decoded(_LIST, answer).items or ():
                meta = found.metadata
                yield meta.uid, Place(kind, meta.namespace, meta.name)


def _same(value: AnyObject, known: AnyObject) -> bool:
    """Whether a newer version differs in nothing that is kept of it."""
    meta = replace(value.metadata, resource_version=known.metadata.resource_version)
    changed: Any = replace(value, metadata=meta)
    return bool(changed == known)


def _place_of(value: AnyObject) -> Place:
    return Place(kind_of(value).name, value.metadata.namespace, value.metadata.name)


def _as_read(meta: ObjectMeta) -> dict[str, str]:
    """Return what makes the API server refuse a change of another version or incarnation."""
    return {"uid": meta.uid, "resourceVersion": meta.resource_version}
