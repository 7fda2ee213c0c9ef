"""The CustomResourceDefinitions of our kinds, made of their declarations."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from snapshot_api.kind import Kind
from snapshot_api.kinds import KINDS
from snapshot_api.schema.openapi import Schema, schema_of
from snapshot_api.well_known import GROUP
from snapshot_shared.orders import Name

CATEGORY = "snapback"
"""`kubectl get snapback` lists all our kinds."""

PART_OF = ("app.kubernetes.io/part-of", "snapback")
"""The label by which a definition is known to be of this product, and no other's."""

VERSION_ANNOTATION = "nvidia.com/snapback-version"
"""The release that a definition is of: an older operator leaves it as it is."""

RELEASE = version("snapback-shared")


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
                    "additionalPrinterColumns": [c.schema() for c in kind.columns],
                    "schema": {"openAPIV3Schema": object_schema(kind)},
                }
            ],
        },
    }


@cache
def object_schema(kind: Kind) -> Schema:
    """Return the schema of whole objects of a kind of ours. It is made once: do not change it."""
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
