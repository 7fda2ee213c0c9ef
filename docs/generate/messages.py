"""The page of all messages: fields, types and defaults from the structs, meanings from here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from snapshot_shared.manifests import message_schemas
from snapshot_shared.objects.kinds import KINDS, Kind
from snapshot_shared.orders import TERMINAL, AgentOrder, AnyOrder, GmsOrder
from snapshot_shared.steps import OWN_STEPS, STEPS

PAGE = "messages.md"

INTRO = """\
# Messages

Everything on NATS is JSON with a `type`. This page is made from the structs themselves by
`make docs`; the bucket `snap_schemas` holds the JSON Schema of each, so that you can ask a running
cluster: `nats kv get snap_schemas report.v1 --raw`.

A new field always has a default, an unknown field is ignored, and no field changes its meaning.
Sizes are bytes, times seconds unless the name says otherwise. Who may send what is in
[the architecture](architecture.md#who-may-do-what); the words are in [the glossary](glossary.md).
"""

SUBJECTS = {
    "report.v1": "`snap.report.<node>.<order>.<kind>`, stream `REPORTS`",
    "progress.v1": "`snap.progress.<node>.<order>`, stream `PROGRESS`",
    "dead_letter.v1": "`snap.dead.<node>` (of reports `snap.dead.operator`), stream `DEAD`",
    "presence.v1": "key `<node>` of the bucket `snap_nodes`",
    "span.v1": "`snap.span.<node>.<trace>`, stream `SPANS`",
}

ASKED = """\
A request to the operator goes to `snap.api.<verb>`: `nats req snap.api.get '{"kind": "Pod"}'`. An
agent asks for specs on `snap.api.template.<node>`, and which of its pods are unknown on
`snap.api.pods.<node>`; people set the fault switch on `snap.rpc.<service>.<node>.sim`. Every reply
has a `failure` or the fields of its success. Changes of objects are announced on
`snap.event.<plural>.<namespace or ->.<name>`.

A request may say in two headers when it was sent (`Snapback-Asked-At`, seconds since the epoch) and
for how many seconds its client waits (`Snapback-Within`). One that would change something and comes
later than that is refused as `RequestExpired`. With a `uid` or a `resource_version` it concerns
only what its sender has read, and is refused as `Conflict` when that has changed.
"""

MEANINGS = {
    "artifact": "the committed artifact that is read",
    "artifact_root": "the folder of the artifacts on this node",
    "at": "when, in seconds since the epoch on the sender's clock; for people only",
    "attempt": "fences the order: a higher one always wins",
    "attributes": "facts about the work",
    "boot_id": "the boot of the machine; a new one means that all processes are gone",
    "bytes": "how many bytes it has",
    "capacity_bytes": "the memory of the device",
    "container": "the container that is meant",
    "content_uid": "the SnapshotContent that the capture serves",
    "criu": "the version of CRIU; empty when there is none",
    "deadline_s": "the budget; it begins when the receiver accepts",
    "device": "the UUID of the device",
    "devices": "the devices, in the worker's own order",
    "digest": "SHA-256 of the part manifest",
    "done": "bytes done so far",
    "driver": "the process driver",
    "drivers": "the process drivers that this node has",
    "end_ns": "when it ended, in nanoseconds since the epoch",
    "error": "the reason, when it failed",
    "exit_code": "how the pod ended (`exited`)",
    "exit_codes": "how each container ended, by its name (`exited`)",
    "failure": "why it failed or was refused",
    "fence_token": "names the fence on the devices",
    "free_bytes": "free space below the artifact root",
    "generation": "the attempt whose directory it is",
    "grace_s": "how long after SIGTERM comes SIGKILL",
    "hold_s": "how long the worker may stay quiesced in all; then the agent releases it alone",
    "incarnation": "the life of the GMS that holds the layout",
    "index": "its number on this node",
    "kind": "what happened; the last word of the subject",
    "layout": "the layout of the device, as the fence found it",
    "layout_id": "names the layout; the same after a restore",
    "links": "spans of other traces that this one belongs to",
    "load_token": "names the load, and the layout that it leaves hidden",
    "message": "what happened, for people",
    "n": "counts the reports of one (order, attempt) from 1",
    "name": "the name",
    "namespace": "the namespace",
    "next_step": "what to do about it",
    "node": "the node",
    "not_after": "no start later than this, in seconds since the epoch",
    "on_failure": "what becomes of the worker when the capture fails",
    "order": "the id: `<verb>-<owner uid>[-<part>]`",
    "ordinal": "the worker's own number of the device",
    "outcome": "how the capture ended",
    "owner": "the uid of the object that the order serves",
    "parent": "an artifact of the same layout: files that did not change are shared",
    "parent_id": "the span above it; empty for the first of a trace",
    "part": "the part: `process` or `gpu-<ordinal>`",
    "part_digest": "SHA-256 of the part manifest, as the root manifest has it",
    "parts": "all staged parts, with their digests",
    "payload": "a copy of the message, as base64",
    "pod": "the pod",
    "policy": "what becomes of the worker after its capture",
    "product": "the model of the device",
    "proven": "what a verified artifact holds: its parts, the vector and the process driver",
    "quarantined": "how many unknown directories it has moved into quarantine",
    "quiesce_s": "how long the worker may take to become quiet",
    "ready_s": "how long to wait for the worker to be ready",
    "reason": "what went wrong, in CamelCase; stable",
    "retryable": "whether the same may be tried again before any side effect",
    "root_digest": "SHA-256 of the root manifest",
    "schema": "the version of the schema",
    "schemas": "the versions of orders that the node understands",
    "seconds": "how long it took",
    "sequence": "its place in the stream",
    "service": "the service that sent it",
    "slots": "how many parts are moved at a time",
    "span_id": "the span",
    "standby": "start the worker waiting, to be restored",
    "start_ns": "when it began, in nanoseconds since the epoch",
    "step": "the step, one of those of its verb",
    "steps": "how long each step took",
    "structure_hash": "hash of allocations and metadata, not of contents",
    "subject": "the subject it came on",
    "template_digest": "SHA-256 of the pod's spec, which the agent asks for",
    "total": "bytes in all",
    "trace_id": "the trace",
    "traceparent": "where it belongs in its trace (W3C)",
    "type": "names the message",
    "uid": "the uid; a pod of the same name that came later has another one",
    "unknown": "how many entries of the artifact root belong to no content",
    "unconfirmed": "the hold ran out and the agent let the worker go on alone",
    "uuid": "the UUID of the device",
    "values": "the facts involved",
    "vector": "what each part will hold: the plan",
    "version": "the version of the product",
    "why": "the reason, for people",
}
"""What fields mean, by name. A field that is missing here fails `make docs`."""

EXACT = {
    "LayoutRef.generation": "rises with each commit on the device",
    "Report.generation": "the generation that was committed or removed",
    "LoadOrder.bytes": "how many bytes will be read; 0 when unknown",
    "Report.bytes": "how many bytes were moved",
    "DropOrder.load_token": "the load; empty: everything that no session holds",
    "SpanRecord.kind": "its role; `producer` and `consumer` are of a message",
    "SpanRecord.name": "a verb or a step",
    "AbortOrder.devices": "the UUIDs of the devices whose fence or load ends",
    "Presence.devices": "the devices of the node",
    "RunOrder.devices": "the devices that the pod gets",
    "Report.part": "the part that was staged",
    "Progress.part": "the part that is moved",
}
"""Where a name alone says too little, by struct and field."""


def page() -> str:
    """Write the page. LookupError names a field that has no meaning yet."""
    schemas = message_schemas()
    kinds = {
        f"{kind.name.lower()}.{kind.api_version.rpartition('/')[2]}" for kind in KINDS.values()
    }
    orders = [name for name in schemas if name.endswith("_order.v1")]
    asked = [name for name in schemas if name.endswith(("_request.v1", "_reply.v1", "_event.v1"))]
    others = [name for name in schemas if name not in (*kinds, *orders, *asked)]
    parts = [INTRO, "## Orders\n", *_order_intro(schemas[orders[0]])]
    nested: dict[str, Any] = {}
    for name in orders:
        parts += _order(name, schemas[name], nested)
    parts.append("## What answers, and what a node says of itself\n")
    for name in others:
        parts += _message(name, schemas[name], nested)
    parts += ["## Requests, replies and events\n", ASKED]
    for name in asked:
        parts += _spoken(name, schemas[name])
    parts.append("## Values within messages\n")
    for title, definition in sorted(nested.items()):
        parts += [f"### {title}\n", f"{_doc(definition)}\n", _table(title, definition)]
    parts += ["## Objects\n", _objects()]
    return "\n".join(parts).rstrip() + "\n"


def _schema_key(kind: Kind) -> str:
    return f"{kind.name.lower()}.{kind.api_version.rpartition('/')[2]}"


def _order_intro(schema: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "An order goes to `snap.order.<node>.<service>.<order>` in the stream `ORDERS` and stays "
        "there\nuntil it is settled. Any may end `failed` or `rejected`. All orders have:\n"
    )
    definition = _root(schema)
    yield _table("Order", definition, _common())


def _common() -> list[str]:
    """Give the fields that all orders have, in their order."""
    sets = [set(_fields(message)) for message in get_args(AnyOrder)]
    shared = set.intersection(*sets)
    return ["type", *(name for name in _fields(get_args(AnyOrder)[0]) if name in shared)]


def _fields(message: Any) -> tuple[str, ...]:
    return tuple(message.__struct_encode_fields__)


def _order(name: str, schema: Mapping[str, Any], nested: dict[str, Any]) -> Iterator[str]:
    definition = _root(schema)
    _collect(schema, nested)
    verb = name.removesuffix("_order.v1")
    title = definition["title"]
    services = [
        service
        for service, union in (("agent", AgentOrder), ("gms", GmsOrder))
        if title in {message.__name__ for message in get_args(union)}
    ]
    steps = _listed(STEPS[verb])
    for (of, driver), own_steps in OWN_STEPS.items():
        if of == verb:
            steps += f"; with `{driver}`: {_listed(own_steps)}"
    yield f"### {verb}\n"
    yield f"{_doc(definition)}\n"
    yield (
        f"`snapback.v1.{verb}_order`, to {' and '.join(services)}; ends well with "
        f"`{TERMINAL[verb]}`; steps: {steps}.\n"
    )
    own = [field for field in definition["properties"] if field not in _common()]
    yield _table(title, definition, own) if own else "It has no fields of its own.\n"


def _message(name: str, schema: Mapping[str, Any], nested: dict[str, Any]) -> Iterator[str]:
    definition = _root(schema)
    _collect(schema, nested)
    yield f"### {name.partition('.')[0]}\n"
    yield f"{_doc(definition)}\n"
    yield f"`{definition['properties']['type']['enum'][0]}`, {SUBJECTS[name]}.\n"
    yield _table(
        definition["title"], definition, [f for f in definition["properties"] if f != "type"]
    )


def _spoken(name: str, schema: Mapping[str, Any]) -> Iterator[str]:
    definition = _root(schema)
    yield f"### {definition['title']}\n"
    yield f"{_doc(definition)}\n"
    yield f"`{name}` in `snap_schemas`.\n"
    rows = [
        f"| `{field}` | {_type(value, link=False)} | {_default(definition, field)} |"
        for field, value in definition["properties"].items()
    ]
    yield "\n".join(["| field | type | default |", "|---|---|---|", *rows]) + "\n" if rows else ""


def _collect(schema: Mapping[str, Any], nested: dict[str, Any]) -> None:
    root = schema["$ref"].rpartition("/")[2]
    nested.update({name: found for name, found in schema["$defs"].items() if name != root})


def _root(schema: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema["$defs"][schema["$ref"].rpartition("/")[2]]
    return found


def _table(title: str, definition: Mapping[str, Any], names: list[str] | None = None) -> str:
    rows = ["| field | type | default | meaning |", "|---|---|---|---|"]
    for name in names if names is not None else list(definition["properties"]):
        schema = definition["properties"][name]
        if name == "type" and title == "Order":
            kind = "`snapback.v1.<verb>_order`"
        else:
            kind = _type(schema)
        rows.append(
            f"| `{name}` | {kind} | {_default(definition, name)} | {_meaning(title, name)} |"
        )
    return "\n".join(rows) + "\n"


def _default(definition: Mapping[str, Any], name: str) -> str:
    if name in definition.get("required", ()):
        return "required"
    return _value(definition["properties"][name].get("default"))


def _meaning(title: str, name: str) -> str:
    found = EXACT.get(f"{title}.{name}") or MEANINGS.get(name)
    if found is None:
        raise LookupError(f"say in docs/generate/messages.py what {title}.{name} means")
    return found


def _type(schema: Mapping[str, Any], *, link: bool = True) -> str:
    """Say in words what a JSON Schema allows; the exact patterns are in the schemas."""
    if "$ref" in schema:
        name = schema["$ref"].rpartition("/")[2]
        return f"[{name}](#{name.lower()})" if link else f"`{name}`"
    if "anyOf" in schema:
        kinds = [
            _type(option, link=link) for option in schema["anyOf"] if option.get("type") != "null"
        ]
        return " or ".join(kinds)
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    match schema.get("type"):
        case "array":
            return f"list of {_type(schema.get('items', {}), link=link)}"
        case "object":
            return "mapping"
        case "string" if schema.get("contentEncoding"):
            return str(schema["contentEncoding"])
        case "string" | "integer" | "number" | "boolean" as kind:
            return f"{kind}{_range(schema)}"
        case _:
            return "any"


def _range(schema: Mapping[str, Any]) -> str:
    low = schema.get("minimum")
    above = schema.get("exclusiveMinimum")
    high = schema.get("maximum")
    begin = f"> {above:,}" if above is not None else f">= {low:,}" if low is not None else ""
    end = f"<= {high:,}" if high is not None else ""
    limits = ", ".join(limit for limit in (begin, end) if limit)
    return f" ({limits})" if limits else ""


def _value(value: Any) -> str:
    match value:
        case None:
            return "none"
        case "" | [] | {}:
            return "empty"
        case bool():
            return str(value).lower()
        case _:
            return f"`{value}`"


def _listed(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


def _doc(definition: Mapping[str, Any]) -> str:
    text = definition.get("description", "")
    return re.sub(r"[ \t]*\n[ \t]*", " ", text.strip()).replace("  ", "\n\n")


def _objects() -> str:
    rows = [
        "The mirror of every object, without its spec, is in the bucket `snap_objects` under",
        "`<plural>.<namespace or ->.<name>`, each change is announced on `snap.event.<the same>`.",
        "That an object has gone can be read there for an hour.",
        "",
        "| kind | version | what it is | key in the mirror | schema |",
        "|---|---|---|---|---|",
    ]
    for kind in KINDS.values():
        space = "<namespace>" if kind.namespaced else "-"
        schema = _schema_key(kind)
        what = (kind.type.__doc__ or "").strip().partition("\n")[0].rstrip(".")
        rows.append(
            f"| {kind.name} | `{kind.api_version}` | {what} "
            f"| `{kind.plural}.{space}.<name>` | `{schema}` |"
        )
    return "\n".join(rows) + "\n"
