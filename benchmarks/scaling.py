"""How long does planning take for many ranks: who sees whom, building a schedule, proving it, compiling it?

Times are CPU seconds of the one thread that does the work, the median of a few runs with all caches empty. A schedule
makes its steps when asked, so building counts all of them; compiling counts the programs of all ranks, of which a real
run makes one on each.

    python benchmarks/scaling.py [--ranks 256] [--runs 3] [--write]
"""

import argparse
import gc
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from results import describe_machine, format_median, format_table, write_section

import ringspan as rs
from ringspan.algorithms import ALGORITHMS, Side, build_schedule
from ringspan.schedule import compile as compiling
from ringspan.schedule import compile_rank, validate, visible, visible_blocks

SEQ_LEN = 1 << 20
NODE = 8  # ranks in the inner dimension of a mesh
MASKS = {"causal": rs.causal(), "sliding_window(4095, 0)": rs.sliding_window(4095, 0)}
LAYOUTS: dict[str, Callable[[int], rs.Layout]] = {
    "zigzag": lambda ranks: rs.zigzag(SEQ_LEN, ranks),
    "contiguous": lambda ranks: rs.contiguous(SEQ_LEN, ranks),
    "striped": lambda ranks: rs.striped(SEQ_LEN, ranks),
    "striped, block=128": lambda ranks: rs.striped(SEQ_LEN, ranks, block=128),
}
PASSES: dict[str, Side | None] = {"forward": None, "backward, kv travels": "kv", "backward, q travels": "q"}

MAX_SECONDS = 2.0

T = TypeVar("T")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=256, help=f"a multiple of {NODE}")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    coverage = {
        (layout, mask): [time_coverage(args.ranks, layout, mask) for _ in range(args.runs)]
        for layout in LAYOUTS
        for mask in MASKS
    }
    planning = {
        (algorithm, name): [time_planning(args.ranks, algorithm, side) for _ in range(args.runs)]
        for algorithm in ALGORITHMS
        for name, side in PASSES.items()
    }
    text, is_kept = report(args, coverage, planning)
    print(text)
    if args.write:
        write_section("scaling", "Planning for many ranks", text)
    sys.exit(not is_kept)


def time_coverage(ranks: int, layout_name: str, mask_name: str) -> float:
    layout = LAYOUTS[layout_name](ranks)
    forget()
    return timed(lambda: visible_blocks(MASKS[mask_name], layout, layout))[0]


def time_planning(ranks: int, algorithm: str, side: Side | None) -> tuple[float, float, float]:
    """Seconds to build, validate and compile where every rank sees every other: zigzag, causal."""
    layout = rs.zigzag(SEQ_LEN, ranks)
    sees = visible_blocks(MASKS["causal"], layout, layout)
    mesh = rs.Mesh(ranks // NODE, NODE) if "mesh" in ALGORITHMS[algorithm].options else None

    def build() -> rs.Schedule:
        schedule = build_schedule(algorithm, sees, heads=rs.Heads(ranks, ranks), mesh=mesh, backward=side)
        for _ in schedule.steps:
            pass
        return schedule

    forget()
    build_s, schedule = timed(build)
    validate_s, _ = timed(lambda: validate(schedule, sees))
    compile_s, _ = timed(lambda: [compile_rank(schedule, rank) for rank in range(ranks)])
    return build_s, validate_s, compile_s


def forget() -> None:
    """Empty the caches, and let go of what was in them."""
    for cached in (visible_blocks, visible._bits, build_schedule, compile_rank, compiling._first_reads):
        cached.cache_clear()
    gc.collect()


def timed(run: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


def report(
    args: argparse.Namespace,
    coverage: dict[tuple[str, str], list[float]],
    planning: dict[tuple[str, str], list[tuple[float, float, float]]],
) -> tuple[str, bool]:
    coverage_rows = [[*name, format_median(seconds)] for name, seconds in coverage.items()]
    planning_rows = [
        [*name, *(format_median(seconds) for seconds in zip(*runs, strict=True))] for name, runs in planning.items()
    ]
    promised = list(coverage.values())
    for runs in planning.values():
        build_s, validate_s, _ = zip(*runs, strict=True)
        promised += [list(build_s), list(validate_s)]
    slowest = max(sorted(seconds)[len(seconds) // 2] for seconds in promised)
    is_kept = slowest <= MAX_SECONDS
    return (
        f"`python benchmarks/scaling.py --ranks {args.ranks} --runs {args.runs}`\n\n{describe_machine()}.\n\n"
        f"{args.ranks} ranks, {SEQ_LEN} tokens; CPU seconds, the median (smallest – largest) of {args.runs} runs with "
        f"empty caches. Schedules are for zigzag and causal, where every rank sees every other, {args.ranks} heads, "
        f"meshes of {args.ranks // NODE} × {NODE}; compile is for all ranks.\n\n"
        f"{format_table(['layout', 'mask', 'coverage, s'], coverage_rows)}\n\n"
        f"{format_table(['algorithm', 'pass', 'build, s', 'validate, s', 'compile, s'], planning_rows)}\n\n"
        f"Promise (coverage, build and validate in at most {MAX_SECONDS:.0f} s each; the slowest takes "
        f"{slowest:.2f} s): {'kept' if is_kept else 'NOT KEPT'}."
    ), is_kept


if __name__ == "__main__":
    main()
