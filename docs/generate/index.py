"""The index of docs/: every page once, with its title and what it says of itself."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

PAGE = "README.md"
DOCS = Path(__file__).parent.parent

START = ("concepts", "architecture", "glossary", "break-it", "proofs")
INTRO = """\
# Documents

To see it work: `make demo`, or the commands of [the front page](../README.md). To write code:
[CONTRIBUTING](../CONTRIBUTING.md). This list is made by `make docs`.
"""


def page() -> str:
    """Write the page."""
    start = [path for name in START if (path := DOCS / f"{name}.md").exists()]
    others = [path for path in sorted(DOCS.glob("*.md")) if path not in start]
    groups = (
        ("To understand", start),
        ("To do", sorted(DOCS.glob("how-to/*.md"))),
        ("To look up", [path for path in others if path.name != PAGE]),
        ("Why it is so", sorted(DOCS.glob("adr/*.md"))),
    )
    return "\n".join([INTRO, *(line for title, paths in groups for line in _group(title, paths))])


def _group(title: str, paths: list[Path]) -> Iterator[str]:
    yield f"## {title}\n"
    for path in paths:
        text = path.read_text(encoding="utf-8")
        name = text.partition("\n")[0].removeprefix("# ")
        number = f"{path.name[:4]} " if path.parent.name == "adr" else ""
        about = "" if number else f". {_first_sentence(text)}"
        yield f"- [{number}{name}]({path.relative_to(DOCS)}){about}"
    yield ""


def _first_sentence(text: str) -> str:
    """Give the first sentence below the title, without links that count from another folder."""
    body = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).partition("\n")[2]
    paragraph = next(part for part in re.split(r"\n\s*\n", body) if part.strip())
    sentence = re.match(r"(.+?[.?!])(\s|$)", " ".join(paragraph.split()))
    found = sentence[1] if sentence else " ".join(paragraph.split())
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", found)
