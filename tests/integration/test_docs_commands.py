"""The commands that the pages tell people to type do what the pages say."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^\s*```(?:sh|console)\n(.*?)^\s*```", re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[str]:
    """Give the block of commands of a page that starts and ends a cluster."""
    text = (ROOT / page).read_text(encoding="utf-8")
    blocks = [block for block in BLOCK.findall(text) if "snapshotctl up" in block]
    assert len(blocks) == 1, f"{page} has {len(blocks)} such blocks"
    return [line.strip() for line in blocks[0].splitlines() if line.strip()]


def small_copy(root: Path) -> Path:
    """Make a root whose examples are small and warm at once; all else is the repository's."""
    shutil.copytree(ROOT / "deploy/examples", root / "deploy/examples")
    (root / ".venv").symlink_to(ROOT / ".venv")
    for manifest in (root / "deploy/examples").glob("*.yaml"):
        text = manifest.read_text(encoding="utf-8")
        text = text.replace('"512"', '"32"').replace('"10"', '"1"')
        manifest.write_text(text, encoding="utf-8")
    return root


@pytest.mark.timeout(180)
@pytest.mark.parametrize("page", ["README.md", "deploy/examples/README.md"])
def test_the_commands_of_a_page_work_in_their_order(page: str, tmp_path: Path) -> None:
    root = small_copy(tmp_path / "root")
    environment = {
        **os.environ,
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
        "PATH": f"{ROOT / '.venv/bin'}:{os.environ['PATH']}",
    }
    lines = commands(page)
    assert "snapshotctl down" in lines[-1]
    try:
        for line in lines:
            done = subprocess.run(
                ["/bin/sh", "-c", line],
                cwd=root,
                env=environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
    finally:
        down = ["snapshotctl", "down", "--purge"]
        subprocess.run(down, cwd=root, env=environment, capture_output=True, check=False)
