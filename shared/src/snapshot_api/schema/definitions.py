"""The CustomResourceDefinitions of our kinds, made of their structs.

What a struct cannot say stands here: the rules between fields (CEL), the keys of lists, and the
columns of `kubectl get`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from snapshot_api.facts import PodTemplateSpec
from snapshot_api.kinds import KINDS, Kind
from snapshot_api.meta import Condition
from snapshot_api.schema.openapi import PRESERVE, VALIDATIONS, Additions, Rule, Schema, schema_of
from snapshot_api.template import (
    OPENED,
    TemplateContainer,
    TemplateEnvVar,
    TemplateSkeleton,
    TemplateVolume,
    TemplateVolumeMount,
)
from snapshot_api.v1alpha1.checkpoint import (
    LOADER_REFUSED,
    CheckpointJobSpec,
    ClientEnvVar,
    DynamoCheckpointSpec,
    GpuMemoryServiceSpec,
    SharedMemorySpec,
    VolumeMount,
)
from snapshot_api.v1alpha1.content import ContentSource, SnapshotContentStatus
from snapshot_api.v1alpha1.restore import SnapshotRestoreStatus
from snapshot_api.v1alpha1.snapshot import SnapshotSource, SnapshotStatus
from snapshot_api.well_known import GROUP
from snapshot_shared.orders import Name

CATEGORY = "snapback"
"""`kubectl get snapback` lists all our kinds."""

PART_OF = ("app.kubernetes.io/part-of", "snapback")
"""The label by which a definition is known to be of this product, and no other's."""

VERSION_ANNOTATION = "nvidia.com/snapback-version"
"""The release that a definition is of: an older operator leaves it as it is."""

RELEASE = version("snapback-operator")

_RESERVED = frozenset({"namespace"})
"""Words of CEL that are names of fields of ours, too."""

_FORBIDDEN = "FieldValueForbidden"
_IMMUTABLE = "is immutable; delete the object and apply it again"

_ONE_SOURCE = Rule(
    "has(self.podRef) != has(self.artifact)", "exactly one of podRef and artifact is needed"
)
_NEEDS_GMS = "needs gpuMemoryService.enabled: true"


def _once(name: str) -> Rule:
    """Return the rule that a field of a status stays what it is, once it is set."""
    return Rule(
        f"!has(oldSelf.{name}) || (has(self.{name}) && self.{name} == oldSelf.{name})",
        "is never changed once it is set",
        f".{name}",
    )


def _rising(name: str) -> Rule:
    """Return the rule that a number of a status never falls."""
    return Rule(
        f"!has(oldSelf.{name}) || (has(self.{name}) && self.{name} >= oldSelf.{name})",
        "never falls",
        f".{name}",
    )


_RULES: dict[type, tuple[Rule, ...]] = {
    DynamoCheckpointSpec: (
        Rule(
            "!has(self.gpuMemoryService) || !has(self.gpuMemoryService.checkpoint)"
            " || !has(self.gpuMemoryService.checkpoint.loader)",
            LOADER_REFUSED,
            ".gpuMemoryService.checkpoint.loader",
            _FORBIDDEN,
        ),
        Rule(
            "!has(self.gpuMemoryService) || !self.gpuMemoryService.enabled"
            " || self.gpuMemoryService.mode == 'intraPod'",
            "a checkpoint captures GPU memory in mode intraPod alone",
            ".gpuMemoryService.mode",
        ),
    ),
    GpuMemoryServiceSpec: (
        Rule(
            "self.enabled || !has(self.checkpoint) || !has(self.checkpoint.saver)",
            _NEEDS_GMS,
            ".checkpoint.saver",
            _FORBIDDEN,
        ),
        Rule(
            "self.enabled || !has(self.extraClientContainers)"
            " || size(self.extraClientContainers) == 0",
            _NEEDS_GMS,
            ".extraClientContainers",
            _FORBIDDEN,
        ),
    ),
    SharedMemorySpec: (
        Rule(
            "!has(self.size) || !has(self.disabled) || !self.disabled",
            "must not be set together with disabled: true",
            ".size",
        ),
    ),
    CheckpointJobSpec: (
        Rule(
            "self.podTemplateSpec.spec.containers.exists(c, c.name == self.targetContainerName)",
            "names no container of podTemplateSpec",
            ".targetContainerName",
        ),
    ),
    SnapshotSource: (_ONE_SOURCE,),
    ContentSource: (
        _ONE_SOURCE,
        Rule("has(self.podRef) == has(self.nodeName)", "belongs to podRef", ".nodeName"),
    ),
    SnapshotStatus: (_once("boundSnapshotContentName"),),
    SnapshotContentStatus: (_once("committed"), _rising("attempt")),
    SnapshotRestoreStatus: (_rising("attempt"),),
}

