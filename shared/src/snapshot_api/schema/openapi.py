"""From msgspec types to structural OpenAPI v3 schemas, as CustomResourceDefinitions hold them.

A structural schema has no `$ref`, no `null` and one type at each place. A field that may be None
is one that may be left out: the API server drops a null where a schema does not allow it, and None
is what msgspec reads for what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import singledispatch
from typing import Any

import msgspec
from msgspec import inspect as mi
from msgspec import structs

from snapshot_api.schema.marks import Marks, Open, Rule
from snapshot_api.schema.texts import text_of

Schema = dict[str, Any]

VALIDATIONS = "x-kubernetes-validations"
PRESERVE = "x-kubernetes-preserve-unknown-fields"
TAG = "Names the message."
"""What the field means by which structs differ."""
LIST_TYPE = "x-kubernetes-list-type"
LIST_KEYS = "x-kubernetes-list-map-keys"
ESCAPED = {"namespace": "__namespace__"}
"""How rules name those of our fields whose names are words of CEL."""
_IMMUTABLE = "is immutable; delete the object and apply it again"
_MAX_REPEAT = 1000
"""The most repetitions that RE2 takes."""

_ESCAPED = re.compile(r"\\(x[0-9a-fA-F]{2}|.)", re.DOTALL)
_PORTABLE_ESCAPES = frozenset(r".-+*?()[]{}|^$/\\")


def schema_of(type_: Any) -> Schema:
    """Return the structural schema of a type. TypeError names what has none."""
    return _schema(mi.type_info(type_))


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


def in_python(pattern: str) -> str:
    """Return what `re2` has made of a pattern in the dialect of Python again."""
    return pattern.removesuffix("$") + r"\Z" if pattern.endswith("$") else pattern


def _without_escape(found: re.Match[str]) -> str:
    if found[1][0] == "x" or found[1] in _PORTABLE_ESCAPES:
        return "_"
    raise ValueError(f"{found[0]!r} may have another meaning in Go: {found.string}")


@singledispatch
def _schema(found: mi.Type) -> Schema:
    raise TypeError(f"{found} has no structural schema")


@_schema.register
def _(found: mi.StrType) -> Schema:
    schema: Schema = {"type": "string"}
    if found.pattern is not None:
        schema["pattern"] = re2(found.pattern)
    return schema | _limits(found, {"min_length": "minLength", "max_length": "maxLength"})


@_schema.register
def _(found: mi.IntType) -> Schema:
    return {"type": "integer", "format": "int64", **_range(found)}


@_schema.register
def _(found: mi.FloatType) -> Schema:
    return {"type": "number", "format": "double", **_range(found)}


@_schema.register
def _(_found: mi.BoolType) -> Schema:
    return {"type": "boolean"}


@_schema.register
def _(_found: mi.DateTimeType) -> Schema:
    return {"type": "string", "format": "date-time"}


@_schema.register
def _(found: mi.LiteralType) -> Schema:
    if not all(isinstance(value, str) for value in found.values):
        raise TypeError(f"{found}: only strings can be enumerated")
    return {"type": "string", "enum": list(found.values)}


@_schema.register
def _(found: mi.EnumType) -> Schema:
    return {"type": "string", "enum": [str(member.value) for member in found.cls]}


@_schema.register
def _(_found: mi.RawType) -> Schema:
    return {"type": "object", PRESERVE: True}


@_schema.register
def _(_found: mi.AnyType) -> Schema:
    return {PRESERVE: True}


@_schema.register
def _(found: mi.ListType) -> Schema:
    schema = {"type": "array", "items": _schema(found.item_type)}
    return schema | _limits(found, {"min_length": "minItems", "max_length": "maxItems"})


@_schema.register
def _(found: mi.DictType) -> Schema:
    # The names of properties have no schema in Kubernetes, so those of `key_type` are not checked.
    if isinstance(found.value_type, mi.AnyType):
        return {"type": "object", PRESERVE: True}
    schema = {"type": "object", "additionalProperties": _schema(found.value_type)}
    return schema | _limits(found, {"min_length": "minProperties", "max_length": "maxProperties"})


@_schema.register
def _(found: mi.UnionType) -> Schema:
    options = [option for option in found.types if not isinstance(option, mi.NoneType)]
    if len(options) == 1:
        return _schema(options[0])
    kinds = {type(option): option for option in options}
    if set(kinds) != {mi.IntType, mi.StrType}:
        raise TypeError(f"{found}: a structural schema has one type, or is an integer or a string")
    # What limits one of the two says nothing of the other.
    limits = _schema(kinds[mi.IntType]) | _schema(kinds[mi.StrType])
    del limits["type"], limits["format"]
    either = {"anyOf": [{"type": "integer"}, {"type": "string"}]}
    return {**either, "x-kubernetes-int-or-string": True, **limits}


@_schema.register
def _(found: mi.Metadata) -> Schema:
    extra = dict(found.extra_json_schema or {})
    if extra.pop("uniqueItems", False):
        extra[LIST_TYPE] = "set"
    marks = _marks(found)
    if marks.list_map:
        extra |= {LIST_TYPE: "map", LIST_KEYS: list(marks.list_map)}
    return _schema(mi.type_info(marks.declared) if marks.declared else found.type) | extra


@_schema.register
def _(found: mi.StructType) -> Schema:
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
        schema = {"description": text_of(found.cls, field.name), **_schema(field.type)}
        if (default := _default(field)) and not _marks(field.type).is_undefaulted:
            schema["default"] = default
        properties[field.encode_name] = schema
        if field.required:
            required.append(field.encode_name)
    schema = {"type": "object", "properties": properties}
    if required:
        schema["required"] = required
    if issubclass(found.cls, Open):
        schema[PRESERVE] = True
    if rules := getattr(found.cls, "RULES", ()):
        schema[VALIDATIONS] = [_validation(rule) for rule in rules]
    return fixed(schema, {each.encode_name for each in found.fields if _is_immutable(each)})


def is_fixed(struct: type) -> bool:
    """Whether the spec of an object never changes."""
    found = mi.type_info(struct)
    fields = found.fields if isinstance(found, mi.StructType) else ()
    return any(each.name == "spec" and _is_immutable(each) for each in fields)


def _is_immutable(field: mi.Field) -> bool:
    return _marks(field.type).is_immutable


def _marks(found: mi.Type) -> Marks:
    return Marks(**(found.extra or {})) if isinstance(found, mi.Metadata) else Marks()


def _validation(rule: Rule) -> Schema:
    path = {"fieldPath": rule.path} if rule.path else {}
    said = {"messageExpression": rule.said} if rule.said else {}
    return {"rule": rule.cel, "message": rule.message, **said, "reason": rule.reason, **path}


def fixed(schema: Schema, names: Collection[str] | None = None) -> Schema:
    """Return the schema of an object of which these fields, or all, never change.

    Each is refused by its path. What may be left out has the rule at its parent: one at the field
    itself is not looked at when the field is added or removed.
    """
    rules: list[Schema] = []
    properties: Schema = {}
    for name, found in schema["properties"].items():
        is_present = name in schema.get("required", ()) or "default" in found
        is_looked_into = is_present and "properties" in found and not found.get(PRESERVE)
        is_named = names is None or name in names
        properties[name] = fixed(found) if is_named and is_looked_into else found
        if not is_named or is_looked_into:
            continue
        cel = ESCAPED.get(name, name)
        same = f"self.{cel} == oldSelf.{cel}"
        both = f"has(self.{cel}) == has(oldSelf.{cel}) && (!has(self.{cel}) || {same})"
        rules.append(_validation(Rule(same if is_present else both, _IMMUTABLE, f".{name}")))
    validations = [*schema.get(VALIDATIONS, []), *rules]
    return schema | {"properties": properties} | ({VALIDATIONS: validations} if validations else {})


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
