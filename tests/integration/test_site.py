"""The site as it is built: whole, found by its search, and needing nothing from elsewhere."""

from __future__ import annotations

import functools
import http.server
import json
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
import yaml
from docs import contents
from docs.site import __main__ as site

from tests.support import browser

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("site"),
    pytest.mark.skipif(
        not (site.TOOLS / ".installed").exists(), reason="no generator here: run make site"
    ),
]
BUILT = ("latest", "0.1.0")
PAGES = list(contents.pages())
_CODE = ("code", "pre", "script", "style")


class Names(HTMLParser):
    """What a page has: ids, links, and what a browser fetches to show it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.links: list[str] = []
        self.fetched: list[str] = []
        self.prose = ""
        self._code = 0
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._code += tag in _CODE
        given = {name: value or "" for name, value in attrs}
        self.ids |= {given[name] for name in ("id", "name") if name in given}
        if tag == "a" and "href" in given:
            self.links.append(given["href"])
        elif tag == "link":
            self.fetched.append(given["href"])
        elif "src" in given:
            self.fetched.append(given["src"])

    def handle_endtag(self, tag: str) -> None:
        self._code -= tag in _CODE

    def handle_data(self, data: str) -> None:
        self.prose += "" if self._code else data


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    into = tmp_path_factory.mktemp("site")
    for name in BUILT:
        done = subprocess.run(
            [sys.executable, "-m", "docs.site", "--version", name, "--into", str(into)],
            cwd=contents.ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return into


@pytest.fixture(scope="module")
def names(root: Path) -> dict[Path, Names]:
    found = (root / "latest").rglob("*.html")
    return {path: Names(path.read_text(encoding="utf-8")) for path in found}


def built(root: Path, place: str) -> Path:
    return root / "latest" / Path(place).with_suffix(".html")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.place)
def test_every_page_is_there_with_its_headings(root: Path, page: contents.Page) -> None:
    text = built(root, page.place).read_text(encoding="utf-8")
    name = page.file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    assert f">{name.replace('`', '')}<" in re.sub(r"</?code>", "", text)


def test_what_is_a_table_list_or_block_in_a_repository_is_one_in_the_site(
    root: Path, names: dict[Path, Names]
) -> None:
    for page in PAGES:
        prose = names[built(root, page.place)].prose
        assert not re.findall(r"\|--|```|\*\*|\]\(|^- |<!--", prose, re.MULTILINE), page.place


def test_the_search_finds_every_page_by_its_words(root: Path) -> None:
    index = json.loads((root / "latest/search/search_index.json").read_text())["docs"]
    words: dict[str, str] = {}
    for each in index:
        place = each["location"].partition("#")[0] or "index.html"
        words[place] = words.get(place, "") + each["title"] + each["text"]
    for page in PAGES:
        place = str(Path(page.place).with_suffix(".html"))
        assert len(re.findall(r"\w{4,}", words[place])) > 20, place
    assert not [place for place in words if place.startswith("source/")]


def test_nothing_is_fetched_from_elsewhere(names: dict[Path, Names], root: Path) -> None:
    for path, found in names.items():
        assert [url for url in found.fetched if urlsplit(url).netloc] == [], path
    styles = list((root / "latest").rglob("*.css"))
    assert styles
    for path in styles:
        text = path.read_text(encoding="utf-8")
        assert not re.findall(r"url\(['\"]?(?:https?:)?//[^)]*\)|@import[^;]*//[^;]*", text), path


def test_every_link_within_the_site_leads_to_a_page_and_a_heading(names: dict[Path, Names]) -> None:
    for path, found in names.items():
        if path.name == "404.html":
            continue
        for link in found.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc:
                continue
            target = path.parent / unquote(parts.path) if parts.path else path
            target = (target / "index.html" if target.is_dir() else target).resolve()
            assert target.exists(), f"{path}: {link}"
            if parts.fragment and target.suffix == ".html":
                anchors = names[target].ids
                assert unquote(parts.fragment) in anchors, f"{path}: {link}"


def test_every_runbook_url_leads_to_a_section(root: Path, names: dict[Path, Names]) -> None:
    alerts = yaml.safe_load((contents.ROOT / "deploy/observability/alerts.yml").read_text())
    rules = [rule for group in alerts["groups"] for rule in group["rules"]]
    assert rules
    for rule in rules:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        path = built(root, str(Path(page).relative_to("docs")))
        assert anchor in names[path].ids, rule["alert"]


def test_a_page_with_a_diagram_has_the_program_that_draws_it_before_that_of_the_theme(
    names: dict[Path, Names],
) -> None:
    drawn = 0
    for path, found in names.items():
        own = [url for url in found.fetched if url.endswith("mermaid.min.js")]
        assert bool(own) == ('class="mermaid"' in path.read_text(encoding="utf-8")), path
        if own:
            drawn += 1
            theme = next(url for url in found.fetched if "/bundle." in url)
            assert found.fetched.index(own[0]) < found.fetched.index(theme)
            assert (path.parent / own[0]).exists()
    assert drawn >= 2


def test_the_selector_lists_both_versions_and_the_unreleased_one_is_the_default(root: Path) -> None:
    listed = json.loads((root / "versions.json").read_text())
    assert [each["version"] for each in listed] == list(BUILT)
    assert 'url=latest/index.html"' in (root / "index.html").read_text()
    assert sorted(each.name for each in root.iterdir()) == [
        "0.1.0",
        "index.html",
        "latest",
        "versions.json",
    ]


@pytest.mark.parametrize(
    ("flaw", "named"),
    [
        ("[a](nowhere.md)", "nowhere.md"),
        ("[a](concepts.md#no-such-heading)", "#no-such-heading"),
        (None, "extra.md"),
    ],
)
def test_a_flaw_fails_the_build_and_is_named(
    flaw: str | None, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site.staging.write(contents.pages(), tmp_path / "pages")
    page = tmp_path / "pages" / ("tutorial.md" if flaw else "extra.md")
    with page.open("a", encoding="utf-8") as file:
        file.write(f"\n{flaw or 'A page that is nowhere.'}\n")
    assert site.render(tmp_path) is None
    assert named in capsys.readouterr().err


@pytest.fixture(scope="module")
def address(root: Path) -> Iterator[str]:
    quiet = functools.partial(_Quiet, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), quiet) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


class _Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Write nothing."""


