"""The rules of a schema, run in Python as an API server runs them.

An API server drops each null that a schema does not allow and puts the defaults in before it looks
at a rule. `with_defaults` does that. A rule that names `oldSelf` is about a change alone. A rule
that reads a field which is not there, or of another type, says nothing: the schema refuses such an
object by itself.

The library converts all that it is given in one go, in which no other thread runs: 60 ms or more
for the largest object that etcd takes. So a rule gets the fields that it names, at any depth. That
is enough for each rule but those about a change, which compare whole objects and get them.

The names of fields that are words of CEL stand between underscores in a rule (`__namespace__`).
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

from snapshot_api.schema.openapi import ESCAPED, VALIDATIONS, Schema

if TYPE_CHECKING:
    import cel

_UNREADABLE = (ArithmeticError, KeyError, RuntimeError, TypeError, ValueError)
"""What an expression raises if it reads a value that is not there, or of another type."""


class Broken(NamedTuple):
    """A rule that an object breaks, and the path of the field that the rule names."""

    path: str
    message: str


def without_nulls(value: Any) -> Any:
    """Return a value without the nulls in its objects."""
    if isinstance(value, list):
        return [without_nulls(each) for each in value]
    if not isinstance(value, dict):
        return value
    return {name: without_nulls(each) for name, each in value.items() if each is not None}


def with_defaults(schema: Schema, value: Any) -> Any:
    """Return a value without nulls and with the defaults of its schema, as it is stored."""
    if isinstance(value, list):
        return [with_defaults(schema.get("items", {}), each) for each in value]
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    inner = schema.get("additionalProperties")
    others = inner if isinstance(inner, dict) else {}
    found = {name: each for name, each in value.items() if each is not None}
    missing = {
        name: copy.deepcopy(each["default"])
        for name, each in properties.items()
        if "default" in each and name not in found
    }
    return {
        name: with_defaults(properties.get(name, others), each)
        for name, each in (found | missing).items()
    }


def broken(schema: Schema, value: Any, old: Any = None, path: str = "") -> Iterator[Broken]:
    """Yield each rule that a value with its defaults breaks; `old` is what it was, if it changes.

    Rules within lists are none of ours.
    """
    if not isinstance(value, dict):
        return
    for rule in schema.get(VALIDATIONS, ()):
        if "oldSelf" not in rule["rule"] or isinstance(old, dict):
            yield from _broken(rule, value, old, path)
    for name, found in schema.get("properties", {}).items():
        before = old.get(name) if isinstance(old, dict) else None
        yield from broken(found, value.get(name), before, f"{path}.{name}" if path else name)


def _broken(rule: Mapping[str, str], value: Any, old: Any, path: str) -> Iterator[Broken]:
    context = {"self": _named(value, _words(rule)), "oldSelf": old}
    if "oldSelf" in rule["rule"]:
        context = {"self": _escaped(value), "oldSelf": _escaped(old)}
    with contextlib.suppress(*_UNREADABLE):
        if _program(rule["rule"]).execute(context) is not True:
            message = rule["message"]
            with contextlib.suppress(*_UNREADABLE):
                if said := rule.get("messageExpression"):
                    message = _program(said).execute(context)
            yield Broken(f"{path}{rule.get('fieldPath', '')}", message)


@cache
def _program(text: str) -> cel.Program:
    import cel  # noqa: PLC0415 - costs start-up time

    return cel.compile(text)


def _words(rule: Mapping[str, str]) -> frozenset[str]:
    return _words_of(rule["rule"]) | _words_of(rule.get("messageExpression", ""))


@cache
def _words_of(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


def _named(value: Any, words: frozenset[str]) -> Any:
    """Return a value with the fields of these names alone."""
    if isinstance(value, list):
        return [_named(each, words) for each in value]
    if not isinstance(value, dict):
        return value
    found = ((ESCAPED.get(name, name), each) for name, each in value.items())
    return {name: _named(each, words) for name, each in found if name in words}


def _escaped(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {ESCAPED.get(name, name): _escaped(each) for name, each in value.items()}
