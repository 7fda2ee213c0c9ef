"""The rules of the service on a device, with its clients in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import msgspec

import snapback_client
from gms.adapters.lease_socket import LeaseServer
from gms.adapters.transfer_process import TransferProcesses
from gms.conformance.device_rules import WORDS
from gms.conformance.rig import (
    MANY,
    Broken,
    Rig,
    address_of_array,
    data_of,
    fill,
    refuses,
    require,
)
from gms.domain.tasks import LoadTask, SaveTask, TransferDone
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from gms.ports import Device
from snapback_client.frames import Access, Attach, LockMode, MemoryDomain
from snapback_client.lease import Lease
from snapshot_shared.artifact import part_path
from snapshot_shared.errors import ArtifactCorrupt
from snapshot_shared.ids import derived_uid

_CALL_S = 60.0
_UID = derived_uid("conformance")

T = TypeVar("T")


def clears_what_is_new(rig: Rig) -> None:
    """A client's new array is zero, also where another's was."""
    with _serving(rig.device) as service:
        for _ in range(4):
            with service.connect("RW") as pool:
                array = pool.allocate("array", rig.device.info.granularity, "uint8")
                require(not data_of(array).strip(b"\0"), "bytes of an earlier client are visible")
                fill(array, 0xC3)


def shares_between_processes(rig: Rig) -> None:
    """A reader in another process sees what was committed, through a descriptor."""
    with _serving(rig.device) as service, service.connect("RW") as pool:
        _committed(pool)
        found = service.other_process(_READER)
        require(found.stdout.strip() == WORDS.hex(), f"it saw {found.stdout or found.stderr!r}")


def protects_from_readers(rig: Rig) -> None:
    """A reader that writes is ended by the kernel or the driver, and the bytes stay."""
    with _serving(rig.device) as service, service.connect("RW") as pool:
        array = _committed(pool)
        found = service.other_process(_VANDAL)
        require(found.returncode != 0, "a reader wrote and was not hindered")
        require("tries" in found.stdout, f"the reader did not come so far: {found.stderr}")
        require(data_of(array)[: len(WORDS)] == WORDS, "a reader changed what is committed")


def sleeps_and_wakes(rig: Rig) -> None:
    """Arrays wake at the same addresses with the same bytes."""
    with _serving(rig.device) as service, service.connect("RW") as pool:
        array = _committed(pool)
        before, size = address_of_array(array), rig.device.used
        for _ in range(3):
            pool.sleep()
            require(rig.device.used == size, "the bytes of the service changed by a sleep")
            pool.wake()
            woken = pool["array"]
            require(
                address_of_array(woken) == before, f"{address_of_array(woken):#x} was {before:#x}"
            )
            require(data_of(woken)[: len(WORDS)] == WORDS, "other bytes came back")


def charges_who_holds(rig: Rig) -> None:
    """A layout that was replaced is charged until its last reader has unmapped it."""
    one = rig.device.info.granularity
    with _serving(rig.device) as service:
        with service.connect("RW") as pool:
            _committed(pool)
            first = pool.generation
        with contextlib.closing(service.attach(LockMode.RO)) as reader:
            for run in reader.export(["array"], Access.RO):
                require(len(run) == 1, f"{len(run)} allocations were exported")
            with service.connect("RW", if_match=first) as second:
                _committed(second)
                require(rig.device.used == 2 * one, f"{rig.device.used} bytes are counted of two")
                reader.detach()
                service.drain()
                require(rig.device.used == one, f"{rig.device.used} bytes are counted of one")


def saves_and_loads(rig: Rig) -> None:
    """A transfer process saves a layout and loads it, and finds what was damaged on disk."""
    with _serving(rig.device) as service:
        with service.connect("RW") as pool:
            array = pool.allocate("array", 3 * rig.device.info.granularity - 100, "uint8")
            fill(array, 0x5A)
            pool.allocate("zeros", 5000, "uint8")
            fill(pool.allocate("words", len(WORDS), "uint8"), WORDS)
            pool.commit()
            saved, generation = service.transfer(service.save_task()), pool.generation
        for token in ("one", "two"):
            task = msgspec.structs.replace(service.load_task(saved, token), if_match=generation)
            service.transfer(task)
            service.publish(token)
            with service.connect("RO") as pool:
                generation = pool.generation
                require(data_of(pool["words"]) == WORDS, "words came back as other bytes")
                require(not data_of(pool["zeros"]).strip(b"\0"), "zeros came back as other bytes")
                require(data_of(pool["array"]).count(0x5A) == array.nbytes, "bytes were lost")
        service.damage()
        task = msgspec.structs.replace(service.load_task(saved, "three"), if_match=generation)
        refuses(ArtifactCorrupt, lambda: service.transfer(task), "a damaged file")


def hands_over_many(rig: Rig) -> str:
    """Thousands of allocations are made, exported and mapped."""
    device = rig.many()
    try:
        with _serving(device) as service, service.connect("RW") as pool:
            begun = time.perf_counter()
            pool.allocate_many({f"array-{n}": (1, "uint8") for n in range(MANY)})
            made = time.perf_counter()
            pool.commit()
            pool.sleep()
            asleep = time.perf_counter()
            pool.wake()
            woken = time.perf_counter()
            found = len(pool.arrays())
            require(found == MANY, f"{found} arrays came back")
    finally:
        device.close()
    return (
        f"{MANY}: made and mapped in {made - begun:.2f} s, protected and unmapped in "
        f"{asleep - made:.2f} s, exported and mapped again in {woken - asleep:.2f} s"
    )


_READER = """
array = pool["array"]
data = bytes(array.get() if hasattr(array, "get") else array)
print(data.rstrip(b"\\0").hex())
"""

_VANDAL = """

