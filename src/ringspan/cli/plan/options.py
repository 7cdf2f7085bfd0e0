"""The options of `ringspan plan`, in the groups that its help shows."""

from collections.abc import Callable
from typing import Any

import click

from ringspan.cli.files import OutputFile
from ringspan.cli.values import parse_tokens, parsed_by

Decorator = Callable[[Callable[..., Any]], Callable[..., Any]]


def _group(*options: Decorator) -> Decorator:
    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


work_options = _group(
    click.option(
        "--model", metavar="NAME", help="Of the catalogue, a path of a config.json, or dense:layers=...,heads=..."
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
    click.option("--frames", type=click.IntRange(1), help="Of a video, instead of --tokens."),
    click.option("--size", metavar="HEIGHTxWIDTH", help="Of a video, in pixels."),
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
    click.option("--software", metavar="NAME", default="ringspan", help="Whose implementation is priced."),
    click.option(
        "--kernel", type=click.Choice(["fa2", "fa3"]), help="Attention kernel.  [default: that of the software]"
    ),
    click.option("--price", metavar="DEVICE=PRICE", help="Of a device and hour, such as h100=2.5."),
)

split_options = _group(
    click.option("--tp", type=click.IntRange(1), help="Tensor parallelism.  [default: all that fit in a node]"),
    click.option("--wire", type=click.Choice(["bf16", "int8", "fp8"]), default="bf16", help="K and V on their way."),
    click.option("--weights", type=click.Choice(["bf16", "fp8", "int8", "int4"]), default="bf16", help="Of the model."),
    click.option("--kv-cache", type=click.Choice(["bf16", "fp8"]), default="bf16", help="K and V in the cache."),
    click.option("--fsdp", is_flag=True, help="In training and for videos: spread weights over all ranks."),
    click.option("--resident", is_flag=True, help="For videos: text encoder and VAE stay on the devices."),
    click.option(
        "--recompute/--no-recompute", default=True, help="In training: activations anew in the backward pass."
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
        help="With --check: tables with the same names and columns, none of which was fitted to.",
    ),
    click.option("--json", "as_json", is_flag=True, help="Print everything as one JSON object."),
)
