"""Writes every generated page and file (`make docs`); with --check names those that differ."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

from docs import generate
from docs.generate import _texts

ROOT = Path(__file__).parents[2]


def pages() -> Iterator[tuple[Path, str]]:
    """Yield the path of each generated page of docs/, and of each other file, with its text.

    The first has the texts of fields, of which others are made. So write it before the next.
    """
    yield from ((ROOT / path, text) for path, text in _texts.files())
    for found in pkgutil.iter_modules(generate.__path__):
        if found.name.startswith("_"):
            continue
        module = importlib.import_module(f"docs.generate.{found.name}")
        if hasattr(module, "files"):
            yield from ((ROOT / path, text) for path, text in module.files())
        else:
            yield ROOT / "docs" / module.PAGE, module.page()


def main(words: list[str]) -> int:
    """Write or compare all pages and files."""
    is_stale = False
    for path, text in pages():
        if path.exists() and path.read_text() == text:
            continue
        is_stale, name = True, path.relative_to(ROOT)
        if words == ["--check"]:
            sys.stderr.write(f"{name} is not what the code says; run: make docs\n")
        else:
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            print(f"wrote {name}")
    return 1 if is_stale and words == ["--check"] else 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LookupError as error:
        sys.exit(f"docs: {error.args[0]}")
