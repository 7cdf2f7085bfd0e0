"""How many bytes of K and V does a rank hold in one attention of a video, and how many in diffusers' own ring?

The attention of Wan 2.1 1.3B on more and more ranks, counted in live tensors of one rank and not timed. Ours runs on
threads. diffusers' runs its own code for rank 0 on a fake process group, whose messages carry nothing, with PyTorch's
CPU operator in place of the kernel: on CPUs its ring has none that returns the log-sum-exp.

    python benchmarks/video_memory.py [--tokens 8190] [--write]
"""

import argparse
from types import SimpleNamespace
from typing import Any

from results import describe_machine, format_table, write_section

RANKS = (2, 3, 5, 6)
HEADS, HEAD_DIM = 12, 128


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8190)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text = report(args.tokens)
    print(text)
    if args.write:
        write_section("video memory", "K and V that a rank holds in one attention of a video", text)


def report(tokens: int) -> str:
    header = ["ranks", "K and V of all, MB", "own K and V", "ours holds", "diffusers' ring holds"]
    rows = []
    for world_size in RANKS:
        if tokens % world_size:
            raise SystemExit(f"--tokens {tokens}: diffusers needs a number that {world_size} divides")
        of_all = 2 * tokens * HEADS * HEAD_DIM * 4
        held = [of_all / world_size, measure_ours(tokens, world_size), measure_theirs(tokens, world_size)]
        rows.append([str(world_size), f"{of_all / 1e6:.1f}", *(f"{nbytes / 1e6:.1f}" for nbytes in held)])
    return (
        f"`python benchmarks/video_memory.py --tokens {tokens}`\n\n{describe_machine()}.\n\nOne attention of "
        f"{tokens:,} tokens, {HEADS} heads of {HEAD_DIM}, float32, all see all, pass-KV. What a rank holds is its own "
        "K and V and the most that lived at once beside q and the results, what its merges need included.\n\n"
        f"{format_table(header, rows)}"
    )


def measure_ours(tokens: int, world_size: int) -> int:
    import torch

    import ringspan as rs
    from ringspan.bench.memory import LiveStorages

    layout = rs.contiguous(tokens, world_size)

    def on_rank(group: Any) -> int:
        q, k, v = torch.randn(3, 1, HEADS, len(layout.positions(group.rank)), HEAD_DIM)
        with LiveStorages() as live:
            out, lse = rs.attention(
                q, k, v, mask=rs.full(), layout=layout, group=group, algorithm="pass_kv", return_lse=True
            )
        return k.nbytes + v.nbytes + live.peak - out.nbytes - lse.nbytes

    return max(rs.run_in_process(on_rank, world_size))


def measure_theirs(tokens: int, world_size: int) -> int:
    import torch
    import torch.distributed as dist
    from diffusers.models.attention_dispatch import TemplatedRingAttention
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from ringspan.bench.memory import LiveStorages

    def attend(_: Any, *operands: Any, **__: Any) -> tuple[Any, Any]:
        heads_first = (x.transpose(1, 2) for x in operands[:3])
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(*heads_first)
        return out.transpose(1, 2), lse.transpose(1, 2)

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
    mesh = dist.init_device_mesh("cpu", (world_size,))
    ring = SimpleNamespace(_ring_mesh=mesh, _ring_local_rank=0, ring_degree=world_size, convert_to_fp32=True)
    q, k, v = torch.randn(3, 1, tokens // world_size, HEADS, HEAD_DIM)
    options = (None, 0.0, False, None, False, True, attend, None, SimpleNamespace(context_parallel_config=ring))
    try:
        with LiveStorages() as live:
            out, lse = TemplatedRingAttention.apply(q, k, v, *options)
    finally:
        dist.destroy_process_group()
    return k.nbytes + v.nbytes + live.peak - out.nbytes - lse.nbytes


if __name__ == "__main__":
    main()