_ADDITIONS = Additions(
    rules=_RULES,
    # A worker that does not name it has no memory server, and needs no claim.
    undefaulted=frozenset({(DynamoCheckpointSpec, "gpu_memory_service")}),
    keys={
        Condition: ("type",),
        ClientEnvVar: ("name",),
        VolumeMount: ("mountPath",),
        TemplateContainer: ("name",),
        TemplateEnvVar: ("name",),
        TemplateVolumeMount: ("mountPath",),
        TemplateVolume: ("name",),
    },
    opened=OPENED,
    skeletons={PodTemplateSpec: TemplateSkeleton},
)


class Column(NamedTuple):
    """One column of `kubectl get`; a wide one is shown with `-o wide`."""

    name: str
    path: str
    description: str
    type: str = "string"
    is_wide: bool = False

    def schema(self) -> Schema:
        """Return the column as an entry of `additionalPrinterColumns`."""
        wide = {"priority": 1} if self.is_wide else {}
        named = {"name": self.name, "type": self.type, "jsonPath": self.path}
        return {**named, "description": self.description, **wide}


_READY = ".status.conditions[?(@.type=='Ready')]"
_AGE = Column("Age", ".metadata.creationTimestamp", "Time since it was created", "date")
_PHASE = Column("Phase", ".status.phase", "The phase")
_PROGRESS = Column("Progress", ".status.progress", "Parts that are complete, of all")
_SIZE = Column("Size", ".status.size", "The size of the artifact")
_REASON = Column("Reason", f"{_READY}.reason", "Why it is ready, or is not")
_TRACE = Column(
    "Trace",
    r".metadata.annotations['nvidia\.com/traceparent']",
    "Where it belongs in its trace (W3C)",
    is_wide=True,
)


def _driver(path: str) -> Column:
    return Column("Driver", path, "How the state of the process is captured", is_wide=True)


def _seconds(name: str, path: str, description: str) -> Column:
    return Column(name, path, description, "number", is_wide=True)


def _artifact(path: str) -> Column:
    return Column("Artifact", path, "Where the artifact is found", is_wide=True)


