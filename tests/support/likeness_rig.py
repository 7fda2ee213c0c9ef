"""Lets a test, and every process that it starts, find the likeness of the CUDA driver."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

FOLDER = Path(__file__).parent / "likeness"


def likeness(monkeypatch: pytest.MonkeyPatch, options: str = "") -> Iterator[ModuleType]:
    """Give the likeness as `cuda.bindings.driver`, fresh; for a fixture."""
    monkeypatch.syspath_prepend(FOLDER)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setenv("CUDA_LIKENESS", options)
    _forget()
    yield importlib.import_module("cuda.bindings.driver")
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "cuda"]:
        del sys.modules[name]
