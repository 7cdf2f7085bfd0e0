"""The page of a plan: every way ranked, its memory and time as pictures, and the formulas behind the best one."""

from collections.abc import Iterator

from ringspan.errors import RingspanError
from ringspan.page.gantt import describe_timeline
from ringspan.page.plan_curves import curves_by_devices, curves_by_length
from ringspan.page.plan_timeline import setup_timeline
from ringspan.page.report import Section, bars, build_report, chart, curves, facts, gantt, table, text
from ringspan.page.units import format_bytes, format_seconds, format_tokens
from ringspan.planner.plan import Option, Plan, Setup

MOST_TIMELINES = 3
MOST_BARS = 12
MEMORY_PARTS = (
    "weights",
    "gradients and optimizer",
    "KV cache",
    "activations",
    "logits",
    "attention buffers",
    "gathered weights",
    "text encoder and VAE",
    "reserve",
)
TOTALS = {
    "prefill": "Time to the first token",
    "decode": "Time per token",
    "train": "Time per step",
    "denoise": "Time per denoising step",
}


def build_plan_page(plan: Plan, command: str = "") -> str:
    """The plan as one HTML file."""
    request, cluster = plan.request, plan.request.cluster
    lead = [
        f"{request.model.id}, {request.phase}, {format_tokens(request.tokens)} tokens on {cluster.num_devices} × "
        f"{cluster.device.id}.",
        "Ranges and bands are the uncertainty: 80 % of published measurements of the same kind lie within them.",
    ]
    return build_report(f"Plan: {request.model.id} on {cluster.num_devices} devices", lead, _sections(plan), command)


def _sections(plan: Plan) -> Iterator[Section]:
    yield _summary(plan)
    yield _ranking(plan)
    yield from _timelines(plan)
    yield _memory(plan)
    yield _curves(plan)
    lines = [(line.what, line.formula, line.numbers) for line in plan.explanation]
    yield table("formulas", "Where the figures come from", ["figure", "formula", "with numbers"], lines)
    if plan.illegal:
        rows = [(way.what, way.reason) for way in plan.illegal]
        yield table("impossible", "What is not possible", ["way", "reason"], rows)
    if plan.caveats:
        yield text("caveats", "Where this plan is less sure", plan.caveats)


def _summary(plan: Plan) -> Section:
    best = plan.best
    longest = "no length fits" if plan.longest_tokens is None else f"{plan.longest_tokens:,} tokens"
    rows = [
        ("Best way", _name(best.setup)),
        (TOTALS[plan.request.phase], _range(best)),
        ("Memory of a device", f"{format_bytes(best.memory.total)}{'' if best.fits else ', does not fit'}"),
        ("Bottleneck", best.prediction.bottleneck),
        ("Longest sequence that fits", longest),
    ]
    if plan.break_even_tokens is not None:
        rows.append(("Faster than without context parallelism from", f"{plan.break_even_tokens:,} tokens"))
    return facts("summary", "The answer", rows)


def _ranking(plan: Plan) -> Section:
    rows = []
    for place, option in enumerate(plan.options, 1):
        seconds = option.prediction.total_s
        rows.append(
            [
                (str(place), place),
                str(option.setup),
                (_range(option), seconds),
                (format_bytes(option.memory.total), option.memory.total),
                option.setup.layout,
                (str(option.setup.tp), option.setup.tp),
                (str(option.setup.cp), option.setup.cp),
                (str(option.setup.copies), option.setup.copies),
                "yes" if option.fits else "no",
                option.prediction.bottleneck,
            ]
        )
    columns = [">place", "algorithm", ">time", ">memory", "layout", ">tp", ">cp", ">copies", "fits", "bottleneck"]
    caption = (
        "tp: devices that share each layer (tensor parallel). cp: devices that share a sequence (context parallel). "
        "copies: groups with sequences of their own. Choose a heading to sort by it."
    )
    return table("ranking", "Every way, ranked", columns, rows, caption)


def _timelines(plan: Plan) -> Iterator[Section]:
    """The first ways of different algorithms whose schedule can be drawn."""
    charts: list[Section] = []
    seen: set[tuple[str, str]] = set()
    for option in plan.options:
        name = (option.setup.algorithm, option.setup.layout)
        if name in seen or option.setup.cp == 1 or len(charts) == MOST_TIMELINES:
            continue
        seen.add(name)
        try:
            timeline = setup_timeline(plan.request, option.setup)
        except RingspanError:
            continue  # too many ranks to draw, or a phase without a schedule of its own
        charts.append(describe_timeline(timeline, _name(option.setup)))
    if charts:
        longest = max(one["total_s"] for one in charts)
        for one in charts:
            one["total_s"] = longest  # one scale, so that lengths compare
        lead = ["The attention of one layer, forward, on the real schedule. All timelines have one scale."]
        yield gantt("time", "One layer over time", charts, lead)


def _memory(plan: Plan) -> Section:
    rows = [(_name(option.setup), list(option.memory)) for option in plan.options[:MOST_BARS]]
    room = plan.request.cluster.device.memory_bytes
    limit = (f"memory of a device, {format_bytes(room)}", float(room))
    return bars("memory", "Memory of one device", MEMORY_PARTS, rows, limit=limit)


def _curves(plan: Plan) -> Section:
    request, best = plan.request, plan.best
    band = (best.low_s / best.prediction.total_s, best.high_s / best.prediction.total_s)
    charts = [chart(TOTALS[request.phase], "tokens", curves_by_length(plan), mark=request.tokens, band=band)]
    by_devices = curves_by_devices(plan)
    if by_devices:
        mark = request.cluster.num_devices
        title = f"{TOTALS[request.phase]}, {format_tokens(request.tokens)} tokens"
        charts.append(chart(title, "devices", by_devices, mark=mark, band=band))
    return curves(
        "curves",
        "Other lengths, other numbers of devices",
        charts,
        ["Each line is the best way with one algorithm; its band is the uncertainty. The dashed line marks this plan."],
    )


def _name(setup: Setup) -> str:
    degrees = [f"tp {setup.tp}"] if setup.tp > 1 else []
    degrees += [f"cp {setup.cp}"] if setup.cp > 1 else []
    degrees += [f"{setup.copies} copies"] if setup.copies > 1 else []
    return ", ".join([str(setup), *([setup.layout] if setup.cp > 1 else []), *degrees])


def _range(option: Option) -> str:
    return f"{format_seconds(option.low_s)} to {format_seconds(option.high_s)}"
