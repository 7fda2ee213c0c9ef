"""From YAML documents to typed objects, with every problem named at once by its exact path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import TYPE_CHECKING, Any, get_args

import msgspec

from snapshot_shared import api
from snapshot_shared.errors import InvalidManifest
from snapshot_shared.objects.kinds import KINDS, AnyObject, Kind
from snapshot_shared.objects.kubernetes import Job, Pod, gpus_wanted
from snapshot_shared.objects.snapback import (
    LOADER_REFUSED,
    DynamoCheckpoint,
    DynamoCheckpointSpec,
    IdentitySpec,
    Snapshot,
)
from snapshot_shared.orders import AnyOrder, DeadLetter, Presence, Progress, Report
from snapshot_shared.spans import SpanRecord

if TYPE_CHECKING:
    import jsonschema

MAX_PROBLEMS = 50
MAX_GPUS = 64
_SET_BY_STORE = (
    "uid",
    "resourceVersion",
    "generation",
    "creationTimestamp",
    "deletionTimestamp",
    "finalizers",
    "ownerReferences",
)


def parse(document: Any, *, where: str = "") -> AnyObject:
    """Turn one decoded document into an object as a user may write it.

    InvalidManifest lists every `path: problem` (at most 50), `where` in front of each.
    """
    kind = _kind(document, where)
    cleaned = _without_server_fields(document)
    problems = [f"{where}{path}: {text}" for path, text in _schema_problems(kind.type, cleaned)]
    if problems:
        raise _refused(problems)
    try:
        value: AnyObject = msgspec.convert(cleaned, kind.type)
    except msgspec.ValidationError as error:
        raise _refused([f"{where}{error}"]) from error
    problems = [f"{where}{path}: {text}" for path, text in _rule_problems(value)]
    if problems:
        raise _refused(problems)
    return value


def parse_identity(document: Any, *, where: str = "") -> IdentitySpec:
    """Return the identity that one decoded DynamoCheckpoint has, whatever the rest of it holds.

    Raise InvalidManifest with every `path: problem` of `spec.identity`, `where` in front of each.
    """
    _kind(document, where)
    spec = document.get("spec")
    identity = spec.get("identity") if isinstance(spec, dict) else None
    path = "spec.identity"
    if not isinstance(identity, dict):
        found = "nothing" if identity is None else type(identity).__name__
        raise _refused([f"{where}{path}: expected a mapping, found {found}"])
    problems = [
        f"{where}{_join(path, below)}: {text}"
        for below, text in _schema_problems(IdentitySpec, identity)
    ]
    if problems:
        raise _refused(problems)
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


def _refused(problems: list[str]) -> InvalidManifest:
    count = len(problems)
    shown = problems[:MAX_PROBLEMS]
    return InvalidManifest(
        f"{count} problem{'s' if count != 1 else ''}: " + "; ".join(shown),
        next_step="correct the fields and apply again; nothing was stored",
        problems=shown,
    )


def _kind(document: Any, where: str) -> Kind:
    if not isinstance(document, dict):
        raise _refused([f"{where}(document): expected a mapping, found {type(document).__name__}"])
    name, version = document.get("kind"), document.get("apiVersion")
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None or not kind.appliable:
        known = ", ".join(kind.name for kind in KINDS.values() if kind.appliable)
        raise _refused([f"{where}kind: {name!r} cannot be applied; use one of {known}"])
    if version != kind.api_version:
        raise _refused([f"{where}apiVersion: {kind.name} is {kind.api_version}, found {version!r}"])
    return kind


def _without_server_fields(document: dict[str, Any]) -> dict[str, Any]:
    """Drop what only the store may set, so that the output of `get` can be applied again."""
    cleaned = {key: value for key, value in document.items() if key != "status"}
    if isinstance(meta := cleaned.get("metadata"), dict):
        cleaned["metadata"] = {k: v for k, v in meta.items() if k not in _SET_BY_STORE}
    return cleaned


@cache
def _validator(type_: type[msgspec.Struct]) -> jsonschema.Draft202012Validator:
    import jsonschema  # noqa: PLC0415 - costs start-up time

    schema = closed(msgspec.json.schema(type_))
    return jsonschema.Draft202012Validator(schema)


def closed(schema: Any) -> Any:
    """Make every object of a JSON Schema refuse properties that it does not name."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {key: closed(value) for key, value in schema.items()}
    if result.get("type") == "object" and isinstance(result.get("properties"), dict):
        result.setdefault("additionalProperties", False)
    return result


def _schema_problems(type_: type[msgspec.Struct], document: Any) -> Iterator[tuple[str, str]]:
    errors = sorted(
        _validator(type_).iter_errors(document), key=lambda e: [str(p) for p in e.absolute_path]
    )
    for error in errors:
        yield from _describe(error)


