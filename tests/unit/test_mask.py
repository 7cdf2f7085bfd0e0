import copy
import functools
import operator
import pickle
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ringspan.errors import MaskError
from ringspan.mask import (
    MOST_BANDS,
    Coverage,
    Mask,
    blocks,
    causal,
    chunks,
    documents,
    frame_causal,
    full,
    per_row,
    prefix,
    sliding_window,
)
from ringspan.span import Span
from support.mask_cases import NUM_POSITIONS, MaskCase, basic_masks, masks

NAMES = {
    f.__name__: f for f in (full, causal, sliding_window, prefix, documents, frame_causal, chunks, blocks, per_row)
}

spans = st.builds(Span, st.integers(0, 50), st.integers(0, NUM_POSITIONS), st.sampled_from([1, 1, 2, 5, 9]))
contiguous_spans = st.builds(Span, st.integers(0, 50), st.integers(0, NUM_POSITIONS))


def coverage_of(allowed: np.ndarray) -> Coverage:
    if not allowed.any():
        return Coverage.EMPTY
    return Coverage.FULL if allowed.all() else Coverage.PARTIAL


@pytest.mark.parametrize(
    ("mask", "picture"),
    [
        (full(), "##### ##### ##### ##### #####"),
        (causal(), "#.... ##... ###.. ####. #####"),
        (sliding_window(1, 0), "#.... ##... .##.. ..##. ...##"),
        (sliding_window(0, 2), "###.. .###. ..### ...## ....#"),
        (sliding_window(3, -2), "..... ..... #.... ##... .##.."),
        (sliding_window(-1, 2), ".##.. ..##. ...## ....# ....."),
        (sliding_window(None, 1), "##... ###.. ####. ##### #####"),
        (sliding_window(1, None), "##### ##### .#### ..### ...##"),
        (sliding_window(None, None), "##### ##### ##### ##### #####"),
        (prefix(3), "###.. ###.. ###.. ####. #####"),
        (prefix(0), "#.... ##... ###.. ####. #####"),
        (documents([2, 1, 2]), "##... ##... ..#.. ...## ...##"),
        (frame_causal(2), "##... ##... ####. ####. #####"),
        (frame_causal(2, start=1), "#.... ###.. ###.. ##### #####"),
        (frame_causal(1, start=3), "###.. ###.. ###.. ####. #####"),
        (chunks(2), "##... ##... ..##. ..##. ....#"),
        (chunks(3, start=1), "#.... .###. .###. .###. ....#"),
        (chunks(2, start=3), "#.... .##.. .##.. ...## ...##"),
        (chunks(2) & causal(), "#.... ##... ..#.. ..##. ....#"),
        (blocks([(1, 3)]), "..... .##.. .##.. ..... ....."),
        (blocks([(0, 2), (2, 3), (4, 9)]), "##... ##... ..#.. ..... ....#"),
        (causal() | blocks([(1, 4)]), "#.... ####. ####. ####. #####"),
        (documents([2, 3]) & causal(), "#.... ##... ..#.. ..##. ..###"),
        (documents([2, 3]) | sliding_window(1, 0), "##... ##... .#### ..### ..###"),
    ],
    ids=repr,
)
def test_each_mask_against_its_picture(mask: Mask, picture: str) -> None:
    positions = np.arange(5)
    drawn = ["".join("#" if pair else "." for pair in row) for row in mask.allowed(positions, positions)]
    assert drawn == picture.split()


@settings(deadline=None)
@given(masks, spans, spans)
def test_allowed_is_the_definition(case: MaskCase, q_span: Span, kv_span: Span) -> None:
    q, kv = q_span.positions(), kv_span.positions()
    allowed = case.mask.allowed(q, kv)
    assert allowed.dtype == np.bool_
    np.testing.assert_array_equal(allowed, case.expected(q, kv))


