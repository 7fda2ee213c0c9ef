"""The engine of the benchmark over HTTP: the example with its model in GPU memory, or `--stock`.

The stock one is the same server with the model as its package loads it, and knows nothing of
captures. Both have `POST /nap`: sleep, wake, and answer a question; it says how many seconds that
took. The stock one has no other way to be without its weights than to load the model anew.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import onnx_worker
from magika import Magika

from snapback_client import MemoryPool, Worker

CONTENT = b"warm up: " * 100


class Pooled(onnx_worker.PooledMagika):
    """A model whose weights leave the GPU and come back."""

    def nap(self) -> None:
        self.pool.sleep()
        self.pool.wake()

    def _over(self, pool: MemoryPool) -> onnx_worker.PooledSession:
        self.pool = pool
        return super()._over(pool)


class Stock(Magika):  # type: ignore[misc]  # it has no types
    """The model as it is."""

    def __init__(self, _worker: Worker) -> None:
        super().__init__()

    def nap(self) -> None:
        self._onnx_session: Any = None
        self._onnx_session = self._init_onnx_session()


class Handler(onnx_worker.Handler):
    """One request."""

    def do_POST(self) -> None:  # noqa: N802 - its base has it so
        if self.path != "/nap":
            super().do_POST()
            return
        began = time.monotonic()
        model: Any = self.server.model
        model.nap()
        model.identify_bytes(CONTENT)
        self._answer(200, {"seconds": time.monotonic() - began})


def main() -> None:
    """Serve, with what is captured of it or as it is."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    is_stock = "--stock" in sys.argv
    if is_stock:
        # That of the program that runs it.
        os.environ.pop("SNAPSHOT_CONTROL_DIR", None)
    with Worker() as worker:
        model: Any = Stock(worker) if is_stock else Pooled(worker)
        worker.on_quiesce = None if is_stock else model.save
        server = onnx_worker.Server(worker, model)
        server.RequestHandlerClass = Handler
        worker.ready()
        server.serve_forever()


if __name__ == "__main__":
    main()
