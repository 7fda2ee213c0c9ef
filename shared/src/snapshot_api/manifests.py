"""From documents to typed objects, as standalone mode takes them."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, get_args

import msgspec

from snapshot_api.kind import converted
from snapshot_api.kinds import KINDS, AnyObject
from snapshot_api.v1alpha1.checkpoint import IdentitySpec
from snapshot_api.validate import (
    Problem,
    join,
    kind_problem,
    problems,
    schema_problems,
    without_server_fields,
)
from snapshot_shared import api
from snapshot_shared.errors import InvalidManifest
from snapshot_shared.orders import AnyOrder, DeadLetter, Presence, Progress, Report
from snapshot_shared.spans import SpanRecord

MAX_PROBLEMS = 50


def parse(document: Any, *, where: str = "") -> AnyObject:
    """Turn one decoded document into an object as a user may write it.

    InvalidManifest lists every `path: problem` (at most 50), `where` in front of each.
    """
    if found := problems(document, "standalone"):
        raise _refused(found, where)
    try:
        kind = KINDS[document["kind"]]
        stored = converted(kind, without_server_fields(document), kind.hub)
        value: AnyObject = msgspec.convert(stored, kind.type)
    except msgspec.ValidationError as error:
        raise _refused([Problem("(document)", str(error))], where) from error
    return value


def parse_identity(document: Any, *, where: str = "") -> IdentitySpec:
    """Return the identity that one decoded DynamoCheckpoint has, whatever the rest of it holds.

    Raise InvalidManifest with every `path: problem` of `spec.identity`, `where` in front of each.
    """
    if (unknown := kind_problem(document, "standalone")) is not None:
        raise _refused([unknown], where)
    spec = document.get("spec")
    identity = spec.get("identity") if isinstance(spec, dict) else None
    path = "spec.identity"
    if not isinstance(identity, dict):
        found = "nothing" if identity is None else type(identity).__name__
        raise _refused([Problem(path, f"expected a mapping, found {found}")], where)
    below = schema_problems(IdentitySpec, identity)
    if below:
        raise _refused([each._replace(path=join(path, each.path)) for each in below], where)
    return msgspec.convert(identity, IdentitySpec)


@cache
def message_schemas() -> dict[str, Any]:
    """Return the JSON Schema of every message on NATS and of every kind, by `<type>.<version>`.

    Requests, their replies and events have no tag; their type is their name, as `get_request`.
    """
    messages = (*get_args(AnyOrder), Report, Progress, DeadLetter, Presence, SpanRecord)
    schemas = {
        f"{message.__struct_config__.tag.rpartition('.')[2]}.v1": msgspec.json.schema(message)
        for message in messages
    }
    for name, value in vars(api).items():
        if name.endswith(("Request", "Reply", "Event")):
            schemas[f"{_snake(name)}.v1"] = msgspec.json.schema(value)
    for kind in KINDS.values():
        schemas[f"{kind.name.lower()}.{kind.api_version.rpartition('/')[2]}"] = msgspec.json.schema(
            kind.type
        )
    return schemas


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


def _refused(found: list[Problem], where: str) -> InvalidManifest:
    count = len(found)
    shown = [f"{where}{problem}" for problem in found[:MAX_PROBLEMS]]
    return InvalidManifest(
        f"{count} problem{'s' if count != 1 else ''}: " + "; ".join(shown),
        next_step="correct the fields and apply again; nothing was stored",
        problems=shown,
    )
