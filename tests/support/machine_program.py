"""One rank that makes the same call again and again until it fails, and says when and how. Its messages are long."""

import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

import ringspan as rs

HEADS, HEAD_DIM = 16, 256


def say(word: str, rest: str = "") -> None:
    sys.stdout.write(f"{time.time():.3f} {word} {rest}\n")
    sys.stdout.flush()


def attention(rank: int, world_size: int, algorithm: str, timeout_s: float | None) -> Callable[[], Any]:
    """K and V of a rank are 8 MB each: longer than a second at 100 Mbit/s together."""
    options: dict[str, Any] = {"timeout_s": timeout_s}
    if algorithm == "double_ring":
        options["mesh"] = (2, world_size // 2)
    is_backward = algorithm == "backward"
    layout = rs.zigzag(512 * world_size, world_size)
    generator = torch.Generator().manual_seed(0)
    shape = (1, HEADS, layout.shard_len(rank), HEAD_DIM)
    q, k, v = (torch.randn(shape, generator=generator).requires_grad_(is_backward) for _ in range(3))

    def call() -> None:
        out = rs.attention(
            q, k, v, mask=rs.causal(), layout=layout, algorithm="pass_kv" if is_backward else algorithm, **options
        )
        if is_backward:
            assert isinstance(out, torch.Tensor)
            out.sum().backward()

    return call


def decode(rank: int, world_size: int) -> Callable[[], Any]:
    """A token of each of many sequences at a time."""
    cache = rs.KVCache(num_layers=1, num_heads=HEADS, num_kv_heads=HEADS, head_dim=HEAD_DIM)
    sequences = 384

    def call() -> None:
        with cache.begin([1] * sequences, query="replicated") as turn:
            x = torch.ones(sequences, HEADS, 1, HEAD_DIM)
            turn.decode(x, x, x, layer=0)

    return call


def main() -> None:
    what = sys.argv[1]
    timeout_s = float(sys.argv[2]) if len(sys.argv) > 2 else None
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")  # with torch's own deadline of 30 minutes
    call = decode(rank, world_size) if what == "decode" else attention(rank, world_size, what, timeout_s)
    call()
    say("READY")
    try:
        for _ in range(int(sys.argv[3]) if len(sys.argv) > 3 else 100_000):
            call()
    except Exception as error:
        say("ERROR", f"{type(error).__name__} {error}")
    dist.destroy_process_group()
    say("DESTROYED")


if __name__ == "__main__":
    main()
