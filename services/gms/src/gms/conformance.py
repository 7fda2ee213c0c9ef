"""`python -m gms.conformance --device simulated|cuda`: whether a device keeps the rules.

Needs nothing but this package. The rules of the device itself come first; then those of the service
on it, with its clients in processes of their own. What a kind of device cannot do is skipped with
its reason; a rule that is broken is told with what was found, and the status is 1. Where there is
no such device it is 2.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import mmap
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

import msgspec

import snapback_client as client
from gms.adapters.cuda import CudaDevice
from gms.adapters.lease_socket import LeaseServer
from gms.adapters.simulated import SimulatedDevice, allow_many_descriptors
from gms.adapters.transfer_process import TransferProcesses
from gms.domain.tasks import LoadTask, SaveTask, TransferDone
from gms.handlers.memory_server import MemoryServer
from gms.handlers.sessions import LeaseSessions
from gms.ports import Device
from snapback_client.cuda import CudaDriver, CudaUnavailable
from snapback_client.frames import Access, Attach, LockMode, MemoryDomain
from snapback_client.lease import Lease
from snapback_client.reservation import Reservation, address_of, reserve
from snapshot_shared.artifact import part_path
from snapshot_shared.errors import (
    ArtifactCorrupt,
    InvalidInput,
    OutOfDeviceMemory,
    SnapbackError,
    UnknownDevice,
)
from snapshot_shared.ids import derived_uid

CAPACITY = 64 * 1024 * 1024
WORDS = b"the same bytes"
MANY = 4_000
"""How many allocations of one granule are handed over in one go."""

_CALL_S = 60.0
_NO_DEVICE = 2

T = TypeVar("T")


class Broken(Exception):
    """A rule does not hold; the message says what was found."""


class Skipped(Exception):
    """This kind of device cannot keep a rule; the message says why."""


class Rig(Protocol):
    """A device that is tried."""

    @property
    def device(self) -> Device:
        """The device, with nothing allocated."""
        ...

    def many(self) -> Device:
        """Give a device that has room for `MANY` allocations. Skipped. Whoever asks closes it."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class SimulatedRig:
    """A simulated device of 64 MiB."""

    def __init__(self) -> None:
        """Make an empty device."""
        self.device: Device = SimulatedDevice(node="conformance", index=0, capacity=CAPACITY)

    def many(self) -> Device:
        allow_many_descriptors()
        return SimulatedDevice(
            node="conformance", index=0, capacity=CAPACITY, granularity=mmap.PAGESIZE
        )

    def close(self) -> None:
        self.device.close()


class CudaRig:
    """A real device."""

    def __init__(self, ordinal: int) -> None:
        """Use a visible device. CudaUnavailable, UnknownDevice."""
        self._driver = CudaDriver()
        if not 0 <= ordinal < self._driver.devices:
            raise UnknownDevice(
                f"CUDA shows {self._driver.devices} devices here, and none with ordinal {ordinal}",
                next_step="look with `nvidia-smi`",
                ordinal=ordinal,
            )
        self._ordinal = ordinal
        self.device: Device = CudaDevice(self._driver, ordinal)

    def many(self) -> Device:
        info = self.device.info
        if info.capacity < 2 * MANY * info.granularity:
            raise Skipped(f"{MANY} granules do not fit well in {info.capacity} bytes")
        return CudaDevice(self._driver, self._ordinal)

    def close(self) -> None:
        self.device.close()


# The device.


def says_what_it_is(rig: Rig) -> None:
    """It has a uuid, a product, a capacity and whole granules."""
    info = rig.device.info
    _require(info.uuid.startswith("GPU-"), f"its uuid is {info.uuid!r}")
    _require(bool(info.product), "its product has no name")
    _require(info.granularity > 0 and info.granularity % mmap.PAGESIZE == 0, "granules are odd")
    _require(info.capacity >= 4 * info.granularity, f"its capacity is {info.capacity}")


def counts_what_is_taken(rig: Rig) -> None:
    """Memory is taken by create and back after release."""
    before = rig.device.used
    handle = rig.device.create(rig.device.info.granularity)
    taken = rig.device.used - before
    rig.device.release(handle)
    _require(taken == rig.device.info.granularity, f"one granule took {taken} bytes")
    _require(rig.device.used == before, f"{rig.device.used - before} bytes did not come back")


def refuses_odd_sizes(rig: Rig) -> None:
    """A size is whole granules."""
    for size in (0, -1, 1, rig.device.info.granularity + 1):
        _refuses(InvalidInput, lambda size=size: rig.device.create(size), f"{size} bytes")  # type: ignore[misc]


