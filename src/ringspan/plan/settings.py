"""The choice, written the way other libraries want it, where they can express it."""

from typing import NamedTuple

from ringspan.plan.request import Request, Setup


class Recipe(NamedTuple):
    """Settings to paste, or why there are none."""

    library: str
    settings: str
    caveat: str = ""


def list_recipes(request: Request, setup: Setup) -> list[Recipe]:
    """For the libraries that know this kind of model and phase."""
    if setup.cp == 1:
        return []
    recipes = [_ringspan(request, setup)]
    if request.phase == "denoise":
        recipes.append(_diffusers(setup))
    if request.phase == "train":
        recipes += [_accelerate(setup), _torchtitan(setup)]
    if request.phase in ("prefill", "decode"):
        recipes.append(_vllm(request, setup))
    return recipes


def _ringspan(request: Request, setup: Setup) -> Recipe:
    if setup.algorithm == "all_merge":
        return Recipe("ringspan", "ringspan.algorithms.build_decode(visible, query='replicated')")
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
