"""The locked requirements: whole, with digests, and from no place in particular."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RUNTIME, DEVELOPMENT, CUDA = (ROOT / f"requirements{name}.lock" for name in ("", "-dev", "-cuda"))
PINNED = re.compile(r"^([a-z0-9.\-\[\]]+)==(\S+)", re.MULTILINE)
EXTRAS = {
    "services/gms-client": [((12, 8), True), ((12, 9), True), ((13, 5), True), ((14, 0), False)],
    "services/snapshot-agent": [((12, 9), False), ((13, 5), True), ((14, 0), False)],
}


def pins(lock: Path) -> dict[str, tuple[str, frozenset[str]]]:
    """Return the version and the digests of each package."""
    text = lock.read_text("utf-8")
    starts = [*PINNED.finditer(text)]
    ends = [each.start() for each in starts[1:]] + [len(text)]
    return {
        each[1]: (each[2], frozenset(re.findall(r"sha256:[0-9a-f]{64}", text[each.end() : end])))
        for each, end in zip(starts, ends, strict=True)
    }


@pytest.mark.parametrize("lock", [RUNTIME, DEVELOPMENT, CUDA], ids=lambda lock: lock.name)
def test_every_package_has_digests_and_no_index_is_named(lock: Path) -> None:
    found = pins(lock)
    assert found
    assert [name for name, (_, digests) in found.items() if not digests] == []
    assert re.findall(r"https?://|--index|--find-links", lock.read_text("utf-8")) == []


def test_what_checks_and_the_images_with_cuda_run_on_is_what_people_run() -> None:
    runtime, development = pins(RUNTIME), pins(DEVELOPMENT)
    both = runtime.keys() & development.keys()
    assert {name: development[name] for name in both} == {name: runtime[name] for name in both}
    assert not {"coverage", "mypy", "pytest", "ruff", "selenium"} & runtime.keys()
    added = pins(CUDA)
    assert set(added) == {"cuda-bindings", "cuda-pathfinder"}
    assert {name: development[name] for name in added} == added


@pytest.mark.parametrize("package", EXTRAS)
def test_the_extra_takes_the_bindings_that_it_was_seen_working_with(package: str) -> None:
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text("utf-8"))["project"]
    [requirement] = project["optional-dependencies"]["cuda"]
    bounds = re.fullmatch(r"cuda-bindings>=(\d+)\.(\d+)(?:\.\d+)?,<(\d+)", requirement)
    assert bounds
    least, below = (int(bounds[1]), int(bounds[2])), (int(bounds[3]), 0)
    for version, is_taken in EXTRAS[package]:
        assert (least <= version < below) is is_taken


@pytest.mark.slow
def test_the_bindings_install_by_their_digests_into_an_empty_environment(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "empty"], check=True)
    python = tmp_path / "empty" / "bin" / "python"
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--retries", "0"]
    done = subprocess.run(
        [*pip, "install", "--quiet", "--require-hashes", "--requirement", CUDA],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    if done.returncode and "No matching distribution" in done.stderr + done.stdout:
        pytest.skip("no index of packages can be reached from here")
    assert done.returncode == 0, done.stderr
    subprocess.run([python, "-c", "import cuda.bindings.driver"], check=True)
