"""A small transformer with what makes models hard to share; needs PyTorch.

The output is tied to the embedding, the rotary frequencies are a buffer that is not saved, forward
writes a buffer, one tensor is a plain attribute, and the weights are bfloat16.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

VOCABULARY, WIDTH, HEADS, LAYERS, HIDDEN = 4096, 512, 8, 3, 1408


class Rotary(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        half = torch.arange(0, WIDTH // HEADS, 2, dtype=torch.float32)
        frequencies = 1.0 / 10000 ** (half / (WIDTH // HEADS))
        self.register_buffer("inv_freq", frequencies, persistent=False)

    def forward(self, x: Any) -> Any:
        angles = torch.arange(x.shape[-2], dtype=torch.float32)[:, None] * self.inv_freq
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        even, odd = x[..., ::2], x[..., 1::2]
        return torch.cat((even * cos - odd * sin, even * sin + odd * cos), -1)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)
        self.rotary = Rotary()

    def forward(self, x: Any) -> Any:
        q, k, v = self.qkv(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(
            self.rotary(q), self.rotary(k), v, is_causal=True
        )
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        gate, up = self.up(self.after(x)).chunk(2, -1)
        return x + self.down(functional.silu(gate) * up)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(LAYERS)])
        self.norm = nn.RMSNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.temperature = torch.ones(()) * 0.5

    def forward(self, tokens: Any) -> Any:
        self.calls += 1
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x)) / self.temperature


def build() -> Model:
    """Return the model with the same random weights each time, in bfloat16."""
    torch.manual_seed(7)
    model = Model().to(torch.bfloat16).eval().requires_grad_(False)
    for layer in model.layers:
        # As engines do, for these lose too much in bfloat16.
        layer.rotary.inv_freq = Rotary().inv_freq
    return model


def build_empty() -> Model:
    """Return the model with no memory at all."""
    with torch.device("meta"):
        return Model().eval().requires_grad_(False)


def answer(model: Any) -> Any:
    """Return what the model makes of some tokens."""
    tokens = torch.arange(24).reshape(2, 12) * 37 % VOCABULARY
    device = next(model.parameters()).device
    with torch.inference_mode(False), torch.no_grad():
        return model(tokens.to(device)).float().cpu()
