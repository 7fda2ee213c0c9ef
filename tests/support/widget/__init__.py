"""A kind that exists in tests alone: its folder is all that a kind of two versions needs."""

from __future__ import annotations

from typing import Any

from snapshot_api import kind
from snapshot_api.kind import Column, Document, Kind, Scale, Version
from snapshot_api.well_known import OURS
from tests.support.widget.v1alpha1 import Widget as OldWidget
from tests.support.widget.v1beta1 import Widget


def to_hub(document: Document) -> Document:
    """Return a v1alpha1 document as v1beta1: a count is replicas, names are parts."""
    return _moved(document, ("count", "replicas", _same), ("partNames", "parts", _named))


def from_hub(document: Document) -> Document:
    """Return a v1beta1 document as v1alpha1; the weights of parts have no field there."""
    return _moved(document, ("replicas", "count", _same), ("parts", "partNames", _names))


def _same(value: Any) -> Any:
    return value


def _named(names: list[str]) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


def _names(parts: list[dict[str, Any]]) -> list[str]:
    return [part["name"] for part in parts]


def _moved(document: Document, *pairs: tuple[str, str, Any]) -> Document:
    spec = dict(document.get("spec") or {})
    for old, new, change in pairs:
        if old in spec:
            spec[new] = change(spec.pop(old))
    return document | {"spec": spec}


KIND = Kind(
    "Widget",
    OURS,
    "widgets",
    "wdg",
    (
        Version("v1beta1", Widget, (Column("Replicas", ".spec.replicas", "How many"), kind.AGE)),
        Version(
            "v1alpha1",
            OldWidget,
            (kind.AGE,),
            to_hub,
            from_hub,
            "nvidia.com/v1alpha1 Widget is deprecated; use nvidia.com/v1beta1",
        ),
    ),
    scale=Scale(),
)
