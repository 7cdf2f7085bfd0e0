"""The options of `ringspan plan`, in the groups that its help shows, and what is asked by those that were typed."""

import math
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ringspan.cli.files import OutputFile
from ringspan.cli.values import parse_sides, parse_tokens, parsed_by
from ringspan.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from ringspan.planner.catalog import Cluster, Model
    from ringspan.planner.plan import Request


Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _group(*options: Decorator) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


work_options = _group(
    click.option(
        "--model",
        metavar="NAME",
        help="A name of the catalogue, the path of a config.json, or dense:layers=...,heads=...",
    ),
    click.option(
        "--tokens",
        callback=parsed_by(parse_tokens),
        metavar="N",
        help="New tokens of a sequence; in decode, the length of its cache. 1M is 2^20.",
    ),
    click.option("--cached", callback=parsed_by(parse_tokens), metavar="P", help="In prefill: tokens cached already."),
    click.option(
        "--chunk", callback=parsed_by(parse_tokens), metavar="N", help="In prefill: compute N tokens at a time."
    ),
    click.option("--frames", type=click.IntRange(1), help="Frames of a video, instead of --tokens."),
    click.option("--size", metavar="HEIGHTxWIDTH", help="Size of a video in pixels."),
    click.option(
        "--batch", type=click.IntRange(1), help="Sequences, or forwards of a video.  [default: 1; 2 with guidance]"
    ),
    click.option(
        "--phase", type=click.Choice(["prefill", "decode", "train", "denoise"]), help="[default: by the model]"
    ),
)

device_options = _group(
    click.option("--devices", metavar="[NODESx]COUNTxDEVICE", help="Such as 8xh100, 16x8xh100 or 2xFILE.toml."),
    click.option("--link", metavar="LINK", help="Inside a node, such as pcie4-x16-p2p.  [default: by the device]"),
    click.option("--network", metavar="LINK", help="Between nodes, such as infiniband-hdr.  [default: by the device]"),
    click.option("--software", metavar="NAME", default="ringspan", help="Library whose implementation is priced."),
    click.option(
        "--kernel", type=click.Choice(["fa2", "fa3", "fa4"]), help="Attention kernel.  [default: that of the software]"
    ),
    click.option(
        "--price",
        metavar="DEVICE=PRICE[,...]",
        help="Price of a device per hour, such as h100=2.5; with --sweep one for each kind of device.",
    ),
)

split_options = _group(
    click.option("--tp", type=click.IntRange(1), help="Tensor parallelism.  [default: all that fit in a node]"),
    click.option(
        "--wire", type=click.Choice(["bf16", "int8", "fp8"]), default="bf16", help="Type of K and V in messages."
    ),
    click.option(
        "--weights",
        type=click.Choice(["bf16", "fp8", "int8", "int4"]),
        default="bf16",
        help="Type of the model's weights.",
    ),
    click.option(
        "--kv-cache", type=click.Choice(["bf16", "fp8"]), default="bf16", help="Type of K and V in the cache."
    ),
    click.option("--fsdp", is_flag=True, help="In training and for videos: spread weights over all ranks."),
    click.option("--resident", is_flag=True, help="For videos: text encoder and VAE stay on the devices."),
    click.option(
        "--recompute/--no-recompute", default=True, help="In training: recompute activations in the backward pass."
    ),
    click.option("--accumulate", type=click.IntRange(1), default=1, help="In training: passes of one step."),
    click.option("--pp", type=click.IntRange(1), default=1, hidden=True),
    click.option("--ep", type=click.IntRange(1), default=1, hidden=True),
    click.option("--offload", is_flag=True, hidden=True),
)

question_options = _group(
    click.option("--target-ttft", metavar="TIME", help="The fewest devices that take no longer, such as 10s or 800ms."),
    click.option("--max-context", is_flag=True, help="The longest sequence that fits on the devices."),
    click.option("--max-batch", is_flag=True, help="The largest batch that fits on the devices."),
    click.option(
        "--sweep",
        metavar="tokens=N,N,... devices=D,D,...",
        help="A table of the best way for every length and cluster; with --plot, a diagram.",
    ),
)

output_options = _group(
    click.option("--explain", is_flag=True, help="Show the formulas with the numbers put in."),
    click.option("--trace", type=OutputFile(), help="Write the timeline, for ui.perfetto.dev."),
    click.option("--plot", type=OutputFile(".svg"), help="Write time against length and devices, SVG."),
    click.option("--html", type=OutputFile(".html"), help="Write the plan as an interactive page."),
    click.option("--check", is_flag=True, help="Hold predictions against published measurements instead."),
    click.option(
        "--rows",
        type=click.Path(exists=True, file_okay=False),
        help="With --check: predict other tables with the same names and columns.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object."),
)


SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "": 1.0}


def fill_in(options: dict[str, Any]) -> None:
    """What a question implies: the first of what is swept; for the fewest devices no number of them."""
    swept = split_sweep((options["sweep"], *options["swept"])) if options["sweep"] is not None else {}
    if options["devices"] is None and "devices" in swept:
        options["devices"] = swept["devices"][0]
    if options["tokens"] is None and "tokens" in swept:
        options["tokens"] = _swept_tokens(swept["tokens"][0])
    if options["target_ttft"] and options["devices"] and not re.match("[0-9]+x", options["devices"]):
        options["devices"] = f"1x{options['devices']}"


