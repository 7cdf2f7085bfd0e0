"""One layer's attention of one way of a plan, on the real schedule: what `--trace` writes and the plan's page draws."""

from ringspan.algorithms import build_schedule
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import causal, full, sliding_window
from ringspan.planner.plan import Request, Setup
from ringspan.planner.plan.predict import ring_of, shard_of, shown_window
from ringspan.planner.timeline import Timeline, schedule_timeline
from ringspan.program.bind import Problem, Shapes
from ringspan.schedule import Heads, visible_blocks

MOST_RANKS = 64
BUILDERS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def setup_timeline(request: Request, setup: Setup) -> Timeline:
    """The forward pass, with every step recorded."""
    if setup.cp > MOST_RANKS:
        raise UnsupportedError(
            f"the way has {setup.cp} ranks, and a timeline shows every rank, at most {MOST_RANKS}",
            remedy="plan with more tensor parallelism or fewer devices",
        )
    if request.model.latent is not None or request.cached_tokens or request.phase == "decode":
        raise UnsupportedError(
            "a timeline is drawn for a prefill without cache, a denoising or a training step, without latent attention"
        )
    shard = shard_of(request, setup)
    layout: Layout = BUILDERS[setup.layout](request.tokens, setup.cp)
    window = shown_window(request.model)
    mask = sliding_window(window - 1, 0) if window else causal() if request.model.is_causal else full()
    heads = Heads(shard.num_heads, shard.num_kv_heads)
    shapes = Shapes((shard.batch,), heads, shard.head_dim, shard.v_head_dim, 2, 4, is_encoded=request.wire != "bf16")
    mesh = (setup.cp // setup.inner, setup.inner) if setup.algorithm in ("hybrid", "double_ring") else None
    schedule = build_schedule(setup.algorithm, visible_blocks(mask, layout), heads=heads, mesh=mesh)
    problem = Problem(mask, layout, layout, shapes)
    per_node = ring_of(request, setup).per_node
    return schedule_timeline(schedule, problem, shard, request.cluster.device, per_node, record=True)
