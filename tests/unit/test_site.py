"""What the site is rendered from: where pages are, where their links lead, and its versions."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from docs import contents
from docs.contents import DOCS, ROOT, Page
from docs.generate import index
from docs.site import staging, versions

from tests.unit.tables import each

PLACES = {page.file: page.place for page in contents.pages()}


def moved(text: str, page: str = "docs/how-to/new.md", place: str = "how-to/new.md") -> str:
    return staging.staged(Page(ROOT / page, place, "New"), text, PLACES).text


def in_navigation(entries: Any) -> Iterator[str]:
    if isinstance(entries, str):
        yield entries
    elif isinstance(entries, dict):
        for inner in entries.values():
            yield from in_navigation(inner)
    else:
        for inner in entries:
            yield from in_navigation(inner)


def test_the_map_and_the_navigation_have_the_same_pages() -> None:
    navigation = list(in_navigation(staging.navigation(contents.contents())))
    assert sorted(navigation) == sorted(PLACES.values())
    written = index.page()
    for page in contents.pages():
        if page.place != "index.md":
            assert f"- [{page.title}](" in written


def test_every_document_has_one_place_or_is_refused_by_its_name() -> None:
    assert set(DOCS.rglob("*.md")) <= set(PLACES)
    with pytest.raises(LookupError, match=r"docs/lost\.md has no place.*docs/contents\.py"):
        contents.check([], {DOCS / "lost.md"})
    with pytest.raises(LookupError, match=r"docs/concepts\.md is twice"):
        contents.check([DOCS / "concepts.md", DOCS / "concepts.md"], set())


@each(
    ("link", "there"),
    [
        ("[a](../concepts.md)", "[a](../concepts.md)"),
        ("[a](../concepts.md#parts)", "[a](../concepts.md#parts)"),
        ("[a](#below)", "[a](#below)"),
        ("[a](../../README.md)", "[a](../overview.md)"),
        ("[a](../../deploy/helm/snapback/README.md)", "[a](../chart.md)"),
        ("![a](../images/page-busy.png)", "![a](../images/page-busy.png)"),
        ("[a](../../Makefile)", "[a](../source/Makefile.md)"),
        ("[a](../../deploy/observability)", "[a](../source/deploy/observability/index.md)"),
        ("[a](https://nats.io/x)", "[a](https://nats.io/x)"),
        ("[a](mailto:a@b.example)", "[a](mailto:a@b.example)"),
    ],
)
def test_a_link_leads_to_the_same_place_in_the_site(link: str, there: str) -> None:
    assert moved(f"See {link}.\n") == f"See {there}.\n"


def test_code_is_left_as_it_is_but_for_an_escape_that_only_a_repository_needs() -> None:
    for fence in ("```", "~~~", "````"):
        text = f"{fence}sh\necho '[a](nowhere)'\n{fence}\n"
        assert moved(text) == text
    assert moved(r"| `a\|b` | c\|d |") == r"| `a|b` | c\|d |"
    assert moved(r"`a\|b` in a line") == r"`a\|b` in a line"


@pytest.mark.parametrize("target", ["../nowhere.md", "../../services/nothing.py", "../../../etc"])
def test_a_link_to_nothing_names_the_page_and_the_target(target: str) -> None:
    with pytest.raises(LookupError, match=r"docs/how-to/new\.md links to " + target):
        moved(f"[a]({target})\n")


def test_versions_are_listed_newest_first_and_what_is_unreleased_before_all() -> None:
    names = ["0.9.0", "0.10.0", "latest", "0.10.0rc2", "0.10.0rc10", "0.2.1"]
    listed = ["latest", "0.10.0", "0.10.0rc10", "0.10.0rc2", "0.9.0", "0.2.1"]
    # The form that the selector reads.
    shown = [{"version": name, "title": name, "aliases": []} for name in listed]
    assert json.loads(versions.listed(names)) == shown
    # A reader who names none gets the newest.
    for some, chosen in ((["0.1.0", "latest"], "latest"), (["0.9.0", "0.10.0"], "0.10.0")):
        assert versions.default(some) == chosen
        assert f'content="0; url={chosen}/index.html"' in versions.entrance(chosen)


@each("name", ["", "..", "0.1/../..", "v0.1.0", "main", ".new-1"])
def test_a_name_that_is_no_version_is_refused_with_what_one_looks_like(name: str) -> None:
    with pytest.raises(ValueError, match=r"a release as 0\.1\.0"):
        versions.checked(name)
