"""What a node shows of CUDA is read from /proc and from nvidia-smi."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from snapshot_agent.domain.cuda import CudaMissing, CudaProcess, Gpu
from snapshot_agent.helper import cuda_facts
from snapshot_shared.errors import DeadlineExceeded

PROGRAM = """
import mmap, sys
files = [open(path, "rb") for path in sys.argv[1:]]
maps = [mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ) for file in files]
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Put a program of this name and script in front of all others."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def install(script: str) -> None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)

    return install


def test_devices_and_the_memory_of_processes_are_asked_of_nvidia_smi(
    nvidia_smi: Callable[[str], None],
) -> None:
    nvidia_smi(
        'case "$*" in *uuid,name,mig.mode.current*--format=csv,noheader*) '
        'echo "GPU-1, NVIDIA H100, Disabled";; '
        "*--query-compute-apps=pid,used_gpu_memory*--format=csv,noheader,nounits*) "
        'echo "10, 3"; echo "11, 1";; esac'
    )
    assert cuda_facts.gpus(10) == [Gpu("GPU-1", "NVIDIA H100", mig=False)]
    assert cuda_facts.used_bytes([10], 10) == 3 * 1024 * 1024


def test_an_nvidia_smi_that_is_missing_hangs_or_fails_is_an_error(
    nvidia_smi: Callable[[str], None], tmp_path: Path
) -> None:
    nvidia_smi("exec sleep 60")
    with pytest.raises(DeadlineExceeded, match=r"nvidia-smi did not answer within 0\.5 s"):
        cuda_facts.gpus(0.5)
    nvidia_smi("echo NVIDIA-SMI has failed; exit 9")
    with pytest.raises(CudaMissing, match="NVIDIA-SMI has failed"):
        cuda_facts.gpus(10)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(tmp_path / "empty"))
        with pytest.raises(CudaMissing, match="nvidia-smi"):
            cuda_facts.gpus(10)


def test_open_devices_mappings_of_unified_memory_and_stops_are_seen(tmp_path: Path) -> None:
    uvm, device = tmp_path / "nvidia-uvm", tmp_path / "nvidia0"
    for path in (uvm, device):
        path.write_bytes(bytes(4096))
    command = [sys.executable, "-c", PROGRAM]
    pipe = subprocess.PIPE
    with (
        subprocess.Popen([*command, uvm, uvm, device], stdin=pipe, stdout=pipe) as user,
        subprocess.Popen(command, stdin=pipe, stdout=pipe) as other,
    ):
        for each in (user, other):
            assert each.stdout
            assert each.stdout.readline() == b"ready\n"
        os.kill(other.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, other.pid, os.WSTOPPED | os.WNOWAIT)
        pids = [user.pid, other.pid, 2**22 + 1]
        try:
            seen = cuda_facts.observe(pids, [user.pid], dev=tmp_path)
        finally:
            os.kill(other.pid, signal.SIGCONT)
    assert seen == [
        CudaProcess(user.pid, is_cuda=True, has_device=True, uvm_mappings=2),
        CudaProcess(other.pid, is_cuda=False, stopped=True),
        CudaProcess(2**22 + 1, is_cuda=False),
    ]
