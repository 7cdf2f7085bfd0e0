"""What does the page show of one simulated run? Every number is the simulator's; the script of the page adds none.

A run names its layout, mask and queries by the keys of tables that runs share, so that sixty runs stay small.
"""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringspan.errors import UnsupportedError
from ringspan.layout import Layout
from ringspan.page.replay import Replay, ReplayInputs, replay
from ringspan.schedule import ALL
from ringspan.simulate import RankStep, Simulation
from ringspan.simulate.lesson.dense import dense_attention

Json = dict[str, Any]
Array = npt.NDArray[np.floating]

HEAD = 0  # the head whose queries can be followed
MOST_QUERIES = 16  # that can be followed in one run
ROUNDING = 1e-3  # of a per cent: the whole weight in float32 is 100 %, not 99 %
EVERYONE = "*"  # the owner of rows that every rank holds


def describe_run(simulation: Simulation) -> Json:
    """One run as plain data."""
    problem = simulation.case.problem
    shown = replay(simulation.schedule, problem, inputs_of(simulation))
    truth, true_lse = dense_result(simulation)
    return {
        "ranks": problem.world_size,
        "num_steps": simulation.schedule.num_steps,
        "rows": describe_rows(problem.layout),
        "columns": describe_rows(problem.kv_layout),
        "visible": describe_mask(simulation),
        "steps": [[_describe_cell(cell) for cell in step] for step in simulation.trace],
        "sent": _running_totals(simulation, lambda cell: sum(event.nbytes for event in cell.sent)),
        "idle": idle_shares(simulation),
        "queries": follow_queries(shown, truth, true_lse),
        "error": round_error(np.abs(simulation.out.reshape(truth.shape) - truth).max(initial=0.0)),
        "imbalance": _imbalance(simulation),
    }


def inputs_of(simulation: Simulation) -> ReplayInputs:
    """The whole arrays, with an axis of heads; there is no axis of batches."""
    case = simulation.case
    if case.q.ndim > 3:
        raise UnsupportedError(
            "the page shows one sequence, of shape (seq, dim) or (heads, seq, dim)",
            argument="q.shape",
            value=case.q.shape,
            remedy="simulate one entry of the batch",
        )
    return ReplayInputs(*(x[None] if x.ndim == 2 else x for x in (case.q, case.k, case.v)))


def dense_result(simulation: Simulation) -> tuple[Array, Array]:
    """The reference: attention over the whole matrix in float64."""
    case = simulation.case
    q_positions = case.problem.layout.all_positions()
    kv_positions = case.problem.kv_layout.all_positions()
    return dense_attention(*inputs_of(simulation), case.problem.mask, q_positions, kv_positions, np.float64)


def describe_rows(layout: Layout) -> Json:
    """The positions of the matrix's rows, and the rank that owns each."""
    owner_of = {int(p): str(rank) for rank in range(layout.world_size) for p in layout.own_positions(rank)}
    positions = [int(p) for p in layout.all_positions()]
    return {"positions": positions, "owners": [owner_of.get(p, EVERYONE) for p in positions]}


def describe_mask(simulation: Simulation) -> list[str]:
    """A row of 0 and 1 per query: which keys it may see."""
    problem = simulation.case.problem
    allowed = problem.mask.allowed(problem.layout.all_positions(), problem.kv_layout.all_positions())
    return ["".join("1" if sees else "0" for sees in row) for row in allowed]


def _describe_cell(cell: RankStep) -> list[list[Any]]:
    """The blocks that a rank received, its tiles (q, kv, pairs) and its messages (block, rank, bytes) in one step."""
    foreign = [str(block) for block in cell.held if block.owner not in (cell.rank, ALL)]
    tiles = [[str(event.blocks[0]), str(event.blocks[1]), event.pairs] for event in cell.attended]
    sends = [[str(event.blocks[0]), event.peer, event.nbytes] for event in cell.sent]
    return [foreign, tiles, sends]


def count_pairs(cell: RankStep) -> int:
    """Visible pairs that a rank computes in a step, times its heads where heads are split."""
    return sum(
        event.pairs * (len(event.blocks[0].heads) if event.blocks[0].heads is not None else 1)
        for event in cell.attended
    )


def idle_shares(simulation: Simulation) -> list[list[float]]:
    """[step][rank]: the share of the time until then in which a rank waits, if a step takes as long as its busiest."""
    done = np.array([[count_pairs(cell) for cell in step] for step in simulation.trace], np.int64)
    busy = done.cumsum(axis=0)
    elapsed = done.max(axis=1).cumsum()[:, None]
    shares = np.where(elapsed > 0, 1 - busy / np.maximum(elapsed, 1), 0.0)
    return [[round(float(share), 4) for share in row] for row in shares]


def _imbalance(simulation: Simulation) -> float:
    """Time over ideal time, by the same rule as the idle shares, to two digits: an exact half is rounded up."""
    done = np.array([[count_pairs(cell) for cell in step] for step in simulation.trace])
    return round(float(done.max(axis=1).sum() * done.shape[1] / max(1, done.sum())) + 1e-9, 2)


def _running_totals(simulation: Simulation, count: Callable[[RankStep], int]) -> list[list[int]]:
    steps = np.array([[count(cell) for cell in step] for step in simulation.trace], np.int64)
    return [[int(total) for total in row] for row in steps.cumsum(axis=0)]


def follow_queries(shown: Replay, truth: Array, true_lse: Array) -> Json:
    """Log-sum-exp, share of the softmax weight and error of some queries (head 0) after each step."""
    rows = pick_rows(truth.shape[-2])
    lse = np.array([step[HEAD, rows] for step in shown.lses])
    error = np.array([np.abs(step[HEAD, rows] - truth[HEAD, rows]).max(axis=-1) for step in shown.outs])
    with np.errstate(invalid="ignore"):
        share = np.where(np.isneginf(lse), 0.0, np.exp(lse - true_lse[HEAD, rows]))
    return {
        "rows": rows,
        "lse": [[_round_lse(value) for value in column] for column in lse.T],
        "share": [[int(100 * value + ROUNDING) for value in column] for column in share.T],
        "error": [[round_error(value) for value in column] for column in error.T],
    }


def pick_rows(num_rows: int) -> list[int]:
    """All rows, or evenly spaced ones with the first and the last."""
    picked = np.linspace(0, num_rows - 1, min(num_rows, MOST_QUERIES)).round().astype(int)
    return [int(row) for row in dict.fromkeys(picked.tolist())]


def _round_lse(value: float) -> float | None:
    return round(float(value), 2) if np.isfinite(value) else None


def round_error(value: float) -> float:
    """Two digits: 2.2e-16."""
    return float(f"{float(value):.1e}")


def share_tables(runs: Iterable[Json], tables: Json) -> list[Json]:
    """The runs with rows, columns and masks replaced by their number in `tables`, which holds each of them once."""
    found: dict[str, dict[str, int]] = {name: {} for name in ("rows", "visible")}
    shared = []
    for run in runs:
        run = dict(run)
        for name, table in (("rows", "rows"), ("columns", "rows"), ("visible", "visible")):
            numbers, key = found[table], repr(run[name])
            if key not in numbers:
                numbers[key] = len(numbers)
                tables.setdefault(table, []).append(run[name])
            run[name] = numbers[key]
        shared.append(run)
    return shared
