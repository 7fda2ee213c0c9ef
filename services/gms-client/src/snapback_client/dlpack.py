"""DLPack: an array in device memory, handed to another library in place.

The structures are those of dlpack.h 1.0, https://dmlc.github.io/dlpack/latest/c_api.html; the
protocol in Python is https://dmlc.github.io/dlpack/latest/python_spec.html.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

CPU = 1
CUDA = 2

_READ_ONLY = 1
_CODES = {"i": 0, "u": 1, "f": 2, "c": 5, "b": 6}
_NAMES = {False: b"dltensor", True: b"dltensor_versioned"}

_libc = ctypes.CDLL(None)
_libc.malloc.restype = ctypes.c_void_p
_libc.malloc.argtypes = (ctypes.c_size_t,)
_libc.free.restype = None
_libc.free.argtypes = (ctypes.c_void_p,)

_FREE = ctypes.cast(_libc.free, ctypes.c_void_p).value

_new_capsule = ctypes.pythonapi.PyCapsule_New
_new_capsule.restype = ctypes.py_object
_new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)

# By address: the object is half gone when its destructor is called, and must not be counted again.
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype = ctypes.c_int
_is_valid.argtypes = (ctypes.c_void_p, ctypes.c_char_p)
_pointer_of = ctypes.pythonapi.PyCapsule_GetPointer
_pointer_of.restype = ctypes.c_void_p
_pointer_of.argtypes = (ctypes.c_void_p, ctypes.c_char_p)


def _free_unused(capsule: int) -> None:
    """Free what a capsule holds unless a library took it, which renames the capsule."""
    for name in _NAMES.values():
        if _is_valid(capsule, name):
            _libc.free(_pointer_of(capsule, name))


_destructor = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(_free_unused)


class _Device(ctypes.Structure):
    _fields_ = (("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32))


class _Type(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class _Tensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", _Device),
        ("ndim", ctypes.c_int32),
        ("dtype", _Type),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class _Managed(ctypes.Structure):
    _fields_ = (
        ("tensor", _Tensor),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


class _Versioned(ctypes.Structure):
    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("manager", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", _Tensor),
    )


def to_dlpack(
    address: int,
    shape: Sequence[int],
    dtype: Any,
    *,
    device: tuple[int, int],
    writable: bool,
    max_version: tuple[int, int] | None = None,
) -> Any:
    """Return a capsule over the elements at `address`, which are dense, of this numpy dtype.

    It says where they are and keeps nothing alive. BufferError for a type that DLPack does not
    have, and when the array is read-only and the other library too old to be shown that it is.
    """
    code = _CODES.get(dtype.kind)
    if code is None or not dtype.isnative:
        raise BufferError(f"DLPack has no type for elements of {dtype}")
    is_versioned = max_version is not None and max_version[0] >= 1
    if not is_versioned and not writable:
        raise BufferError("the array is read-only, which DLPack can say from version 1 on")
    kind: Any = _Versioned if is_versioned else _Managed
    # One block for all of it, so that the C library's own `free` is what releases it: a library
    # calls the deleter from any thread, and as late as when Python has ended.
    head, each = ctypes.sizeof(kind), ctypes.sizeof(ctypes.c_int64) * len(shape)
    block = _libc.malloc(head + 2 * each)
    if not block:
        raise MemoryError
    sizes: Any = (ctypes.c_int64 * (2 * len(shape))).from_address(block + head)
    sizes[:] = [*shape, *_strides(shape)]
    found = kind.from_address(block)
    found.manager, found.deleter = None, _FREE
    found.tensor = _Tensor(
        data=address,
        device=_Device(*device),
        ndim=len(shape),
        dtype=_Type(code=code, bits=8 * dtype.itemsize, lanes=1),
        shape=block + head,
        strides=block + head + each,
        byte_offset=0,
    )
    if is_versioned:
        found.major, found.minor, found.flags = 1, 0, 0 if writable else _READ_ONLY
    return _new_capsule(block, _NAMES[is_versioned], ctypes.cast(_destructor, ctypes.c_void_p))


def _strides(shape: Sequence[int]) -> list[int]:
    """Return the strides of dense elements, in elements."""
    found: list[int] = []
    step = 1
    for length in reversed(shape):
        found.append(step)
        step *= length
    return found[::-1]
