"""A worker that uses CUDA: `cuda_worker.py LIBRARY WHAT…`. It says how often it has made a call.

With `child` it has a child that does the same on the same device; with `keeps` it has the device
open by itself, as NVML would.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import stat
import subprocess
import sys
import time

DEVICE = "/dev/nvidia0"


def main(library: str, *what: str) -> None:
    with contextlib.suppress(FileExistsError):
        # Any device that CRIU does not know: that of the kernel's log.
        os.mknod(DEVICE, 0o666 | stat.S_IFCHR, os.makedev(1, 11))
    os.environ["FAKE_CUDA_DEVICE"] = DEVICE
    if "child" in what:
        subprocess.Popen([sys.executable, __file__, library, "of another"])
    if "keeps" in what:
        os.open(DEVICE, os.O_WRONLY)
    cuda, context = ctypes.CDLL(library), ctypes.c_void_p()
    assert cuda.cuInit(0) == 0
    assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0
    assert cuda.cuCtxPushCurrent_v2(context) == 0
    who = "child" if "of another" in what else "parent"
    heap = os.urandom(8 * 1024 * 1024)
    digest = hash(heap)
    count = 0
    while True:
        assert cuda.cuCtxSynchronize() == 0
        count += 1
        line = {"who": who, "count": count, "whole": hash(heap) == digest}
        # In one piece, for its child writes to the same pipe.
        os.write(1, json.dumps(line).encode() + b"\n")
        time.sleep(0.02)


if __name__ == "__main__":
    main(*sys.argv[1:])
