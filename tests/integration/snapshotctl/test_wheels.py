"""The built wheels, installed where there is no checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PIP = ("-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "--quiet")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def called(*words: str | Path, cwd: Path, **environment: str) -> str:
    done = subprocess.run(
        words,
        cwd=cwd,
        env={"PATH": os.defpath, "LANG": "C.UTF-8", **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode and "No matching distribution" in done.stderr:
        pytest.skip("no index of packages can be reached from here")
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_demo_runs_from_wheels_in_an_empty_environment(tmp_path: Path) -> None:
    folder, empty = tmp_path / "dist", tmp_path / "empty"
    called("make", "--silent", "wheels", f"DIST={folder}", cwd=ROOT, HOME=os.environ["HOME"])
    wheels = sorted(folder.glob("*.whl"))
    assert len(wheels) == 7
    called(sys.executable, "-m", "venv", empty, cwd=tmp_path)
    python, home = empty / "bin/python", os.environ["HOME"]
    lock = ROOT / "requirements.lock"
    called(python, *PIP, "install", "--require-hashes", "-r", lock, cwd=tmp_path, HOME=home)
    called(python, *PIP, "install", "--no-deps", "--no-index", *wheels, cwd=tmp_path)
    called(python, "-m", "pip", "check", cwd=tmp_path)
    demo = (empty / "bin/snapshotctl", "demo", "--size-mib", "16", "--warm-up", "short")
    said = called(*demo, cwd=tmp_path, HOME=str(tmp_path))
    assert "all 3 answers are the same, byte for byte" in said
    assert not [path for path in empty.rglob("*.py") if str(ROOT) in str(path.resolve())]
