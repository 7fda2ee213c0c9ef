"""The map of docs/: every page once, with its title and what it says of itself."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from docs.contents import DOCS, HOME, Page, contents

PAGE = HOME.removeprefix("docs/")

INTRO = """\
# Documentation

Snapback captures a GPU inference worker when it is warm, and starts every later one from the
capture: in seconds, on the same node or on another one.

- **New here?** The [tutorial](tutorial.md) leads from a clone to a worker of your own that is
  captured and restored. To see it work first: `make demo`, or the commands of
  [the front page](../README.md).
- **Something to do?** The how-tos have one task each. Their commands are typed at the root of a
  checkout, after `make setup`, `export PATH=$PWD/.venv/bin:$PATH` and `snapshotctl up`, unless the
  page says otherwise.
- **On call?** Each alert has [a section](runbooks.md), each reason of a failure
  [another](troubleshooting.md), and [ten questions](inspect.md) have answers.
- **Why it is so** is in [Concepts](concepts.md), [Architecture](architecture.md) and the decisions.

`make site` builds these pages as a site with search
([how](../CONTRIBUTING.md#write-a-document)). This list is made by `make docs` from
`docs/contents.py`.
"""


def page() -> str:
    """Write the page."""
    return "\n".join([INTRO, *_lines()])


def _lines() -> Iterator[str]:
    for tab, headings in contents().items():
        yield f"## {tab}\n"
        for heading in headings:
            if heading.title:
                yield f"### {heading.title}\n"
            yield from map(_line, heading.pages)
            yield ""


def _line(page: Page) -> str:
    link = f"- [{page.title}]({os.path.relpath(page.file, DOCS)})"
    if page.file.parent.name == "adr":
        return link
    return f"{link}. {_first_sentence(page.file)}"


def _first_sentence(path: Path) -> str:
    """Give the first sentence below the title, without links that count from another folder."""
    text = path.read_text(encoding="utf-8").replace("**", "")
    body = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL).partition("\n")[2]
    # What a page is made from says nothing of what it has.
    paragraph = next(
        part for part in re.split(r"\n\s*\n", body) if part.strip() and part.lstrip()[0] not in "#*"
    )
    sentence = re.match(r"(.+?[.?!])(\s|$)", " ".join(paragraph.split()))
    found = sentence[1] if sentence else " ".join(paragraph.split())
    return re.sub(r"\[([^]]+)\]\([^)]+\)", r"\1", found)
