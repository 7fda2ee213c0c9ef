"""The CustomResourceDefinitions of our kinds, made of their declarations."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from importlib.metadata import version
from typing import Any

import msgspec

from snapshot_api.kind import Kind, Version
from snapshot_api.kinds import KINDS
from snapshot_api.schema.openapi import Schema, fixed, is_fixed, schema_of
from snapshot_shared.orders import Name

CATEGORY = "snapback"
"""`kubectl get snapback` lists all our kinds."""

PART_OF = ("app.kubernetes.io/part-of", "snapback")
"""The label by which a definition is known to be of this product, and no other's."""

VERSION_ANNOTATION = "nvidia.com/snapback-version"
"""The release that a definition is of: an older operator leaves it as it is."""

RELEASE = version("snapback-shared")


SERVICE = {"namespace": "snapback-system", "name": "snapback-webhook", "port": 443}
"""The Service of the operator, unless an installation names another one."""


def definitions(
    kinds: Iterable[Kind] = KINDS.values(), webhook: dict[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Return the CustomResourceDefinition of each of our kinds, as `kubectl apply` takes them.

    `webhook` is the `clientConfig` of the webhook that converts objects between versions.
    """
    client = webhook or {"service": SERVICE}
    return [_definition(kind, client) for kind in kinds if kind.is_ours]


def converted(kinds: Iterable[Kind] = KINDS.values()) -> list[str]:
    """Return the names of the definitions whose objects a webhook converts between versions."""
    return [_name(kind) for kind in kinds if kind.is_ours and kind.versions[1:]]


def _name(kind: Kind) -> str:
    return f"{kind.plural}.{kind.group}"


def _definition(kind: Kind, client: dict[str, Any]) -> dict[str, Any]:
    # Never the strategy None for a kind of several versions: it drops the fields that differ.
    webhook = {"clientConfig": client, "conversionReviewVersions": ["v1"]}
    conversion = {"conversion": {"strategy": "Webhook", "webhook": webhook}}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {
            "name": _name(kind),
            "labels": dict([PART_OF]),
            "annotations": {VERSION_ANNOTATION: RELEASE},
        },
        "spec": {
            "group": kind.group,
            "names": {
                "kind": kind.name,
                "listKind": f"{kind.name}List",
                "plural": kind.plural,
                "singular": kind.name.lower(),
                "shortNames": [kind.short],
                "categories": [CATEGORY],
            },
            "scope": "Namespaced" if kind.namespaced else "Cluster",
            "versions": [_served(kind, version) for version in kind.versions],
            **(conversion if kind.versions[1:] else {}),
        },
    }


def _served(kind: Kind, version: Version) -> dict[str, Any]:
    """Return the entry of one version. An API server shows the warning of a deprecated one."""
    warning = {"deprecated": True, "deprecationWarning": version.deprecated}
    subresources: dict[str, Any] = {"status": {}}
    if kind.scale is not None:
        subresources["scale"] = {
            "specReplicasPath": kind.scale.replicas,
            "statusReplicasPath": kind.scale.observed,
            "labelSelectorPath": kind.scale.selector,
        }
    return {
        "name": version.name,
        "served": True,
        "storage": version is kind.hub,
        **(warning if version.deprecated else {}),
        "subresources": subresources,
        "additionalPrinterColumns": [column.schema() for column in version.columns],
        "schema": {"openAPIV3Schema": object_schema(kind, version)},
    }


@cache
def object_schema(kind: Kind, version: Version) -> Schema:
    """Return the schema of whole objects of a version. It is made once: do not change it."""
    hints = msgspec.structs.fields(version.type)
    types = {field.name: field.type for field in hints if field.name in ("spec", "status")}
    spec, status = (schema_of(types[name]) for name in ("spec", "status"))
    if is_fixed(version.type):
        spec = fixed(spec)
    api_version = kind.api_version_of(version)
    text = " ".join((version.type.__doc__ or "").split())
    wanted = "What is wanted; it never changes." if is_fixed(version.type) else "What is wanted."
    return {
        "type": "object",
        "description": text,
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"The version: {api_version}."},
            "kind": {"type": "string", "description": f"The kind: {kind.name}."},
            "metadata": {
                "type": "object",
                # The API server allows nothing else here.
                "properties": {"name": schema_of(Name)},
            },
            "spec": {"description": wanted, **spec},
            "status": {"description": "How it stands, as the operator writes it.", **status},
        },
    }
