"""How close does a denoising step on two ranks come to the ideal, and how fast is diffusers' own Ulysses?

The first layers of Wan 2.1 1.3B with its real widths and random weights, on two gloo processes with one thread each.
Timed in turn, round by round: every rank its own rows and pieces with no messages; ours with pass-KV and with Ulysses;
diffusers' own Ulysses, `enable_parallelism`. The latter does not run on CPUs: `torch.accelerator.device_count` is made
to return 1 and torch's accelerator to be the CPU. It needs a number of tokens that the ranks divide.

    python benchmarks/video.py [--frames 81] [--size 240 416] [--layers 2] [--rounds 3] [--write]
"""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

from gloo_pair import WORLD_SIZE, Cost, of_both, on_pair, ratio
from results import describe_machine, format_table, write_section

IDEAL, OURS, ULYSSES, THEIRS = "ideal", "pass-KV", "Ulysses", "diffusers' Ulysses"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--frames", type=int, default=81)
    parser.add_argument("--size", type=int, nargs=2, default=[240, 416])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help="into RESULTS.md")
    args = parser.parse_args()
    tokens, text = report(args.frames, *args.size, args.layers, args.rounds)
    print(text)
    if args.write:
        write_section(f"video {tokens} {args.layers}", f"A denoising step of {tokens:,} tokens on two ranks", text)


def report(frames: int, height: int, width: int, layers: int, rounds: int) -> tuple[int, str]:
    first, second = on_pair(measure, frames, height, width, layers, rounds)
    tokens, costs, errors = first
    both = {name: of_both(costs[name], second[1][name]) for name in costs}
    rows = []
    for name in both:
        cells = [name]
        for what in Cost._fields:
            seconds = {who: [getattr(cost, what) for cost in found] for who, found in both.items()}
            cells += [f"{statistics.median(seconds[name]):.2f}", f"{ratio(seconds[IDEAL], seconds[name]):.1%}"]
        rows.append([*cells, "" if name == IDEAL else f"{max(errors[name], second[2][name]):.1e}"])
    header = ["", "time, s", "of the ideal", "CPU of both ranks, s", "of the ideal", "off one process"]
    command = (
        f"python benchmarks/video.py --frames {frames} --size {height} {width} --layers {layers} --rounds {rounds}"
    )
    return tokens, (
        f"`{command}`\n\n{describe_machine()}.\n\nWan 2.1 1.3B, {layers} of 30 layers, random weights, {frames} frames "
        f"of {height}×{width}: {tokens:,} tokens and 512 of text, float32, {WORLD_SIZE} gloo processes with one thread "
        f"each. Medians of {rounds} rounds, ratios those of each round. Ideal: every rank its own rows and pieces of "
        "attention, no messages. diffusers' own Ulysses needs two patches to run on CPUs. The error is that of the "
        f"output, in units of its largest number.\n\n{format_table(header, rows)}"
    )


# --- On a rank ---


def measure(
    rank: int, frames: int, height: int, width: int, layers: int, rounds: int
) -> tuple[int, dict[str, list[Cost]], dict[str, float]]:
    import torch
    import torch.distributed as dist

    from ringspan.bench.settings import VideoSettings
    from ringspan.bench.video import error_of, sharing_weights
    from ringspan.bench.video_models import build_video_model, draw_call

    settings = VideoSettings("wan2.1-1.3b", frames, height, width, layers, 1, "float32", "pass_kv", rounds, 0, 600.0)
    cpu = torch.device("cpu")
    model = build_video_model(settings, cpu)
    call = draw_call(settings, cpu)
    ideal, ours, ulysses = prepare_ours(model, settings)
    theirs = sharing_weights(model)
    use_diffusers(theirs)
    runs: dict[str, Callable[[], Any]] = {
        IDEAL: lambda: ideal(call),
        OURS: lambda: ours(**call)[0],
        ULYSSES: lambda: ulysses(**call)[0],
        THEIRS: lambda: theirs(**call)[0],
    }
    costs: dict[str, list[Cost]] = {name: [] for name in runs}
    outputs = {}
    with torch.no_grad():
        for number in range(rounds):
            for name in sorted(runs, reverse=bool(number % 2)):
                dist.barrier()
                wall, spent = time.perf_counter(), time.process_time()
                outputs[name] = runs[name]()
                costs[name].append(Cost(time.perf_counter() - wall, time.process_time() - spent))
        expected = [sharing_weights(model)(**call)[0] if rank == 0 else torch.empty_like(outputs[OURS])]
        dist.broadcast(expected[0], 0)
    errors = {name: error_of(output, expected[0]) for name, output in outputs.items()}
    return settings.num_tokens, costs, errors


def prepare_ours(model: Any, settings: Any) -> tuple[Callable[[Any], Any], Any, Any]:
    """The ideal, and two parallelized models that share the weights."""
    import torch

    import ringspan as rs
    from ringspan.bench.video import sharing_weights
    from ringspan.bench.video_ideal import MessagelessRun
    from ringspan.bench.video_models import draw_example

    example = draw_example(settings, torch.device("cpu"))
    handles, models = [], []
    for algorithm in ("pass_kv", "ulysses"):
        models.append(sharing_weights(model))
        handles.append(rs.adapters.diffusers.parallelize(models[-1], algorithm=algorithm, example=example))
    adapter, pieces = handles[0].adapters["transformer"], {}

    def ideal(call: Any) -> Any:
        with adapter.wiring.running(MessagelessRun(adapter.find_plan(call), adapter.options, pieces)):
            return models[0](**call)[0]

    return ideal, models[0], models[1]


def use_diffusers(model: Any) -> None:
    """diffusers' own context parallelism, made to run on a CPU."""
    import torch
    from diffusers import ContextParallelConfig

    torch.accelerator.device_count = lambda: 1
    torch._C._get_accelerator = lambda *_: torch.device("cpu")
    model.enable_parallelism(config=ContextParallelConfig(ulysses_degree=WORLD_SIZE))


if __name__ == "__main__":
    main()
