"""How much memory does a call take above its inputs? Counted in live storages, on every rank.

Sizes are those of one rank's shard: `q`, `kv` (k and v together), and `out` and `lse` in the accumulator type. A few
tensors the size of lse come and go while parts are merged; they are the slack of every bound below. The high-water
mark of real processes is in tests/distributed.
"""

from typing import Any, NamedTuple

import pytest
import torch

import ringspan as rs
import ringspan.runtime.arithmetic
from ringspan.bench.memory import LiveStorages
from ringspan.transports.in_process import InProcessRank

BATCH, HEADS, HEAD_DIM, SHARD_LEN = 2, 8, 64, 64


class Sizes(NamedTuple):
    """The sizes of one rank's shard in bytes."""

    q: int
    kv: int
    out: int
    lse: int


class Measured(NamedTuple):
    sizes: Sizes
    peak: int
    largest: int
    left: int  # bytes alive after the call, including out and lse


def measure(
    world_size: int,
    *,
    shard_len: int = SHARD_LEN,
    kv_heads: int = HEADS,
    dtype: torch.dtype = torch.float32,
    mask: rs.Mask | None = None,
    **options: Any,
) -> Measured:
    """Measure the rank that needs the most; zigzag shards under a causal mask by default."""
    layout = rs.zigzag(world_size * shard_len, world_size)

    def on_rank(group: InProcessRank) -> Measured:
        generator = torch.Generator().manual_seed(group.rank)
        q, k, v = (
            torch.randn(BATCH, heads, shard_len, HEAD_DIM, generator=generator).to(dtype)
            for heads in (HEADS, kv_heads, kv_heads)
        )
        with LiveStorages() as live:
            out, lse = rs.attention(
                q, k, v, mask=mask or rs.causal(), layout=layout, group=group, return_lse=True, **options
            )
        sizes = Sizes(q.nbytes, k.nbytes + v.nbytes, out.numel() * lse.element_size(), lse.nbytes)
        return Measured(sizes, live.peak, live.largest, live.now)

    return max(rs.run_in_process(on_rank, world_size), key=lambda measured: measured.peak)


def slack(sizes: Sizes) -> int:
    return 8 * sizes.lse + 4096


def test_the_measure_itself() -> None:
    with LiveStorages() as live:
        a = torch.empty(1000, dtype=torch.uint8)
        b = a.view(10, 100)[2:].clone()
        del a
        assert (live.now, live.peak, live.largest) == (800, 1800, 1000)
        b.add_(1)
        del b
        assert (live.now, live.peak) == (0, 1800)


@pytest.mark.parametrize("mask", [rs.causal(), rs.full()], ids=str)
@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize("world_size", [3, 4, 8])
def test_pass_kv_takes_two_kv_buffers_however_many_ranks(world_size: int, kv_heads: int, mask: rs.Mask) -> None:
    """The peak is out + lse + 2 kv, and one piece's own out and lse; nothing grows with seq_len."""
    sizes, peak, largest, left = measure(world_size, kv_heads=kv_heads, mask=mask, algorithm="pass_kv")
    assert peak <= 2 * (sizes.out + sizes.lse) + 2 * sizes.kv + slack(sizes)
    assert largest <= max(sizes.out, sizes.kv)
    assert left <= sizes.out + sizes.lse + 2 * sizes.kv


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_all_gather_takes_all_foreign_keys(world_size: int) -> None:
    """The peak is out + lse + (P - 1) kv, and one piece's out and lse; it grows with seq_len, unlike a ring's."""
    sizes, peak, largest, _ = measure(world_size, algorithm="all_gather", mask=rs.full())
    formula = 2 * (sizes.out + sizes.lse) + (world_size - 1) * sizes.kv
    assert formula <= peak <= formula + slack(sizes)
    assert largest <= sizes.kv


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_ulysses_takes_what_is_exchanged_twice(world_size: int) -> None:
    """At most out + lse + (P - 1)/P · (2 q + 2 kv + out + lse), and a piece's own.

    The heads of other ranks are copied out of q and kv to be sent, and as much arrives; this rank computes the outputs
    of other ranks' queries for its own heads. A piece is one rank's queries for one rank's heads: 1/P of out. Nothing
    grows with seq_len, because P shards of 1/P of the heads are one shard.
    """
    sizes, peak, largest, _ = measure(world_size, algorithm="ulysses", mask=rs.full())
    sent = (2 * sizes.q + 2 * sizes.kv + sizes.out + sizes.lse) * (world_size - 1) // world_size
    formula = sizes.out + sizes.lse + sent + (sizes.out + sizes.lse) // world_size
    assert peak <= formula + slack(sizes)
    assert largest <= sizes.out


