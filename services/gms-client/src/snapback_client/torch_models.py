"""The tensors of a model (`torch.nn.Module`): found by name, and put in the place of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from snapback_client.errors import InvalidValue
from snapback_client.tensors import View


class Kind(StrEnum):
    """What a tensor is to its module. Only a parameter is the same in all processes for good."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True, eq=False)
class Named:
    """A tensor of a model: `key` of the module `owner`. A tied one has several names."""

    name: str
    kind: Kind
    owner: Any
    key: str
    tensor: Any


def named_tensors(torch: Any, model: Any) -> list[Named]:
    """Return the parameters of a model, its buffers and the tensors that are plain attributes."""
    found: list[Named] = []
    for path, owner in model.named_modules(remove_duplicate=False):
        for kind, tensors in (
            (Kind.PARAMETER, owner._parameters),  # noqa: SLF001 - the buffers that are not saved, too
            (Kind.BUFFER, owner._buffers),  # noqa: SLF001 - as above
            (Kind.ATTRIBUTE, vars(owner)),
        ):
            found += [
                Named(f"{path}.{key}" if path else key, kind, owner, key, tensor)
                for key, tensor in tensors.items()
                if isinstance(tensor, torch.Tensor)
            ]
    return found


def dense_tensors(torch: Any, model: Any, device: str) -> list[Named]:
    """Return the named tensors that have plain memory on a device.

    InvalidInput for a parameter that has none. Other tensors may: a counter on the host, say.
    """
    where = torch.device(device)
    named = named_tensors(torch, model)
    dense = [
        each
        for each in named
        if each.tensor.layout is torch.strided and each.tensor.device == where
    ]
    wrong = {
        each.name: f"{each.tensor.layout} on {each.tensor.device}"
        for each in named
        if each.kind is Kind.PARAMETER and each not in dense
    }
    if wrong:
        name, found = next(iter(wrong.items()))
        raise InvalidValue(
            f"{len(wrong)} parameters are not dense on {device}: {name} is {found}",
            next_step=f"move the model there: `model.to({device!r})`",
            found=wrong,
        )
    return dense


def loose_tensors(torch: Any, model: Any, named: list[Named]) -> list[Any]:
    """Return the tensors that are no parameters: those named, and those in lists and dicts."""
    parameters = {id(each.tensor) for each in named if each.kind is Kind.PARAMETER}
    held = [
        tensor
        for owner in model.modules()
        for key, value in vars(owner).items()
        if key not in ("_parameters", "_buffers", "_modules")
        for tensor in _within(torch, value)
    ]
    buffers = [each.tensor for each in named if each.kind is Kind.BUFFER]
    where = {each.tensor.device for each in named}
    return [
        tensor
        for tensor in {id(each): each for each in [*buffers, *held]}.values()
        if id(tensor) not in parameters
        and tensor.layout is torch.strided
        and tensor.device in where
    ]


def _within(torch: Any, value: Any) -> Iterator[Any]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict | list | tuple):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _within(torch, each)


def view_of(tensor: Any) -> View:
    """Return where a tensor stands, as a value."""
    return View(
        address=tensor.data_ptr(),
        shape=tuple(tensor.shape),
        strides=tuple(tensor.stride()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        itemsize=tensor.element_size(),
    )


def check_names(model: list[Named], stored: Mapping[str, tuple[Kind, list[int]]]) -> None:
    """Compare a model with what is committed: kinds and shapes by name. InvalidInput.

    Buffers and attributes may have another shape, or be new: some are made when they are first
    needed. Those that have memory and are not committed stay as they are.
    """
    own = {each.name: each for each in model}
    missing = [
        each.name
        for each in model
        if each.name not in stored and (each.kind is Kind.PARAMETER or each.tensor.is_meta)
    ]
    unknown = [
        name
        for name, (kind, _) in stored.items()
        if kind is Kind.PARAMETER and (name not in own or own[name].kind is not Kind.PARAMETER)
    ]
    if missing or unknown:
        raise InvalidValue(
            f"the pool holds another model: it lacks {', '.join(missing[:4]) or 'nothing'}, "
            f"and has {', '.join(unknown[:4]) or 'nothing'} besides",
            next_step="build the model with the configuration with which it was published",
            missing=missing,
            unknown=unknown,
        )
    for name, (kind, shape) in stored.items():
        if kind is Kind.PARAMETER and shape != list(own[name].tensor.shape):
            raise InvalidValue(
                f"parameter {name} is committed with shape {shape}, the model has "
                f"{list(own[name].tensor.shape)}",
                next_step="build the model with the configuration with which it was published",
                found=shape,
                expected=list(own[name].tensor.shape),
            )


def place_of(model: Any, name: str) -> tuple[Any, str]:
    """Return the module of a tensor, and its key there. InvalidInput without such a module."""
    path, _, key = name.rpartition(".")
    try:
        return model.get_submodule(path), key
    except AttributeError as error:
        raise InvalidValue(
            f"the model has no module {path!r} for {name}",
            next_step="build the model with the configuration with which it was published",
            name=name,
        ) from error


def put(owner: Any, key: str, kind: Kind, tensor: Any) -> None:
    """Put a tensor into a module, in the place of what has its name."""
    held = {
        Kind.PARAMETER: owner._parameters,  # noqa: SLF001 - as above
        Kind.BUFFER: owner._buffers,  # noqa: SLF001 - as above
        Kind.ATTRIBUTE: vars(owner),
    }
    for other in set(Kind) - {kind}:
        held[other].pop(key, None)
    if kind is Kind.BUFFER and key not in held[kind]:
        owner.register_buffer(key, tensor, persistent=False)
    else:
        setattr(owner, key, tensor)


def as_parameter(torch: Any, tensor: Any, like: Any) -> Any:
    """Return a parameter over the memory of a tensor, of the class and with the attributes of one.

    It needs no gradient: what is committed is read-only.
    """
    if like is None:
        return torch.nn.Parameter(tensor, requires_grad=False)
    made = torch.Tensor._make_subclass(type(like), tensor, False)  # noqa: FBT003, SLF001 - what Parameter itself calls
    vars(made).update(vars(like))
    return made
