"""Does the ring in plain PyTorch of docs/architecture.md compute what the library computes?"""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import ringspan as rs
from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

SEQ_LEN = 101


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_it_agrees_with_the_library_and_with_dense_attention(world_size: int) -> None:
    layout = rs.zigzag(SEQ_LEN, world_size)
    results = values(run_ranks(attend, world_size, world_size))
    ring, library = (layout.unshard([result[i] for result in results], dim=2) for i in (0, 1))
    dense = scaled_dot_product_attention(*make_inputs(), is_causal=True)
    torch.testing.assert_close(ring, dense)
    torch.testing.assert_close(ring, library)


def make_inputs() -> torch.Tensor:
    """q, k and v, each (1, 4, SEQ_LEN, 16)."""
    return torch.randn(3, 1, 4, SEQ_LEN, 16, generator=torch.Generator().manual_seed(0))


def attend(rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    layout = rs.zigzag(SEQ_LEN, world_size)
    q, k, v = (x.contiguous() for x in layout.shard(make_inputs(), rank, dim=3))
    positions = [torch.as_tensor(layout.positions(each)) for each in range(world_size)]
    ring = load_document().ring_attention(q, k, v, positions)
    return ring, rs.attention(q, k, v, mask=rs.causal(), layout=layout)


def load_document() -> ModuleType:
    path = Path(__file__).parents[2] / "docs" / "reference_ring.py"
    spec = importlib.util.spec_from_file_location("reference_ring", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
