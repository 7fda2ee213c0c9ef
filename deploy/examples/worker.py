"""An inference worker that can be captured and restored: the example for workers of your own.

It builds a small network in GPU memory (through `snapback_client`, over all its devices),
calibrates it, and answers questions over a unix socket, one JSON object a line:

    {"op": "ask", "prompt": "..."}   answers and changes nothing
    {"op": "chat", "text": "..."}    answers and remembers

Answers depend on every weight and on all that was said in chats. All arithmetic is on whole numbers
small enough to be exact in float32, so the same question has the same answer, byte for byte, on
any machine.

What makes it capturable is the control directory: the class `Control`, and `Worker.quiesce` and
`Worker.rebuild`, which use it. `worker_template.py` shows the same in 30 lines. `Worker.resume` and
the argument `--resume-from` are only for the driver that starts a worker again, `respawn`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import hashlib
import json
import os
import selectors
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import snapback_client

Floats = NDArray[np.float32]

WIDTH = 1024
LAYER_MIB = 4
"""A layer is WIDTH x WIDTH float32."""
LIMIT = 127
"""Activations are whole numbers from -LIMIT to LIMIT: with weights up to 7 no sum reaches 2**24."""
CALIBRATION_BATCH = 256
MAX_LINE = 65536
SEND_S = 5.0
WORDS = ("amber", "cedar", "delta", "ember", "flint", "grove", "iris", "kelp", "lunar", "maple")


class Control:
    """The control directory: files say what the agent wants and what we have done."""

    _IN_MOVED_TO = 0x80

    def __init__(self, path: str) -> None:
        """Watch the directory by inotify, so that waiting neither polls nor misses a file."""
        self.path = Path(path)
        self.state = self.path / "state"
        self._seen: dict[str, tuple[int, int]] = {}
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_CLOEXEC)
        watched = libc.inotify_add_watch(self.fd, os.fsencode(path), self._IN_MOVED_TO)
        if self.fd < 0 or watched < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)

    def news(self, *names: str) -> tuple[str, dict[str, Any]] | None:
        """Give name and body of a file that was not there when we last looked, or None."""
        for name in names:
            with contextlib.suppress(FileNotFoundError), (self.path / name).open("rb") as file:
                found = os.fstat(file.fileno())
                identity = (found.st_ino, found.st_mtime_ns)
                if self._seen.get(name) != identity:
                    self._seen[name] = identity
                    return name, json.load(file)
        return None

    def wait(self, *names: str) -> tuple[str, dict[str, Any]]:
        """Block until one of the files is new; give its name and body."""
        while (found := self.news(*names)) is None:
            self.drain()
        return found

    def drain(self) -> None:
        """Take what inotify has to say; block while it has nothing."""
        os.read(self.fd, 65536)

    def say(self, name: str, attempt: int) -> None:
        """Put a file in place as a whole."""
        temporary = self.path / f".{name}.tmp"
        temporary.write_text(json.dumps({"attempt": attempt}))
        temporary.rename(self.path / name)

    def withdraw(self, name: str) -> None:
        """Take a file of ours away."""
        (self.path / name).unlink(missing_ok=True)


class Network:
    """Layers of weights spread over the devices, and for each layer a shift."""

    def __init__(self, pools: list[snapback_client.MemoryPool], shifts: list[int]) -> None:
        """Use `build` or `rebuild`."""
        self.pools = pools
        self.shifts = shifts

    @classmethod
    def build(cls, size_mib: int) -> Network:
        """Make the weights in GPU memory, publish them and calibrate: the cold start."""
        devices = len(os.environ["NVIDIA_VISIBLE_DEVICES"].split(","))
        count = max(1, size_mib // (LAYER_MIB * devices))
        pools = [
            snapback_client.connect(device, lock="RW", name="example") for device in range(devices)
        ]
        for device, pool in enumerate(pools):
            shapes = {f"layer-{i:04}": ((WIDTH, WIDTH), "float32") for i in range(count)}
            for i, layer in enumerate(pool.allocate_many(shapes).values()):
                random = np.random.default_rng([device, i])
                random.standard_normal(out=layer, dtype=np.float32)
                np.clip(np.rint(layer * 2), -7, 7, out=layer)
            pool.commit()
        network = cls(pools, [])
        network.calibrate()
        return network

    @classmethod
    def rebuild(cls, states: list[bytes], shifts: list[int]) -> Network:
        """Map the weights that were loaded for us, at the addresses that they had."""
        return cls([snapback_client.restore(state, name="example") for state in states], shifts)

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


class Worker:
    """A network and the memory of what was said to it."""

    def __init__(
        self, control: Control, network: Network, turns: int = 0, memory: str = ""
    ) -> None:
        """Take over a network, new or restored, and the memory that belongs to it."""
        self.control = control
        self.network = network
        self.turns = turns
        self.memory = memory

    @classmethod
    def rebuild(cls, control: Control, state: Path) -> Worker:
        """Wait as a standby until memory is loaded and `state` is filled; go on from there."""
        name, body = control.wait("restore-complete", "restore-failed")
        if name == "restore-failed":
            sys.exit(f"the restore failed: {body}")
        worker = cls.saved_in(state, control)
        control.say("restored", body["attempt"])
        return worker

    @classmethod
    def resume(cls, control: Control, state: Path) -> Worker:
        """Go on from `state` as the process that was quiet, in the middle of its capture."""
        _, body = control.wait("quiesce")
        control.say("quiesced", body["attempt"])
        control.wait("snapshot-complete", "snapshot-aborted")
        return cls.saved_in(state, control)

    @classmethod
    def saved_in(cls, state: Path, control: Control) -> Worker:
        """Read what `quiesce` has saved, and map the memory that belongs to it."""
        own = json.loads((state / "worker.json").read_text())
        pools = [(state / f"pool-{i}.json").read_bytes() for i in range(own["pools"])]
        return cls(control, Network.rebuild(pools, own["shifts"]), own["turns"], own["memory"])

    def quiesce(self, attempt: int) -> None:
        """Let go of the devices, save what is ours, and go on when the capture is over.

        Runs between two requests, so none is under way; later ones wait in their sockets.
        """
        pools = self.network.pools
        self.control.withdraw("ready-for-snapshot")
        for pool in pools:
            pool.sleep()
        self.control.state.mkdir(mode=0o700, exist_ok=True)
        for i, pool in enumerate(pools):
            (self.control.state / f"pool-{i}.json").write_bytes(pool.save_state())
        own = {
            "turns": self.turns,
            "memory": self.memory,
            "shifts": self.network.shifts,
            "pools": len(pools),
        }
        (self.control.state / "worker.json").write_text(json.dumps(own))
        self.control.say("quiesced", attempt)
        name, body = self.control.wait("snapshot-complete", "snapshot-aborted", "restore-complete")
        moved = body.get("devices", {})
        for pool in pools:
            pool.wake(device=moved.get(pool.device, ""))
        if name == "restore-complete":
            # Restored as it was, by CRIU, in another pod.
            self.control.say("restored", body["attempt"])
        self.become_ready()

    def become_ready(self) -> None:
        """Say that a capture may begin; it may not while another one goes on."""
        self.control.say("ready-for-snapshot", 0)

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


class Server:
    """Follows clients and the control directory at once, in one thread."""

    def __init__(self, worker: Worker, path: Path) -> None:
        """Listen. The socket gets its name once it can be connected to."""
        self.worker = worker
        self.served = 0
        self.events = selectors.DefaultSelector()
        self.events.register(worker.control.fd, selectors.EVENT_READ, worker.control.drain)
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
        self.worker.become_ready()
        while True:
            self.turn(None)

    def turn(self, timeout_s: float | None) -> bool:
        """Carry out a capture that is wanted, then wait for what happens next and answer it.

        False when nothing happened in time.

        The files come first: news of one may have been drained while another was waited for.
        """
        if found := self.worker.control.news("quiesce"):
            self.worker.quiesce(found[1]["attempt"])
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
                connection.sendall(json.dumps(self.worker.answer(bytes(line))).encode() + b"\n")
            is_over = not data or len(received) >= MAX_LINE
        except OSError:
            is_over = True
        if is_over:
            self.events.unregister(connection)
            connection.close()


def main() -> None:
    """Start cold, as a standby for a restore, or again from a state, then serve.

    A standby that is started again after its restore failed starts cold.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--resume-from", type=Path, metavar="FOLDER")
    resume_from: Path | None = parser.parse_args().resume_from
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    control = Control(os.environ["SNAPSHOT_CONTROL_DIR"])
    is_standby = os.environ.get("SNAPSHOT_RESTORE_STANDBY") == "1"
    failed = None
    if is_standby:
        # Of a process before this one, whose container has been started again: after a failure
        # nothing comes, and that it served says nothing of this one.
        failed = control.news("restore-failed")
        is_standby = failed is None
        control.withdraw("restored")
    began = time.monotonic()
    if is_standby:
        worker = Worker.rebuild(control, resume_from or control.state)
    elif resume_from is not None:
        worker = Worker.resume(control, resume_from)
    else:
        worker = Worker(control, Network.build(int(os.environ.get("SIZE_MIB", "512"))))
    print(f"serving after {time.monotonic() - began:.2f} s", flush=True)
    server = Server(worker, Path(os.environ["POD_SOCKET_DIR"]) / "worker.sock")
    if failed:
        control.say("restored", failed[1]["attempt"])
    is_warm = is_standby or resume_from is not None
    warmup_requests = 0 if is_warm else int(os.environ.get("WARMUP_REQUESTS", "8"))
    server.serve(warmup_requests, float(os.environ.get("WARMUP_SECONDS", "30")))


if __name__ == "__main__":
    main()
