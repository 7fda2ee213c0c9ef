"""Events of Kubernetes: what `kubectl describe` and `kubectl get events` show of an object."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import structs

from snapshot_api.kinds import KINDS, AnyObject, kind_of
from snapshot_api.meta import Condition
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.core.checkpoint import STUCK
from snapshot_operator.core.conditions import REFUSED, text_of, timestamp
from snapshot_operator.core.restore import RESTORED
from snapshot_operator.kube.rbac import NAME
from snapshot_shared.errors import Failure, NotFound, SnapbackError
from snapshot_shared.kube_client import KubeClient

log = logging.getLogger(__name__)

MAX_MESSAGE = 1024
"""How long the API server lets the message of an Event be."""

MAX_PREFIX = 200
"""How much of an object's name begins the name of an Event: the API server adds to it."""

MAX_WAITING = 1000
"""How many Events may wait for the API server; what happens after that has none."""

MAX_WARNINGS = 1000
"""Of how many objects the last warning is remembered, so that it is not posted again."""

_WAITS_FOR_PEOPLE = frozenset(
    {"NoAgentOnNode", "NodeSilent", REFUSED, "Unschedulable", "WorkerNotReady", *STUCK}
)
"""Why something waits that may not end by itself."""


class Happening(NamedTuple):
    """What an Event says: its type, its reason and its message."""

    type: Literal["Normal", "Warning"]
    reason: str
    message: str


class _Meta(msgspec.Struct, frozen=True):
    uid: str


class _Identified(msgspec.Struct, frozen=True):
    metadata: _Meta


_IDENTIFIED = msgspec.json.Decoder(_Identified)


def happenings(old: AnyObject, new: AnyObject) -> Iterator[Happening]:
    """Yield what a change of a status says to people: a condition each that has another reason.

    What is in no namespace says nothing: of a content its Snapshot does, where its user looks.
    """
    if not new.metadata.namespace:
        return
    before = {(row.type, row.status, row.reason) for row in old.status.conditions}
    rows = [
        row for row in new.status.conditions if (row.type, row.status, row.reason) not in before
    ]
    has_failed = any(row.type == "Failed" and row.status == "True" for row in rows)
    for row in rows:
        # A failure is in both conditions.
        if row.status == "True" or row.type == RESTORED or (row.type == "Ready" and not has_failed):
            yield Happening(_type(row), row.reason, row.message)


def _type(row: Condition) -> Literal["Normal", "Warning"]:
    is_well = row.status == "True" and row.type in ("Ready", RESTORED)
    is_wait = row.type == "Ready" or row.status == "Unknown"
    waits = is_wait and row.reason not in _WAITS_FOR_PEOPLE
    return "Normal" if is_well or waits else "Warning"


class EventRecorder:
    """Posts the Events of objects, in their order. One that is refused is logged, and lost."""

    def __init__(self, client: KubeClient, wall: Callable[[], float]) -> None:
        """Use an API server and a clock (seconds since the epoch)."""
        self._client = client
        self._wall = wall
        self._waiting: asyncio.Queue[tuple[dict[str, Any], Happening]] = asyncio.Queue(MAX_WAITING)
        self._warnings: OrderedDict[str, Happening] = OrderedDict()

    def changed(self, old: AnyObject, new: AnyObject) -> None:
        """Have the Events of a change posted that is stored."""
        for happening in happenings(old, new):
            self._add(new, happening)

    def warned(self, value: AnyObject, failure: Failure) -> None:
        """Queue an Event for a failure that no condition shows; once, however often it comes.

        The Event of a content is about its snapshot. The failure of a node is logged instead.
        """
        happening = Happening("Warning", failure.reason, text_of(failure))
        meta = value.metadata
        if self._warnings.get(meta.uid) == happening:
            return
        if not meta.namespace and not isinstance(value, SnapshotContent):
            log.warning("%s %s: %s", kind_of(value).name, meta.name, failure)
        elif not self._add(value, happening):
            return
        self._warnings[meta.uid] = happening
        if len(self._warnings) > MAX_WARNINGS:
            self._warnings.popitem(last=False)

    def _add(self, value: AnyObject, happening: Happening) -> bool:
        """Return whether the Event will be posted."""
        if self._waiting.full():
            log.warning("no event says %s: %d wait", happening.reason, MAX_WAITING)
            return False
        self._waiting.put_nowait((_reference(value), happening))
        return True

    async def run(self) -> None:
        """Post what waits, until it is cancelled."""
        while True:
            about, happening = await self._waiting.get()
            await _post(self._client, about, happening, self._wall())


def _reference(value: AnyObject) -> dict[str, Any]:
    kind, meta = kind_of(value), value.metadata
    if isinstance(value, SnapshotContent):
        ref = value.spec.snapshot_ref
        kind = KINDS["Snapshot"]
        return {"apiVersion": kind.api_version, "kind": kind.name, **structs.asdict(ref)}
    return {
        "apiVersion": kind.api_version,
        "kind": kind.name,
        "namespace": meta.namespace,
        "name": meta.name,
        "uid": meta.uid,
        "resourceVersion": meta.resource_version,
    }


async def _post(
    client: KubeClient, about: dict[str, Any], happening: Happening, now: float
) -> None:
    at, namespace = timestamp(now), about["namespace"]
    body = {
        "metadata": {"generateName": f"{about['name'][:MAX_PREFIX]}.", "namespace": namespace},
        "involvedObject": about,
        "type": happening.type,
        "reason": happening.reason,
        "message": happening.message[:MAX_MESSAGE],
        "source": {"component": NAME},
        "reportingComponent": NAME,
        "firstTimestamp": at,
        "lastTimestamp": at,
        "count": 1,
    }
    try:
        await client.request("POST", f"/api/v1/namespaces/{namespace}/events", body=body)
    except SnapbackError as error:
        log.warning("no event says %s: %s", happening.reason, error)


async def operator_pod(client: KubeClient, namespace: str, hostname: str) -> dict[str, Any]:
    """Return a reference to the operator's own pod; to its Lease where it runs in none."""
    try:
        answer = await client.request("GET", f"/api/v1/namespaces/{namespace}/pods/{hostname}")
        uid = _IDENTIFIED.decode(answer).metadata.uid
    except NotFound:
        kind = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease"}
        return {**kind, "namespace": namespace, "name": NAME}
    pod = {"apiVersion": "v1", "kind": "Pod", "namespace": namespace}
    return {**pod, "name": hostname, "uid": uid}


async def warn_of(
    client: KubeClient, namespace: str, hostname: str, failure: Failure, now: float
) -> None:
    """Post an Event of the operator itself, of type Warning. One that is refused is logged."""
    try:
        about = await operator_pod(client, namespace, hostname)
    except SnapbackError as error:
        log.warning("no event says %s: %s", failure.reason, error)
        return
    await _post(client, about, Happening("Warning", failure.reason, text_of(failure)), now)
