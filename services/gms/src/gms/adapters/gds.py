"""GPUDirect Storage by KvikIO: a load reads files into the memory of a GPU, past the host.

Extra `gds`. Where there is no GPUDirect Storage, KvikIO or cuFile reads through the host itself
(compatibility mode), which `gds-compat` names as the way that was taken.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from gms.adapters.posix import Posix
from gms.domain.tasks import GDS
from snapshot_shared.errors import DeviceError, InvalidInput

_MODULE = "kvikio"
_OTHER = "set SNAPBACK_TRANSFER_BACKEND=posix-direct, which reads through the host"


class Gds(Posix):
    """Saves, and moves what is no memory of a GPU, as `posix-direct` does."""

    def __init__(self, *, in_place: bool = False) -> None:
        """Look for KvikIO. InvalidInput; it is imported for the first file and not before."""
        super().__init__(direct=True, in_place=in_place)
        if importlib.util.find_spec(_MODULE) is None:
            raise InvalidInput(
                f"SNAPBACK_TRANSFER_BACKEND={GDS!r}: KvikIO is not installed",
                next_step=f"pip install 'snapback-gms[gds]', or {_OTHER}",
                found=GDS,
            )

    @contextlib.contextmanager
    def direct(self, descriptor: int) -> Iterator[_Reads]:
        try:
            kvikio = importlib.import_module(_MODULE)
            # It opens a file by its name, and this names the one that was found to be a plain file.
            file = kvikio.CuFile(f"/proc/self/fd/{descriptor}", "r")
            way = GDS if _has_gds() else f"{GDS}-compat"
        except (ImportError, OSError, RuntimeError) as error:
            raise _failed("KvikIO cannot be used", error) from error
        with file:
            yield _Reads(file, way)


def _has_gds() -> bool:
    """Whether KvikIO uses cuFile, and cuFile the kernel module of GPUDirect Storage."""
    if importlib.import_module(f"{_MODULE}.defaults").is_compat_mode_preferred():
        return False
    return bool(importlib.import_module(f"{_MODULE}.cufile_driver").get("is_gds_available"))


class _Reads:
    """Reads of one file. Each ends before it returns, so the stream is not needed."""

    def __init__(self, file: Any, way: str) -> None:
        self._file = file
        self.way = way

    def read(self, offset: int, size: int, address: int, stream: int) -> None:
        del stream
        done = 0
        while done < size:
            span = _Span(address + done, size - done)
            try:
                count = self._file.raw_read(span, size - done, offset + done)
            except (OSError, RuntimeError) as error:
                raise _failed("KvikIO cannot read into the device", error) from error
            if not count:
                raise _failed("KvikIO cannot read into the device", "the file ends before")
            done += count


class _Span:
    """Bytes of a device, as KvikIO takes them."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "version": 3,
            "shape": (size,),
            "typestr": "|u1",
            "data": (address, False),
            "strides": None,
        }


def _failed(what: str, error: object) -> DeviceError:
    return DeviceError(
        f"{what}: {' '.join(str(error).split())}",
        next_step=f"look at what `gdscheck -p` says, or {_OTHER}",
    )
