"""The rules of a schema, run in Python as an API server runs them.

An API server drops each null that a schema does not allow and puts the defaults in before it looks
at a rule: `as_stored`. A rule that names `oldSelf` is about a change alone. A rule says nothing if
it reads a field that is not there, or that the schema refuses. (An API server looks at no rule at
all then.)

The library converts all that it is given in one go, in which no other thread runs: 60 ms or more
for the largest object that etcd takes. So a rule gets the fields alone that it names, of those that
the schema declares: no object is too deep for that. A rule about a change compares whole objects,
with the fields that no schema declares, and gets all.

The names of fields that are words of CEL stand between underscores in a rule (`__namespace__`).
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Iterator, Mapping
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


def as_stored(schema: Schema, value: Any) -> Any:
    """Return a value with its defaults, and without nulls, where the schema declares it."""
    if isinstance(value, list):
        inner = schema.get("items")
        return [as_stored(inner, each) for each in value] if inner else value
    if not isinstance(value, dict):
        return value
    properties = schema.get("properties", {})
    inner = schema.get("additionalProperties")
    of_map = inner if isinstance(inner, dict) else None
    found = {}
    for name, each in value.items():
        declared = properties.get(name, of_map)
        if declared is None:
            found[name] = each
        elif each is not None:
            found[name] = as_stored(declared, each)
    for name, declared in properties.items():
        if "default" in declared and name not in found:
            found[name] = as_stored(declared, copy.deepcopy(declared["default"]))
    return found


def broken(
    schema: Schema, value: Any, old: Any = None, path: str = "", *, wrong: Collection[str] = ()
) -> Iterator[Broken]:
    """Yield each rule that a value with its defaults breaks; `old` is what it was, if it changes.

    `wrong` are the paths of what the schema refuses. Rules within lists are none of ours.
    """
    if not isinstance(value, dict):
        return
    for rule in schema.get(VALIDATIONS, ()):
        is_run = "oldSelf" not in rule["rule"] or isinstance(old, dict)
        if is_run and not any(_reads(rule, path, each) for each in wrong):
            yield from _broken(rule, schema, value, old, path)
    for name, found in schema.get("properties", {}).items():
        before = old.get(name) if isinstance(old, dict) else None
        below = f"{path}.{name}" if path else name
        yield from broken(found, value.get(name), before, below, wrong=wrong)


def _reads(rule: Mapping[str, str], path: str, wrong: str) -> bool:
    """Whether a rule of the object at a path reads what is at another path."""
    if path and wrong != path and not wrong.startswith(f"{path}."):
        return False
    names = re.sub(r"\[\d+\]", "", wrong.removeprefix(path)).split(".")
    return all(ESCAPED.get(name, name) in _words(rule) for name in names if name)


def _broken(
    rule: Mapping[str, str], schema: Schema, value: Any, old: Any, path: str
) -> Iterator[Broken]:
    context = {"self": _named(schema, value, _words(rule)), "oldSelf": old}
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


def _named(schema: Schema, value: Any, words: frozenset[str]) -> Any:
    """Return a value with the declared fields of these names alone, by their names in a rule."""
    if isinstance(value, list) and "items" in schema:
        return [_named(schema["items"], each, words) for each in value]
    if not isinstance(value, dict) or "properties" not in schema:
        return value
    fields = ((ESCAPED.get(name, name), name) for name in schema["properties"] if name in value)
    return {
        name: _named(schema["properties"][field], value[field], words)
        for name, field in fields
        if name in words
    }


def _escaped(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {ESCAPED.get(name, name): _escaped(each) for name, each in value.items()}
