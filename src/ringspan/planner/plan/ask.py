"""`rs.plan`: the plan of the command line as a value, from names and numbers."""

from typing import TypedDict, Unpack

from ringspan.arguments import FLAG, TEXT, WHOLE, check_arguments, instance_of, optional
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.planner.catalog import Cluster, Model, load_model, parse_devices
from ringspan.planner.plan.build import Plan, build_plan
from ringspan.planner.plan.request import Phase, Request
from ringspan.planner.software import RINGSPAN, Software, find_software

NOT_MODELLED = {
    "pipeline_parallel": "stages and their bubbles are not modelled; tensor parallelism and sharded weights are",
    "expert_parallel": "exchanges between experts are not modelled; they are planned as split by tensor parallelism",
    "offload": "copies between host and device are not modelled; sharded weights and weights in fp8 are",
}


class Options(TypedDict, total=False):
    """The optional arguments of `plan`."""

    phase: Phase | None
    cached_tokens: int
    size: tuple[int, int, int] | None
    batch: int | None
    tp: int | None
    wire: str
    weights: str
    kv_cache: str
    chunk_tokens: int | None
    recomputes: bool
    shards_weights: bool
    accumulate: int
    is_resident: bool
    software: str
    kernel: str | None
    network: str | None
    link: str | None
    pipeline_parallel: int
    expert_parallel: int
    offload: bool


def plan(*, model: str | Model, devices: str | Cluster, tokens: int | None = None, **options: Unpack[Options]) -> Plan:
    """Plan a model on devices: will it fit, how long will it take, which way is best, and why.

    Args:
        model: a name of the catalogue, the path of a config.json, a "dense:" line, or a Model.
        devices: "COUNTxDEVICE" or "NODESxPER_NODExDEVICE", or a Cluster.
        tokens: new tokens of a sequence; in decode the length of its cache. A video may give `size` instead.
        phase: prefill, decode, train or denoise; by default prefill, or denoise for a video model.
        cached_tokens: tokens that a prefill finds cached.
        size: frames, height and width of a video; by default its usual clip.
        batch: sequences; for a video forwards of a step, by default 2 where guidance takes two.
        tp: tensor parallelism; by default all degrees inside a node are tried.
        wire: bf16, int8 or fp8: K and V as they travel.
        weights: bf16, fp8, int8 or int4.
        kv_cache: bf16 or fp8.
        chunk_tokens: length of a piece of a prefill that is computed piece by piece.
        recomputes: whether training computes activations anew in the backward pass.
        shards_weights: whether weights (in training optimizer states too) are spread over all ranks.
        accumulate: passes whose gradients make one training step.
        is_resident: whether text encoder and VAE of a video stay on the devices.
        software: whose implementation is priced; `ringspan.planner.software.SOFTWARE` lists them.
        kernel: fa2, fa3 or fa4; by default that of the software.
        network: the link between nodes; link: the one inside a node.
        pipeline_parallel: refused above 1, as are expert_parallel and offload: they are not modelled.

    Raises:
        UnsupportedError: something is not in the catalogue or not modelled.
        ShapeError: a number is out of range, or sizes do not divide.
    """
    unknown = [name for name in options if name not in Options.__annotations__]
    if unknown:
        raise UnsupportedError(
            f"plan has no argument {unknown[0]}", remedy=f"use one of {', '.join(Options.__annotations__)}"
        )
    return build_plan(make_request(model=model, devices=devices, tokens=tokens, **options))


