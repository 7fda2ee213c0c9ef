"""Every page of the documentation, in its place: the map of docs/ and the site are made from it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
HOME = "docs/README.md"

OUTSIDE = {
    "README.md": "overview.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "deploy/examples/README.md": "examples.md",
    "deploy/helm/snapback/README.md": "chart.md",
}
"""Pages that are not in docs/, and where the site has them."""

TABLE: dict[str, dict[str, tuple[str, ...]]] = {
    "Tutorial": {"": ("tutorial", "kubernetes", "break-it")},
    "How-to": {
        "Install": (
            "docker",
            "how-to/install-from-wheels",
            "how-to/run-on-several-machines",
            "how-to/run-two-operators",
            "how-to/run-three-nats-servers",
            "how-to/share-a-cluster",
            "how-to/accept-on-a-gpu",
        ),
        "Workers and engines": (
            "how-to/run-your-own-worker",
            "how-to/run-an-engine-as-it-is",
            "how-to/run-vllm",
            "how-to/run-sglang",
            "how-to/share-a-pytorch-model",
            "how-to/after-a-restore",
        ),
        "Captures and restores": (
            "how-to/capture-a-running-pod",
            "how-to/capture-a-plain-process",
            "how-to/restore-on-another-node",
            "how-to/drain-a-node",
        ),
        "Artifacts": (
            "how-to/keep-less",
            "how-to/keep-and-import",
            "how-to/use-several-disks",
            "how-to/keep-artifacts-in-object-storage",
            "how-to/verify-and-quarantine",
            "how-to/encrypt-and-sign",
        ),
        "On call": ("runbooks", "inspect", "how-to/export-traces", "how-to/break-it"),
    },
    "Reference": {
        "Interfaces": (
            "snapshotctl",
            "client",
            "kubernetes-api",
            "deploy/helm/snapback/README",
            "deploy/examples/README",
            "page",
        ),
        "Facts": (
            "troubleshooting",
            "metrics",
            "messages",
            "state-machines",
            "compatibility",
            "benchmarks",
            "gpu",
            "glossary",
        ),
    },
    "Explanation": {
        "": ("concepts", "architecture", "proofs"),
        "Decisions": ("adr/*",),
        "Project": ("README", "CONTRIBUTING", "CHANGELOG"),
    },
}
"""Pages by tab and by heading; a name stands for a page of docs/ unless OUTSIDE has it."""


class Page(NamedTuple):
    """A page: its file, where the site has it, and its title."""

    file: Path
    place: str
    title: str


class Heading(NamedTuple):
    """Pages with a heading of their own, or with none where it is empty."""

    title: str
    pages: tuple[Page, ...]


def contents() -> dict[str, list[Heading]]:
    """Return the headings of each tab. LookupError names a page that is nowhere, or not there."""
    found = {
        tab: [Heading(title, tuple(_pages(names))) for title, names in headings.items()]
        for tab, headings in TABLE.items()
    }
    placed = [page.file for headings in found.values() for each in headings for page in each.pages]
    there = {*DOCS.rglob("*.md"), *(ROOT / name for name in OUTSIDE)} - {ROOT / HOME}
    check(placed, there)
    return found


def check(placed: list[Path], there: set[Path]) -> None:
    """Raise LookupError for a page that has no place, and for one that has two."""
    for path in sorted(there - set(placed)):
        raise LookupError(f"{path.relative_to(ROOT)} has no place; give it one in docs/contents.py")
    for path in placed:
        if placed.count(path) > 1:
            raise LookupError(f"{path.relative_to(ROOT)} is twice in docs/contents.py")


def pages() -> Iterator[Page]:
    """Return every page once, the first page of the site before all others."""
    yield Page(ROOT / HOME, "index.md", title(ROOT / HOME))
    for headings in contents().values():
        for each in headings:
            yield from each.pages


def title(path: Path) -> str:
    """Return the title of a page as it stands in lists: a decision has its number."""
    name = path.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
    if path.parent.name != "adr":
        return name
    return f"{path.name[:4]} {name}"


def _pages(names: tuple[str, ...]) -> Iterator[Page]:
    for name in names:
        if "*" in name:
            files = sorted(DOCS.glob(f"{name}.md"))
        elif f"{name}.md" in OUTSIDE:
            files = [ROOT / f"{name}.md"]
        else:
            files = [DOCS / f"{name}.md"]
        for file in files:
            if not file.exists():
                raise LookupError(f"docs/contents.py names {name}, and there is no such page")
            inside = OUTSIDE.get(str(file.relative_to(ROOT)))
            yield Page(file, inside or str(file.relative_to(DOCS)), title(file))
