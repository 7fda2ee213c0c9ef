"""A transfer backend that reads into a device, as another package would bring it.

Each read is put on the stream that it is given, so that on the fake driver nothing is there before
that is waited for.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from gms.adapters.posix import Posix
from snapback_client.cuda import CudaDriver, host_address


class DirectExample(Posix):
    def __init__(self) -> None:
        super().__init__(direct=False)

    @contextlib.contextmanager
    def direct(self, descriptor: int) -> Iterator[OnStreams]:
        yield OnStreams(descriptor)


class OnStreams:
    way = "direct-example"

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._driver = CudaDriver()
        self._lock = threading.Lock()
        # What a copy is from must stay until the copy is done.
        self._kept: list[bytearray] = []

    def read(self, offset: int, size: int, address: int, stream: int) -> None:
        data = bytearray(os.pread(self._descriptor, size, offset))
        assert len(data) == size
        with self._lock:
            self._kept.append(data)
            source = host_address(memoryview(data))
            self._driver.call("cuMemcpyHtoDAsync", address, source, size, stream)
