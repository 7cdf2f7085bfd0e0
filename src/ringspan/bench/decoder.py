"""What model is measured? A dense decoder in plain torch with random weights; attention is a function passed in.

It has what the planner's `dense:` line counts: per layer four projections, two norms and an MLP of two matrices, with
no biases. Queries and keys are turned by their global positions, so any part of a sequence can be computed anywhere.
"""

import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import embedding, gelu, linear

from ringspan.bench.settings import TransformerSettings

VOCABULARY = 256
_ROPE_BASE = 10000.0
_HALVES = (torch.bfloat16, torch.float16)

Attend = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(layer, q, k, v) to out, each (batch, heads or KV heads, seq, head_dim)."""


class Decoder(nn.Module):
    """A dense decoder; equal settings give equal weights on every rank."""

    def __init__(self, settings: TransformerSettings, device: torch.device) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(settings.seed)

        def new(rows: int, columns: int) -> nn.Parameter:
            return nn.Parameter(torch.randn(rows, columns, generator=generator) / math.sqrt(columns))

        self.head_dim = settings.head_dim
        self.embedding = new(VOCABULARY, settings.width)
        self.layers = nn.ModuleList(DecoderLayer(number, settings, new) for number in range(settings.layers))
        self.norm = nn.RMSNorm(settings.width)
        self.unembedding = new(VOCABULARY, settings.width)
        self.to(device, getattr(torch, settings.dtype))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Attend) -> torch.Tensor:
        """The last hidden states (batch, seq, width) of tokens (batch, seq) at positions (seq,)."""
        x = embedding(tokens, self.embedding) * math.sqrt(self.embedding.shape[1])
        turn = _Turn(positions.to(tokens.device), self.head_dim, x.dtype)
        for layer in self.layers:
            x = layer(x, turn, attend)
        normed: torch.Tensor = self.norm(x)
        return normed

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits of hidden states, computed in float32 or wider."""
        return _project(hidden, self.unembedding).to(torch.promote_types(hidden.dtype, torch.float32))

    @property
    def nbytes(self) -> int:
        """Bytes of all weights."""
        return sum(x.nbytes for x in self.parameters())


class DecoderLayer(nn.Module):
    """Attention and an MLP, each with a norm before it and a residual around it."""

    def __init__(self, number: int, settings: TransformerSettings, new: Callable[[int, int], nn.Parameter]) -> None:
        super().__init__()
        self.number = number
        self.head_dim = settings.head_dim
        self.num_heads = [settings.num_heads, settings.num_kv_heads, settings.num_kv_heads]
        self.norm, self.mlp_norm = nn.RMSNorm(settings.width), nn.RMSNorm(settings.width)
        self.qkv = new(sum(self.num_heads) * self.head_dim, settings.width)
        self.out = new(settings.width, settings.width)
        self.up = new(settings.mlp_size, settings.width)
        self.down = new(settings.width, settings.mlp_size)

    def forward(self, x: torch.Tensor, turn: "_Turn", attend: Attend) -> torch.Tensor:
        """Run tokens x (batch, seq, width), which may stand anywhere in their sequences."""
        heads = torch.unflatten(_project(self.norm(x), self.qkv), -1, (-1, self.head_dim)).transpose(1, 2)
        # Copied once, so that every head is contiguous for messages and kernels.
        q, k, v = torch.split(heads.contiguous(), self.num_heads, dim=1)
        out = attend(self.number, turn(q), turn(k), v)
        x = x + _project(out.transpose(1, 2).flatten(2), self.out)
        return x + _project(gelu(_project(self.mlp_norm(x), self.up)), self.down)


class _Turn:
    """RoPE: rotates each pair of dimensions by position times its frequency; all layers share the angles."""

    def __init__(self, positions: torch.Tensor, head_dim: int, dtype: torch.dtype) -> None:
        pairs = torch.arange(0, head_dim, 2, dtype=torch.float64, device=positions.device)
        angles = positions[:, None] * _ROPE_BASE ** (-pairs / head_dim)
        self.cos, self.sin = (torch.cat([x, x], -1).to(dtype) for x in (angles.cos(), angles.sin()))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        a, b = x.chunk(2, -1)
        return torch.addcmul(x * self.cos, torch.cat([-b, a], -1), self.sin)


def _project(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Multiply by weights. On CPUs, half types are multiplied in float32 and rounded, because few CPUs support them."""
    if x.device.type == "cpu" and x.dtype in _HALVES:
        return linear(x.float(), weights.float()).to(x.dtype)
    return linear(x, weights)
