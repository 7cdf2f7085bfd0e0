"""The planner's attention buffers compared with live storages of the runtime."""

import pytest
import torch
from test_memory import BATCH, HEAD_DIM, HEADS, measure

import ringspan as rs
import ringspan.runtime.arithmetic
from ringspan.planner.cost import RINGSPAN, Shard
from ringspan.planner.plan.memory import attention_buffers

SHARD_LEN = 512
SLAB_BYTES = 2**17


@pytest.mark.parametrize("kv_heads", [8, 2])
@pytest.mark.parametrize(
    ("algorithm", "world_size"),
    [
        *((algorithm, size) for algorithm in ("pass_kv", "pass_q", "all_gather", "ulysses") for size in (2, 4)),
        ("hybrid", 4),  # on two ranks a mesh is a plain ring, or Ulysses
        ("double_ring", 4),
    ],
)
def test_peak_bytes_are_those_of_the_runtime(algorithm, world_size, kv_heads, monkeypatch):
    """Within 10 %: float32, full mask, kernel results in small slabs."""
    inner = {"hybrid": world_size // 2, "double_ring": world_size // 2, "ulysses": world_size}.get(algorithm, 1)
    monkeypatch.setattr(ringspan.runtime.arithmetic, "_CPU_SLAB_BYTES", SLAB_BYTES)
    options = {"mesh": (2, inner)} if algorithm in ("hybrid", "double_ring") else {}
    measured = measure(
        world_size, shard_len=SHARD_LEN, kv_heads=kv_heads, mask=rs.full(), algorithm=algorithm, **options
    )
    elements = 2 * kv_heads * HEAD_DIM
    shard = Shard(BATCH, HEADS, kv_heads, HEAD_DIM, HEAD_DIM, elements, torch.float32.itemsize, "bf16", RINGSPAN)
    counted = attention_buffers(algorithm, world_size, inner, SHARD_LEN, SHARD_LEN, shard, slab_bytes=SLAB_BYTES)
    assert counted == pytest.approx(measured.peak, rel=0.1)
