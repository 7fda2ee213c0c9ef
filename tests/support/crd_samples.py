"""Objects made of the schemas of CustomResourceDefinitions, with every field that they have."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from random import Random
from typing import Any

from snapshot_api.kinds import KINDS
from snapshot_api.meta import Argument
from snapshot_api.schema.definitions import definitions
from snapshot_api.schema.openapi import PRESERVE, VALIDATIONS, re2
from snapshot_shared import ids

UIDS = tuple(f"{digit * 8}-0000-4000-8000-000000000000" for digit in "01")
_PATTERNS = {
    ids.NAME_PATTERN: ("a.b-1", "a.b-2"),
    ids.LABEL_PATTERN: ("main", "other"),
    ids.UID_PATTERN: UIDS,
    ids.DIGEST_PATTERN: tuple(f"sha256:{digit * 64}" for digit in "01"),
    ids.ORDER_PATTERN: tuple(f"save-{uid}-gpu-0" for uid in UIDS),
    ids.PART_PATTERN: ("gpu-0", "process"),
    str(Argument.__metadata__[0].pattern): ("words", "other words"),
    r"^[^:\x00]*\Z": ("/one", "/two"),
}
_STRINGS = {re2(pattern): values for pattern, values in _PATTERNS.items()}


def schemas() -> dict[str, dict[str, Any]]:
    """Return the schema of each kind by its name."""
    return {
        found["spec"]["names"]["kind"]: found["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
        for found in definitions()
    }


def sample(schema: dict[str, Any], variant: int = 0) -> Any:
    """Return a value with every field of a schema; those of the variants 0 and 1 differ."""
    if "enum" in schema:
        return schema["enum"][variant % len(schema["enum"])]
    if "x-kubernetes-int-or-string" in schema:
        return ("1Gi", 5)[variant]
    match schema.get("type"):
        case "string" if schema.get("format") == "date-time":
            return f"2026-01-02T03:04:0{variant}Z"
        case "string":
            return _STRINGS[schema["pattern"]][variant] if "pattern" in schema else "ab"[variant]
        case "integer":
            return schema.get("minimum", 1) + variant
        case "number":
            return 1.5 + variant
        case "boolean":
            return variant == 0
        case "array":
            return [sample(schema["items"], variant)]
        case _:
            return _object(schema, variant)


def _object(schema: dict[str, Any], variant: int) -> Any:
    found = {name: sample(each, variant) for name, each in schema.get("properties", {}).items()}
    if "additionalProperties" in schema:
        found["key"] = sample(schema["additionalProperties"], variant)
    if schema.get(PRESERVE):
        found["undeclared"] = {"number": variant}
    return found


def document(kind: str, *, variant: int = 0) -> dict[str, Any]:
    """Return an object of a kind that keeps all rules, with every field that it may have."""
    schema = schemas()[kind]["properties"]
    spec, status = (sample(schema[name], variant) for name in ("spec", "status"))
    if kind == "DynamoCheckpoint":
        del spec["gpuMemoryService"]["checkpoint"]["loader"]
        spec["gpuMemoryService"] |= {"mode": "intraPod", "enabled": True}
        spec["job"]["sharedMemory"]["disabled"] = False
    if kind in ("Snapshot", "SnapshotContent"):
        del spec["source"]["artifact"]
    return {
        "apiVersion": KINDS[kind].api_version,
        "kind": kind,
        "metadata": {"name": f"{kind.lower()}-{variant}"},
        "spec": spec,
        "status": status,
    }


def rules(kind: str) -> Iterator[tuple[str, str]]:
    """Return the path that each rule of a kind refuses, and its message."""
    yield from _rules(schemas()[kind], "")


def _rules(schema: dict[str, Any], path: str) -> Iterator[tuple[str, str]]:
    for rule in schema.get(VALIDATIONS, ()):
        yield f"{path}{rule.get('fieldPath', '')}".removeprefix("."), rule["message"]
    for name, found in schema.get("properties", {}).items():
        yield from _rules(found, f"{path}.{name}")


def at(value: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """Return the mapping that has the last name of a path, and that name."""
    *names, last = path.split(".")
    for name in names:
        value = value[name]
    return value, last


def schema_at(kind: str, path: str) -> dict[str, Any]:
    found = schemas()[kind]
    for name in path.split("."):
        found = found["properties"][name]
    return found


IMMUTABLE = "is immutable"


def fixed_paths(kind: str) -> list[str]:
    """Return the path of each field of a kind that never changes."""
    return [path for path, message in rules(kind) if message.startswith(IMMUTABLE)]


def other_values(kind: str, path: str) -> Iterator[Callable[[dict[str, Any]], None]]:
    """Yield what changes the field at a path: to another value, and to none if it may lack."""
    above = schema_at(kind, path.rpartition(".")[0])
    name = path.rpartition(".")[2]

    def replaced(found: dict[str, Any]) -> None:
        parent, last = at(found, path)
        values = (sample(schema_at(kind, path), variant) for variant in (1, 0))
        parent[last] = next(value for value in values if value != parent.get(last))

    def removed(found: dict[str, Any]) -> None:
        parent, last = at(found, path)
        parent.pop(last, None)

    yield replaced
    if name not in above.get("required", ()) and "default" not in above["properties"][name]:
        yield removed


_STRANGE = (7, -1, 2**40, 1.5, "", "text", "x" * 600, True, None, [], {}, ["a"], {"a": 1})


def mutated(kind: str, random: Random) -> dict[str, Any]:
    """Return a sample with one place of its spec changed: to another value, to nothing, doubled."""
    found = document(kind)
    parent, last = random.choice([*_places(found["spec"])])
    match random.randrange(4):
        case 0:
            del parent[last]
        case 1 if isinstance(parent[last], list):
            parent[last] = [*parent[last], *copy.deepcopy(parent[last])]
        case 2 if isinstance(parent[last], dict):
            parent[last]["strange"] = 1
        case _:
            parent[last] = copy.deepcopy(random.choice(_STRANGE))
    return found


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Yield each place within a value: what it is in, and its name or index there."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for name, each in inner:
        yield value, name
        if isinstance(each, dict | list):
            yield from _places(each)
