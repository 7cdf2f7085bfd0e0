"""How do the tokens of a decoder attend to those of an encoder, when each sequence is split on its own?

Every token of a decoder sees every token of the encoder, so the positions of the queries mean nothing, and may be
chosen such that padding of the encoder can be said: the queries are put in between the keys, at a place where in no row
the tokens have ended or not begun. Then each row has three documents: padding, tokens with all queries, padding.

Over a cache every rank has all the queries. Each attends to the keys it holds, and the parts are merged on all.
"""

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ringspan.adapters.transformers.masks import Tokens, by_row, run_of_tokens
from ringspan.attend import Attention
from ringspan.call import attention
from ringspan.collectives import gather
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous
from ringspan.mask import Mask, documents, full
from ringspan.softmax import accumulator_dtype
from ringspan.span import Span
from ringspan.transports.single import ALONE


class Crossing(NamedTuple):
    """Who sees whom, in positions of both sequences."""

    mask: Mask
    layout: Layout  # of the decoder
    kv_layout: Layout  # of the encoder

    def on_rank(self, rank: int) -> "Crossing":
        """The same for a rank that attends alone to what it holds."""
        layouts = (Layout((_spans(layout, rank),)) for layout in (self.layout, self.kv_layout))
        return Crossing(self.mask, *layouts)


def runs_of(tokens: Tokens) -> tuple[tuple[int, int], ...]:
    """Where the tokens of each row begin and end; refused if one begins behind the end of another."""
    runs = tuple(run_of_tokens(row, number) for number, row in enumerate(tokens))
    first, stop = max(first for first, _ in runs), min(stop for _, stop in runs)
    if first > stop:
        raise UnsupportedError(
            f"attention_mask: a row has its last token at {stop - 1}, before another has its first at {first}; pad the "
            "rows of a batch on one side"
        )
    return runs


def cross(layout: Layout, kv_layout: Layout, tokens: Tokens | None) -> Crossing:
    """All tokens of a decoder, laid out one way, see those of the encoder, (batch, columns), laid out another way."""
    if tokens is None or tokens.all():
        return Crossing(full(), layout, kv_layout)
    return _cross(layout, kv_layout, runs_of(tokens))


@lru_cache(maxsize=64)
def _cross(layout: Layout, kv_layout: Layout, runs: tuple[tuple[int, int], ...]) -> Crossing:
    at = max(first for first, _ in runs)
    length, num_queries = kv_layout.num_positions, layout.num_positions
    rows = [(first, num_queries + stop - first, length - stop) for first, stop in runs]
    mask = by_row([documents([n for n in row if n]) for row in rows])
    assert mask is not None
    return Crossing(mask, _moved(layout, 0, at), _moved(kv_layout, at, num_queries))


def _moved(layout: Layout, start: int, by: int) -> Layout:
    """The positions from `start` on, moved."""

    def moved(spans: Iterable[Span]) -> Iterable[Span]:
        for span in spans:
            skipped = max(0, -(-(start - span.start) // span.step)) * span.step  # positions before it
            yield Span(span.start, min(span.stop, start), span.step)
            yield Span(span.start + skipped + by, span.stop + by, span.step)

    return Layout(tuple(tuple(moved(spans)) for spans in layout.spans_by_rank), tuple(moved(layout.replicated)))


def _spans(layout: Layout, rank: int) -> tuple[Span, ...]:
    assert not (layout.replicated and any(layout.spans_by_rank))
    return layout.replicated or layout.spans_by_rank[rank]


def attend_to_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    crossing: Crossing,
    *,
    rank: int,
    group: Any,
    kernel: str,
    scale: float | None,
) -> torch.Tensor:
    """Out of queries that all ranks have, (batch, heads, seq, dim), over keys and values of which each has a part."""
    mask, layout, kv_layout = crossing.on_rank(rank)
    part = attention(
        q,
        k,
        v,
        mask=mask,
        layout=layout,
        kv_layout=kv_layout,
        group=ALONE,
        algorithm="pass_kv",
        kernel=kernel,
        scale=scale,
        return_lse=True,
        contract=False,
    )
    assert isinstance(part, Attention)
    if crossing.kv_layout.replicated:
        return part.out
    dtype = accumulator_dtype(part.out.dtype)
    packed = torch.cat([part.out.to(dtype), part.lse.to(dtype).unsqueeze(-1)], -1)
    world_size = crossing.kv_layout.world_size
    parts = gather(packed.unsqueeze(0), contiguous(world_size, world_size), group, dim=0)
    shares = torch.softmax(parts[..., -1:], 0)  # exp(lse) of each part in the sum of all
    return (parts[..., :-1] * shares).sum(0).to(part.out.dtype)
