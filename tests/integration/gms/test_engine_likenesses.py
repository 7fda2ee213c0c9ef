"""The likenesses of engines have the names and signatures of the engines.

Needs the files of the engines: `pip download --no-deps vllm==0.33.0 sglang==0.5.23`, both unpacked
into the folder that SNAPBACK_ENGINE_SOURCES names. Nothing of them is imported.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.torch_site import LIKENESSES

VARIABLE = "SNAPBACK_ENGINE_SOURCES"

ELSEWHERE = {
    "vllm/config.py": [
        f"vllm/config/{name}.py" for name in ("load", "model", "parallel", "speculative", "vllm")
    ],
    "vllm/distributed/__init__.py": ["vllm/distributed/parallel_state.py"],
    "vllm/model_executor/model_loader/base_loader.py": [
        "vllm/model_executor/model_loader/base_loader.py",
        "vllm/model_executor/model_loader/default_loader.py",
    ],
    "vllm/v1/worker/gpu_worker.py": [
        "vllm/v1/worker/gpu_worker.py",
        "vllm/v1/worker/gpu/model_runner.py",
    ],
    "vllm/device_allocator/__init__.py": [
        "vllm/device_allocator/__init__.py",
        "vllm/device_allocator/cumem.py",
    ],
}
"""Where the engine has what a likeness has in one file."""
RENAMED = {"Allocator": "CuMemAllocator", "ModelRunner": "GPUModelRunner"}
OURS = {"Allocator.__init__", "ModelRunner.__init__"}
"""What only the likeness has."""
WIDER = {"ModelRunner.load_model": {"model"}}
"""Arguments of the engine that nothing here gives."""


def definitions(source: str) -> Iterator[tuple[str, list[str]]]:
    """Yield each function with its arguments, and each class with its fields."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, arguments(node)
        elif isinstance(node, ast.ClassDef):
            yield node.name, list(fields(node))
            for each in node.body:
                if isinstance(each, ast.FunctionDef):
                    yield f"{node.name}.{each.name}", arguments(each)


def fields(node: ast.ClassDef) -> Iterator[str]:
    for each in node.body:
        if (
            isinstance(each, ast.AnnAssign)
            and isinstance(each.target, ast.Name)
            # What a likeness counts for the tests is none of the engine's.
            and not ast.unparse(each.annotation).startswith("ClassVar")
        ):
            yield each.target.id


def arguments(node: ast.FunctionDef) -> list[str]:
    found = node.args
    return [each.arg for each in (*found.posonlyargs, *found.args, *found.kwonlyargs)]


@pytest.mark.parametrize(
    "path",
    [
        path.relative_to(LIKENESSES).as_posix()
        for engine in ("vllm", "sglang")
        for path in sorted((LIKENESSES / engine).rglob("*.py"))
        if path.stat().st_size and path.parent.name != engine
    ]
    + ["vllm/config.py"],
)
def test_each_name_stands_in_the_engine_with_its_arguments(path: str) -> None:
    folder = os.environ.get(VARIABLE, "")
    if not folder:
        pytest.skip(f"needs the files of the engines: set {VARIABLE}")
    real: dict[str, list[str]] = {}
    for each in ELSEWHERE.get(path, [path]):
        real |= dict(definitions((Path(folder) / each).read_text()))
    for name, given in definitions((LIKENESSES / path).read_text()):
        owner, dot, method = name.partition(".")
        known = f"{RENAMED.get(owner, owner)}{dot}{method}"
        if name in OURS:
            continue
        assert known in real, f"{path} has {name}, the engine does not"
        wanted = [each for each in real[known] if each not in WIDER.get(name, ())]
        if dot or name[0].islower():
            assert given == wanted, known
        else:
            assert set(given) <= set(wanted), known
