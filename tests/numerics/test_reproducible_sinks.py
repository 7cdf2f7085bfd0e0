"""Gradients of sinks in the reproducible mode: right, whole on every rank, and what breaks if they are not summed so.

Their bits are compared in test_reproducible, where every second call has sinks.
"""

from collections.abc import Iterable

import pytest
import torch

import ringspan as rs
import ringspan.runtime.modes
from ringspan.transports.base import Transport, all_to_all
from ringspan.transports.in_process import InProcessRank
from support.attention_cases import dense_sink_gradients, make_dout, make_job
from support.oracle import MaskSpec
from support.reproducible_cases import LAYOUTS, Call, alone, different, run


@pytest.mark.parametrize("spec", [("causal",), ("sliding_window", -2, 900)], ids=str)
def test_every_rank_has_the_gradient_of_all(spec: MaskSpec) -> None:
    """Also rows that see no key, and a sink of -inf."""
    layout = rs.zigzag(2 * rs.TILE + 77, 3, align=rs.TILE)
    job = make_job("sinks", spec, layout, rs.Heads(4, 2))
    sinks = torch.tensor([0.0, 1.5, -30.0, -torch.inf], dtype=torch.float64)

    def differentiate(group: InProcessRank) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_() for x in (*job.shards(group.rank), sinks)]
        out = job.attend(group, group.rank, tensors=leaves[:3], sinks=leaves[3], reproducible=True).out
        return list(torch.autograd.grad(out, leaves, layout.shard(make_dout(job), group.rank, 2)))

    parts = rs.run_in_process(differentiate, 3)
    *wanted, dsinks = dense_sink_gradients(job, sinks)
    for part in parts:
        torch.testing.assert_close(part[3], dsinks, rtol=0, atol=1e-11)
    for i, whole in enumerate(wanted):
        torch.testing.assert_close(layout.unshard([part[i] for part in parts], 2), whole, rtol=0, atol=1e-12)


@pytest.mark.parametrize("seq_len", [0, 600])
def test_no_queries_or_no_batch(seq_len: int) -> None:
    layout = rs.zigzag(seq_len, 2, align=rs.TILE)

    def attend(group: InProcessRank) -> torch.Tensor:
        x = torch.zeros(0 if seq_len else 1, 2, layout.shard_len(group.rank), 8)
        sinks = torch.zeros(2, requires_grad=True)
        out = rs.attention(x, x, x, sinks=sinks, mask=rs.causal(), layout=layout, group=group, reproducible=True)
        return torch.autograd.grad(out.sum(), sinks)[0]

    for dsinks in rs.run_in_process(attend, 2):
        assert torch.equal(dsinks, torch.zeros(2))


def test_shares_added_rank_by_rank_have_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def add_up(
        transport: Transport, _: object, parts: Iterable[torch.Tensor], like: torch.Tensor, deadline_s: float
    ) -> torch.Tensor:
        own = sum(parts, torch.zeros_like(like))
        return sum(all_to_all(transport, [own] * transport.world_size, [own.shape] * transport.world_size, deadline_s))

    call = Call("causal", has_sinks=True, heads=rs.Heads(8, 2))
    monkeypatch.setattr(ringspan.runtime.modes, "sum_over_tiles", add_up)
    assert different(run(call, LAYOUTS["zigzag"](3)), alone(call)) == ["dsinks"]


def test_a_rank_that_fails_on_the_way_tells_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = rs.contiguous(2 * rs.TILE, 2, align=rs.TILE)
    told: list[str] = []

    def fail(strips: tuple[object, ...], *_: object) -> list[torch.Tensor]:
        if strips == ringspan.runtime.modes.tile_layout(layout).strips[1]:
            raise MemoryError("none left")
        return [torch.zeros(2)]

    def attend(group: InProcessRank) -> None:
        x = torch.randn(1, 2, layout.shard_len(group.rank), 8)
        sinks = torch.zeros(2, requires_grad=True)
        out = rs.attention(x, x, x, sinks=sinks, mask=rs.causal(), layout=layout, group=group, reproducible=True)
        with pytest.raises((MemoryError, rs.TransportError)) as caught:
            out.sum().backward()
        told.append(f"{group.rank}: {caught.value}")

    monkeypatch.setattr(ringspan.runtime.modes, "sink_gradients_of_tiles", fail)
    rs.run_in_process(attend, 2, timeout_s=20)
    zero, one = sorted(told)
    assert "rank 1 failed: MemoryError: none left" in zero
    assert one == "1: none left"