@pytest.mark.parametrize("world_size", [4, 8])
def test_pass_q_takes_buffers_for_queries_and_for_results(world_size: int) -> None:
    """At most out + lse + 3 q + 5 (out + lse), and a piece's own, for any number of ranks.

    Queries: one is attended, one leaves, one arrives. Results: one is computed, two travel to their owners, and two of
    this rank's own arrive.
    """
    sizes, peak, largest, _ = measure(world_size, algorithm="pass_q", mask=rs.full())
    assert peak <= 7 * (sizes.out + sizes.lse) + 3 * sizes.q + slack(sizes)
    assert largest <= max(sizes.q, sizes.out)


@pytest.mark.parametrize("mesh", [(2, 4), (4, 2)])
def test_double_ring_takes_one_buffer_more_than_a_ring_per_link(mesh: tuple[int, int]) -> None:
    """As pass_kv, plus two kv for the block that moves to the next node: one leaves, one arrives."""
    sizes, peak, *_ = measure(8, algorithm="double_ring", mesh=mesh, mask=rs.full())
    assert peak <= 2 * (sizes.out + sizes.lse) + 4 * sizes.kv + slack(sizes)


def test_half_types_are_widened_a_piece_at_a_time() -> None:
    """As pass_kv, and while a piece is computed its q, k and v in float32."""
    sizes, peak, *_ = measure(4, algorithm="pass_kv", mask=rs.full(), dtype=torch.bfloat16)
    widened = 2 * (sizes.q + sizes.kv)
    assert peak <= 2 * (sizes.out + sizes.lse) + 2 * sizes.kv + widened + slack(sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_large_pieces_are_computed_in_slabs(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """If there are heads to split: out + lse + 2 kv, and a few slabs for results and conversions of a kernel."""
    slab = 2**15
    monkeypatch.setattr(ringspan.runtime.arithmetic, "_CPU_SLAB_BYTES", slab)
    sizes, peak, *_ = measure(4, algorithm="pass_kv", mask=rs.full(), dtype=dtype)
    final = sizes.out // 2 if dtype == torch.bfloat16 else 0  # out in its own dtype
    assert slab < sizes.out // 4
    assert peak <= sizes.out + final + sizes.lse + 2 * sizes.kv + 5 * slab + slack(sizes)


@pytest.mark.parametrize("has_backward", [False, True], ids=["forward", "backward"])
def test_a_second_call_makes_no_new_buffers(has_backward: bool) -> None:
    layout = rs.zigzag(4 * SHARD_LEN, 4)

    def on_rank(group: InProcessRank) -> tuple[int, int]:
        x = torch.randn(BATCH, HEADS, SHARD_LEN, HEAD_DIM, generator=torch.Generator().manual_seed(0))

        def call() -> None:
            own = x.detach().requires_grad_(has_backward)
            out = rs.attention(own, own, own, mask=rs.causal(), layout=layout, group=group)
            if has_backward:
                torch.autograd.grad(out, own, x)

        with LiveStorages() as live:
            call()
            kept = live.now
            for _ in range(3):
                call()
        return kept, live.now

    for kept, still_kept in rs.run_in_process(on_rank, 4):
        assert kept == still_kept > 0


def test_buffers_of_other_lengths_do_not_pile_up() -> None:
    """As in serving, where every request has another length."""

    def on_rank(group: InProcessRank) -> tuple[int, int]:
        with LiveStorages() as live:
            for length in range(SHARD_LEN, SHARD_LEN + 16):
                layout = rs.contiguous(3 * length, 3)
                x = torch.ones(1, HEADS, length, HEAD_DIM)
                rs.attention(x, x, x, mask=rs.causal(), layout=layout, group=group)
        return live.now - x.nbytes, 2 * x.nbytes

    for kept, kv in rs.run_in_process(on_rank, 3):
        assert kept <= 4 * kv