def refuses_more_than_it_has(rig: Rig) -> None:
    """More than the device has is refused, and nothing is taken."""
    info, before = rig.device.info, rig.device.used
    too_much = -(-info.capacity // info.granularity) * info.granularity + info.granularity
    _refuses(OutOfDeviceMemory, lambda: rig.device.create(too_much), f"{too_much} bytes")
    _require(rig.device.used == before, "a refusal took memory")


def gives_zeroes(rig: Rig) -> None:
    """New memory is zero, also where old memory was."""
    _needs(rig, "zeroed", "this kind of device does not say what new memory holds")
    size = rig.device.info.granularity
    for _ in range(4):
        with _exported(rig, Access.RW) as descriptor, _mapped(rig, descriptor, Access.RW) as at:
            found = at.read(0, size)
            _require(not found.strip(b"\0"), "bytes of an earlier allocation are visible")
            at.write(0, WORDS * 100)


def shares_bytes(rig: Rig) -> None:
    """Two exports of one allocation show the same bytes."""
    with _allocated(rig) as handle, contextlib.ExitStack() as stack:
        one = stack.enter_context(_descriptor(rig, handle, Access.RW))
        two = stack.enter_context(_descriptor(rig, handle, Access.RO))
        writer = stack.enter_context(_mapped(rig, one, Access.RW))
        reader = stack.enter_context(_mapped(rig, two, Access.RO))
        writer.write(4096, WORDS)
        found = reader.read(4096, len(WORDS))
        _require(found == WORDS, f"{WORDS!r} was written, {found!r} was read")


def reserves_where_asked(rig: Rig) -> None:
    """A range of addresses stands where it was asked for."""
    wanted = address_of(63, is_kv=True)
    with _mapped_at(rig, address=wanted) as at:
        if at.address != wanted:
            raise Skipped(
                f"it takes an address for a hint, and gave {at.address:#x} for {wanted:#x}: "
                "a pool may not come back in another process"
            )


def keeps_addresses(rig: Rig) -> None:
    """What is unmapped can be mapped again at the same address, with the same bytes."""
    size = rig.device.info.granularity
    with (
        _allocated(rig) as handle,
        _descriptor(rig, handle, Access.RW) as descriptor,
        _mapped_at(rig) as at,
    ):
        first = at.range.map(descriptor, 0, size, writable=True)
        at.write(0, WORDS)
        at.range.unmap()
        second = at.range.map(descriptor, 0, size, writable=False)
        _require(first == second, f"it is at {second:#x}, not {first:#x}")
        _require(at.read(0, len(WORDS)) == WORDS, "other bytes are there")


def outlives_its_server(rig: Rig) -> None:
    """A mapping keeps its bytes after the service has released the memory."""
    handle = rig.device.create(rig.device.info.granularity)
    with (
        _descriptor(rig, handle, Access.RW) as descriptor,
        _mapped(rig, descriptor, Access.RW) as at,
    ):
        at.write(0, WORDS)
        rig.device.release(handle)
        _require(at.read(0, len(WORDS)) == WORDS, "the bytes went with the release")


def outlives_its_descriptor(rig: Rig) -> None:
    """A mapping keeps its bytes after the descriptor was closed."""
    with _allocated(rig) as handle, _mapped_at(rig) as at:
        with _descriptor(rig, handle, Access.RW) as descriptor:
            at.range.map(descriptor, 0, rig.device.info.granularity, writable=True)
        at.write(0, WORDS)
        _require(at.read(0, len(WORDS)) == WORDS, "the bytes went with the descriptor")


def exports_for_reading_only(rig: Rig) -> None:
    """A read-only export cannot be mapped for writing."""
    _needs(rig, "read-only-exports", _NO_ACCESS_MODE)
    with _exported(rig, Access.RO) as descriptor:
        _refuses(OSError, lambda: _map_once(rig, descriptor), "a writable mapping")


def seals(rig: Rig) -> None:
    """After seal nobody gets a new writable mapping."""
    _needs(rig, "read-only-exports", _NO_ACCESS_MODE)
    with _allocated(rig) as handle:
        rig.device.seal(handle)
        with _descriptor(rig, handle, Access.RW) as descriptor:
            _refuses(OSError, lambda: _map_once(rig, descriptor), "a writable mapping")


_NO_ACCESS_MODE = "its descriptors have no access mode: every importer may ask for writing"


# The service on it.


def clears_what_is_new(rig: Rig) -> None:
    """A client's new array is zero, also where another's was."""
    with _serving(rig.device) as service:
        for _ in range(4):
            with service.connect("RW") as pool:
                array = pool.allocate("array", rig.device.info.granularity, "uint8")
                _require(not _bytes(array).strip(b"\0"), "bytes of an earlier client are visible")
                _fill(array, 0xC3)


def shares_between_processes(rig: Rig) -> None:
    """A reader in another process sees what was committed, through a descriptor."""
    with _serving(rig.device) as service, service.connect("RW") as pool:
        _committed(pool)
        found = service.other_process(_READER)
        _require(found.stdout.strip() == WORDS.hex(), f"it saw {found.stdout or found.stderr!r}")


def protects_from_readers(rig: Rig) -> None:
    """A reader that writes is ended, and the bytes stay as they are."""
    with _serving(rig.device) as service, service.connect("RW") as pool:
        array = _committed(pool)
        found = service.other_process(_VANDAL)
        _require(found.returncode != 0, "a reader wrote and was not hindered")
        _require("tries" in found.stdout, f"the reader did not come so far: {found.stderr}")
        _require(_bytes(array)[: len(WORDS)] == WORDS, "a reader changed what is committed")


def sleeps_and_wakes(rig: Rig) -> None:
    """Arrays come back at the same addresses with the same bytes."""
    with _serving(rig.device) as service, service.connect("RW") as pool:
        array = _committed(pool)
        before, size = _address(array), rig.device.used
        for _ in range(3):
            pool.sleep()
            _require(rig.device.used == size, "the bytes of the service changed by a sleep")
            pool.wake()
            woken = pool["array"]
            _require(_address(woken) == before, f"{_address(woken):#x} was {before:#x}")
            _require(_bytes(woken)[: len(WORDS)] == WORDS, "other bytes came back")


def charges_who_holds(rig: Rig) -> None:
    """A layout that was replaced counts until its last reader has let go."""
    one = rig.device.info.granularity
    with _serving(rig.device) as service:
        with service.connect("RW") as pool:
            _committed(pool)
            first = pool.generation
        with contextlib.closing(service.attach(LockMode.RO)) as reader:
            for run in reader.export(["array"], Access.RO):
                _require(len(run) == 1, f"{len(run)} allocations were exported")
            with service.connect("RW", if_match=first) as second:
                _committed(second)
                _require(rig.device.used == 2 * one, f"{rig.device.used} bytes are counted of two")
                reader.detach()
                service.settle()
                _require(rig.device.used == one, f"{rig.device.used} bytes are counted of one")


def saves_and_loads(rig: Rig) -> None:
    """A transfer process saves a layout and loads it, and finds what was damaged on disk."""
    with _serving(rig.device) as service:
        with service.connect("RW") as pool:
            array = pool.allocate("array", 3 * rig.device.info.granularity - 100, "uint8")
            _fill(array, 0x5A)
            pool.allocate("zeros", 5000, "uint8")
            _fill(pool.allocate("words", len(WORDS), "uint8"), WORDS)
            pool.commit()
            saved, generation = service.transfer(service.save_task()), pool.generation
        for token in ("one", "two"):
            task = msgspec.structs.replace(service.load_task(saved, token), if_match=generation)
            service.transfer(task)
            service.publish(token)
            with service.connect("RO") as pool:
                generation = pool.generation
                _require(_bytes(pool["words"]) == WORDS, "words came back as other bytes")
                _require(not _bytes(pool["zeros"]).strip(b"\0"), "zeros came back as other bytes")
                _require(_bytes(pool["array"]).count(0x5A) == array.nbytes, "bytes were lost")
        service.damage()
        task = msgspec.structs.replace(service.load_task(saved, "three"), if_match=generation)
        _refuses(ArtifactCorrupt, lambda: service.transfer(task), "a damaged file")


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
            _require(found == MANY, f"{found} arrays came back")
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

from gms import client
folder, device = sys.argv[1:]
with client.connect(device, lock="RO", socket_dir=folder, deadline_s=30) as pool:
    exec(sys.stdin.read())
"""

RULES: tuple[Callable[[Rig], str | None], ...] = (
    says_what_it_is,
    counts_what_is_taken,
    refuses_odd_sizes,
    refuses_more_than_it_has,
    gives_zeroes,
    shares_bytes,
    reserves_where_asked,
    keeps_addresses,
    outlives_its_server,
    outlives_its_descriptor,
    exports_for_reading_only,
    seals,
    clears_what_is_new,
    shares_between_processes,
    protects_from_readers,
    sleeps_and_wakes,
    charges_who_holds,
    saves_and_loads,
    hands_over_many,
)


def check(rig: Rig, write: Callable[[str], object]) -> bool:
    """Try every rule, tell what came of each, and say whether none is broken."""
    is_sound = True
    for rule in RULES:
        name = (rule.__doc__ or rule.__name__).strip()
        try:
            told = rule(rig)
        except Skipped as skipped:
            write(f"skipped  {name} ({skipped})\n")
        except Exception as error:  # noqa: BLE001 - whatever a device does wrong is a finding
            is_sound = False
            write(f"BROKEN   {name} {type(error).__name__}: {error}\n")
        else:
            write(f"holds    {name}{f' ({told})' if told else ''}\n")
    return is_sound


def main(arguments: Sequence[str] | None = None) -> int:
    """Check one device. Status 0 when no rule is broken, 1 when one is, 2 without a device."""
    parser = argparse.ArgumentParser(prog="python -m gms.conformance", description=__doc__)
    parser.add_argument("--device", choices=("simulated", "cuda"), default="simulated")
    parser.add_argument("--ordinal", type=int, default=0, help="which of the visible CUDA devices")
    chosen = parser.parse_args(arguments)
    try:
        rig: Rig = SimulatedRig() if chosen.device == "simulated" else CudaRig(chosen.ordinal)
    except (CudaUnavailable, UnknownDevice) as error:
        sys.stderr.write(f"{error.to_failure()}\n")
        return _NO_DEVICE
    except SnapbackError as error:
        sys.stderr.write(f"{error.to_failure()}\n")
        return 1
    try:
        info = rig.device.info
        sys.stdout.write(f"{info.uuid}  {info.product}\n")
        for name, value in info.capabilities.items():
            sys.stdout.write(f"  {name}: {value}\n")
        return 0 if check(rig, sys.stdout.write) else 1
    finally:
        rig.close()


def _require(holds: bool, otherwise: str) -> None:  # noqa: FBT001 - reads as a sentence
    if not holds:
        raise Broken(otherwise)


def _refuses(kind: type[Exception], call: Callable[[], object], what: str) -> None:
    try:
        call()
    except kind:
        return
    raise Broken(f"{what} was not refused")


def _needs(rig: Rig, capability: str, otherwise: str) -> None:
    if not rig.device.info.capabilities.get(capability):
        raise Skipped(otherwise)


@dataclass(frozen=True, slots=True)
class _Mapped:
    """A range of one granule, whose bytes are reached as its kind of device has it."""

    range: Any

    @property
    def address(self) -> int:
        return int(self.range.address)

    def read(self, offset: int, size: int) -> bytes:
        if isinstance(self.range, Reservation):
            return bytes(self.range.view(offset, size))
        found = bytearray(size)
        self.range.read(offset, memoryview(found))
        return bytes(found)

    def write(self, offset: int, data: bytes) -> None:
        if isinstance(self.range, Reservation):
            self.range.view(offset, len(data)).cast("B")[:] = data
        else:
            self.range.write(offset, memoryview(bytearray(data)))


@contextlib.contextmanager
def _mapped_at(rig: Rig, address: int | None = None) -> Iterator[_Mapped]:
    info = rig.device.info
    at = reserve(info.kind, info.uuid, info.granularity, address=address)
    try:
        yield _Mapped(at)
    finally:
        at.release()


@contextlib.contextmanager
def _mapped(rig: Rig, descriptor: int, access: Access) -> Iterator[_Mapped]:
    with _mapped_at(rig) as at:
        at.range.map(descriptor, 0, rig.device.info.granularity, writable=access is Access.RW)
        yield at


def _map_once(rig: Rig, descriptor: int) -> None:
    with _mapped(rig, descriptor, Access.RW):
        pass


@contextlib.contextmanager
def _allocated(rig: Rig) -> Iterator[int]:
    handle = rig.device.create(rig.device.info.granularity)
    try:
        yield handle
    finally:
        rig.device.release(handle)


@contextlib.contextmanager
def _descriptor(rig: Rig, handle: int, access: Access) -> Iterator[int]:
    descriptor = rig.device.export(handle, access)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _exported(rig: Rig, access: Access) -> Iterator[int]:
    with _allocated(rig) as handle, _descriptor(rig, handle, access) as descriptor:
        yield descriptor


def _bytes(array: Any) -> bytes:
    return bytes(array.get() if hasattr(array, "get") else array)


def _fill(array: Any, values: int | bytes) -> None:
    found = list(values) if isinstance(values, bytes) else values
    if hasattr(array, "set"):
        array.set(found)
    else:
        array[...] = found


def _address(array: Any) -> int:
    return int(array.address if hasattr(array, "address") else array.ctypes.data)


def _committed(pool: client.MemoryPool) -> Any:
    array = pool.allocate("array", 4096, "uint8")
    _fill(array, WORDS.ljust(4096, b"\0"))
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
        await self._gms.settled()
        await self._loop.shutdown_default_executor()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(_CALL_S)

    def settle(self) -> None:
        self._run(self._gms.settled())

    def connect(self, lock: str, **options: Any) -> client.MemoryPool:
        return client.connect(
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


_UID = derived_uid("conformance")


@contextlib.contextmanager
def _serving(device: Device) -> Iterator[_Service]:
    with tempfile.TemporaryDirectory(prefix="gms-") as folder:
        service = _Service(device, Path(folder))
        service.start()
        try:
            yield service
        finally:
            service.stop()


if __name__ == "__main__":
    sys.exit(main())
