"""A node with a fake CUDA driver, and processes on it; see `fake_cuda/libcuda.c`.

The driver is called by the real cuda-bindings. Programs that are started find the fakes of
libcuda.so.1 and libnvidia-ml.so.1 by LD_LIBRARY_PATH; this process has them loaded.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from snapshot_agent.domain.cuda import State
from snapshot_shared.orders import PodRef, PresenceDevice
from tests.support import builders
from tests.support.forks import forks

HERE = Path(__file__).parent / "fake_cuda"
UUIDS = tuple(f"GPU-{n}0000000-0000-4000-8000-00000000000{n}" for n in range(1, 5))
_STATES = (State.RUNNING, State.LOCKED, State.CHECKPOINTED, State.FAILED, State.NONE)
_LIBRARIES = {
    "libcuda.so.1": ("libcuda.c", "memory.c", "node.c"),
    "libnvidia-ml.so.1": ("nvml.c", "node.c"),
}
CLIENTS = ("snapback_client", "snapback_client.cuda", "cuda.bindings.driver", "gms.adapters.cuda")
"""What a process imports of which workers are forks."""
_FLAGS = (
    "-shared -fPIC -O1 -pthread -fvisibility=hidden -Wall -Wextra -Wno-unused-parameter -Werror"
)


def library(folder: Path) -> Path:
    """Compile the fakes and return libcuda.so.1; skips where there is no compiler."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("the fake CUDA driver is compiled, and there is no C compiler (cc)")
    for name, sources in _LIBRARIES.items():
        # The bindings find a library that is loaded by this name, wherever it lies.
        flags = [*_FLAGS.split(), f"-Wl,-soname,{name}", "-o", folder / name]
        subprocess.run([compiler, *flags, *(HERE / source for source in sources)], check=True)
    return folder / "libcuda.so.1"


LOADED = f"""
import ctypes, os
for name in {sorted(_LIBRARIES)}:
    ctypes.CDLL(os.path.join(os.environ["LD_LIBRARY_PATH"].partition(os.pathsep)[0], name))
"""
"""Code for a fork, whose loader knows LD_LIBRARY_PATH as it was before the fork."""


def worker(code: str, *arguments: str, **environment: str | None) -> str:
    """Run code in a process on the node with some variables set, or left out; return its output.

    The code finds the library as `client`, and `os` and `sys`.
    """
    variables = {name: value for name, value in os.environ.items() if name not in environment}
    variables |= {name: value for name, value in environment.items() if value is not None}
    code = f"{LOADED}import sys\nimport snapback_client as client\n{code}"
    ended = forks(*CLIENTS).run(code, *arguments, environment=variables)
    assert ended.returncode == 0, ended.stderr.decode()
    return ended.stdout.decode()


class Call(NamedTuple):
    """A begin or an end of a call, with its argument or status; or that a process was stopped."""

    what: str
    verb: str
    pid: int
    value: int


class Worker:
    """A process that uses CUDA, or two: it answers pings while the driver lets it."""

    program = "worker.py"

    def __init__(self, library: Path, ordinal: int, *words: str) -> None:
        command = [sys.executable, str(HERE / self.program), str(library), str(ordinal), *words]
        pipe = subprocess.PIPE
        self.process: Any = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)
        self._begun()

    def _begun(self) -> None:
        self.pids = [int(word) for word in self.answer().split()]

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


class Foreign(Worker):
    """A process that is none of ours and holds memory; `status` is 2 when there is not so much."""

    program = "foreign.py"

    def _begun(self) -> None:
        self.status = int(self.answer())
        self.pids = [self.process.pid]

    def free(self) -> None:
        self.ping("free")
        assert self.answer() == "freed"


class GivenDevices:
    """The port `PodDevices`: what the kubelet gave to every container, while it answers."""

    def __init__(self, *uuids: str) -> None:
        self.uuids = [*uuids]
        self.answers = True

    async def of(self, _pod: PodRef) -> list[PresenceDevice] | None:
        given = [builders.device(index=n, uuid=uuid) for n, uuid in enumerate(self.uuids)]
        return given if self.answers else None


class ThisProcess:
    """What this process has of the driver, without asking it."""

    def __init__(self, fake: ctypes.CDLL) -> None:
        self._fake = fake

    def called(self, name: str) -> int:
        """How often a call was made. Its name has no version."""
        count = int(self._fake.fakeCount(name.encode()))
        assert count >= 0, name
        return count

    @property
    def handles(self) -> int:
        return len(self._has("h"))

    @property
    def mapped(self) -> list[int]:
        return self._has("m")

    @property
    def reserved(self) -> list[int]:
        return self._has("r")

    @property
    def pinned(self) -> list[int]:
        return self._has("p")

    @property
    def streams(self) -> int:
        return len(self._has("s"))

    @property
    def contexts(self) -> list[int]:
        """Those of this thread."""
        return self._has("c")

    def retained(self, device: int) -> int:
        return int(self._fake.fakeRetained(device))

    def _has(self, what: str) -> list[int]:
        found = (ctypes.c_ulonglong * 8192)()
        return list(found[: self._fake.fakeHas(ord(what), found, len(found))])


class CudaNode:
    """The fake driver of a node, whose state is in a folder."""

    def __init__(self, folder: Path, library: Path, fake: ctypes.CDLL) -> None:
        self.folder = folder
        self.library = library
        self.workers: list[Worker] = []
        self.place(*UUIDS)
        self._fake = fake
        self.here = ThisProcess(fake)

    def place(self, *devices: str) -> None:
        """Let the node have these devices: uuids, and what `fake_cuda/node.h` lets be said."""
        (self.folder / "devices").write_text("".join(f"{device}\n" for device in devices))

    def worker(self, ordinal: int = 0, *words: str) -> Worker:
        self.workers.append(Worker(self.library, ordinal, *words))
        return self.workers[-1]

    def foreign(self, size: int, ordinal: int = 0) -> Foreign:
        """Start a process that takes memory of a device."""
        found = Foreign(self.library, ordinal, str(size))
        self.workers.append(found)
        return found

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
        self._fake.fakeReset()


def cuda_node(folder: Path, library: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[CudaNode]:
    """Give a node; for a fixture."""
    # A worker of a container sees what is beneath the folder.
    own = folder / "lib"
    shutil.copytree(library.parent, own)
    monkeypatch.setenv("FAKE_CUDA", str(folder))
    monkeypatch.setenv("LD_LIBRARY_PATH", str(own))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    # Here they stay loaded, once for all nodes: the bindings keep what they have found.
    fakes = [ctypes.CDLL(str(library.parent / name)) for name in _LIBRARIES]
    node = CudaNode(folder, own / library.name, fakes[0])
    fakes[0].fakeReset()
    yield node
    node.close()
