"""Names and ids: their types, their alphabets, and how they become NATS subject tokens.

A DNS name never contains `_`, so dots are written as `_` in a subject token and nothing is lost.
Every id is checked here before a subject, key or path is built from it: NATS accepts publishes
to `snap.order.x.*`, so an unchecked id would be a hole.
"""

from __future__ import annotations

import hashlib
import re
from typing import NewType

from snapshot_shared.errors import InvalidName

NodeName = NewType("NodeName", str)
Uid = NewType("Uid", str)
OrderId = NewType("OrderId", str)
PartName = NewType("PartName", str)

# `$` alone would let a final newline through. None looks ahead: the schemas of Kubernetes have
# these patterns, too, and Go's regular expressions know no such thing.
MAX_NAME = 253
MAX_LABEL = 63
MAX_NODE_NAME = MAX_LABEL
"""Shorter than what Kubernetes takes: it stands in subjects, durables and labels."""
NAME_PATTERN = r"^[a-z0-9]((\.?[-a-z0-9])*\.?[a-z0-9])?\Z"
LABEL_PATTERN = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?\Z"
UID_PATTERN = r"^[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}\Z"
PART_PATTERN = r"^(process|gpu-[0-9]{1,2})\Z"
ORDER_PATTERN = (
    r"^[a-z]{2,12}-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
    r"(-[a-z0-9]([-a-z0-9]{0,40}[a-z0-9])?)?\Z"
)
DIGEST_PATTERN = r"^sha256:[0-9a-f]{64}\Z"

MEANINGS = {
    NAME_PATTERN: "a name: lower-case letters, digits, - and ., at both ends a letter or digit",
    LABEL_PATTERN: "a name: up to 63 lower-case letters, digits and -, at both ends no -",
    UID_PATTERN: "a uid, such as 0a1b2c3d-0000-4000-8000-000000000000",
    PART_PATTERN: "a part: process, or gpu- with the number of a device",
    ORDER_PATTERN: "the id of an order: a verb, a uid and perhaps a part, with - between them",
    DIGEST_PATTERN: "a digest: sha256: and 64 hexadecimal digits",
}
"""What a text is that matches a pattern, for people."""

_NAME = re.compile(NAME_PATTERN)
_LABEL = re.compile(LABEL_PATTERN)
_UID = re.compile(UID_PATTERN)
_ORDER = re.compile(ORDER_PATTERN)
_PART = re.compile(PART_PATTERN)


def _checked(pattern: re.Pattern[str], what: str, value: str, longest: int = 128) -> str:
    shown = value if len(value) <= 80 else value[:77] + "..."
    if len(value) > longest:
        problem = f"has {len(value)} characters, and may have at most {longest}"
    elif not pattern.fullmatch(value):
        problem = f"is not {MEANINGS[pattern.pattern]}"
    else:
        return value
    raise InvalidName(
        f"{what} {shown!r} {problem}", next_step="check how it is spelled", value=shown
    )


def check_name(value: str) -> str:
    """Return an object's name: a DNS name of at most 253 characters. InvalidName else."""
    return _checked(_NAME, "name", value, MAX_NAME)


def check_node(value: str) -> NodeName:
    """Return a node's name: a DNS name of at most 63 characters. InvalidName else."""
    return NodeName(_checked(_NAME, "node name", value, MAX_NODE_NAME))


def check_label(value: str) -> str:
    """Return a DNS label (namespaces, containers): no dots. InvalidName else."""
    return _checked(_LABEL, "label", value)


def check_uid(value: str) -> Uid:
    """Return a uid: a lower-case UUID. InvalidName else."""
    return Uid(_checked(_UID, "uid", value))


def check_part(value: str) -> PartName:
    """Return the name of a part of an artifact: `process` or `gpu-<ordinal>`."""
    return PartName(_checked(_PART, "part", value))


def check_order_id(value: str) -> OrderId:
    """Return an order id `<verb>-<owner uid>[-<part>]`. InvalidName else."""
    return OrderId(_checked(_ORDER, "order id", value))


def order_id(verb: str, owner: Uid, part: str | None = None) -> OrderId:
    """Build the deterministic id of an order: the same request always has the same id."""
    return check_order_id(f"{verb}-{owner}" + (f"-{part}" if part else ""))


def owner_of(order: OrderId) -> Uid:
    """Return the uid of the object that an order belongs to."""
    verb = order.partition("-")[0]
    return Uid(order[len(verb) + 1 : len(verb) + 37])


def verb_of(order: OrderId) -> str:
    """Return the verb of an order id."""
    return order.partition("-")[0]


def token(node: str) -> str:
    """Write a node's name as one NATS subject token: dots become `_`."""
    return check_node(node).replace(".", "_")


def name_of(subject_token: str) -> str:
    """Read a subject token back into the node's name."""
    return check_node(subject_token.replace("_", "."))


def object_token(name: str) -> str:
    """Write an object's name as one NATS subject token: dots become `_`."""
    return check_name(name).replace(".", "_")


def short_hash(*values: str, length: int = 16) -> str:
    """Hash strings into `length` hex digits; the encoding cannot be ambiguous."""
    state = hashlib.sha256()
    for value in values:
        data = value.encode()
        state.update(len(data).to_bytes(8, "big") + data)
    return state.hexdigest()[:length]


def derived_uid(*values: str) -> Uid:
    """Derive a uid from other ids, so that a repeated decision names the same object."""
    digits = short_hash(*values, length=32)
    return Uid("-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])))
