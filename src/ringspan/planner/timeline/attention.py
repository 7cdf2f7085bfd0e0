"""When does everything in one layer's attention happen, for an algorithm by name?

An algorithm whose record has `loads` is priced by them on any number of ranks. Of any other the real schedule is built
and priced, which `check_priced` limits to groups and models for which that is exact and quick.
"""

from ringspan.algorithms import Algorithm, Mesh, RegularCall, Ring, Sequence, find_algorithm
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import causal, full, sliding_window
from ringspan.planner.catalog import Device
from ringspan.planner.cost import Shard
from ringspan.planner.timeline.costs import DeviceCosts
from ringspan.planner.timeline.run import Timeline, run_timeline
from ringspan.planner.timeline.schedules import schedule_timeline
from ringspan.program.prepare import ProgramOptions, build
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import Heads

MOST_SCHEDULED_RANKS = 128  # a schedule of P ranks has P² tiles
QUICK_RANKS = 16  # up to which a real schedule is priced in about a second
LAYOUT_BUILDERS = {"contiguous": contiguous, "zigzag": zigzag, "striped": striped}


def attention_timeline(
    algorithm: str,
    ring: Ring,
    sequence: Sequence,
    shard: Shard,
    device: Device,
    *,
    is_backward: bool = False,
) -> Timeline:
    """The timeline of one layer's attention, forward or backward."""
    record = find_algorithm(algorithm)
    if record.loads is None:
        return real_timeline(record, ring, sequence, shard, device, is_backward=is_backward)
    call = RegularCall(ring, sequence, DeviceCosts(shard, device, is_backward), is_backward=is_backward)
    return run_timeline(record.loads(call), call.period, device.near, device.far)


def check_priced(record: Algorithm, world_size: int, shard: Shard) -> None:
    """Refuse what only `loads` could price."""
    if record.loads is not None:
        return
    if world_size > MOST_SCHEDULED_RANKS:
        raise UnsupportedError(
            f"not priced: {record.name} has no loads, and its schedule is built for at most {MOST_SCHEDULED_RANKS} "
            f"ranks, not {world_size}"
        )
    if shard.kv_elements != shard.num_kv_heads * (shard.head_dim + shard.v_head_dim):
        raise UnsupportedError(f"not priced: {record.name} has no loads, and its schedule has no latent K and V")


def is_quick(algorithm: str, world_size: int) -> bool:
    """Whether a timeline is cheap enough to ask for many lengths."""
    return find_algorithm(algorithm).loads is not None or world_size <= QUICK_RANKS


def real_timeline(
    record: Algorithm,
    ring: Ring,
    sequence: Sequence,
    shard: Shard,
    device: Device,
    *,
    is_backward: bool = False,
    records_moments: bool = False,
) -> Timeline:
    """The timeline of the real schedule; backward, the lighter side travels, as in the runtime."""
    check_priced(record, ring.world_size, shard)
    problem = _problem(ring, sequence, shard)
    mesh = Mesh(ring.world_size // ring.inner, ring.inner) if "mesh" in record.options else None
    side = problem.lighter_side() if is_backward else None
    schedule = build(problem, record.name, ProgramOptions(mesh, backward=side))
    return schedule_timeline(schedule, problem, shard, device, ring.per_node, record=records_moments)


def _problem(ring: Ring, sequence: Sequence, shard: Shard) -> Problem:
    layout, kv_layout = _layouts(ring.world_size, sequence)
    mask = full()
    if sequence.window:
        mask = sliding_window(sequence.window - 1, 0)
    elif sequence.is_causal:
        mask = causal()
    heads = Heads(shard.num_heads, shard.num_kv_heads)
    is_encoded = shard.wire != "bf16"
    shapes = Shapes((shard.batch,), heads, shard.head_dim, shard.v_head_dim, int(shard.itemsize), 4, is_encoded)
    return Problem(mask, layout, kv_layout, shapes)


def _layouts(world_size: int, sequence: Sequence) -> tuple[Layout, Layout]:
    """The layouts of queries and of keys; cached tokens are placed as new ones are."""
    build = LAYOUT_BUILDERS[sequence.layout]
    layout: Layout = build(sequence.new_tokens, world_size, start=sequence.cached_tokens)
    if not sequence.cached_tokens:
        return layout, layout
    cached: Layout = build(sequence.cached_tokens, world_size)
    pairs = zip(cached.spans_by_rank, layout.spans_by_rank, strict=True)
    return layout, Layout(tuple((*old, *young) for old, young in pairs))
