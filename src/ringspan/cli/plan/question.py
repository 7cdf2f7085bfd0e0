"""From what was typed to a request of the library: sizes, times, prices and sweeps."""

import math
import re
from typing import TYPE_CHECKING, Any

from ringspan.cli.values import parse_sides, parse_tokens
from ringspan.errors import ShapeError, UnsupportedError

if TYPE_CHECKING:
    from ringspan.planner.catalog import Cluster, Model
    from ringspan.planner.plan import Request

SECONDS = {"ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "": 1.0}


def request_of(options: dict[str, Any]) -> "Request":
    """What the options ask."""
    from ringspan.planner.catalog import load_model
    from ringspan.planner.plan import make_request

    model = load_model(options["model"])
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


def parse_price(text: str, device: str) -> float:
    """The price in DEVICE=PRICE; the device must be the planned one."""
    from ringspan.planner.catalog import load_device

    name, _, amount = text.partition("=")
    try:
        price = float(amount)
    except ValueError:
        price = math.nan
    if not 0 < price < 1e9:
        raise ShapeError(f"--price {text!r} is not a price; use DEVICE=PRICE, per device and hour, such as h100=2.5")
    if name != device and load_device(name).id != device:
        raise ShapeError(f"--price {text!r} is for {name}, and the devices are {device}; use {device}={amount}")
    return price


def parse_sweep(
    words: tuple[str, ...], request: "Request", network: str | None = None, link: str | None = None
) -> tuple[list[int], list["Cluster"]]:
    """Lengths and clusters of a sweep; a dimension that is not swept has the value that was given."""
    from ringspan.planner.catalog import parse_devices

    lengths, clusters = [request.tokens], [request.cluster]
    for word in words:
        key, _, values = word.partition("=")
        if key == "tokens" and values:
            lengths = [parse_tokens(value) for value in values.split(",")]
        elif key == "devices" and values:
            kernel = request.cluster.device.attention.kernel
            clusters = [
                parse_devices(value, network, None if value.endswith(".toml") else kernel, link)
                for value in values.split(",")
            ]
        else:
            raise ShapeError(f"--sweep {word!r}: use tokens=N,N,... and devices=D,D,..., with values")
    return lengths, clusters
