"""The page of one simulation: the runs of `ringspan simulate`, or any `Simulation`, stepped through."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ringspan.errors import UnsupportedError
from ringspan.page.cases import DECODE_LABELS
from ringspan.page.report import build_report, table
from ringspan.page.runs import Json, describe_run, share_tables
from ringspan.simulate import Simulation, simulate_attention
from ringspan.simulate.lesson import LessonSettings
from ringspan.simulate.lesson.decode import first_decode_steps
from ringspan.simulate.lesson.prefill import Tokens

MOST_TOKENS = 256
MOST_RANKS = 32


def build_simulation_page(simulations: Mapping[str, Simulation], about: str, command: str = "") -> str:
    """The page of some runs by name; `about` is a sentence on their mask, layout and sizes."""
    for name, simulation in simulations.items():
        problem = simulation.case.problem
        _check_size(name, problem.layout.num_positions, problem.kv_layout.num_positions, problem.world_size)
    runs = {name: describe_run(simulation) for name, simulation in simulations.items()}
    return build_report(
        "Context parallelism, simulated",
        [about, "Every result is compared with dense attention in float64."],
        [_ring_section(runs), _summary(runs)],
        command,
    )


def build_settings_page(settings: LessonSettings, command: str = "") -> str:
    """The page of the algorithms that `ringspan simulate` runs, and of a decode step after them, on random tokens."""
    if settings.reproducible:
        raise UnsupportedError(
            "the page shows the tiles of the default mode; the reproducible mode computes others",
            argument="reproducible",
            value=True,
            remedy="leave it out: the schedule is the same",
        )
    layout = settings.build_layout(settings.layout)
    _check_size("the simulation", settings.seq_len, settings.seq_len, settings.world_size)
    rng = np.random.default_rng(settings.seed)
    tokens = Tokens.random(settings, settings.seq_len, rng)
    simulations = {
        algorithm.replace("_", "-"): simulate_attention(
            tokens.q,
            tokens.k,
            tokens.v,
            mask=settings.mask,
            layout=layout,
            algorithm=algorithm,
            **settings.options(algorithm),  # type: ignore[arg-type]
        )
        for algorithm in settings.algorithms
    }
    decodes = first_decode_steps(settings, tokens, rng)
    simulations |= {DECODE_LABELS[query]: simulation for query, simulation in decodes.items()}
    about = (
        f"{settings.seq_len:,} tokens on {settings.world_size} ranks, {settings.num_heads} query heads over "
        f"{settings.num_kv_heads} KV heads of {settings.head_dim} elements, {settings.layout} layout, mask "
        f"{settings.mask!r}, float32."
    )
    return build_simulation_page(simulations, about, command)


def _check_size(name: str, queries: int, keys: int, ranks: int) -> None:
    if queries * keys > MOST_TOKENS**2 or ranks > MOST_RANKS:
        raise UnsupportedError(
            f"{name} has {keys:,} tokens on {ranks} ranks; the page draws every pair of tokens, for at most "
            f"{MOST_TOKENS} tokens on {MOST_RANKS} ranks",
            remedy="simulate fewer tokens: the schedule is the same for longer sequences",
        )


def _ring_section(runs: Mapping[str, Json]) -> dict[str, Any]:
    tables: Json = {}
    shared = share_tables(runs.values(), tables)
    described = [
        {"key": name, "label": name, "about": _about(name, run), **short}
        for (name, run), short in zip(runs.items(), shared, strict=True)
    ]
    return {
        "kind": "ring",
        "id": "ring",
        "nav": "Step through",
        "title": "Step by step",
        "runs": described,
        "tables": tables,
        "first": next(iter(runs)),
        "first_query": 10**6,
    }


def _about(name: str, run: Json) -> str:
    counts = [len(run[axis]["positions"]) for axis in ("rows", "columns")]
    return f"{name} on {run['ranks']} ranks, in {run['num_steps']} steps: {counts[0]} queries against {counts[1]} keys."


def _summary(runs: Mapping[str, Json]) -> dict[str, Any]:
    rows = []
    for name, run in runs.items():
        total = sum(run["sent"][-1])
        rows.append(
            [
                name,
                (run["num_steps"],) * 2,
                (f"{total:,}", total),
                (f"{run['imbalance']:.2f}", run["imbalance"]),
                (f"{run['error']:.1e}", run["error"]),
            ]
        )
    columns = ["algorithm", ">steps", ">bytes sent", ">time over balanced time", ">largest error"]
    return table("summary", "Side by side", columns, rows)
