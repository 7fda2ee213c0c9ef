"""The benchmark of engines: what its table says, and which requests make no sense."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.engines import TARGET, TITLE, Engine, Request, Results, Turn, pod, section
from tests.bench.page import with_section

MIB = 2**20
ROOT = Path(__file__).resolve().parents[2]
GET = Request("/", method="GET")
ENGINE = Engine("a", "", "criu", ["serve", "{port}"], GET, GET, ["wrap", "--"], {"PORT": "{port}"})


def turn(cold: float, restore: float, nap: float | None = None, weights: int = 0) -> Turn:
    return Turn(
        alone=None if weights else 1.0,
        cold=cold,
        nap=nap,
        restore=restore,
        weights=weights,
        artifact=weights + MIB,
    )


RESULTS = Results(
    machine={"cores": "2"},
    models={"a, criu": "", "b, cooperative": "magika"},
    model_bytes=3 * MIB,
    turns={
        "a, criu": [turn(2.0, 0.5), turn(4.0, 0.4), turn(2.2, 9.0)],
        "b, cooperative": [turn(1.0, 2.0, nap=0.25, weights=3 * MIB)],
    },
    absent={"c, criu": "run: make criu"},
)


def test_the_table_has_medians_the_extremes_and_how_much_faster_a_restore_is() -> None:
    lines = section(RESULTS).splitlines()
    rows = [[cell.strip() for cell in line.split("|")] for line in lines if line.startswith("| ")]
    assert rows[1][1:10] == [
        *("a, criu", "none", "-", "1 MiB", "1 (1 … 1)"),
        *("2.2 (2 … 4)", "-", "0.5 (0.4 … 9)", "4.40 x as fast"),
    ]
    assert rows[2][1:10] == [
        *("b, cooperative", "magika, 3 MiB", "3 MiB", "4 MiB", "-"),
        *("1 (1 … 1)", "0.25 (0.25 … 0.25)", "2 (2 … 2)", "0.50 x as fast"),
    ]
    assert "- c, criu was not run: run: make criu" in lines


def test_its_section_takes_the_place_of_an_older_one() -> None:
    page = "# Benchmarks\n\nIntro.\n\n## GMS sessions\n\nrows\n\n## Devices\n\nlast\n"
    once = with_section(page, section(RESULTS))
    assert with_section(once, section(RESULTS)) == once
    titles = [line for line in once.splitlines() if line.startswith("## ")]
    assert titles == ["## GMS sessions", f"## {TITLE}", "## Devices"]


def test_an_engine_serves_on_its_port_and_a_restored_one_on_the_other_node() -> None:
    cold, restored = pod(ENGINE, "x", ROOT, 81), pod(ENGINE, "y", ROOT, 81, "x")
    [container] = cold["spec"]["containers"]
    assert container["command"] == ["wrap", "--", "serve", "81"]
    assert container["env"] == [{"name": "PORT", "value": "81"}]
    assert "resources" not in container
    assert cold["metadata"]["annotations"] == {"nvidia.com/capture-driver": "criu"}
    assert restored["metadata"]["annotations"] == {"nvidia.com/restore-from": "x"}
    assert TARGET in restored["spec"]["nodeSelector"].values()
    assert restored["spec"]["containers"] == cold["spec"]["containers"]


@pytest.mark.parametrize("wrong", [["--rounds", "0"], ["--folder", "/none"]])
def test_a_request_that_makes_no_sense_is_refused(wrong: list[str]) -> None:
    command = [sys.executable, "-m", "tests.bench.engines", *wrong]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert found.returncode == 2
    assert wrong[0] in found.stderr
    assert "Traceback" not in found.stderr