@settings(deadline=None)
@given(masks, spans, spans)
def test_bands_are_monotone_and_their_union_is_allowed(case: MaskCase, q_span: Span, kv_span: Span) -> None:
    q, kv = q_span.positions(), kv_span.positions()
    union = np.zeros((q.size, kv.size), dtype=bool)
    for lo, hi in case.mask.bands(q):
        assert lo.dtype == hi.dtype == np.int64
        assert lo.shape == hi.shape == q.shape
        assert (np.diff(lo) >= 0).all()
        assert (np.diff(hi) >= 0).all()
        union |= (lo[:, None] <= kv) & (kv < hi[:, None])
    np.testing.assert_array_equal(union, case.mask.allowed(q, kv))


@settings(deadline=None, max_examples=400)
@given(basic_masks, spans, contiguous_spans | spans)
def test_coverage_of_basic_masks_is_exact(case: MaskCase, q_span: Span, kv_span: Span) -> None:
    expected = coverage_of(case.expected(q_span.positions(), kv_span.positions()))
    assert case.mask.coverage(q_span, kv_span) is expected


@settings(deadline=None, max_examples=400)
@given(masks, spans, spans)
def test_coverage_never_claims_too_much(case: MaskCase, q_span: Span, kv_span: Span) -> None:
    expected = coverage_of(case.expected(q_span.positions(), kv_span.positions()))
    found = case.mask.coverage(q_span, kv_span)
    if found is not expected:  # several parts of a union may fill a tile together
        assert (found, expected) == (Coverage.PARTIAL, Coverage.FULL)
        assert "|" in repr(case.mask)


@pytest.mark.parametrize(
    ("mask", "q_span", "kv_span", "expected"),
    [
        (causal(), Span(4, 8), Span(0, 4), Coverage.FULL),
        (causal(), Span(4, 8), Span(4, 8), Coverage.PARTIAL),
        (causal(), Span(4, 8), Span(8, 12), Coverage.EMPTY),
        (causal(), Span(4, 8), Span(9, 9), Coverage.EMPTY),
        (causal(), Span(9, 9), Span(0, 4), Coverage.EMPTY),
        # every 8th token against the stripe 5 behind: a window of 4 sees none of it
        (sliding_window(4, 0), Span(5, 800, 8), Span(0, 800, 8), Coverage.EMPTY),
        (sliding_window(5, 0), Span(5, 800, 8), Span(0, 800, 8), Coverage.PARTIAL),
        # neither the first nor the last query sees the keys, one between them does
        (sliding_window(0, 0), Span(0, 100), Span(50, 51), Coverage.PARTIAL),
        (documents([6, 6]) & sliding_window(5, -2), Span(6, 8), Span(0, 12), Coverage.EMPTY),
        (documents([6, 6]) & sliding_window(5, -2), Span(6, 9), Span(0, 12), Coverage.PARTIAL),
    ],
)
def test_coverage_examples(mask: Mask, q_span: Span, kv_span: Span, expected: Coverage) -> None:
    assert mask.coverage(q_span, kv_span) is expected


@pytest.mark.parametrize(
    ("mask", "kv_start", "expected"),
    [
        (causal(), 2**39, Coverage.PARTIAL),
        (sliding_window(1000, 0), 2**39, Coverage.PARTIAL),
        (prefix(2**39 + 8), 2**39, Coverage.FULL),
        (documents([2**39, 2**39, 2**39]), 2**39, Coverage.PARTIAL),
        (documents([2**39, 2**39, 2**39]), 2**40, Coverage.EMPTY),
        (frame_causal(2**10), 2**40, Coverage.EMPTY),
    ],
    ids=repr,
)
def test_coverage_of_spans_that_fit_in_no_memory(mask: Mask, kv_start: int, expected: Coverage) -> None:
    assert mask.coverage(Span(0, 2**40), Span(kv_start, kv_start + 8)) is expected


@settings(deadline=None)
@given(masks, masks, masks)
def test_algebra_laws(a: MaskCase, b: MaskCase, c: MaskCase) -> None:
    def allowed(mask: Mask) -> list[list[bool]]:
        return mask.allowed(np.arange(40), np.arange(40)).tolist()

    x, y, z = a.mask, b.mask, c.mask
    assert allowed(x & y) == allowed(y & x)
    assert allowed(x | y) == allowed(y | x)
    assert allowed((x & y) & z) == allowed(x & (y & z))
    assert allowed(x & (y | z)) == allowed(x & y | x & z)
    assert allowed(x | x & y) == allowed(x)
    assert allowed(x & full()) == allowed(x)


