"""An inference worker that can be captured and restored: the example for workers of your own.

It builds a small network in GPU memory (through `snapback_client`, over all its devices),
calibrates it, and answers questions over a unix socket, one JSON object a line:

    {"op": "ask", "prompt": "..."}   answers and changes nothing
    {"op": "chat", "text": "..."}    answers and remembers

Answers depend on every weight and on all that was said in chats. All arithmetic is on whole numbers
small enough to be exact in float32, so the same question has the same answer, byte for byte, on
any machine.

What makes it capturable is `snapback_client.Worker`: it keeps the weights in pools that sleep while
the worker is captured, and calls `Model.save` for the rest. `worker_template.py` shows the same in
14 lines. Only the driver `respawn`, which starts a worker again, gives `--resume-from`.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from snapback_client import MemoryPool, Worker, device_count

Floats = NDArray[np.float32]

WIDTH = 1024
LAYER_MIB = 4
"""A layer is WIDTH x WIDTH float32."""
LIMIT = 127
"""Activations are whole numbers from -LIMIT to LIMIT: with weights up to 7 no sum reaches 2**24."""
CALIBRATION_BATCH = 256
MAX_LINE = 65536
OWN = "worker.json"
"""The file with what is not in a pool."""
SEND_S = 5.0
WORDS = ("amber", "cedar", "delta", "ember", "flint", "grove", "iris", "kelp", "lunar", "maple")


class Network:
    """Layers of weights spread over the devices, and for each layer a shift."""

    def __init__(self, pools: list[MemoryPool], shifts: list[int]) -> None:
        """Use layers that are there; without shifts it has to be calibrated."""
        self.pools = pools
        self.shifts = shifts

    def layers(self) -> list[Floats]:
        """Give every layer in its order."""
        return [layer for pool in self.pools for layer in pool.arrays().values()]

    def calibrate(self) -> None:
        """Choose for each layer the shift that keeps a batch of samples in range."""
        random = np.random.default_rng(7)
        batch = random.integers(-LIMIT, LIMIT + 1, (WIDTH, CALIBRATION_BATCH)).astype(np.float32)
        for layer in self.layers():
            product = layer @ batch
            peak = max(1.0, float(np.percentile(np.abs(product), 99)))
            self.shifts.append(max(0, int(np.ceil(np.log2(peak / LIMIT)))))
            batch = requantized(product, self.shifts[-1])

    def forward(self, seed: bytes) -> NDArray[np.int8]:
        """Send a vector made of `seed` through all layers."""
        digits = hashlib.shake_256(seed).digest(WIDTH)
        vector = np.clip(np.frombuffer(digits, np.int8).astype(np.float32), -LIMIT, LIMIT)
        for layer, shift in zip(self.layers(), self.shifts, strict=True):
            vector = requantized(layer @ vector, shift)
        return vector.astype(np.int8)


def requantized(product: Floats, shift: int) -> Floats:
    """Divide by a power of two, round and clip: exact in float32."""
    rounded: Floats = np.rint(product / np.float32(2**shift))
    return np.clip(rounded, -LIMIT, LIMIT, out=rounded)


class Layers:
    """What makes the layers of a device."""

    def __init__(self, device: int, count: int) -> None:
        """Make `count` layers, which are the same for the same device."""
        self.device, self.count = device, count

    def build(self, pool: MemoryPool) -> None:
        """Make them in a pool."""
        shapes = {f"layer-{i:04}": ((WIDTH, WIDTH), "float32") for i in range(self.count)}
        for i, layer in enumerate(pool.allocate_many(shapes).values()):
            random = np.random.default_rng([self.device, i])
            random.standard_normal(out=layer, dtype=np.float32)
            np.clip(np.rint(layer * 2), -7, 7, out=layer)


class Model:
    """A network and the memory of what was said to it."""

    def __init__(self, network: Network, turns: int = 0, memory: str = "") -> None:
        """Take over a network, new or restored, and the memory that belongs to it."""
        self.network = network
        self.turns = turns
        self.memory = memory

    @classmethod
    def of(cls, worker: Worker, size_mib: int) -> Model:
        """Return the model that was saved; on a cold start build it."""
        devices = device_count()
        count = max(1, size_mib // (LAYER_MIB * devices))
        pools = [
            worker.pool(f"pool-{device}", Layers(device, count).build, device=device)
            for device in range(devices)
        ]
        if worker.state is not None:
            own = json.loads((worker.state / OWN).read_text())
            return cls(Network(pools, own["shifts"]), own["turns"], own["memory"])
        network = Network(pools, [])
        network.calibrate()
        return cls(network)

    def save(self, state: Path) -> None:
        """Save what is not in a pool."""
        own = {"turns": self.turns, "memory": self.memory, "shifts": self.network.shifts}
        (state / OWN).write_text(json.dumps(own))

    def answer(self, line: bytes) -> dict[str, Any]:
        """Answer one request."""
        try:
            request = json.loads(line)
            field = {"ask": "prompt", "chat": "text"}[request["op"]]
            words = str(request[field])
        except (ValueError, KeyError, TypeError, RecursionError):
            return {"error": 'expected {"op": "ask", "prompt": ...} or {"op": "chat", "text": ...}'}
        output = self.network.forward(f"{self.memory}\n{words}".encode("utf-8", "replace"))
        proof = hashlib.sha256(output.tobytes()).hexdigest()
        if field == "text":
            self.turns += 1
            self.memory = hashlib.sha256(f"{self.memory}{proof}".encode()).hexdigest()
        said = " ".join(WORDS[value % len(WORDS)] for value in output[:6].tolist())
        return {
            "answer": said,
            "proof": proof[:32],
            "memory": self.memory[:16],
            "turns": self.turns,
        }


class Answering(Protocol):
    """A model that is served."""

    def answer(self, line: bytes) -> dict[str, Any]:
        """Answer one request."""

    def save(self, state: Path) -> None:
        """Save what is not in a pool."""


class Server:
    """Follows its clients in one thread."""

    def __init__(self, worker: Worker, model: Answering, path: Path) -> None:
        """Listen. The socket gets its name once it can be connected to."""
        self.worker = worker
        self.model = model
        self.served = 0
        self.events = selectors.DefaultSelector()
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(str(temporary))
        listener.listen(64)
        temporary.rename(path)
        self.events.register(listener, selectors.EVENT_READ, lambda: self.accept(listener))

    def serve(self, warmup_requests: int, warmup_s: float) -> None:
        """Serve. Ready for a capture after so many requests, or so many quiet seconds."""
        while self.served < warmup_requests and self.turn(warmup_s):
            pass
        self.worker.ready()
        while True:
            self.turn(None)

    def turn(self, timeout_s: float | None) -> bool:
        """Wait for what happens next and answer it. False when nothing happened in time."""
        happened = self.events.select(timeout_s)
        for key, _ in happened:
            key.data()
        return bool(happened)

    def accept(self, listener: socket.socket) -> None:
        """Follow one more client."""
        connection, _ = listener.accept()
        connection.settimeout(SEND_S)
        received = bytearray()
        self.events.register(
            connection, selectors.EVENT_READ, lambda: self.receive(connection, received)
        )

    def receive(self, connection: socket.socket, received: bytearray) -> None:
        """Answer the lines that a client has completed; one that misbehaves is let go."""
        try:
            data = connection.recv(MAX_LINE)
            received += data
            *lines, rest = received.split(b"\n")
            received[:] = rest
            for line in lines:
                self.served += 1
                with self.worker.request():
                    answer = self.model.answer(bytes(line))
                connection.sendall(json.dumps(answer).encode() + b"\n")
            is_over = not data or len(received) >= MAX_LINE
        except OSError:
            is_over = True
        if is_over:
            self.events.unregister(connection)
            connection.close()


def run(build: Callable[[Worker, int], Answering]) -> None:
    """Start cold, as a standby for a restore, or again from a state, then serve a model.

    `build` returns that, for a worker and the MiB that the weights shall have.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-from", type=Path, metavar="FOLDER")
    resume_from: Path | None = parser.parse_args().resume_from
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    began = time.monotonic()
    with Worker(resume_from=resume_from) as worker:
        model = build(worker, int(os.environ.get("SIZE_MIB", "512")))
        worker.on_quiesce = model.save
        print(f"serving after {time.monotonic() - began:.2f} s", flush=True)
        server = Server(worker, model, Path(os.environ["POD_SOCKET_DIR"]) / "worker.sock")
        is_warm = worker.state is not None
        warmup_requests = 0 if is_warm else int(os.environ.get("WARMUP_REQUESTS", "8"))
        server.serve(warmup_requests, float(os.environ.get("WARMUP_SECONDS", "30")))


if __name__ == "__main__":
    run(Model.of)
