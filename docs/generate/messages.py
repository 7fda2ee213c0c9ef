"""The page of all messages: fields, types and defaults from the structs, meanings from here."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, get_args

from snapshot_api.kind import Kind
from snapshot_api.kinds import KINDS
from snapshot_api.manifests import message_schemas
from snapshot_api.schema.openapi import TAG
from snapshot_api.schema.texts import text_of
from snapshot_shared import orders
from snapshot_shared.errors import Failure
from snapshot_shared.orders import TERMINAL, AgentOrder, AnyOrder, GmsOrder
from snapshot_shared.spans import SpanRecord
from snapshot_shared.steps import OWN_STEPS, STEPS

PAGE = "messages.md"

INTRO = """\
# Messages

Everything on NATS is JSON with a `type`. This page is made from the structs themselves by
`make docs`; the bucket `snap_schemas` holds the JSON Schema of each, so that you can ask a running
cluster: `nats kv get snap_schemas report.v1 --raw`. [asyncapi.yaml](asyncapi.yaml) has them as an
AsyncAPI 3 document, with the subject of each.

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


def page() -> str:
    """Write the page. LookupError names a field that has no meaning yet."""
    schemas = message_schemas()
    kinds = {
        f"{kind.name.lower()}.{kind.api_version.rpartition('/')[2]}" for kind in KINDS.values()
    }
    ordered = [name for name in schemas if name.endswith("_order.v1")]
    asked = [name for name in schemas if name.endswith(("_request.v1", "_reply.v1", "_event.v1"))]
    others = [name for name in schemas if name not in (*kinds, *ordered, *asked)]
    parts = [INTRO, "## Orders\n", *_order_intro(schemas[ordered[0]])]
    nested: dict[str, Any] = {}
    for name in ordered:
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
        rows.append(f"| `{name}` | {kind} | {_default(definition, name)} | {_text(title, name)} |")
    return "\n".join(rows) + "\n"


def _text(title: str, name: str) -> str:
    """Return what a field of the struct of a title means."""
    struct = getattr(orders, title, None) or {"Failure": Failure, "SpanRecord": SpanRecord}[title]
    return TAG if name == struct.__struct_config__.tag_field else text_of(struct, name)


def _default(definition: Mapping[str, Any], name: str) -> str:
    if name in definition.get("required", ()):
        return "required"
    field = definition["properties"][name]
    # A list that a reply has although it is empty has no default in the schema.
    is_list = field.get("type") == "array" and definition["title"].endswith("Reply")
    return _value(field.get("default", [] if is_list else None))


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
