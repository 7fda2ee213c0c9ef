"""What a dump and a restore by a real helper report, in the benchmark of them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import msgspec

from tests.bench import agent
from tests.bench.common import MIB, ROOT, Results


def test_a_dump_is_whole_and_says_for_how_long_its_worker_was_stopped(
    criu: Path, tmp_path: Path
) -> None:
    command = [sys.executable, "-m", "tests.bench.agent", "--size-mib", "4", "--rounds", "1"]
    command += ["--folder", str(tmp_path), "--json", str(tmp_path / "found")]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=100, check=False)
    # So small a process says nothing of goals.
    assert done.returncode in (0, 1)
    found = msgspec.json.decode((tmp_path / "found").read_bytes(), type=Results)
    assert found.facts["size"] > 4 * MIB
    [stopped], [dumped] = (found.samples[row]["criu"] for row in (agent.STOPPED, agent.DUMPED))
    assert 0 < stopped < dumped
    [stopped], [dumped] = (found.samples[row]["snapback"] for row in (agent.STOPPED, agent.DURABLE))
    assert 0 < stopped < dumped
    for row in (agent.CACHED, agent.COLD):
        assert all(taken > 0 for samples in found.samples[row].values() for taken in samples)
    assert [path.name for path in tmp_path.iterdir()] == ["found"]
