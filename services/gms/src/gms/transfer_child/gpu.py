"""What a transfer of GPU memory does for its speed before any byte moves.

What takes long and holds nothing, imports and the start of the driver, is done while a process
waits for its task. A context holds memory of the GPU: it is made when the task is there, beside the
reading of the manifest.
"""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path

from snapback_client.cuda import CudaDriver
from snapshot_shared.errors import SnapbackError

_SYSFS = Path("/sys")


def started() -> CudaDriver | None:
    """Import the bindings and start the driver. None where it cannot: a transfer says why."""
    with contextlib.suppress(SnapbackError):
        return CudaDriver()
    return None


def make_context(driver: CudaDriver, device: str) -> None:
    """Prepare for a device, and begin to make its context, in a thread; it is kept to the end."""
    prepare(device, driver)

    def retain() -> None:
        # What fails here fails again where the context is used, and is reported there.
        with contextlib.suppress(SnapbackError):
            driver.call("cuDevicePrimaryCtxRetain", driver.find(device))

    threading.Thread(target=retain, name="context", daemon=True).start()


def prepare(device: str, driver: CudaDriver | None = None) -> None:
    """Have threads sleep while they wait for this device, and run near it from now on.

    Nothing where this process does not see the device.
    """
    with contextlib.suppress(SnapbackError):
        driver = driver or CudaDriver()
        found = driver.find(device)
        # Pinned memory comes from the node of the thread that asks for it.
        stay_near(driver.pci_address(found))
        # By default a thread spins where there are more processors than contexts.
        flag = driver.api.CUctx_flags.CU_CTX_SCHED_BLOCKING_SYNC
        driver.call("cuDevicePrimaryCtxSetFlags", found, flag.value)


def stay_near(address: str, sysfs: Path = _SYSFS) -> None:
    """Run this thread, and those that it starts, on the NUMA node of a PCI device.

    Nothing where the node is not known, or has no processor on which this process may run.
    """
    with contextlib.suppress(OSError, ValueError):
        node = int((sysfs / "bus/pci/devices" / address / "numa_node").read_text())
        text = (sysfs / f"devices/system/node/node{node}/cpulist").read_text()
        if near := cpus_of(text) & os.sched_getaffinity(0):
            os.sched_setaffinity(0, near)


def cpus_of(text: str) -> set[int]:
    """Return the processors of a list as the kernel writes it: `0-3,8`. ValueError."""
    cpus = set[int]()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus
