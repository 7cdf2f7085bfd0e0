"""The choice, written the way other libraries want it, where they can express it."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from ringspan.plan.predict import Prediction
from ringspan.plan.request import Request, Setup


class Recipe(NamedTuple):
    """Settings to paste, or why there are none."""

    library: str
    settings: str
    caveat: str = ""


def list_recipes(request: Request, ranked: Sequence[Prediction]) -> list[Recipe]:
    """For the libraries that know this kind of model and phase: the best way, or the best that they can express."""
    best = ranked[0].setup
    if best.cp == 1:
        return []
    writers: list[Callable[[Setup], Recipe]] = []
    if request.phase == "denoise":
        writers = [_diffusers]
    if request.phase == "train":
        writers = [_accelerate, _torchtitan]
    if request.phase in ("prefill", "decode"):
        writers = [partial(_vllm, request)]
    return [_ringspan(request, best), *(_second_best(write, ranked) for write in writers)]


def _second_best(write: Callable[[Setup], Recipe], ranked: Sequence[Prediction]) -> Recipe:
    """The fastest way that a library can express, with what it costs if it is not the fastest of all."""
    wanted = write(ranked[0].setup)
    for prediction in ranked:
        recipe = write(prediction.setup)
        if recipe.settings and prediction.setup.cp > 1:
            if prediction is ranked[0]:
                return recipe
            more = prediction.total_s / ranked[0].total_s - 1
            way = f"{wanted.caveat}; this is {prediction.setup} over {prediction.setup.cp} ranks, {more:.1%} slower"
            return recipe._replace(caveat="; ".join(filter(None, (way, recipe.caveat))))
    return wanted


def _ringspan(request: Request, setup: Setup) -> Recipe:
    if setup.algorithm == "all_merge":
        return Recipe("ringspan", 'rs.decode(q, k, v, cache.begin(new_lengths, query="replicated"), layer=i)')
    mask = "rs.causal()" if request.model.is_causal else "rs.full()"
    mesh = f", mesh=({setup.cp // setup.inner}, {setup.inner})" if setup.algorithm in ("hybrid", "double_ring") else ""
    layout = f"rs.{setup.layout}(seq_len, {setup.cp})"
    return Recipe(
        "ringspan", f'rs.attention(q, k, v, mask={mask}, layout={layout}, algorithm="{setup.algorithm}"{mesh})'
    )


def _degrees(setup: Setup) -> tuple[int, int] | None:
    """Ring and Ulysses, for libraries that know these two."""
    match setup.algorithm:
        case "ulysses":
            return 1, setup.cp
        case "hybrid":
            return setup.cp // setup.inner, setup.inner
        case "pass_kv" | "all_gather":
            return setup.cp, 1
    return None


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
    strategy = {"all_gather": "allgather", "pass_kv": "alltoall"}.get(setup.algorithm)
    if strategy is None or setup.layout != "zigzag":
        return Recipe("accelerate", "", f"has no setting for {setup}, {setup.layout}")
    handler = f'TorchContextParallelConfig(cp_comm_strategy="{strategy}")'
    config = f"ParallelismConfig(cp_size={setup.cp}, cp_handler={handler}, tp_size={setup.tp})"
    return Recipe("accelerate", config, "full causal attention by SDPA only")


def _torchtitan(setup: Setup) -> Recipe:
    if setup.algorithm not in ("all_gather", "pass_kv") or setup.layout != "zigzag":
        return Recipe("torchtitan", "", f"has no setting for {setup}, {setup.layout}")
    degrees = f"--parallelism.context_parallel_degree {setup.cp} --parallelism.tensor_parallel_degree {setup.tp}"
    return Recipe("torchtitan", degrees)


def _vllm(request: Request, setup: Setup) -> Recipe:
    if request.phase == "decode":
        kv_heads = request.model.num_kv_heads
        copies = max(1, setup.tp // kv_heads)
        return Recipe(
            "vllm",
            f"--tensor-parallel-size {setup.tp * setup.cp} --decode-context-parallel-size {setup.cp}",
            "its decode ranks are those of tensor parallelism: the cache is sharded over copies of KV heads"
            + ("" if copies > 1 else ", of which there are none here unless tensor parallelism exceeds the KV heads"),
        )
    if setup.algorithm != "all_gather":
        return Recipe("vllm", "", f"has no setting for {setup} in prefill")
    return Recipe("vllm", f"--tensor-parallel-size {setup.tp} --prefill-context-parallel-size {setup.cp}")
