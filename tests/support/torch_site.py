"""Where PyTorch is for the tests: in this environment, or in the folder that SNAPBACK_TORCH names.

It is large and no part of what is locked; `make test-torch` fetches it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

LIKENESSES = Path(__file__).with_name("engines")
VARIABLE = "SNAPBACK_TORCH"


def path_with_torch() -> list[str]:
    """Return `sys.path` with the folder at its end, so that what is locked comes first."""
    folder = os.environ.get(VARIABLE)
    return [*sys.path, folder] if folder else list(sys.path)


def torch_for(monkeypatch: pytest.MonkeyPatch, *folders: Path) -> Any:
    """Return PyTorch, of a path that begins with these folders; skips where there is none."""
    import pytest

    monkeypatch.setattr(sys, "path", [*map(str, folders), *path_with_torch()])
    return pytest.importorskip("torch", reason=f"needs PyTorch: make test-torch sets {VARIABLE}")


def likeness_of(engine: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Give PyTorch, and let the likeness of an engine be imported; for a fixture."""
    from snapback_client import engines

    yield torch_for(monkeypatch, LIKENESSES)
    engines.close_memory()
    for name in list(sys.modules):
        if name.split(".")[0] in (engine, "engine_model") or name == f"snapback_client.{engine}":
            del sys.modules[name]
