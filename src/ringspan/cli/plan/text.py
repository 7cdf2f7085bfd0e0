"""A plan on the terminal: does it fit, how long, which way, why, and what to type."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ringspan.algorithms import find_algorithm
from ringspan.algorithms.choose import KV_RING, Q_RING, RINGS
from ringspan.cli.formats import format_count, format_percent, format_seconds
from ringspan.cli.page import Page
from ringspan.cli.tables import new_table
from ringspan.planner.catalog import Model
from ringspan.planner.plan import Option, Plan, Prediction, Request
from ringspan.planner.plan.request import legal_tps

TABLE_OPTIONS = 12  # rows
LARGE_SHARE = 0.25  # of a device's memory: what takes more is worth making smaller
TIMES = {
    "prefill": "time to first token",
    "decode": "time per token",
    "train": "time per training step",
    "denoise": "time per denoising step",
}
ITEMS = {
    "weights": "weights",
    "optimizer": "gradients, float32 copies, moments",
    "kv_cache": "KV cache",
    "activations": "activations",
    "attention_buffers": "buffers of attention",
    "gathered_weights": "weights gathered, of two layers",
}


def print_plan(plan: Plan, console: Console, *, explains: bool = False) -> None:
    """Print everything; the formulas only if asked for."""
    page = Page(console)
    _print_title(page, plan.request)
    _print_answer(page, plan)
    _print_memory(page, plan)
    _print_options(page, plan)
    _print_lengths(page, plan)
    if explains:
        _print_explanation(page, plan)
    _print_recipes(page, plan)


def _print_title(page: Page, request: Request) -> None:
    model, cluster = request.model, request.cluster
    page.console.print(Text(f"{model.id}: {request.phase} on {format_count(cluster.num_devices, 'device')}", "bold"))
    nodes = f"{format_count(cluster.nodes, 'node')} of {cluster.per_node} {cluster.device.id}"
    heads = (
        f"{model.num_heads} heads over {model.num_kv_heads}"
        if model.latent is None
        else f"{model.num_heads} heads, MLA"
    )
    cached = f", {request.cached_tokens:,} more cached" if request.cached_tokens else ""
    page.facts(
        [
            ("devices", f"{nodes}, {cluster.device.near.id} inside, {cluster.device.far.id} between nodes"),
            ("model", f"{format_count(model.layers, 'layer')}, {heads}, head_dim {model.head_dim}, {request.weights}"),
            ("work", f"{format_count(request.tokens, 'token')}{cached}, batch {request.batch}, wire {request.wire}"),
            *(("note", note) for note in (*model.notes, *cluster.device.notes)),
        ]
    )


def _print_answer(page: Page, plan: Plan) -> None:
    page.section("The answer")
    best = plan.best
    prediction = best.prediction
    style = "bold green" if best.fits else "bold red"
    page.console.print(Text(f"{describe(best)}: {_range(plan, prediction.total_s)}", style))
    rows = [(TIMES[plan.request.phase], _range(plan, prediction.total_s))]
    if plan.request.phase != "denoise":
        per_call = 1 if plan.request.phase == "decode" else plan.request.tokens
        rate = per_call * plan.request.batch / prediction.total_s
        rows.append(("tokens per second", f"{_rate(rate / plan.high)} to {_rate(rate / plan.low)}"))
    rows += _layers(plan.request.model, prediction)
    rows.append(("bottleneck", prediction.bottleneck))
    page.facts(rows)
    if not best.fits:
        page.prose("Nothing fits into memory; this comes closest.", _way_out(plan))
    page.prose(*plan.caveats)


def _layers(model: Model, prediction: Prediction) -> Iterator[tuple[str, str]]:
    """One of each kind, forward."""
    rest_s = prediction.layer_s - prediction.attention_s
    sliding = model.layers - model.full_layers
    kinds = [(model.full_layers, "full layers", prediction.attention_s)] if model.full_layers else []
    kinds += [(sliding, "sliding layers", prediction.window_attention_s)] if sliding else []
    for count, name, attention_s in kinds:
        whole, attention, rest = map(format_seconds, (attention_s + rest_s, attention_s, rest_s))
        what = f"a layer of {model.layers}" if not sliding else f"each of {count} {name}"
        yield f"{what}, forward", f"{whole}: attention {attention}, the rest {rest}"


def _way_out(plan: Plan) -> str:
    """What was not tried yet and makes one of the large items smaller."""
    request, memory = plan.request, plan.best.memory
    sizes = memory._asdict()
    largest = max(sizes, key=lambda name: sizes[name])
    large = {largest, *(name for name in sizes if sizes[name] > LARGE_SHARE * request.cluster.device.memory_bytes)}
    is_train, tps = request.phase == "train", legal_tps(request.model, request.cluster)
    smaller = {"bf16": "--weights fp8 or int4", "fp8": "--weights int4", "int8": "--weights int4"}
    ways = [
        (f"--tp {tps[-1]}", ("weights", "optimizer", "gathered_weights"), request.tp not in (None, tps[-1])),
        (smaller.get(request.weights, ""), ("weights",), not is_train and request.weights in smaller),
        ("--fsdp", ("weights", "optimizer"), is_train and not request.shards_weights),
        ("--recompute", ("activations",), is_train and not request.recomputes),
        ("a smaller --batch", ("kv_cache", "activations", "attention_buffers"), request.batch > 1),
        ("fewer --tokens", ("kv_cache", "activations", "attention_buffers"), True),
        ("more devices, or such with more memory", memory._fields, True),
    ]
    helpful = [way for way, items, is_left in ways if is_left and large.intersection(items)]
    return f"Most is taken by the {ITEMS[largest]}. Use {'; or '.join(helpful)}."


def describe(option: Option) -> str:
    """The way in words."""
    setup = option.setup
    parts = [str(setup)]
    if setup.cp > 1:
        parts.append(f"{setup.layout} over {setup.cp} ranks")
        if setup.tp > 1:
            parts.append(f"tensor parallel {setup.tp}")
    elif setup.tp > 1:
        parts = [f"tensor parallel {setup.tp} only"]
    if setup.copies > 1:
        parts.append(f"{setup.copies} parts of the batch")
    return ", ".join(parts)


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def _range(plan: Plan, seconds: float) -> str:
    low, high = seconds * plan.low, seconds * plan.high
    return f"{format_seconds(low)} to {format_seconds(high)}"


def _print_memory(page: Page, plan: Plan) -> None:
    page.section("Memory of a device")
    table = new_table("", ">bytes", ">of the device")
    room = plan.request.cluster.device.memory_bytes
    for name, value in zip(plan.best.memory._fields, plan.best.memory, strict=True):
        if value:
            table.add_row(ITEMS[name], _gigabytes(value), format_percent(value / room))
    total = plan.best.memory.total
    verdict = "✓ fits" if plan.best.fits else "✗ does not fit"
    table.add_row("in all", _gigabytes(total), format_percent(total / room), style="bold")
    page.show(table)
    page.prose(f"{verdict} into {_gigabytes(room)}; what a driver and an allocator keep for themselves is not counted.")
    if plan.longest_tokens is not None:
        most = f"The longest sequence that fits this way is {plan.longest_tokens:,} tokens"
        limit = plan.request.model.max_tokens
        page.prose(f"{most}; the model was made for {limit:,}." if limit else f"{most}.")


def _print_options(page: Page, plan: Plan) -> None:
    page.section("All ways, ranked")
    model = plan.request.model
    table = new_table("", "layout", ">tp", ">ranks", ">time", ">attention", ">not hidden", ">rest", ">memory", "fits")
    for option in plan.options[:TABLE_OPTIONS]:
        setup, it = option.setup, option.prediction
        table.add_row(
            str(setup) + (f" ({setup.copies} copies)" if setup.copies > 1 else ""),
            setup.layout if setup.cp > 1 else "",
            str(setup.tp),
            str(setup.cp),
            format_seconds(it.total_s),
            format_seconds(it.attention_s),
            format_seconds(it.attention_s - it.attention_compute_s),
            format_seconds(it.layer_s - it.attention_s),
            _gigabytes(option.memory.total),
            "✓" if option.fits else "✗",
        )
    page.show(table)
    if len(plan.options) > TABLE_OPTIONS:
        page.show(Text(f"(and {len(plan.options) - TABLE_OPTIONS} more; --json has them all)", "dim"))
    columns = "attention, what of it messages and waiting take, and the rest"
    kind = "layer" if model.window is None else "full layer" if model.full_layers else "sliding layer"
    page.prose(f"time is of the whole; {columns} are of one {kind}, forward.")
    for what, reason in plan.illegal[:TABLE_OPTIONS]:
        page.prose(f"Not possible: {what}. {reason.replace('_', '-')}.")
    hidden = len(plan.illegal) - TABLE_OPTIONS
    if hidden > 0:
        page.show(Text(f"(and {hidden} more that are not possible; --json has them all)", "dim"))


def _print_lengths(page: Page, plan: Plan) -> None:
    if plan.break_even_tokens is None and plan.crossing is None:
        return
    page.section("Where another way wins")
    setup = plan.best.setup
    alone = "one device" if setup.tp == 1 else f"one group of {setup.tp} devices"
    if plan.break_even_tokens is not None:
        if plan.break_even_tokens == 1:
            page.prose(f"This way beats {alone} at any length.")
        else:
            page.prose(f"Below about {plan.break_even_tokens:,} tokens {alone} is faster.")
    if plan.crossing is not None:
        keys, new, always = plan.crossing
        if new is None:
            winner, other = sorted(RINGS, key=lambda name: name != always)
            page.prose(
                f"For {keys:,} keys {_label(winner)} is no slower than {_label(other)}, "
                "however many of them are cached."
            )
        else:
            page.prose(
                f"Of {keys:,} keys, {_label(Q_RING)} beats {_label(KV_RING)} as long as no more than about {new:,} "
                f"({format_percent(new / keys)}) are new."
            )


def _label(algorithm: str) -> str:
    return find_algorithm(algorithm).label


def _print_explanation(page: Page, plan: Plan) -> None:
    page.section("The formulas, with the numbers put in")
    for what, formula, numbers in plan.explanation:
        page.facts([(what, formula), ("", numbers)])


def _print_recipes(page: Page, plan: Plan) -> None:
    if not plan.recipes:
        return
    page.section("Ready settings")
    for library, settings, caveat in plan.recipes:
        page.facts([(library, settings or f"✗ {caveat}")])
        if settings and caveat:
            page.facts([("", f"({caveat})")])


def _gigabytes(number: float) -> str:
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
