"""Lays out what the site is rendered from: pages in their places, and the source that they link to.

The pages link to each other and to files of the tree as they do in a repository. In the site a page
may have another place, and a file of the tree is a page that shows its text, so that the site needs
no repository beside it.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from docs.contents import DOCS, ROOT, Heading, Page

SOURCE = "source"
"""The folder of the site with files of the tree."""

_LINK = re.compile(r"(?P<before>\]\()(?P<target>[^)\s#]+)(?P<anchor>#[^)\s]*)?(?P<after>\))")
_CODE = re.compile(r"`[^`]*`")
_FENCE = re.compile(r"^ *(```+|~~~+)")
_ELSEWHERE = re.compile(r"^[a-z][a-z0-9+.-]*:")
_LANGUAGES = {".py": "python", ".yaml": "yaml", ".yml": "yaml", ".json": "json", ".md": "markdown"}


class Staged(NamedTuple):
    """The text of a page as the site has it, and the files and folders of the tree it links to."""

    text: str
    links: tuple[Path, ...]


def staged(page: Page, text: str, places: Mapping[Path, str]) -> Staged:
    """Rewrite the links in the text of a page for the site.

    `places` has the place of each page by its file. LookupError names a link to what is not in the
    tree.
    """
    links: list[Path] = []

    def moved(found: re.Match[str]) -> str:
        target = found["target"]
        if _ELSEWHERE.match(target):
            return found[0]
        path = Path(os.path.normpath(page.file.parent / target))
        if not path.is_relative_to(ROOT) or not path.exists():
            name = page.file.relative_to(ROOT)
            raise LookupError(f"{name} links to {target}, and there is no such file; mend the link")
        place = places.get(path)
        if place is None:
            links.append(path)
            place = place_of(path)
        return f"{found['before']}{_between(page.place, place)}{found['anchor'] or ''})"

    lines = [
        line if is_code else _unescaped(_LINK.sub(moved, line)) for line, is_code in _lines(text)
    ]
    return Staged("".join(lines), tuple(links))


def place_of(path: Path) -> str:
    """Return where the site has a file or folder of the tree that is not a page."""
    if path.is_relative_to(DOCS) and path.is_file():
        return path.relative_to(DOCS).as_posix()
    name = path.relative_to(ROOT).as_posix()
    return f"{SOURCE}/{name}/index.md" if path.is_dir() else f"{SOURCE}/{name}.md"


def write(pages: Iterable[Page], into: Path) -> None:
    """Write all pages, and whatever they link to, below a folder."""
    pages = list(pages)
    places = {page.file: page.place for page in pages}
    linked: set[Path] = set()
    for page in pages:
        text, links = staged(page, page.file.read_text(encoding="utf-8"), places)
        linked.update(links)
        # The first page is a map itself.
        head = "---\nhide: [navigation]\n---\n\n" if page.place == "index.md" else ""
        _write(into / page.place, head + text)
    for path in sorted(linked):
        for each in [path, *(_files(path) if path.is_dir() else ())]:
            place = into / place_of(each)
            if place.suffix == ".md":
                _write(place, _shown(each))
            else:
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(each, place)


def navigation(contents: Mapping[str, Iterable[Heading]]) -> list[dict[str, Any]]:
    """Return the navigation of the site, as its configuration has it."""
    tabs: list[dict[str, Any]] = [{"Home": "index.md"}]
    for tab, headings in contents.items():
        entries: list[dict[str, Any]] = []
        for heading in headings:
            pages = [{page.title: page.place} for page in heading.pages]
            entries += [{heading.title: pages}] if heading.title else pages
        tabs.append({tab: entries})
    return tabs


def _lines(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line, and whether it is of a block of code."""
    fence = ""
    for line in text.splitlines(keepends=True):
        found = _FENCE.match(line)
        if found and not fence:
            fence = found[1]
            yield line, True
        elif found and line.strip() == fence:
            fence = ""
            yield line, True
        else:
            yield line, bool(fence)


def _unescaped(line: str) -> str:
    """Take the escapes from bars in code of a table: only a repository needs them there."""
    if not line.startswith("|"):
        return line
    return _CODE.sub(lambda found: found[0].replace("\\|", "|"), line)


def _between(page: str, place: str) -> str:
    return os.path.relpath(place, PurePosixPath(page).parent)


def _shown(path: Path) -> str:
    """Return the page that shows a file, or the files of a folder; the search leaves it out."""
    name = path.relative_to(ROOT).as_posix()
    matter = "---\nsearch: {exclude: true}\nhide: [navigation]\n---\n\n"
    head = f"{matter}# {path.name}\n\n`{name}`\n\n"
    if path.is_dir():
        return head + "".join(
            f"- [{each.name}]({_between(place_of(path), place_of(each))})\n"
            for each in _files(path)
        )
    text = path.read_text(encoding="utf-8")
    fence = "~" * (3 + max((len(run) for run in re.findall(r"~+", text)), default=0))
    return f"{head}{fence} {_LANGUAGES.get(path.suffix, 'text')}\n{text}{fence}\n"


def _files(folder: Path) -> list[Path]:
    return sorted(each for each in folder.iterdir() if each.is_file())


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
