"""What does reproducible mode cost attention?

`rs.attention` with `reproducible=True` and without, in turn, on gloo processes with one thread each: causal, zigzag,
pass_kv, 8 heads of 64 in float32; forward with 16,384 tokens, and with the backward pass 8,192. With more ranks than
cores wall time says little, so CPU seconds are reported too.

    python benchmarks/reproducible.py [--rounds 7] [--ranks 2 4 8] [--write]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

from ranks import run_ranks
from results import describe_machine, format_table, write_section

HEADS, HEAD_DIM = 8, 64
FORWARD, BOTH = 16_384, 8_192


class Cost(NamedTuple):
    """One call: wall time of the slowest rank, CPU time of all ranks."""

    wall_s: float
    cpu_s: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text = report(args.rounds, args.ranks)
    print(text)
    if args.write:
        write_section("reproducible", "What the same bits on any number of ranks cost", text)


def report(rounds: int, sizes: list[int]) -> str:
    import torch

    rows = []
    for world_size in sizes:
        for seq_len, has_backward in ((FORWARD, False), (BOTH, True)):
            default, reproducible = measure(world_size, seq_len, has_backward, rounds)
            row = [str(world_size), f"{seq_len:,}{', with backward' if has_backward else ''}"]
            for field in Cost._fields:
                seconds = [[getattr(cost, field) for cost in costs] for costs in (default, reproducible)]
                ratio = statistics.median(b / a for a, b in zip(*seconds, strict=True))
                row += [*(f"{statistics.median(each):.2f}" for each in seconds), f"{ratio:.3f}"]
            rows.append(row)
    header = [
        "ranks",
        "tokens",
        "default, s",
        "reproducible, s",
        "ratio",
        "default, CPU s",
        "reproducible, CPU s",
        "ratio",
    ]
    return (
        f"`python benchmarks/reproducible.py --rounds {rounds}`\n\n{describe_machine()}, torch {torch.__version__}.\n\n"
        f"One `rs.attention` of {HEADS} heads of {HEAD_DIM} in float32, causal, zigzag on the grid of `rs.TILE`, "
        "pass_kv, on gloo processes with one thread each, both modes in turn. Time on the slowest rank and CPU time of "
        f"all ranks with gloo's threads: medians of {rounds} rounds; ratios are medians of those of each "
        f"round.\n\n{format_table(header, rows)}"
    )


def measure(world_size: int, seq_len: int, has_backward: bool, rounds: int) -> list[list[Cost]]:
    """Return the costs of all rounds in the default mode and in reproducible mode."""
    of_ranks = run_ranks(on_rank, world_size, world_size, seq_len, has_backward, rounds)
    return [
        [Cost(max(cost.wall_s for cost in of_round), sum(cost.cpu_s for cost in of_round)) for of_round in of_mode]
        for of_mode in (list(zip(*mode, strict=True)) for mode in zip(*of_ranks, strict=True))
    ]


# --- On a rank ---


def on_rank(rank: int, world_size: int, seq_len: int, has_backward: bool, rounds: int) -> list[list[Cost]]:
    calls = [call_of(rank, world_size, seq_len, has_backward, reproducible) for reproducible in (False, True)]
    costs: list[list[Cost]] = [[], []]
    for _ in range(rounds + 1):  # the first round is a warm-up
        for call, found in zip(calls, costs, strict=True):
            found.append(timed(call))
    return [found[1:] for found in costs]


def call_of(rank: int, world_size: int, seq_len: int, has_backward: bool, reproducible: bool) -> Callable[[], None]:
    import torch

    import ringspan as rs

    layout = rs.zigzag(seq_len, world_size, align=rs.TILE)
    generator = torch.Generator().manual_seed(rank)
    shape = (1, HEADS, layout.shard_len(rank), HEAD_DIM)
    q, k, v, dout = (torch.randn(shape, generator=generator) for _ in range(4))

    def call() -> None:
        leaves = [x.detach().requires_grad_(has_backward) for x in (q, k, v)]
        out = rs.attention(*leaves, mask=rs.causal(), layout=layout, algorithm="pass_kv", reproducible=reproducible)
        if has_backward:
            torch.autograd.grad(out, leaves, dout)

    return call


def timed(call: Callable[[], None]) -> Cost:
    import torch.distributed as dist

    dist.barrier()
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    call()
    return Cost(time.perf_counter() - wall_s, time.process_time() - cpu_s)


if __name__ == "__main__":
    main()
