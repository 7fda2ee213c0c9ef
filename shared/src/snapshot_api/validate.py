"""Whether a manifest is right: every independent problem at once, each by its exact path.

The rules are the same for standalone mode, for the operator's webhook and for a file on its own.
What differs is what each world honours: standalone mode a part of a pod, which it runs itself; a
cluster all of it, which Kubernetes checks.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec

from snapshot_api.facts import GPU_RESOURCE
from snapshot_api.kind import Kind, Version
from snapshot_api.kinds import KINDS
from snapshot_api.meta import QUANTITY_PATTERN, VARIABLE_PATTERN
from snapshot_api.schema.definitions import object_schema
from snapshot_api.schema.openapi import LIST_KEYS, LIST_TYPE, PRESERVE, Schema, in_python, schema_of
from snapshot_api.schema.rules import as_stored, broken
from snapshot_api.well_known import (
    CAPTURABLE,
    CAPTURE_DRIVER,
    IMMEDIATE,
    OURS,
    RESTORE_CONTAINER,
    RESTORE_DRIVER,
    RESTORE_FROM,
    RESTORE_POLICY,
    WAIT,
)
from snapshot_shared.errors import InvalidName
from snapshot_shared.ids import (
    MEANINGS,
    check_name,
)
from snapshot_shared.orders import Driver, Label, Name
from snapshot_shared.volumes import CONTROL_VOLUME, INIT_VOLUME

if TYPE_CHECKING:
    import jsonschema

World = Literal["standalone", "kubernetes"]

MAX_GPUS = 64
_COUNTED = {"maxItems": "items", "maxProperties": "fields", "maxLength": "characters"}
_MEANINGS = {
    **MEANINGS,
    QUANTITY_PATTERN: "a quantity, such as 500m, 2 or 4Gi",
    VARIABLE_PATTERN: "the name of a variable: letters, digits and _, without a digit first",
}
_TEMPLATE = "spec.job.podTemplateSpec.spec"
_MEMORY = "spec.gpuMemoryService"
_POD_SPECS = {
    "Pod": "spec",
    "Job": "spec.template.spec",
    "DynamoCheckpoint": _TEMPLATE,
}
_OWN_VOLUMES = {
    CONTROL_VOLUME: "the control directory",
    INIT_VOLUME: "the volume of the first process",
}
_SET_BY_STORE = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "finalizers",
    "ownerReferences",
)


class Problem(NamedTuple):
    """What is wrong, and the path of the field."""

    path: str
    text: str

    def __str__(self) -> str:
        """Return both, as people read them."""
        return f"{self.path}: {self.text}"


def problems(document: Any, world: World) -> list[Problem]:
    """Return everything that is wrong with a document; a kind that is not ours has no rules.

    A rule that reads a field which is wrong already is left out.
    """
    unknown = kind_problem(document, world)
    if unknown is not None:
        return [unknown]
    kind = KINDS.get(document["kind"])
    cleaned = without_server_fields(document)
    found: list[Problem] = []
    if kind is not None and world == "standalone":
        found = schema_problems(_version(kind, cleaned).type, cleaned)
    elif kind is not None and kind.is_ours:
        found = _refused_by_schema(kind, cleaned)
    rules = [*_broken(kind, cleaned, found), *_rule_problems(cleaned, world)]
    return [*found, *_readable(rules, found)]


def refused_by_definition(kind: Kind, document: dict[str, Any], old: Any = None) -> list[Problem]:
    """Return what the definition of a kind of ours refuses of an object, or of its change."""
    found = _refused_by_schema(kind, document)
    return [*found, *_readable(_broken(kind, document, found, old), found)]


def _refused_by_schema(kind: Kind, document: dict[str, Any]) -> list[Problem]:
    """Return what the schema of a definition does not allow."""
    version = _version(kind, document)
    stored = as_stored(_schema_in_cluster(kind, version), document)
    return _problems_by(_validator_in_cluster(kind, version), stored)


def _broken(
    kind: Kind | None, document: dict[str, Any], found: list[Problem], old: Any = None
) -> Iterator[Problem]:
    """Yield the rules of a definition that are broken and read nothing of what is `found` wrong."""
    if kind is not None and kind.is_ours:
        schema = object_schema(kind, _version(kind, document))
        new, before = as_stored(schema, document), as_stored(schema, old)
        wrong = [each.path for each in found]
        yield from map(Problem._make, broken(schema, new, before, wrong=wrong))


def _version(kind: Kind, document: dict[str, Any]) -> Version:
    return kind.version_of(document.get("apiVersion")) or kind.hub


def _readable(rules: Iterable[Problem], found: list[Problem]) -> Iterator[Problem]:
    """Yield the first broken rule of each path, but for those that read what is wrong already."""
    seen: set[str] = set()
    for rule in rules:
        if rule.path not in seen and not any(each.path.startswith(rule.path) for each in found):
            seen.add(rule.path)
            yield rule


def unchecked(document: dict[str, Any], world: World) -> str:
    """Return what `problems` leaves unchecked of a document without problems; empty for nothing."""
    kind = KINDS.get(str(document.get("kind")))
    if world == "standalone" or (kind is not None and kind.is_ours):
        return ""
    about = f"{document.get('kind')} of {document.get('apiVersion')}"
    if _pods_of(document):
        return f"{about}: only its annotations of Snapback; Kubernetes checks the rest"
    return f"{about}: Kubernetes checks it"


def _pods_of(document: dict[str, Any]) -> list[tuple[str, Any]]:
    """Return the pod, or the pod template, of a document, with its path and a dot."""
    if document.get("kind") == "Pod":
        return [("", document)]
    template = _at(document, "spec.template")
    return [("spec.template.", template)] if isinstance(template, dict) else []


def repetitions(documents: Sequence[Any]) -> Iterator[tuple[int, Problem]]:
    """Yield the place of each document that is about the object of one before it."""
    seen: set[tuple[str, str, str]] = set()
    for place, document in enumerate(documents):
        name, space = _at(document, "metadata.name"), _at(document, "metadata.namespace")
        if not isinstance(name, str):
            continue
        key = (str(document.get("kind")), str(space or "default"), name)
        if key in seen:
            yield place, Problem("metadata.name", f"{name} appears twice")
        seen.add(key)


def kind_problem(document: Any, world: World) -> Problem | None:
    """Return why a document is none of a kind that may be applied; None for one that is."""
    if not isinstance(document, dict):
        return Problem("(document)", f"expected a mapping, found {type(document).__name__}")
    name, version = document.get("kind"), document.get("apiVersion")
    group = str(version).partition("/")[0]
    if world == "kubernetes" and isinstance(name, str) and group != OURS:
        return None if name not in KINDS else _version_problem(KINDS[name], version)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not kind.appliable:
        known = ", ".join(kind.name for kind in KINDS.values() if kind.appliable)
        return Problem("kind", f"{name!r} cannot be applied; use one of {known}")
    return _version_problem(kind, version)


def _version_problem(kind: Kind, version: object) -> Problem | None:
    if kind.version_of(version) is not None:
        return None
    known = " or ".join(map(kind.api_version_of, kind.versions))
    return Problem("apiVersion", f"{kind.name} is {known}, found {version!r}")


def changes(old: Any, new: Any, path: str = "spec") -> Iterator[Problem]:
    """Yield each field of a spec that differs from what it was: a spec never changes.

    A definition names a template as a whole, of which it declares few fields.
    """
    if isinstance(old, dict) and isinstance(new, dict):
        for name in sorted(old.keys() | new.keys()):
            yield from changes(old.get(name), new.get(name), f"{path}.{name}")
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        for index, (before, after) in enumerate(zip(old, new, strict=True)):
            yield from changes(before, after, f"{path}[{index}]")
    elif old != new:
        yield Problem(path, "is immutable; delete the object and apply it again")


def warnings(document: Any, world: World) -> list[Problem]:
    """Return what is taken and will not be as it is written.

    A cluster would refuse or lack volumes later that a template does not have; standalone mode uses
    no images.
    """
    if not isinstance(document, dict):
        return []
    if world == "standalone":
        return list(_image_warnings(document))
    if document.get("kind") != "DynamoCheckpoint":
        return []
    volumes = [volume.get("name") for _, volume in _rows(document, f"{_TEMPLATE}.volumes")]
    saver = "spec.gpuMemoryService.checkpoint.saver.volumeMounts"
    lists = [saver]
    for name in ("initContainers", "containers"):
        path = f"{_TEMPLATE}.{name}"
        lists += [f"{path}[{index}].volumeMounts" for index, _ in _rows(document, path)]
    return [
        Problem(
            f"{path}[{index}].name",
            f"no volume is called {mount.get('name')!r}; add it to {_TEMPLATE}.volumes",
        )
        for path in lists
        for index, mount in _rows(document, path)
        if mount.get("name") not in volumes
    ]


def _image_warnings(document: dict[str, Any]) -> Iterator[Problem]:
    where = _POD_SPECS.get(str(document.get("kind")), "")
    for index, container in _rows(document, f"{where}.containers") if where else ():
        if container.get("image"):
            yield Problem(
                f"{where}.containers[{index}].image",
                "is not used: standalone mode starts the command as a process of the node",
            )


def restore_problems(pod: Any) -> Iterator[Problem]:
    """Yield why a pod cannot be captured or restored as its annotations ask for it."""
    annotations = _at(pod, "metadata.annotations")
    if not isinstance(annotations, dict):
        return
    drivers = get_args(Driver)
    for mark in (CAPTURE_DRIVER, RESTORE_DRIVER):
        if (driver := annotations.get(mark)) and driver not in drivers:
            yield Problem(
                f"metadata.annotations[{mark}]", f"{driver!r} is not one of {', '.join(drivers)}"
            )
    capturable = annotations.get(CAPTURABLE)
    if capturable not in (None, "true", "false"):
        yield Problem(
            f"metadata.annotations[{CAPTURABLE}]", f"{capturable!r} is not one of true, false"
        )
    if RESTORE_FROM not in annotations and capturable != "true":
        return
    try:
        # It becomes part of a path of the API server.
        check_name(annotations.get(RESTORE_FROM) or "none")
    except InvalidName as error:
        yield Problem(f"metadata.annotations[{RESTORE_FROM}]", str(error))
    names = [str(each.get("name")) for _, each in _rows(pod, "spec.containers")]
    wanted, policy = annotations.get(RESTORE_CONTAINER), annotations.get(RESTORE_POLICY)
    if wanted and wanted not in names:
        yield Problem(
            f"metadata.annotations[{RESTORE_CONTAINER}]",
            f"{wanted!r} is no container of the pod (found {', '.join(names)})",
        )
    if policy and policy not in (WAIT, IMMEDIATE):
        yield Problem(
            f"metadata.annotations[{RESTORE_POLICY}]",
            f"{policy!r} is not one of {WAIT}, {IMMEDIATE}",
        )
    yield from _volume_problems(pod)


def _volume_problems(pod: Any) -> Iterator[Problem]:
    for index, volume in _rows(pod, "spec.volumes"):
        if (name := volume.get("name")) in _OWN_VOLUMES and "emptyDir" not in volume:
            yield Problem(
                f"spec.volumes[{index}]",
                f"{name} is the name of {_OWN_VOLUMES[name]}; rename this volume",
            )


def without_server_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Drop what only the store may set, so that the output of `get` can be applied again."""
    cleaned = {key: value for key, value in document.items() if key != "status"}
    if isinstance(meta := cleaned.get("metadata"), dict):
        cleaned["metadata"] = {k: v for k, v in meta.items() if k not in _SET_BY_STORE}
    return cleaned


