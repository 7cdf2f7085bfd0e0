"""When does the ring hide its messages? Timelines for twelve lengths, twelve bandwidths and two layouts.

The loads are those of the real schedules; the page picks one of the timelines and draws it. Times are whole numbers
of a thousandth of the slower layout's time, which is finer than a screen can show.
"""

from dataclasses import replace
from typing import Any

from ringspan.algorithms import build_schedule
from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.layout import contiguous, zigzag
from ringspan.mask import causal
from ringspan.page.units import format_tokens
from ringspan.planner.catalog import load_device
from ringspan.planner.cost import Shard
from ringspan.planner.software import RINGSPAN
from ringspan.planner.timeline import Load, Timeline, run_timeline, schedule_loads
from ringspan.program.problem import Problem, Shapes
from ringspan.schedule import Heads, visible_blocks

WORLD_SIZE = 4
DEVICE = "h100"
TOKENS = tuple(2**k for k in range(9, 21))
GIGABYTES_PER_S = (1, 2, 5, 10, 12.5, 25, 50, 100, 200, 400, 450, 900)
HEADS, HEAD_DIM = Heads(32, 8), 128
LAYOUTS = {"contiguous": contiguous, "zigzag": zigzag}
PARTS = 1000
HIDDEN = 0.01  # of the time blocked by messages: below this the ring hides them


def describe_hiding() -> dict[str, Any]:
    """The table, the structure that its timelines share, and the assumptions."""
    loads = {tokens: {name: build_loads(name, tokens) for name in LAYOUTS} for tokens in TOKENS}
    return {
        "device": load_device(DEVICE).id,
        "ranks": WORLD_SIZE,
        "heads": list(HEADS),
        "head_dim": HEAD_DIM,
        "tokens": [format_tokens(tokens) for tokens in TOKENS],
        "num_tokens": list(TOKENS),
        "bandwidths": list(GIGABYTES_PER_S),
        "layouts": {name: _structure(loads[TOKENS[-1]][name]) for name in LAYOUTS},
        "cells": [[_cell(loads[tokens], rate) for rate in GIGABYTES_PER_S] for tokens in TOKENS],
    }


def time_ring(loads: list[Load], gigabytes_per_s: float) -> Timeline:
    """The timeline on links of that rate."""
    near = load_device(DEVICE).near._replace(bytes_per_s=gigabytes_per_s * 1e9)
    return run_timeline(loads, WORLD_SIZE, near, near, record=True)


def build_loads(layout_name: str, tokens: int) -> list[Load]:
    """The ring's computations and messages, step by step."""
    layout, mask, device = LAYOUTS[layout_name](tokens, WORLD_SIZE), causal(), load_device(DEVICE)
    shapes = Shapes((1,), HEADS, HEAD_DIM, HEAD_DIM, 2, 4)
    schedule = build_schedule(DEFAULT_ALGORITHM, visible_blocks(mask, layout))
    shard = Shard.dense(1, *HEADS, HEAD_DIM, 2, RINGSPAN)
    problem = Problem(mask, layout, layout, shapes)
    return list(schedule_loads(schedule, problem, shard, replace(device), WORLD_SIZE))


def _structure(loads: list[Load]) -> dict[str, Any]:
    """The computations and messages of each step, which are the same at every length."""
    return {
        "tiles": [list(load.names) for load in loads],
        "messages": [
            [t, int(src), int(dst), name]
            for t, load in enumerate(loads)
            for one in load.rounds
            for src, dst, name in zip(one.src, one.dst, one.names, strict=True)
        ],
    }


def _cell(loads: dict[str, list[Load]], rate: float) -> dict[str, Any]:
    timelines = {name: time_ring(of_layout, rate) for name, of_layout in loads.items()}
    unit_s = max(timeline.makespan_s for timeline in timelines.values()) / PARTS
    return {"unit_s": _short(unit_s), **{name: _drawn(one, unit_s) for name, one in timelines.items()}}


def _drawn(timeline: Timeline, unit_s: float) -> dict[str, Any]:
    moments = timeline.moments
    messages = [
        [round(float(start) / unit_s), round(float(arrival) / unit_s)]
        for moment in moments
        for start_s, arrival_s in moment.messages
        for start, arrival in zip(start_s, arrival_s, strict=True)
    ]
    exposed_s = timeline.exposed_s
    return {
        "s": [_short(timeline.makespan_s), *(_short(float(x.max())) for x in (timeline.compute_s, exposed_s))],
        "idle": [round(100 * float(idle)) for idle in 1 - timeline.compute_s / timeline.makespan_s],
        "hidden": bool(exposed_s.max() < HIDDEN * timeline.makespan_s),
        "begin": [[round(float(x) / unit_s) for x in moment.begin_s] for moment in moments],
        "busy": [[round(float(x) / unit_s) for x in moment.busy_s] for moment in moments],
        "moves": messages,
    }


def _short(seconds: float) -> float:
    return float(f"{seconds:.3g}")
