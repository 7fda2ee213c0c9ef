"""What others offer for the same bytes: arrays of a dict written to a file, and read again.

Every save ends with the bytes on the disk, every load with the bytes in the region.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = Mapping[str, Any]
"""Parts of a region by their names, as arrays of bytes."""


class Peer(NamedTuple):
    """`call` is given the folder, the arrays, and the whole region as one array.

    `file` is what it writes or reads there. `copies` of its bytes take memory: one in the page
    cache, and of most another one of their own.
    """

    name: str
    module: str
    file: str
    call: Callable[[Path, Arrays, Any], None]
    copies: int = 2


def _durable(path: Path) -> None:
    descriptor = os.open(path, os.O_RDWR)
    os.fsync(descriptor)
    os.close(descriptor)


def _numpy_save(folder: Path, _: Arrays, whole: Any) -> None:
    np.save(folder / "a.npy", whole)
    _durable(folder / "a.npy")


def _safetensors_save(folder: Path, arrays: Arrays, _: Any) -> None:
    from safetensors.numpy import save_file

    save_file(dict(arrays), folder / "a.safetensors")
    _durable(folder / "a.safetensors")


def _torch_save(folder: Path, arrays: Arrays, _: Any) -> None:
    import torch

    torch.save({name: torch.from_numpy(each) for name, each in arrays.items()}, folder / "a.pt")
    _durable(folder / "a.pt")


def _tensorizer_save(folder: Path, arrays: Arrays, _: Any) -> None:
    import torch
    from tensorizer import TensorSerializer

    serializer = TensorSerializer(str(folder / "a.tensors"))
    serializer.write_state_dict({name: torch.from_numpy(each) for name, each in arrays.items()})
    serializer.close()
    _durable(folder / "a.tensors")


def _numpy_load(folder: Path, _: Arrays, whole: Any) -> None:
    whole[:] = np.load(folder / "a.npy", mmap_mode="r")


def _safetensors_load(folder: Path, arrays: Arrays, _: Any) -> None:
    from safetensors.numpy import load_file

    found = load_file(folder / "a.safetensors")
    for name, each in arrays.items():
        each[:] = found[name]


def _torch_load(folder: Path, arrays: Arrays, _: Any) -> None:
    import torch

    found = torch.load(folder / "a.pt", mmap=True)
    for name, each in arrays.items():
        each[:] = found[name].numpy()


def _runai_load(folder: Path, arrays: Arrays, _: Any) -> None:
    from runai_model_streamer import SafetensorsStreamer

    with SafetensorsStreamer() as streamer:
        streamer.stream_file(str(folder / "a.safetensors"))
        for name, tensor in streamer.get_tensors():
            arrays[name][:] = tensor.numpy()


def _fastsafetensors_load(folder: Path, arrays: Arrays, _: Any) -> None:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), device="cpu", nogds=True)
    loader.add_filenames({0: [str(folder / "a.safetensors")]})
    files = loader.copy_files_to_device()
    try:
        for name, each in arrays.items():
            each[:] = files.get_tensor(name).numpy()
    finally:
        files.close()
        loader.close()


def _tensorizer_load(folder: Path, arrays: Arrays, _: Any) -> None:
    from tensorizer import TensorDeserializer

    with TensorDeserializer(str(folder / "a.tensors"), device="cpu") as found:
        for name, each in arrays.items():
            each[:] = found[name].numpy()


def _instanttensor_load(folder: Path, arrays: Arrays, _: Any) -> None:
    from instanttensor import safe_open

    with safe_open(str(folder / "a.safetensors"), framework="pt", device="cpu") as found:
        for name, tensor in found.tensors():
            arrays[name][:] = tensor.numpy()


SAVERS = (
    Peer("numpy", "numpy", "a.npy", _numpy_save, 1),
    Peer("safetensors", "safetensors", "a.safetensors", _safetensors_save),
    Peer("torch", "torch", "a.pt", _torch_save),
    Peer("tensorizer", "tensorizer", "a.tensors", _tensorizer_save),
)
LOADERS = (
    Peer("numpy mmap", "numpy", "a.npy", _numpy_load, 1),
    Peer("safetensors", "safetensors", "a.safetensors", _safetensors_load),
    Peer("torch", "torch", "a.pt", _torch_load, 1),
    Peer("run:ai streamer", "runai_model_streamer", "a.safetensors", _runai_load),
    Peer("fastsafetensors", "fastsafetensors", "a.safetensors", _fastsafetensors_load),
    Peer("tensorizer", "tensorizer", "a.tensors", _tensorizer_load),
    Peer("InstantTensor", "instanttensor", "a.safetensors", _instanttensor_load),
)


def tried(folder: Path, savers: Sequence[Peer], loaders: Sequence[Peer]) -> dict[str, str]:
    """Have each peer move a few bytes, which also imports it. Return why each cannot that cannot.

    A save or a load that raises, whatever it raises, or that leaves other bytes, is left out of the
    run, and the page says why.
    """
    absent: dict[str, str] = {}
    wanted = np.arange(2**16, dtype="u4").view("u1")
    for peer in (*savers, *loaders):
        whole = wanted.copy() if peer in savers else np.zeros_like(wanted)
        half = len(whole) // 2
        arrays = {"a0": whole[:half], "a1": whole[half:]}
        try:
            importlib.import_module(peer.module)
        except ImportError:
            absent[peer.name] = "not installed"
            continue
        try:
            peer.call(folder, arrays, whole)
        except Exception as error:  # noqa: BLE001 - it is the work of others
            (reason, *_) = f"{error}".splitlines() or [""]
            absent[peer.name] = f"{type(error).__name__}: {reason}"
            continue
        if not np.array_equal(whole, wanted):
            absent[peer.name] = "it brought other bytes"
    return absent
