"""From msgspec types to structural OpenAPI v3 schemas, as CustomResourceDefinitions hold them.

A structural schema has no `$ref`, no `null` and one type at each place. A field that may be None
is one that may be left out: the API server drops a null where a schema does not allow it, and None
is what msgspec reads for what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import singledispatch
from typing import Any, NamedTuple

import msgspec
from msgspec import inspect as mi
from msgspec import structs

from snapshot_api.schema.texts import text_of

Schema = dict[str, Any]

VALIDATIONS = "x-kubernetes-validations"
PRESERVE = "x-kubernetes-preserve-unknown-fields"
TAG = "Names the message."
"""What the field means by which structs differ."""
_LIST_TYPE = "x-kubernetes-list-type"
_MAX_REPEAT = 1000
"""The most repetitions that RE2 takes."""

_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_PORTABLE_ESCAPES = frozenset(r".-+*?()[]{}|^$/\\")


class Rule(NamedTuple):
    """One CEL rule of a struct. `field` is the path that its error names, such as `.saver`."""

    rule: str
    message: str
    field: str = ""
    reason: str = "FieldValueInvalid"

    def schema(self) -> Schema:
        """Return the rule as an entry of `x-kubernetes-validations`."""
        path = {"fieldPath": self.field} if self.field else {}
        return {"rule": self.rule, "message": self.message, "reason": self.reason, **path}


class Additions(NamedTuple):
    """What Kubernetes has to know of structs beside their fields.

    `keys` names the fields by which the items of a list differ. Structs in `opened` keep the fields
    that they do not have, and those in `skeletons` are declared as the struct given there. A field
    in `undefaulted` stays away where it is left out, because that means something else here.
    """

    rules: Mapping[type, tuple[Rule, ...]] = {}
    keys: Mapping[type, tuple[str, ...]] = {}
    opened: frozenset[type] = frozenset()
    skeletons: Mapping[type, type] = {}
    undefaulted: frozenset[tuple[type, str]] = frozenset()


def schema_of(type_: Any, additions: Additions | None = None) -> Schema:
    """Return the structural schema of a type. TypeError names what has none."""
    return _schema(mi.type_info(type_), additions or Additions())


def re2(pattern: str) -> str:
    r"""Return a pattern of Python in the dialect of Go. ValueError names what that lacks.

    `\Z` becomes `$`, which in Go is the end of the text. What the two dialects read differently is
    refused, as `\d` and the `$` of Python.
    """
    translated = pattern.removesuffix(r"\Z") + ("$" if pattern.endswith(r"\Z") else "")
    plain = _ESCAPED.sub(_without_escape, pattern.removesuffix(r"\Z"))
    if found := re.search(r"\(\?(?!:)|\$|[*+?}]\+", plain):
        raise ValueError(f"Go has no {found[0]!r} of this meaning: {pattern}")
    for low, high in re.findall(r"\{(\d*),?(\d*)\}", plain):
        if max(int(low or 0), int(high or 0)) > _MAX_REPEAT:
            raise ValueError(f"Go repeats at most {_MAX_REPEAT} times: {pattern}")
    return translated


def _without_escape(found: re.Match[str]) -> str:
    if found[1][0] == "x" or found[1] in _PORTABLE_ESCAPES:
        return "_"
    raise ValueError(f"{found[0]!r} may have another meaning in Go: {found.string}")


@singledispatch
def _schema(found: mi.Type, _additions: Additions) -> Schema:
    raise TypeError(f"{found} has no structural schema")


@_schema.register
def _(found: mi.StrType, _additions: Additions) -> Schema:
    schema: Schema = {"type": "string"}
    if found.pattern is not None:
        schema["pattern"] = re2(found.pattern)
    return schema | _limits(found, {"min_length": "minLength", "max_length": "maxLength"})


@_schema.register
def _(found: mi.IntType, _additions: Additions) -> Schema:
    return {"type": "integer", "format": "int64", **_range(found)}


@_schema.register
def _(found: mi.FloatType, _additions: Additions) -> Schema:
    return {"type": "number", "format": "double", **_range(found)}


@_schema.register
def _(_found: mi.BoolType, _additions: Additions) -> Schema:
    return {"type": "boolean"}


@_schema.register
def _(_found: mi.DateTimeType, _additions: Additions) -> Schema:
    return {"type": "string", "format": "date-time"}


@_schema.register
def _(found: mi.LiteralType, _additions: Additions) -> Schema:
    if not all(isinstance(value, str) for value in found.values):
        raise TypeError(f"{found}: only strings can be enumerated")
    return {"type": "string", "enum": list(found.values)}


@_schema.register
def _(found: mi.EnumType, _additions: Additions) -> Schema:
    return {"type": "string", "enum": [str(member.value) for member in found.cls]}


@_schema.register
def _(_found: mi.RawType, _additions: Additions) -> Schema:
    return {"type": "object", PRESERVE: True}


@_schema.register
def _(_found: mi.AnyType, _additions: Additions) -> Schema:
    return {PRESERVE: True}


@_schema.register
def _(found: mi.ListType, additions: Additions) -> Schema:
    schema = {"type": "array", "items": _schema(found.item_type, additions)}
    schema |= _limits(found, {"min_length": "minItems", "max_length": "maxItems"})
    item = found.item_type
    keys = additions.keys.get(item.cls) if isinstance(item, mi.StructType) else None
    if keys:
        schema |= {_LIST_TYPE: "map", "x-kubernetes-list-map-keys": list(keys)}
    return schema


@_schema.register
def _(found: mi.DictType, additions: Additions) -> Schema:
    # The names of properties have no schema in Kubernetes, so those of `key_type` are not checked.
    if isinstance(found.value_type, mi.AnyType):
        return {"type": "object", PRESERVE: True}
    schema = {"type": "object", "additionalProperties": _schema(found.value_type, additions)}
    return schema | _limits(found, {"min_length": "minProperties", "max_length": "maxProperties"})


@_schema.register
def _(found: mi.UnionType, additions: Additions) -> Schema:
    options = [option for option in found.types if not isinstance(option, mi.NoneType)]
    if len(options) == 1:
        return _schema(options[0], additions)
    kinds = {type(option): option for option in options}
    if set(kinds) != {mi.IntType, mi.StrType}:
        raise TypeError(f"{found}: a structural schema has one type, or is an integer or a string")
    text = _schema(kinds[mi.StrType], additions)
    del text["type"]
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return {**either, "x-kubernetes-int-or-string": True, **text}


@_schema.register
def _(found: mi.Metadata, additions: Additions) -> Schema:
    extra = dict(found.extra_json_schema or {})
    if extra.pop("uniqueItems", False):
        extra[_LIST_TYPE] = "set"
    return _schema(found.type, additions) | extra


@_schema.register
def _(found: mi.StructType, additions: Additions) -> Schema:
    if found.cls in additions.skeletons:
        return schema_of(additions.skeletons[found.cls], additions)
    properties: Schema = {}
    required = []
    if found.tag_field is not None:
        properties[found.tag_field] = {
            "type": "string",
            "enum": [found.tag],
            "description": TAG,
        }
        required.append(found.tag_field)
    for field in found.fields:
        schema = {"description": text_of(found.cls, field.name), **_schema(field.type, additions)}
        default = _default(field)
        if default and (found.cls, field.name) not in additions.undefaulted:
            schema["default"] = default
        properties[field.encode_name] = schema
        if field.required:
            required.append(field.encode_name)
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if found.cls in additions.opened:
        schema[PRESERVE] = True
    if rules := additions.rules.get(found.cls):
        schema[VALIDATIONS] = [rule.schema() for rule in rules]
    return schema


def _default(field: mi.Field) -> Any:
    """Return the default of a field as JSON; what is empty means the same as what is missing."""
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    if isinstance(value := field.default, msgspec.Struct):
        # Written out: the API server checks a default before it fills in those within it.
        found = {each.encode_name: getattr(value, each.name) for each in structs.fields(value)}
        return {name: msgspec.to_builtins(each) for name, each in found.items() if each}
    return None if field.default is msgspec.NODEFAULT else msgspec.to_builtins(field.default)


def _limits(found: Any, names: Mapping[str, str]) -> Schema:
    limits = {names[name]: getattr(found, name) for name in names}
    return {name: value for name, value in limits.items() if value is not None}


def _range(found: mi.IntType | mi.FloatType) -> Schema:
    schema = _limits(found, {"ge": "minimum", "le": "maximum"})
    # In OpenAPI v3.0 these are marks of the limit, not limits.
    for name, limit in (("gt", "minimum"), ("lt", "maximum")):
        if (value := getattr(found, name)) is not None:
            schema |= {limit: value, f"exclusive{limit.capitalize()}": True}
    return schema
