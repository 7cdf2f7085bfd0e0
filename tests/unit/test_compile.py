"""The promises of `compile_rank`, checked by walking the programs of all algorithms instruction by instruction."""

from collections import Counter

import numpy as np
import pytest

import ringspan as rs
from ringspan.program.bind import Compute, bind
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import AllMerged, Arrived, Block, Do, Drop, Post, Program, Schedule, Sent, Transfer, compile_rank
from support.cases import ROWS, WORLD_SIZES, legal_heads, meshes
from support.faults import make_samples

SIDES = (None, "kv", "q")


def all_seeing_schedules() -> dict[str, Schedule]:
    """Every algorithm, forward and backward, where every rank sees every rank and the replicated keys."""
    schedules = {}
    for row in ROWS:
        for world_size in WORLD_SIZES:
            visible = rs.Visible.of(np.ones((world_size, world_size + 1)))
            for mesh in meshes(row, world_size):
                degree = 1 if not row.splits_heads else world_size if mesh is None else mesh.inner
                for backward in SIDES:
                    name = f"{row.algorithm} {world_size} {mesh and tuple(mesh)} {backward}"
                    heads = legal_heads(degree)[1]
                    schedules[name] = rs.schedule.build_schedule(
                        row.algorithm, visible, heads=heads, mesh=mesh, backward=backward
                    )
    for query in ("sharded", "replicated"):
        schedules[f"decode {query}"] = rs.schedule.build_decode(rs.Visible.of(np.ones((4, 5))), query=query)
    return schedules


@pytest.fixture(scope="module")
def schedules() -> dict[str, Schedule]:
    """The schedules of `all_seeing_schedules`, and random ones with few visible pairs."""
    samples = enumerate(make_samples(3, 60))
    return all_seeing_schedules() | {f"{i} {sample.name}": sample.schedule for i, sample in samples}


def programs(schedules: dict[str, Schedule]):
    for name, schedule in schedules.items():
        for rank in range(schedule.world_size):
            yield f"rank {rank} of {name}", schedule, rank, compile_rank(schedule, rank)


def place_of(program: Program) -> dict[object, int]:
    """Return the index of each instruction; no two are equal."""
    places = {instruction: i for i, instruction in enumerate(program)}
    assert len(places) == len(program)
    return places


def posts_of(program: Program) -> list[int]:
    """Return the index of each step's Post."""
    return [i for i, instruction in enumerate(program) if isinstance(instruction, Post)]


def sends_of(program: Program) -> list[tuple[int, Transfer]]:
    posts = [instruction for instruction in program if isinstance(instruction, Post)]
    return [(post.step, transfer) for post in posts for transfer in post.sends]


def receives_of(program: Program) -> list[tuple[int, Transfer]]:
    posts = [instruction for instruction in program if isinstance(instruction, Post)]
    return [(post.step, transfer) for post in posts for transfer in post.receives]


def is_held_as(name: Block, block: Block) -> bool:
    """Whether `block` is read from the received block `name`."""
    return name in (block, block.whole)


def reads(instruction: object, name: Block) -> bool:
    if isinstance(instruction, Do):
        return any(is_held_as(name, block) for block in (*instruction.attend.qs, *instruction.attend.kvs))
    return isinstance(instruction, Post) and any(is_held_as(name, transfer.block) for transfer in instruction.sends)


def readers_of(program: Program, name: Block) -> list[int]:
    return [i for i, instruction in enumerate(program) if reads(instruction, name)]


def test_every_step_is_posted_once_and_its_attends_follow(schedules):
    for name, schedule, rank, program in programs(schedules):
        walked = [(i.step, i.attend) for i in program if isinstance(i, Do)]
        planned = [(t, attend) for t, step in enumerate(schedule.steps) for attend in step.attends[rank]]
        assert walked == planned, name
        steps = [i.step for i in program if isinstance(i, Post | Do)]
        assert steps == sorted(steps), name
        assert [i.step for i in program if isinstance(i, Post)] == list(range(schedule.num_steps)), name


def test_every_send_of_one_rank_is_a_receive_of_another(subtests, schedules):
    for name, schedule in schedules.items():
        with subtests.test(name):
            ranks = range(schedule.world_size)
            sent = [message for rank in ranks for message in sends_of(compile_rank(schedule, rank))]
            received = [message for rank in ranks for message in receives_of(compile_rank(schedule, rank))]
            assert sorted(sent, key=str) == sorted(received, key=str), name
            planned = sum(len(step.transfers) for step in schedule.steps)
            merged = sum(len(step.merges) for step in schedule.steps) * len(ranks) * (len(ranks) - 1)
            assert len(sent) == planned + merged, name


