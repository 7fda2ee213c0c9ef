"""A node with a fake CUDA driver, and workers on it; see `fake_cuda/libcuda.c`.

Programs that are started find the fake as libcuda.so.1. They call it by cuda-bindings where the
package is installed, else by the stand-in in `fake_cuda/bindings`.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapshot_agent.domain.cuda import State

HERE = Path(__file__).parent / "fake_cuda"
UUIDS = tuple(f"GPU-{n}0000000-0000-4000-8000-00000000000{n}" for n in range(1, 5))
_STATES = (State.RUNNING, State.LOCKED, State.CHECKPOINTED, State.FAILED, State.NONE)


def library(folder: Path) -> Path:
    """Compile the fake; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the fake CUDA driver is compiled, and there is no C compiler (cc)")
    made = folder / "libcuda.so.1"
    flags = [
        "-shared",
        "-fPIC",
        "-O1",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Wno-unused-parameter",
        "-Werror",
    ]
    subprocess.run([compiler, *flags, "-o", made, HERE / "libcuda.c"], check=True)
    return made


class Call(NamedTuple):
    """A begin or an end of a call, with its argument or status; or that a process was stopped."""

    what: str
    verb: str
    pid: int
    value: int


class Worker:
    """A process that uses CUDA, or two: it answers pings while the driver lets it."""

    def __init__(self, library: Path, ordinal: int, *words: str) -> None:
        command = [sys.executable, str(HERE / "worker.py"), str(library), str(ordinal), *words]
        pipe = subprocess.PIPE
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self.pids = [int(word) for word in self.process.stdout.readline().split()]

    def ping(self, word: str) -> None:
        self.process.stdin.write(word + "\n")
        self.process.stdin.flush()

    def answer(self) -> str:
        """Wait for an answer; every process of the worker has made a call of CUDA for it."""
        return str(self.process.stdout.readline().strip())

    def close(self) -> None:
        for pid in self.pids[1:]:
            os.kill(pid, 9)
        self.process.kill()
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


class CudaNode:
    """The fake driver of a node, whose state is in a folder."""

    def __init__(self, folder: Path, library: Path) -> None:
        self.folder = folder
        self.library = library
        self.workers: list[Worker] = []
        self.place(*UUIDS)
        self._fake = ctypes.CDLL(str(library))

    def place(self, *uuids: str) -> None:
        """Let the node have these devices."""
        (self.folder / "devices").write_text("".join(f"{uuid}\n" for uuid in uuids))

    def worker(self, ordinal: int = 0, *words: str) -> Worker:
        self.workers.append(Worker(self.library, ordinal, *words))
        return self.workers[-1]

    def faults(self, *lines: str) -> None:
        (self.folder / "faults").write_text("".join(f"{line}\n" for line in lines))

    def states(self, pids: list[int]) -> list[State]:
        """What the driver knows, without asking it."""
        return [_STATES[self._fake.fakeState(pid)] for pid in pids]

    def device(self, pid: int) -> int:
        return int(self._fake.fakeDevice(pid))

    def move(self, old: int, new: int) -> None:
        """Let a process be what another one was, as after a dump and a restore by CRIU."""
        assert self._fake.fakeMove(old, new) == 0

    def calls(self) -> list[Call]:
        """The calls that change a state, in their order."""
        file = self.folder / "calls"
        lines = file.read_text().splitlines() if file.exists() else []
        rows = [line.split() for line in lines]
        return [Call(what, verb, int(pid), int(value)) for what, verb, pid, value in rows]

    def verbs(self) -> list[str]:
        """The verbs that have succeeded, in their order."""
        return [call.verb for call in self.calls() if (call.what, call.value) == ("end", 0)]

    def close(self) -> None:
        for worker in self.workers:
            worker.close()


def cuda_node(folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaNode]:
    """Give a node; for a fixture."""
    # A library is loaded once into a process, which has had other nodes before; a copy is another.
    own = folder / "lib" / library.name
    own.parent.mkdir()
    shutil.copy(library, own)
    monkeypatch.setenv("FAKE_CUDA", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(own.parent))
    if importlib.util.find_spec("cuda") is None:
        monkeypatch.setenv("PYTHONPATH", str(HERE / "bindings"))
    node = CudaNode(folder, own)
    yield node
    node.close()
