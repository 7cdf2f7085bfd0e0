"""When does everything in one layer's attention happen, for an algorithm by name?

An algorithm whose record has `loads` is priced by them on any number of ranks. Of any other the real schedule is built
and priced, which `check_priced` limits to groups and models for which that is exact and quick: any mask, any layout and
any length, with the tiles and pieces of the runtime (`program.bind`), so what is timed is what runs. Messages of a step
are put in rounds by distance, as every rank starts them.
"""

from collections.abc import Iterator

import numpy as np

from ringspan.algorithms import Algorithm, Mesh, RegularCall, Ring, Sequence, find_algorithm
from ringspan.algorithms.loads import END, EXCHANGE_ROUNDS, Load, Round, Seconds
from ringspan.errors import UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import causal, full, sliding_window
from ringspan.planner.catalog import Device
from ringspan.planner.cost import DeviceCosts, Shard, merge_s, tile_s
from ringspan.planner.timeline.run import Timeline, run_timeline
from ringspan.program.bind import Compute, Tile
from ringspan.program.prepare import ProgramOptions, build, prepare_ranks
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import ALL, Block, Heads, Schedule, Step, Transfer, first_reads

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


def schedule_timeline(
    schedule: Schedule, problem: Problem, shard: Shard, device: Device, per_node: int, *, record: bool = False
) -> Timeline:
    """When everything of a schedule happens, on ranks in nodes of `per_node`."""
    loads = list(schedule_loads(schedule, problem, shard, device, per_node))
    return run_timeline(loads, schedule.world_size, device.near, device.far, record=record)


def schedule_loads(schedule: Schedule, problem: Problem, shard: Shard, device: Device, per_node: int) -> Iterator[Load]:
    """Step by step: compute by rank, and rounds of messages."""
    ranks = range(schedule.world_size)
    tiles: dict[tuple[int, int], list[Tile]] = {}
    for rank, prepared in enumerate(prepare_ranks(problem, schedule)):
        for instruction in prepared.program:
            if isinstance(instruction, Compute):
                own = [tile for tile in instruction.tiles if isinstance(tile, Tile)]
                tiles.setdefault((instruction.step, rank), []).extend(own)
    reads = first_reads(schedule)
    for t, step in enumerate(schedule.steps):
        seconds = np.array([sum(_tile_s(tile, shard, device) for tile in tiles.get((t, rank), ())) for rank in ranks])
        arrived = _arrived_sums(schedule, t, problem, shard, device)
        names = [" ".join(f"{tile.q}×{tile.kv}" for tile in tiles.get((t, rank), ())) for rank in ranks]
        yield Load(seconds + arrived, tuple(_rounds(t, step, schedule, problem, reads, per_node)), names)
    late = _arrived_sums(schedule, schedule.num_steps, problem, shard, device)
    if late.any():
        yield Load(late, (), [""] * len(ranks))


def _tile_s(tile: Tile, shard: Shard, device: Device) -> float:
    """Pieces one by one; a piece whose rows were attended before is merged into them."""
    heads = len(tile.q.heads) if tile.q.heads is not None else shard.num_heads
    kv_heads = len(tile.kv.heads) if tile.kv.heads is not None else shard.num_kv_heads
    mine = shard.with_heads(heads, kv_heads)
    seconds = 0.0
    for piece, is_first in zip(tile.pieces, tile.firsts, strict=True):
        q_len, kv_len = piece.q.stop - piece.q.start, piece.kv.stop - piece.kv.start
        is_backward = tile.q.kind == "q_grad"
        is_causal = piece.kind.is_triangle
        seconds += tile_s(device, mine, q_len, kv_len, is_causal=is_causal, is_backward=is_backward)
        if not is_first:
            seconds += merge_s(device, mine, q_len, is_backward=is_backward)
    return seconds


def _arrived_sums(schedule: Schedule, t: int, problem: Problem, shard: Shard, device: Device) -> Seconds:
    """Seconds to merge the sums that were sent two steps before, or at the end all that are left."""
    seconds = np.zeros(schedule.world_size)
    is_end = t == schedule.num_steps
    for sent in range(max(0, t - 2), t - 1 if not is_end else t):
        if sent == t - 2 or is_end:
            for transfer in schedule.step(sent).transfers:
                if transfer.block.kind == "out":
                    heads = len(transfer.block.heads) if transfer.block.heads is not None else shard.num_heads
                    rows = len(problem.positions(transfer.block))
                    seconds[transfer.dst] += merge_s(device, shard.with_heads(heads, shard.num_kv_heads), rows)
    return seconds


def _rounds(
    t: int,
    step: Step,
    schedule: Schedule,
    problem: Problem,
    reads: dict[tuple[int, Transfer], int],
    per_node: int,
) -> Iterator[Round]:
    """Messages to ranks at the same distance go at once; those between the same two ranks as one."""
    size = schedule.world_size
    transfers = list(step.transfers)
    leaving = _sums_leaving(schedule, t + 1)
    for merge in step.merges:
        transfers += [Transfer(merge.block, src, dst) for src in range(size) for dst in range(size) if src != dst]
    groups: dict[tuple[int, int], dict[int, list[Transfer]]] = {}
    for transfer in transfers:
        if (transfer.dst, transfer.block) in leaving:
            reads_at = t + 1
        elif transfer.block.is_sum:
            reads_at = END if t + 2 >= schedule.num_steps or transfer.block.owner == ALL else t + 2
        else:
            reads_at = reads[t, transfer]
        distance = (transfer.dst - transfer.src) % size
        groups.setdefault((distance, reads_at), {}).setdefault(transfer.src, []).append(transfer)
    is_exchange = len({distance for distance, _ in groups}) >= EXCHANGE_ROUNDS
    for (distance, reads_at), by_src in sorted(groups.items()):
        src = np.array(sorted(by_src))
        dst = (src + distance) % size
        nbytes = np.array([float(sum(problem.block_bytes(one.block) for one in by_src[rank])) for rank in src])
        names = [" ".join(str(one.block) for one in by_src[rank]) for rank in src]
        yield Round(src, dst, nbytes, dst // per_node != src // per_node, reads_at, is_exchange, names)


def _sums_leaving(schedule: Schedule, t: int) -> set[tuple[int, Block]]:
    """Which ranks send which sums in a step: what has arrived of them is merged before."""
    if t >= schedule.num_steps:
        return set()
    return {(transfer.src, transfer.block) for transfer in schedule.step(t).transfers if transfer.block.is_sum}
