"""What does the agreement of the ranks cost a call?

`rs.attention` on two gloo processes with `contract=True` and `contract=False` in turn, on tensors so small that little
else is left, and on larger ones for comparison. Single calls are timed and medians taken, because with few cores a call
now and then waits for the scheduler, for milliseconds.

    python benchmarks/header.py [--rounds 200] [--write]
"""

import argparse
import statistics
from collections.abc import Callable

from gloo_pair import WORLD_SIZE, Cost, of_both, on_pair, ratio, time_in_turn
from results import describe_machine, format_table, write_section

SEQ_LENS = (16, 256, 1024)
HEADS, HEAD_DIM = 4, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text = report(args.rounds)
    print(text)
    if args.write:
        write_section("header", "What the contract between ranks costs", text)


def report(rounds: int) -> str:
    import torch

    first, second = on_pair(measure, rounds)
    rows = []
    for seq_len in SEQ_LENS:
        costs = {name: of_both(first[seq_len][name], second[seq_len][name]) for name in ("with", "without")}
        row = [str(seq_len)]
        for what in Cost._fields:
            seconds = {name: [getattr(cost, what) for cost in of_name] for name, of_name in costs.items()}
            more = statistics.median(a - b for a, b in zip(seconds["with"], seconds["without"], strict=True))
            row += [f"{statistics.median(seconds[name]) * 1e6:.0f}" for name in ("with", "without")]
            row += [f"{more * 1e6:.0f}", f"{ratio(seconds['with'], seconds['without']):.2f}"]
        rows.append(row)
    header = ["tokens"]
    for what in ("time", "CPU"):
        header += [f"with, {what} µs", f"without, {what} µs", "more, µs", "ratio"]
    return (
        f"`python benchmarks/header.py --rounds {rounds}`\n\n{describe_machine()}, torch {torch.__version__}.\n\n"
        f"One `rs.attention` of {HEADS} heads of {HEAD_DIM} in float32, causal, zigzag, pass_kv, on {WORLD_SIZE} gloo "
        "processes with one thread each, `contract=True` and `contract=False` in turn, for a signature that is known "
        "already. The time that passes on one rank, and the CPU time of both with gloo's threads; medians of "
        f"{rounds} rounds, differences and ratios those of each round.\n\n{format_table(header, rows)}"
    )


# --- On a rank ---


def measure(rank: int, rounds: int) -> dict[int, dict[str, list[Cost]]]:
    import torch

    import ringspan as rs

    def run(seq_len: int, contract: bool) -> Callable[[], object]:
        layout = rs.zigzag(seq_len, WORLD_SIZE)
        x = torch.randn(1, HEADS, layout.shard_len(rank), HEAD_DIM)
        return lambda: rs.attention(x, x, x, mask=rs.causal(), layout=layout, contract=contract)

    return {
        seq_len: time_in_turn({"with": run(seq_len, True), "without": run(seq_len, False)}, rounds)
        for seq_len in SEQ_LENS
    }


if __name__ == "__main__":
    main()
