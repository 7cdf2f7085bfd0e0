"""The timeline of a plan's attention as a Chrome trace, in the schema of measured runs.

It is that of the real schedule, which is built for it; so there is a limit to the ranks.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ringspan.algorithms import build_schedule
from ringspan.bench.result import Activity
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import causal, full
from ringspan.plan import Plan
from ringspan.plan.predict import ring_of, shard_of
from ringspan.report.trace import build_trace
from ringspan.schedule import Heads, visible_blocks
from ringspan.tiles import Problem, Shapes
from ringspan.timeline import Timeline, schedule_timeline

MOST_RANKS = 64
BUILDERS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def trace_plan(plan: Plan, about: Mapping[str, object]) -> dict[str, Any]:
    """One layer's attention of the best way, forward."""
    setup = plan.best.setup
    described = {
        **about,
        "model": plan.request.model.id,
        "setup": str(setup),
        "layout": setup.layout,
        "predicted": True,
    }
    return build_trace(list(activities_of(_timeline(plan))), described)


def _timeline(plan: Plan) -> Timeline:
    request, setup = plan.request, plan.best.setup
    if setup.cp > MOST_RANKS:
        raise UnsupportedError(
            f"--trace: the best way has {setup.cp} ranks, and a trace shows every rank; use at most {MOST_RANKS}, with "
            "more tensor parallelism (--tp) or fewer devices"
        )
    shard = shard_of(request, setup)
    if request.model.latent is not None or request.cached_tokens or request.phase == "decode":
        raise UnsupportedError("--trace: only for a prefill without cache, a denoising or a training step, without MLA")
    layout: Layout = BUILDERS[setup.layout](request.tokens, setup.cp)
    mask = causal() if request.model.is_causal else full()
    heads = Heads(shard.num_heads, shard.num_kv_heads)
    shapes = Shapes((shard.batch,), heads, shard.head_dim, shard.v_head_dim, 2, 4)
    mesh = (setup.cp // setup.inner, setup.inner) if setup.algorithm in ("hybrid", "double_ring") else None
    visible = visible_blocks(mask, layout)
    schedule = build_schedule(setup.algorithm, visible, heads=heads, mesh=mesh)
    problem = Problem(mask, layout, layout, shapes)
    per_node = ring_of(request, setup).per_node
    return schedule_timeline(schedule, problem, shard, request.cluster.device, per_node, record=True)


def activities_of(timeline: Timeline) -> Iterator[Activity]:
    """What every rank does, and when; a wait is shown where a rank is blocked by a message."""
    for t, (begin_s, load, messages) in enumerate(timeline.moments):
        for rank, name in enumerate(load.names):
            if load.attend_s[rank]:
                end_s = float(begin_s[rank] + load.attend_s[rank])
                yield Activity(rank, t, "attend", name or "merge", float(begin_s[rank]), end_s)
        for one, (start_s, arrival_s) in zip(load.rounds, messages, strict=True):
            sizes = [one.nbytes] * len(one.src) if isinstance(one.nbytes, float) else one.nbytes
            for i, (src, dst) in enumerate(zip(one.src.tolist(), one.dst.tolist(), strict=True)):
                posted_s, sent_s, came_s = float(begin_s[src]), float(start_s[i]), float(arrival_s[i])
                name, nbytes = one.names[i], int(sizes[i])
                yield Activity(src, t, "send", name, posted_s, posted_s, src, dst, nbytes)
                yield Activity(dst, t, "receive", name, sent_s, came_s, src, dst, nbytes)
