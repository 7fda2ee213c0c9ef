"""What our transfer backend uses of KvikIO, with the ways of GPUDirect Storage that it lacks here.

A read may be shorter than it was asked for. `FAKE_KVIKIO` says what is to happen: with `gds` there
is GPUDirect Storage, with `compat` cuFile is not used; `open` and `read` fail there, and `empty`
reads nothing.
"""

from __future__ import annotations

import os
from typing import Any, Self

from snapback_client.cuda import CudaDriver, host_address

MOST = 5000


def is_to(what: str) -> bool:
    return os.environ.get("FAKE_KVIKIO") == what


class CuFile:
    def __init__(self, file: str, flags: str = "r") -> None:
        if is_to("open"):
            raise RuntimeError("cuFile error at: /src\n5030: GPUDirect Storage not supported")
        self._descriptor = os.open(file, os.O_RDONLY)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._descriptor)

    def raw_read(self, buf: Any, size: int, file_offset: int) -> int:
        if is_to("read"):
            raise RuntimeError("cuFile error: device pointer lookup failure")
        address, is_read_only = buf.__cuda_array_interface__["data"]
        (most,) = buf.__cuda_array_interface__["shape"]
        assert size <= most
        assert not is_read_only
        data = bytearray(
            b"" if is_to("empty") else os.pread(self._descriptor, min(size, MOST), file_offset)
        )
        if data:
            CudaDriver().call("cuMemcpyHtoD", address, host_address(memoryview(data)), len(data))
        return len(data)
