"""The part of `cuda.bindings.driver` that checkpoints processes, in its form, by ctypes.

For environments without the package; it calls the libcuda.so.1 that is found, as the package does.
"""

# ruff: noqa: N802, N815 - the names of the package

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from enum import IntEnum
from typing import Any


class CUresult(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_INVALID_VALUE = 1
    CUDA_ERROR_OUT_OF_MEMORY = 2
    CUDA_ERROR_NOT_INITIALIZED = 3
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_INVALID_DEVICE = 101
    CUDA_ERROR_OPERATING_SYSTEM = 304
    CUDA_ERROR_ILLEGAL_STATE = 401
    CUDA_ERROR_NOT_READY = 600
    CUDA_ERROR_LAUNCH_FAILED = 719
    CUDA_ERROR_NOT_SUPPORTED = 801


class CUprocessState(IntEnum):
    CU_PROCESS_STATE_RUNNING = 0
    CU_PROCESS_STATE_LOCKED = 1
    CU_PROCESS_STATE_CHECKPOINTED = 2
    CU_PROCESS_STATE_FAILED = 3


class _Lock(ctypes.Structure):
    _fields_ = (("timeout", ctypes.c_uint), ("reserved", ctypes.c_char * 60))


class _Restore(ctypes.Structure):
    _fields_ = (
        ("pairs", ctypes.c_char_p),
        ("count", ctypes.c_uint),
        ("reserved", ctypes.c_char * 52),
    )


class CUuuid:
    def __init__(self) -> None:
        self._raw = ctypes.create_string_buffer(16)

    @property
    def bytes(self) -> bytes:
        return self._raw.raw

    def getPtr(self) -> int:
        return ctypes.addressof(self._raw)


class CUcheckpointGpuPair:
    def __init__(self) -> None:
        self.oldUuid = CUuuid()
        self.newUuid = CUuuid()


class CUcheckpointLockArgs:
    timeoutMs = 0


class CUcheckpointRestoreArgs:
    gpuPairs: Sequence[CUcheckpointGpuPair] = ()
    gpuPairsCount = 0


_SO: Any = None


def _call(name: str, *arguments: Any) -> CUresult:
    global _SO  # noqa: PLW0603 - loaded at the first call, as by the package
    if _SO is None:
        try:
            _SO = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise RuntimeError(str(error)) from error
    return CUresult(getattr(_SO, name)(*arguments))


def cuInit(flags: int) -> tuple[CUresult]:
    return (_call("cuInit", flags),)


def cuCheckpointProcessLock(pid: int, args: CUcheckpointLockArgs | None) -> tuple[CUresult]:
    given = None if args is None else ctypes.byref(_Lock(args.timeoutMs))
    return (_call("cuCheckpointProcessLock", pid, given),)


def cuCheckpointProcessCheckpoint(pid: int, args: None) -> tuple[CUresult]:
    return (_call("cuCheckpointProcessCheckpoint", pid, args),)


def cuCheckpointProcessRestore(pid: int, args: CUcheckpointRestoreArgs | None) -> tuple[CUresult]:
    if args is None:
        return (_call("cuCheckpointProcessRestore", pid, None),)
    pairs = b"".join(pair.oldUuid.bytes + pair.newUuid.bytes for pair in args.gpuPairs)
    given = _Restore(pairs, args.gpuPairsCount)
    return (_call("cuCheckpointProcessRestore", pid, ctypes.byref(given)),)


def cuCheckpointProcessUnlock(pid: int, args: None) -> tuple[CUresult]:
    return (_call("cuCheckpointProcessUnlock", pid, args),)


def cuCheckpointProcessGetState(
    pid: int,
) -> tuple[CUresult, CUprocessState]:
    state = ctypes.c_int()
    status = _call("cuCheckpointProcessGetState", pid, ctypes.byref(state))
    return status, CUprocessState(state.value)


def cuCheckpointProcessGetRestoreThreadId(
    pid: int,
) -> tuple[CUresult, int]:
    tid = ctypes.c_int()
    status = _call("cuCheckpointProcessGetRestoreThreadId", pid, ctypes.byref(tid))
    return status, tid.value
