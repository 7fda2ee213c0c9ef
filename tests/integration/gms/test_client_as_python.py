"""The engine's library as Python has such things: a mapping, its own errors, its dtypes."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

import snapback_client as client
from snapback_client.codec import decode_msgpack
from snapback_client.frames import Request
from snapback_client.slots import RAW, dtype_of
from snapshot_shared.errors import (
    DeadlineExceeded,
    InvalidInput,
    InvalidMessage,
    LayoutError,
    NotFound,
    OutOfDeviceMemory,
)

MIB = 1024 * 1024


def test_a_pool_is_a_mapping_of_its_arrays(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        assert isinstance(pool, Mapping)
        assert (len(pool), list(pool), bool(pool)) == (0, [], True)
        arrays = pool.allocate_many({"b": (3, "int8"), "a": (4, "int16")})
        assert list(pool) == ["b", "a"]
        assert ("a" in pool, "c" in pool, 0 in pool) == (True, False, False)
        assert {name: array.nbytes for name, array in pool.items()} == {"b": 3, "a": 8}
        assert pool["a"] is arrays["a"]
        assert pool.get("c", 7) == 7
        assert (pool == pool.arrays(), len({pool})) == (False, 1)
        assert repr(pool).endswith(" writing, 2 arrays, 11 bytes>")
        pool.commit()
        pool.sleep()
        assert ("a" in pool, len(pool)) == (True, 2)


def test_errors_are_those_of_python_and_of_the_project(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("w", 3, "int8")
        for kind in (KeyError, NotFound):
            with pytest.raises(kind) as missing:
                pool["x"]
            assert str(missing.value) == "the pool has no array 'x'"
        assert "Next: it has: w" in "".join(traceback.format_exception(missing.value))
        for kind in (TimeoutError, DeadlineExceeded):
            with pytest.raises(kind):
                client.connect(lock="RW", deadline_s=0.1)
        for kind in (MemoryError, OutOfDeviceMemory):
            with pytest.raises(kind):
                pool.allocate("big", 10_000 * MIB, "int8", wait_s=0)
    for kind in (ValueError, InvalidInput):
        with pytest.raises(kind, match="lock 'rw' is not known"):
            client.connect(lock="rw")
        with pytest.raises(kind, match="domain 'weight' is not known"):
            client.connect(domain="weight")


@pytest.mark.parametrize(
    ("name", "dtype", "said"),
    [
        ("two words", "int8", "the name of an array 'two words' must match"),
        ("", "int8", "the name of an array '' must match"),
        ("w", "nonsense", "dtype 'nonsense' is not known"),
        ("w", object, "dtype object cannot live in shared memory"),
        (3, "int8", "the name of an array must be a str, 3 is of type int"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_freed(
    service: Any, name: Any, dtype: Any, said: str
) -> None:
    with client.connect(lock="RW") as pool:
        kept = pool.allocate("w", 3, "int8")
        kept[:] = 5
        with pytest.raises(ValueError, match=said):
            pool.allocate(name, 3, dtype, overwrite=True)
        assert list(pool["w"]) == [5, 5, 5]


def test_an_array_of_a_name_that_exists_is_made_anew_only_when_that_is_asked_for(
    service: Any,
) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("w", 3, "int8")[:] = 1
        with pytest.raises(client.LayoutConflict):
            pool.allocate("w", 5, "int16")
        again = pool.allocate("w", 5, "int16", overwrite=True)
        assert (again.shape, list(again), len(pool)) == ((5,), [0] * 5, 1)
        pool.allocate("new", 1, "int8", overwrite=True)
        again[:] = 7
        pool.commit()
    with client.connect(lock="RO") as reader:
        assert list(reader["w"]) == [7] * 5


@pytest.mark.parametrize("shape", [-1, (3, -2), (-3, -2)])
def test_a_negative_dimension_is_refused_before_anything_is_freed(
    service: Any, shape: int | tuple[int, ...]
) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("w", 3, "int8")[:] = 5
        with pytest.raises(ValueError, match="the shape of array 'w' has a negative dimension"):
            pool.allocate("w", shape, "int8", overwrite=True)
        assert list(pool["w"]) == [5, 5, 5]
        with pytest.raises(ValueError, match="negative dimension"):
            pool.allocate("new", shape, "int8")
        assert list(pool) == ["w"]


@pytest.mark.parametrize("size", [45 * MIB, 65 * MIB, 2**70])
def test_an_overwrite_that_the_device_can_never_hold_leaves_the_array_as_it_is(
    service: Any, size: int
) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("other", 20 * MIB, "int8")
        pool.allocate("w", 3, "int8")[:] = 5
        with pytest.raises(MemoryError, match="the arrays of this pool would take"):
            pool.allocate("w", size, "int8", overwrite=True)
        assert list(pool["w"]) == [5, 5, 5]


def test_arrays_can_be_made_anew_as_often_as_one_likes(service: Any) -> None:
    """Its addresses are reserved for four times the memory of the device."""
    with client.connect(lock="RW") as pool:
        for size in range(2, 30, 2):
            for name in ("a", "b"):
                pool.allocate(name, size * MIB, "int8", overwrite=True)[:] = size
        for turn in range(20):
            pool.allocate("a", (turn % 2 + 1) * 15 * MIB, "int8", overwrite=True)[:] = turn
        pool.allocate("c", 3, "int8")[:] = 7
        assert (pool["a"][0], pool["a"][-1], pool["b"][0], pool["b"][-1]) == (19, 19, 28, 28)
        pool.commit()
        pool.sleep()
        pool.wake()
        assert (pool["a"][-1], pool["b"][-1], pool["c"][0]) == (19, 28, 7)


def test_an_overwrite_without_room_among_the_addresses_leaves_the_array_as_it_is(
    service: Any,
) -> None:
    with client.connect(lock="RW") as pool:
        for number in range(12):
            pool.allocate("between", 18 * MIB, "int8")
            pool.free("between")
            pool.allocate(f"w{number}", 2 * MIB, "int8")[:] = number
        with pytest.raises(LayoutError, match="no place for array 'w5'"):
            pool.allocate("w5", 40 * MIB, "int8", overwrite=True)
        assert set(pool["w5"]) == {5}
        pool.allocate("w5", 30 * MIB, "int8", overwrite=True)[:] = 6
        assert set(pool["w4"]) == {4}
        assert set(pool["w6"]) == {6}


def test_an_array_whose_memory_is_unmapped_is_not_found_though_the_service_is_gone(
    service: Any,
) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate_many({"kept": (3, "int8"), "w": (3, "int8")})
        service.restart()
        with pytest.raises(client.SnapbackError):
            pool.free("w")
        assert list(pool) == ["kept"]
        assert list(pool.arrays()) == ["kept"]


def test_a_cache_without_arrays_sleeps_and_wakes(service: Any) -> None:
    with client.connect(lock="RW", domain="kv") as pool:
        assert pool.allocate_many({}) == {}
        pool.sleep()
        pool.wake()
        assert (pool.access, len(pool)) == ("RW", 0)
        pool.allocate("w", 3, "int8")[:] = 1


def test_a_relative_socket_folder_is_a_value_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="socket_dir='gms' is no absolute path") as caught:
        client.connect(socket_dir="gms")
    assert isinstance(caught.value, InvalidInput)
    assert caught.value.next_step == "set socket_dir to the absolute path of the folder"
    monkeypatch.setenv("GMS_SOCKET_DIR", "gms")
    with pytest.raises(ValueError, match="GMS_SOCKET_DIR='gms' is no absolute path"):
        client.connect()


def test_bfloat16_is_kept_by_its_name(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        array = pool.allocate("w", (2, 3), "bfloat16")
        assert (array.shape, array.dtype.itemsize) == ((2, 3), 2)
        array.view("uint16")[:] = 0x3F80
        pool.commit()
        pool.sleep()
        pool.wake()
    with client.connect(lock="RO") as reader:
        found = reader["w"]
        assert found.dtype == dtype_of("bfloat16")
        assert set(found.view("uint16").ravel()) == {0x3F80}


@pytest.mark.parametrize("name", RAW)
def test_a_type_that_numpy_lacks_is_an_integer_of_its_width_with_its_name(name: str) -> None:
    found = dtype_of(name)
    if found.kind == "u":
        assert found == np.dtype(RAW[name])
        assert found.metadata is not None
        assert found.metadata["dtype"] == name
    else:
        assert found.name == name


def test_the_types_of_ml_dtypes_are_used_where_they_are(service: Any) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    with client.connect(lock="RW") as pool:
        array = pool.allocate("w", 2, ml_dtypes.bfloat16)
        array[:] = 1.5
        assert array.dtype == ml_dtypes.bfloat16
        pool.commit()
    with client.connect(lock="RO") as reader:
        assert reader["w"].dtype == ml_dtypes.bfloat16
        assert list(reader["w"].astype("float32")) == [1.5, 1.5]


def test_a_message_that_is_none_of_several_is_not_called_by_all_their_names() -> None:
    with pytest.raises(InvalidMessage) as refused:
        decode_msgpack(b"\x80", Request)  # type: ignore[arg-type]
    assert str(refused.value).startswith("not a valid message: ")
    assert "|" not in str(refused.value)
