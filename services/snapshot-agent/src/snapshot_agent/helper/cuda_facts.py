"""What a node shows of its CUDA driver, its devices and the processes that use them."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Collection, Sequence
from pathlib import Path

from snapshot_agent.adapters import procfs
from snapshot_agent.domain.cuda import (
    APPS_QUERY,
    GPU_QUERY,
    CudaMissing,
    CudaProcess,
    Gpu,
    Version,
    device_bytes,
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
    return gpus_in(_asked(within_s, f"--query-gpu={GPU_QUERY}", "--format=csv,noheader"))


def used_bytes(pids: Collection[int], within_s: float) -> int:
    """Return how much memory of devices processes have, in bytes.

    CudaMissing, DeadlineExceeded, NotEligible.
    """
    query = f"--query-compute-apps={APPS_QUERY}", "--format=csv,noheader,nounits"
    return device_bytes(_asked(within_s, *query), pids)


def _asked(within_s: float, *words: str) -> str:
    query = ["nvidia-smi", *words]
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
            f"nvidia-smi does not answer: {said.strip().splitlines()[0]}",
            next_step="give the helper the driver's programs (the capability utility)",
        ) from error
    return done.stdout


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