def test_an_input_is_waited_for_at_its_first_reader(schedules):
    for name, _, _, program in programs(schedules):
        places, posts = place_of(program), posts_of(program)
        for t, transfer in receives_of(program):
            if transfer.block.is_sum:
                continue
            arrived = places[Arrived(t, transfer)]
            first = readers_of(program, transfer.block)[0]
            assert posts[t] < arrived < first, (name, transfer)
            between = [i for i in program[arrived + 1 : first] if isinstance(i, Post | Do)]
            assert not between, (name, transfer)


def test_every_sum_that_arrives_is_merged_within_two_steps(schedules):
    """Also before a transfer takes it away; parts of one sum merge in the order of the schedule."""
    for name, schedule, _, program in programs(schedules):
        places, posts = place_of(program), posts_of(program)
        waits: dict[Block, list[int]] = {}
        for t, transfer in receives_of(program):
            if not transfer.block.is_sum:
                continue
            is_merge = transfer.block in [merge.block for merge in schedule.step(t).merges]
            wait = places[AllMerged(t, transfer.block) if is_merge else Arrived(t, transfer)]
            leaves = [posts[when] for when, sent in sends_of(program) if when > t and sent.block == transfer.block]
            deadline = min([*posts[t + 2 : t + 3], *leaves[:1], len(program)])
            assert posts[t] < wait < deadline, (name, transfer)
            waits.setdefault(transfer.block, []).append(wait)
        for block, of_block in waits.items():
            assert of_block == sorted(of_block), (name, block)


def test_every_send_is_waited_for_once_and_in_time(schedules):
    """Before the receives of the step of its first reader are posted; a rank's own blocks, at the end."""
    for name, schedule, rank, program in programs(schedules):
        places, posts = place_of(program), posts_of(program)
        waits = [i for i in program if isinstance(i, Sent)]
        assert sorted(waits, key=str) == sorted([Sent(*send) for send in sends_of(program)], key=str), name
        for t, transfer in sends_of(program):
            read = t + 1 if transfer.block.is_sum else first_read(schedule, t, transfer)
            deadline = min([*posts[read + 1 : read + 2], len(program)])
            sent = places[Sent(t, transfer)]
            if transfer.block in (Block("kv", rank), Block("q", rank), Block("q_grad", rank)):
                assert max(i for i, it in enumerate(program) if isinstance(it, Post | Do | Arrived)) < sent, name
            else:
                assert posts[t] < sent < deadline, (name, transfer)


def first_read(schedule: Schedule, t: int, transfer: Transfer) -> int:
    """Return the step in which the receiver first reads a block that arrives in step t."""
    program = compile_rank(schedule, transfer.dst)
    return next(program[i].step for i in readers_of(program, transfer.block) if program[i].step > t)


def test_every_received_input_is_dropped_after_its_last_reader(schedules):
    for name, _, _, program in programs(schedules):
        places = place_of(program)
        received = [transfer.block for _, transfer in receives_of(program) if not transfer.block.is_sum]
        dropped = [i.block for i in program if isinstance(i, Drop)]
        assert sorted(dropped, key=str) == sorted(received, key=str), name
        for block in received:
            drop = places[Drop(block)]
            assert readers_of(program, block)[-1] < drop, (name, block)
            for t, transfer in sends_of(program):
                if is_held_as(block, transfer.block):
                    assert places[Sent(t, transfer)] < drop, (name, transfer)


def most_buffers(program: Program) -> int:
    """Count the largest number of inputs received or in flight at once, which is the number of buffers."""
    now = most = 0
    for instruction in program:
        if isinstance(instruction, Post):
            now += sum(not transfer.block.is_sum for transfer in instruction.receives)
            most = max(most, now)
        now -= isinstance(instruction, Drop)
    assert now == 0
    return most


@pytest.mark.parametrize("backward", SIDES)
@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("algorithm", ["pass_kv", "pass_q"])
def test_a_ring_needs_two_buffers(subtests, algorithm, direction, backward):
    for world_size in (2, 3, 4, 5, 8, 16):
        with subtests.test(world_size=world_size):
            visible = rs.Visible.of(np.ones((world_size, world_size)))
            options = {"heads": rs.Heads(1, 1), "direction": direction, "backward": backward}
            schedule = rs.schedule.build_schedule(algorithm, visible, **options)
            for rank in range(world_size):
                assert most_buffers(compile_rank(schedule, rank)) == min(2, world_size - 1), f"{world_size} ranks"


