"""What do half dtypes cost compared with float32, and what does keeping the conversion memory save?

Two gloo processes with one thread each, as `torchrun` starts them: the system places them, and malloc returns freed
memory. `rs.attention` runs in float32 and bfloat16 in turn, first with the memory that a session keeps, then in other
processes with new memory for every tensor. Processes differ in their memory layout, so there are several of each, in
turn.

    python benchmarks/half_types.py [--rounds 40] [--teams 3] [--write]
"""

import argparse
import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

from gloo_pair import WORLD_SIZE, on_pair, time_in_turn
from results import describe_machine, format_table, write_section

HEADS = 8
SIZES = ((4096, 64), (4096, 128))
KEPT, FRESH = "kept", "new for every tensor"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40, help="in each process")
    parser.add_argument("--teams", type=int, default=3, help="pairs of processes of each kind")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text = report(args.rounds, args.teams)
    print(text)
    if args.write:
        write_section("half_types", "Half types where memory is not kept by malloc", text)


def report(rounds: int, teams: int) -> str:
    import torch

    rows = []
    for seq_len, head_dim in SIZES:
        ratios: dict[str, list[list[float]]] = {KEPT: [], FRESH: []}
        for _ in range(teams):
            for memory, of_teams in ratios.items():
                slowest = [max(pair) for pair in zip(*on_pair(measure, seq_len, head_dim, memory, rounds), strict=True)]
                of_teams.append([half / full for full, half in zip(slowest[::2], slowest[1::2], strict=True)])
        rows.append([f"{seq_len:,}", str(head_dim), *map(format_ratios, ratios.values())])
    header = ["tokens", "head_dim", *(f"memory {memory}" for memory in (KEPT, FRESH))]
    return (
        f"`python benchmarks/half_types.py --rounds {rounds} --teams {teams}`\n\n"
        f"{describe_machine()}, torch {torch.__version__}.\n\n"
        f"The time of `rs.attention` in bfloat16 over that in float32, each that of the slower rank; {HEADS} heads, "
        f"causal, zigzag, forward, on {WORLD_SIZE} gloo processes with one thread each that are set up in no way. "
        f"The median of {teams} times {rounds} rounds, and those of the {teams} pairs of processes.\n\n"
        f"{format_table(header, rows)}"
    )


def format_ratios(of_teams: list[list[float]]) -> str:
    medians = ", ".join(f"{statistics.median(ratios):.3f}" for ratios in of_teams)
    return f"{statistics.median(itertools.chain(*of_teams)):.3f} ({medians})"


# --- On a rank ---


def measure(rank: int, seq_len: int, head_dim: int, memory: str, rounds: int) -> list[float]:
    """Return the seconds of float32 and bfloat16 in turn."""
    import torch

    import ringspan as rs

    layout = rs.zigzag(seq_len, WORLD_SIZE)
    tensors = [torch.randn(1, HEADS, layout.shard_len(rank), head_dim) for _ in range(3)]

    def call(dtype: torch.dtype) -> Callable[[], Any]:
        q, k, v = (x.to(dtype) for x in tensors)
        return lambda: rs.attention(q, k, v, mask=rs.causal(), layout=layout)

    with fresh_memory() if memory == FRESH else nullcontext(), torch.no_grad():
        costs = time_in_turn({str(dtype): call(dtype) for dtype in (torch.float32, torch.bfloat16)}, rounds)
    return [cost.wall_s for of_round in zip(*costs.values(), strict=True) for cost in of_round]


@contextmanager
def fresh_memory() -> Iterator[None]:
    """A session that keeps no memory: each tensor is converted into new memory."""
    import torch

    from ringspan.runtime.scratch import Scratch

    def widened(_: Scratch, tensors: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        return tuple(x.to(torch.float32) for x in tensors)

    with patch.multiple(Scratch, queries=widened, operands=widened):
        yield


if __name__ == "__main__":
    main()
