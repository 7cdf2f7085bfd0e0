"""A plan on the terminal: does it fit, how long, which way, why, and what to type."""

from collections.abc import Iterator

from rich.console import Console
from rich.text import Text

from ringspan.algorithms import find_algorithm
from ringspan.algorithms.choose import KV_RING, Q_RING, RINGS
from ringspan.cli.console import format_count, format_percent, format_seconds
from ringspan.cli.page import Page, new_table
from ringspan.planner.catalog import Cluster, Model
from ringspan.planner.plan import Answer, Cost, Option, Plan, Prediction, Request
from ringspan.planner.plan.questions import MOST_DEVICES
from ringspan.planner.plan.request import Setup, legal_tps

TABLE_OPTIONS = 12  # rows
MOST_TIES = 3  # that are named
PIECE_TOKENS = 8192  # of a prefill in pieces, where one is proposed
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
    "logits": "logits and loss",
    "attention_buffers": "buffers of attention",
    "gathered_weights": "weights gathered, of two layers",
    "resident": "text encoder and VAE, with its work",
    "reserve": "driver, NCCL and allocator, reserved",
}


def print_plan(
    plan: Plan, console: Console, *, explains: bool = False, enough: Answer | None = None, cost: Cost | None = None
) -> None:
    """Print the plan, with formulas if `explains`. `enough`: the fewest devices that hold the model if these do not."""
    page = Page(console)
    _print_title(page, plan.request)
    if plan.best.fits:
        _print_answer(page, plan, cost)
    else:
        _print_no_fit(page, plan, enough)
    _print_memory(page, plan)
    _print_options(page, plan)
    _print_lengths(page, plan)
    if explains:
        _print_explanation(page, plan)
    _print_recipes(page, plan)


def _print_title(page: Page, request: Request) -> None:
    model, cluster = request.model, request.cluster
    page.console.print(Text(f"{model.id}: {request.phase} on {format_count(cluster.num_devices, 'device')}", "bold"))
    page.facts(
        [
            ("devices", describe_devices(cluster)),
            ("software", f"{request.software.name} with {cluster.device.attention.kernel}; {request.software.about}"),
            ("model", _describe_model(request)),
            ("work", _describe_work(request)),
            *(("note", note) for note in (*model.notes, *cluster.device.notes)),
        ]
    )


def describe_devices(cluster: Cluster) -> str:
    """The number of devices and their links."""
    nodes = f"{format_count(cluster.nodes, 'node')} of {cluster.per_node} {cluster.device.id}"
    return f"{nodes}, {cluster.device.near.id} inside, {cluster.device.far.id} between nodes"


def _describe_model(request: Request) -> str:
    model = request.model
    heads = f"{model.num_heads} heads over {model.num_kv_heads}"
    if model.latent is not None:
        heads = f"{model.num_heads} heads, MLA"
    return f"{format_count(model.layers, 'layer')}, {heads}, head_dim {model.head_dim}, {request.weights}"


def _describe_work(request: Request) -> str:
    parts = [format_count(request.tokens, "token")]
    if request.cached_tokens:
        parts.append(f"{request.cached_tokens:,} more cached")
    if request.chunk < request.tokens:
        parts.append(f"{request.chunk:,} at a time")
    video = request.model.video
    if request.has_guidance:
        parts.append("batch 2: with guidance, a step is two forwards")
    elif request.phase == "denoise" and video is not None and request.batch == 1:
        without = "" if video.forwards == 1 else ", without guidance"
        parts.append(f"batch 1: a step is one forward{without}")
    else:
        parts.append(f"batch {request.batch}")
    if request.accumulate > 1:
        parts.append(f"{request.accumulate} passes per step")
    if request.phase in ("prefill", "decode"):
        parts.append(f"KV cache {request.kv_cache}")
    return ", ".join([*parts, f"wire {request.wire}"])


