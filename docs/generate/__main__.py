"""Writes every generated page (`make docs`); with --check says which differ, and exits 1."""

from __future__ import annotations

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from pathlib import Path

from docs import generate

DOCS = Path(__file__).parent.parent


def pages() -> Iterator[tuple[Path, str]]:
    """Give each generated page and what it has to say."""
    for found in pkgutil.iter_modules(generate.__path__):
        if not found.name.startswith("_"):
            module = importlib.import_module(f"docs.generate.{found.name}")
            yield DOCS / module.PAGE, module.page()


def main(words: list[str]) -> int:
    """Write or compare all pages."""
    stale = [
        (path, text) for path, text in pages() if not path.exists() or path.read_text() != text
    ]
    if words == ["--check"]:
        for path, _ in stale:
            sys.stderr.write(f"docs/{path.name} is not what the code says; run: make docs\n")
        return 1 if stale else 0
    for path, text in stale:
        path.write_text(text)
        print(f"wrote docs/{path.name}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except LookupError as error:
        sys.exit(f"docs: {error.args[0]}")
