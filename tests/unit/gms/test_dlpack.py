"""Arrays handed to other libraries by DLPack, which read the capsules that they are given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from snapback_client import dlpack
from tests.unit.tables import each


class Shared:
    """What a library is given: the memory of a numpy array, by a capsule of ours."""

    def __init__(self, array: Any, *, writable: bool = True) -> None:
        self._array, self._writable = array, writable

    def __dlpack_device__(self) -> tuple[int, int]:
        return dlpack.CPU, 0

    def __dlpack__(self, *, max_version: tuple[int, int] | None = None, **_: Any) -> Any:
        return dlpack.to_dlpack(
            self._array.ctypes.data,
            self._array.shape,
            self._array.dtype,
            device=self.__dlpack_device__(),
            writable=self._writable,
            max_version=max_version,
        )


class Older(Shared):
    """The same for a library that knows no versions."""

    def __dlpack__(self, **_: Any) -> Any:
        return super().__dlpack__()


@each("kind", [Shared, Older])
@each("dtype", ["i1", "u2", "i8", "f2", "f4", "f8", "c8", "?"])
@each("shape", [(), (3,), (2, 3, 4), (0, 5)])
def test_a_library_has_the_same_elements_in_the_same_memory(
    kind: type[Shared], dtype: str, shape: tuple[int, ...]
) -> None:
    array = np.arange(int(np.prod(shape)), dtype="i8").reshape(shape).astype(dtype)
    found = np.from_dlpack(kind(array))
    assert (found.shape, found.dtype) == (array.shape, array.dtype)
    assert (found == array).all()
    if array.size:
        array.reshape(-1)[-1] = 77
        assert found.reshape(-1)[-1] == array.reshape(-1)[-1]
        assert np.shares_memory(found, array) or found.ctypes.data == array.ctypes.data


def test_what_is_read_only_stays_so() -> None:
    array = np.arange(4)
    assert not np.from_dlpack(Shared(array, writable=False)).flags.writeable
    assert np.from_dlpack(Shared(array)).flags.writeable
    with pytest.raises(BufferError, match="read-only"):
        np.from_dlpack(Older(array, writable=False))


@pytest.mark.parametrize("dtype", [">f4", "M8[s]", "S3", "V2"])
def test_a_type_that_dlpack_does_not_have_is_refused_by_its_name(dtype: str) -> None:
    with pytest.raises(BufferError, match="no type"):
        Shared(np.zeros(2, dtype)).__dlpack__()


def test_a_capsule_that_no_library_takes_is_freed_with_it() -> None:
    array = np.arange(1)
    before = memory_kib()
    for _ in range(10):
        # Shape and strides of each take 4.8 MB.
        dlpack.to_dlpack(
            array.ctypes.data, [1] * 300_000, array.dtype, device=(dlpack.CPU, 0), writable=True
        )
    assert memory_kib() - before < 20_000


def memory_kib() -> int:
    (line,) = [
        line for line in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in line
    ]
    return int(line.split()[1])
