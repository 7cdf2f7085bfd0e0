"""What does a sliding window cost compared with causal attention, and with PyTorch and a dense mask?

One process with one thread: `rs.attention` with a causal mask and with windows, and PyTorch's own attention with the
window as a mask of all pairs, in turn, forward alone and with backward.

    python benchmarks/windows.py [--rounds 7] [--write]
"""

import argparse
import statistics
from collections.abc import Callable, Iterator

from gloo_pair import time_in_turn
from results import describe_machine, format_table, write_section

SEQ_LEN, HEADS, HEAD_DIM = 8192, 8, 64
WINDOWS = (128, 512, 1024, 4096)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text = report(args.rounds)
    print(text)
    if args.write:
        write_section("windows", "Sliding windows", text)


def report(rounds: int) -> str:
    import torch

    header = ["", "window", "pairs, of causal's", "time, of causal's", "PyTorch with a mask, over that"]
    return (
        f"`python benchmarks/windows.py --rounds {rounds}`\n\n"
        f"{describe_machine()}, torch {torch.__version__}.\n\n"
        f"`rs.attention` on one rank with one thread: {SEQ_LEN:,} tokens, {HEADS} heads of {HEAD_DIM}, float32. The "
        "time with a window over that with a causal mask, and the time of `scaled_dot_product_attention` with a mask "
        f"of all pairs over that with the window. Medians of {rounds} rounds, with the smallest and the largest.\n\n"
        f"{format_table(header, measure(rounds))}"
    )


def measure(rounds: int) -> Iterator[list[str]]:
    import torch

    torch.set_num_threads(1)
    for is_backward in (False, True):
        for window in WINDOWS:
            costs = time_in_turn(make_runs(window, is_backward), rounds)
            causal, ours, masked = ([cost.wall_s for cost in of_rounds] for of_rounds in costs.values())
            pairs = sum(min(window, position + 1) for position in range(SEQ_LEN))
            yield [
                "forward and backward" if is_backward else "forward",
                f"{window:,}",
                f"{2 * pairs / (SEQ_LEN * (SEQ_LEN + 1)):.3f}",
                format_ratios(ours, causal),
                format_ratios(masked, ours),
            ]


def format_ratios(these: list[float], those: list[float]) -> str:
    ratios = [a / b for a, b in zip(these, those, strict=True)]
    return f"{statistics.median(ratios):.3f} ({min(ratios):.3f} – {max(ratios):.3f})"


def make_runs(window: int, is_backward: bool) -> dict[str, Callable[[], object]]:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    import ringspan as rs

    layout = rs.contiguous(SEQ_LEN, 1)
    sliding = rs.sliding_window(window - 1, 0)
    allowed = torch.from_numpy(sliding.allowed(range(SEQ_LEN), range(SEQ_LEN)))
    leaves = [torch.randn(1, HEADS, SEQ_LEN, HEAD_DIM, requires_grad=is_backward) for _ in range(3)]

    def run(attend: Callable[..., torch.Tensor]) -> Callable[[], object]:
        def once() -> None:
            out = attend(*leaves)
            if is_backward:
                torch.autograd.grad(out, leaves, torch.ones_like(out))

        return once

    return {
        "causal": run(lambda q, k, v: rs.attention(q, k, v, mask=rs.causal(), layout=layout)),
        "window": run(lambda q, k, v: rs.attention(q, k, v, mask=sliding, layout=layout)),
        "masked": run(lambda q, k, v: scaled_dot_product_attention(q, k, v, attn_mask=allowed)),
    }


if __name__ == "__main__":
    main()
