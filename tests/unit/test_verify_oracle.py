"""The verifier's oracle against another one, against differences, and against the library's own masks."""

from dataclasses import replace

import numpy as np
import pytest

from ringspan.verify.budget import budget
from ringspan.verify.cases import make_cases, round_to
from ringspan.verify.faults import FaultyRing
from ringspan.verify.oracle import answer, block_parts
from ringspan.verify.outcome import find_deviations
from ringspan.verify.patterns import mask_of, visible
from support import oracle

CASES = make_cases((1, 2, 3, 4, 5))
PLAIN = [case for case in CASES if not (case.has_sinks or case.softcap or case.has_rope)]


@pytest.mark.parametrize("case", PLAIN[::3], ids=str)
def test_the_answer_is_that_of_another_oracle(case):
    question = case.question()
    right = answer(question)
    inputs = (question.q, question.k, question.v, question.counts > 0)
    out, lse = oracle.dense_attention(*inputs, scale=question.scale)
    dq, dk, dv = oracle.dense_gradients(*inputs, question.dout, scale=question.scale)
    for x, y in zip(right[:5], (out, lse, dq, dk, dv), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("name", ["sinks", "softcap", "rope"])
def test_gradients_are_the_differences_of_the_output(name):
    case = next(case for case in CASES if name in case.features and case.dtype == "float64")
    question = case.question()
    right = answer(question)
    rng = np.random.default_rng(0)
    for field, gradient in (("q", right.dq), ("k", right.dk), ("v", right.dv), ("sinks", right.dsinks)):
        x = getattr(question, field)
        if x is None:
            continue
        step = rng.standard_normal(x.shape)
        sums = [
            (answer(replace(question, **{field: x + sign * 1e-6 * step})).out * question.dout).sum() for sign in (1, -1)
        ]
        assert (gradient * step).sum() == pytest.approx((sums[0] - sums[1]) / 2e-6, rel=1e-6)


def test_patterns_mean_what_the_masks_of_the_library_mean():
    patterns = {case.pattern for case in make_cases((3,), thorough=True)}
    positions = np.arange(20)
    for pattern in patterns:
        expected = mask_of(pattern).allowed(positions, positions)
        np.testing.assert_array_equal(visible(pattern, positions, positions), expected, err_msg=str(pattern))


def test_blocks_merge_to_the_whole():
    case = CASES[30]
    question = case.question()
    right = answer(question)
    parts = block_parts(question, np.arange(question.k.shape[2]) % 3, 3)
    np.testing.assert_allclose(np.logaddexp.reduce(parts.lse), right.lse, rtol=1e-12)
    merged = (parts.out * np.exp(parts.lse - right.lse)[..., None]).sum(0)
    np.testing.assert_allclose(merged, right.out, rtol=1e-12, atol=1e-14)


def test_rounding_is_that_of_the_types():
    x = np.random.default_rng(0).standard_normal(1000)
    torch = pytest.importorskip("torch")
    expected = torch.from_numpy(x).float().bfloat16().double().numpy()
    np.testing.assert_array_equal(round_to(x, "bfloat16"), expected)


@pytest.mark.parametrize("case", CASES[::4], ids=str)
def test_a_correct_attention_stays_far_within_the_budget(case):
    question = case.question()
    right = answer(question)
    allowed = budget(question, right, case.dtype, case.world_size)
    assert find_deviations(case, FaultyRing(case).run(), right, allowed) == []


@pytest.mark.parametrize("name", ["out", "lse", "dq", "dk", "dv"])
def test_one_number_beyond_the_budget_is_found_and_placed(name):
    case = CASES[23]
    question = case.question()
    right = answer(question)
    allowed = budget(question, right, case.dtype, case.world_size)
    computed = FaultyRing(case).run()
    spoiled = getattr(computed, name).copy()
    at = (1, 1, 5, 2)[: spoiled.ndim]
    spoiled[at] += 3 * getattr(allowed, name)[at]
    (found,) = find_deviations(case, computed._replace(**{name: spoiled}), right, allowed)
    assert (found.name, found.heads, found.rows) == (name, (1,), (5, 5, 1))
    assert found.ranks == (0,)


def test_every_case_of_the_thorough_table_can_be_asked():
    cases = make_cases((1, 2, 3, 4, 5, 8), thorough=True)
    assert len(cases) > 1500
    assert all(case.counts().shape[-1] == case.length + case.past for case in cases)