@settings(deadline=None)
@given(masks, masks)
def test_masks_are_values(a: MaskCase, b: MaskCase) -> None:
    for mask in (a.mask, per_row([a.mask, b.mask])):
        for twin in (eval(repr(mask), NAMES), pickle.loads(pickle.dumps(mask)), copy.deepcopy(mask)):
            assert twin == mask
            assert hash(twin) == hash(mask)
            positions = np.arange(20)
            np.testing.assert_array_equal(twin.allowed(positions, positions), mask.allowed(positions, positions))
    assert (a.mask == b.mask) == (repr(a.mask) == repr(b.mask))


def test_repr_puts_brackets_only_where_precedence_demands() -> None:
    a, b, c = causal(), sliding_window(4, 0), documents([3, 5])
    assert repr(a & b) == "causal() & sliding_window(4, 0)"
    assert repr(a & b | c) == "causal() & sliding_window(4, 0) | documents([3, 5])"
    assert repr(a & (b | c)) == "causal() & (sliding_window(4, 0) | documents([3, 5]))"
    assert repr(a & (b & c)) == "causal() & (sliding_window(4, 0) & documents([3, 5]))"
    assert repr(a | (b | c)) == "causal() | (sliding_window(4, 0) | documents([3, 5]))"
    assert repr(per_row([a, frame_causal(4)])) == "per_row([causal(), frame_causal(4)])"
    assert repr(frame_causal(4, start=2)) == "frame_causal(4, start=2)"
    assert repr(chunks(8192)) == "chunks(8192)"
    assert repr(chunks(4, start=2)) == "chunks(4, start=2)"
    assert repr(blocks([(0, 2), (5, 9)])) == "blocks([[0, 2], [5, 9]])"
    assert repr(sliding_window(None, 3)) == "sliding_window(None, 3)"


def test_a_product_of_unions_stays_small() -> None:
    """24 factors would be 2 ** 24 bands if each were multiplied out."""
    mask = full()
    for i in range(24):
        mask = mask & (sliding_window(40 - i, 0) | sliding_window(2, i))
    assert len(mask.bands([0])) <= 25
    positions = np.arange(60)
    factors = [(sliding_window(40 - i, 0), sliding_window(2, i)) for i in range(24)]
    allowed = [a.allowed(positions, positions) | b.allowed(positions, positions) for a, b in factors]
    np.testing.assert_array_equal(mask.allowed(positions, positions), np.logical_and.reduce(allowed))
    union = np.zeros((60, 60), dtype=bool)
    for lo, hi in mask.bands(positions):
        union |= (lo[:, None] <= positions) & (positions < hi[:, None])
    np.testing.assert_array_equal(union, np.logical_and.reduce(allowed))


@pytest.mark.parametrize(
    ("mask", "num_bands"),
    [
        (causal() | causal(), 1),
        (causal() | full(), 1),
        (causal() & (prefix(4) | sliding_window(3, 3)), 1),
        (documents([3, 5]) & causal() | documents([3, 5]), 1),
        (sliding_window(4, 0) | sliding_window(-1, 3), 1),  # they touch
        (sliding_window(4, 0) | sliding_window(-2, 3), 2),  # and here they do not
        (sliding_window(4, 0) | sliding_window(-2, 3) | sliding_window(0, 1), 1),
        (sliding_window(9, -8) & sliding_window(-8, 9), 1),  # nothing is visible
        (frame_causal(4) | documents([20]) & causal(), 2),
        (prefix(3) | sliding_window(2, 2), 2),
    ],
    ids=repr,
)
def test_as_many_bands_as_are_needed(mask: Mask, num_bands: int) -> None:
    assert len(mask.bands([0])) == num_bands


def test_more_bands_than_the_bound_are_refused_with_the_number() -> None:
    mask = sliding_window(0, 0)
    for i in range(1, MOST_BANDS):
        mask = mask | sliding_window(3 * i, -3 * i)
    with pytest.raises(MaskError, match=rf"more than {MOST_BANDS} bands.*; combine fewer masks"):
        mask | sliding_window(900, -900)
    assert len(mask.bands([0])) == MOST_BANDS
    with pytest.raises(MaskError, match=f"more than {MOST_BANDS} bands"):
        mask & (documents([500]) | frame_causal(7))


