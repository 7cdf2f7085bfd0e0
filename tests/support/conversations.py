"""Conversations over a cache, with the answers of one device.

A story is a list of acts on some sequences. Its tensors and the oracle's answers are computed first, from whole
sequences in float64; then every rank runs the story and compares its rows.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import ringspan as rs
from support import oracle
from support.cases import make_mask
from support.oracle import MaskSpec

HEAD_DIM = 8
V_HEAD_DIM = 6

TOLERANCES = {
    torch.float64: {"rtol": 0.0, "atol": 1e-12},
    torch.float32: {"rtol": 1.3e-6, "atol": 1e-5},
    torch.bfloat16: {"rtol": 1.6e-2, "atol": 1e-5},
    torch.float16: {"rtol": 1e-3, "atol": 1e-5},
}
"""Rounding in float64, else the defaults of assert_close."""


@dataclass
class Act:
    """A turn that is committed or aborted (`lengths`), a truncation, a drop, or a selection (`sources`)."""

    kind: str
    lengths: dict[int, int] = field(default_factory=dict)
    sequence: int = 0
    position: int = 0
    sources: tuple[int, ...] = ()
    algorithm: str = "auto"
    query: str = "sharded"
    wire: str | None = None
    tensors: list[tuple[torch.Tensor, ...]] = field(default_factory=list)  # by layer: whole q, k, v, out


class Story:
    """Acts with their tensors; `held` tracks the cache of a single device."""

    def __init__(
        self, seed: int, heads: rs.Heads, specs: list[MaskSpec], dtype: torch.dtype = torch.float64, **options: Any
    ) -> None:
        self.random = np.random.default_rng(seed)
        self.heads = heads
        self.specs = specs
        self.dtype = dtype
        self.options = options
        self.softcaps: list[float | None] = [None] * len(specs)  # by layer
        self.acts: list[Act] = []
        self.held: dict[int, list[tuple[np.ndarray, np.ndarray]]] = {}
        self.lengths: list[dict[int, int]] = []  # after each act

    def turn(self, lengths: dict[int, int], kind: str = "turn", **options: Any) -> "Story":
        """Add new tokens; "abort" leaves no trace of them."""
        act = Act(kind, lengths, **options)
        held = {sequence: list(layers) for sequence, layers in self.held.items()}
        for layer, spec in enumerate(self.specs):
            rows = [self._attend(held, sequence, layer, spec, n) for sequence, n in lengths.items()]
            act.tensors.append(tuple(torch.cat(tensors, 2) for tensors in zip(*rows, strict=True)))
        if kind == "turn":
            self.held = held
        return self._add(act)

    def truncate(self, sequence: int, position: int) -> "Story":
        self.held[sequence] = [(k[:, :, :position], v[:, :, :position]) for k, v in self.held[sequence]]
        return self._add(Act("truncate", sequence=sequence, position=position))

    def drop(self, sequence: int) -> "Story":
        del self.held[sequence]
        return self._add(Act("drop", sequence=sequence))

    def select(self, sources: tuple[int, ...]) -> "Story":
        """Select beams."""
        self.held = {i: list(self.held[source]) for i, source in enumerate(sources)}
        return self._add(Act("select", sources=sources))

    def length(self, sequence: int) -> int:
        """Return the tensors of one sequence so far."""
        return int(self.held[sequence][0][0].shape[2]) if sequence in self.held else 0

    def cache(self, group: Any, **options: Any) -> rs.KVCache:
        """Make an empty cache for this story."""
        return rs.KVCache(
            num_layers=len(self.specs),
            num_heads=self.heads.num_heads,
            num_kv_heads=self.heads.num_kv_heads,
            head_dim=HEAD_DIM,
            v_head_dim=V_HEAD_DIM,
            dtype=self.dtype,
            mask=[make_mask(spec) for spec in self.specs],
            group=group,
            **self.options | options,
        )

    def _add(self, act: Act) -> "Story":
        self.acts.append(act)
        self.lengths.append({sequence: self.length(sequence) for sequence in self.held})
        return self

    def _tensor(self, num_heads: int, tokens: int, dim: int) -> torch.Tensor:
        return torch.from_numpy(self.random.standard_normal((1, num_heads, tokens, dim))).to(self.dtype)

    def _stored(self, x: torch.Tensor) -> np.ndarray:
        """Round a tensor to a narrower dtype; `Turn.error_bound` covers encodings."""
        narrow = getattr(torch, self.options.get("storage") or "", x.dtype)
        return (x.to(narrow) if narrow.is_floating_point else x).double().numpy()

    def _attend(
        self, held: dict[int, list[Any]], sequence: int, layer: int, spec: MaskSpec, num_new: int
    ) -> tuple[torch.Tensor, ...]:
        q = self._tensor(self.heads.num_heads, num_new, HEAD_DIM)
        k = self._tensor(self.heads.num_kv_heads, num_new, HEAD_DIM)
        v = self._tensor(self.heads.num_kv_heads, num_new, V_HEAD_DIM)
        layers = held.setdefault(sequence, [])
        if layer == len(layers):
            layers.append(tuple(np.empty((1, self.heads.num_kv_heads, 0, dim)) for dim in (HEAD_DIM, V_HEAD_DIM)))
        start = layers[layer][0].shape[2]
        layers[layer] = tuple(
            np.concatenate([old, self._stored(x)], 2) for old, x in zip(layers[layer], (k, v), strict=True)
        )
        allowed = oracle.dense_mask(spec, range(start, start + num_new), range(start + num_new))
        out, _ = oracle.dense_attention(q.double().numpy(), *layers[layer], allowed, softcap=self.softcaps[layer])
        return q, k, v, torch.from_numpy(out)


def live_through(story: Story, group: Any, cache: rs.KVCache | None = None) -> rs.KVCache:
    """Run a story on one rank; compare every output with the oracle's, encoded ones within their bound."""
    cache = cache or story.cache(group)
    rank = 0 if group is None else group.rank
    for number, act in enumerate(story.acts):
        if act.kind == "truncate":
            cache.truncate(act.sequence, act.position)
        elif act.kind == "drop":
            cache.drop(act.sequence)
        elif act.kind == "select":
            cache.select(act.sources)
        else:
            turn = cache.begin(act.lengths, algorithm=act.algorithm, query=act.query, wire=act.wire)
            for layer, tensors in enumerate(act.tensors):
                *qkv, expected = (turn.layout.shard(x, rank, 2) for x in tensors)
                got = attend(turn, qkv, layer, story.softcaps[layer])
                bound = turn.error_bound(qkv[0], layer=layer)[:, None, None]
                difference = got.double() - expected
                where = f"act {number} {act.kind} {act.lengths} layer {layer} rank {rank}: "
                torch.testing.assert_close(
                    expected + difference.sign() * (difference.abs() - bound).clamp_min(0),
                    expected,
                    **TOLERANCES[story.dtype],
                    msg=lambda text, where=where: where + text,
                )
            turn.commit() if act.kind == "turn" else turn.abort()
        assert cache.lengths == story.lengths[number]
    return cache


def attend(turn: rs.Turn, qkv: list[torch.Tensor], layer: int, softcap: float | None = None) -> torch.Tensor:
    """Call `decode` if there is one token per sequence, else `prefill`; (1, heads, rows, dim) either way."""
    if all(part.num_new == 1 for part in turn.parts):
        out = turn.decode(*(x.permute(2, 1, 0, 3) for x in qkv), layer=layer, softcap=softcap)
        assert isinstance(out, torch.Tensor)
        return out.permute(2, 1, 0, 3)
    out = turn.prefill(*qkv, layer=layer, softcap=softcap)
    assert isinstance(out, torch.Tensor)
    return out
