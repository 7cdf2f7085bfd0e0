"""How much of the possible speed does decoding over a sharded cache reach?

Two processes of one thread each hold half of the cached tokens of every sequence. "alone" is the time to read the
halves with the same kernel and no messages, which is the lower bound. "decode" is `turn.decode` of one token per
sequence with replicated queries; "sharded" has the queries sharded by sequence. Both include the message that merges
the parts. Times are for one layer. "step" adds the agreement of the ranks in the first layer, `begin` and `commit`,
shared by all layers.

    python benchmarks/decode.py [--cached 131072] [--rounds 15] [--write]
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from ranks import run_ranks
from results import describe_machine, format_table, write_section

import ringspan as rs
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import KernelRequest
from ringspan.program.pieces import Piece, PieceKind

HEAD_DIM = 64
LAYERS = 2
CASES = [(8, 8, 1), (8, 2, 1), (8, 8, 8), (8, 2, 8)]  # query heads, KV heads, batch
MOST = max(batch for _, _, batch in CASES)
AT_LEAST = 0.93


class Times(NamedTuple):
    """The seconds of one round."""

    alone: float
    decode: float
    step: float
    sharded: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cached", type=int, default=131072, help="tokens of each sequence")
    parser.add_argument("--rounds", type=int, default=15, help="with the largest batch, more with a smaller one")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    rows, is_kept = [], True
    for heads, kv_heads, batch in CASES:
        ranks = run_ranks(measure, 2, heads, kv_heads, batch, args.cached, args.rounds * (MOST // batch))
        rounds = [Times(*map(max, zip(*both, strict=True))) for both in zip(*ranks, strict=True)]  # the slower rank
        medians = Times(*(statistics.median(times) for times in zip(*rounds, strict=True)))
        shares = Times(
            *(
                statistics.median(r.alone / t for r, t in zip(rounds, times, strict=True))
                for times in zip(*rounds, strict=True)
            )
        )
        is_kept &= shares.decode >= AT_LEAST
        rows.append(
            [
                f"{heads}/{kv_heads}",
                str(batch),
                *(f"{1e3 * seconds:.2f}" for seconds in medians),
                *(f"{100 * share:.1f} %" for share in shares[1:]),
            ]
        )
    header = ["heads", "batch", "alone, ms", "decode, ms", "step, ms", "sharded, ms", "decode", "step", "sharded"]
    text = (
        f"`python benchmarks/decode.py --cached {args.cached} --rounds {args.rounds}`\n\n{describe_machine()}.\n\n"
        f"{args.cached} cached tokens of each sequence on 2 gloo ranks of one thread, head_dim {HEAD_DIM}, float32, "
        f"{LAYERS} layers. Medians of {args.rounds} rounds of all runs in turn, of one sequence {args.rounds * MOST}; "
        "shares are of the same round.\n\n"
        + format_table(header, rows)
        + f"\n\nDecode at {100 * AT_LEAST:.0f} % or more of reading alone: {'yes' if is_kept else 'NO'}."
    )
    print(text)
    if args.write:
        write_section("decode", "Decoding over a sharded cache", text)
    sys.exit(not is_kept)


def measure(rank: int, heads: int, kv_heads: int, batch: int, cached: int, num_rounds: int) -> list[Times]:
    """Return the seconds of every round on this rank."""
    generator = torch.Generator().manual_seed(rank)
    cache = rs.KVCache(num_layers=LAYERS, num_heads=heads, num_kv_heads=kv_heads, head_dim=HEAD_DIM)
    for sequence in range(batch):
        with cache.begin({sequence: cached}) as turn:
            k, v = (torch.rand(1, kv_heads, cached // 2, HEAD_DIM, generator=generator) for _ in range(2))
            for layer in range(LAYERS):
                turn.store(k, v, layer=layer)
    del k, v
    kernel = choose_kernel("auto", KernelRequest(torch.device("cpu"), torch.float32, HEAD_DIM, HEAD_DIM))
    q, k = (torch.rand(batch, n, 1, HEAD_DIM, generator=torch.Generator().manual_seed(9)) for n in (heads, kv_heads))

    def read_alone(layer: int) -> None:
        for sequence in range(batch):
            (keys, values), *_ = cache._state.stored[sequence].rows(layer, 0, cached // 2)
            piece = Piece(slice(0, 1), slice(0, cached // 2), PieceKind.FULL, None, None)
            kernel.forward(q[sequence : sequence + 1], keys, values, piece, HEAD_DIM**-0.5)

    def rounds() -> Times:
        alone = statistics.mean(timed(lambda layer=layer: read_alone(layer)) for layer in range(1, LAYERS))
        begin = time.perf_counter()
        turn = cache.begin([1] * batch, query="replicated")
        planned = time.perf_counter() - begin
        first, *later = (timed(lambda layer=layer: turn.decode(q, k, k, layer=layer)) for layer in range(LAYERS))
        step = (planned + first + sum(later) + timed(turn.commit)) / LAYERS
        with cache.begin([1] * batch, query="sharded") as turn:
            own = turn.layout.positions(rank)
            sharded = [
                timed(lambda layer=layer: turn.decode(q[own], k[own], k[own], layer=layer)) for layer in range(LAYERS)
            ]
        return Times(alone, statistics.mean(later), step, statistics.mean(sharded[1:]))

    for _ in range(3):
        rounds()
    return [rounds() for _ in range(num_rounds)]


def timed(run: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
