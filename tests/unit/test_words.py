"""The documents tell the truth about where things are, and have one word for one thing."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])


def test_the_readme_is_short_and_every_place_in_its_table_exists() -> None:
    assert len(README.splitlines()) <= 150
    places = re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", README, re.MULTILINE)
    assert places
    assert [place for place in places if not (ROOT / place).exists()] == []


@cache
def anchors(page: Path) -> set[str]:
    """Give the names that the headings of a page have as the ends of links."""
    text = re.sub(
        r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL
    )
    found: set[str] = set()
    for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE):
        slug = re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        number = 0
        while (name := f"{slug}-{number}" if number else slug) in found:
            number += 1
        found.add(name)
    return found


LINK = re.compile(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)")


def test_every_link_between_pages_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8")):
            place = (page.parent / target) if target else page
            if not place.exists() or (anchor and anchor not in anchors(place)):
                wrong.append(f"{page.relative_to(ROOT)}: {target}#{anchor}")
    assert wrong == []


def test_the_index_names_every_document() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"README.md"} <= set(re.findall(r"\]\(([^)#]+)\)", index))


def test_every_make_target_that_a_page_names_exists() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    pattern = re.compile(r"(?:`|^)make ([a-z0-9-]+)", re.MULTILINE)
    wrong = {
        f"{page.relative_to(ROOT)}: make {target}"
        for page in PAGES
        for target in pattern.findall(page.read_text(encoding="utf-8"))
        if target not in targets
    }
    assert wrong == set()


GLOSSARY = ROOT / "docs/glossary.md"
READ = ("shared/src/**/*.py", "services/*/src/**/*.py", "docs/**/*.md", "deploy/**/*", "*.md")
RELEASED = {
    "shared/src/snapshot_shared/api.py": "Verdict = Literal",
    "services/operator/src/snapshot_operator/core/inventory.py": '"tell"',
    "services/snapshot-agent/src/snapshot_agent/handlers/inventory.py": '"tell"',
    "docs/messages.md": "`tell`",
    "services/gms-client/src/snapback_client/state_files.py": "tell(",
}
"""Lines with a value of a message, which stays as it was released, or with a method of Python."""


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
