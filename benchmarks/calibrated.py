"""Does `ringspan bench calibrate` know this machine well enough to predict calls that it did not measure?

Two gloo processes calibrate themselves and then time forward and backward passes of causal attention, round by round,
so that other work on the machine slows both alike. Every round predicts its own calls; the error is the median over
rounds of predicted / measured - 1.

With 4 heads, calls of 2,048 tokens take 15 to 25 ms, and what a call costs beside its tiles, which calibration does not
measure, is up to a third of that.

    python benchmarks/calibrated.py [--rounds 5] [--write]
"""

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gloo_pair import WORLD_SIZE, on_pair
from results import describe_machine, format_median, format_table, write_section

SEQ_LENS = (2048, 4096, 8192)
ALGORITHMS = ("pass_kv", "ulysses")
HEADS, HEAD_DIM = 8, 64
LONGEST_TILE = 2048
TIMEOUT_S = 120.0

MOST_ERROR = 0.15
LEAST_KEPT = 11  # of the 12 points

Point = tuple[str, int, str]  # algorithm, tokens, pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    text, is_kept = report(args.rounds)
    print(text)
    if args.write:
        write_section("calibrated", "A calibrated machine predicts its own calls", text)
    sys.exit(not is_kept)


def report(rounds: int) -> tuple[str, bool]:
    """Return the table, and whether enough points are close."""
    import torch

    predicted, first, second = on_pair_with_predictions(rounds)
    rows, num_kept = [], 0
    for point in predicted:
        measured = [max(both) for both in zip(first[point], second[point], strict=True)]
        ratios = [a / b for a, b in zip(predicted[point], measured, strict=True)]
        error = statistics.median(ratios) - 1
        num_kept += abs(error) <= MOST_ERROR
        milliseconds = (format_median([1e3 * s for s in of], 0) for of in (measured, predicted[point]))
        rows.append([point[0], f"{point[1]:,}", point[2], *milliseconds, f"{100 * error:+.1f} %"])
    is_kept = num_kept >= LEAST_KEPT
    return (
        f"`python benchmarks/calibrated.py --rounds {rounds}`\n\n{describe_machine()}, torch {torch.__version__}.\n\n"
        f"{WORLD_SIZE} gloo processes with one thread each; causal, zigzag, {HEADS} heads of {HEAD_DIM}, float32. In "
        f"each round `ringspan bench calibrate` measures tiles of up to {LONGEST_TILE:,} tokens and messages, and then "
        f"every call is timed. Times are the median (smallest – largest) of {rounds} rounds, the error the median of "
        "each round's predicted / measured - 1.\n\n"
        + format_table(["algorithm", "tokens", "pass", "measured, ms", "predicted, ms", "error"], rows)
        + f"\n\nAt least {LEAST_KEPT} of {len(rows)} within {100 * MOST_ERROR:.0f} %: {num_kept} are, "
        f"{'yes' if is_kept else 'NO'}."
    ), is_kept


def on_pair_with_predictions(
    rounds: int,
) -> tuple[dict[Point, list[float]], dict[Point, list[float]], dict[Point, list[float]]]:
    """Return predicted seconds, and those measured on each rank."""
    (predicted, first), (_, second) = on_pair(measure, rounds)
    return predicted, first, second


# --- On a rank ---


def measure(rank: int, rounds: int) -> tuple[dict[Point, list[float]], dict[Point, list[float]]]:
    """Return what rank 0 predicts and what this rank takes, by point and round."""
    points = [(name, n, which) for name in ALGORITHMS for n in SEQ_LENS for which in ("forward", "backward")]
    predicted: dict[Point, list[float]] = {point: [] for point in points}
    measured: dict[Point, list[float]] = {point: [] for point in points}
    calls = {(name, n): prepare_call(rank, name, n) for name in ALGORITHMS for n in SEQ_LENS}
    for _ in range(rounds):
        for point, seconds in predict(points).items():
            predicted[point].append(seconds)
        for (name, n), call in calls.items():
            for which, seconds in call().items():
                measured[name, n, which].append(seconds)
    return predicted, measured


def predict(points: list[Point]) -> dict[Point, float]:
    """Calibrate on both ranks; rank 0 predicts every point from the file that would be written."""
    import torch

    from ringspan.bench.calibrate import calibrate
    from ringspan.bench.calibration import format_calibration
    from ringspan.bench.predict import predict_pass
    from ringspan.bench.settings import CalibrationSettings, Job
    from ringspan.planner.catalog import load_device

    settings = CalibrationSettings(LONGEST_TILE, 1, HEADS, HEADS, HEAD_DIM, "float32", "auto")
    job = Job("calibrate", "gloo", WORLD_SIZE, TIMEOUT_S, calibration=settings)
    found = calibrate(job, None, torch.device("cpu"), lambda _: None)
    if found is None:
        return {}
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "mine.toml")
        path.write_text(format_calibration(found))
        device = load_device(str(path))
    predicted = {}
    for name, n, which in points:
        call = settings_of(name, n)
        forward, backward = call.passes()
        side = forward if which == "forward" else backward
        predicted[name, n, which] = predict_pass(call, device, side).makespan_s
    return predicted


def settings_of(algorithm: str, seq_len: int) -> Any:
    import ringspan as rs
    from ringspan.bench.settings import Settings

    return Settings(
        seq_len=seq_len,
        batch=1,
        num_heads=HEADS,
        num_kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype="float32",
        mask=rs.causal(),
        layout=rs.zigzag(seq_len, WORLD_SIZE),
        layout_name="zigzag",
        algorithm=algorithm,
        direction=None,
        mesh=None,
        kernel="auto",
        has_backward=True,
        carrier="gloo",
        repeats=1,
        seed=0,
        timeout_s=TIMEOUT_S,
    )


def prepare_call(rank: int, algorithm: str, seq_len: int) -> Callable[[], dict[str, float]]:
    """Return a call that times its forward and its backward pass; one call has been made."""
    import torch
    import torch.distributed as dist

    import ringspan as rs

    layout = rs.zigzag(seq_len, WORLD_SIZE)
    q, k, v = (torch.randn(1, HEADS, layout.shard_len(rank), HEAD_DIM, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)

    def call() -> dict[str, float]:
        dist.barrier()
        start_s = time.perf_counter()
        out = rs.attention(q, k, v, mask=rs.causal(), layout=layout, algorithm=algorithm)
        forward_s = time.perf_counter() - start_s
        dist.barrier()
        start_s = time.perf_counter()
        torch.autograd.grad(out, (q, k, v), dout)
        return {"forward": forward_s, "backward": time.perf_counter() - start_s}

    call()
    return call


if __name__ == "__main__":
    main()
