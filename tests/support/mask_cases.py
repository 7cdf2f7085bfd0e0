"""Random masks and positions, each mask with its meaning written a second time, one pair of tokens at a time."""

import itertools
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

from ringspan.mask import Mask, blocks, causal, chunks, documents, frame_causal, full, prefix, sliding_window
from ringspan.span import Positions

NUM_POSITIONS = 64


class MaskCase(NamedTuple):
    mask: Mask
    sees: Callable[[int, int], bool]

    def __repr__(self) -> str:
        return repr(self.mask)

    def expected(self, q_positions: Positions, kv_positions: Positions) -> np.ndarray:
        pairs = [[self.sees(q, kv) for kv in kv_positions.tolist()] for q in q_positions.tolist()]
        return np.array(pairs, dtype=bool).reshape(q_positions.size, kv_positions.size)


def full_case() -> MaskCase:
    return MaskCase(full(), lambda q, kv: True)


def causal_case() -> MaskCase:
    return MaskCase(causal(), lambda q, kv: not kv > q)


def window_case(left: int | None, right: int | None) -> MaskCase:
    def sees(q: int, kv: int) -> bool:
        distance = kv - q
        return (left is None or -distance <= left) and (right is None or distance <= right)

    return MaskCase(sliding_window(left, right), sees)


def prefix_case(n: int) -> MaskCase:
    return MaskCase(prefix(n), lambda q, kv: kv in range(max(n, q + 1)))


def documents_case(lengths: list[int]) -> MaskCase:
    document_of = list(itertools.chain(*([i] * length for i, length in enumerate(lengths))))
    return MaskCase(documents(lengths), lambda q, kv: document_of[q] == document_of[kv])


def frame_causal_case(tokens_per_frame: int, start: int) -> MaskCase:
    def frame_of(position: int) -> int:
        return 0 if position < start else 1 + (position - start) // tokens_per_frame

    return MaskCase(frame_causal(tokens_per_frame, start), lambda q, kv: frame_of(kv) <= frame_of(q))


def chunks_case(size: int, start: int) -> MaskCase:
    def chunk_of(position: int) -> int:
        return len(range(start, position + 1, size)) if position >= start else -len(range(position, start, size))

    return MaskCase(chunks(size, start), lambda q, kv: chunk_of(q) == chunk_of(kv))


def blocks_case(gaps: list[tuple[int, int]]) -> MaskCase:
    spans, stop = [], 0
    for gap, length in gaps:
        spans.append((stop + gap, stop + gap + length))
        stop += gap + length
    runs = [range(*span) for span in spans]
    return MaskCase(blocks(spans), lambda q, kv: any(q in run and kv in run for run in runs))


def both(a: MaskCase, b: MaskCase) -> MaskCase:
    return MaskCase(a.mask & b.mask, lambda q, kv: a.sees(q, kv) and b.sees(q, kv))


def either(a: MaskCase, b: MaskCase) -> MaskCase:
    return MaskCase(a.mask | b.mask, lambda q, kv: a.sees(q, kv) or b.sees(q, kv))


bounds = st.none() | st.integers(-8, 16)
basic_masks = st.one_of(
    st.builds(full_case),
    st.builds(causal_case),
    st.tuples(bounds, bounds).filter(lambda b: None in b or sum(b) >= 0).map(lambda b: window_case(*b)),
    st.builds(prefix_case, st.integers(0, 40)),
    st.lists(st.integers(1, 12), max_size=8).map(lambda lengths: documents_case([*lengths, NUM_POSITIONS])),
    st.builds(frame_causal_case, st.integers(1, 12), st.integers(0, 20)),
    st.builds(chunks_case, st.integers(1, 20), st.integers(0, 20)),
    st.lists(st.tuples(st.integers(0, 9), st.integers(1, 12)), min_size=1, max_size=5).map(blocks_case),
)


def combinations(depth: int) -> st.SearchStrategy[MaskCase]:
    if depth == 0:
        return basic_masks
    part = combinations(depth - 1)
    # sampled_from rather than one_of, which would flatten the choices and draw few combinations
    kinds = st.sampled_from([basic_masks, st.builds(both, part, part), st.builds(either, part, part)])
    return kinds.flatmap(lambda kind: kind)


masks = combinations(3)
