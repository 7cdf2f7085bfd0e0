"""What happens after one mistake? The error of its result, and the verdict of the proof on such a schedule.

Each fault is run for real on the lesson's ring: the numbers come from the executor, the refusal from `validate`. Where
the schedule is right and only the arithmetic or the balance is wrong, the proof has nothing to refuse, and says so.
"""

from typing import Any, NamedTuple

import numpy as np

from ringspan.algorithms import build_schedule
from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.errors import ScheduleError
from ringspan.layout import Layout, contiguous, zigzag
from ringspan.mask import causal
from ringspan.page.cases import SEQ_LEN, random_inputs
from ringspan.page.replay import Deliver, PlainSum, Replay, as_sent, replay
from ringspan.page.runs import follow_queries, idle_shares, pick_rows, round_error
from ringspan.program.execute import RankState
from ringspan.schedule import Attend, Block, Schedule, Step, Transfer, format_schedule, validate, visible_blocks
from ringspan.simulate import Simulation, simulate_attention
from ringspan.simulate.lesson.dense import dense_attention

WORLD_SIZE = 4


class LessonFault(NamedTuple):
    """A mistake: the run with the mistake, and the schedule that describes this run."""

    key: str
    label: str
    about: str
    lesson: str
    layout: Layout
    ran: Schedule
    described: Schedule
    state: type[RankState] = RankState
    deliver: Deliver = as_sent


def describe_faults() -> list[dict[str, Any]]:
    """The correct run first, then each fault."""
    return [_describe(fault) for fault in list_faults()]


def list_faults() -> list[LessonFault]:
    """All on four ranks under a causal mask, with the ring that passes keys and values."""
    layout = zigzag(SEQ_LEN, WORLD_SIZE)
    right = ring(layout)
    overwritten, deliver = _overwrite(right)
    shorter = Schedule.of_steps(WORLD_SIZE, None, _without_the_last(right))
    longer = Schedule.of_steps(WORLD_SIZE, None, _with_one_more(right))
    turned = Schedule.of_steps(
        WORLD_SIZE, None, [Step(mine.attends, theirs.transfers) for mine, theirs in _both_ways(layout)]
    )
    return [
        LessonFault(
            "none",
            "no mistake",
            "Nothing is wrong. Every rank computes on the block it holds, sends it on, and merges the outputs by their "
            "log-sum-exp.",
            "The proof passes: every visible pair is computed exactly once. What is left of the error is rounding.",
            layout,
            right,
            right,
        ),
        LessonFault(
            "plain_sum",
            "add outputs as they are",
            "The outputs of the blocks are added, without weighting each by its share of the softmax.",
            "The proof passes, because the schedule is right; the mistake is in the arithmetic. Each block's "
            "output was "
            "divided by the sum of its own weights. Only the log-sum-exp tells how much that is of the whole sum.",
            layout,
            right,
            right,
            state=PlainSum,
        ),
        LessonFault(
            "overwrite",
            "overwrite the receive buffer",
            "Rank 2 has only one receive buffer. In step 1 the next block, kv0, arrives in it before kv1 was used.",
            "A rank needs two buffers: one to compute on, one to receive into. Here rank 2 computes on kv0 "
            "twice and on "
            "kv1 never, and it sends the wrong block to rank 3.",
            layout,
            right,
            overwritten,
            deliver=deliver,
        ),
        LessonFault(
            "direction",
            "get the direction wrong",
            "Blocks move to the next rank, but the code assumes that they come from the other side of the ring.",
            "At step t rank r holds block (r − t) mod P, but it applies the mask of block (r + t) mod P. With a full "
            "mask the result would still be right, so this bug can stay hidden until someone uses a causal mask.",
            layout,
            ring(layout, "reverse"),
            turned,
            deliver=_from_the_other_side,
        ),
        LessonFault(
            "last_hop",
            "drop the last hop",
            "The ring stops one step early, so the last block never arrives and its keys are missing.",
            "P ranks need P steps and P − 1 hops. The output still looks plausible, because most keys were seen.",
            layout,
            shorter,
            shorter,
        ),
        LessonFault(
            "extra_hop",
            "one hop too many",
            "The ring goes on until every block is back at its owner, which computes on it a second time.",
            "A key that is counted twice has twice its weight in the softmax.",
            layout,
            longer,
            longer,
        ),
        LessonFault(
            "contiguous",
            "contiguous instead of zigzag",
            "Each rank owns one run of neighbouring tokens. The mask is causal.",
            "The proof passes and the result is exact. Only the balance is bad: the tokens of rank 0 see no "
            "keys of other "
            "ranks, so rank 0 computes in one step and waits in the others.",
            contiguous(SEQ_LEN, WORLD_SIZE),
            ring(contiguous(SEQ_LEN, WORLD_SIZE)),
            ring(contiguous(SEQ_LEN, WORLD_SIZE)),
        ),
    ]


