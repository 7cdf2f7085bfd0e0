"""Ranks that make different calls, on 2, 3 and 4 gloo processes: one error on all ranks, and the group stays usable."""

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringspan as rs
from ringspan.adapters.gradients import reduce_gradients
from ringspan.compat.packed import llama3_documents
from ringspan.compat.ring_attention_pytorch.distributed import all_gather_variable_dim
from support.calls import MARGIN_S, SEQ_LEN, Arguments, Outcome, arguments, attend, outcome, outcome_of
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


def reduce_weights() -> None:
    weights = torch.nn.Linear(4, 3)
    weights(torch.ones(2, 4)).sum().backward()
    reduce_gradients(weights, None)


OTHER_CALLS: dict[str, Callable[[], object]] = {
    "reduce_gradients": reduce_weights,
    "ranks_agree": lambda: rs.verify.ranks_agree([torch.ones(3)]),
    "context_parallel_unshard": lambda: rs.context_parallel_unshard(None, [torch.ones(4)], [0]),
    "all_gather_variable_dim": lambda: all_gather_variable_dim(torch.ones(4)),
    "llama3_documents": lambda: llama3_documents(torch.tensor([0, 4]), slice(0, 4), 4, None),
}


@pytest.mark.parametrize("same_host", ["0", "1"], ids=["by gloo", "by shared memory"])
def test_one_rank_attends_while_the_others_make_another_call(subtests: pytest.Subtests, same_host: str) -> None:
    """Every call agrees before its first payload; gloo kills a process that receives more bytes than it expects."""
    results = values(run_ranks(run_other_calls, 3, same_host))
    for name, outcomes in zip(OTHER_CALLS, zip(*results, strict=True), strict=True):
        with subtests.test(name):
            assert {outcome.error for outcome in outcomes} == {"TransportError"}
            assert len({outcome.message for outcome in outcomes}) == 1
            assert f"call: rank 1 has attention, ranks 0, 2 have {name}" in outcomes[0].message


def run_other_calls(rank: int, same_host: str) -> list[Outcome]:
    os.environ["RINGSPAN_SAME_HOST"] = same_host
    good = arguments(rank, 3)
    expected = attend(good)
    outcomes = []
    for other in OTHER_CALLS.values():
        outcomes.append(outcome_of((lambda: attend(good)) if rank == 1 else other))
        assert torch.equal(attend(good), expected)
    return outcomes