_COLUMNS: dict[str, tuple[Column, ...]] = {
    "DynamoCheckpoint": (
        Column("Model", ".spec.identity.model", "The model"),
        Column("Backend", ".spec.identity.backendFramework", "The inference engine"),
        *(_PHASE, _SIZE, _REASON, _AGE),
        Column("CheckpointID", ".status.checkpointID", "Hash of the identity", is_wide=True),
        *(_driver(".spec.job.driver"), _artifact(".status.contentName"), _TRACE),
    ),
    "Snapshot": (
        Column("Pod", ".spec.source.podRef.name", "The pod that is captured"),
        *(_PHASE, _SIZE, _REASON, _AGE, _driver(".spec.driver")),
        Column("Revision-Of", ".spec.revisionOf", "Of which name it is a revision", is_wide=True),
        *(_artifact(".status.boundSnapshotContentName"), _TRACE),
    ),
    "SnapshotContent": (
        *(_PHASE, _PROGRESS, _SIZE),
        Column("Node", ".spec.source.nodeName", "The node of the pod that is captured"),
        *(_REASON, _AGE),
        Column("Namespace", ".spec.snapshotRef.namespace", "The namespace of its Snapshot"),
        Column("Snapshot", ".spec.snapshotRef.name", "The Snapshot that it belongs to"),
        _seconds("Paused(s)", ".status.pausedSeconds", "Seconds for which the worker was paused"),
        _seconds("Took(s)", ".status.capturedSeconds", "Seconds that the capture took"),
        *(_driver(".spec.driver"), _artifact(".status.committed.rootDigest")),
        _TRACE._replace(path=".status.traceparent"),
    ),
    "SnapshotRestore": (
        Column("Pod", ".spec.podRef.name", "The pod that is restored"),
        Column("Source", ".spec.source", "What it is restored from"),
        *(_PHASE, _PROGRESS),
        Column("Node", ".status.nodeName", "The node of the pod"),
        *(_REASON, _AGE),
        _seconds("Took(s)", ".status.restoredSeconds", "Seconds that the restore took"),
        *(_driver(".status.driver"), _artifact(".status.contentName")),
        _TRACE._replace(path=".status.traceparent"),
    ),
}


def definitions() -> list[dict[str, Any]]:
    """Return the CustomResourceDefinition of each of our kinds, as `kubectl apply` takes them."""
    return [_definition(kind) for kind in KINDS.values() if kind.api_version == GROUP]


def _definition(kind: Kind) -> dict[str, Any]:
    group, _, version = kind.api_version.partition("/")
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": f"{kind.plural}.{group}",
            "labels": dict([PART_OF]),
            "annotations": {VERSION_ANNOTATION: RELEASE},
        },
        "spec": {
            "group": group,
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": [CATEGORY],
            },
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [
                {
                    "name": version,
                    "served": True,
                    "storage": True,
                    "subresources": {"status": {}},
                    "additionalPrinterColumns": [c.schema() for c in _COLUMNS[kind.name]],
                    "schema": {"openAPIV3Schema": _schema_of(kind)},
                }
            ],
        },
    }


def _schema_of(kind: Kind) -> Schema:
    hints = msgspec.structs.fields(kind.type)
    types = {field.name: field.type for field in hints if field.name in ("spec", "status")}
    spec, status = (schema_of(types[name], _ADDITIONS) for name in ("spec", "status"))
    text = " ".join((kind.type.__doc__ or "").split())
    return {
        "type": "object",
        "description": text,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"The version: {kind.api_version}."},
            "kind": {"type": "string", "description": f"The kind: {kind.name}."},
            "metadata": {
                "type": "object",
                # The API server allows nothing else here.
                "properties": {"name": schema_of(Name)},
            },
            "spec": {
                "description": "What is wanted; it never changes.",
                **_fixed(spec),
            },
            "status": {"description": "How it stands, as the operator writes it.", **status},
        },
    }


def _fixed(schema: Schema) -> Schema:
    """Return the schema of an object none of whose fields ever changes, each refused by its path.

    What may be left out has the rule at its parent: one at the field itself is not looked at when
    the field is added or removed.
    """
    rules: list[Schema] = []
    properties: Schema = {}
    for name, found in schema["properties"].items():
        is_present = name in schema.get("required", ()) or "default" in found
        if is_present and "properties" in found and not found.get(PRESERVE):
            properties[name] = _fixed(found)
            continue
        properties[name] = found
        cel = f"__{name}__" if name in _RESERVED else name
        same = f"self.{cel} == oldSelf.{cel}"
        both = f"has(self.{cel}) == has(oldSelf.{cel}) && (!has(self.{cel}) || {same})"
        rules.append(Rule(same if is_present else both, _IMMUTABLE, f".{name}").schema())
    validations = [*schema.get(VALIDATIONS, []), *rules]
    return schema | {"properties": properties} | ({VALIDATIONS: validations} if validations else {})
