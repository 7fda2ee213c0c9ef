"""The texts of all fields, for the definitions of our kinds and the page of all messages."""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

from snapshot_api.schema.texts import PACKED

ROOT = Path(__file__).parents[2]
SOURCES = (
    *sorted((ROOT / "shared/src").rglob("*.py")),
    # Where `Failure` is defined, which objects and reports hold.
    ROOT / "services/gms-client/src/snapback_client/errors.py",
)


def files() -> Iterator[tuple[str, str]]:
    """Yield the path of the packed texts, from the root of the repository, and their JSON."""
    found = {name: text for path in SOURCES for name, text in texts(path, _module(path))}
    packed = json.dumps(found, indent=0, sort_keys=True, ensure_ascii=False)
    yield f"shared/src/snapshot_api/schema/{PACKED}", f"{packed}\n"


def _module(path: Path) -> str:
    return ".".join(path.parts[path.parts.index("src") + 1 :]).removesuffix(".py")


def texts(path: Path, module: str) -> Iterator[tuple[str, str]]:
    """Yield the name of each field of a struct of a module with a string below it, and the text."""
    for struct in ast.parse(path.read_text("utf-8")).body:
        if not isinstance(struct, ast.ClassDef):
            continue
        for field, below in pairwise(struct.body):
            match field, below:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    yield f"{module}.{struct.name}.{name}", " ".join(text.split())
