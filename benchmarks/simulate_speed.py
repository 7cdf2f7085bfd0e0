"""What does simulating many devices cost compared with plain blockwise attention on one, in time and memory?

Causal attention of one head. Times are CPU seconds with BLAS on one thread, which equal wall time on an idle machine.
Plain and simulated runs alternate in one process and are compared round by round, so that disturbances affect both.
Memory is the peak of a process that only simulates, minus the peak of one that only imports and makes the inputs.

    python benchmarks/simulate_speed.py [--seq-len 32768] [--devices 8] [--rounds 5] [--write]
"""

import argparse
import json
import resource
import statistics
import sys
import time
import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

from results import describe_machine, format_median, format_table, in_subprocess, write_section

DTYPES = ("float32", "float64")
HEAD_DIM = 64
LAYOUTS = ("zigzag", "contiguous")
# The backward schedule depends on the side that travels and not on the algorithm, so one algorithm stands for both.
RUNS = [("forward", layout, algorithm) for layout in LAYOUTS for algorithm in ("pass_kv", "pass_q")]
RUNS += [("backward", layout, "pass_kv") for layout in LAYOUTS]

MAX_RATIO = 1.5
MAX_BYTES = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seq-len", type=int, default=32768)
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5, help="how often all of them run in turn")
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    parser.add_argument("--measure", nargs="+", help=argparse.SUPPRESS)  # the task of a subprocess
    args = parser.parse_args()
    if args.measure:
        what, *arguments = args.measure
        print(json.dumps(MEASUREMENTS[what](args, *arguments)))
        return
    text, is_kept = report(args)
    print(text)
    if args.write:
        write_section("simulate_speed", "Simulated devices against plain attention", text)
    sys.exit(not is_kept)


def report(args: argparse.Namespace) -> tuple[str, bool]:
    """Return the table, and whether the forward pass keeps the promises."""
    sizes = ("--seq-len", args.seq_len, "--devices", args.devices, "--rounds", args.rounds)
    measure = partial(in_subprocess, __file__, *sizes, "--measure")
    rows, is_kept, block_sizes = [], True, {}
    for dtype in DTYPES:
        times = measure("times", dtype)
        block_sizes |= {f"{dtype} {name}": size for name, size in times["block_sizes"].items()}
        inputs = measure("rss", dtype)
        for run in RUNS:
            name = " ".join(run)
            plain, simulated = times["seconds"][run[0]], times["seconds"][name]
            ratios = [b / a for a, b in zip(plain, simulated, strict=True)]
            rss = measure("rss", dtype, *run)
            traced = measure("traced", dtype, *run)
            rows.append(
                [dtype, *run, format_median(plain), format_median(simulated), format_median(ratios)]
                + [f"{x / 1e6:.0f}" for x in (rss, rss - inputs, traced)]
                + [f"{times['difference'][name]:.1e}"]
            )
            is_kept &= run[0] == "backward" or (statistics.median(ratios) <= MAX_RATIO and rss <= MAX_BYTES)
    header = ["dtype", "pass", "layout", "algorithm", "plain, s", "simulated, s", "ratio"]
    header += ["peak MB", "over inputs, MB", "traced, MB", "difference"]
    blocks = ", ".join(f"{q}×{kv} ({name})" for name, (q, kv) in block_sizes.items())
    return (
        f"`python benchmarks/simulate_speed.py {' '.join(map(str, sizes))}`\n\n"
        f"{describe_machine()}, BLAS on one thread.\n\n"
        f"{args.devices} devices, {args.seq_len} tokens, one head of {HEAD_DIM}, causal, with everything warm. Times "
        f"are CPU seconds, the median (smallest – largest) of {args.rounds} rounds of all runs in turn; ratios are "
        f"those of each round. Plain attention is in its best block size: {blocks}. Memory is the peak resident size "
        "of a process that only simulates, that less the same without simulating, and the peak of what was allocated "
        "while simulating. A backward run's time is without its forward pass, its memory with it. The difference is "
        "the largest, absolute, between plain and simulated results.\n\n"
        f"{format_table(header, rows)}\n\n"
        f"Forward at most {MAX_RATIO} times plain attention's time and {MAX_BYTES / 1e9:.0f} GB: "
        f"{'yes' if is_kept else 'NO'}. (The promise is for 8 devices and 32768 tokens.)"
    ), is_kept


# --- In a subprocess ---


def measure_times(args: argparse.Namespace, dtype: str) -> dict[str, Any]:
    import numpy as np
    import plain

    inputs = make_inputs(args, dtype)
    q, k, v, dout = inputs
    out, lse = plain.attention(q, k, v, (256, 512))
    plain_runs = {
        "forward": lambda size, part=slice(None): plain.attention(q[part], k[part], v[part], size)[:1],
        "backward": lambda size, part=slice(None): plain.gradients(
            *(x[part] for x in (q, k, v, out, lse, dout)), block_size=size
        ),
    }
    sample = slice(args.seq_len // 4)
    best = {name: plain.best_block_size(partial(run, part=sample)) for name, run in plain_runs.items()}
    seconds, difference = {}, {}
    for direction, plain_run in plain_runs.items():
        reference = partial(plain_run, best[direction])
        expected = reference()
        simulations = {" ".join(run): prepare(args, inputs, *run) for run in RUNS if run[0] == direction}
        for name, simulate in simulations.items():
            difference[name] = max(float(np.abs(a - b).max()) for a, b in zip(expected, simulate(), strict=True))
        for _ in range(args.rounds):
            for name, run in ((direction, reference), *simulations.items()):
                seconds.setdefault(name, []).append(timed(run))
    return {"block_sizes": best, "seconds": seconds, "difference": difference}


def measure_rss(args: argparse.Namespace, dtype: str, *run: str) -> int:
    import ringspan  # noqa: F401

    inputs = make_inputs(args, dtype)
    if run:
        prepare(args, inputs, *run)()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def measure_traced(args: argparse.Namespace, dtype: str, *run: str) -> int:
    inputs = make_inputs(args, dtype)
    tracemalloc.start()
    prepare(args, inputs, *run)()
    return tracemalloc.get_traced_memory()[1]


MEASUREMENTS: dict[str, Callable[..., Any]] = {"times": measure_times, "rss": measure_rss, "traced": measure_traced}


def make_inputs(args: argparse.Namespace, dtype: str) -> list[Any]:
    """Make q, k, v and dout."""
    import numpy as np

    rng = np.random.default_rng(0)
    return [rng.standard_normal((args.seq_len, HEAD_DIM), np.dtype(dtype).type) for _ in range(4)]


def prepare(
    args: argparse.Namespace, inputs: Any, direction: str, layout_name: str, algorithm: str
) -> Callable[[], tuple[Any, ...]]:
    """Return what to time: a forward pass, or a backward pass whose forward pass is done."""
    import ringspan as rs

    q, k, v, dout = inputs
    layout = getattr(rs, layout_name)(args.seq_len, args.devices)

    def forward() -> Any:
        return rs.simulate_attention(q, k, v, mask=rs.causal(), layout=layout, algorithm=algorithm)

    if direction == "forward":
        return lambda: (forward().out,)
    simulation = forward()
    return lambda: simulation.gradients(dout)[:3]


def timed(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
