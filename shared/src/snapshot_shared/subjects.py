"""Every NATS subject, stream, bucket and durable of the product. Nothing else builds one."""

from __future__ import annotations

import re

from snapshot_shared.errors import InvalidName
from snapshot_shared.ids import (
    NodeName,
    OrderId,
    check_label,
    check_order_id,
    name_of,
    object_token,
    token,
)

ORDERS = "ORDERS"
REPORTS = "REPORTS"
PROGRESS = "PROGRESS"
SPANS = "SPANS"
DEAD = "DEAD"
NODES_BUCKET = "snap_nodes"
OBJECTS_BUCKET = "snap_objects"
SCHEMAS_BUCKET = "snap_schemas"

API = "snap.api"
"""Requests to the operator: `snap.api.<verb>`, JSON in, JSON out."""

EVENTS = "snap.event"
"""Core NATS: `snap.event.<plural>.<namespace or ->.<name>`, one message a change of an object."""

_SERVICES = ("agent", "gms")
_KEY = re.compile(r"[-/_=a-zA-Z0-9]+(\.[-/_=a-zA-Z0-9]+)*")


def family(subject: str) -> str:
    """Return the first two words of a subject: what kind of message it is, of few kinds."""
    return ".".join(subject.split(".")[:2])


def order(node: NodeName, service: str, order_id: OrderId) -> str:
    """Subject of one order."""
    return f"snap.order.{token(node)}.{_service(service)}.{check_order_id(order_id)}"


def order_template(service: str, verb: str) -> str:
    """Write the subject of all orders of a verb with names for its variable words."""
    return f"snap.order.{{node}}.{_service(service)}.{verb}-{{owner}}"


def orders_of(node: NodeName, service: str) -> str:
    """Filter for all orders of one service on one node."""
    return f"snap.order.{token(node)}.{_service(service)}.*"


def parse_order(subject: str) -> tuple[NodeName, str, OrderId]:
    """Take an order's subject apart. InvalidName when it is not one."""
    words = subject.split(".")
    if len(words) != 5 or words[:2] != ["snap", "order"]:
        raise InvalidName(f"{subject!r} is not the subject of an order")
    return NodeName(name_of(words[2])), _service(words[3]), check_order_id(words[4])


def durable(node: NodeName, service: str) -> str:
    """Name of the durable consumer of one service on one node."""
    return f"{_service(service)}-{token(node)}"


def pauses(stream: str) -> str:
    """Subject on which the servers publish that a durable of a stream was paused or resumed."""
    return f"$JS.EVENT.ADVISORY.CONSUMER.PAUSE.{stream}.*"


def elections(stream: str, durable_name: str) -> str:
    """Subject on which the servers publish that a durable has a new leader."""
    return f"$JS.EVENT.ADVISORY.CONSUMER.LEADER_ELECTED.{stream}.{durable_name}"


def report(node: NodeName, order_id: OrderId, kind: str) -> str:
    """Subject of one report."""
    return f"snap.report.{token(node)}.{check_order_id(order_id)}.{kind}"


def reports_of(order_id: OrderId) -> str:
    """Filter for all reports of one order, whichever node they come from."""
    return f"snap.report.*.{check_order_id(order_id)}.*"


def progress(node: NodeName, order_id: OrderId) -> str:
    """Subject of the progress of one order; the last value is kept."""
    return f"snap.progress.{token(node)}.{check_order_id(order_id)}"


def span(node: str, trace_id: str) -> str:
    """Subject of the finished spans of one trace."""
    if len(trace_id) != 32 or not trace_id.isalnum():
        raise InvalidName(f"{trace_id!r} is not a trace id")
    return f"snap.span.{token(node)}.{trace_id}"


def spans_of(trace_id: str) -> str:
    """Filter for all finished spans of one trace."""
    return f"snap.span.*.{trace_id}"


def dead(node: NodeName) -> str:
    """Subject of the dead letters of one node."""
    return f"snap.dead.{token(node)}"


def api(verb: str) -> str:
    """Subject of one request to the operator."""
    return f"{API}.{verb}"


def template(node: NodeName) -> str:
    """Subject on which the agent of a node, and no other, asks for the specs of its pods."""
    return f"{API}.template.{token(node)}"


def inventory(node: NodeName) -> str:
    """Subject on which the agent of a node, and no other, asks whose its generations are."""
    return f"{API}.inventory.{token(node)}"


def pods(node: NodeName) -> str:
    """Subject on which the agent of a node, and no other, asks which of its pods are unknown."""
    return f"{API}.pods.{token(node)}"


def rpc(node: NodeName, service: str, question: str) -> str:
    """Subject of one quick question to a service of one node."""
    return f"snap.rpc.{_service(service)}.{token(node)}.{question}"


def event(plural: str, namespace: str | None, name: str) -> str:
    """Subject on which a change of one object is announced."""
    return f"{EVENTS}.{object_key(plural, namespace, name)}"


def object_key(plural: str, namespace: str | None, name: str) -> str:
    """Key of an object in the mirror for people."""
    space = check_label(namespace) if namespace else "-"
    return f"{check_label(plural)}.{space}.{object_token(name)}"


def bucket_key(bucket: str, key: str) -> str:
    """Subject on which a key of a bucket is written; `key` may be a wildcard to listen with."""
    return f"$KV.{bucket}.{key}"


def check_key(key: str) -> str:
    """Return a key of a bucket: words of letters, digits and -/_=, with dots between them."""
    if not _KEY.fullmatch(key):
        raise InvalidName(f"{key[:80]!r} is not a key of a bucket", value=key[:80])
    return key


def stream_of_bucket(bucket: str) -> str:
    """Name of the stream that holds a bucket."""
    return f"KV_{bucket}"


def _service(service: str) -> str:
    if service not in _SERVICES:
        raise InvalidName(f"service {service!r} is not one of {', '.join(_SERVICES)}")
    return service