@pytest.mark.skipif(bool(browser.missing()), reason=browser.missing())
def test_a_browser_finds_pages_chooses_versions_and_draws_with_nothing_from_elsewhere(
    address: str, tmp_path: Path
) -> None:
    with browser.browser(tmp_path, dark=True) as driver:
        driver.get(address)
        browser.until(driver, "return location.pathname.startsWith('/latest/')", "latest")
        browser.until(
            driver,
            "return [...document.querySelectorAll('.md-version__link')]"
            ".map(link => link.textContent.trim()).join() === 'latest,0.1.0'",
            "both versions",
        )
        driver.get(f"{address}/latest/index.html?q=quarantine")
        browser.until(
            driver,
            "return [...document.querySelectorAll('.md-search-result__link')]"
            ".some(link => link.href.includes('how-to/verify-and-quarantine.html'))",
            "the page on quarantine among the results",
        )
        driver.get(f"{address}/latest/state-machines.html")
        browser.until(
            driver,
            "const drawn = document.querySelectorAll('div.mermaid');"
            "return drawn.length === 5 && !document.querySelector('pre.mermaid')",
            "five diagrams",
        )
        fetched = driver.execute_script(
            "return performance.getEntriesByType('resource').map(each => each.name)"
        )
        assert fetched
        assert [url for url in fetched if not url.startswith(address)] == []