# What a schema says.


def schema_problems(type_: type[msgspec.Struct], document: Any) -> list[Problem]:
    """Return what a document has that its type does not allow."""
    return _problems_by(_validator(type_), document)


def _problems_by(validator: jsonschema.Draft202012Validator, document: Any) -> list[Problem]:
    errors = sorted(
        validator.iter_errors(document), key=lambda e: [str(p) for p in e.absolute_path]
    )
    return [problem for error in errors for problem in _describe(error)]


@cache
def _validator(type_: type[msgspec.Struct]) -> jsonschema.Draft202012Validator:
    return _bounded(_closed(msgspec.json.schema(type_)))


@cache
def _validator_in_cluster(kind: Kind, version: Version) -> jsonschema.Draft202012Validator:
    return _bounded(_closed(_schema_in_cluster(kind, version)))


@cache
def _schema_in_cluster(kind: Kind, version: Version) -> Schema:
    """Return the schema of a definition with what it may not say: that of metadata."""
    schema = object_schema(kind, version)
    metadata = {
        "type": "object",
        "required": ["name"],
        "properties": {"name": schema_of(Name), "namespace": schema_of(Label)},
        PRESERVE: True,
    }
    required = [*schema["required"], "metadata"]
    return schema | {
        "required": required,
        "properties": schema["properties"] | {"metadata": metadata},
    }


