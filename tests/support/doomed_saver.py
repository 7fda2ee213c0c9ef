"""A save that dies by SIGKILL at one of the calls that change the disk.

Run as a program with the number of that call, counted from 1 (0: it lives), and a file of two
numbers that it keeps: the calls that it has come to, and the bytes that it has written into shards.
Where the call writes bytes, half of them are written. Task and events as for `gms.transfer_child`.
"""

from __future__ import annotations

import mmap
import os
import signal
import struct
import sys
import threading
from collections.abc import Callable
from typing import Any

from gms.adapters import posix, sharing, staging, syscalls
from gms.domain.tasks import SaveTask
from gms.transfer_child.save import save
from snapshot_shared import files, stripes
from snapshot_shared.codec import decode_json, encode_json

COUNTS = struct.Struct("QQ")
CHANGES = ("mkdir", "pwritev", "write", "fsync", "ftruncate", "link", "unlink")


class Doomed:
    """The module `os` for those who write parts, until the end comes."""

    def __init__(self, last: int, counts: str) -> None:
        self._last = last
        self._calls = 0
        self._bytes = 0
        self._lock = threading.Lock()
        with open(counts, "w+b") as file:  # noqa: PTH123 - a program for tests
            file.write(bytes(COUNTS.size))
            file.flush()
            self._counts = mmap.mmap(file.fileno(), COUNTS.size)

    def __getattr__(self, name: str) -> Any:
        found = getattr(os, name)
        return self._counted(found, name) if name in CHANGES else found

    def _counted(self, call: Callable[..., Any], name: str) -> Callable[..., Any]:
        def counted(*arguments: Any, **more: Any) -> Any:
            with self._lock:
                self._calls += 1
                is_last = self._calls == self._last
                self._keep()
            if is_last:
                if name == "pwritev":
                    descriptor, pieces, offset = arguments
                    half = sum(map(len, pieces)) // 2 // mmap.PAGESIZE * mmap.PAGESIZE
                    self._add(os.pwritev(descriptor, [pieces[0][:half]], offset))
                os.kill(os.getpid(), signal.SIGKILL)
            done = call(*arguments, **more)
            if name == "pwritev":
                self._add(done)
            return done

        return counted

    def _add(self, size: int) -> None:
        with self._lock:
            self._bytes += size
            self._keep()

    def _keep(self) -> None:
        COUNTS.pack_into(self._counts, 0, self._calls, self._bytes)


def main() -> None:
    last, counts = sys.argv[1:]
    doomed = Doomed(int(last), counts)
    for module in (files, posix, sharing, staging, stripes, syscalls):
        setattr(module, "os", doomed)  # noqa: B010 - for the type checker it is a module
    task = decode_json(sys.stdin.buffer.readline(), SaveTask)
    done = save(task, lambda _: None)
    sys.stdout.buffer.write(encode_json(done) + b"\n")


if __name__ == "__main__":
    main()
