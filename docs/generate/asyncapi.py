"""The AsyncAPI document: every subject with its messages, from the structs and the streams."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, get_args

import msgspec
import yaml

from snapshot_shared import api, subjects
from snapshot_shared.bus import BUCKETS, STREAMS
from snapshot_shared.orders import (
    AgentOrder,
    AnyOrder,
    ArtifactRef,
    DeadLetter,
    GmsOrder,
    Presence,
    Progress,
    Report,
)
from snapshot_shared.service import VERSION
from snapshot_shared.spans import SpanRecord

PATH = "docs/asyncapi.yaml"

HEAD = "# Made from the code by `make docs`. https://www.asyncapi.com/docs/reference/specification/v3.0.0\n"

ABOUT = """\
Every message of Snapback on NATS. An operation is named from the side of Snapback: what it sends
can be received by whoever may subscribe, and what it receives is asked or ordered. A new field
always has a default, and an unknown one is ignored. A failed answer has the headers
Nats-Service-Error and Nats-Service-Error-Code.
"""

PARAMETERS: dict[str, dict[str, Any]] = {
    "node": {"description": "The name of a node, with dots as _."},
    "service": {"description": "The service of the node.", "enum": ["agent", "gms"]},
    "order": {"description": "The id of the order: <verb>-<uid of the owner>, and maybe its part."},
    "kind": {"description": "What is reported, such as accepted, staged or failed."},
    "trace": {"description": "The id of the trace, 32 hexadecimal digits."},
    "plural": {"description": "The kind of the object, such as pods."},
    "namespace": {"description": "Its namespace; - for a kind that has none."},
    "name": {"description": "Its name, with dots as _."},
}

_STREAMED = (
    ("orders", "ORDERS", "snap.order.{node}.{service}.{order}", get_args(AnyOrder)),
    ("reports", "REPORTS", "snap.report.{node}.{order}.{kind}", (Report,)),
    ("progress", "PROGRESS", "snap.progress.{node}.{order}", (Progress,)),
    ("spans", "SPANS", "snap.span.{node}.{trace}", (SpanRecord,)),
    ("dead", "DEAD", "snap.dead.{node}", (DeadLetter,)),
)
_OF_NODES = ("template", "inventory", "pods")
"""Verbs that a node asks, with its name in the subject."""


def files() -> Iterator[tuple[str, str]]:
    """Yield the document and its path."""
    text = yaml.safe_dump(document(), sort_keys=False, allow_unicode=True, width=100)
    yield PATH, HEAD + text


def document() -> dict[str, Any]:
    """Return the document as JSON has it."""
    pairs = dict(_requests())
    types = {
        *(message for _, _, _, messages in _STREAMED for message in messages),
        *(found for pair in pairs.values() for found in pair),
        *(Presence, api.ObjectEvent, ArtifactRef, api.FactsReply),
    }
    ordered = sorted(types, key=lambda found: found.__name__)
    _, schemas = msgspec.json.schema_components(ordered, ref_template="#/components/schemas/{name}")
    channels, operations = _announced()
    for verb, (request, reply) in sorted(pairs.items()):
        _asked(channels, operations, verb, _address(verb), request, reply)
    _asked(
        channels,
        operations,
        "status",
        "snap.rpc.{service}.{node}.status",
        ArtifactRef,
        api.FactsReply,
    )
    return {
        "asyncapi": "3.0.0",
        "info": {
            "title": "Snapback",
            "version": VERSION,
            "description": ABOUT,
            "license": {"name": "Apache-2.0"},
        },
        "defaultContentType": "application/json",
        "servers": {"local": {"host": "127.0.0.1:4222", "protocol": "nats"}},
        "channels": channels,
        "operations": operations,
        "components": {
            "messages": {found.__name__: _message(found) for found in ordered},
            "schemas": dict(sorted(schemas.items())),
        },
    }


def _announced() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the channels and operations of what is kept in streams and buckets, and of events."""
    about = {stream.name: stream.description for stream in STREAMS}
    buckets = {bucket.bucket: bucket.description for bucket in BUCKETS}
    channels, operations = {}, {}
    for name, stream, address, messages in _STREAMED:
        text = f"{about[stream]}. Stream {stream}."
        channels[name] = _channel(address, messages, text)
        operations[f"send{name.capitalize()}"] = {"action": "send", "channel": _to(name)}
    text = f"{buckets[subjects.NODES_BUCKET]}. Bucket {subjects.NODES_BUCKET}."
    address = subjects.bucket_key(subjects.NODES_BUCKET, "{node}")
    channels["presence"] = _channel(address, (Presence,), text)
    operations["sendPresence"] = {"action": "send", "channel": _to("presence")}
    text = "Each change of an object; one may be lost."
    address = f"{subjects.EVENTS}.{{plural}}.{{namespace}}.{{name}}"
    channels["events"] = _channel(address, (api.ObjectEvent,), text)
    operations["sendEvents"] = {"action": "send", "channel": _to("events")}
    return channels, operations


def _requests() -> Iterator[tuple[str, tuple[type, type]]]:
    """Yield each verb with its request and its reply."""
    for name, request in vars(api).items():
        verb = name.removesuffix("Request")
        if verb != name and isinstance(request, type):
            yield verb.lower(), (request, vars(api)[f"{verb}Reply"])


def _address(verb: str) -> str:
    if verb == "sim":
        return "snap.rpc.{service}.{node}.sim"
    return subjects.api(verb) + (".{node}" if verb in _OF_NODES else "")


def _asked(
    channels: dict[str, Any],
    operations: dict[str, Any],
    verb: str,
    address: str,
    request: type,
    reply: type,
) -> None:
    """Add a request and its reply, which goes to the inbox that the request names."""
    channels[verb] = _channel(address, (request,), _first_line(request))
    channels[f"{verb}Reply"] = _channel(None, (reply,), _first_line(reply))
    operations[verb] = {
        "action": "receive",
        "channel": _to(verb),
        "reply": {"channel": _to(f"{verb}Reply")},
    }


def _channel(address: str | None, messages: tuple[type, ...], text: str) -> dict[str, Any]:
    found: dict[str, Any] = {
        "address": address,
        "description": text,
        "messages": {
            message.__name__: {"$ref": f"#/components/messages/{message.__name__}"}
            for message in messages
        },
    }
    names = [name for name in PARAMETERS if address and f"{{{name}}}" in address]
    return found | ({"parameters": {name: PARAMETERS[name] for name in names}} if names else {})


def _to(channel: str) -> dict[str, str]:
    return {"$ref": f"#/channels/{channel}"}


def _message(found: Any) -> dict[str, Any]:
    services = [
        service
        for service, union in (("agent", AgentOrder), ("gms", GmsOrder))
        if found in get_args(union)
    ]
    tags = {"tags": [{"name": service} for service in services]} if services else {}
    tag = found.__struct_config__.tag
    return {
        "name": tag or found.__name__,
        "title": found.__name__,
        "summary": _first_line(found),
        **tags,
        "payload": {"$ref": f"#/components/schemas/{found.__name__}"},
    }


def _first_line(found: type) -> str:
    return (found.__doc__ or "").strip().partition("\n")[0]