def _bounded(schema: Schema) -> jsonschema.Draft202012Validator:
    import jsonschema  # noqa: PLC0415 - costs start-up time

    each = jsonschema.Draft202012Validator.VALIDATORS["items"]

    def items(validator: Any, value: Any, instance: Any, schema: Any) -> Any:
        # A list that is refused for its length is not read: 18,000 containers take 8 s.
        longest = schema.get("maxItems")
        if longest is None or not isinstance(instance, list) or len(instance) <= longest:
            yield from each(validator, value, instance, schema)

    def distinct(_validator: Any, keys: Any, instance: Any, schema: Any) -> Any:
        seen: set[str] = set()
        rows = instance if isinstance(instance, list) else []
        for index, item in enumerate(
            rows if len(rows) <= schema.get("maxItems", len(rows)) else ()
        ):
            if not isinstance(item, dict) or not all(key in item for key in keys):
                continue
            found = ", ".join(repr(item[key]) for key in keys)
            if found in seen:
                yield jsonschema.ValidationError(f"{found} appears twice", path=[index])
            seen.add(found)

    bounded: type[jsonschema.Draft202012Validator] = jsonschema.validators.extend(  # type: ignore[no-untyped-call]
        jsonschema.Draft202012Validator, {"items": items, LIST_KEYS: distinct}
    )
    return bounded(schema)


