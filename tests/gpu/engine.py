"""An engine that is captured as it is: `engine.py KIND PORT MIB`. It answers by what it holds.

`memory` has allocated so much on its GPU by the driver, and knows nothing of Snapback; nor does
`llama`, a LLaMA of random weights whose answer is a replayed CUDA graph and generated tokens. Of
`pool` and `shared-llama` the same bytes and weights lie in a pool of Snapback.
"""

from __future__ import annotations

import contextlib
import http.server
import json
import os
import signal
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any

MIB = 2**20
HIDDEN = 4096
Answer = Callable[[], object]


@contextlib.contextmanager
def memory(size: int) -> Iterator[Answer]:
    from snapback_client.cuda import CudaDriver

    driver = CudaDriver()
    device = driver.call("cuDeviceGet", 0)
    driver.call("cuCtxPushCurrent", driver.call("cuDevicePrimaryCtxRetain", device))
    at = driver.call("cuMemAlloc", size)
    given = pattern(size)
    driver.call("cuMemcpyHtoD", at, given.ctypes.data, size)

    def answer() -> int:
        given.fill(0)
        driver.call("cuMemcpyDtoH", given.ctypes.data, at, size)
        return zlib.crc32(given)

    yield answer


@contextlib.contextmanager
def pool(size: int) -> Iterator[Answer]:
    from snapback_client import MemoryPool, Worker

    def build(new: MemoryPool) -> None:
        new.allocate("w", size, "uint8").set(pattern(size))

    with Worker() as worker:
        found = worker.pool("weights", build)
        worker.ready()

        def answer() -> int:
            with worker.request():
                return zlib.crc32(found["w"].get())

        yield answer


@contextlib.contextmanager
def llama(size: int) -> Iterator[Answer]:
    import torch

    model = built(size, "cuda")
    given = torch.arange(32, device="cuda")[None]
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream), torch.no_grad():
        model(given, use_cache=False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        logits = model(given, use_cache=False).logits

    def answer() -> object:
        graph.replay()
        return [float(logits.float().abs().sum()), *tokens_of(model, given)]

    yield answer


@contextlib.contextmanager
def shared_llama(size: int) -> Iterator[Answer]:
    import torch

    from snapback_client import MemoryPool, Worker
    from snapback_client.torch import TorchMemory

    made: list[Any] = []

    def build(new: MemoryPool) -> None:
        memory = TorchMemory({"weights": new})
        with memory.region("weights"):
            made.append(built(size, memory.device))
        memory.publish(made[0])

    with Worker() as worker:
        found = worker.pool("weights", build)
        memory = TorchMemory({"weights": found})
        if not made:
            made.append(built(size, "meta"))
            memory.materialise(made[0])
        given = torch.arange(32, device=memory.device)[None]
        worker.ready()

        def answer() -> object:
            with worker.request():
                return tokens_of(made[0], given)

        yield answer


def pattern(size: int) -> Any:
    import numpy as np

    return np.resize(np.arange(251, dtype="u1"), size)


def built(size: int, place: str) -> Any:
    """Return a LLaMA whose weights take about so many bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    torch.set_default_dtype(torch.bfloat16)
    vocabulary, inner = 32000, 14336
    layer = 2 * HIDDEN * (2 * HIDDEN + HIDDEN // 2 + 3 * inner)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=inner,
        num_hidden_layers=max(1, (size - 4 * vocabulary * HIDDEN) // layer),
        num_attention_heads=32,
        num_key_value_heads=8,
    )
    with torch.device(place):
        model = LlamaForCausalLM(config)
    return model.eval().requires_grad_(False)


def tokens_of(model: Any, given: Any) -> list[int]:
    import torch

    with torch.no_grad():
        made = model.generate(given, max_new_tokens=12, do_sample=False)
    return [int(each) for each in made[0, given.shape[1] :]]


def serve(port: int, answer: Answer) -> None:
    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"answer": answer(), "pid": os.getpid()}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: each line would be in the log of the pod."""

    http.server.HTTPServer(("127.0.0.1", port), Handler).serve_forever()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit())
    engines = {"memory": memory, "pool": pool, "llama": llama, "shared-llama": shared_llama}
    with engines[sys.argv[1]](int(sys.argv[3]) * MIB) as answer:
        serve(int(sys.argv[2]), answer)
