"""GPU memory for PyTorch (2.6 or later): a model's tensors lie in a pool that others share.

    import snapback_client
    from snapback_client.torch import TorchMemory

    weights = snapback_client.connect(device=0)               # the first writes, others read
    cache = snapback_client.connect(device=0, lock="RW", domain="kv")
    memory = TorchMemory({"weights": weights, "kv_cache": cache})
    if weights.access == "RW":
        with memory.region("weights"):                        # what is made here lies in the pool
            model = build()
        memory.publish(model)                                 # parameters are now read-only
    else:
        with torch.device("meta"):
            model = build()
        memory.materialise(model)
    with memory.region("kv_cache"):
        keys = torch.zeros(shape, device=memory.device)
    ...
    memory.sleep()                                            # tensors must not be touched
    memory.wake("weights")                                    # the same tensors, the same addresses
    memory.wake("kv_cache")                                   # zeros

On a simulated device `memory.device` is "cpu", and PyTorch has no allocator for host memory that
could be replaced: in a region what factory functions make (`torch.empty`, `torch.randn` …) lies in
the pool, the results of other operations do not, and `publish` copies in what does not. A region is
therefore not needed there for weights.

PyTorch and CUDA are looked for when a `TorchMemory` is made, and not before.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from snapback_client.cuda import CudaArray
from snapback_client.errors import InvalidValue, NoSuchArray, NotEligible
from snapback_client.frames import GenerationRef, MetadataItem
from snapback_client.pool import DEADLINE_S, MemoryPool
from snapback_client.tensors import (
    PREFIX,
    Segment,
    TensorPlace,
    View,
    holding,
    next_segment,
    pack,
    place_tensors,
    reaches,
    read_tensors,
)
from snapback_client.torch_devices import (
    CudaTorch,
    SegmentAllocator,
    SimulatedTorch,
    TorchUnavailable,
    device_of,
    import_torch,
)
from snapback_client.torch_models import (
    Kind,
    Named,
    as_parameter,
    check_names,
    dense_tensors,
    loose_tensors,
    named_tensors,
    place_of,
    put,
    view_of,
)

__all__ = ["SegmentAllocator", "TorchMemory", "TorchUnavailable", "tensor_of"]

_PREFIXES = {
    Kind.PARAMETER: PREFIX,
    Kind.BUFFER: "buffer:",
    Kind.ATTRIBUTE: "attribute:",
}
"""What the keys of a model's tensors begin with in the metadata store."""
_IDENTITY = "identity:model"


@dataclass
class _Part:
    """A pool, and what PyTorch has allocated in it."""

    pool: MemoryPool
    allocator: SegmentAllocator
    is_sealed: bool = False
    packed: list[Segment] = field(default_factory=list)

    @property
    def segments(self) -> list[Segment]:
        return [*self.allocator.segments, *self.packed]


