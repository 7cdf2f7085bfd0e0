"""Arguments of any kind whatever, one at a time, to every public function: taken, or refused with an error of ours."""

from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ringspan as rs
from support.campaign import HOW_MANY, count
from support.public_calls import CALLS, LAYOUT

ANYTHING = [
    *(None, True, -1, 0, 1, 5, 2**31, 2**70, 1.5, float("nan"), float("inf"), "x", "", b"x", [], [1, 2], [None]),
    *((1, 2), {}, {0: 1}, set(), object(), range(3), np.zeros(3), np.int64(2), np.float32(2.5), np.array(1)),
    *(torch.zeros(2), torch.tensor(3), torch.zeros(1, 2, 3, 4), rs.causal(), rs.Span(0, 3), LAYOUT),
]


def give(name: str, argument: str, value: Any) -> None:
    call = CALLS[name]
    # Asking for much work is not an error; the limits have tests of their own.
    if argument == "timeout_s" or (isinstance(value, int) and not isinstance(value, bool) and value > 1000):
        return
    try:
        call.function(**call.arguments | {argument: value})
    except rs.RingspanError:
        count("argument: refused")
    except Exception as error:
        raise AssertionError(f"{name}({argument}={value!r}): {type(error).__name__}: {error}") from error
    else:
        count("argument: taken")


@HOW_MANY
@given(st.data(), st.sampled_from(sorted(CALLS)), st.sampled_from(range(len(ANYTHING))))
def test_one_argument_of_any_kind(data: st.DataObject, name: str, index: int) -> None:
    give(name, data.draw(st.sampled_from(sorted(CALLS[name].arguments))), ANYTHING[index])


@pytest.mark.parametrize("name", sorted(CALLS))
def test_each_argument_with_each_thing(name: str) -> None:
    for argument in CALLS[name].arguments:
        for value in ANYTHING:
            give(name, argument, value)


@pytest.mark.parametrize("argument", ["contract", "reproducible", "return_lse"])
def test_a_flag_is_true_or_false_and_nothing_else(argument: str) -> None:
    call = CALLS["attention"]
    for value in (2, "x", None, torch.tensor(True)):
        with pytest.raises(rs.ShapeError, match=f"^{argument}: expected True or False, got "):
            call.function(**call.arguments | {argument: value})


def test_tensors_of_attention_are_dense() -> None:
    call = CALLS["attention"]
    nested = torch.nested.nested_tensor([torch.zeros(2, 4), torch.zeros(3, 4)], layout=torch.jagged)
    for tensor in (torch.zeros(1, 2, 8, 4).to_sparse(), nested):
        with pytest.raises(rs.ShapeError, match=r"^k: expected a dense tensor, got a "):
            call.function(**call.arguments | {"k": tensor})


@pytest.mark.parametrize("argument", ["scale", "softcap", "timeout_s"])
def test_a_number_that_is_too_large_for_a_float(argument: str) -> None:
    call = CALLS["attention"]
    for number in (10**400, Fraction(10**400)):
        with pytest.raises(rs.ShapeError, match=f"^{argument}="):
            call.function(**call.arguments | {argument: number})


def test_numbers_of_ranks_have_a_bound() -> None:
    for build in (rs.contiguous, rs.zigzag, rs.striped):
        with pytest.raises(rs.LayoutError, match="at most 65536 ranks"):
            build(8, 10**7)
    with pytest.raises(rs.ShapeError, match="at most 1024 threads"):
        rs.run_in_process(lambda group: None, 10**7)
