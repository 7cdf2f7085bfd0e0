"""Ranks that make different calls, on 2, 3 and 4 gloo processes: one error on all ranks, and the group stays usable."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringspan as rs
from support.calls import MARGIN_S, SEQ_LEN, Arguments, Outcome, arguments, attend, outcome
from support.ranks import run_ranks, values

pytestmark = [pytest.mark.xdist_group("processes"), pytest.mark.timeout(120)]

each_world_size = pytest.mark.parametrize("world_size", [2, 3, 4])


def every(change: Callable[[torch.Tensor], torch.Tensor], names: str = "qkv") -> Callable[[Arguments, int], Arguments]:
    return lambda call, _: {name: change(call[name]) for name in names}


def given(**values: Any) -> Callable[[Arguments, int], Arguments]:
    return lambda *_: values


DISAGREEMENTS: dict[str, tuple[Callable[[Arguments, int], Arguments], str]] = {
    "heads": (every(lambda x: x.repeat(1, 2, 1, 1)), "24 over 24"),
    "batch": (every(lambda x: x.repeat(3, 1, 1, 1)), "3"),
    "head_dim": (every(lambda x: x[..., :5]), "5, 5 for v"),
    "dtype": (every(torch.Tensor.double), "torch.float64"),
    "mask": (given(mask=rs.full()), "full()"),
    "layout": (lambda _, world_size: {"layout": rs.striped(SEQ_LEN, world_size)}, "<Layout of 48 positions"),
    "scale": (given(scale=2.0), "2.0"),
    "algorithm": (given(algorithm="all_gather"), "all_gather"),
    "kernel": (given(kernel="reference"), "reference"),
    "pass": (every(lambda x: x.clone().requires_grad_()), "forward, to be differentiated"),
}

REFUSALS: dict[str, tuple[Callable[[Arguments, int], Arguments], str]] = {
    "a short shard": (every(lambda x: x[:, :, 1:]), "ShapeError: q.shape="),
    "a v of another dtype": (every(torch.Tensor.double, "v"), "ShapeError: dtypes torch.float32"),
    "a layout for other ranks": (
        lambda _, world_size: {"layout": rs.zigzag(SEQ_LEN, world_size + 1)},
        "LayoutError: layout: it is for",
    ),
    "an unknown algorithm": (given(algorithm="magic"), "UnsupportedError: algorithm='magic'"),
}


@each_world_size
@pytest.mark.parametrize("odd", ["first", "last"])
def test_ranks_that_disagree(subtests: pytest.Subtests, world_size: int, odd: str) -> None:
    """All ranks raise the same error, and the next call works."""
    odd_rank = 0 if odd == "first" else world_size - 1
    results = values(run_ranks(run_disagreements, world_size, world_size, odd_rank))
    for (name, (_, value)), outcomes in zip(DISAGREEMENTS.items(), zip(*results, strict=True), strict=True):
        with subtests.test(name):
            assert {outcome.error for outcome in outcomes} == {"TransportError"}, name
            assert len({outcome.message for outcome in outcomes}) == 1, name
            assert f"{name}: rank" in outcomes[0].message
            assert f"rank {odd_rank} has {value}" in outcomes[0].message
            assert max(outcome.seconds for outcome in outcomes) < MARGIN_S, name


def run_disagreements(rank: int, world_size: int, odd_rank: int) -> list[Outcome]:
    good = arguments(rank, world_size)
    expected = attend(good)
    outcomes = []
    for change, _ in DISAGREEMENTS.values():
        odd = change(good, world_size) if rank == odd_rank else {}
        outcomes.append(outcome(good | odd))
        assert torch.equal(attend(good), expected)
    return outcomes


@each_world_size
@pytest.mark.parametrize("odd", ["first", "last"])
def test_a_rank_whose_arguments_are_refused(subtests: pytest.Subtests, world_size: int, odd: str) -> None:
    odd_rank = 0 if odd == "first" else world_size - 1
    results = values(run_ranks(run_refusals, world_size, world_size, odd_rank))
    for (name, (_, message)), outcomes in zip(REFUSALS.items(), zip(*results, strict=True), strict=True):
        with subtests.test(name):
            own = outcomes[odd_rank]
            assert f"{own.error}: {own.message}".startswith(message), name
            told = {outcome.message for rank, outcome in enumerate(outcomes) if rank != odd_rank}
            assert told == {f"the call was refused, on rank {odd_rank}: {own.error}: {own.message}"}
            assert max(outcome.seconds for outcome in outcomes) < MARGIN_S, name


def run_refusals(rank: int, world_size: int, odd_rank: int) -> list[Outcome]:
    good = arguments(rank, world_size)
    outcomes = []
    for change, _ in REFUSALS.values():
        odd = change(good, world_size) if rank == odd_rank else {}
        outcomes.append(outcome(good | odd))
    attend(good)
    return outcomes


@each_world_size
def test_a_rank_that_calls_another_signature_it_used_before(world_size: int) -> None:
    """Known signatures are compared without sending a description."""
    outcomes = values(run_ranks(run_known_signatures, world_size, world_size))
    assert len({outcome.message for outcome in outcomes}) == 1
    assert f"mask: rank {world_size - 1} has full()" in outcomes[0].message or world_size == 2
    assert "full()" in outcomes[0].message
    assert "causal()" in outcomes[0].message


def run_known_signatures(rank: int, world_size: int) -> Outcome:
    causal = arguments(rank, world_size)
    full = causal | {"mask": rs.full()}
    for _ in range(2):
        expected = attend(causal)
        attend(full)
    result = outcome(full if rank == world_size - 1 else causal)
    assert torch.equal(attend(causal), expected)
    return result