def _print_answer(page: Page, plan: Plan, cost: Cost | None) -> None:
    page.section("The answer")
    best, request = plan.best, plan.request
    mark = "✓ fits barely:" if plan.fits_barely else "✓"
    page.console.print(Text(f"{mark} {describe(best, plan.request)}: {format_range(best)}", "bold green"))
    rows = [(TIMES[request.phase], f"{format_range(best)}; estimate {format_seconds(best.prediction.total_s)}")]
    if plan.video is not None:
        rows += [
            ("whole video", f"about {format_seconds(plan.video.total_s)}"),
            ("denoising", f"{format_seconds(plan.video.denoising_s)}: {plan.video.steps} steps"),
            ("text encoder and VAE", f"{format_seconds(plan.video.fixed_s)}: on one device, not parallel here"),
        ]
    if request.phase != "denoise":
        work = (1 if request.phase == "decode" else request.tokens) * request.batch * request.accumulate
        rows.append(("tokens per second", f"{_rate(work / best.high_s)} to {_rate(work / best.low_s)}"))
    rows += _layers(request.model, best.prediction)
    rows.append(("bottleneck", best.prediction.bottleneck))
    if cost is not None:
        rows.append(("cost", describe_cost(cost, request)))
    page.facts(rows)
    if plan.tied:
        names = list(dict.fromkeys(describe(option, request) for option in plan.tied))
        others = f"; and {len(names) - MOST_TIES} more" if len(names) > MOST_TIES else ""
        page.prose(
            f"Too close to call, a tie for all that is known: {'; '.join(names[:MOST_TIES])}{others}.",
            "A measurement on these devices with `ringspan bench calibrate` would decide.",
        )
    page.prose(*plan.caveats)


def _print_no_fit(page: Page, plan: Plan, enough: Answer | None) -> None:
    """Print that nothing fits and what would fit; times are left out."""
    page.section("The answer")
    best, device = plan.best, plan.request.cluster.device
    text = (
        f"✗ does not fit: {gigabytes(best.memory.total)} of {gigabytes(device.memory_bytes)} "
        f"on every device, by {describe(best, plan.request)}"
    )
    page.console.print(Text(text, "bold red"))
    if enough is None:
        page.prose(f"No number of {device.id} up to {MOST_DEVICES:,} holds it as asked.")
    else:
        cluster, option = enough.request.cluster, enough.option
        page.prose(
            f"The fewest {device.id} that hold it are {cluster.num_devices}: {describe(option, enough.request)}, "
            f"{format_range(option)}, {gigabytes(option.memory.total)} on each."
        )
    page.prose("Of all ways this comes closest.", _way_out(plan))
    page.prose(*plan.caveats)


def describe_cost(cost: Cost, request: Request) -> str:
    """The cost, in the currency of the price."""
    unit = {"prefill": "request", "decode": "token", "train": "training step", "denoise": "denoising step"}
    parts = [f"{cost.per_unit:.4g} per {unit[request.phase]}"]
    if cost.per_video is not None:
        parts.append(f"{cost.per_video:.4g} per video")
    if cost.per_million_tokens is not None:
        parts.append(f"{cost.per_million_tokens:.4g} per million tokens")
    return ", ".join(parts)


def _layers(model: Model, prediction: Prediction) -> Iterator[tuple[str, str]]:
    """One layer of each kind, forward."""
    rest_s = prediction.layer_s - prediction.attention_s
    sliding = model.layers - model.full_layers
    kinds = [(model.full_layers, "full layers", prediction.attention_s)] if model.full_layers else []
    kinds += [(sliding, "sliding layers", prediction.window_attention_s)] if sliding else []
    for count, name, attention_s in kinds:
        whole, attention, rest = map(format_seconds, (attention_s + rest_s, attention_s, rest_s))
        what = f"a layer of {model.layers}" if not sliding else f"each of {count} {name}"
        yield f"{what}, forward", f"{whole}: attention {attention}, the rest {rest}"


