"""A pool: named arrays in the memory of one device, and its life from connect to close."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from msgspec import UNSET, Struct, UnsetType
from msgspec.structs import replace as changed

from snapback_client.codec import decode_json
from snapback_client.devices import count_of, names_of, ordinal_of, visible_names
from snapback_client.errors import (
    Incompatible,
    InvalidInput,
    InvalidValue,
    LayoutError,
    NoDeviceMemory,
    NoSuchArray,
    NotEligible,
    SnapbackError,
    StaleLayout,
    UnknownDevice,
    for_python,
)
from snapback_client.folders import check_folder
from snapback_client.forks import check_owner
from snapback_client.frames import (
    MEMORY_S,
    Access,
    AllocationSpec,
    Attach,
    Attached,
    GenerationRef,
    LockMode,
    MemoryDomain,
    MetadataItem,
    aligned,
)
from snapback_client.lease import Lease
from snapback_client.mappings import AddressRange, neighbours
from snapback_client.reservation import DOMAIN_BYTES, address_of, reserve
from snapback_client.slots import (
    PoolState,
    Slot,
    first_place,
    metadata_of,
    new_slots,
    read_state,
    slots_of,
    write_state,
)

if TYPE_CHECKING:
    from numpy.typing import DTypeLike

CLAIMED_DIR = "/run/snapback/gpu"

Array = Any
"""`numpy.ndarray`, or on a CUDA device `snapback_client.cuda.CudaArray`."""

Shape = int | Sequence[int]

MAX_SHOWN = 8
"""How many names of arrays a message lists."""

DEADLINE_S = 60.0
"""How long a lock is waited for unless the caller says, in seconds."""


class _Mode(StrEnum):
    WRITING = "writing"
    READING = "reading"
    ASLEEP = "asleep"
    CLOSED = "closed"


def connect(
    device: int | str = 0,
    *,
    lock: str = "RW_OR_RO",
    domain: str = "weights",
    deadline_s: float = DEADLINE_S,
    if_match: GenerationRef | None = None,
    replace: bool = False,
    name: str = "",
    socket_dir: str | None = None,
) -> MemoryPool:
    """Wait for a lock on a device's memory and open it as a pool.

    `device` is the number that CUDA has for it in this process; without CUDA its place in
    NVIDIA_VISIBLE_DEVICES or among the devices of a claim, and where these name none the index of
    the service. Or it is a uuid, or the beginning of one. UnknownDevice.

    `lock` is "RW", "RO" or "RW_OR_RO": to write while nothing is committed, to read after. A
    writer names in `if_match` the generation that it replaces, and with `replace` gives it up
    before it begins. DeadlineExceeded names who holds the lock; GenerationMismatch has both values.
    """
    pool = MemoryPool(device, domain=domain, name=name, socket_dir=socket_dir)
    pool._open(lock, deadline_s, if_match, replace=replace)  # noqa: SLF001 - our own constructor
    return pool


def device_count() -> int:
    """Return how many devices this process was given; `connect` takes the numbers below it.

    Where neither CUDA nor the environment says which they are it is 1.
    """
    return count_of(cuda=_shown_by_cuda(), visible=_visible())


def restore(
    state: bytes,
    *,
    device: int | str | None = None,
    deadline_s: float = DEADLINE_S,
    name: str = "",
    socket_dir: str | None = None,
    await_layout: bool = False,
) -> MemoryPool:
    """Open a pool from `save_state()` of another process: same arrays, same addresses.

    `device` is the ordinal of the saved pool unless given. StaleLayout when something else is
    committed there, and at once when nothing is and no client loads or writes it: `await_layout`
    waits for that, too. AddressTaken when this process uses the addresses.
    """
    pool = MemoryPool.from_state(state, device=device, name=name, socket_dir=socket_dir)
    try:
        pool.wake(deadline_s, await_layout=await_layout)
    except BaseException:
        pool.close()
        raise
    return pool


def look(device: int | str, *, deadline_s: float = DEADLINE_S, name: str = "") -> Attached:
    """Return what a device has: what is committed there, if anything, and what is free.

    Nothing is held afterwards, so it may have changed. A layout of which nothing is known here is
    as good as any.
    """
    pool = MemoryPool(device, name=name)
    lease = pool._attach(LockMode.RW_OR_RO, deadline_s)  # noqa: SLF001 - our own
    lease.detach()
    return lease.attached


class MemoryPool(Mapping[str, Array]):
    """Named arrays in the memory of one device: a mapping of names to them. One thread at a time.

    A pool of the domain `weights` writes, commits and then reads. A pool of `kv` only writes: its
    contents are dropped at `sleep` and zero after `wake`. It belongs to the process that opened it:
    a fork can only close it.
    """

    def __init__(
        self,
        device: int | str,
        *,
        domain: str = "weights",
        name: str = "",
        socket_dir: str | None = None,
    ) -> None:
        """Use `connect`, `restore` or `from_state`."""
        self._owner = os.getpid()
        self._cuda = _shown_by_cuda() if isinstance(device, int) else []
        self._names = names_of(device, cuda=self._cuda, visible=_visible())
        self._ordinal = device if isinstance(device, int) else -1
        self._domain = MemoryDomain(_one_of(MemoryDomain, "domain", domain))
        self._name = name or f"pid-{os.getpid()}"
        self._folder = _folder(socket_dir)
        self._slots: dict[str, Slot] = {}
        self._arrays: dict[str, Array] = {}
        self._reservation: AddressRange | None = None
        self._lease: Lease | None = None
        self._mode = _Mode.CLOSED
        self._end = 0
        self.generation: GenerationRef | None = None
        self.layout_id = ""
        self.structure_hash = ""

    @classmethod
    def from_state(
        cls,
        state: bytes,
        *,
        device: int | str | None = None,
        name: str = "",
        socket_dir: str | None = None,
    ) -> MemoryPool:
        """Make a pool that sleeps, from `save_state()` of another process. InvalidMessage."""
        saved = read_state(state)
        where = saved.ordinal if device is None else device
        pool = cls(where, domain=saved.domain.value, name=name, socket_dir=socket_dir)
        pool._ordinal = saved.ordinal
        pool.layout_id, pool.structure_hash = saved.layout_id, saved.structure_hash
        pool._slots = {slot.name: slot for slot in saved.slots}
        pool._end = max((slot.at + slot.aligned for slot in saved.slots), default=0)
        pool._reservation = reserve(
            saved.device_kind, pool.device, saved.reserved, address=saved.address, exact=True
        )
        pool._mode = _Mode.ASLEEP
        return pool

    @property
    def device(self) -> str:
        """The uuid of the device, or before the first lock the name under which it is asked for."""
        return self._names[0]

    # Arrays.

    @property
    def access(self) -> str:
        """What arrays allow: "RW" until the commit, "RO" after it or as a reader."""
        self._require(_Mode.WRITING, _Mode.READING)
        return (Access.RW if self._mode is _Mode.WRITING else Access.RO).value

    @property
    def is_asleep(self) -> bool:
        """Whether nothing of the device is mapped."""
        return self._mode is _Mode.ASLEEP

    def allocate(
        self,
        name: str,
        shape: Shape,
        dtype: DTypeLike,
        *,
        wait_s: float = MEMORY_S,
        overwrite: bool = False,
    ) -> Array:
        """Make one array, zeroed and writable. OutOfDeviceMemory, LayoutConflict, InvalidInput.

        Memory that others hold is waited for, up to `wait_s` seconds. With `overwrite` an array of
        that name is freed first, and must not be used any more: the new one may stand in its place.
        It is not freed where the new one can never fit beside the others of this pool.
        """
        self._require(_Mode.WRITING)
        arrays = {name: (shape, dtype)}
        if not overwrite or name not in self:
            return self.allocate_many(arrays, wait_s=wait_s)[name]
        (slot,), _ = new_slots(arrays, start=0, granularity=self.granularity)
        slot = self._placed(slot)
        self.free(name)
        self._add([slot], wait_s)
        return self._arrays[name]

    def allocate_many(
        self, arrays: Mapping[str, tuple[Shape, DTypeLike]], *, wait_s: float = MEMORY_S
    ) -> dict[str, Array]:
        """Make arrays, all or none, in one exchange with the service."""
        self._require(_Mode.WRITING)
        slots, _ = new_slots(arrays, start=self._end, granularity=self.granularity)
        self._add(slots, wait_s)
        return {slot.name: self._arrays[slot.name] for slot in slots}

    def free(self, name: str) -> None:
        """Free an array before the commit; it must not be used any more."""
        self._require(_Mode.WRITING)
        slot = self._slot(name)
        self._range.unmap(slot.at, slot.aligned)
        # Whatever the service answers: to read what is unmapped ends the process.
        del self._slots[name], self._arrays[name]
        self._held.free([name])

    def arrays(self) -> dict[str, Array]:
        """Return every array by name."""
        self._require(_Mode.WRITING, _Mode.READING)
        return dict(self._arrays)

    def address(self, name: str) -> int:
        """Return the address of an array, in the address space of its device. NotFound."""
        return self._range.address + self._slot(name).at

    def sizes(self) -> dict[str, int]:
        """Return the bytes of every array by name."""
        return {slot.name: slot.size for slot in self._slots.values()}

    @property
    def granularity(self) -> int:
        """In which bytes the device hands out memory."""
        return self._held.attached.granularity

    @property
    def imported_bytes(self) -> int:
        """How many bytes of the device are mapped here, in whole granules: none while asleep."""
        is_awake = self._mode in (_Mode.WRITING, _Mode.READING)
        return sum(slot.aligned for slot in self._slots.values()) if is_awake else 0

    def metadata(self, prefix: str = "") -> list[MetadataItem]:
        """Read what stands in the metadata store under keys with this prefix, sorted by key."""
        self._require(_Mode.WRITING, _Mode.READING)
        return self._held.metadata(prefix)

    @property
    def device_kind(self) -> str:
        """What kind of device it is: `simulated` or `cuda`."""
        return self._range.kind

    def __getitem__(self, name: str) -> Array:
        """Return one array. NotFound."""
        self._require(_Mode.WRITING, _Mode.READING)
        self._slot(name)
        return self._arrays[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names of the arrays, in the order in which they were made."""
        return iter(list(self._slots))

    def __len__(self) -> int:
        """Return how many arrays there are."""
        return len(self._slots)

    def __contains__(self, name: object) -> bool:
        """Whether there is an array of this name; a pool that sleeps knows, too."""
        return name in self._slots

    def __bool__(self) -> bool:
        """Return True: a pool without arrays is one, too."""
        return True

    # Two pools are one only if they are the same: to compare arrays would read all their memory.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __repr__(self) -> str:
        """Return the domain, the device, the mode, and how many arrays with how many bytes."""
        size = sum(slot.size for slot in self._slots.values())
        return (
            f"<MemoryPool {self._domain.value} of {self.device} {self._mode.value}, "
            f"{len(self)} arrays, {size} bytes>"
        )

    # Life.

    def commit(
        self, *, layout_id: str | None = None, metadata: Sequence[MetadataItem] = ()
    ) -> GenerationRef:
        """Publish the arrays. They stay where they are and become read-only.

        `metadata` is kept beside them; its keys must not be names of arrays.
        Slices made before keep numpy's writable flag, but writing to one ends the process.
        GenerationMismatch when something else was committed meanwhile.
        """
        self._require(_Mode.WRITING)
        # Before the publication: committed bytes must not change any more.
        self._protect(writable=False)
        try:
            self._held.put_metadata([*metadata_of(self._slots.values()), *metadata])
            done = self._held.commit(if_match=self.generation, layout_id=layout_id)
        except BaseException:
            self._protect(writable=True)
            raise
        self.layout_id, self.structure_hash = done.layout_id, done.structure_hash
        self.generation = GenerationRef(incarnation=done.incarnation, generation=done.generation)
        self._mode = _Mode.READING
        return self.generation

    def sleep(self) -> None:
        """Unmap and close everything: no mapping, import, socket or descriptor remains.

        The addresses stay reserved. Weights that are not committed cannot sleep: NotEligible.
        """
        self._require(*((_Mode.READING,) if self._is_weights else (_Mode.WRITING,)))
        self._let_go()
        self._mode = _Mode.ASLEEP

    def wake(
        self, deadline_s: float = DEADLINE_S, *, await_layout: bool = True, device: str = ""
    ) -> None:
        """Map everything again at the same addresses.

        `device` is the uuid of another device that has the memory now: that of a process which was
        restored elsewhere, from the `devices` of `restore-complete`.

        StaleLayout, with both values, when another layout is committed now, and at once when the
        service was restarted meanwhile and no client loads one; the pool still sleeps. A pool of
        another process does not know who served it; `await_layout` says whether it waits then.
        """
        self._require(_Mode.ASLEEP)
        lock = LockMode.RO if self._is_weights else LockMode.RW
        known: str | UnsetType = UNSET if await_layout else ""
        if device and device != self.device:
            self._names, self.generation = [device], None
        if self.generation is not None:
            known = self.generation.incarnation
        lease = self._attach(lock, deadline_s, known=known)
        self._lease = lease
        try:
            if self._is_weights:
                self._check_same(lease.attached)
                self._map(list(self._slots.values()), Access.RO)
            else:
                self._create(list(self._slots.values()), min(deadline_s, MEMORY_S))
        except BaseException:
            self._let_go()
            raise
        self._mode = _Mode.READING if self._is_weights else _Mode.WRITING

    def save_state(self) -> bytes:
        """Return the state for `restore` in another process. Weights must be committed."""
        if self._is_weights:
            self._require(_Mode.READING, _Mode.ASLEEP)
        else:
            self._require(_Mode.WRITING, _Mode.ASLEEP)
        return write_state(
            PoolState(
                domain=self._domain,
                ordinal=self._ordinal,
                address=self._range.address,
                reserved=self._range.size,
                layout_id=self.layout_id,
                structure_hash=self.structure_hash,
                slots=list(self._slots.values()),
                device_kind=self._range.kind,
            )
        )

    def close(self) -> None:
        """Release everything, also what was not committed. The arrays must not be used."""
        if self._owner != os.getpid():
            self._forget()
        elif self._mode in (_Mode.WRITING, _Mode.READING):
            self._let_go()
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None
        self._arrays.clear()
        self._mode = _Mode.CLOSED

    def __enter__(self) -> Self:
        """Use the pool as a context manager: it is closed at the end."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # How it is done.

    def _open(
        self, lock: str, deadline_s: float, if_match: GenerationRef | None, *, replace: bool
    ) -> None:
        mode = LockMode(_one_of(LockMode, "lock", lock))
        self._lease = self._attach(mode, deadline_s, if_match, replace=replace)
        attached = self._lease.attached
        try:
            self.generation = attached.committed
            is_reader = attached.granted is Access.RO
            if is_reader:
                self.layout_id = attached.layout_id
                self.structure_hash = attached.structure_hash
                found = slots_of(self._lease.allocations(), self._lease.metadata())
                self._slots = {slot.name: slot for slot in found}
                self._end = max((slot.at + slot.aligned for slot in found), default=0)
            # The offsets of freed arrays are used again by `overwrite` alone, so leave room for
            # four capacities.
            wanted = aligned(max(4 * attached.capacity, self._end), attached.granularity)
            reserved = min(DOMAIN_BYTES, wanted)
            # The index and not the ordinal, which differs between processes.
            address = address_of(attached.index, is_kv=not self._is_weights)
            if self._ordinal < 0:
                cuda = _shown_by_cuda() if attached.device_kind == "cuda" else []
                self._ordinal = ordinal_of(
                    attached.device, attached.index, cuda=cuda, visible=_visible()
                )
            self._reservation = reserve(
                attached.device_kind, self.device, reserved, address=address
            )
            if is_reader:
                self._map(list(self._slots.values()), Access.RO)
        except BaseException:
            self._let_go()
            self.close()
            raise
        self._mode = _Mode.READING if is_reader else _Mode.WRITING

    def _attach(
        self,
        lock: LockMode,
        deadline_s: float,
        if_match: GenerationRef | None = None,
        *,
        replace: bool = False,
        known: str | UnsetType = UNSET,
    ) -> Lease:
        while True:
            request = Attach(
                device=self.device,
                domain=self._domain,
                lock=lock,
                deadline_s=deadline_s,
                if_match=if_match,
                replace=replace,
                client=self._name,
                traceparent=os.environ.get("TRACEPARENT", ""),
                incarnation=known,
            )
            try:
                lease = Lease.attach(self._folder, request)
            except UnknownDevice as error:
                # Another device than CUDA's is meant only where the service has none that CUDA has.
                served = error.values.get("served", ())
                if len(self._names) == 1 or not set(self._cuda).isdisjoint(served):
                    raise
                del self._names[0]
            else:
                self._names = [lease.attached.device]
                return lease

    def _placed(self, slot: Slot) -> Slot:
        """Return a slot in the place of its name. NoDeviceMemory and LayoutError: it has none."""
        others = [each for each in self._slots.values() if each.name != slot.name]
        needed, capacity = (
            sum(each.aligned for each in [*others, slot]),
            self._held.attached.capacity,
        )
        if needed > capacity:
            raise NoDeviceMemory(
                f"with array {slot.name!r} of {slot.size} bytes the arrays of this pool would take "
                f"{needed} bytes, {self.device} has {capacity}",
                next_step="free other arrays first, or use a smaller shape",
                needed=needed,
                capacity=capacity,
            )
        at = first_place(others, slot.aligned)
        if at + slot.aligned > self._range.size:
            raise LayoutError(
                f"no place for array {slot.name!r} of {slot.size} bytes is left among the "
                "addresses of this pool",
                next_step="free arrays that stand beside it, or close this pool and connect again",
                size=slot.size,
                reserved=self._range.size,
            )
        return changed(slot, at=at)

    def _add(self, slots: Sequence[Slot], wait_s: float) -> None:
        self._create(slots, wait_s)
        self._end = max([self._end, *(slot.at + slot.aligned for slot in slots)])
        self._slots |= {slot.name: slot for slot in slots}

    def _create(self, slots: Sequence[Slot], wait_s: float) -> None:
        specs = [AllocationSpec(id=slot.name, size=slot.size, tag="array") for slot in slots]
        self._held.allocate(specs, wait_s=wait_s)
        # The service does not know which arrays this process has mapped: undo all after an error.
        try:
            self._map(slots, Access.RW)
            for offset, size in _places(slots):
                self._range.clear(offset, size)
        except BaseException:
            # Those of a pool that wakes stay: they are the same objects when it has woken.
            for name in {slot.name for slot in slots} - self._slots.keys():
                self._arrays.pop(name, None)
            for slot in slots:
                self._range.unmap(slot.at, slot.aligned)
            # It fails where the connection has, which is the error to raise.
            with contextlib.suppress(SnapbackError):
                self._held.free([slot.name for slot in slots])
            raise

    def _map(self, slots: Sequence[Slot], access: Access) -> None:
        writable = access is Access.RW
        # The traceback of an error keeps the generator, which reads the rest of the answer when it
        # is closed: that has to be before the next request.
        with contextlib.closing(self._exported(slots, access)) as places:
            self._range.map_all(places, writable=writable)
        for slot in slots:
            if slot.name not in self._arrays:
                self._arrays[slot.name] = slot.array(self._range)
            self._arrays[slot.name].flags.writeable = writable

    def _exported(
        self, slots: Sequence[Slot], access: Access
    ) -> Generator[tuple[int, int, int], None, None]:
        """Yield a descriptor of each array, its offset and its size. StaleLayout."""
        places = {slot.name: slot for slot in slots}
        for run in self._held.export(list(places), access):
            for info, descriptor in run:
                slot = places[info.id]
                if (info.size, info.aligned) != (slot.size, slot.aligned):
                    raise StaleLayout(
                        f"array {slot.name!r} has {info.size} bytes, {slot.size} were expected",
                        expected=slot.size,
                        found=info.size,
                    )
                yield descriptor, slot.at, slot.aligned

    def _protect(self, *, writable: bool) -> None:
        for offset, size in _places(self._slots.values()):
            self._range.protect(offset, size, writable=writable)
        for name in self._slots:
            self._arrays[name].flags.writeable = writable

    def _let_go(self) -> None:
        """Unmap everything, and only then detach."""
        lease, self._lease = self._lease, None
        try:
            if self._reservation is not None:
                self._reservation.unmap()
        except BaseException:
            # Something may still be mapped: without Detach the service keeps it charged.
            if lease is not None:
                lease.close()
            raise
        if lease is not None:
            with contextlib.suppress(SnapbackError):
                # A service that has ended charges nothing; the lease is closed either way.
                lease.detach()

    def _forget(self) -> None:
        """Close what a fork has inherited. Its addresses and the driver are no business of it."""
        if self._lease is not None:
            self._lease.close()
        self._lease = self._reservation = None

    def _check_same(self, attached: Attached) -> None:
        if (attached.device_kind or "simulated") != self._range.kind:
            raise Incompatible(
                f"{self.device} is now a device of another kind than that of this pool",
                next_step="close this pool and connect again",
                expected=self._range.kind,
                found=attached.device_kind,
            )
        known = {"layout_id": self.layout_id, "structure_hash": self.structure_hash}
        found = {"layout_id": attached.layout_id, "structure_hash": attached.structure_hash}
        if known != found:
            raise StaleLayout(
                f"{self.device} holds layout {found['layout_id']} with structure "
                f"{found['structure_hash'][:16]}, this pool knows {known['layout_id']} with "
                f"{known['structure_hash'][:16]}",
                next_step="close this pool and connect again",
                expected=known,
                found=found,
            )
        self.generation = attached.committed

    def _require(self, *modes: _Mode) -> None:
        check_owner(self._owner, "the pool")
        if self._mode not in modes:
            raise NotEligible(
                f"the pool is {self._mode.value}, this needs it {' or '.join(modes)}",
                next_step=_NEXT.get(self._mode, ""),
                mode=self._mode.value,
            )

    def _slot(self, name: str) -> Slot:
        try:
            return self._slots[name]
        except KeyError:
            known = ", ".join(sorted(self._slots)[:MAX_SHOWN]) or "none"
            raise NoSuchArray(
                f"the pool has no array {name!r}", next_step=f"it has: {known}", name=str(name)
            ) from None

    @property
    def _is_weights(self) -> bool:
        return self._domain is MemoryDomain.WEIGHTS

    @property
    def _held(self) -> Lease:
        if self._lease is None:
            raise NotEligible("the pool holds no lock")
        return self._lease

    @property
    def _range(self) -> AddressRange:
        if self._reservation is None:
            raise NotEligible("the pool is closed")
        return self._reservation


_NEXT = {
    _Mode.ASLEEP: "call wake() first",
    _Mode.WRITING: "call commit() first",
    _Mode.CLOSED: "connect again",
}


def _places(slots: Iterable[Slot]) -> list[tuple[int, int]]:
    """Return the places of arrays, offset and size, neighbours as one."""
    return neighbours((slot.at, slot.aligned) for slot in slots)


def _one_of(kind: type[StrEnum], name: str, value: str) -> str:
    """Return the value of an argument if it is one of `kind`. InvalidValue lists them."""
    known = [item.value for item in kind]
    if value not in known:
        raise InvalidValue(
            f"{name} {value!r} is not known", next_step=f"use one of: {', '.join(known)}"
        )
    return value


def _folder(socket_dir: str | None) -> str:
    folder = socket_dir or os.environ.get("GMS_SOCKET_DIR")
    if not folder:
        raise InvalidValue(
            "GMS_SOCKET_DIR is not set", next_step="set it to the folder of the GMS sockets"
        )
    try:
        return check_folder("socket_dir" if socket_dir else "GMS_SOCKET_DIR", folder)
    except InvalidInput as error:
        raise for_python(error) from None


def _shown_by_cuda() -> list[str]:
    """Return the uuids of the devices that CUDA shows to this process; makes no context."""
    # Not above: it takes numpy and looks for the driver.
    from snapback_client.cuda import CudaDriver, CudaUnavailable  # noqa: PLC0415

    try:
        return CudaDriver().uuids
    except CudaUnavailable:
        return []


def _visible() -> list[str]:
    """Return the names of the devices that this process was given; none where nothing says it."""
    return visible_names(os.environ.get("NVIDIA_VISIBLE_DEVICES", "")) or _claimed()


def _claimed() -> list[str]:
    """Return the uuids of simulated devices that were claimed through Kubernetes.

    From the folders that such a container has: its variables may be those of another container,
    from which the process was restored.
    """
    folders = list(Path(os.environ.get("SNAPBACK_DEVICE_DIR", CLAIMED_DIR)).glob("[0-9]*"))
    files = [
        folder / "device.json" for folder in sorted(folders, key=lambda each: each.name.zfill(9))
    ]
    return [decode_json(file.read_bytes(), _DeviceFile).uuid for file in files]


class _DeviceFile(Struct):
    uuid: str
