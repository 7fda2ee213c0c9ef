"""What others offer for the same bytes: arrays of a dict written to a file, and read again.

Every save ends with the bytes on the disk, every load with the bytes in the region.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

Arrays = Mapping[str, Any]
"""Parts of a region by their names, as arrays of bytes."""


class Peer(NamedTuple):
    """`call` is given the folder, the arrays, and the whole region as one array."""

    name: str
    module: str
    call: Callable[[Path, Arrays, Any], None]

    @property
    def is_installed(self) -> bool:
        """Import it, which is no part of what is measured."""
        try:
            importlib.import_module(self.module)
        except ImportError:
            return False
        return True


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


SAVERS = (
    Peer("numpy", "numpy", _numpy_save),
    Peer("safetensors", "safetensors", _safetensors_save),
    Peer("torch", "torch", _torch_save),
)
LOADERS = (
    Peer("numpy mmap", "numpy", _numpy_load),
    Peer("safetensors", "safetensors", _safetensors_load),
    Peer("torch", "torch", _torch_load),
    Peer("run:ai streamer", "runai_model_streamer", _runai_load),
    Peer("fastsafetensors", "fastsafetensors", _fastsafetensors_load),
)