array = pool["array"]
print("tries", flush=True)
if hasattr(array, "get"):
    array.flags.writeable = True
    array.set(0)
else:
    ctypes.memset(array.ctypes.data, 0, array.nbytes)
"""

_OTHER = """
import sys
import msgspec

import snapback_client
folder, device = sys.argv[1:]
with snapback_client.connect(device, lock="RO", socket_dir=folder, deadline_s=30) as pool:
    exec(sys.stdin.read())
"""


def _committed(pool: snapback_client.MemoryPool) -> Any:
    array = pool.allocate("array", 4096, "uint8")
    fill(array, WORDS.ljust(4096, b"\0"))
    pool.commit()
    return array


class _Service:
    """The service on one device, its loop in a thread, its socket in a folder of its own."""

    def __init__(self, device: Device, folder: Path) -> None:
        self.device = device
        self.folder = folder
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._gms = MemoryServer(node="conformance", incarnation=folder.name, devices=[device])
        self._lease = LeaseServer(folder, LeaseSessions(self._gms))

    def start(self) -> None:
        self._thread.start()
        self._run(self._start())

    def stop(self) -> None:
        self._run(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _start(self) -> None:
        self._lease.start()

    async def _stop(self) -> None:
        await self._lease.close()
        # What a rule has committed goes, too: the next one finds an empty device.
        await self._gms.forget_when_unused(self.device.info.uuid, wait_s=_CALL_S)
        await self._gms.drained()
        await self._loop.shutdown_default_executor()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    def drain(self) -> None:
        self._run(self._gms.drained())

    def connect(self, lock: str, **options: Any) -> snapback_client.MemoryPool:
        return snapback_client.connect(
            self.device.info.uuid, lock=lock, socket_dir=str(self.folder), **options
        )

    def attach(self, lock: LockMode) -> Lease:
        request = Attach(
            device=self.device.info.uuid,
            domain=MemoryDomain.WEIGHTS,
            lock=lock,
            deadline_s=_CALL_S,
        )
        return Lease.attach(str(self.folder), request)

    def other_process(self, program: str) -> subprocess.CompletedProcess[str]:
        """Run a program with a reader's pool in another process."""
        return subprocess.run(
            [sys.executable, "-P", "-c", _OTHER, str(self.folder), self.device.info.uuid],
            input=program,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CALL_S,
        )

    def publish(self, token: str) -> None:
        async def publish() -> None:
            self._gms.publish_hidden(self.device.info.uuid, token)

        self._run(publish())

    def transfer(self, task: SaveTask | LoadTask) -> TransferDone:
        async def run() -> TransferDone:
            async with contextlib.aclosing(TransferProcesses().run(task)) as events:
                async for event in events:
                    if isinstance(event, TransferDone):
                        return event
            raise Broken("a transfer process ended without a result")

        return self._run(run())

    def save_task(self) -> SaveTask:
        committed = self._gms.table.device(self.device.info.uuid).weights.committed
        if committed is None or committed.ref is None:
            raise Broken("what was committed is gone")
        return SaveTask(**self._place(), order=f"save-{_UID}-gpu-0", layout=committed.ref)

    def load_task(self, saved: TransferDone, token: str) -> LoadTask:
        return LoadTask(
            **self._place(),
            part_digest=saved.digest,
            load_token=token,
            layout_id=saved.layout.layout_id,
            structure_hash=saved.layout.structure_hash,
        )

    def _place(self) -> dict[str, Any]:
        return {
            "socket_dir": str(self.folder),
            "root": str(self.folder / "artifacts"),
            "device": self.device.info.uuid,
            "namespace": "default",
            "content_uid": _UID,
            "generation": 1,
            "part": "gpu-0",
            "deadline_s": _CALL_S,
        }

    def damage(self) -> None:
        """Change one bit of what was saved."""
        place = part_path("default", _UID, 1, "gpu-0")
        shard = min((self.folder / "artifacts").joinpath(*place).glob("shard-*"))
        data = bytearray(shard.read_bytes())
        data[0] ^= 1
        shard.write_bytes(data)


@contextlib.contextmanager
def _serving(device: Device) -> Iterator[_Service]:
    with tempfile.TemporaryDirectory(prefix="gms-") as folder:
        service = _Service(device, Path(folder))
        service.start()
        try:
            yield service
        finally:
            service.stop()


SERVICE_RULES = (
    clears_what_is_new,
    shares_between_processes,
    protects_from_readers,
    sleeps_and_wakes,
    charges_who_holds,
    saves_and_loads,
    hands_over_many,
)
