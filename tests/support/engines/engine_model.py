"""The model of the likenesses, with what makes models of engines hard to share; needs PyTorch.

Its projection is packed after loading: the weight gets another shape, and a scale comes beside it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

VOCABULARY, WIDTH, HIDDEN = 512, 64, 96


class PackedMethod:
    """As the quantisation methods of engines; `supports_pre_processed_weights` is vLLM's name."""

    supports_pre_processed_weights = True


class Projection(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.quant_method = PackedMethod()
        self.weight = nn.Parameter(torch.empty(HIDDEN, WIDTH), requires_grad=False)

    def pack(self, *, is_packed: bool) -> None:
        """Bring the weight into the shape of a kernel, and find the kernel."""
        if not is_packed:
            packed = (self.weight * 4).t().contiguous()
            self.weight = nn.Parameter(packed, requires_grad=False)
            self.scale = nn.Parameter(torch.full((1,), 0.25), requires_grad=False)
        self.kernel = torch.matmul

    def forward(self, x: Any) -> Any:
        return self.kernel(x, self.weight) * self.scale


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.projection = Projection()
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, tokens: Any) -> Any:
        self.calls += 1
        return self.head(self.projection(self.embedding(tokens)))


def fill(model: Model) -> None:
    """Give the weights the values that are on disk."""
    torch.manual_seed(11)
    for parameter in model.parameters():
        parameter.requires_grad_(False).normal_()


def answer(model: Any) -> list[float]:
    """Return what the model makes of some tokens."""
    tokens = torch.arange(12).reshape(2, 6) * 37 % VOCABULARY
    with torch.no_grad():
        return model(tokens).flatten().tolist()
