"""The README tells the truth about where things are, and stays short."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
PAGES += sorted([*(ROOT / "docs").rglob("*.md"), *(ROOT / "deploy").rglob("*.md")])


def test_the_readme_has_at_most_150_lines() -> None:
    assert len(README.splitlines()) <= 150


@pytest.mark.parametrize("path", re.findall(r"^\| [^|]+ \| `([^`]+)` \|$", README, re.MULTILINE))
def test_every_place_in_the_table_exists(path: str) -> None:
    assert (ROOT / path).exists()


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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_between_pages_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", page.read_text(encoding="utf-8"))
    for target, anchor in links:
        place = (page.parent / target) if target else page
        assert place.exists(), target
        assert not anchor or anchor in anchors(place), f"{target}#{anchor}"


def test_the_index_names_every_document() -> None:
    index = (ROOT / "docs/README.md").read_text(encoding="utf-8")
    pages = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - {"README.md"} <= set(re.findall(r"\]\(([^)#]+)\)", index))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_make_target_that_a_page_names_exists(page: Path) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", makefile, re.MULTILINE))
    named = re.findall(r"(?:`|^)make ([a-z0-9-]+)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert set(named) <= targets