@pytest.mark.parametrize("combine", [operator.and_, operator.or_])
def test_a_long_chain_is_a_value_like_any_other(combine: Callable[[Mask, Mask], Mask]) -> None:
    mask = functools.reduce(combine, [sliding_window(2 + i % 7, i) for i in range(5000)])
    twin = functools.reduce(combine, [sliding_window(2 + i % 7, i) for i in range(5000)])
    assert (mask, hash(mask), repr(mask)) == (twin, hash(twin), repr(twin))
    assert pickle.loads(pickle.dumps(mask)) == copy.deepcopy(mask) == mask
    assert mask.allowed([9], range(6, 12)).tolist() in ([[False, True, True, True, False, False]], [[True] * 6])
    assert mask.coverage(Span(8, 9), Span(8, 9)) is Coverage.FULL


def test_brackets_within_brackets_are_refused_before_they_overflow_the_stack() -> None:
    mask = causal()
    for i in range(32):
        mask = prefix(i) | (mask & full())
    assert repr(mask).count("(") > 64
    with pytest.raises(MaskError, match=r"more than 64 levels of brackets.*; combine its parts in a chain"):
        prefix(40) | mask


def test_equal_parts_are_not_equal_combinations() -> None:
    assert causal() & prefix(3) != causal() | prefix(3)
    assert prefix(0) != causal()
    assert full() != sliding_window(None, None)


def test_masks_do_not_change() -> None:
    mask = prefix(3)
    with pytest.raises(AttributeError):
        mask.n = 4  # type: ignore[attr-defined]
    with pytest.raises(AttributeError):
        (mask & causal()).terms = ()  # type: ignore[attr-defined]


def test_numpy_integers_and_generators_are_welcome() -> None:
    assert repr(prefix(np.int32(3))) == "prefix(3)"
    assert documents(np.array([2, 3])) == documents(length for length in (2, 3))
    assert sliding_window(np.uint8(4), np.int64(-4)) == sliding_window(4, -4)
    assert causal().allowed(np.array([1], dtype=np.uint8), range(3)).tolist() == [[True, True, False]]


def test_per_row_stacks_its_rows() -> None:
    mask = per_row([causal(), documents([2, 2])])
    assert mask.rows == (causal(), documents([2, 2]))
    assert causal().rows is None
    expected = [[[1, 1, 0, 0], [1, 1, 1, 0]], [[1, 1, 0, 0], [0, 0, 1, 1]]]  # (row, q, kv)
    np.testing.assert_array_equal(mask.allowed([1, 2], [0, 1, 2, 3]), np.array(expected, dtype=bool))


def test_per_row_coverage_is_what_the_rows_agree_on() -> None:
    mask = per_row([causal(), documents([4, 4])])
    assert mask.coverage(Span(0, 4), Span(4, 8)) is Coverage.EMPTY
    assert mask.coverage(Span(4, 8), Span(0, 4)) is Coverage.PARTIAL  # one row sees all of it, the other nothing
    assert mask.coverage(Span(4, 8), Span(4, 5)) is Coverage.FULL


def test_combining_goes_row_by_row() -> None:
    rows = per_row([causal(), full()])
    assert rows & prefix(2) == per_row([causal() & prefix(2), full() & prefix(2)])
    assert prefix(2) | rows == per_row([prefix(2) | causal(), prefix(2) | full()])
    assert rows & per_row([full(), causal()]) == per_row([causal() & full(), full() & causal()])
    with pytest.raises(MaskError, match=r"per_row of 2 and of 3 rows"):
        rows & per_row([full()] * 3)


@pytest.mark.parametrize("other", [3, None, np.ones((2, 2), dtype=bool), "causal"], ids=["int", "None", "array", "str"])
def test_only_masks_combine_with_masks(other: object) -> None:
    with pytest.raises(TypeError):
        causal() & other  # type: ignore[operator]
    with pytest.raises(TypeError):
        causal() | other  # type: ignore[operator]


