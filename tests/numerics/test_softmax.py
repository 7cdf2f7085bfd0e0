"""Merging partial attention: the laws that allow parts to arrive in any order from any number of ranks."""

import functools
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspan.kernels.softmax import Partial, accumulator_dtype, merge_, merge_steadily
from ringspan.kernels.softmax import merged as merged_two

SHAPE = (2, 3, 5, 4)


def nothing(dtype: torch.dtype = torch.float32) -> Partial:
    return Partial(torch.zeros(SHAPE, dtype=dtype), torch.full(SHAPE[:-1], -torch.inf, dtype=dtype))


def some_part(seed: int, dtype: torch.dtype = torch.float32) -> Partial:
    """Random parts with very different weights and some rows that saw no key."""
    generator = torch.Generator().manual_seed(seed)
    lse = 20 * torch.randn(SHAPE[:-1], generator=generator, dtype=dtype)
    lse[torch.rand(lse.shape, generator=generator) < 0.2] = -torch.inf
    out = torch.randn(SHAPE, generator=generator, dtype=dtype)
    return Partial(out.masked_fill(lse.isneginf().unsqueeze(-1), 0.0), lse)


def merged(*parts: Partial, merge: Callable[[Partial, Partial], None] = merge_) -> Partial:
    total = Partial(parts[0].out.clone(), parts[0].lse.clone())
    for part in parts[1:]:
        merge(total, part)
    return total


def merged_steadily(*parts: Partial) -> Partial:
    return merged(*parts, merge=merge_steadily)


def merged_anew(*parts: Partial) -> Partial:
    columns = [Partial(out, lse.unsqueeze(-1)) for out, lse in parts]
    out, lse = functools.reduce(merged_two, columns)
    return Partial(out, lse.squeeze(-1))


def joint_softmax(*parts: Partial) -> Partial:
    """Merge all parts at once in float64, by the definition."""
    outs, lses = (torch.stack([x.double() for x in xs]) for xs in zip(*parts, strict=True))
    lse = torch.logsumexp(lses, 0)
    weights = torch.exp(lses - lse.masked_fill(lse.isneginf(), 0.0))
    return Partial((weights.unsqueeze(-1) * outs).sum(0), lse)


def assert_same(found: Partial, expected: Partial) -> None:
    torch.testing.assert_close(found.out, expected.out.to(found.out.dtype))
    torch.testing.assert_close(found.lse, expected.lse.to(found.lse.dtype))


seeds = st.integers(0, 2**32)


@given(st.lists(seeds, min_size=1, max_size=8))
@settings(deadline=None, max_examples=60)
def test_parts_merge_to_the_softmax_over_all_their_keys(drawn: list[int]) -> None:
    parts = [some_part(seed) for seed in drawn]
    assert_same(merged(nothing(), *parts), joint_softmax(*parts))
    assert_same(merged_anew(nothing(), *parts), joint_softmax(*parts))
    assert_same(merged_steadily(nothing(), *parts), joint_softmax(*parts))


@given(seeds, seeds, seeds)
@settings(deadline=None, max_examples=60)
def test_order_and_grouping_do_not_matter_beyond_rounding(a: int, b: int, c: int) -> None:
    first, second, third = (some_part(seed, torch.float64) for seed in (a, b, c))
    assert_same(merged(first, second), merged(second, first))
    assert_same(merged(merged(first, second), third), merged(first, merged(second, third)))


@given(seeds)
@settings(deadline=None, max_examples=60)
def test_nothing_is_the_identity_to_the_last_bit(seed: int) -> None:
    part = some_part(seed)
    for found in (merged(part, nothing()), merged(nothing(), part)):
        assert torch.equal(found.out, part.out)
        assert torch.equal(found.lse, part.lse)


def test_nothing_merged_with_nothing_stays_nothing() -> None:
    for found in (merged(nothing(), nothing()), merged_anew(nothing(), nothing(), nothing())):
        assert torch.equal(found.out, torch.zeros(SHAPE))
        assert torch.equal(found.lse, torch.full(SHAPE[:-1], -torch.inf))


def test_merging_is_in_place_through_views() -> None:
    whole = merged(nothing(), some_part(0))
    before = Partial(whole.out.clone(), whole.lse.clone())
    rows = slice(1, 4)
    part = some_part(1)
    merge_(Partial(whole.out[:, :, rows], whole.lse[:, :, rows]), Partial(part.out[:, :, rows], part.lse[:, :, rows]))
    expected = merged(before, part)
    assert torch.equal(whole.out[:, :, rows], expected.out[:, :, rows])
    assert torch.equal(whole.lse[:, :, rows], expected.lse[:, :, rows])
    for others in (slice(0, 1), slice(4, 5)):
        assert torch.equal(whole.out[:, :, others], before.out[:, :, others])
        assert torch.equal(whole.lse[:, :, others], before.lse[:, :, others])


def test_the_part_is_left_as_it_was() -> None:
    part = some_part(2)
    kept = Partial(part.out.clone(), part.lse.clone())
    merge_(some_part(3), part)
    assert torch.equal(part.out, kept.out)
    assert torch.equal(part.lse, kept.lse)


@pytest.mark.parametrize("num_parts", [2, 16, 64])
def test_half_parts_are_summed_without_further_rounding(num_parts: int) -> None:
    """The outputs come in rounded to bfloat16; for any number of parts the merge is as accurate as the inputs."""
    parts = [Partial(some_part(seed).out.bfloat16(), some_part(seed).lse) for seed in range(num_parts)]
    for found in (merged(nothing(), *parts), merged_anew(*parts)):
        assert found.out.dtype == torch.float32
        assert_same(found, joint_softmax(*parts))


def test_an_infinity_stays_one_and_nan_stays_nan() -> None:
    """As in a plain weighted sum, for any order of the parts."""
    odd = some_part(4)
    odd.lse.zero_()
    odd.out[..., 0, 0], odd.out[..., 1, 0], odd.out[..., 2, 0] = torch.inf, -torch.inf, torch.nan
    plain = Partial(some_part(5).out, torch.ones(SHAPE[:-1]))
    steady = merged_steadily(nothing(), odd, plain), merged_steadily(plain, odd)
    for found in (merged(nothing(), odd, plain), merged(plain, odd), merged_anew(odd, plain, nothing()), *steady):
        torch.testing.assert_close(found.out, joint_softmax(odd, plain).out.float(), equal_nan=True)
        assert found.out[..., 0, 0].isposinf().all()
        assert found.out[..., :3, 1:].isfinite().all()


@pytest.mark.parametrize("merge", [merged, merged_anew, merged_steadily])
@pytest.mark.parametrize("value", [1e9, torch.inf])
def test_large_numbers_of_little_weight_count(merge: Callable[..., Partial], value: float) -> None:
    """Next to a weight of e^-17 the other weight is 1 in float32, but they are not 0 and 1."""
    light = Partial(torch.full(SHAPE, value), torch.zeros(SHAPE[:-1]))
    heavy = Partial(torch.ones(SHAPE), torch.full(SHAPE[:-1], 17.0))
    for found in (merge(light, heavy), merge(heavy, light)):
        assert_same(found, joint_softmax(light, heavy))


def test_sums_are_float32_unless_the_input_is_float64() -> None:
    halves = (torch.bfloat16, torch.float16, torch.float32)
    assert [accumulator_dtype(dtype) for dtype in halves] == [torch.float32] * 3
    assert accumulator_dtype(torch.float64) == torch.float64
