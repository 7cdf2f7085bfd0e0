"""Exact causal prefill of a million tokens on two ranks, checked.

One head of 64, float32: 2^20 tokens are 2^39 pairs of a query and a key. The tokens come in turns of `--chunk`, as a
server would prefill them, so that there is progress to show; each turn attends to all turns before it. Afterwards
sampled rows are computed again in float64, by the definition, and compared.

    python benchmarks/million_tokens.py [--tokens 1048576] [--chunk 32768] [--write]
"""

import argparse
import resource
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import run_ranks
from results import describe_machine, write_section

import ringspan as rs

HEAD_DIM = 64
SAMPLES = 64  # rows that are checked on each rank
KEPT = 4096  # keys per step of the check


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2**20)
    parser.add_argument("--chunk", type=int, default=2**15, help="new tokens of a turn")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    ranks = run_ranks(prefill, args.ranks, args.tokens, args.chunk)
    seconds = max(rank["seconds"] for rank in ranks)
    error = max(rank["error"] for rank in ranks)
    flops = 2 * HEAD_DIM * args.tokens * (args.tokens + 1)
    is_right = error <= 1e-5
    lines = [
        f"`python benchmarks/million_tokens.py --tokens {args.tokens} --chunk {args.chunk} --ranks {args.ranks}`",
        f"{describe_machine()}.",
        f"{args.tokens:,} tokens, one head of {HEAD_DIM}, float32, causal, exact, on {args.ranks} gloo ranks of one "
        f"thread: {seconds:,.1f} s, {flops / seconds / 1e9:.1f} GFLOP/s over all ranks (visible pairs only).",
        *(
            f"- Rank {number}: {rank['tokens']:,} tokens; cache {rank['cache_bytes'] / 1e6:,.1f} MB "
            f"({rank['cache_bytes'] / rank['tokens']:.0f} bytes per token), "
            f"peak resident size {rank['peak_bytes'] / 1e6:,.1f} MB, {rank['base_bytes'] / 1e6:,.1f} MB of it before "
            "the first token."
            for number, rank in enumerate(ranks)
        ),
        f"Algorithms by turn: {', '.join(ranks[0]['algorithms'])}.",
        f"{SAMPLES * args.ranks} sampled rows against float64: largest difference {error:.1e}, "
        f"{'as it must be' if is_right else 'WRONG'}.",
    ]
    text = "\n\n".join(lines).replace("\n\n- ", "\n- ")
    print(text)
    if args.write:
        write_section("million_tokens", "A million tokens", text)
    sys.exit(not is_right)


def prefill(rank: int, tokens: int, chunk: int) -> dict[str, Any]:
    """Return this rank's part of the results."""
    cache = rs.KVCache(num_layers=1, num_heads=1, num_kv_heads=1, head_dim=HEAD_DIM)
    base_bytes = peak_bytes()
    samples = np.random.default_rng(rank).choice(tokens, SAMPLES, replace=False)
    kept: dict[int, torch.Tensor] = {}
    algorithms: dict[str, None] = {}
    started = time.perf_counter()
    for start in range(0, tokens, chunk):
        num_new = min(chunk, tokens - start)
        with cache.begin([num_new]) as turn:
            algorithms[turn.algorithm] = None
            positions = turn.positions
            q, k, v = (make_rows(positions, which) for which in range(3))
            out = turn.prefill(q, k, v, layer=0)
        assert isinstance(out, torch.Tensor)
        for index in np.flatnonzero(np.isin(positions.numpy(), samples)):
            kept[int(positions[index])] = out[0, 0, index].clone()
        if rank == 0:
            show_progress(start + num_new, tokens, time.perf_counter() - started)
    seconds = time.perf_counter() - started
    peak = peak_bytes()
    dist.barrier()
    error = max([0.0, *(float((out.double() - exact_row(position)).abs().max()) for position, out in kept.items())])
    return {
        "seconds": seconds,
        "error": error,
        "tokens": cache.balance()[0][rank],
        "cache_bytes": cache.nbytes,
        "peak_bytes": peak,
        "base_bytes": base_bytes,
        "algorithms": list(algorithms),
    }


def make_rows(positions: torch.Tensor, which: int) -> torch.Tensor:
    """Make rows of q, k or v from their positions alone, on any rank, (1, 1, rows, dim)."""
    angles = positions.double()[:, None] * (0.37 + which) + torch.arange(HEAD_DIM).double() * (1.3 + 0.7 * which)
    return (2 * torch.frac(torch.sin(angles) * 43758.5453)).float()[None, None]


def exact_row(position: int) -> torch.Tensor:
    """Compute row `position` in float64 by the definition, a few keys at a time."""
    q = make_rows(torch.tensor([position]), 0)[0, 0].double()
    peak, total, out = -torch.inf, 0.0, torch.zeros(HEAD_DIM, dtype=torch.float64)
    for start in range(0, position + 1, KEPT):
        keys = torch.arange(start, min(start + KEPT, position + 1))
        scores = (make_rows(keys, 1)[0, 0].double() @ q[0]) * HEAD_DIM**-0.5
        new_peak = max(peak, float(scores.max()))
        weights, shrink = (scores - new_peak).exp(), np.exp(peak - new_peak)
        total = total * shrink + float(weights.sum())
        out = out * shrink + weights @ make_rows(keys, 2)[0, 0].double()
        peak = new_peak
    return out / total


def show_progress(done: int, tokens: int, seconds: float) -> None:
    """Show a bar with the remaining time: work grows with the square of the tokens."""
    share = (done / tokens) ** 2
    left = seconds / share - seconds
    bar = "█" * round(30 * share)
    end = "\n" if done == tokens else ""
    print(
        f"\r{bar:·<30} {100 * share:5.1f} %  {done:,} tokens  {seconds:,.0f} s, {left:,.0f} s left   ",
        end=end,
        file=sys.stderr,
        flush=True,
    )


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    main()