@pytest.mark.parametrize(
    ("build", "argument"),
    [
        (lambda: sliding_window(1.5, 0), "left=1.5"),
        (lambda: sliding_window(4, True), "right=True"),
        (lambda: sliding_window(4, "0"), "right='0'"),
        (lambda: sliding_window(2**70, 0), f"left={2**70}"),
        (lambda: sliding_window(3, -4), r"left=3, right=-4"),
        (lambda: prefix(-1), "n=-1"),
        (lambda: prefix(2.0), r"n=2\.0"),
        (lambda: prefix(None), "n=None"),
        (lambda: prefix(False), "n=False"),
        (lambda: documents([]), r"lengths=\[\]"),
        (lambda: documents(7), "lengths=7"),
        (lambda: documents([3, 0]), r"lengths\[1\]=0"),
        (lambda: documents([-3, 1]), r"lengths\[0\]=-3"),
        (lambda: documents([3, 1.0]), r"lengths\[1\]=1\.0"),
        (lambda: frame_causal(0), "tokens_per_frame=0"),
        (lambda: frame_causal(np.float64(4)), r"tokens_per_frame=.*4\.0"),
        (lambda: frame_causal(4, -1), "start=-1"),
        (lambda: chunks(0), "size=0"),
        (lambda: chunks(4, -1), "start=-1"),
        (lambda: blocks([]), r"spans=\[\]"),
        (lambda: blocks([(3,)]), r"spans\[0\]=\(3,\)"),
        (lambda: blocks([(3, 3)]), r"spans\[0\]=\(3, 3\)"),
        (lambda: blocks([(0, 4), (3, 6)]), r"spans\[1\]"),
        (lambda: per_row([]), r"masks=\[\]"),
        (lambda: per_row(causal()), r"masks=causal\(\)"),
        (lambda: per_row([causal(), 3]), r"masks\[1\]=3"),
        (lambda: per_row([per_row([causal()])]), r"masks\[0\]=per_row\(\[causal\(\)\]\)"),
        (lambda: per_row([causal()]).bands([0]), r"per_row\(\[causal\(\)\]\)\.bands"),
    ],
)
def test_refusals_name_argument_value_and_way_out(build: object, argument: str) -> None:
    with pytest.raises(MaskError, match=rf"{argument}.*: .+; ") as refusal:
        build()  # type: ignore[operator]
    assert isinstance(refusal.value, ValueError)


@pytest.mark.parametrize(
    "mask", [documents([4, 6]), causal() & documents([4, 6]), per_row([documents([4, 6]), causal()])], ids=repr
)
def test_positions_past_the_last_document_are_refused(mask: Mask) -> None:
    known, beyond = np.arange(10), np.arange(11)
    mask.allowed(known, known)
    mask.coverage(Span(0, 10), Span(0, 10))
    mask.coverage(Span(20, 20), Span(0, 10))
    for argument, ask in (
        ("q_positions", lambda: mask.allowed(beyond, known)),
        ("kv_positions", lambda: mask.allowed(known, beyond)),
        ("q_positions", lambda: mask.bands(beyond)),
        ("q_span", lambda: mask.coverage(Span(0, 11), Span(0, 10))),
        ("kv_span", lambda: mask.coverage(Span(0, 10), Span(10, 11))),
    ):
        with pytest.raises(MaskError, match=rf"{argument} reaches position 10: .* 10 tokens; "):
            ask()


@pytest.mark.parametrize(
    ("positions", "message"),
    [
        ([0.0, 1.0], "q_positions has shape .* dtype float64"),
        ([[0, 1]], r"q_positions has shape \(1, 2\)"),
        ([True], "q_positions has shape .* dtype bool"),
        ([3, -2], "q_positions contains -2"),
    ],
)
def test_positions_that_are_none_are_refused(positions: list[object], message: str) -> None:
    with pytest.raises(MaskError, match=message):
        causal().bands(positions)  # type: ignore[arg-type]


def test_documents_whose_positions_would_overflow_are_refused():
    with pytest.raises(MaskError, match=r"has 13835058055282163709 tokens; positions stay below 2\*\*62"):
        documents([2**62 - 1] * 3)
