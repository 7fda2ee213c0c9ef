"""An engine with a trained model that can be captured and restored: file types by onnxruntime.

The model is the one that the package `magika` ships. Its tensors are in GPU memory (through
`snapback_client`), where onnxruntime uses them in place: the session lives on while the pool sleeps
and wakes, and a restored worker reads no weights from a file. It serves HTTP on HTTP_PORT, else on
the unix socket `worker.sock` in POD_SOCKET_DIR:

    POST /identify    the bytes of a file; answers {"label": "python", "score": 0.99}
    GET /health       answers when it serves

After a cold start it may be captured once it has answered WARMUP_REQUESTS files, or at once where
that is not set. `make engines` installs what it needs below `.engines`, which has to be on
PYTHONPATH.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import socket
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socketserver import TCPServer
from typing import Any

# Read when onnxruntime is imported. It would keep a file of the node open, which other processes
# change, and send what it has counted.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

import numpy as np
import onnxruntime
from magika import Magika
from numpy.typing import NDArray

from snapback_client import MemoryPool, Worker

GRAPH = "graph.onnx"
NAMES = "names.json"
"""In the state of the worker: the model without its tensors, and what it calls them."""
NO_FILE = Path("/dev/null")
"""Where the graph says that its large tensors are: they are given, and a file there has to be."""
LEAST_BYTES = 1024
"""Smaller tensors stay in the graph."""
MAX_BODY_BYTES = 64 * 1024 * 1024

Tensors = dict[str, NDArray[Any]]


def taken_apart(path: Path) -> tuple[bytes, Tensors]:
    """Return the graph of a model, and its large tensors, which the graph only names."""
    # Only a cold start takes the model apart.
    import onnx  # noqa: PLC0415
    from onnx import numpy_helper  # noqa: PLC0415

    model = onnx.load(str(path))
    tensors: Tensors = {}
    for tensor in model.graph.initializer:
        value = numpy_helper.to_array(tensor)
        if value.nbytes < LEAST_BYTES:
            continue
        tensors[tensor.name] = value
        tensor.ClearField("raw_data")
        tensor.data_location = onnx.TensorProto.EXTERNAL
        place = {"location": NO_FILE.name, "offset": "0", "length": str(value.nbytes)}
        for key, text in place.items():
            tensor.external_data.add(key=key, value=text)
    return model.SerializeToString(), tensors


class PooledSession:
    """A session that computes with arrays where they are."""

    def __init__(self, graph: bytes, tensors: Tensors) -> None:
        """Use the arrays by their names in the graph."""
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        # Either would copy tensors into memory of onnxruntime's own.
        options.add_session_config_entry("session.disable_prepacking", "1")
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        folder = "session.model_external_initializers_file_folder_path"
        options.add_session_config_entry(folder, str(NO_FILE.parent))
        # The session does not keep them alive.
        value_of = onnxruntime.OrtValue.ortvalue_from_numpy
        self.values = {name: value_of(array) for name, array in tensors.items()}
        for name, value in self.values.items():
            options.add_initializer(name, value)
        providers = ["CPUExecutionProvider"]
        self.run = onnxruntime.InferenceSession(graph, options, providers=providers).run


class PooledMagika(Magika):  # type: ignore[misc]  # it has no types
    """Magika as it is, but for where its session has the weights."""

    def __init__(self, worker: Worker) -> None:
        """Take the weights that the worker has, or on a cold start those of the package."""
        self._worker = worker
        self._graph = b""
        self._names: list[str] = []
        super().__init__()

    def save(self, state: Path) -> None:
        """Save what is not in the pool."""
        (state / GRAPH).write_bytes(self._graph)
        (state / NAMES).write_text(json.dumps(self._names))

    def _init_onnx_session(self) -> PooledSession:
        state = self._worker.state
        if state is not None:
            self._graph = (state / GRAPH).read_bytes()
            self._names = json.loads((state / NAMES).read_text())
            return self._over(self._worker.pool("weights"))
        self._graph, tensors = taken_apart(Path(self._model_path))
        self._names = list(tensors)

        def build(pool: MemoryPool) -> None:
            shapes = {
                array_name(number): (value.shape, value.dtype)
                for number, value in enumerate(tensors.values())
            }
            made = pool.allocate_many(shapes)
            for array, value in zip(made.values(), tensors.values(), strict=True):
                np.copyto(array, value)

        return self._over(self._worker.pool("weights", build))

    def _over(self, pool: MemoryPool) -> PooledSession:
        arrays = {name: pool[array_name(at)] for at, name in enumerate(self._names)}
        return PooledSession(self._graph, arrays)


def array_name(number: int) -> str:
    """Return the name of an array: those in a graph have characters that a pool does not take."""
    return f"tensor-{number:04}"


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: Server

    def do_GET(self) -> None:
        """Answer `/health`."""
        self._answer(200 if self.path == "/health" else 404, {})

    def do_POST(self) -> None:
        """Answer `/identify`."""
        length = int(self.headers.get("Content-Length") or 0)
        if self.path != "/identify" or not 0 <= length <= MAX_BODY_BYTES:
            self._answer(404, {"error": "POST a file of at most 64 MiB to /identify"})
            return
        content = self.rfile.read(length)
        with self.server.worker.request():
            found = self.server.model.identify_bytes(content)
        self._answer(200, {"label": str(found.output.label), "score": round(found.score, 6)})
        if next(self.server.answered) == self.server.warmup_requests:
            self.server.worker.ready()

    def address_string(self) -> str:
        """Return nothing: a unix socket has no address."""
        return ""

    def log_message(self, *_arguments: object) -> None:
        """Print nothing for a request."""

    def _answer(self, status: int, body: dict[str, object]) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


class Server(ThreadingHTTPServer):
    """Serves a model on a port, or on a unix socket."""

    daemon_threads = True

    def __init__(self, worker: Worker, model: PooledMagika) -> None:
        """Listen; a unix socket gets its name once it can be connected to."""
        self.worker = worker
        self.model = model
        self.answered = itertools.count(1)
        is_warm = worker.state is not None
        self.warmup_requests = 0 if is_warm else int(os.environ.get("WARMUP_REQUESTS", "0"))
        port = os.environ.get("HTTP_PORT")
        if port:
            super().__init__(("", int(port)), Handler)
            return
        self.address_family = socket.AF_UNIX
        path = Path(os.environ["POD_SOCKET_DIR"]) / "worker.sock"
        temporary = path.with_name(f".{path.name}")
        temporary.unlink(missing_ok=True)
        super().__init__(str(temporary), Handler)
        temporary.rename(path)

    def server_bind(self) -> None:
        """Bind, with no look-up of a name."""
        TCPServer.server_bind(self)


def main() -> None:
    """Start cold or from what was captured, and serve."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    began = time.monotonic()
    with Worker() as worker:
        model = PooledMagika(worker)
        worker.on_quiesce = model.save
        model.identify_bytes(b"warm up: " * 100)
        print(f"serving after {time.monotonic() - began:.2f} s", flush=True)
        server = Server(worker, model)
        if not server.warmup_requests:
            worker.ready()
        server.serve_forever()


if __name__ == "__main__":
    main()