def _closed(schema: Any) -> Any:
    """Return a schema of OpenAPI, or of JSON, as JSON Schema whose objects have no other fields.

    Where a structural schema preserves fields that it does not declare, they are allowed.
    """
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: _closed(value) for key, value in schema.items()}
    if result.get("type") == "object" and isinstance(result.get("properties"), dict):
        result.setdefault("additionalProperties", bool(result.get(PRESERVE)))
    if result.get(LIST_TYPE) == "set":
        result["uniqueItems"] = True
    if isinstance(pattern := result.get("pattern"), str) and pattern.endswith("$"):
        result["pattern"] = in_python(pattern)
    for name in ("Minimum", "Maximum"):
        if result.get(f"exclusive{name}") is True:
            result[f"exclusive{name}"] = result.pop(name.lower())
    return result


def _describe(error: jsonschema.ValidationError) -> Iterator[Problem]:
    path = _path(error)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        allowed = set(_keyword(error, "properties") or {})
        for name in sorted(set(error.instance) - allowed):
            near = ", ".join(sorted(allowed))
            text = f"unknown or unsupported field (known here: {near})"
            yield Problem(join(path, str(name)), text)
    elif error.validator == "required":
        missing = re.match(r"'(.+)' is a required property", error.message)
        yield Problem(join(path, missing[1] if missing else ""), "is required")
    elif error.validator == "anyOf" and (typed := _of_the_right_type(error)) is not None:
        yield from _describe(typed)
    elif error.validator == "anyOf" and error.context:
        kinds = " or ".join(str(_keyword(sub, "type") or "another value") for sub in error.context)
        yield Problem(path, f"expected {kinds}, found {_short(error.instance)}")
    elif error.validator == "type":
        yield Problem(path, f"expected {error.validator_value}, found {_short(error.instance)}")
    elif error.validator == "pattern":
        yield Problem(path, f"{_short(error.instance)} {_unmatched(str(error.validator_value))}")
    elif unit := _COUNTED.get(str(error.validator)):
        value: Any = error.instance
        text = f"has {len(value)} {unit}, at most {error.validator_value} are allowed"
        yield Problem(path, text)
    else:
        yield Problem(path, error.message[:300])


def _of_the_right_type(error: jsonschema.ValidationError) -> jsonschema.ValidationError | None:
    """Return what is wrong with a value that has one of the types that are expected."""
    wrong = [sub for sub in error.context or () if sub.validator != "type"]
    return wrong[0] if len(wrong) == 1 else None


def _unmatched(pattern: str) -> str:
    """Return what a text is not, for people; a pattern of its own kind is shown as it is."""
    meaning = _MEANINGS.get(pattern)
    return f"is not {meaning}" if meaning else f"does not match {pattern}"


def _keyword(error: jsonschema.ValidationError, name: str) -> Any:
    return error.schema.get(name) if isinstance(error.schema, dict) else None


def _path(error: jsonschema.ValidationError) -> str:
    text = ""
    for part in error.absolute_path:
        text = f"{text}[{part}]" if isinstance(part, int) else join(text, str(part))
    return text or "(document)"


def join(path: str, name: str) -> str:
    """Return the path of a field below another."""
    return name if path in ("", "(document)") else f"{path}.{name}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


# What a schema cannot say. Documents are read as they are: nothing is where it should be for sure.


def _rule_problems(document: dict[str, Any], world: World) -> Iterator[Problem]:
    is_standalone = world == "standalone"
    for path, pod in _pods_of(document):
        for problem in restore_problems(pod):
            yield Problem(f"{path}{problem.path}", problem.text)
    match document["kind"]:
        case "Pod" if is_standalone:
            yield from _pod_problems(document, "spec", world)
        case "Job" if is_standalone:
            yield from _pod_problems(document, "spec.template.spec", world)
        case "DynamoCheckpoint":
            yield from _pod_problems(document, _TEMPLATE, world)
            if is_standalone:
                yield from _standalone_problems(document)
            else:
                yield from _client_problems(document)
                yield from _text_problems(document)
        case _:
            return


