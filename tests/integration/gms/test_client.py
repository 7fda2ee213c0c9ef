"""The engine's library: arrays that are shared, sleep, and wake at the same addresses."""

from __future__ import annotations

import errno
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import snapback_client as client
from snapback_client import frames, reservation
from snapback_client.codec import decode_msgpack
from snapback_client.errors import ConnectionLost
from snapback_client.lease import Lease
from snapback_client.reservation import FIRST_ADDRESS, Reservation
from snapback_client.slots import RAW, dtype_of
from snapback_client.wire import send
from snapshot_shared import errors
from tests.support.forks import forks
from tests.support.gms_rig import ATTACHED, MIB, attach, committed

POOLS = Path(__file__).parents[2] / "golden/data/pools"

SHAPES: dict[str, tuple[Any, Any]] = {
    "embedding": ((1000, 64), np.float32),
    "layers/0.weight": ((3, 5, 7), "float64"),
    "bias": (11, np.int16),
    "flag": ((), np.bool_),
    "empty": ((0, 4), np.uint8),
}


def fill(pool: client.MemoryPool) -> dict[str, np.ndarray[Any, Any]]:
    """Build arrays and give copies of what was written."""
    arrays = pool.allocate_many(SHAPES)
    for seed, array in enumerate(arrays.values()):
        array[...] = np.random.default_rng(seed).integers(0, 2, array.shape)
    return {name: array.copy() for name, array in arrays.items()}


def address(array: np.ndarray[Any, Any]) -> int:
    return int(array.__array_interface__["data"][0])


