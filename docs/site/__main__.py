"""Builds the site: `python -m docs.site [--version 0.1.0] [--into site]` (`make site`).

What is rendered is laid out in a temporary folder; a version that cannot be built leaves the one
that was built before.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import yaml
from docs import contents
from docs.site import staging, versions

TOOLS = contents.ROOT / ".mkdocs"
HERE = Path(__file__).parent
MERMAID = "mermaidx/assets/mermaid.js"
MERMAID_SHA256 = "74d7c46dabca328c2294733910a8aa1ed0c37451776e8d5295da38a2b758fb9b"
"""Of `dist/mermaid.min.js` in mermaid 11.16.0, as its own project publishes it."""


def main(words: list[str]) -> int:
    """Build one version beside those that are there."""
    parser = argparse.ArgumentParser(prog="make site", description="Build the documentation.")
    parser.add_argument("--version", default=versions.LATEST)
    parser.add_argument("--into", type=Path, default=contents.ROOT / "site")
    given = parser.parse_args(words)
    name = versions.checked(given.version)
    if not (TOOLS / "mkdocs").is_dir():
        raise LookupError("the generator is not installed; run: make site")
    given.into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=given.into, prefix=".new-") as folder:
        built = build(Path(folder))
        if built is None:
            return 1
        shutil.rmtree(given.into / name, ignore_errors=True)
        built.rename(given.into / name)
    there = [each.parent.name for each in given.into.glob("[!.]*/index.html")]
    (given.into / "versions.json").write_text(versions.listed(there), encoding="utf-8")
    entrance = versions.entrance(versions.default(there))
    (given.into / "index.html").write_text(entrance, encoding="utf-8")
    print(f"{given.into / name} has {len(list(contents.pages()))} pages")
    return 0


def build(folder: Path) -> Path | None:
    """Build into a folder of this one and return it; None when the generator found a flaw."""
    pages = folder / "pages"
    staging.write(contents.pages(), pages)
    (pages / "assets").mkdir()
    shutil.copyfile(HERE / "snapback.css", pages / "assets/snapback.css")
    (pages / "assets/mermaid.min.js").write_bytes(mermaid())
    return render(folder)


def render(folder: Path) -> Path | None:
    """Render the folder `pages` of this one; return where, or None and print each flaw.

    A link that leads nowhere, an anchor that is missing, and a page that is not in the navigation
    are flaws.
    """
    built = folder / "built"
    configuration = {
        "INHERIT": str(HERE / "mkdocs.yml"),
        "docs_dir": str(folder / "pages"),
        "site_dir": str(built),
        "theme": {"custom_dir": str(HERE / "theme")},
        "nav": staging.navigation(contents.contents()),
        "not_in_nav": f"/{staging.SOURCE}/",
    }
    (folder / "mkdocs.yml").write_text(yaml.safe_dump(configuration), encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict"],
        cwd=folder,
        # The theme prints when it ends (docs/adr/0045).
        env={**os.environ, "PYTHONPATH": str(TOOLS), "NO_MKDOCS_2_WARNING": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        flaws = [line for line in done.stdout.splitlines() if not line.startswith("INFO")]
        sys.stderr.write("\n".join(flaws) + "\n")
    return built if done.returncode == 0 else None


def mermaid() -> bytes:
    """Return the program that draws diagrams. LookupError when it is another one than we know."""
    found = (TOOLS / MERMAID).read_bytes()
    if (digest := hashlib.sha256(found).hexdigest()) != MERMAID_SHA256:
        raise LookupError(
            f"{MERMAID} has the digest {digest} and not that of mermaid 11.16.0; "
            "compare it with what mermaid publishes, and write it into docs/site/__main__.py"
        )
    return found


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except (LookupError, ValueError) as error:
        sys.exit(f"site: {error.args[0]}")
