"""What NVML says of the memory of a GPU: what is free, and which processes hold the rest.

The CUDA driver says how much is free only within a context, which the service never makes. Older
cuda-bindings have none of NVML, and without it nothing of this is known.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_UNKNOWN = 2**64 - 1
"""The bytes of a process that NVML does not know (NVML_VALUE_NOT_AVAILABLE)."""


class Nvml:
    """NVML of this machine, if it has any. Any thread may use it."""

    def __init__(self) -> None:
        """Load the bindings and the library, where they are."""
        self._api: Any = None
        try:
            api = importlib.import_module("cuda.bindings.nvml")
            api.init_v2()
        except Exception:  # noqa: BLE001 - a missing module, a missing library, or an error of it
            return
        self._api = api

    def free(self, uuid: str) -> int | None:
        """Return the free bytes of a device, None where NVML does not know them."""
        if self._api is None:
            return None
        try:
            handle = self._api.device_get_handle_by_uuid(uuid)
            return int(self._api.device_get_memory_info_v2(handle).free)
        except self._api.NvmlError:
            return None

    def holders(self, uuid: str) -> Mapping[str, int]:
        """Return the bytes of a device that other processes hold, by name and pid."""
        if self._api is None:
            return {}
        try:
            handle = self._api.device_get_handle_by_uuid(uuid)
            found = self._api.device_get_compute_running_processes_v3(handle)
            held = {int(each.pid): int(each.used_gpu_memory) for each in found}
        except self._api.NvmlError:
            return {}
        return {
            _name(pid): 0 if size == _UNKNOWN else size
            for pid, size in held.items()
            if pid != os.getpid()
        }


def _name(pid: int) -> str:
    try:
        command = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        # Of another pid namespace, or it has just ended.
        return f"pid {pid}"
    return f"{command} (pid {pid})"
