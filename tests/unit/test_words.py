"""One word for one thing: the glossary holds, in the code and in the documents."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "docs/glossary.md"
READ = ("shared/src/**/*.py", "services/*/src/**/*.py", "docs/**/*.md", "deploy/**/*", "*.md")
RELEASED = {
    "shared/src/snapshot_shared/api.py": "Verdict = Literal",
    "services/operator/src/snapshot_operator/core/inventory.py": '"tell"',
    "services/snapshot-agent/src/snapshot_agent/handlers/inventory.py": '"tell"',
    "docs/messages.md": "`tell`",
}
"""Lines with a value of a message, which stays as it was released."""


def rows(section: str) -> list[list[str]]:
    """Return the cells of a table of the glossary, without its head."""
    lines = [line for line in section.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def sections() -> tuple[str, str]:
    used, _, unused = GLOSSARY.read_text().partition("## Words that are not used")
    return used, unused


def words_of(cell: str) -> list[str]:
    return [word.strip() for word in cell.split(",")]


def test_each_word_of_the_glossary_has_one_meaning() -> None:
    counted = Counter(word for row in rows(sections()[0]) for word in words_of(row[0]))
    assert [word for word, count in counted.items() if count > 1] == []


def test_no_word_stands_anywhere_that_the_glossary_replaces() -> None:
    unused = [word for row in rows(sections()[1]) for word in words_of(row[0])]
    assert len(unused) > 10
    pattern = re.compile(rf"\b({'|'.join(unused)})\b", re.IGNORECASE)
    found = []
    for path in sorted({path for glob in READ for path in ROOT.glob(glob)} - {GLOSSARY}):
        if not path.is_file() or path.suffix in (".png", ".pyc", ".whl"):
            continue
        name = str(path.relative_to(ROOT))
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if pattern.search(line) and RELEASED.get(name, "\n") not in line:
                found.append(f"{name}:{number}: {line.strip()}")
    assert found == []
