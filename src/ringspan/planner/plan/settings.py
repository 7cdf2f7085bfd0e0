"""The choice, written the way other libraries want it, where they can express it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ringspan.algorithms import find_algorithm
from ringspan.algorithms.all_gather import ALL_GATHER
from ringspan.algorithms.choose import RINGS
from ringspan.algorithms.decode import ALL_MERGE
from ringspan.algorithms.hybrid import HYBRID
from ringspan.algorithms.pass_kv import PASS_KV
from ringspan.algorithms.ulysses import ULYSSES
from ringspan.planner.plan.passes import shown_window
from ringspan.planner.plan.predict import Prediction
from ringspan.planner.plan.request import Request, Setup

MOST_EQUAL = 5e-4  # of a time: what differs by less is printed as equal
WIRES = {"int8": "int8", "fp8": "float8_e4m3"}  # as the runtime calls them


class Recipe(NamedTuple):
    """Settings to paste for a library, or the reason why there are none."""

    library: str
    settings: str
    caveat: str = ""


def list_recipes(request: Request, ranked: Sequence[Prediction]) -> list[Recipe]:
    """For the libraries that know this kind of model and phase: the best way, or the best that they can express."""
    if not ranked or ranked[0].setup.cp == 1:
        return []
    writers: list[Callable[[Setup], Recipe]] = [partial(_ringspan, request)]
    if request.phase == "denoise":
        writers += [_diffusers]
    if request.phase == "train":
        writers += [_accelerate, _torchtitan]
    if request.phase in ("prefill", "decode"):
        writers += [partial(_vllm, request)]
    return [_second_best(write, ranked) for write in writers]


def _second_best(write: Callable[[Setup], Recipe], ranked: Sequence[Prediction]) -> Recipe:
    """The fastest way that a library can express, with what it costs if it is not the fastest of all."""
    wanted = write(ranked[0].setup)
    for prediction in ranked:
        recipe = write(prediction.setup)
        if recipe.settings and prediction.setup.cp > 1:
            if prediction is ranked[0]:
                return recipe
            more = prediction.total_s / ranked[0].total_s - 1
            slower = "as fast" if more < MOST_EQUAL else f"{100 * more:.1f} % slower"
            way = f"{wanted.caveat}; this is {prediction.setup} over {prediction.setup.cp} ranks, {slower}"
            return recipe._replace(caveat="; ".join(filter(None, (way, recipe.caveat))))
    return wanted


def _ringspan(request: Request, setup: Setup) -> Recipe:
    if request.phase == "decode" or request.cached_tokens:
        return _ringspan_turn(request, setup)
    window, mask = shown_window(request.model), "rs.causal()" if request.model.is_causal else "rs.full()"
    if window:
        mask = f"rs.sliding_window({window - 1}, 0)"
    mesh = f", mesh=({setup.cp // setup.inner}, {setup.inner})" if setup.has_mesh else ""
    layout = f"rs.{setup.layout}(seq_len, {setup.cp})"
    options = f'layout={layout}, algorithm="{setup.algorithm}"{mesh}{_wire(request, setup)}'
    return Recipe("ringspan", f"rs.attention(q, k, v, mask={mask}, {options})", _windows(request))


def _ringspan_turn(request: Request, setup: Setup) -> Recipe:
    """With a cache, which places tokens itself: an early and a late part of the new ones on every rank, as zigzag."""
    is_decode = request.phase == "decode"
    if setup.algorithm == ALL_MERGE.name:
        options = 'query="replicated"'
    elif setup.algorithm in RINGS and setup.layout == ("striped" if is_decode else "zigzag"):
        options = f'algorithm="{setup.algorithm}"{_wire(request, setup)}'
    else:
        return Recipe("ringspan", "", f"has no turn of a cache with {setup}, {setup.layout}")
    call = "decode" if is_decode else "prefill"
    return Recipe("ringspan", f"rs.{call}(q, k, v, cache.begin(new_lengths, {options}), layer=i)", _windows(request))


def _wire(request: Request, setup: Setup) -> str:
    """The runtime takes no wire where K and V do not travel."""
    is_encoded = request.wire in WIRES and find_algorithm(setup.algorithm).moves_kv
    return f', wire="{WIRES[request.wire]}"' if is_encoded else ""


def _windows(request: Request) -> str:
    """Layers that see a window have another mask than the full ones."""
    window, full = request.model.window, request.model.full_layers
    if window is None:
        return ""
    mask = f"mask=rs.sliding_window({window.tokens - 1}, 0)"
    if not full:
        return f"all layers take {mask}"
    return f"{full} layers take mask=rs.causal(), and {request.model.layers - full} sliding ones {mask}"


def _degrees(setup: Setup) -> tuple[int, int] | None:
    """Ring and Ulysses, for libraries that know these two."""
    if setup.algorithm == ULYSSES.name:
        return 1, setup.cp
    if setup.algorithm == HYBRID.name:
        return setup.cp // setup.inner, setup.inner
    return (setup.cp, 1) if setup.algorithm in (PASS_KV.name, ALL_GATHER.name) else None


def _diffusers(setup: Setup) -> Recipe:
    degrees = _degrees(setup)
    if degrees is None or setup.tp > 1:
        beside = f" beside tensor parallelism {setup.tp}" if setup.tp > 1 else ""
        return Recipe("diffusers", "", f"has no setting for {setup}{beside}")
    ring, ulysses = degrees
    caveat = "its ring gathers all K and V first" if ring > 1 else ""
    config = f"ContextParallelConfig(ring_degree={ring}, ulysses_degree={ulysses})"
    return Recipe("diffusers", f"pipe.transformer.enable_parallelism(config={config})", caveat)


def _accelerate(setup: Setup) -> Recipe:
    strategy = {ALL_GATHER.name: "allgather", PASS_KV.name: "alltoall"}.get(setup.algorithm)
    if strategy is None or setup.layout != "zigzag":
        return Recipe("accelerate", "", f"has no setting for {setup}, {setup.layout}")
    handler = f'TorchContextParallelConfig(cp_comm_strategy="{strategy}")'
    config = f"ParallelismConfig(cp_size={setup.cp}, cp_handler={handler}, tp_size={setup.tp})"
    return Recipe("accelerate", config, "full causal attention by SDPA only")


def _torchtitan(setup: Setup) -> Recipe:
    if setup.algorithm not in (ALL_GATHER.name, PASS_KV.name) or setup.layout != "zigzag":
        return Recipe("torchtitan", "", f"has no setting for {setup}, {setup.layout}")
    degrees = f"--parallelism.context_parallel_degree {setup.cp} --parallelism.tensor_parallel_degree {setup.tp}"
    return Recipe("torchtitan", degrees)


def _vllm(request: Request, setup: Setup) -> Recipe:
    if request.phase == "decode":
        return _vllm_decode(request, setup)
    if setup.algorithm != ALL_GATHER.name:
        return Recipe("vllm", "", f"has no setting for {setup} in prefill")
    return Recipe("vllm", f"--tensor-parallel-size {setup.tp} --prefill-context-parallel-size {setup.cp}")


def _vllm_decode(request: Request, setup: Setup) -> Recipe:
    """Its decode ranks are those of tensor parallelism, as many as hold the same KV heads; latent K and V are one."""
    model = request.model
    tp, kv_heads = setup.tp * setup.cp, 1 if model.latent is not None else model.num_kv_heads
    if setup.algorithm != ALL_MERGE.name:
        return Recipe("vllm", "", f"has no setting for {setup} in decode")
    if model.num_heads % tp or setup.cp > tp // kv_heads:
        return Recipe(
            "vllm",
            "",
            f"shards a cache over at most tensor parallelism / KV heads = {tp} / {kv_heads} ranks, not {setup.cp}, "
            f"and tensor parallelism must divide the {model.num_heads} heads",
        )
    return Recipe("vllm", f"--tensor-parallel-size {tp} --decode-context-parallel-size {setup.cp}")
