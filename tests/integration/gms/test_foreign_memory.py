"""Memory of a device that others hold: it is counted, named and waited for.

A claimed device is one whose memory other processes can take, as they can that of a GPU.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import snapback_client as client
from gms.adapters.device_memory import ClaimedMemory, Made, Refused
from snapback_client.frames import AllocationSpec
from snapback_client.wire import send
from snapshot_shared.codec import encode_msgpack
from snapshot_shared.errors import Failure, OutOfDeviceMemory, SnapbackError
from tests.support.claimed_rig import ClaimedRig
from tests.support.gms_rig import MIB, Other, attach, open_descriptors
from tests.support.waiting import later, wait_until

FOREIGNER = """
import pathlib, sys
from gms.adapters.device_memory import ClaimedDevice
device = ClaimedDevice(pathlib.Path(sys.argv[1]), 0)
device.create(int(sys.argv[2]))
print("ready", flush=True)
sys.stdin.read()
"""


def foreigner_of(folder: Path) -> Other:
    """Start another process that has 40 MiB of the device, without the service."""
    found = Other(FOREIGNER, str(folder), str(40 * MIB))
    assert found.said == "ready"
    return found


@pytest.fixture
def rig() -> Iterator[ClaimedRig]:
    with contextlib.closing(ClaimedRig()) as rig:
        yield rig


@pytest.fixture
def service(rig: ClaimedRig, launch: Any) -> Any:
    return launch(devices=[rig.device])


@pytest.fixture
def foreigner(rig: ClaimedRig) -> Iterator[Other]:
    with foreigner_of(rig.folder) as foreigner:
        yield foreigner


def test_a_cache_wakes_into_the_memory_that_another_process_frees_meanwhile(
    rig: ClaimedRig, service: Any
) -> None:
    with client.connect(lock="RW", domain="kv") as cache:
        cache.allocate("k", 50 * MIB, "u1")
        cache.sleep()
        foreigner = foreigner_of(rig.folder)
        with later(foreigner.kill):
            cache.wake()
        assert cache["k"].nbytes == 50 * MIB


def test_what_is_free_is_what_the_device_says_and_not_what_the_service_has_left(
    service: Any, foreigner: Other
) -> None:
    # The service may answer by what the device has said before.
    wait_until(lambda: service.device().free == 24 * MIB)
    lease = attach(service)
    assert lease.attached.free == 24 * MIB
    assert service.device().used == 0
    with pytest.raises(OutOfDeviceMemory) as caught:
        lease.allocate([AllocationSpec(id="w", size=30 * MIB)], wait_s=0.2)
    assert caught.value.values == {
        "needed": 30 * MIB,
        "free": 24 * MIB,
        "capacity": 64 * MIB,
        "used": 0,
        "holders": {},
    }
    assert "30 MiB are needed" in caught.value.message
    assert "24 MiB of 64 MiB are free; this service holds 0 B, others 40 MiB" in (
        caught.value.message
    )
    assert caught.value.next_step == "end the processes that hold it"
    foreigner.kill()
    lease.allocate([AllocationSpec(id="w", size=64 * MIB)], wait_s=5.0)
    wait_until(lambda: service.device().free == 0)
    lease.detach()


def test_memory_that_no_other_can_give_up_is_refused_at_once(service: Any) -> None:
    with client.connect(lock="RW") as pool:
        pool.allocate("a", 40 * MIB, "u1")
        with pytest.raises(OutOfDeviceMemory):
            pool.allocate("b", 40 * MIB, "u1", wait_s=86400)


@pytest.mark.parametrize(
    "answer", [None, b"", encode_msgpack(Refused(Failure(reason="X", message="")))]
)
def test_a_node_that_is_silent_gone_or_too_old_does_not_say_what_is_free(
    tmp_path: Path, answer: bytes | None
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(tmp_path / "memory.sock"))
        listener.listen()
        memory = ClaimedMemory(tmp_path / "memory.sock")
        if answer is None:
            assert memory.free() is None
            return

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.recv(4096)
                if answer:
                    sock.send(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert memory.free() is None
        thread.join()
    assert memory.free() is None


class Node:
    """A node that gives these answers, with so many descriptors, to one connection."""

    def __init__(self, path: Path, *answers: tuple[bytes, int]) -> None:
        self.hung_up = False
        self._answers = answers
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._listener.settimeout(10)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        sock, _ = self._listener.accept()
        with self._listener, sock, Path(os.devnull).open() as memory:
            sock.settimeout(10)
            for answer, descriptors in self._answers:
                sock.recv(4096)
                send(sock, answer, [memory.fileno()] * descriptors)
            with contextlib.suppress(TimeoutError):
                self.hung_up = not sock.recv(4096)

    def end(self) -> None:
        self._thread.join()


MADE = encode_msgpack(Made(id=1))


@pytest.mark.parametrize(
    ("answer", "descriptors"),
    [(b"\xc1", 0), (b"\xc1", 1), (MADE, 0), (MADE, 2), (MADE, 250)],
    ids=["nonsense", "nonsense-and-memory", "no-memory", "too-much-memory", "cut"],
)
def test_after_an_answer_that_is_not_understood_the_memory_goes_with_the_connection(
    tmp_path: Path, answer: bytes, descriptors: int
) -> None:
    before = open_descriptors()
    node = Node(tmp_path / "memory.sock", (answer, descriptors))
    memory = ClaimedMemory(tmp_path / "memory.sock")
    with pytest.raises(SnapbackError):
        memory.create(MIB)
    node.end()
    assert node.hung_up
    assert open_descriptors() == before


def test_a_refusal_keeps_the_connection_and_what_it_has_made(tmp_path: Path) -> None:
    refusal = encode_msgpack(Refused(OutOfDeviceMemory("all is taken").to_failure()))
    node = Node(tmp_path / "memory.sock", (MADE, 1), (refusal, 0), (MADE, 1))
    memory = ClaimedMemory(tmp_path / "memory.sock")
    memory.create(MIB)
    with pytest.raises(OutOfDeviceMemory):
        memory.create(MIB)
    memory.create(MIB)
    memory.close()
    node.end()
    assert node.hung_up
