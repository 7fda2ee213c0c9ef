"""The CustomResourceDefinitions of our kinds, made of their structs.

What a struct cannot say stands here: the rules between fields (CEL), the keys of lists, and the
columns of `kubectl get`.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, NamedTuple

import msgspec

from snapshot_api.kinds import KINDS, Kind
from snapshot_api.schema.openapi import Schema, schema_of
from snapshot_api.well_known import GROUP
from snapshot_shared.orders import Name

CATEGORY = "snapback"
"""`kubectl get snapback` lists all our kinds."""

PART_OF = ("app.kubernetes.io/part-of", "snapback")
"""The label by which a definition is known to be of this product, and no other's."""

VERSION_ANNOTATION = "nvidia.com/snapback-version"
"""The release that a definition is of: an older operator leaves it as it is."""

RELEASE = version("snapback-operator")


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
    spec, status = (schema_of(types[name]) for name in ("spec", "status"))
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
                **spec,
            },
            "status": {"description": "How it stands, as the operator writes it.", **status},
        },
    }