def _describe(error: jsonschema.ValidationError) -> Iterator[tuple[str, str]]:
    path = _path(error)
    if error.validator == "additionalProperties" and isinstance(error.instance, dict):
        allowed = set(_keyword(error, "properties") or {})
        for name in sorted(set(error.instance) - allowed):
            near = ", ".join(sorted(allowed))
            yield _join(path, str(name)), f"unknown or unsupported field (known here: {near})"
    elif error.validator == "required":
        missing = re.match(r"'(.+)' is a required property", error.message)
        yield _join(path, missing[1] if missing else ""), "is required"
    elif error.validator == "anyOf" and error.context:
        kinds = " or ".join(str(_keyword(sub, "type") or "another value") for sub in error.context)
        yield path, f"expected {kinds}, found {_short(error.instance)}"
    elif error.validator == "type":
        wanted = error.validator_value
        yield path, f"expected {wanted}, found {_short(error.instance)}"
    elif error.validator == "pattern":
        yield path, f"{_short(error.instance)} does not match {error.validator_value}"
    else:
        yield path, error.message[:300]


def _keyword(error: jsonschema.ValidationError, name: str) -> Any:
    return error.schema.get(name) if isinstance(error.schema, dict) else None


def _path(error: jsonschema.ValidationError) -> str:
    text = ""
    for part in error.absolute_path:
        text = f"{text}[{part}]" if isinstance(part, int) else _join(text, str(part))
    return text or "(document)"


def _join(path: str, name: str) -> str:
    return name if path in ("", "(document)") else f"{path}.{name}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rule_problems(value: AnyObject) -> Iterator[tuple[str, str]]:
    """Check what a schema cannot say."""
    match value:
        case Pod():
            yield from _pod_problems("spec", value.spec)
        case Job():
            yield from _pod_problems("spec.template.spec", value.spec.template.spec)
        case DynamoCheckpoint():
            where = "spec.job.podTemplateSpec.spec"
            pod = value.spec.job.pod_template_spec.spec
            yield from _pod_problems(where, pod)
            yield from _cluster_problems(value.spec)
            target = value.spec.job.target_container_name
            names = [container.name for container in pod.containers]
            if target not in names:
                yield (
                    "spec.job.targetContainerName",
                    f"{target!r} is no container of the template (found {', '.join(names)})",
                )
        case Snapshot():
            source = value.spec.source
            if (source.pod_ref is None) == (source.artifact is None):
                found = "both" if source.pod_ref else "neither"
                yield "spec.source", f"exactly one of podRef and artifact is needed, found {found}"
        case _:
            return


def _cluster_problems(spec: DynamoCheckpointSpec) -> Iterator[tuple[str, str]]:
    """Refuse what only Kubernetes can honour: pods whose containers standalone mode never makes."""
    memory, job = spec.gpu_memory_service, spec.job
    if memory.checkpoint is not None and memory.checkpoint.loader is not None:
        yield "spec.gpuMemoryService.checkpoint.loader", LOADER_REFUSED
    found = {
        "spec.gpuMemoryService.mode": memory.mode != "intraPod",
        "spec.gpuMemoryService.deviceClassName": memory.device_class_name != "gpu.nvidia.com",
        "spec.gpuMemoryService.extraClientContainers": memory.extra_client_containers,
        "spec.gpuMemoryService.checkpoint.saver": memory.saver is not None,
        "spec.job.sharedMemory": job.shared_memory is not None,
        "spec.job.ttlSecondsAfterFinished": job.ttl_seconds_after_finished is not None,
    }
    for path, is_set in found.items():
        if is_set:
            yield path, "is honoured on Kubernetes alone; remove it, or apply this to a cluster"


def _pod_problems(where: str, pod: Any) -> Iterator[tuple[str, str]]:
    seen: set[str] = set()
    for index, container in enumerate(pod.containers):
        path = f"{where}.containers[{index}]"
        if container.name in seen:
            yield f"{path}.name", f"{container.name!r} appears twice"
        seen.add(container.name)
        if not container.command:
            yield f"{path}.command", "is required: standalone mode starts it as a local process"
        if container.working_dir and not container.working_dir.startswith("/"):
            yield f"{path}.workingDir", f"{container.working_dir!r} is not an absolute path"
    try:
        wanted = gpus_wanted(pod)
    except ValueError:
        wanted = -1
    if not 0 <= wanted <= MAX_GPUS:
        yield f"{where}.containers", f"nvidia.com/gpu must be a whole number up to {MAX_GPUS}"
