"""A small causal language model in plain torch (RoPE, GQA) and its training on one process: the oracle for ranks.

It knows nothing of ringspan: attention is a function it is given, and by default PyTorch's own.
"""

from collections.abc import Callable

import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention

VOCABULARY = 29
HEADS, KV_HEADS, HEAD_DIM = 4, 2, 8

Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)


class Layer(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        dim = HEADS * HEAD_DIM
        self.attend = attend
        self.norm, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, (HEADS + 2 * KV_HEADS) * HEAD_DIM)
        self.out = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norm(x)).unflatten(-1, (-1, HEAD_DIM)).transpose(1, 2)
        q, k, v = heads.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        out = self.attend(rotate(q, position_ids), rotate(k, position_ids), v)
        x = x + self.out(out.transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """Build the model with the same weights for any attention."""

    def __init__(self, attend: Attend = plain, *, layers: int = 2, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, HEADS * HEAD_DIM)
        self.layers = nn.ModuleList(Layer(attend) for _ in range(layers))
        self.unembed = nn.Linear(HEADS * HEAD_DIM, VOCABULARY)
        self.to(dtype)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, weights in self.named_parameters():
                weights.copy_(torch.randn(weights.shape, generator=generator) / max(weights.shape) ** 0.5)
                weights += 1.0 if name.endswith(("norm.weight", "norm2.weight")) else 0.0

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for layer in self.layers:
            x = layer(x, position_ids)
        return self.unembed(x)


def rotate(x: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
    """Apply RoPE: rotate pairs of dims by position times a frequency."""
    frequencies = 100.0 ** -torch.linspace(0, 1, x.shape[-1] // 2, dtype=torch.float64)
    angles = (position_ids[:, None, :, None] * frequencies).to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def make_tokens(seed: int, batch: int, seq_len: int) -> torch.Tensor:
    """Make sequences with something to learn: nine of ten tokens follow from the one two places before."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (batch, seq_len), generator=generator)
    for i in range(2, seq_len):
        follows = torch.rand(batch, generator=generator) < 0.9
        tokens[:, i] = torch.where(follows, (tokens[:, i - 2] + 3) % VOCABULARY, tokens[:, i])
    return tokens


def whole_loss(model: nn.Module, tokens: torch.Tensor, positions: torch.Tensor | None = None) -> torch.Tensor:
    """Return the mean over all tokens that have a next one, on one process; positions are 0, 1, 2, … by default."""
    positions = torch.arange(tokens.shape[1]) if positions is None else positions
    logits = model(tokens, positions.expand(tokens.shape))
    return cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


def token_losses(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(labels.shape)
