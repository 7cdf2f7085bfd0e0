"""An algorithm that was registered from outside runs on ranks, forward and backward."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

import ringspan as rs
from ringspan.algorithms import Algorithm
from ringspan.transports.in_process import InProcessRank
from support import oracle
from support.cases import MASKS, make_mask
from support.toy import registered

SEQ_LEN = 37


@pytest.fixture
def toy() -> Iterator[Algorithm]:
    with registered() as record:
        yield record


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
@pytest.mark.parametrize("kv_heads", [8, 1])  # the heavier side, which stays, is K and V or Q
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_attention_on_ranks_is_dense_attention(toy: Algorithm, mask: str, kv_heads: int, world_size: int) -> None:
    torch.manual_seed(world_size)
    q, dout = torch.randn(2, 1, 8, SEQ_LEN, 4, dtype=torch.float64)
    k, v = torch.randn(2, 1, kv_heads, SEQ_LEN, 4, dtype=torch.float64)
    layout = rs.zigzag(SEQ_LEN, world_size)

    def attend(group: InProcessRank) -> list[torch.Tensor]:
        mine = [layout.shard(x, group.rank, 2).clone().requires_grad_() for x in (q, k, v)]
        out = rs.attention(*mine, mask=make_mask(MASKS[mask]), layout=layout, group=group, algorithm=toy.name)
        out.backward(layout.shard(dout, group.rank, 2))
        return [out.detach(), *(x.grad for x in mine if x.grad is not None)]

    parts = zip(*rs.run_in_process(attend, world_size), strict=True)
    out, *gradients = (layout.unshard(list(shards), dim=2).numpy() for shards in parts)
    positions = np.arange(SEQ_LEN)
    allowed = oracle.dense_mask(MASKS[mask], positions, positions)
    np.testing.assert_allclose(out, oracle.dense_attention(q, k, v, allowed)[0], atol=1e-12)
    for got, expected in zip(gradients, oracle.dense_gradients(q, k, v, allowed, dout), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-12)


def test_the_reproducible_mode_has_its_bits(toy: Algorithm) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 3 * rs.TILE, 8)

    def attend_over(world_size: int) -> torch.Tensor:
        layout = rs.zigzag(3 * rs.TILE, world_size, align=rs.TILE)

        def attend(group: InProcessRank) -> torch.Tensor:
            mine = [layout.shard(x, group.rank, 2) for x in (q, k, v)]
            options = {"layout": layout, "group": group, "algorithm": toy.name, "reproducible": True}
            return rs.attention(*mine, mask=rs.causal(), **options)

        return layout.unshard(rs.run_in_process(attend, world_size), dim=2)

    assert torch.equal(attend_over(1), attend_over(3))


def test_ranks_are_told_its_name(toy: Algorithm) -> None:
    def attend(group: InProcessRank) -> None:
        x = torch.zeros(1, 1, 4, 4)
        rs.attention(x, x, x, mask=rs.full(), layout=rs.contiguous(8, 2), group=group, algorithm="triple")

    with pytest.raises(rs.UnsupportedError, match=r"no such algorithm.*pair_ring"):
        rs.run_in_process(attend, 2)