def run_worker(code: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """Run code in another process, where the library is `client`."""
    code = f"import snapback_client as client\n{code}"
    return forks("snapback_client", "numpy").run(code, *arguments)


def output(code: str, *arguments: str) -> str:
    found = run_worker(code, *arguments)
    assert found.returncode == 0, found.stderr.decode()
    return found.stdout.decode()


TRACES = """
import os, pathlib, threading
import numpy  # Starts threads of its own when it is imported.
def traces():
    maps = pathlib.Path("/proc/self/maps").read_text().count("snapback-gpu")
    return maps, len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))
"""
"""Counts device mappings, descriptors and threads of a worker."""


FEW_FILES = """
import resource
def leave(files):
    lowest = os.dup(0)
    os.close(lowest)
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest + files, hard))
    return lowest + files
"""
"""Lets a worker open so many files more; returns the limit."""


def test_commit_makes_the_arrays_read_only_where_they_are(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        array = pool.allocate("w", 10, np.uint8)
        before = address(array)
        array[:] = 3
        assert pool.access == "RW"
        generation = pool.commit(layout_id="mine")
        assert (pool.access, pool.layout_id, generation.generation) == ("RO", "mine", 1)
        assert address(array) == before
        assert array[5] == 3
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


@pytest.mark.parametrize("wrong", ["part[:] = 2", "pool.sleep(); part[0]"])
def test_who_writes_to_committed_memory_or_touches_what_sleeps_is_stopped_by_the_processor(
    service: Any, wrong: str
) -> None:
    code = (
        "import sys\n"
        "pool = client.connect(lock='RW')\n"
        "part = pool.allocate('w', 10, 'uint8')[2:5]\n"
        "part[:] = 1\n"
        "pool.commit()\n"
        "print(part[0], flush=True)\n"
        "exec(sys.argv[1])\n"
        "print('done')\n"
    )
    found = run_worker(code, wrong)
    assert (found.returncode, found.stdout) == (-signal.SIGSEGV, b"1\n")


def test_wake_brings_the_same_arrays_to_the_same_addresses(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        expected = fill(pool)
        pool.commit()
        held = pool.arrays()
        addresses = {name: address(array) for name, array in held.items()}
        pool.sleep()
        assert pool.is_asleep
        assert service.device().domains[0].sessions == []
        pool.wake()
        assert {name: address(array) for name, array in pool.arrays().items()} == addresses
        for name, array in (*held.items(), *pool.arrays().items()):
            np.testing.assert_array_equal(array, expected[name], strict=True)


def test_a_pool_that_sleeps_leaves_no_mapping_descriptor_or_thread(service: Any) -> None:
    code = TRACES + (
        "before = traces()\n"
        "weights = client.connect(lock='RW')\n"
        "weights.allocate_many({f'w{n}': (10, 'u1') for n in range(20)})\n"
        "weights.commit()\n"
        "cache = client.connect(lock='RW', domain='kv')\n"
        "cache.allocate('k', 10, 'u1')\n"
        "awake = traces()\n"
        "weights.sleep(); cache.sleep()\n"
        "print(awake[0], traces() == before)\n"
    )
    assert output(code) == "21 True\n"


def test_the_addresses_stay_reserved_while_the_pool_sleeps(service: Any) -> None:
    with committed() as pool:
        place = address(pool["w"])
        pool.sleep()
        with pytest.raises(client.AddressTaken):
            Reservation(4096, address=place)
        with pytest.raises(client.NotEligible):
            pool.arrays()


def test_another_process_restores_the_arrays_at_the_same_addresses_or_connects_to_them(
    service: Any, tmp_path: Path
) -> None:
    with client.connect(lock="RW", device=1) as pool:
        fill(pool)
        pool.commit()
        pool.sleep()
        state = tmp_path / "state.json"
        state.write_bytes(pool.save_state())
        pool.wake()
        expected = [
            f"{name} {address(array):#x} {array.dtype} {array.shape} {array.sum()}"
            for name, array in pool.arrays().items()
        ]
    code = (
        "import pathlib, sys\n"
        "state = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "for again in (lambda: client.restore(state), lambda: client.connect(1, lock='RO')):\n"
        "    with again() as pool:\n"
        "        assert pool.access == 'RO'\n"
        "        for name, w in pool.arrays().items():\n"
        "            print(name, hex(w.ctypes.data), w.dtype, w.shape, w.sum())\n"
    )
    assert output(code, str(state)).splitlines() == expected * 2


def test_a_pool_that_wakes_to_another_layout_names_both_and_sleeps_on(service: Any) -> None:
    with committed(layout_id="one") as pool:
        pool.sleep()
        # As another process would.
        lease = attach(service, if_match=pool.generation)
        lease.allocate([frames.AllocationSpec(id="w", size=10, tag="array")])
        lease.commit(if_match=pool.generation, layout_id="two")
        lease.detach()
        with pytest.raises(client.StaleLayout) as caught:
            pool.wake()
        assert caught.value.values["expected"]["layout_id"] == "one"
        assert caught.value.values["found"]["layout_id"] == "two"
        assert pool.is_asleep
        assert service.device().domains[0].sessions == []


def test_a_wake_does_not_ask_for_the_same_generation(service: Any) -> None:
    with committed(value=4, layout_id="one") as first:
        state = first.save_state()
    # The same layout again, as a load on another node would bring it.
    with committed(value=4, layout_id="one", if_match=first.generation) as second:
        assert second.generation is not None
        assert second.generation.generation == 2
        assert second.structure_hash == first.structure_hash
    with client.restore(state) as pool:
        assert pool["w"].tolist() == [4] * 10


def test_a_wake_waits_for_a_layout_and_gives_up_at_its_deadline(service: Any) -> None:
    with committed() as pool:
        pool.sleep()
        service.drop(0)
        with pytest.raises(client.DeadlineExceeded):
            pool.wake(0.05)
        assert pool.is_asleep


def test_a_wake_after_the_service_was_restarted_is_refused_at_once(service: Any) -> None:
    before = service.gms.incarnation
    with committed() as pool:
        pool.sleep()
        service.restart()
        began = time.monotonic()
        with pytest.raises(client.StaleLayout) as caught:
            pool.wake()
        assert time.monotonic() - began < 5.0
        assert caught.value.values["expected"] == before
        assert caught.value.values["found"] == service.gms.incarnation
        assert pool.is_asleep


def test_a_wake_after_a_restart_takes_the_same_layout_when_it_was_loaded_again(
    service: Any,
) -> None:
    with committed(value=4, layout_id="one") as pool:
        pool.sleep()
        service.restart()
        output(
            "with client.connect(lock='RW') as writer:\n"
            "    writer.allocate('w', 10, 'uint8')[:] = 4\n"
            "    writer.commit(layout_id='one')\n"
        )
        pool.wake()
        assert pool["w"].tolist() == [4] * 10
        assert pool.generation is not None
        assert pool.generation.incarnation == service.gms.incarnation


def test_a_pool_that_moved_waits_for_its_layout_only_when_asked_to(service: Any) -> None:
    with committed() as pool:
        state = pool.save_state()
    service.restart()
    with pytest.raises(client.StaleLayout, match="the layout is lost"):
        client.restore(state)
    with pytest.raises(client.DeadlineExceeded):
        client.restore(state, deadline_s=0.05, await_layout=True)


def test_a_cache_comes_back_empty_at_the_same_addresses(service: Any) -> None:
    with client.connect(lock="RW", domain="kv") as cache:
        blocks = cache.allocate("blocks", (4, MIB), np.uint8)
        blocks[:] = 9
        before = address(blocks)
        cache.sleep()
        assert service.device().used == 0
        cache.wake()
        assert address(blocks) == before
        assert (cache.access, int(blocks.sum())) == ("RW", 0)
        blocks[:] = 1
        with pytest.raises(client.SnapbackError, match="kv"):
            cache.commit()
        blocks[:] = 2


def test_a_cache_is_restored_empty_in_another_process(service: Any) -> None:
    with client.connect(lock="RW", domain="kv") as cache:
        before = address(cache.allocate("blocks", 100, np.int32))
        state = cache.save_state()
    with client.restore(state) as cache:
        assert address(cache["blocks"]) == before
        assert cache["blocks"].tolist() == [0] * 100


def test_weights_and_cache_of_two_devices_live_side_by_side(service: Any) -> None:
    pools = [
        client.connect(lock="RW", device=device, domain=domain)
        for device in (0, 1)
        for domain in ("weights", "kv")
    ]
    places = {address(pool.allocate("a", 10, np.uint8)) for pool in pools}
    assert places == {FIRST_ADDRESS + n * (1 << 39) for n in range(4)}
    for pool in pools:
        pool.close()


def test_either_builds_the_first_time_and_reads_the_next(service: Any) -> None:
    with client.connect() as pool:
        assert pool.access == "RW"
        pool.allocate("w", 10, np.uint8)[:] = 6
        pool.commit()
    with client.connect() as pool:
        assert pool.access == "RO"
        assert pool["w"].tolist() == [6] * 10


def test_a_failed_commit_leaves_the_arrays_writable(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        with pytest.raises(client.NotEligible):
            pool.commit()
        array = pool.allocate("w", 10, np.uint8)
        pool.generation = client.GenerationRef(incarnation="other", generation=9)
        with pytest.raises(client.GenerationMismatch):
            pool.commit()
        array[:] = 5
        assert pool.access == "RW"


def test_arrays_are_made_together_or_not_at_all(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        with pytest.raises(client.OutOfDeviceMemory):
            pool.allocate_many({"a": (MIB, "u1"), "b": (200 * MIB, "u1")})
        assert pool.arrays() == {}
        pool.allocate("a", MIB, "u1")
        with pytest.raises(client.LayoutConflict):
            pool.allocate("a", MIB, "u1")
        pool["a"][:] = 1


def test_two_pools_of_one_range_cannot_be_open_in_one_process(service: Any) -> None:
    with committed():
        with pytest.raises(client.AddressTaken) as caught:
            client.connect(lock="RO")
        assert caught.value.values["address"] == FIRST_ADDRESS
        assert len(service.device().domains[0].sessions) == 1


def test_a_forked_child_may_close_a_pool_and_do_nothing_else_with_it(service: Any) -> None:
    code = TRACES + (
        "import socket\n"
        "pool = client.connect(lock='RW')\n"
        "pool.allocate('w', 10, 'u1')[:] = 7\n"
        "uses = [lambda: pool.allocate('x', 1, 'u1'), lambda: pool['w'], lambda: pool.free('w'),\n"
        "        pool.arrays, pool.commit, pool.sleep, pool.wake, pool.save_state,\n"
        "        pool._lease.allocations, pool._lease.detach]\n"
        "def sockets():\n"
        "    fds = [pathlib.Path('/proc/self/fd', fd) for fd in os.listdir('/proc/self/fd')]\n"
        "    return sum(os.readlink(fd).startswith('socket:') for fd in fds if fd.is_symlink())\n"
        "if (pid := os.fork()) == 0:\n"
        "    refused, inherited = 0, sockets()\n"
        "    for use in uses:\n"
        "        try:\n"
        "            use()\n"
        "        except client.NotEligible as error:\n"
        "            refused += error.values == {'owner': os.getppid(), 'pid': os.getpid()}\n"
        "    inherited += traces()[0]\n"
        "    pool.close()\n"
        "    os._exit(100 + refused if (inherited, sockets()) == (0, 0) else 1)\n"
        "status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])\n"
        "pool.commit()\n"
        "print(status - 100 == len(uses), pool['w'].tolist() == [7] * 10, sockets())\n"
    )
    assert output(code) == "True True 1\n"


@pytest.mark.parametrize(
    ("visible", "device", "index"),
    [
        (None, 1, 1),
        ("", 1, 1),
        ("all", 0, 0),
        ("all", 1, 1),
        ("void", 1, 1),
        ("none", 0, 0),
        ("0,1", 1, 1),
        ("1,0", 1, 0),
        (" 1 ", 0, 1),
        ("{1}", 0, 1),
        ("{1},{0}", 1, 0),
        ("{1:.13}", 0, 1),
        ("void", "{1}", 1),
        ("void", "{1:.13}", 1),
    ],
)
def test_a_device_is_found_by_the_number_that_this_process_has_for_it_or_by_its_name(
    service: Any,
    monkeypatch: pytest.MonkeyPatch,
    visible: str | None,
    device: int | str,
    index: int,
) -> None:
    if visible is None:
        monkeypatch.delenv("NVIDIA_VISIBLE_DEVICES")
    else:
        monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", visible.format(*service.uuids))
    name = device if isinstance(device, int) else device.format(*service.uuids)
    with client.connect(name, lock="RW") as pool:
        assert pool.device == service.uuids[index]
        assert len(service.device(index).domains[0].sessions) == 1


@pytest.mark.parametrize(
    ("visible", "device", "named"),
    [
        ("{1}", 1, "1"),
        ("{0},{1}", -1, "-1"),
        ("{0},GPU-gone", 1, "GPU-gone"),
        ("void", 2, "2"),
        ("MIG-1", 0, "MIG-1"),
        ("all", "GPU-", "GPU-"),
        ("all", "cuda:0", "cuda:0"),
    ],
)
def test_a_device_that_is_not_there_is_named(
    service: Any, monkeypatch: pytest.MonkeyPatch, visible: str, device: int | str, named: str
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", visible.format(*service.uuids))
    with pytest.raises(client.UnknownDevice, match=f"(?<![0-9]){named}(?![0-9])"):
        client.connect(device)


@pytest.mark.parametrize("index", [None, 0])
def test_a_state_that_was_saved_when_pools_were_placed_by_ordinal_is_restored(
    service: Any, index: int | None
) -> None:
    """Recorded then, with ordinal 1; its address counts, also on a device of another index."""
    state = (POOLS / "placed-by-ordinal.json").read_bytes()
    device = None if index is None else service.uuids[index]
    with client.connect(device or 1, lock="RW") as pool:
        pool.allocate("w", (3, 5), "f4")[:] = 7
        pool.allocate("b", 7, "i2")
        pool.commit(layout_id="golden")
        pool.sleep()
        if device is None:
            pool.close()
        with client.restore(state, device=device) as restored:
            assert restored.address("w") == json.loads(state)["address"]
            assert restored["w"].tolist() == [[7.0] * 5] * 3


def test_a_device_of_a_claim_is_found_by_its_place_in_the_container(
    service: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for number, uuid in ((10, "GPU-unknown"), (2, service.uuids[0])):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "device.json").write_text(json.dumps({"uuid": uuid, "x": 1}))
    monkeypatch.setenv("SNAPBACK_DEVICE_DIR", str(tmp_path))
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", "void")
    # As after a restore: of the container that the process was saved in.
    monkeypatch.setenv("SNAPBACK_GPU_0", "GPU-of-another-node")
    with client.connect(0, lock="RW") as pool:
        assert pool.device_kind == "simulated"
    with pytest.raises(client.UnknownDevice):
        client.connect(2)


def test_a_missing_socket_folder_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GMS_SOCKET_DIR", raising=False)
    with pytest.raises(errors.InvalidInput, match="GMS_SOCKET_DIR"):
        client.connect("GPU-1")


@pytest.mark.parametrize("folder", ["gms", "./gms", "/run/../gms", "/run/gms/.", "/run/gms "])
def test_a_socket_folder_that_depends_on_something_else_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, folder: str
) -> None:
    with pytest.raises(
        errors.InvalidInput, match=f"socket_dir={folder!r} is no absolute path"
    ) as caught:
        client.connect("GPU-1", socket_dir=folder)
    assert caught.value.next_step == "set socket_dir to the absolute path of the folder"
    monkeypatch.setenv("GMS_SOCKET_DIR", folder)
    with pytest.raises(errors.InvalidInput, match=f"GMS_SOCKET_DIR={folder!r} is no absolute path"):
        client.connect("GPU-1")


@pytest.mark.parametrize(
    ("visible", "expected"), [("{0},{1}", 2), ("{1}", 1), ("void", 1), ("all", 1), ("", 1)]
)
def test_the_numbers_below_the_count_of_devices_can_be_connected_to(
    service: Any, monkeypatch: pytest.MonkeyPatch, visible: str, expected: int
) -> None:
    monkeypatch.setenv("NVIDIA_VISIBLE_DEVICES", visible.format(*service.uuids))
    assert client.device_count() == expected
    pools = [client.connect(number, lock="RW") for number in range(client.device_count())]
    assert len({pool.device for pool in pools}) == expected
    for pool in pools:
        pool.close()


def test_the_state_of_another_size_or_place_is_refused(service: Any) -> None:
    with committed() as pool:
        good = json.loads(pool.save_state())
    slot = good["slots"][0]
    for change in (
        {"slots": [slot | {"at": 5}]},
        {"slots": [slot | {"at": good["reserved"]}]},
        {"slots": [slot, slot]},
        {"slots": [slot | {"shape": [3_000_000_000]}]},
        {"slots": [slot | {"dtype": "O"}]},
        {"slots": [slot | {"dtype": "nonsense"}]},
        {"address": 4096},
        {"address": good["address"] + 1},
        {"reserved": 2**60},
        {"type": "something-else"},
    ):
        with pytest.raises(errors.InvalidMessage):
            client.restore(json.dumps(good | change).encode())
    with pytest.raises(client.SnapbackError):
        client.restore(json.dumps(good | {"version": 2}).encode())


def test_a_writer_that_gave_up_what_was_committed_commits_anew(service: Any) -> None:
    with committed() as pool:
        first = pool.generation
    with client.connect(lock="RW", if_match=first, replace=True) as pool:
        assert pool.generation is None
        pool.allocate("w", 20, np.uint8)[:] = 2
        assert pool.commit().generation == 2
    with client.connect(lock="RO") as pool:
        assert pool["w"].sum() == 40


MANY = {f"w{number}": (10, "u1") for number in range(300)}
"""Arrays whose descriptors come in three messages."""


@pytest.mark.parametrize("count", [100, 300])
def test_arrays_for_which_no_descriptor_is_left_are_refused_with_the_limit(
    launch: Any, count: int
) -> None:
    launch(granularity=4096)
    code = (
        TRACES
        + FEW_FILES
        + (
            "import sys\n"
            "pool = client.connect(lock='RW')\n"
            "limit, before = leave(50), traces()\n"
            "try:\n"
            "    pool.allocate_many({f'w{n}': (10, 'u1') for n in range(int(sys.argv[1]))})\n"
            "except client.SnapbackError as error:\n"
            "    said = f'{limit} files' in str(error), 'ulimit -n' in error.next_step\n"
            "    print(error.reason, *said)\n"
            "    print(traces()[0], before[1] - traces()[1])\n"
        )
    )
    # Of all descriptors the session alone is closed.
    assert output(code, str(count)) == "TooManyOpenFiles True True\n0 1\n"


def test_a_pool_for_which_no_descriptor_is_left_sleeps_until_it_may_have_them(launch: Any) -> None:
    launch(granularity=4096)
    code = (
        "import os\n"
        + FEW_FILES
        + (
            "pool = client.connect(lock='RW')\n"
            "arrays = pool.allocate_many({f'w{n}': (10, 'u1') for n in range(100)})\n"
            "arrays['w99'][:] = 7\n"
            "pool.commit()\n"
            "pool.sleep()\n"
            "leave(50)\n"
            "try:\n"
            "    pool.wake()\n"
            "except client.SnapbackError as error:\n"
            "    print(error.reason, pool.is_asleep)\n"
            "leave(200)\n"
            "pool.wake()\n"
            "print(pool['w99'].tolist() == [7] * 10)\n"
        )
    )
    assert output(code) == "TooManyOpenFiles True\nTrue\n"


@pytest.mark.parametrize("mapped", [0, 130])
def test_after_a_mapping_that_fails_its_error_is_raised_and_the_pool_goes_on(
    launch: Any, monkeypatch: pytest.MonkeyPatch, mapped: int
) -> None:
    launch(granularity=4096)
    real, calls = reservation._mmap, itertools.count()

    def mmap(address: int, size: int, prot: int, flags: int, fd: int) -> int:
        if fd >= 0 and next(calls) == mapped:
            raise OSError(errno.ENOMEM, "no more mappings")
        return real(address, size, prot, flags, fd)

    with client.connect(lock="RW") as pool:
        monkeypatch.setattr(reservation, "_mmap", mmap)
        with pytest.raises(OSError, match="no more mappings"):
            pool.allocate_many(MANY)
        assert pool.arrays() == {}
        pool.allocate_many(MANY)["w299"][:] = 7
        pool.commit()
        assert pool["w299"].tolist() == [7] * 10


def hang_up_within_an_export(listener: socket.socket) -> None:
    """Serve one client, up to the first of two parts of an export."""
    info = frames.AllocationInfo(id="w", size=1, aligned=1, tag="", slot=0)
    part = frames.Exported(allocations=[info], part=1, parts=2)
    sock = listener.accept()[0]
    with sock, Path(os.devnull).open() as memory:
        sock.recv(65536)
        send(sock, frames.encode_frame(ATTACHED))
        sock.recv(65536)
        send(sock, frames.encode_frame(part), [memory.fileno()])


def test_a_service_that_ends_within_an_export_is_what_the_error_says(socket_dir: Path) -> None:
    request = frames.Attach(
        device="d", domain=frames.MemoryDomain.KV, lock=frames.LockMode.RW, deadline_s=5.0
    )
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(socket_dir / "gms.sock"))
        listener.listen()
        served = threading.Thread(target=hang_up_within_an_export, args=(listener,))
        served.start()
        lease = Lease.attach(str(socket_dir), request)
        with pytest.raises(ConnectionLost, match="closed the connection"):
            list(lease.export(["w"], frames.Access.RW))
        served.join()


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
        for kind in (KeyError, errors.NotFound):
            with pytest.raises(kind) as missing:
                pool["x"]
            assert str(missing.value) == "the pool has no array 'x'"
        assert "Next: it has: w" in "".join(traceback.format_exception(missing.value))
        for kind in (TimeoutError, errors.DeadlineExceeded):
            with pytest.raises(kind):
                client.connect(lock="RW", deadline_s=0.1)
        for kind in (MemoryError, errors.OutOfDeviceMemory):
            with pytest.raises(kind):
                pool.allocate("big", 10_000 * MIB, "int8", wait_s=0)
    for kind in (ValueError, errors.InvalidInput):
        with pytest.raises(kind, match="lock 'rw' is not known"):
            client.connect(lock="rw")
        with pytest.raises(kind, match="domain 'weight' is not known"):
            client.connect(domain="weight")


@pytest.mark.parametrize(
    ("name", "shape", "dtype", "said"),
    [
        ("two words", 3, "int8", "the name of an array 'two words' must match"),
        ("", 3, "int8", "the name of an array '' must match"),
        ("w", 3, "nonsense", "dtype 'nonsense' is not known"),
        ("w", 3, object, "dtype object cannot live in shared memory"),
        ("w", 3, "V0", "cannot live in shared memory"),
        ("w", 3, [("a", "i4"), ("b", "f4")], "cannot live in shared memory"),
        (3, 3, "int8", "the name of an array must be a str, 3 is of type int"),
        ("w", -1, "int8", "the shape of array 'w' has a dimension that is negative"),
        ("w", (3, -2), "int8", "the shape of array 'w' has a dimension that is negative"),
        ("w", (-3, -2), "int8", "the shape of array 'w' has a dimension that is negative"),
        ("new", (-3, -2), "int8", "is negative or too large"),
        ("new", (0, 2**70), "int8", "is negative or too large"),
        ("w", 2.7, "int8", "the shape of array 'w' is 2.7, which is no int"),
        ("w", (2, 2.0), "int8", r"is \(2, 2.0\), which is no int and no sequence of ints"),
        ("w", "12", "int8", "is '12', which is no int"),
        ("w", [1] * 33, "int8", "or more than 32"),
    ],
)
def test_a_wrong_argument_is_named_and_nothing_is_freed(
    service: Any, name: Any, shape: Any, dtype: Any, said: str
) -> None:
    with client.connect(lock="RW") as pool:
        kept = pool.allocate("w", 3, "int8")
        kept[:] = 5
        with pytest.raises(ValueError, match=said):
            pool.allocate(name, shape, dtype, overwrite=name != "new")
        assert list(pool) == ["w"]
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
        with pytest.raises(MemoryError):
            pool.allocate("more", size, "int8")
        assert list(pool) == ["other", "w"]


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
        with pytest.raises(errors.LayoutError, match="no place for array 'w5'"):
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


@pytest.mark.parametrize("kind", ["bfloat16", ml_dtypes.bfloat16], ids=["name", "type"])
def test_bfloat16_is_kept_by_its_name(service: Any, kind: Any) -> None:
    with client.connect(lock="RW") as pool:
        array = pool.allocate("w", (2, 3), kind)
        assert (array.shape, array.dtype) == ((2, 3), ml_dtypes.bfloat16)
        array[:] = np.full((2, 3), 1.0, "float32")
        pool.commit()
        pool.sleep()
        pool.wake()
    with client.connect(lock="RO") as reader:
        found = reader["w"]
        assert found.dtype == dtype_of("bfloat16") == ml_dtypes.bfloat16
        assert set(found.view("uint16").ravel()) == {0x3F80}


@pytest.mark.parametrize("name", RAW)
def test_a_type_that_numpy_lacks_has_the_width_that_is_written_down(name: str) -> None:
    assert (dtype_of(name).name, dtype_of(name).itemsize) == (name, np.dtype(RAW[name]).itemsize)


def test_without_ml_dtypes_no_array_of_its_types_is_made_or_read(
    service: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("w", 2, "bfloat16")[:] = 1.5
        pool.commit()
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    with pytest.raises(errors.InvalidInput, match="no bfloat16 without a package ml_dtypes") as no:
        client.connect(lock="RO")
    assert no.value.next_step == "pip install --upgrade ml_dtypes; or keep the bits as uint16"
    with (
        client.connect(lock="RW", domain="kv") as pool,
        pytest.raises(ValueError, match="no float8_e5m2 without"),
    ):
        pool.allocate("w", 2, "float8_e5m2")


def test_a_message_that_is_none_of_several_is_not_called_by_all_their_names() -> None:
    with pytest.raises(errors.InvalidMessage) as refused:
        decode_msgpack(b"\x80", frames.Request)  # type: ignore[arg-type]
    assert str(refused.value).startswith("not a valid message: ")
    assert "|" not in str(refused.value)
