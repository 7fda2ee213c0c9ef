"""What the plug-ins for engines have in common: the pools of a process, and what they may call.

A process of an engine has one model on one device. Its weights lie in a pool that the first process
writes and the others read; its key-value cache lies in another, which is empty after a wake.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import importlib.metadata
import importlib.util
import inspect
import os
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from snapback_client.codec import decode_json, encode_json
from snapback_client.control import CONTROL_DIR, MAX_BODY_BYTES, RESTORE_COMPLETE, Signal
from snapback_client.errors import (
    GenerationMismatch,
    InvalidMessage,
    NotEligible,
    UnsupportedVersion,
)
from snapback_client.pool import MemoryPool, connect, look
from snapback_client.torch import TorchMemory

TAGS = ("weights", "kv_cache")
"""What vLLM and SGLang call these memories."""
LOAD_S = 900.0
"""How long another process of the engine may take to publish the model, in seconds."""


class EngineMemory:
    """The memory of the model of this process."""

    def __init__(self, device: int | str, *, lock: str, deadline_s: float, name: str) -> None:
        """Wait until there is a model to read, or the right to write one.

        With the lock "RW" it is written in any case, in the place of one that is published. The
        errors of `snapback_client.connect` and of `TorchMemory`.
        """
        with contextlib.ExitStack() as opened:
            weights = _connect_weights(device, lock=lock, deadline_s=deadline_s, name=name)
            opened.callback(weights.close)
            cache = connect(device, lock="RW", domain="kv", deadline_s=deadline_s, name=name)
            opened.callback(cache.close)
            self.torch = TorchMemory({"weights": weights, "kv_cache": cache})
            self._pools = {"weights": weights, "kv_cache": cache}
            # What was restored before this is over: the devices above are those of this node.
            before = last_restore(os.environ)
            self._restores: dict[str, Signal | None] = dict.fromkeys(self._pools, before)
            self._opened = opened.pop_all()

    @property
    def is_writer(self) -> bool:
        """Whether this process has to load the model, and to publish it."""
        pool = self._pools["weights"]
        return not pool.is_asleep and pool.access == "RW"

    def suspend(self, tags: Collection[str] = TAGS) -> None:
        """Unmap what is awake of these tags; others are none of ours."""
        for tag, pool in self._pools.items():
            if tag in tags and not pool.is_asleep:
                pool.sleep()

    def resume(self, tags: Collection[str] = TAGS) -> None:
        """Map what sleeps of these tags, on the device that a restore has given this process."""
        restore = last_restore(os.environ)
        for tag, pool in self._pools.items():
            if tag in tags and pool.is_asleep:
                device = ""
                # The file stays, and names devices from before the restore: it is applied once.
                # Also where the wake fails, for the pool is one of the other device from then on.
                if restore is not None and restore != self._restores[tag]:
                    self._restores[tag] = restore
                    device = restore.devices.get(pool.device, "")
                pool.wake(device=device)

    def close(self) -> None:
        """Close the pools. Tensors of the model must not be touched."""
        self._opened.close()


def _connect_weights(device: int | str, *, lock: str, deadline_s: float, name: str) -> MemoryPool:
    if lock != "RW":
        return connect(device, lock=lock, deadline_s=deadline_s, name=name)
    while True:
        found = look(device, deadline_s=deadline_s, name=name)
        try:
            return connect(
                device,
                lock=lock,
                deadline_s=deadline_s,
                if_match=found.committed,
                # Readers are waited for only where two models do not fit.
                replace=found.free < found.bytes,
                name=name,
            )
        except GenerationMismatch:
            # Another worker has published meanwhile; its model is replaced, too.
            continue


_held: list[EngineMemory] = []
"""The memory of this process, which the parts of an engine reach without knowing each other."""


def open_memory(
    device: int | str, *, name: str, lock: str = "RW_OR_RO", deadline_s: float = LOAD_S
) -> EngineMemory:
    """Return the memory of this process, and open it the first time."""
    if not _held:
        _held.append(EngineMemory(device, lock=lock, deadline_s=deadline_s, name=name))
    return _held[0]


def memory() -> EngineMemory:
    """Return the memory of this process. NotEligible before `open_memory`."""
    if not _held:
        raise NotEligible(
            "the model of this process is not in GPU memory that Snapback serves",
            next_step="start the engine with all the options of the plug-in",
        )
    return _held[0]


def close_memory() -> None:
    """Close the memory of this process, if it is open."""
    while _held:
        _held.pop().close()


@contextlib.contextmanager
def region(tag: str) -> Iterator[None]:
    """Have what is allocated lie in a pool of the memory of this process."""
    with memory().torch.region(tag):
        yield


def current_device(torch: Any) -> int:
    """Return the number of the device of this process; 0 where PyTorch sees none."""
    if not torch.accelerator.is_available():
        return 0
    return int(torch.accelerator.current_device_index())


def check_complete(model: Any) -> None:
    """NotEligible names the tensors of a model that have no memory."""
    named = [*model.named_parameters(), *model.named_buffers()]
    missing = [name for name, tensor in named if tensor.is_meta]
    if missing:
        raise NotEligible(
            f"{len(missing)} tensors of the model were not published: {', '.join(missing[:4])}",
            next_step="load this model without Snapback; its weights are made in a way that the "
            "plug-in does not know",
            missing=missing,
        )


def identity_of(engine: str, values: Mapping[str, Any]) -> str:
    """Return what a model is, in one word: the engine, its version and a digest of the values."""
    found = hashlib.sha256(encode_json(dict(sorted(values.items())))).hexdigest()
    return f"{engine}-{version_of(engine)}-{found[:32]}"


def version_of(engine: str) -> str:
    """Return the version of an engine that is installed, or an empty text."""
    try:
        return importlib.metadata.version(engine)
    except importlib.metadata.PackageNotFoundError:
        return ""


def last_restore(environment: Mapping[str, str]) -> Signal | None:
    """Return what the agent says of the last restore; None where the process was not restored."""
    folder = environment.get(CONTROL_DIR)
    if not folder:
        return None
    try:
        with (Path(folder) / RESTORE_COMPLETE).open("rb") as file:
            return decode_json(file.read(MAX_BODY_BYTES + 1), Signal, limit=MAX_BODY_BYTES)
    except (OSError, InvalidMessage):
        return None


def resolve(engine: str, known: str, names: Mapping[str, str]) -> dict[str, Any]:
    """Return what a plug-in uses of an engine, by the last part of each name.

    `names` has `module:name` with the arguments that the plug-in gives it, separated by blanks; a
    text of `-` asks for no arguments. UnsupportedVersion names all that this version lacks, and the
    versions that are known to have it; ModuleNotFoundError where none is installed.
    """
    if importlib.util.find_spec(engine) is None:
        raise ModuleNotFoundError(f"{engine} is not installed, try {engine}=={known}", name=engine)
    found: dict[str, Any] = {}
    lacking: list[str] = []
    for name, arguments in names.items():
        try:
            value = _find(name)
        except (ImportError, AttributeError) as error:
            lacking.append(f"{name} ({error})")
            continue
        found[name.rpartition(":")[2].rpartition(".")[2]] = value
        if arguments != "-" and (missing := _missing(value, arguments.split())):
            lacking.append(f"{name}, which takes no {', '.join(missing)}")
    if lacking:
        version = version_of(engine) or "of an unknown version"
        raise UnsupportedVersion(
            f"{engine} {version} has no {'; no '.join(lacking)}",
            next_step=f"install {engine} {known}, from which the plug-in was written",
            missing=lacking,
            found=version,
            known=known,
        )
    return found


def _find(name: str) -> Any:
    module, _, path = name.partition(":")
    value: Any = importlib.import_module(module)
    for part in path.split("."):
        value = getattr(value, part)
    return value


def _missing(value: Any, arguments: list[str]) -> list[str]:
    takes = inspect.signature(value).parameters
    if any(each.kind is each.VAR_KEYWORD for each in takes.values()):
        return []
    return [name for name in arguments if name not in takes]