def _standalone_problems(document: Any) -> Iterator[Problem]:
    """Refuse what only Kubernetes can honour: pods whose containers standalone mode never makes."""
    found = {
        f"{_MEMORY}.deviceClassName": _at(document, f"{_MEMORY}.deviceClassName")
        not in (None, "gpu.nvidia.com"),
        f"{_MEMORY}.extraClientContainers": _at(document, f"{_MEMORY}.extraClientContainers"),
        f"{_MEMORY}.checkpoint.saver": _at(document, f"{_MEMORY}.checkpoint.saver"),
        "spec.job.sharedMemory": _at(document, "spec.job.sharedMemory") is not None,
        "spec.job.ttlSecondsAfterFinished": _at(document, "spec.job.ttlSecondsAfterFinished")
        is not None,
    }
    for path, is_set in found.items():
        if is_set:
            text = "is honoured on Kubernetes alone; remove it, or apply this to a cluster"
            yield Problem(path, text)


def _client_problems(document: Any) -> Iterator[Problem]:
    """Check each name of a list against another list: a rule would name the list alone."""
    clients = _at(document, f"{_MEMORY}.extraClientContainers")
    names = [each.get("name") for _, each in _rows(document, f"{_TEMPLATE}.containers")]
    for index, client in enumerate(clients if isinstance(clients, list) else ()):
        if names and client not in names:
            text = (
                f"{client!r} is no container of the template (found {', '.join(map(str, names))})"
            )
            yield Problem(f"{_MEMORY}.extraClientContainers[{index}]", text)


def _pod_problems(document: Any, where: str, world: World) -> Iterator[Problem]:
    seen: set[str] = set()
    wanted = 0
    for index, container in _rows(document, f"{where}.containers"):
        path = f"{where}.containers[{index}]"
        wanted += _gpus(container)
        if world == "standalone":
            name = str(container.get("name"))
            if name in seen:
                yield Problem(f"{path}.name", f"{name!r} appears twice")
            seen.add(name)
            yield from _process_problems(container, path)
    if not 0 <= wanted <= MAX_GPUS:
        text = f"nvidia.com/gpu must be a whole number up to {MAX_GPUS}"
        yield Problem(f"{where}.containers", text)


def _text_problems(document: Any) -> Iterator[Problem]:
    """Check what a definition leaves open, and the API server refuses when the pod is made."""
    for kind in ("initContainers", "containers"):
        for number, container in _rows(document, f"{_TEMPLATE}.{kind}"):
            for place, found in _texts(container):
                if not isinstance(found, str):
                    yield Problem(
                        f"{_TEMPLATE}.{kind}[{number}].{place}",
                        f"expected string, found {_short(found)}; put it in quotes",
                    )


def _texts(container: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the words of the command and the values of variables, each with its path."""
    for name in ("command", "args"):
        given = container.get(name)
        for index, word in enumerate(given if isinstance(given, list) else ()):
            yield f"{name}[{index}]", word
    for index, variable in _rows(container, "env"):
        # Null is no value.
        if variable.get("value") is not None:
            yield f"env[{index}].value", variable["value"]


def _process_problems(container: dict[str, Any], path: str) -> Iterator[Problem]:
    """Check what a container needs that is run as a process of a node."""
    if not container.get("command"):
        text = "is required: standalone mode starts it as a local process"
        yield Problem(f"{path}.command", text)
    folder = container.get("workingDir")
    if isinstance(folder, str) and folder and not folder.startswith("/"):
        yield Problem(f"{path}.workingDir", f"{folder!r} is not an absolute path")


def _gpus(container: dict[str, Any]) -> int:
    limits = _at(container, "resources.limits")
    found = limits.get(GPU_RESOURCE, 0) if isinstance(limits, dict) else 0
    try:
        return int(found)
    except (TypeError, ValueError):
        return MAX_GPUS + 1


def _at(document: Any, path: str) -> Any:
    """Return what a document has at a path, or None."""
    for name, index in re.findall(r"([^.\[\]]+)(?:\[(\d+)\])?", path):
        document = document.get(name) if isinstance(document, dict) else None
        if index:
            document = document[int(index)] if isinstance(document, list) else None
    return document


def _rows(document: Any, path: str) -> list[tuple[int, dict[str, Any]]]:
    """Return the mappings in the list at a path, each with its place."""
    found = _at(document, path)
    rows = found if isinstance(found, list) else []
    return [(index, each) for index, each in enumerate(rows) if isinstance(each, dict)]
