"""How long does planning take for many ranks: visible blocks, building, validating and compiling a schedule?

Times are CPU seconds of the working thread, each in a fresh process without caches. A schedule makes its steps on
demand, so building counts all of them. Compiling counts the programs of all ranks; a real run compiles one per rank.

    python benchmarks/scaling.py [--ranks 256] [--runs 3] [--write]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from typing import TypeVar

from results import describe_machine, format_median, format_table, in_subprocess, write_section

import ringspan as rs
from ringspan.algorithms import ALGORITHMS, Side, build_schedule
from ringspan.schedule import compile_rank, validate, visible_blocks

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
    parser.add_argument("--measure", nargs=3, help=argparse.SUPPRESS)  # the task of a subprocess
    args = parser.parse_args()
    if args.measure:
        what, *arguments = args.measure
        print(json.dumps(MEASUREMENTS[what](args.ranks, *arguments)))
        return
    text, is_kept = report(args)
    print(text)
    if args.write:
        write_section("scaling", "Planning for many ranks", text)
    sys.exit(not is_kept)


def report(args: argparse.Namespace) -> tuple[str, bool]:
    """Return the tables, and whether the promise is kept."""

    def measure(*what: str) -> list[list[float]]:
        """Return the seconds of each task, run by run."""
        runs = [in_subprocess(__file__, "--ranks", args.ranks, "--measure", *what) for _ in range(args.runs)]
        return [list(seconds) for seconds in zip(*runs, strict=True)]

    coverage = {(layout, mask): measure("coverage", layout, mask) for layout in LAYOUTS for mask in MASKS}
    planning = {(algorithm, name): measure("planning", algorithm, name) for algorithm in ALGORITHMS for name in PASSES}
    tables = [
        format_table(header, [[*name, *map(format_median, seconds)] for name, seconds in measured.items()])
        for header, measured in (
            (["layout", "mask", "coverage, s"], coverage),
            (["algorithm", "pass", "build, s", "validate, s", "compile, s"], planning),
        )
    ]
    slowest = max(statistics.median(runs) for seconds in (coverage | planning).values() for runs in seconds[:2])
    is_kept = slowest <= MAX_SECONDS
    return (
        f"`python benchmarks/scaling.py --ranks {args.ranks} --runs {args.runs}`\n\n{describe_machine()}.\n\n"
        f"{args.ranks} ranks, {SEQ_LEN} tokens; CPU seconds, the median (smallest – largest) of {args.runs} runs, each "
        "in a fresh process. Schedules are for zigzag and causal, where every rank sees every other, with "
        f"{args.ranks} heads and meshes of {args.ranks // NODE} × {NODE}; compile is for all ranks.\n\n"
        + "\n\n".join(tables)
        + f"\n\nCoverage, build and validate at most {MAX_SECONDS:.0f} s each (the slowest takes {slowest:.2f} s): "
        f"{'yes' if is_kept else 'NO'}. (The promise is for 256 ranks.)"
    ), is_kept


# --- In a subprocess ---


def measure_coverage(ranks: int, layout_name: str, mask_name: str) -> tuple[float]:
    layout = LAYOUTS[layout_name](ranks)
    return (timed(lambda: visible_blocks(MASKS[mask_name], layout, layout))[0],)


def measure_planning(ranks: int, algorithm: str, pass_name: str) -> tuple[float, float, float]:
    """Return the seconds to build, validate and compile."""
    layout = rs.zigzag(SEQ_LEN, ranks)
    visible = visible_blocks(MASKS["causal"], layout, layout)
    mesh = rs.Mesh(ranks // NODE, NODE) if "mesh" in ALGORITHMS[algorithm].options else None

    def build() -> rs.Schedule:
        schedule = build_schedule(
            algorithm, visible, heads=rs.Heads(ranks, ranks), mesh=mesh, backward=PASSES[pass_name]
        )
        for _ in schedule.steps:
            pass
        return schedule

    build_s, schedule = timed(build)
    validate_s, _ = timed(lambda: validate(schedule, visible))
    compile_s, _ = timed(lambda: [compile_rank(schedule, rank) for rank in range(ranks)])
    return build_s, validate_s, compile_s


MEASUREMENTS: dict[str, Callable[..., tuple[float, ...]]] = {"coverage": measure_coverage, "planning": measure_planning}


def timed(run: Callable[[], T]) -> tuple[float, T]:
    start = time.process_time()
    result = run()
    return time.process_time() - start, result


if __name__ == "__main__":
    main()
