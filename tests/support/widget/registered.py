"""Registers the kind in a test, as a line in snapshot_api.kinds would."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from docs.generate._texts import texts

from snapshot_api.kinds import KINDS
from snapshot_api.schema.texts import packed
from tests.support import widget


def register(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the kind, and the texts of its fields, which `make docs` packs for those of ours."""
    monkeypatch.setitem(KINDS, widget.KIND.name, widget.KIND)
    for path in Path(str(widget.__file__)).parent.glob("v1*.py"):
        for name, text in texts(path, f"{widget.__name__}.{path.stem}"):
            monkeypatch.setitem(packed(), name, text)


def document(version: str = "v1beta1", **spec: Any) -> dict[str, Any]:
    """Return a widget of a version, with these fields in its spec."""
    given = {"v1beta1": {"parts": [{"name": "a"}]}, "v1alpha1": {"partNames": ["a"]}}[version]
    return {
        "apiVersion": f"nvidia.com/{version}",
        "kind": "Widget",
        "metadata": {"name": "one"},
        "spec": given | spec,
    }
