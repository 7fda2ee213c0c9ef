"""A model of PyTorch that can be captured and restored: replace the lines marked with `<-`."""

import signal
import sys
from queue import SimpleQueue

import torch

from snapback_client import Worker


def build() -> torch.nn.Module:
    """Make the modules. After a restore they get no memory here."""
    nn = torch.nn
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 8))  # <-


def load(model: torch.nn.Module) -> None:
    """Read the weights: only on a cold start."""
    for weights in model.parameters():
        torch.nn.init.uniform_(weights)  # <-


signal.signal(signal.SIGTERM, lambda *_: sys.exit())
asked: SimpleQueue[int] = SimpleQueue()
signal.signal(signal.SIGUSR1, lambda number, _: asked.put(number))
with Worker() as worker:
    model = worker.torch("weights", build, load).eval()
    worker.ready()
    while True:
        asked.get()  # <- wait for a request, here `kill -USR1`
        with worker.request(), torch.inference_mode():
            print(model(torch.ones(64)).tolist(), flush=True)  # <- answer it
