"""docs/kubernetes-api.md: the objects of a cluster by their definitions, and the rights in it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from snapshot_api.schema.definitions import definitions
from snapshot_api.schema.openapi import PRESERVE, VALIDATIONS
from snapshot_operator.kube.rbac import LEASE_RULES, RULES, Rule

PAGE = "kubernetes-api.md"

_HEAD = """\
# Objects and rights in a cluster

<!-- Made by `make docs` from snapshot_api and snapshot_operator/kube/rbac.py. -->

Four kinds of `nvidia.com/v1alpha1` are the whole interface to Snapback in a cluster: people write
specs, which never change, and the operator alone writes statuses. `kubectl explain dckpt.spec`
shows the same. `[]` stands for each item of a list, `{}` for each value of a map; a field without a
default may be left out unless it is required. Annotations of pods are in
[the architecture](architecture.md#admission-in-a-cluster).
"""

_RIGHTS = """\
## What the operator may do

Agents have no rights on the Kubernetes API, and memory services only where GPUs are simulated, to
publish them. The operator has these and no others; what it may do to objects of certain names alone
has these names.
"""

_COLUMNS = ("| field | type | default | meaning |", "|---|---|---|---|")
_LIMITS = {"minimum": "≥", "maximum": "≤", "maxLength": "length ≤", "maxItems": "items ≤"}


def page() -> str:
    """Write the page."""
    parts = [_HEAD]
    for definition in definitions():
        parts += _kind(definition["spec"])
    parts += [_RIGHTS, _rights("In the whole cluster", RULES)]
    parts.append(_rights("In its own namespace", LEASE_RULES))
    return "\n".join(parts)


def _kind(spec: dict[str, Any]) -> Iterator[str]:
    for number, version in enumerate(spec["versions"]):
        yield from _version(spec, version, spec["names"]["kind"] if number == 0 else "")


def _version(spec: dict[str, Any], version: dict[str, Any], title: str) -> Iterator[str]:
    """Yield what a version has. The first one has the title of its kind."""
    names, schema = spec["names"], version["schema"]["openAPIV3Schema"]
    scope = "namespaced" if spec["scope"] == "Namespaced" else "of the cluster"
    yield f"## {title}\n" if title else f"### {names['kind']} of {version['name']}\n"
    yield f"{schema['description']}\n"
    if warning := version.get("deprecationWarning"):
        yield f"{warning}.\n"
    columns = ", ".join(
        f"{each['name']}{' (wide)' if each.get('priority') else ''}"
        for each in version["additionalPrinterColumns"]
    )
    yield f"`{names['plural']}`, short `{names['shortNames'][0]}`, {scope}. Columns: {columns}.\n"
    for part in ("spec", "status"):
        found = schema["properties"][part]
        yield "\n".join([*_COLUMNS, *_rows(part, found)]) + "\n"
        if rules := list(_rules(part, found)):
            yield "\n".join([f"Rules of the {part}:\n", *rules]) + "\n"


def _rows(path: str, schema: dict[str, Any]) -> Iterator[str]:
    for name, found in schema.get("properties", {}).items():
        where, is_required = f"{path}.{name}", name in schema.get("required", ())
        default = "required" if is_required else _value(found.get("default"))
        text = found.get("description", "").replace("|", "\\|")
        yield f"| `{where}` | {_type(found)} | {default} | {text} |"
        yield from _rows(*_inner(where, found))


def _inner(path: str, schema: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    if "items" in schema:
        return f"{path}[]", schema["items"]
    if isinstance(schema.get("additionalProperties"), dict):
        return f"{path}{{}}", schema["additionalProperties"]
    return path, schema


def _type(schema: dict[str, Any]) -> str:
    if "items" in schema:
        return f"list of {_type(schema['items'])}{_limits(schema)}"
    if isinstance(schema.get("additionalProperties"), dict):
        return f"map of {_type(schema['additionalProperties'])}"
    if schema.get("x-kubernetes-int-or-string"):
        return "integer or string"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    opened = " and any other fields" if schema.get(PRESERVE) else ""
    return f"{schema.get('type', 'anything')}{opened}{_limits(schema)}"


def _limits(schema: dict[str, Any]) -> str:
    found = [f"{sign} {schema[key]:,}" for key, sign in _LIMITS.items() if key in schema]
    return f" ({', '.join(found)})" if found else ""


def _value(default: Any) -> str:
    if default is None:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`"


def _rules(path: str, schema: dict[str, Any]) -> Iterator[str]:
    """Yield the rules of an object and of all in it, but for those that nothing changes."""
    for rule in schema.get(VALIDATIONS, ()):
        if "immutable" not in rule["message"]:
            yield f"- `{path}{rule.get('fieldPath', '')}`: {rule['message']}"
    for name, found in schema.get("properties", {}).items():
        yield from _rules(*_inner(f"{path}.{name}", found))


def _rights(title: str, rules: tuple[Rule, ...]) -> str:
    rows = [
        f"| {rule.group or 'core'} | {_named(rule)} | {', '.join(rule.verbs)} | {rule.why} |"
        for rule in rules
    ]
    head = ("| API group | resource | verbs | why |", "|---|---|---|---|")
    return "\n".join([f"### {title}\n", *head, *rows]) + "\n"


def _named(rule: Rule) -> str:
    names = f" {', '.join(f'`{name}`' for name in rule.names)}" if rule.names else ""
    return f"`{rule.resource}`{names}"
