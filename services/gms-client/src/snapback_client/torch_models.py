"""The tensors of a model (`torch.nn.Module`): found by name, and put in the place of others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from snapback_client.errors import InvalidInput
from snapback_client.tensors import View


class Kind(StrEnum):
    """What a tensor is to its module. Only a parameter is the same in all processes for good."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"


@dataclass(frozen=True, slots=True)
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


def held_tensors(torch: Any, model: Any) -> list[Any]:
    """Return the tensors in lists, tuples and dicts that are attributes of a model's modules."""
    own = ("_parameters", "_buffers", "_modules")
    return [
        tensor
        for owner in model.modules()
        for key, value in vars(owner).items()
        if key not in own and not isinstance(value, torch.Tensor)
        for tensor in _within(torch, value)
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


def check_dense(torch: Any, tensors: list[Named], device: str) -> None:
    """Raise InvalidInput for tensors that have no plain memory on the device."""
    wrong = {
        each.name: f"{each.tensor.layout} on {each.tensor.device}"
        for each in tensors
        if each.tensor.layout is not torch.strided or each.tensor.device != torch.device(device)
    }
    if wrong:
        name, found = next(iter(wrong.items()))
        raise InvalidInput(
            f"{len(wrong)} tensors of the model are not dense on {device}: {name} is {found}",
            next_step=f"move the model there: `model.to({device!r})`",
            found=wrong,
        )


def check_names(model: list[Named], stored: Mapping[str, tuple[Kind, list[int]]]) -> None:
    """Compare a model with what is committed: kinds and shapes by name. InvalidInput.

    Buffers may have another shape, or be new: some are made when they are first needed.
    """
    own = {each.name: each for each in model}
    missing = [
        each.name
        for each in model
        if each.name not in stored and (each.kind is not Kind.ATTRIBUTE or each.tensor.is_meta)
    ]
    unknown = [
        name
        for name, (kind, _) in stored.items()
        if kind is Kind.PARAMETER and (name not in own or own[name].kind is not Kind.PARAMETER)
    ]
    if missing or unknown:
        raise InvalidInput(
            f"the pool holds another model: it lacks {', '.join(missing[:4]) or 'nothing'}, "
            f"and has {', '.join(unknown[:4]) or 'nothing'} besides",
            next_step="build the model with the configuration with which it was published",
            missing=missing,
            unknown=unknown,
        )
    for name, (kind, shape) in stored.items():
        if kind is Kind.PARAMETER and shape != list(own[name].tensor.shape):
            raise InvalidInput(
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
        raise InvalidInput(
            f"the model has no module {path!r} for {name}",
            next_step="build the model with the configuration with which it was published",
            name=name,
        ) from error


def put(owner: Any, key: str, kind: Kind, tensor: Any) -> None:
    """Put a tensor into a module."""
    if kind is Kind.BUFFER and key not in owner._buffers:  # noqa: SLF001 - as above
        owner.register_buffer(key, tensor, persistent=False)
    else:
        setattr(owner, key, tensor)


def as_parameter(torch: Any, tensor: Any, like: Any) -> Any:
    """Return a parameter over the memory of a tensor, of the class and with the attributes of one.

    It needs no gradient: what is committed is read-only.
    """
    made = torch.Tensor._make_subclass(type(like), tensor, False)  # noqa: FBT003, SLF001 - what Parameter itself calls
    vars(made).update(vars(like))
    return made
