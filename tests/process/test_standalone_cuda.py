"""A local cluster with the GPUs of its machine: a worker that uses CUDA as it pleases is restored.

The driver is the fake of tests/support/cuda_rig.py, for all processes of the cluster; CRIU is real.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.integration.snapshotctl.conftest import Cli
from tests.process.cuda_stage import nvidia_programs
from tests.support.cuda_rig import UUIDS, CudaNode

# A plain process has the mounts of this machine, so that none may come or go meanwhile.
pytestmark = [pytest.mark.xdist_group("mounts"), pytest.mark.timeout(240)]

WORKER = Path(__file__).with_name("cuda_worker.py")
_MACHINE = """
mount -t tmpfs none /proc/driver
mkdir /proc/driver/nvidia
ln -s "$FOLDER/version" /proc/driver/nvidia/version
exec "$@"
"""


class GpuMachine(Cli):
    """A machine with GPUs, as every program that is started here sees it."""

    def __init__(self, home: Path, cuda: CudaNode) -> None:
        super().__init__(home)
        nvidia_programs(home)
        self.environment |= {
            "FOLDER": str(home),
            "PATH": f"{home / 'bin'}:{self.environment['PATH']}",
        }
        self.cuda = cuda

    def python(self, *words: object) -> str:
        command = [sys.executable, *map(str, words)]
        return subprocess.run(
            ["unshare", "--mount", "sh", "-ec", _MACHINE, "machine", *command],
            env=self.environment,
            cwd=self.workdir,
            check=False,
            stdout=subprocess.PIPE,
            text=True,
            timeout=200,
        ).stdout

    def pod(self, name: str, **annotations: str) -> None:
        ready = ["snapback-run", "--ready", "true", "--"]
        program = [sys.executable, str(WORKER), str(self.cuda.library)]
        environment = {
            "FAKE_CUDA": str(self.cuda.folder),
            "LD_LIBRARY_PATH": str(self.cuda.library.parent),
        }
        container: dict[str, Any] = {
            "name": "main",
            "command": [*ready, *program],
            "env": [{"name": key, "value": value} for key, value in environment.items()],
            "resources": {"limits": {"nvidia.com/gpu": 1}},
        }
        marks = {f"nvidia.com/{key.replace('_', '-')}": text for key, text in annotations.items()}
        pod = {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {"name": name, "annotations": marks},
            "spec": {"containers": [container]},
        }
        self.ok("apply", "-f", "-", stdin=json.dumps(pod))

    def counts(self, pod: str) -> list[int]:
        lines = self.ok("logs", pod).out.splitlines()
        said = [json.loads(line) for line in lines if line.startswith("{")]
        assert all(line["whole"] for line in said)
        return [line["count"] for line in said]


def test_a_worker_that_keeps_its_own_memory_on_a_gpu_goes_on_as_the_process_that_it_was(
    criu: Path, tmp_path: Path, cuda_node: CudaNode
) -> None:
    cuda_node.place(UUIDS[0])
    machine = GpuMachine(tmp_path, cuda_node)
    try:
        up = machine.python("-m", "snapshotctl", "up", "--device", "cuda", "--driver", "criu")
        assert "node-1 is ready: the GPUs of this machine" in up
        [node] = machine.ok("nodes", "-o", "json").value()
        assert [each["uuid"] for each in node["node"]["status"]["devices"]] == [UUIDS[0]]
        assert "criu+cuda" in node["node"]["status"]["drivers"]

        machine.pod("counts", capture_driver="criu+cuda")
        machine.ok("wait", "pod/counts")
        snapshot = {
            "apiVersion": "nvidia.com/v1alpha1",
            "kind": "Snapshot",
            "metadata": {"name": "counts"},
            "spec": {"source": {"podRef": {"name": "counts"}}, "driver": "criu+cuda"},
        }
        machine.ok("apply", "-f", "-", stdin=json.dumps(snapshot))
        machine.ok("wait", "snapshot/counts")
        verbs = ["lock", "checkpoint", "restore", "unlock"]
        assert cuda_node.verbs() == verbs
        before = machine.counts("counts")[-1]
        machine.ok("delete", "pod/counts")
        machine.ok("wait", "pod/counts", "--for=delete")

        machine.pod("again", restore_from="counts")
        machine.ok("wait", "pod/again")
        assert machine.until(lambda _: machine.counts("again"), "nodes")[0] > 1
        assert cuda_node.verbs() == [*verbs, "restore", "unlock"]
        assert before > 1
    finally:
        machine.run("down")


@pytest.mark.turns
def test_the_acceptance_captures_engines_on_the_fake(
    criu: Path, tmp_path: Path, cuda_node: CudaNode
) -> None:
    cuda_node.place(f"{UUIDS[0]} bytes={512 * 2**20}")
    machine = GpuMachine(tmp_path, cuda_node)
    report = tmp_path / "accept.json"
    # What a process allocates of the fake is in files that end with it.
    words = ("--only", "captures", "--engines", "pool", "--gib", "0.03125")
    machine.python("tests/gpu/accept.py", *words, "--folder", tmp_path, "--out", report)
    steps = {step["step"]: step for step in json.loads(report.read_text())["steps"]}
    assert steps["captures"]["result"] == "ok", steps["captures"]
    found = steps["captures"]["found"]
    assert list(found) == ["pool by criu+cuda", "pool by cooperative"]
    assert all(row["same_after_capture"] and row["same_after_restore"] for row in found.values())
    assert all(row["bytes"] >= 32 * 2**20 for row in found.values())
