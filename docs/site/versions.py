"""The versions of the site: a folder each, a list that the selector reads, and a way in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

LATEST = "latest"
"""What is not released; the version that a reader gets who names none."""

_VERSION = re.compile(r"\d+(\.\d+){1,2}([-.]?[a-z]+\.?\d+)?")


def checked(name: str) -> str:
    """Return the name of a version. ValueError says what one looks like."""
    if name != LATEST and not _VERSION.fullmatch(name):
        raise ValueError(
            f"VERSION is {name!r}; it is a release as 0.1.0, or {LATEST} for what is not released"
        )
    return name


def listed(names: Iterable[str]) -> str:
    """Return `versions.json` of these versions in the form that mike gives it, newest first."""
    newest_first = sorted(names, key=_order, reverse=True)
    return json.dumps([{"version": n, "title": n, "aliases": []} for n in newest_first]) + "\n"


def entrance(name: str) -> str:
    """Return the page that leads to a version."""
    return (
        '<!doctype html>\n<html lang="en">\n<meta charset="utf-8">\n<title>Snapback</title>\n'
        f'<meta http-equiv="refresh" content="0; url={name}/index.html">\n'
        f'<a href="{name}/index.html">Documentation of Snapback</a>\n</html>\n'
    )


def default(names: Iterable[str]) -> str:
    """Return the version that a reader gets who names none."""
    return max(names, key=_order)


def _order(name: str) -> tuple[bool, list[int], bool, list[int]]:
    """Give what versions are ordered by: a candidate is before its release."""
    release = re.match(r"[\d.]*", name)
    end = release.end() if release else 0
    return name == LATEST, _numbers(name[:end]), end == len(name), _numbers(name[end:])


def _numbers(text: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", text)]
