"""`python -m gms.conformance --device simulated|cuda`: whether a device keeps the rules.

Needs nothing but this package. What a kind of device cannot do is skipped with its reason; a rule
that is broken is told with what was found, and the status is 1.
"""

from __future__ import annotations

import argparse
import contextlib
import mmap
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from gms.adapters.cuda import CudaDevice, CudaDriver, CudaImporter
from gms.adapters.simulated import SimulatedDevice
from gms.arena import Arena
from gms.ports import Device
from snapshot_shared.errors import InvalidInput, OutOfDeviceMemory, SnapbackError
from snapshot_shared.frames import Access

CAPACITY = 64 * 1024 * 1024
WORDS = b"the same bytes"


class Broken(Exception):
    """A rule does not hold; the message says what was found."""


class Skipped(Exception):
    """This kind of device cannot keep a rule; the message says why."""


class Mapping(Protocol):
    """Memory that was imported and mapped."""

    address: int

    def read(self, offset: int, size: int) -> bytes:
        """Copy bytes out of it."""
        ...

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes into it."""
        ...


class Rig(Protocol):
    """A device and a client's way to map what it exports. `why_not` says what it cannot enforce."""

    why_not: str

    @property
    def device(self) -> Device:
        """The device that is tried."""
        ...

    def mapped(
        self, descriptor: int, size: int, access: Access, *, address: int = 0
    ) -> AbstractContextManager[Mapping]:
        """Map a descriptor, at `address` when it is given."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


class _Mapped:
    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self.address = arena.address

    def read(self, offset: int, size: int) -> bytes:
        return bytes(self._arena.view(offset, size))

    def write(self, offset: int, data: bytes) -> None:
        self._arena.view(offset, len(data)).cast("B")[:] = data


class SimulatedRig:
    """A simulated device, mapped by the kernel."""

    why_not = ""

    def __init__(self) -> None:
        """Make an empty device of 64 MiB."""
        self.device = SimulatedDevice(node="conformance", index=0, capacity=CAPACITY)

    @contextlib.contextmanager
    def mapped(
        self, descriptor: int, size: int, access: Access, *, address: int = 0
    ) -> Iterator[Mapping]:
        arena = Arena(size, address=address or None)
        try:
            arena.map(descriptor, 0, size, writable=access is Access.RW)
            yield _Mapped(arena)
        finally:
            arena.release()

    def close(self) -> None:
        self.device.close()


class CudaRig:
    """A real device, mapped by the driver."""

    why_not = "a CUDA descriptor has no access mode: every importer may ask for writing"

    def __init__(self, ordinal: int) -> None:
        """Use a visible device. CudaUnavailable."""
        driver = CudaDriver()
        self.device = CudaDevice(driver, ordinal)
        self._importer = CudaImporter(driver, ordinal)
        self.mapped = self._importer.mapped

    def close(self) -> None:
        self.device.close()
        self._importer.close()


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
    size = rig.device.info.granularity
    for _ in range(4):
        with _exported(rig, Access.RW) as descriptor, rig.mapped(descriptor, size, Access.RW) as at:
            found = at.read(0, size)
            _require(not found.strip(b"\0"), "bytes of an earlier allocation are visible")
            at.write(0, WORDS * 100)


def shares_bytes(rig: Rig) -> None:
    """Two exports of one allocation show the same bytes."""
    size = rig.device.info.granularity
    with _allocated(rig) as handle, contextlib.ExitStack() as stack:
        one = stack.enter_context(_descriptor(rig, handle, Access.RW))
        two = stack.enter_context(_descriptor(rig, handle, Access.RO))
        writer = stack.enter_context(rig.mapped(one, size, Access.RW))
        reader = stack.enter_context(rig.mapped(two, size, Access.RO))
        writer.write(4096, WORDS)
        found = reader.read(4096, len(WORDS))
        _require(found == WORDS, f"{WORDS!r} was written, {found!r} was read")


def keeps_addresses(rig: Rig) -> None:
    """What is unmapped can be mapped again at the same address, with the same bytes."""
    size = rig.device.info.granularity
    with _allocated(rig) as handle, _descriptor(rig, handle, Access.RW) as descriptor:
        with rig.mapped(descriptor, size, Access.RW) as at:
            at.write(0, WORDS)
            address = at.address
        with rig.mapped(descriptor, size, Access.RO, address=address) as again:
            _require(again.address == address, f"it is at {again.address:#x}, not {address:#x}")
            _require(again.read(0, len(WORDS)) == WORDS, "other bytes are there")


def outlives_its_server(rig: Rig) -> None:
    """A mapping keeps its bytes after the service has released the memory."""
    size = rig.device.info.granularity
    handle = rig.device.create(size)
    with (
        _descriptor(rig, handle, Access.RW) as descriptor,
        rig.mapped(descriptor, size, Access.RW) as at,
    ):
        at.write(0, WORDS)
        rig.device.release(handle)
        _require(at.read(0, len(WORDS)) == WORDS, "the bytes went with the release")


def exports_for_reading_only(rig: Rig) -> None:
    """A read-only export cannot be mapped for writing."""
    if rig.why_not:
        raise Skipped(rig.why_not)
    size = rig.device.info.granularity
    with _exported(rig, Access.RO) as descriptor:
        _refuses(OSError, lambda: _map_once(rig, descriptor, size), "a writable mapping")


def seals(rig: Rig) -> None:
    """After seal nobody gets a new writable mapping."""
    if rig.why_not:
        raise Skipped(rig.why_not)
    size = rig.device.info.granularity
    with _allocated(rig) as handle:
        rig.device.seal(handle)
        with _descriptor(rig, handle, Access.RW) as descriptor:
            _refuses(OSError, lambda: _map_once(rig, descriptor, size), "a writable mapping")


RULES: tuple[Callable[[Rig], None], ...] = (
    says_what_it_is,
    counts_what_is_taken,
    refuses_odd_sizes,
    refuses_more_than_it_has,
    gives_zeroes,
    shares_bytes,
    keeps_addresses,
    outlives_its_server,
    exports_for_reading_only,
    seals,
)


def check(rig: Rig, write: Callable[[str], object]) -> bool:
    """Try every rule, tell what came of each, and say whether none is broken."""
    is_sound = True
    for rule in RULES:
        name = (rule.__doc__ or rule.__name__).strip()
        try:
            rule(rig)
        except Skipped as skipped:
            write(f"skipped  {name} ({skipped})\n")
        except Exception as error:  # noqa: BLE001 - whatever a device does wrong is a finding
            is_sound = False
            write(f"BROKEN   {name} {type(error).__name__}: {error}\n")
        else:
            write(f"holds    {name}\n")
    return is_sound


def main(arguments: Sequence[str] | None = None) -> int:
    """Check one device. Status 0 when no rule is broken, 1 when one is or there is no device."""
    parser = argparse.ArgumentParser(prog="python -m gms.conformance", description=__doc__)
    parser.add_argument("--device", choices=("simulated", "cuda"), default="simulated")
    parser.add_argument("--ordinal", type=int, default=0, help="which of the visible CUDA devices")
    chosen = parser.parse_args(arguments)
    try:
        rig: Rig = SimulatedRig() if chosen.device == "simulated" else CudaRig(chosen.ordinal)
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


def _map_once(rig: Rig, descriptor: int, size: int) -> None:
    with rig.mapped(descriptor, size, Access.RW):
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


if __name__ == "__main__":
    sys.exit(main())