def _way_out(plan: Plan) -> str:
    """Options that were not used and would reduce one of the large items."""
    request, memory = plan.request, plan.best.memory
    sizes = memory._asdict()
    largest = max(sizes, key=lambda name: sizes[name])
    large = {largest, *(name for name in sizes if sizes[name] > LARGE_SHARE * request.cluster.device.memory_bytes)}
    is_train, tps = request.phase == "train", legal_tps(request.model, request.cluster)
    smaller = {"bf16": "--weights fp8 or int4", "fp8": "--weights int4", "int8": "--weights int4"}
    ways = [
        (f"--tp {tps[-1]}", ("weights", "optimizer", "gathered_weights"), request.tp not in (None, tps[-1])),
        (smaller.get(request.weights, ""), ("weights",), not is_train and request.weights in smaller),
        ("--fsdp", ("weights", "optimizer"), request.phase in ("train", "denoise") and not request.shards_weights),
        ("--recompute", ("activations",), is_train and not request.recomputes),
        ("--kv-cache fp8", ("kv_cache",), request.kv_cache != "fp8"),
        (
            "--chunk 8K",
            ("activations", "attention_buffers"),
            request.phase == "prefill" and request.chunk == request.tokens > PIECE_TOKENS,
        ),
        ("a smaller --batch", ("kv_cache", "activations", "attention_buffers"), request.batch > 1),
        ("fewer --tokens", ("kv_cache", "activations", "attention_buffers", "logits"), True),
        ("more devices, or such with more memory", memory._fields, True),
    ]
    helpful = [way for way, items, is_left in ways if is_left and large.intersection(items)]
    return f"Most is taken by the {ITEMS[largest]}. Use {'; or '.join(helpful)}."


def describe(option: Option, request: Request) -> str:
    """The setup in words."""
    setup = option.setup
    parts = [str(setup)]
    if setup.cp > 1:
        parts.append(f"{setup.layout} over {setup.cp} ranks")
        if setup.tp > 1:
            parts.append(f"tensor parallel {setup.tp}")
    elif setup.tp > 1:
        parts = [f"tensor parallel {setup.tp} only"]
    if setup.copies > 1:
        parts.append(describe_copies(setup, request))
    return ", ".join(parts)


def describe_copies(setup: Setup, request: Request) -> str:
    """The degrees of guidance and sequence, as video libraries call them; else the number of parts of a batch."""
    if request.has_guidance:
        return f"cfg {setup.copies} × cp {setup.cp}"
    return f"{setup.copies} parts of the batch"


def _rate(per_second: float) -> str:
    return f"{per_second:,.0f}" if per_second >= 100 else f"{per_second:.3g}"


def format_range(option: Option) -> str:
    """The range that holds 80 % of published runs."""
    return f"{format_seconds(option.low_s)} to {format_seconds(option.high_s)}"


def _print_memory(page: Page, plan: Plan) -> None:
    page.section("Memory of a device")
    table = new_table("", ">bytes", ">of the device")
    room = plan.request.cluster.device.memory_bytes
    for name, value in zip(plan.best.memory._fields, plan.best.memory, strict=True):
        if value:
            table.add_row(ITEMS[name], gigabytes(value), format_percent(value / room))
    total = plan.best.memory.total
    table.add_row("in all", gigabytes(total), format_percent(total / room), style="bold")
    page.show(table)
    verdict = "✓ fits barely" if plan.fits_barely else "✓ fits" if plan.best.fits else "✗ does not fit"
    page.prose(f"{verdict} into {gigabytes(room)}.")
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
            str(setup) + (f" ({_copies(setup, plan.request)})" if setup.copies > 1 else ""),
            setup.layout if setup.cp > 1 else "",
            str(setup.tp),
            str(setup.cp),
            format_seconds(it.total_s),
            format_seconds(it.attention_s),
            format_seconds(it.attention_s - it.attention_compute_s),
            format_seconds(it.layer_s - it.attention_s),
            gigabytes(option.memory.total),
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


def _copies(setup: Setup, request: Request) -> str:
    return f"cfg {setup.copies}" if request.has_guidance else f"{setup.copies} copies"


def _print_lengths(page: Page, plan: Plan) -> None:
    if plan.break_even_tokens is None and plan.crossing is None:
        return
    page.section("Where another way wins")
    setup = plan.best.setup
    alone = "one device" if setup.tp == 1 else f"one group of {setup.tp} devices"
    if plan.break_even_tokens is not None:
        page.prose(
            f"From about {plan.break_even_tokens:,} tokens on this way is clearly faster than {alone}; with fewer the "
            "two are too close to call, or that is faster."
        )
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


def gigabytes(number: float) -> str:
    """Bytes for readers."""
    return f"{number / 1e9:,.1f} GB" if number >= 1e8 else f"{number / 1e6:,.1f} MB"