@pytest.mark.parametrize("backward", SIDES)
@pytest.mark.parametrize("mesh", [(2, 2), (2, 4), (4, 2), (3, 3)], ids=str)
def test_a_transfer_between_nodes_has_a_whole_phase(mesh, backward):
    """Neither sender nor receiver waits for it before the last step of the phase has been computed."""
    outer, inner = mesh
    world_size = outer * inner
    visible = rs.Visible.of(np.ones((world_size, world_size)))
    schedule = rs.schedule.build_schedule(
        "double_ring", visible, heads=rs.Heads(1, 1), mesh=rs.Mesh(*mesh), backward=backward
    )
    crossings = 0
    for rank in range(world_size):
        program = compile_rank(schedule, rank)
        places = place_of(program)
        last_do = {i.step: place for i, place in places.items() if isinstance(i, Do)}
        crossing = [
            *(Sent(*send) for send in sends_of(program) if send[1].dst // inner != rank // inner),
            *(Arrived(*receive) for receive in receives_of(program) if receive[1].src // inner != rank // inner),
        ]
        for wait in crossing:
            if not wait.transfer.block.is_sum:
                assert wait.step % inner == 0
                assert places[wait] > last_do[wait.step + inner - 1], wait
                crossings += 1
    assert crossings == 2 * world_size * (outer - 1)


# Bound programs: which tiles may overwrite what their sum holds.

MIXED_HEADS = """2 ranks, heads 4/2
step │ rank 0 │ rank 1
0 │ q0[0:2]×kv0[0:1] q0×kv* q0[2:4]×kv0[1:2] kv0→1 │ q1[0:1]×kv1[0:1] q1[1:2]×kv1[0:1] q1×kv* q1[2:4]×kv1[1:2] kv1→0
1 │ q0×kv1 │ q1[0:2]×kv0[0:1] q1[2:4]×kv0[1:2]"""


def bound_programs():
    """Programs bound to layouts: random ones, and one that names the heads of a rank's own sum in several ways."""
    layout = rs.Layout(((rs.Span(0, 5),), (rs.Span(5, 9),)), replicated=(rs.Span(9, 12),))
    problems = [("mixed heads", rs.schedule.parse_schedule(MIXED_HEADS), rs.full(), layout, layout, rs.Heads(4, 2))]
    for sample in make_samples(4, 80):
        mask = rs.documents(sample.spec[1])
        problems.append((sample.name, sample.schedule, mask, sample.layout, sample.kv_layout, sample.heads))
    for name, schedule, mask, layout, kv_layout, heads in problems:
        problem = Problem(mask, layout, kv_layout, Shapes((), heads, 4, 3, 8, 8))
        for rank in range(schedule.world_size):
            yield f"rank {rank} of {name}", heads, bind(compile_rank(schedule, rank), problem)


@pytest.mark.wide
def test_only_a_tile_that_nothing_came_before_is_first():
    """Per head: not after another tile of the same queries, nor after a part has arrived."""
    num_first = 0
    num_begun: Counter[str] = Counter()
    for name, heads, program in bound_programs():
        begun: set[tuple[str, int, int]] = set()

        def parts(block: Block, heads: rs.Heads = heads) -> set[tuple[str, int, int]]:
            num_heads = heads.num_kv_heads if block.kind == "dkv" else heads.num_heads
            return {(block.kind, block.owner, head) for head in block.heads or range(num_heads)}

        for instruction in program:
            if isinstance(instruction, Compute):
                for tile in instruction.tiles:
                    assert not (any(tile.firsts) and parts(tile.sums[0]) & begun), f"{name}: {tile.q}×{tile.kv}"
                    seen: set[int] = set()
                    for piece, is_first in zip(tile.pieces, tile.firsts, strict=True):
                        rows = set(range(piece.q.start, piece.q.stop))
                        assert not (is_first and rows & seen), f"{name}: {tile.q}×{tile.kv}"
                        seen |= rows
                    for block, begins, rows in zip(tile.sums, tile.begins, tile.pieces[0], strict=False):
                        assert not begins or not parts(block) & begun, f"{name}: {block}"
                        assert not begins or (block.heads is None and rows.start == 0), f"{name}: {block}"
                        num_begun[block.kind] += begins
                    num_first += sum(tile.firsts)
                    begun |= {part for block in tile.sums for part in parts(block)}
            elif isinstance(instruction, Arrived) and instruction.transfer.block.is_sum:
                begun |= parts(instruction.transfer.block)
            elif isinstance(instruction, AllMerged):
                begun |= parts(instruction.block)
    assert num_first > 300
    assert min(num_begun["out"], num_begun["dq"], num_begun["dkv"]) > 10, num_begun
