"""Contenders that need only torch: the ideal, one process, and code written by hand in an afternoon."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import scaled_dot_product_attention

from comparison.case import Case, Contender, Results, Tensors, sdpa
from comparison.points import BASELINES, IDEALS, ONE_PROCESS

_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def one_process(case: Case) -> Contender:
    """SDPA of everything on the first rank; the others are idle."""
    if case.rank:
        return Contender(lambda: None, None)
    whole = case.whole
    return Contender(lambda: sdpa(case, whole, case.point.is_causal), torch.arange(case.point.seq_len))


def ideal(case: Case) -> Contender:
    """Each rank's share in as few calls of SDPA as its mask allows: all keys at hand, no merges, no sums."""
    shares = list(_shares(case))

    def run() -> None:
        for share, is_causal in shares:
            sdpa(case, share, is_causal)

    return Contender(run, None)


def _shares(case: Case) -> Iterator[tuple[Tensors, bool]]:
    """Pair queries with keys that they see completely, or causally.

    In zigzag, a rank's late half sees all keys of higher ranks and its early half none. Both halves see the early half
    of lower ranks, and neither sees their late half.
    """
    own = case.own_rows()
    if not case.point.is_causal:
        yield _share(case, own, torch.arange(case.point.seq_len)), False
        return
    yield _share(case, own, own), True
    late = own[len(own) // 2 :]
    lower = [case.own_rows(rank)[: len(late)] for rank in range(case.rank)]
    higher = [case.own_rows(rank) for rank in range(case.rank + 1, case.point.world_size)]
    if lower:
        yield _share(case, own, torch.cat(lower)), False
    if higher:
        yield _share(case, late, torch.cat(higher)), False


def _share(case: Case, queries: torch.Tensor, keys: torch.Tensor) -> Tensors:
    q, k, v, dout = case.whole
    return Tensors(*(x[:, :, i].contiguous() for x, i in ((q, queries), (k, keys), (v, keys), (dout, queries))))


def all_gather(case: Case) -> Contender:
    """Every rank gathers all keys and values and gives SDPA a mask if needed; gradients by reduce-scatter."""
    rows = case.own_rows()
    q, k, v, dout = case.whole.rows(rows)
    world_size = case.point.world_size
    mask = None
    if case.point.is_causal:
        keys = torch.cat([case.own_rows(rank) for rank in range(world_size)])
        mask = torch.zeros(len(rows), len(keys), dtype=q.dtype).masked_fill_(keys > rows[:, None], -torch.inf)

    def gather(x: torch.Tensor) -> torch.Tensor:
        parts = [torch.empty_like(x) for _ in range(world_size)]
        dist.all_gather(parts, x)
        return torch.cat(parts, dim=2).requires_grad_(case.point.has_backward)

    def reduce(grad: torch.Tensor) -> torch.Tensor:
        parts = [part.contiguous() for part in grad.chunk(world_size, dim=2)]
        total = torch.empty_like(parts[0])
        dist.reduce_scatter(total, parts)
        return total

    def run() -> Results:
        queries, keys, values = q.detach().requires_grad_(case.point.has_backward), gather(k), gather(v)
        out = scaled_dot_product_attention(queries, keys, values, attn_mask=mask)
        if not case.point.has_backward:
            return (out,)
        dq, dk, dv = torch.autograd.grad(out, (queries, keys, values), dout)
        return out.detach(), dq, reduce(dk), reduce(dv)

    return Contender(run, rows)


class _Tile(NamedTuple):
    """Return which keys at hand this rank's queries see."""

    q: slice
    kv: slice
    is_causal: bool


def blocking_ring(case: Case) -> Contender:
    """Attend a block with the fused operator and merge; then send it on, receive the next one, and wait for both."""
    rows = case.own_rows()
    q, k, v, dout = case.whole.rows(rows)
    rank, world_size = case.rank, case.point.world_size
    early, late, both = slice(0, len(rows) // 2), slice(len(rows) // 2, len(rows)), slice(0, len(rows))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        arriving = torch.empty_like(x)
        following, previous = (rank + 1) % world_size, (rank - 1) % world_size
        if rank % 2:
            dist.recv(arriving, previous)
            dist.send(x, following)
        else:
            dist.send(x, following)
            dist.recv(arriving, previous)
        return arriving

    def tile(step: int) -> _Tile:
        owner = (rank - step) % world_size
        if not case.point.is_causal or owner == rank:
            return _Tile(both, both, case.point.is_causal)
        return _Tile(both, early, False) if owner < rank else _Tile(late, both, False)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        kv = torch.stack((k, v))
        out = torch.zeros(q.shape)
        lse = torch.full(q.shape[:-1], -torch.inf)
        for step in range(world_size):
            if step:
                kv = rotate(kv)
            of_q, of_kv, is_causal = tile(step)
            part, part_lse = _forward(q[:, :, of_q], *kv[:, :, :, of_kv], 0.0, is_causal)
            total = torch.logaddexp(lse[:, :, of_q], part_lse)
            kept, added = (lse[:, :, of_q] - total).exp().unsqueeze(-1), (part_lse - total).exp().unsqueeze(-1)
            out[:, :, of_q] = out[:, :, of_q] * kept + part * added
            lse[:, :, of_q] = total
        return out.to(q.dtype), lse

    def backward(out: torch.Tensor, lse: torch.Tensor) -> Results:
        kv = torch.stack((k, v))
        dq, dkv = torch.zeros(q.shape), torch.zeros(kv.shape)
        for step in range(world_size):
            of_q, of_kv, is_causal = tile(step)
            operands = dout[:, :, of_q], q[:, :, of_q], *kv[:, :, :, of_kv], out[:, :, of_q], lse[:, :, of_q]
            part = _backward(*operands, 0.0, is_causal)
            dq[:, :, of_q] += part[0]
            for total, grad in zip(dkv[:, :, :, of_kv], part[1:], strict=True):
                total += grad
            dkv = rotate(dkv)
            if step < world_size - 1:
                kv = rotate(kv)
        return dq.to(q.dtype), *dkv.to(q.dtype)

    def run() -> Results:
        out, lse = forward()
        return (out, *backward(out, lse)) if case.point.has_backward else (out,)

    return Contender(run, rows)


CONTENDERS = {
    IDEALS[0]: ideal,
    ONE_PROCESS: one_process,
    BASELINES[1]: all_gather,
    BASELINES[2]: blocking_ring,
}
