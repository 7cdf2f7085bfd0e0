"""`ringspan bench model --html`: a measured decoder as a page."""

from collections.abc import Iterator

from ringspan.bench.transformer_result import PHASES, ModelMemory, TransformerResult
from ringspan.cli.bench.attention_page import tell_check, timing_row
from ringspan.cli.bench.attention_text import format_spread
from ringspan.cli.bench.model_text import NAMES
from ringspan.cli.formats import format_count, format_seconds
from ringspan.page.report import Section, bars, build_report, facts, table

PARTS = ("attention and merging", "MLP and projections", "communication", "waiting")


def build_model_page(result: TransformerResult, command: str) -> str:
    """One HTML file."""
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
