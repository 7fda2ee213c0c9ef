"""Events of Kubernetes: what `kubectl describe` and `kubectl get events` show of an object."""

from __future__ import annotations

import logging
from typing import Any

import msgspec

from snapshot_operator.core.conditions import timestamp
from snapshot_operator.kube.client import KubeClient
from snapshot_operator.kube.rbac import NAME
from snapshot_shared.errors import Failure, NotFound, SnapbackError

log = logging.getLogger(__name__)

MAX_MESSAGE = 1024
"""How long the API server lets the message of an Event be."""


class _Meta(msgspec.Struct, frozen=True):
    uid: str


class _Identified(msgspec.Struct, frozen=True):
    metadata: _Meta


_IDENTIFIED = msgspec.json.Decoder(_Identified)


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
    at = timestamp(now)
    try:
        body = {
            "metadata": {"generateName": f"{NAME}.", "namespace": namespace},
            "involvedObject": await operator_pod(client, namespace, hostname),
            "type": "Warning",
            "reason": failure.reason,
            "message": f"{failure.message}. Next: {failure.next_step}"[:MAX_MESSAGE],
            "source": {"component": NAME},
            "reportingComponent": NAME,
            "firstTimestamp": at,
            "lastTimestamp": at,
            "count": 1,
        }
        await client.request("POST", f"/api/v1/namespaces/{namespace}/events", body=body)
    except SnapbackError as error:
        log.warning("no event says %s: %s", failure.reason, error)