class TorchMemory:
    """The memory of a model in this process: pools of one device by tag, as engines name them.

    It opens and closes no pool. One thread at a time.
    """

    def __init__(self, pools: Mapping[str, MemoryPool]) -> None:
        """Work on open pools. TorchUnavailable, CudaUnavailable; InvalidInput for two devices."""
        self._torch = import_torch()
        devices = {(pool.device_kind, pool.device) for pool in pools.values()}
        if len(devices) != 1:
            raise InvalidValue(
                f"the pools are on {len(devices)} devices, a model has one",
                next_step="make a TorchMemory for each device",
                found=sorted(uuid for _, uuid in devices),
            )
        self._device = device_of(self._torch, *devices.pop())
        self._parts = {tag: _Part(pool, SegmentAllocator(pool)) for tag, pool in pools.items()}
        self._inside = ""
        self._routing = contextlib.ExitStack()

    @property
    def device(self) -> str:
        """The device of the tensors, as PyTorch names it: `cpu` for a simulated one."""
        return self._device.name

    # Tensors come into a pool.

    @contextlib.contextmanager
    def region(self, tag: str, *, reserve: int = 0) -> Iterator[None]:
        """Have what this thread allocates on the device lie in a pool.

        On a CUDA device PyTorch calls us for memory while it holds the lock of its allocator. With
        `reserve` bytes allocated ahead these calls reach neither the service nor the driver. They
        need the interpreter all the same: where other threads free tensors of the device meanwhile,
        set PYTORCH_CUDA_ALLOC_CONF=release_lock_on_cudamalloc:True. What is reserved and not used
        is freed by `publish`.

        OutOfDeviceMemory; NotEligible for what is committed or asleep, within another region, and
        where PyTorch is set to allocate outside of pools.
        """
        part = self._part(tag)
        if part.pool.access != "RW" or part.is_sealed:
            raise NotEligible(
                f"{tag} is published, or that has begun",
                next_step="allocate in the pool before you publish, or connect again",
                tag=tag,
            )
        if self._inside:
            raise NotEligible(f"this is in the region {self._inside!r} already", tag=tag)
        if reserve:
            part.allocator.reserve(reserve)
        self._inside = tag
        try:
            with self._routing:
                self._routing.enter_context(self._device.routing(part.allocator))
                yield
        finally:
            self._inside = ""
        part.allocator.trim()

    @contextlib.contextmanager
    def outside(self) -> Iterator[None]:
        """Have what is allocated in a part of a region lie outside of the pool.

        For what lives on and is written, such as the work space of a kernel. Does nothing where
        there is no region.
        """
        tag, self._inside = self._inside, ""
        self._routing.close()
        try:
            yield
        finally:
            if tag:
                self._routing.enter_context(self._device.routing(self._parts[tag].allocator))
                self._inside = tag

    def publish(
        self,
        model: Any,
        tag: str = "weights",
        *,
        layout_id: str | None = None,
        identity: str = "",
    ) -> GenerationRef:
        """Commit a model: its parameters lie in the pool and are read-only from here on.

        Parameters that lie elsewhere are copied in. Buffers, and tensors that are attributes of a
        module, may be written later: those in the pool are moved out of it, in place, and their
        values are committed for `materialise`, where they are dense and on this device. What no
        tensor uses any more is freed. Other tensors that live in the pool stay there and become
        read-only, too. Do this before a CUDA graph is captured, which remembers addresses.
        `identity` says what the model is, such as its name, revision and rank.

        InvalidInput for parameters on another device, OutOfDeviceMemory, and the errors of
        `MemoryPool.commit`. After an error the model works, and may be published again.
        """
        part = self._part(tag)
        if part.pool.access != "RW":
            raise NotEligible(f"{tag} is published already", tag=tag)
        if self._inside:
            raise NotEligible(f"leave the region {self._inside!r} before you publish", tag=tag)
        named = dense_tensors(self._torch, model, self.device)
        self._device.synchronize()
        self._move_out(part, loose_tensors(self._torch, model, named))
        # Tensors that only a cycle of references holds are no longer used.
        gc.collect()
        part.is_sealed = True
        part.allocator.trim(self._device.live(part.allocator))
        views = self._copy_in(part, named)
        self._device.synchronize()
        metadata = _metadata(part.segments, named, views)
        if identity and part.segments:
            stands = part.segments[0].name
            metadata.append(
                MetadataItem(key=_IDENTITY, allocation=stands, offset=0, value=identity.encode())
            )
        return part.pool.commit(layout_id=layout_id, metadata=metadata)

    def materialise(
        self, model: Any, tag: str = "weights", *, identity: str = "", exact: bool = True
    ) -> None:
        """Give a model, built on the device `meta` or elsewhere, the tensors that were published.

        Parameters lie in the pool, read-only and without gradients; tied ones are one. Buffers and
        attributes are copies of this process's own, the ones that are not persistent included.
        InvalidInput when names, or shapes of parameters, differ, or where a model with another
        `identity` was published; the model is then unchanged.

        Without `exact` the pool decides: for a model whose parameters are replaced by others after
        they are loaded, as quantised weights are. Shapes may differ, parameters that the model
        lacks are added, and what the pool lacks stays as it is.
        """
        pool = self._part(tag).pool
        _check_identity(pool, identity)
        places = {kind: self._places(pool, kind) for kind in Kind}
        own = named_tensors(self._torch, model)
        if exact:
            check_names(
                own,
                {
                    name: (kind, place.shape)
                    for kind in Kind
                    for name, place in places[kind].items()
                },
            )
        like = {each.name: each.tensor for each in own if each.kind is Kind.PARAMETER}
        tied: dict[tuple[object, ...], Any] = {}
        found: list[tuple[Any, str, Kind, Any]] = []
        for kind in Kind:
            for name, place in places[kind].items():
                where = (place.segment, place.offset, *place.shape, *place.strides, place.dtype)
                if kind is not Kind.PARAMETER:
                    tensor = self._tensor(pool, place).clone()
                elif (tensor := tied.get(where)) is None:
                    tensor = as_parameter(self._torch, self._tensor(pool, place), like.get(name))
                    tied[where] = tensor
                found.append((*place_of(model, name), kind, tensor))
        for each in found:
            put(*each)

    def tensors(self, tag: str = "weights") -> dict[str, Any]:
        """Return every parameter that was published, by name, over the memory of the pool."""
        pool = self._part(tag).pool
        places = self._places(pool, Kind.PARAMETER)
        return {name: self._tensor(pool, place) for name, place in places.items()}

    # Sleep and wake.

    def sleep(self, *tags: str) -> None:
        """Unmap these pools, or all that are awake. Their tensors must not be touched.

        NotEligible for weights that are not published.
        """
        for tag in tags or [tag for tag in self._parts if not self._parts[tag].pool.is_asleep]:
            self._part(tag).pool.sleep()

    def wake(self, *tags: str, deadline_s: float = DEADLINE_S, device: str = "") -> None:
        """Map these pools again at the same addresses, or all that are asleep.

        Published tensors have their values, those of a `kv` pool are zero. `device` and the errors
        are those of `MemoryPool.wake`; pools that woke before an error are awake.
        """
        for tag in tags or [tag for tag in self._parts if self._parts[tag].pool.is_asleep]:
            self._part(tag).pool.wake(deadline_s, device=device)

    def imported_bytes(self, *tags: str) -> int:
        """Return how many bytes of the device these pools, or all, have mapped in this process.

        PyTorch's statistics have of them only what this process allocated in regions. The device
        has them once, however many processes map them.
        """
        return sum(self._part(tag).pool.imported_bytes for tag in tags or self._parts)

    # How it is done.

    def _part(self, tag: str) -> _Part:
        try:
            return self._parts[tag]
        except KeyError:
            raise NoSuchArray(
                f"there is no pool {tag!r}: {', '.join(self._parts)}", tag=tag
            ) from None

    def _move_out(self, part: _Part, tensors: list[Any]) -> None:
        """Give tensors that stand in the pool memory of their own. They stay the same objects."""
        known = reaches(part.segments)
        views = {
            str(number): view
            for number, view in enumerate(map(view_of, tensors))
            if holding(known, view)
        }
        for packed in pack(views)[0]:
            own = self._device.bytes_at(packed.address, packed.size).clone()
            for name in packed.names:
                offset = views[name].address - packed.address
                self._rebind(tensors[int(name)], own, offset, views[name])

    def _copy_in(self, part: _Part, named: list[Named]) -> dict[tuple[Kind, str], View]:
        """Copy what does not stand in the pool into one segment. Return where all tensors stand."""
        known = reaches(part.segments)
        by_key = {f"{each.kind}:{each.name}": each for each in named}
        views = {key: view_of(each.tensor) for key, each in by_key.items()}
        packs, size = pack(
            {
                key: view
                for key, view in views.items()
                if by_key[key].kind is not Kind.PARAMETER or not holding(known, view)
            }
        )
        if size:
            base = self._add(part, size)
            for packed in packs:
                new = self._device.bytes_at(base + packed.offset, packed.size)
                new.copy_(self._device.bytes_at(packed.address, packed.size))
            self._device.synchronize()
            for packed in packs:
                for key in packed.names:
                    moved = base + packed.offset + views[key].address - packed.address
                    views[key] = _at(views[key], moved)
                    if by_key[key].kind is Kind.PARAMETER:
                        data = self._device.bytes_at(moved, views[key].size)
                        self._rebind(by_key[key].tensor, data, 0, views[key])
        return {(each.kind, each.name): views[key] for key, each in by_key.items()}

    def _add(self, part: _Part, size: int) -> int:
        """Allocate a segment of exactly these bytes and return its address."""
        name = next_segment(part.pool.arrays())
        part.pool.allocate(name, size, "uint8")
        address = part.pool.address(name)
        part.packed.append(Segment(name, address, size))
        return address

    def _places(self, pool: MemoryPool, kind: Kind) -> dict[str, TensorPlace]:
        sizes = pool.sizes()
        segments = [Segment(name, pool.address(name), size) for name, size in sizes.items()]
        behind = {segment.name: segment.size for segment in reaches(segments)}
        prefix = _PREFIXES[kind]
        return read_tensors(behind, pool.metadata(prefix), prefix=prefix)

    def _tensor(self, pool: MemoryPool, place: TensorPlace) -> Any:
        return self._at(
            View(
                address=pool.address(place.segment) + place.offset,
                shape=place.shape,
                strides=place.strides,
                dtype=place.dtype,
                itemsize=place.itemsize,
            )
        )

    def _at(self, view: View) -> Any:
        """Return a tensor over memory that is mapped."""
        dtype = _dtype(self._torch, view.dtype)
        if not view.size:
            return self._torch.empty(view.shape, dtype=dtype, device=self.device)
        return self._over(self._device.bytes_at(view.address, view.size), 0, view)

    def _over(self, data: Any, offset: int, view: View) -> Any:
        """Return a tensor over bytes, from an offset on."""
        torch = self._torch
        typed = torch.empty(0, dtype=_dtype(torch, view.dtype), device=self.device)
        return typed.set_(data.untyped_storage(), offset // view.itemsize, view.shape, view.strides)

    def _rebind(self, tensor: Any, data: Any, offset: int, view: View) -> None:
        """Have a tensor, which stays the same object, stand over other bytes."""
        # What was made in inference mode takes only what was made there, and the other way round.
        with self._torch.inference_mode(tensor.is_inference()):
            tensor.data = self._over(data, offset, view)


def tensor_of(array: Any, dtype: Any = None) -> Any:
    """Return a tensor over an array of a pool, on the array's own device.

    `dtype` says what the elements are where numpy has no such type, `torch.bfloat16` over `uint16`:
    it is of the same width. PyTorch knows no read-only tensors: to write one that is committed is a
    fault of the device. TorchUnavailable; InvalidInput for a width that differs, and for slices,
    transposed arrays and another byte order: the bytes alone are taken over.
    """
    is_cuda = isinstance(array, CudaArray)
    if not (array.dtype.isnative and (is_cuda or array.flags.c_contiguous)):
        raise InvalidValue(
            f"a {array.dtype.str} array of shape {array.shape} has its elements apart, in another "
            "order, or in the byte order of another machine",
            next_step="take the array of the pool itself, and slice the tensor",
            found=array.dtype.str,
        )
    torch = import_torch()
    kind = _dtype(torch, array.dtype.name) if dtype is None else dtype
    if kind.itemsize != array.dtype.itemsize:
        raise InvalidValue(
            f"elements of {kind} have {kind.itemsize} bytes, those of the array "
            f"{array.dtype.itemsize}",
            expected=array.dtype.itemsize,
            found=kind.itemsize,
        )
    device = CudaTorch(torch, array.ordinal) if is_cuda else SimulatedTorch(torch)
    if not array.nbytes:
        return torch.empty(array.shape, dtype=kind, device=device.name)
    address = array.address if is_cuda else array.ctypes.data
    return device.bytes_at(address, array.nbytes).view(kind).view(array.shape)


def _metadata(
    segments: list[Segment], named: list[Named], views: Mapping[tuple[Kind, str], View]
) -> list[MetadataItem]:
    return [
        item
        for kind, prefix in _PREFIXES.items()
        for item in place_tensors(
            segments,
            {each.name: views[kind, each.name] for each in named if each.kind is kind},
            prefix=prefix,
        )
    ]


def _check_identity(pool: MemoryPool, identity: str) -> None:
    """Compare what was published with what is wanted. InvalidInput."""
    found = "".join(item.value.decode(errors="replace") for item in pool.metadata(_IDENTITY))
    if identity and found != identity:
        raise InvalidValue(
            f"the pool holds {found or 'a model without an identity'}, and not {identity}",
            next_step="start with the model, the revision and the ranks that were published here, "
            "or connect with lock='RW' to publish another",
            expected=identity,
            found=found,
        )


def _at(view: View, address: int) -> View:
    return dataclasses.replace(view, address=address)


def _dtype(torch: Any, name: str) -> Any:
    """Return a type by its name, which another process may have written. InvalidInput."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise InvalidValue(
            f"this PyTorch ({torch.__version__}) has no type {name!r}",
            next_step="use the version of PyTorch with which the tensors were committed",
            found=name,
        )
    return found
