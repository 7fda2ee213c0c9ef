"""Requests of nodes: the template of a pod, what artifacts are known, which pods are.

What a node asks has its name in the subject: its key lets it ask on no other's.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, TypeVar

import msgspec

from snapshot_api.facts import Pod
from snapshot_api.v1alpha1.content import SnapshotContent
from snapshot_operator.api.answering import Endpoint, answering
from snapshot_operator.core import fold, inventory
from snapshot_operator.core.content import import_name
from snapshot_operator.core.ordering import template_digest
from snapshot_operator.runtime.cluster import Cluster
from snapshot_shared import subjects
from snapshot_shared.api import (
    InventoryReply,
    InventoryRequest,
    PodsReply,
    PodsRequest,
    TemplateReply,
    TemplateRequest,
)
from snapshot_shared.bus import ASKED
from snapshot_shared.errors import Forbidden, StalePodReference
from snapshot_shared.ids import NodeName, check_node

log = logging.getLogger(__name__)

_OfNode = TypeVar("_OfNode", TemplateRequest, InventoryRequest, PodsRequest)


class NodeApi:
    """Answers `snap.api.<verb>.<node>`."""

    def __init__(self, cluster: Cluster, policy: inventory.Policy) -> None:
        """Use the objects. `policy` is about what artifact roots hold and no content knows."""
        self._cluster = cluster
        self._policy = policy

    def endpoints(self) -> dict[str, Endpoint]:
        """Return the handler of each `snap.api.<verb>.*`."""
        return {
            "template.*": _of_node(
                subjects.template, TemplateRequest, TemplateReply, self.template
            ),
            "inventory.*": _of_node(
                subjects.inventory, InventoryRequest, InventoryReply, self.inventory
            ),
            "pods.*": _of_node(subjects.pods, PodsRequest, PodsReply, self.pods),
        }

    async def template(self, request: TemplateRequest) -> TemplateReply:
        """Return the spec of a pod that was placed on the node.

        A refusal ends the pod, and so is never given on what memory may not have seen yet.
        """
        value = await self._seen(request.uid, request.node)
        named = (request.namespace, request.name)
        if value is None or (value.metadata.namespace, value.metadata.name) != named:
            raise StalePodReference(f"pod {request.name} with uid {request.uid} is gone")
        if value.status.node_name != request.node:
            raise Forbidden(f"pod {request.name} is not placed on {request.node}")
        log.info("template %s of pod %s", template_digest(value), request.name)
        return TemplateReply(spec=msgspec.to_builtins(value.spec))

    async def inventory(self, request: InventoryRequest) -> InventoryReply:
        """Judge what an agent has listed below its artifact root, by the contents there are now.

        A content that memory does not hold is looked for in the store: what it has is not moved.
        """
        uids = {item.content_uid for item in request.generations}
        found = {uid: self._cluster.by_uid(uid) for uid in sorted(uids)}
        found |= await self._cluster.find_all(uid for uid, value in found.items() if value is None)
        for item in request.generations:
            uid = item.content_uid
            if found[uid] is None:
                name = import_name(item.namespace, uid, item.generation)
                found[name] = await self._cluster.look("SnapshotContent", None, name)
        contents = [value for value in found.values() if isinstance(value, SnapshotContent)]
        return inventory.reply(request.generations, contents, self._policy)

    async def pods(self, request: PodsRequest) -> PodsReply:
        """Return which of an agent's pods are not to run there: no object places them there.

        The agent has listed them before, and the store is read only now: a placement is stored
        before its order goes out. In a store restored from a backup a pod may be without a node.
        """
        unknown = []
        for uid in request.pods:
            pod = await self._seen(uid, request.node)
            if pod is None or pod.status.node_name != request.node or _is_given_up(pod):
                unknown.append(uid)
        return PodsReply(unknown=unknown)

    async def _seen(self, uid: str, node: str) -> Pod | None:
        """Return a pod, as it is stored where memory does not have it on the node."""
        value = self._cluster.by_uid(uid)
        if not isinstance(value, Pod) or value.status.node_name != node:
            value = await self._cluster.find(uid)
        return value if isinstance(value, Pod) else None


def _is_given_up(pod: Pod) -> bool:
    """Whether a pod failed with its node, so that no order will end what may run there again."""
    return any(item.state == fold.LOST for item in fold.find(pod.status.orders, "stop"))


def _of_node(
    subject: Callable[[NodeName], str],
    request_type: type[_OfNode],
    reply_type: type[Any],
    handler: Callable[[_OfNode], Awaitable[Any]],
) -> Endpoint:
    """Return the endpoint of a handler that a node asks about itself only."""

    async def endpoint(data: bytes, headers: Mapping[str, str]) -> bytes:
        async def answer(request: _OfNode) -> Any:
            if headers.get(ASKED) != subject(check_node(request.node)):
                raise Forbidden(f"this is not the subject on which {request.node} asks")
            return await handler(request)

        return await answering(request_type, reply_type, answer)(data, headers)

    return endpoint
