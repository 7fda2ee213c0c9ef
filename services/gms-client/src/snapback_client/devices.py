"""Which device is meant: by the number that a process has for it, by a uuid, or by an index.

A number of a device is a process's own: CUDA counts the devices that CUDA_VISIBLE_DEVICES leaves,
in its order, and a container has those that it was given. An index is that of the service.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from snapback_client.errors import UnknownDevice

_KINDS = ("GPU-", "MIG-")
_UNSPECIFIC = ("all", "none", "void")


def find_device(name: str, served: Mapping[str, int]) -> str | None:
    """Return the uuid of a device, of `served` indices by uuid; None where there is no such one.

    `name` is a uuid, the beginning of one and of no other, or an index: what nvidia-smi and
    NVIDIA_VISIBLE_DEVICES take.
    """
    if name in served:
        return name
    is_index = name.isascii() and name.isdigit()
    found = [
        uuid
        for uuid, index in served.items()
        if (name == str(index) if is_index else name.startswith(_KINDS) and uuid.startswith(name))
    ]
    return found[0] if len(found) == 1 else None


def visible_names(value: str) -> list[str]:
    """Return the names in NVIDIA_VISIBLE_DEVICES; none where it does not say which devices."""
    names = [name for each in value.split(",") if (name := each.strip())]
    return [] if len(names) == 1 and names[0] in _UNSPECIFIC else names


def names_of(device: int | str, *, cuda: Sequence[str], visible: Sequence[str]) -> list[str]:
    """Return the names under which to ask for a device, one after another.

    A number is that of CUDA in this process (`cuda`), which may know other devices than the
    service does; else that of the names that the environment has (`visible`); without any it is an
    index. UnknownDevice.
    """
    if isinstance(device, str):
        return [device]
    found: list[str] = []
    if device >= 0 and cuda:
        # A name of no device, where CUDA has no such number: the service then says which it has.
        found.append(cuda[device] if device < len(cuda) else f"cuda:{device}")
    if 0 <= device < len(visible):
        found.append(visible[device])
    elif device >= 0 and not visible:
        found.append(str(device))
    if not found:
        raise UnknownDevice(
            f"device {device} is not among those of this process: {', '.join(visible) or 'none'}",
            next_step="look at CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES, or name a uuid",
            ordinal=device,
            visible=list(visible),
        )
    return found


def count_of(*, cuda: Sequence[str], visible: Sequence[str]) -> int:
    """Return how many devices a process has, by what CUDA shows and what the environment names.

    Where both say it, the fewest: CUDA_VISIBLE_DEVICES may leave some of them, and a simulated
    node may have GPUs of which the process was given none. Where neither does it is 1.
    """
    return min((len(names) for names in (cuda, visible) if names), default=1)


def ordinal_of(uuid: str, index: int, *, cuda: Sequence[str], visible: Sequence[str]) -> int:
    """Return the number that this process has for a device of the service."""
    for names in (cuda, visible):
        for number, name in enumerate(names):
            if find_device(name, {uuid: index}):
                return number
    return index
