"""Packed documents over ranks, in the ways that ring-flash-attention cuts them.

Its varlen functions cut every document over all ranks: `cu_seqlens` is that of a rank's shard, the same on each. Its
llama3 functions cut the packed sequence as a whole, and every rank has document ends of its own.
"""

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from ringspan.arguments import FLAG, RANKS, WHOLE, Kind, check_arguments, instance_of
from ringspan.errors import LayoutError, ShapeError
from ringspan.layout import Layout, contiguous
from ringspan.runtime.compiled import outside_of_programs
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import session_of
from ringspan.span import Span


def _is_cumulative(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.ndim == 1 and value.dtype in (torch.int32, torch.int64)


_CUMULATIVE = Kind("a tensor of whole numbers, (documents + 1,)", "give torch.tensor([0, 3, 8])", _is_cumulative)


_SLICE = instance_of(slice, "that of llama3_flash_attn_prepare_cu_seqlens")


def lengths_of(cu_seqlens: torch.Tensor, name: str = "cu_seqlens") -> list[int]:
    """Document lengths from cumulative ones: [0, 3, 8] gives [3, 5]."""
    check_arguments(**{name: (_CUMULATIVE, cu_seqlens)})
    ends = cu_seqlens.tolist()
    lengths = [stop - start for start, stop in pairwise(ends)]
    if not lengths or ends[0] != 0 or min(lengths) < 0:
        raise ShapeError("expected cumulative lengths from 0 on", argument=name, value=ends)
    return [length for length in lengths if length]


def layout_of_documents(
    local_lengths: Sequence[int], world_size: int, build: Callable[..., Layout]
) -> tuple[Layout, list[int]]:
    """The layout of documents that are each cut over all ranks, and their whole lengths."""
    spans: list[list[Span]] = [[] for _ in range(world_size)]
    start = 0
    lengths = []
    for local in local_lengths:
        length = local * world_size
        part = build(length, world_size, start=start)
        for rank in range(world_size):
            if part.shard_len(rank) != local:
                raise LayoutError(f"a document of {length} tokens is not cut into {world_size} equal parts")
            spans[rank] += part.spans_by_rank[rank]
        lengths.append(length)
        start += length
    return Layout(tuple(map(tuple, spans))), lengths


class Llama3Documents(NamedTuple):
    """A packed sequence cut into contiguous shards."""

    layout: Layout
    lengths: list[int]


def llama3_documents(cu_seqlens_q: torch.Tensor, local_k_slice: slice, shard_len: int, group: Any) -> Llama3Documents:
    """All document lengths, gathered from every rank's own documents with small messages."""
    lengths_of(cu_seqlens_q, "cu_seqlens_q")
    check_arguments(local_k_slice=(_SLICE, local_k_slice))
    session = session_of(group)
    rank, world_size = session.transport.rank, session.transport.world_size
    ends = cu_seqlens_q.tolist()
    starts = {local_k_slice.start or 0, *(rank * shard_len + end for end in ends[1:-1])}
    payload = struct.pack(f"<{len(starts)}q", *sorted(starts))
    with session.call() as call:
        everyone = call.gather(Signature.of({"call": "llama3_documents", "shard_len": shard_len}), payload)
    found = {start for own in everyone for (start,) in struct.iter_unpack("<q", own)}
    bounds = [*sorted(found), world_size * shard_len]
    lengths = [stop - start for start, stop in pairwise(bounds)]
    return Llama3Documents(contiguous(world_size * shard_len, world_size), lengths)


@outside_of_programs("look at document lengths")
def llama3_flash_attn_prepare_cu_seqlens(
    cu_seqlens: torch.Tensor, causal: bool, rank: int, world_size: int
) -> tuple[torch.Tensor, torch.Tensor, int, int, slice]:
    """A rank's arguments: cu_seqlens_q, cu_seqlens_k, the longest of each, and its slice of keys."""
    check_arguments(causal=(FLAG, causal), rank=(WHOLE, rank), world_size=(RANKS, world_size))
    if not 0 <= rank < world_size:
        raise ShapeError(f"there are {world_size} ranks, numbered from 0", argument="rank", value=rank)
    if not lengths_of(cu_seqlens):
        raise ShapeError("there are no tokens", argument="cu_seqlens", value=cu_seqlens.tolist())
    total = int(cu_seqlens[-1])
    if total % world_size:
        raise ShapeError(f"{total} tokens cannot be cut into {world_size} equal shards", argument="cu_seqlens")
    size = total // world_size
    first, stop = rank * size, (rank + 1) * size
    bounds = cu_seqlens.tolist()
    documents = [(a, b) for a, b in pairwise(bounds) if a < stop and b > first]
    q_ends = [0, *(min(b, stop) - first for _, b in documents)]
    key_start = documents[0][0]
    key_stop = stop if causal else documents[-1][1]
    k_ends = [0, *(min(b, key_stop) - key_start for _, b in documents)]

    def as_tensor(values: list[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=cu_seqlens.dtype, device=cu_seqlens.device)

    longest = (max(b - a for a, b in pairwise(ends)) for ends in (q_ends, k_ends))
    return as_tensor(q_ends), as_tensor(k_ends), *longest, slice(key_start, key_stop)