def make_request(
    *,
    model: str | Model,
    devices: str | Cluster,
    tokens: int | None = None,
    phase: Phase | None = None,
    cached_tokens: int = 0,
    size: tuple[int, int, int] | None = None,
    batch: int | None = None,
    tp: int | None = None,
    wire: str = "bf16",
    weights: str = "bf16",
    kv_cache: str = "bf16",
    chunk_tokens: int | None = None,
    recomputes: bool = True,
    shards_weights: bool = False,
    accumulate: int = 1,
    is_resident: bool = False,
    software: str = RINGSPAN.name,
    kernel: str | None = None,
    network: str | None = None,
    link: str | None = None,
    pipeline_parallel: int = 1,
    expert_parallel: int = 1,
    offload: bool = False,
) -> Request:
    """The question behind a plan; the arguments are those of `plan`."""
    check_arguments(
        model=(TEXT if not isinstance(model, Model) else instance_of(Model, "that of load_model"), model),
        devices=(TEXT if not isinstance(devices, Cluster) else instance_of(Cluster, "that of parse_devices"), devices),
        tokens=(optional(WHOLE), tokens),
        phase=(optional(TEXT), phase),
        wire=(TEXT, wire),
        weights=(TEXT, weights),
        kv_cache=(TEXT, kv_cache),
        recomputes=(FLAG, recomputes),
        shards_weights=(FLAG, shards_weights),
        is_resident=(FLAG, is_resident),
        kernel=(optional(TEXT), kernel),
        network=(optional(TEXT), network),
        link=(optional(TEXT), link),
        pipeline_parallel=(WHOLE, pipeline_parallel),
        expert_parallel=(WHOLE, expert_parallel),
        offload=(FLAG, offload),
        cached_tokens=(WHOLE, cached_tokens),
        batch=(optional(WHOLE), batch),
        tp=(optional(WHOLE), tp),
        chunk_tokens=(optional(WHOLE), chunk_tokens),
        accumulate=(WHOLE, accumulate),
        software=(TEXT, software),
    )
    for name, value, is_asked in (
        ("pipeline_parallel", pipeline_parallel, pipeline_parallel != 1),
        ("expert_parallel", expert_parallel, expert_parallel != 1),
        ("offload", offload, offload),
    ):
        if is_asked:
            raise UnsupportedError(NOT_MODELLED[name], argument=name, value=value, remedy="leave it out")
    found = find_software(software)
    loaded = load_model(model) if isinstance(model, str) else model
    cluster = devices
    if isinstance(cluster, str):
        cluster = parse_cluster(cluster, found, kernel, network, link)
    return Request(
        model=loaded,
        cluster=cluster,
        phase=phase or ("prefill" if loaded.video is None else "denoise"),
        tokens=_tokens(loaded, tokens, size),
        cached_tokens=cached_tokens,
        batch=batch if batch is not None else loaded.video.forwards if loaded.video is not None else 1,
        tp=tp,
        wire=wire,
        weights=weights,
        kv_cache=kv_cache,
        chunk_tokens=chunk_tokens,
        recomputes=recomputes,
        shards_weights=shards_weights,
        accumulate=accumulate,
        is_resident=is_resident,
        software=found,
        size=size,
    )


def parse_cluster(text: str, software: Software, kernel: str | None, network: str | None, link: str | None) -> Cluster:
    """Devices by name, with the kernel of the software unless another one is given or the device is calibrated."""
    default_kernel = None if text.endswith(".toml") else software.kernel
    return parse_devices(text, network, kernel or default_kernel, link)


def _tokens(model: Model, tokens: int | None, size: tuple[int, int, int] | None) -> int:
    """The given number of tokens, or that of the video."""
    if model.video is None:
        if size is not None:
            raise UnsupportedError(
                f"{model.id} is not a video model", argument="size", value=size, remedy="give tokens="
            )
        if tokens is None:
            raise ShapeError("give the length of the sequence, such as tokens=131072", argument="tokens", value=None)
        return tokens
    if tokens is not None:
        if size is not None:
            raise UnsupportedError(
                "the size gives the number of tokens", argument="tokens", value=tokens, remedy="give one of them"
            )
        return tokens
    size = size or model.video.usual
    if size is None:
        raise ShapeError(
            f"no usual size of {model.id} is known", argument="size", value=None, remedy="give frames, height and width"
        )
    return model.video.count_tokens(*size)
