"""`ringspan bench model`: a whole decoder on ranks, timed, taken apart and checked."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import click
from rich.console import Console
from rich.text import Text

from ringspan.bench.result import (
    PHASES,
    Breakdown,
    ModelMemory,
    Phase,
    PhaseResult,
    PredictedModel,
    Ratio,
    Timing,
    TransformerResult,
)
from ringspan.bench.settings import Job, TransformerSettings
from ringspan.cli.bench.attention_report import format_spread, tell_check, timing_row
from ringspan.cli.bench.options import (
    ModelSizes,
    RunPlace,
    Runs,
    html_option,
    json_option,
    print_json,
    rank_options,
    run_on_ranks,
    run_options,
    show_progress,
    size_options,
)
from ringspan.cli.console import format_count, format_seconds, new_console
from ringspan.cli.errors import Command
from ringspan.cli.files import write_text
from ringspan.cli.page import TABLE_RANKS, Page, new_table
from ringspan.cli.page_command import command_line
from ringspan.page.report import Section, bars, build_report, facts, table

MLP_RATIO = 4

EXAMPLE = """\b
Example:
  ringspan bench model --layers 4 --heads 4 --head-dim 64 --mlp 1024 --tokens 8K
"""


@click.command(cls=Command, epilog=EXAMPLE, context_settings={"show_default": True})
@rank_options
@size_options(tokens="4096", batch=1, heads=4)
@run_options(repeats=3)
@click.option("--layers", type=click.IntRange(1), default=4, help="Layers.")
@click.option("--mlp", type=click.IntRange(1), help="Inner size of the MLP.  [default: 4 × heads × head_dim]")
@html_option
@json_option
@click.pass_context
def model(
    ctx: click.Context,
    *,
    place: RunPlace,
    sizes: ModelSizes,
    runs: Runs,
    layers: int,
    mlp: int | None,
    html: Path | None,
    as_json: bool,
) -> None:
    """Time a whole decoder with random weights.

    Measures prefill, training step and decode. Compares the ranks with one process and with the ideal, and
    prints what ringspan plan expects of GPUs.
    """
    settings = TransformerSettings(
        **sizes._asdict(),
        **runs._asdict(),
        layers=layers,
        mlp_size=mlp or MLP_RATIO * sizes.num_heads * sizes.head_dim,
        timeout_s=place.timeout_s,
    )
    with show_progress() as progress:
        job = Job("transformer", place.carrier, place.world_size, place.timeout_s, transformer=settings)
        result: TransformerResult | None = run_on_ranks(job, place.launched, progress)
    if result is None:
        return  # not rank 0
    from ringspan.bench.predict import predict_on_gpus

    result = dataclasses.replace(result, predicted=predict_on_gpus(settings))
    if html is not None:
        write_text(html, build_model_page(result, command_line(ctx)))
    if as_json:
        print_json({"is_verified": result.is_verified} | dataclasses.asdict(result))
    else:
        print_transformer(result, new_console())
    if not result.is_verified:
        ctx.exit(1)


NAMES: dict[Phase, str] = {"prefill": "prefill", "train": "training step", "decode": "token"}


def print_transformer(result: TransformerResult, console: Console) -> None:
    page = Page(console)
    _print_title(page, result)
    _print_times(page, result)
    _print_breakdown(page, result)
    _print_memory(page, result)
    _print_predicted(page, result.predicted)
    _print_check(page, result)


def _print_title(page: Page, result: TransformerResult) -> None:
    s, ranks = result.settings, format_count(result.world_size, "rank")
    page.console.print(Text(f"A dense decoder on {ranks}, measured", "bold"))
    heads = f"{format_count(s.num_heads, 'head')} over {format_count(s.num_kv_heads, 'KV head')}, head_dim {s.head_dim}"
    size = f"{format_count(s.layers, 'layer')}, {heads}, width {s.width}, MLP {s.mlp_size:,}"
    kind = s.dtype
    if s.dtype in ("bfloat16", "float16") and result.machine.device == "CPU":
        kind = f"weights, activations and caches {s.dtype}; products and attention in float32, rounded"
    machine = result.machine
    page.facts(
        [
            ("model", f"{size}; {format_count(result.num_parameters, 'parameter')}"),
            ("type", kind),
            ("tokens", f"{format_count(s.seq_len, 'token')}, batch {s.batch}, random, seed {s.seed}"),
            ("ranks", f"pass-KV, zigzag, kernel {result.kernel}, transport {result.transport}, a thread per rank"),
            ("machine", f"{machine.device}, {format_count(machine.cores, 'core')}, torch {machine.torch}"),
        ]
    )


def _print_times(page: Page, result: TransformerResult) -> None:
    page.section("How fast")
    ranks = format_count(result.world_size, "rank")
    table = new_table("", ">one process", f">{ranks}", ">ideal", ">tokens/s", ">speedup", ">of the ideal")
    for phase in PHASES:
        it = result.phases[phase]
        table.add_row(
            NAMES[phase],
            *map(_median, (it.one_process, it.ranks, it.ideal)),
            _rate(it),
            _spread(it.speedup, "{:.2f}"),
            _spread(it.share_of_ideal, "{:.0%}"),
        )
    page.show(table)
    shares = {NAMES[phase]: result.phases[phase].share_of_ideal_cpu for phase in PHASES}
    cpu = [f"{name} {format_spread(share, '{:.0%}')}" for name, share in shares.items() if share is not None]
    if cpu:
        page.facts([("of the ideal in processor time", ", ".join(cpu))])
    repeats = format_count(result.settings.repeats, "repeat")
    page.prose(
        f"Medians of {repeats}, interleaved, with the lowest and the highest ratio; a rank computes with one thread, "
        "and so does the one process. Ideal: every rank its own tokens and tiles, with no messages; where other "
        "programs run too, compare processor time. A training step is forward, loss, backward and the sum of "
        "gradients over the ranks, without an update. A token is one of every sequence."
    )


def _median(timing: Timing | None) -> str:
    return "" if timing is None else format_seconds(timing.median_s)


def _rate(it: PhaseResult) -> str:
    return f"{it.tokens_per_s:,.0f}" if it.tokens_per_s >= 100 else f"{it.tokens_per_s:.1f}"


def _spread(ratio: Ratio | None, form: str) -> str:
    return "" if ratio is None else format_spread(ratio, form)


def _print_breakdown(page: Page, result: TransformerResult) -> None:
    page.section("Where the time goes")
    table = new_table("", "rank", ">attention", ">MLP, projections", ">communication", ">waiting", ">all")
    for phase in PHASES:
        for rank, part in enumerate(result.phases[phase].by_rank[:TABLE_RANKS]):
            table.add_row(NAMES[phase] if rank == 0 else "", str(rank), *_parts(part), format_seconds(part.total_s))
    page.show(table)
    page.note_hidden(result.world_size)
    page.prose(
        "attention: with merging. MLP, projections: including norms, RoPE, loss, everything that works token by token. "
        "communication: blocked by a message on its way. waiting: for a rank that has not sent or finished yet."
    )


def _parts(part: Breakdown) -> list[str]:
    seconds = (part.attention_s + part.merge_s, part.other_s, part.communication_s, part.waiting_s)
    return [f"{format_seconds(second)} {second / part.total_s:4.0%}" for second in seconds]


def _print_memory(page: Page, result: TransformerResult) -> None:
    page.section("Memory")
    table = new_table(
        "", ">weights", ">KV cache", ">prefill, peak", ">activations kept", ">training, peak", ">process, peak"
    )
    table.add_row("one process", *_bytes(result.one_process_memory))
    for rank, memory in enumerate(result.memory_by_rank[:TABLE_RANKS]):
        table.add_row(f"rank {rank}", *_bytes(memory))
    page.show(table)
    page.note_hidden(result.world_size)
    page.prose(
        "Counted in tensors: the peaks are above the weights, in training with the gradients, and activations are what "
        "the forward pass keeps for the backward pass. The process's own peak, in training, includes all libraries."
    )


def _bytes(memory: ModelMemory) -> list[str]:
    return [
        "" if number is None else f"{number / 1e6:,.1f} MB"
        for number in (
            memory.weights,
            memory.kv_cache,
            memory.prefill_peak,
            memory.activations,
            memory.train_peak,
            memory.process_peak,
        )
    ]


def _print_predicted(page: Page, predicted: tuple[PredictedModel, ...]) -> None:
    page.section("The same shape on GPUs, as ringspan plan predicts it")
    table = new_table("", "devices", "fastest", ">time", ">tokens/s", ">bytes of a device", "")
    for it in predicted:
        table.add_row(
            NAMES[it.phase],
            it.devices.replace("x", "×", 1),
            it.setup,
            format_seconds(it.seconds),
            f"{it.num_tokens / it.seconds:,.0f}",
            f"{it.device_bytes / 1e9:,.3g} GB",
            "" if it.fits else "does not fit",
        )
    page.show(table)
    page.prose(
        "bf16, context parallelism alone, activations kept; vocabulary and update are not counted. docs/plan.md says "
        "how far off such predictions are: work of less than some milliseconds takes several times as long."
    )


def _print_check(page: Page, result: TransformerResult) -> None:
    page.console.print()
    for what, check in result.checks.items():
        error = "not finite" if check.max_error is None else f"{check.max_error:.1e}"
        text = f"{what} {error} off {check.reference}; at most {check.tolerance:.1e} is accepted."
        mark, style = ("✓", "green") if check.is_passed else ("✗ Wrong:", "bold red")
        page.console.print(Text(f"{mark} {text}", style))
    is_right = result.right_tokens == result.num_answered
    text = f"{result.right_tokens} of {result.num_answered} tokens that the ranks choose are those of one process."
    page.console.print(Text(f"{'✓' if is_right else '✗ Wrong:'} {text}", "green" if is_right else "bold red"))


PARTS = ("attention and merging", "MLP and projections", "communication", "waiting")


def build_model_page(result: TransformerResult, command: str) -> str:
    s, machine = result.settings, result.machine
    lead = [
        f"{format_count(s.layers, 'layer')}, {format_count(s.num_heads, 'head')} over "
        f"{format_count(s.num_kv_heads, 'KV head')} of {s.head_dim} elements, MLP {s.mlp_size:,}, "
        f"{format_count(result.num_parameters, 'random parameter')}; {format_count(s.seq_len, 'token')}, "
        f"batch {s.batch}, {s.dtype}.",
        f"Measured on {machine.device}, {format_count(machine.cores, 'core')}, torch {machine.torch}, transport "
        f"{result.transport}, one thread per rank.",
    ]
    title = f"A dense decoder on {format_count(result.world_size, 'rank')}, measured"
    return build_report(title, lead, _sections(result), command)


def _sections(result: TransformerResult) -> Iterator[Section]:
    yield _summary(result)
    yield _times(result)
    for phase in PHASES:
        rows = [
            (f"rank {rank}", (it.attention_s + it.merge_s, it.other_s, it.communication_s, it.waiting_s))
            for rank, it in enumerate(result.phases[phase].by_rank)
        ]
        yield bars(f"parts-{phase}", f"Where the time of a {NAMES[phase]} goes", PARTS, rows, unit="seconds")
    yield from _memory(result)
    yield _predicted(result)


def _summary(result: TransformerResult) -> Section:
    rows = [(what, tell_check(check)) for what, check in result.checks.items()]
    tokens = f"{result.right_tokens} of {result.num_answered}"
    rows.append(("tokens that one process chooses too", tokens))
    speedups = {NAMES[phase]: result.phases[phase].speedup for phase in PHASES}
    rows += [(f"speedup, {name}", format_spread(speedup, "{:.2f}")) for name, speedup in speedups.items()]
    return facts("summary", "The answer", rows)


def _times(result: TransformerResult) -> Section:
    rows = []
    for phase in PHASES:
        it = result.phases[phase]
        for who, timing in (("one process", it.one_process), ("the ranks", it.ranks), ("ideal", it.ideal)):
            if timing is not None:
                rows.append([NAMES[phase], *timing_row(who, timing)])
    caption = (
        f"Medians of {format_count(result.settings.repeats, 'repeat')}, interleaved. Ideal: every rank its own tokens "
        "and tiles, with no messages."
    )
    return table("times", "How fast", ["phase", "what", ">median", ">fastest", ">slowest"], rows, caption)


def _memory(result: TransformerResult) -> Iterator[Section]:
    named = [("one process", result.one_process_memory)]
    named += [(f"rank {rank}", memory) for rank, memory in enumerate(result.memory_by_rank)]
    prefill, train = [(name, _in_prefill(it)) for name, it in named], [(name, _in_training(it)) for name, it in named]
    lead = ["Counted in tensors, at the peak."]
    parts = ("weights", "KV cache", "the rest of the peak")
    yield bars("memory-prefill", "Memory in a prefill", parts, prefill, lead=lead)
    parts = ("weights", "activations", "gradients and the rest of the peak")
    yield bars("memory-train", "Memory in a training step", parts, train, lead=lead)


def _in_prefill(memory: ModelMemory) -> tuple[int, int, int]:
    return memory.weights, memory.kv_cache, max(0, memory.prefill_peak - memory.kv_cache)


def _in_training(memory: ModelMemory) -> tuple[int, int, int]:
    return memory.weights, memory.activations, max(0, memory.train_peak - memory.activations)


def _predicted(result: TransformerResult) -> Section:
    rows = [
        [
            NAMES[it.phase],
            it.devices.replace("x", " × ", 1),
            it.setup,
            (format_seconds(it.seconds), it.seconds),
            (f"{it.num_tokens / it.seconds:,.0f}", it.num_tokens / it.seconds),
            (f"{it.device_bytes / 1e9:,.3g} GB", it.device_bytes),
            "yes" if it.fits else "no",
        ]
        for it in result.predicted
    ]
    columns = ["phase", "devices", "fastest way", ">time", ">tokens per second", ">memory of a device", "fits"]
    caption = "bf16, context parallelism alone, activations kept; vocabulary and update are not counted."
    return table("predicted", "The same shape on GPUs, predicted", columns, rows, caption)