def ring(layout: Layout, direction: str = "forward") -> Schedule:
    """The correct schedule."""
    return build_schedule(DEFAULT_ALGORITHM, visible_blocks(causal(), layout), direction=direction)  # type: ignore[arg-type]


def refusal_of(fault: LessonFault) -> str | None:
    """The error of the schedule's proof, with the faulty step marked; None if the proof succeeds."""
    try:
        validate(fault.described, visible_blocks(causal(), fault.layout))
    except ScheduleError as error:
        return str(error)
    return None


def run_fault(fault: LessonFault) -> Replay:
    """Outputs step by step."""
    return replay(
        fault.ran,
        _right_run(fault.layout).case.problem,
        random_inputs(SEQ_LEN, SEQ_LEN),
        state=fault.state,
        deliver=fault.deliver,
    )


def _describe(fault: LessonFault) -> dict[str, Any]:
    shown = run_fault(fault)
    inputs = random_inputs(SEQ_LEN, SEQ_LEN)
    positions = np.arange(SEQ_LEN)
    truth, true_lse = dense_attention(*inputs, causal(), positions, positions, np.float64)
    right = _right_run(fault.layout)
    rows = pick_rows(SEQ_LEN)
    by_row = np.abs(shown.out - truth).max(axis=(0, -1))
    return {
        "key": fault.key,
        "label": fault.label,
        "about": fault.about,
        "lesson": fault.lesson,
        "error": round_error(by_row.max()),
        "errors": [round_error(by_row[row]) for row in rows],
        "wrong": int((by_row > 1e-9).sum()),
        "total": SEQ_LEN,
        "followed": follow_queries(shown, truth, true_lse)["error"],
        "rows": rows,
        "idle": idle_shares(right)[-1],
        "grid": format_schedule(fault.described),
        "refusal": refusal_of(fault),
    }


def _right_run(layout: Layout) -> Simulation:
    return simulate_attention(*random_inputs(SEQ_LEN, SEQ_LEN), mask=causal(), layout=layout)


def _overwrite(right: Schedule) -> tuple[Schedule, Deliver]:
    """In step 1 rank 2 attends and sends on kv0, which has just overwritten kv1; rank 3 takes it for kv1."""
    lost, late = Block("kv", 1), Block("kv", 0)

    def deliver(step: int, transfer: Transfer) -> tuple[int, Transfer]:
        return (1, Transfer(late, 1, 2)) if transfer == Transfer(lost, 1, 2) else (step, transfer)

    steps = list(right.steps)
    attends = [list(of_rank) for of_rank in steps[1].attends]
    attends[2] = [Attend(attend.qs, (late,)) for attend in attends[2]]
    transfers = [Transfer(late, 2, one.dst) if (one.src, one.block) == (2, lost) else one for one in steps[1].transfers]
    steps[1] = Step(attends, transfers)
    return Schedule.of_steps(WORLD_SIZE, None, steps), deliver


def _both_ways(layout: Layout) -> list[tuple[Step, Step]]:
    """The attends of the ring that turns back, and the transfers of the one that turns forward."""
    return list(zip(ring(layout, "reverse").steps, ring(layout).steps, strict=True))


def _from_the_other_side(step: int, transfer: Transfer) -> tuple[int, Transfer]:
    """A delivery in which each rank takes the previous rank's block for the block of the rank `step` places ahead."""
    source = (transfer.dst - 1) % WORLD_SIZE
    return step, Transfer(Block("kv", (source + step) % WORLD_SIZE), source, (source - 1) % WORLD_SIZE)


def _without_the_last(right: Schedule) -> list[Step]:
    *steps, _ = right.steps
    return [*steps[:-1], Step(steps[-1].attends)]


def _with_one_more(right: Schedule) -> list[Step]:
    """The blocks make their last hop home, where they are attended once more."""
    *steps, last = right.steps
    ranks = range(WORLD_SIZE)
    home = [Transfer(Block("kv", (rank + 1) % WORLD_SIZE), rank, (rank + 1) % WORLD_SIZE) for rank in ranks]
    again = [[Attend((Block("q", rank),), (Block("kv", rank),))] for rank in ranks]
    return [*steps, Step(last.attends, home), Step(again)]
