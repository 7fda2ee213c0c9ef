"""What a node shows of its CUDA driver, its devices and the processes that use them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.cuda import (
    GPU_QUERY,
    CudaMissing,
    CudaProcess,
    Gpu,
    Version,
    driver_version,
    gpus_in,
)
from snapshot_shared.errors import DeadlineExceeded

_DRIVER = Path("/proc/driver/nvidia/version")
_DEV = Path("/dev")


def driver() -> Version | None:
    """Return the version of the driver that is loaded, None where none is."""
    try:
        return driver_version(_DRIVER.read_text())
    except FileNotFoundError:
        return None


def gpus(within_s: float) -> list[Gpu]:
    """Return the devices of the node. CudaMissing, DeadlineExceeded."""
    query = ["nvidia-smi", f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=within_s, check=True)
    except subprocess.TimeoutExpired as error:
        raise DeadlineExceeded(
            f"nvidia-smi did not answer within {within_s:g} s",
            next_step="look at the kernel's log of the node",
            step="nvidia-smi",
            budget_s=within_s,
        ) from error
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stdout", "") or str(error)
        raise CudaMissing(
            f"nvidia-smi does not list the devices: {said.splitlines()[0]}",
            next_step="give the helper the driver's programs (the capability utility)",
        ) from error
    return gpus_in(done.stdout)


def observe(pids: Sequence[int], uses: Collection[int], dev: Path = _DEV) -> list[CudaProcess]:
    """Look at processes in /proc; `uses` are those that the driver knows. One may have ended."""
    devices, uvm = str(dev / "nvidia"), str(dev / "nvidia-uvm")
    return [
        CudaProcess(
            pid,
            pid in uses,
            has_device=any(link.startswith(devices) for link in _links(pid)),
            uvm_mappings=_mappings(pid, uvm),
            stopped=(found := procfs.read(pid)) is not None and found.state in "Tt",
        )
        for pid in pids
    ]


def _links(pid: int) -> list[str]:
    links = []
    with contextlib.suppress(OSError):
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                links.append(str(entry.readlink()))
    return links


def _mappings(pid: int, path: str) -> int:
    try:
        text = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape")
    except OSError:
        return 0
    return sum(line.endswith(f" {path}") for line in text.splitlines())