def request_of(options: dict[str, Any]) -> "Request":
    from ringspan.planner.catalog import load_model
    from ringspan.planner.plan import make_request

    model = load_model(options["model"])
    if options["max_context"] and options["tokens"] is None and model.video is None:
        options = {**options, "tokens": 1}  # the answer does not depend on it
    return make_request(
        model=model,
        devices=options["devices"],
        tokens=options["tokens"],
        size=_size(model, options),
        phase=options["phase"],
        cached_tokens=options["cached"] or 0,
        chunk_tokens=options["chunk"],
        batch=options["batch"],
        tp=options["tp"],
        wire=options["wire"],
        weights=options["weights"],
        kv_cache=options["kv_cache"],
        recomputes=options["recompute"],
        shards_weights=options["fsdp"],
        accumulate=options["accumulate"],
        is_resident=options["resident"],
        software=options["software"],
        kernel=options["kernel"],
        network=options["network"],
        link=options["link"],
        pipeline_parallel=options["pp"],
        expert_parallel=options["ep"],
        offload=options["offload"],
    )


def _size(model: "Model", options: dict[str, Any]) -> tuple[int, int, int] | None:
    """Frames, height and width of a video; None if the tokens were given."""
    given = [name for name in ("frames", "size") if options[name] is not None]
    if model.video is None:
        if given:
            raise UnsupportedError(f"--{given[0]}: {model.id} is not a video model; give --tokens")
        if options["tokens"] is None:
            raise ShapeError("--tokens is missing; give the length of the sequence, such as --tokens 128K")
        return None
    if options["tokens"] is not None:
        if given:
            raise UnsupportedError("--tokens together with --frames or --size; give one of them")
        return None
    usual = model.video.usual
    if usual is None and len(given) < 2:
        raise ShapeError(f"--frames and --size are missing, and no usual size of {model.id} is known")
    frames, *sides = usual or (0, 0, 0)
    height, width = _sides(options["size"]) if options["size"] else sides
    return options["frames"] or frames, height, width


def _sides(text: str) -> tuple[int, int]:
    try:
        return parse_sides(text)
    except ShapeError as error:
        raise ShapeError(f"--size {text}: {error}") from error


def parse_time(option: str, text: str) -> float:
    """Seconds of 10s, 800ms, 2min or 1h."""
    found = re.fullmatch(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*(ms|s|min|h|)", text.strip())
    seconds = float(found[1]) * SECONDS[found[2]] if found else 0.0
    if seconds <= 0:
        raise ShapeError(f"{option} {text!r} is not a time; use 10s, 800ms or 2min")
    return seconds


def parse_prices(text: str, devices: list[str]) -> dict[str, float]:
    """Parse DEVICE=PRICE,...: a price for each of the planned devices, and for no others."""
    prices = {}
    for word in text.split(","):
        name, _, amount = word.partition("=")
        try:
            price = float(amount)
        except ValueError:
            price = math.nan
        if not 0 < price < 1e9:
            raise ShapeError(f"--price {text!r}: {word!r} is not DEVICE=PRICE, per device and hour, such as h100=2.5")
        device = _device_id(name, text, devices)
        if device not in devices:
            raise ShapeError(
                f"--price {text!r} is for {name}, and the devices are {', '.join(devices)}; use {devices[0]}={amount}"
            )
        prices[device] = price
    missing = [device for device in devices if device not in prices]
    if missing:
        raise ShapeError(f"--price {text!r} has no price of {missing[0]}; add it: {text},{missing[0]}=PRICE")
    return prices


def _device_id(name: str, text: str, planned: list[str]) -> str:
    """The id of a planned device, or of the one that a name of the catalogue stands for."""
    from ringspan.planner.catalog import load_device

    if name in planned:
        return name
    try:
        return load_device(name).id
    except UnsupportedError:
        raise ShapeError(f"--price {text!r}: {name!r} is not one of the devices, {', '.join(planned)}") from None


def split_sweep(words: tuple[str, ...]) -> dict[str, list[str]]:
    """The values of tokens=N,N,... and devices=D,D,..., each given at most once."""
    swept: dict[str, list[str]] = {}
    for word in words:
        key, _, values = word.partition("=")
        given = values.split(",")
        if key not in ("tokens", "devices") or not all(given):
            raise ShapeError(f"--sweep {word!r}: use tokens=N,N,... and devices=D,D,..., with values")
        if key in swept:
            raise ShapeError(f"--sweep {word!r}: {key} are given twice; write them as one list, {key}=A,B,...")
        swept[key] = list(dict.fromkeys(given))
    return swept


def parse_sweep(options: dict[str, Any], request: "Request") -> tuple[list[int], list["Cluster"]]:
    """Lengths and clusters of a sweep; a dimension that is not swept has the value that was given."""
    from ringspan.planner.plan import parse_cluster

    swept = split_sweep((options["sweep"], *options["swept"]))
    lengths, clusters = [request.tokens], [request.cluster]
    if "tokens" in swept:
        lengths = [_swept_tokens(value) for value in swept["tokens"]]
    if "devices" in swept:
        clusters = [
            parse_cluster(value, request.software, options["kernel"], options["network"], options["link"])
            for value in swept["devices"]
        ]
    return lengths, clusters


def _swept_tokens(text: str) -> int:
    try:
        return parse_tokens(text)
    except ShapeError as error:
        raise ShapeError(f"--sweep tokens={text}: {error}") from error
