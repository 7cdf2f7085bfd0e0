"""Which pairs of positions may attend to each other, decided pair by pair?

This is the verifier's own definition of every mask. It is written apart from `ringspan.mask`, as a predicate over two
numbers, so that a mistake in one of the two does not hide in the other. Patterns are plain tuples:

    ("full",)  ("causal",)  ("window", left, right)  ("prefix", n)  ("documents", (length, ...))
    ("frames", tokens_per_frame, start)
    ("chunks", size)  ("blocks", ((start, stop), ...))  ("and", a, b)  ("or", a, b)  ("rows", (pattern, ...))
"""

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from ringspan.errors import MaskError
from ringspan.mask import Mask, blocks, causal, chunks, documents, frame_causal, full, per_row, prefix, sliding_window

Pattern = tuple[Any, ...]
Numbers = npt.NDArray[Any]


def sees(pattern: Pattern, q: int, kv: int) -> bool:
    """Whether the query at position `q` attends to the key at position `kv`."""
    kind, *arguments = pattern
    return _PREDICATES[kind](q, kv, *arguments)


def _window(q: int, kv: int, left: int | None, right: int | None) -> bool:
    distance = kv - q
    return (left is None or distance >= -left) and (right is None or distance <= right)


def _same_document(q: int, kv: int, lengths: tuple[int, ...]) -> bool:
    end = 0
    for length in lengths:
        start, end = end, end + length
        if start <= q < end:
            return start <= kv < end
    raise MaskError("the documents end before this position", argument="q", value=q)


def _frames(q: int, kv: int, tokens: int, start: int) -> bool:
    return kv < start or (q >= start and (kv - start) // tokens <= (q - start) // tokens)


_PREDICATES: dict[str, Callable[..., bool]] = {
    "full": lambda _q, _kv: True,
    "causal": lambda q, kv: not kv > q,
    "window": _window,
    "prefix": lambda q, kv, n: kv < n or not kv > q,
    "documents": _same_document,
    "frames": _frames,
    "chunks": lambda q, kv, size: q // size == kv // size,
    "blocks": lambda q, kv, spans: any(start <= min(q, kv) and max(q, kv) < stop for start, stop in spans),
    "and": lambda q, kv, a, b: sees(a, q, kv) and sees(b, q, kv),
    "or": lambda q, kv, a, b: sees(a, q, kv) or sees(b, q, kv),
}


def visible(pattern: Pattern, q_positions: npt.ArrayLike, kv_positions: npt.ArrayLike) -> Numbers:
    """1 where visible, else 0: (q, kv), or (rows, q, kv) for a pattern with one mask per batch row."""
    return _visible(pattern, tuple(np.asarray(q_positions).tolist()), tuple(np.asarray(kv_positions).tolist()))


@functools.lru_cache(maxsize=1024)
def _visible(pattern: Pattern, q_positions: tuple[int, ...], kv_positions: tuple[int, ...]) -> Numbers:
    if pattern[0] == "rows":
        table = np.stack([_visible(row, q_positions, kv_positions) for row in pattern[1]])
    else:
        pairs = [[float(sees(pattern, q, kv)) for kv in kv_positions] for q in q_positions]
        table = np.array(pairs).reshape(len(q_positions), len(kv_positions))
    table.flags.writeable = False
    return table


def mask_of(pattern: Pattern) -> Mask:
    """The library's mask for a pattern."""
    match pattern:
        case ("and", a, b):
            return mask_of(a) & mask_of(b)
        case ("or", a, b):
            return mask_of(a) | mask_of(b)
        case ("rows", rows):
            return per_row([mask_of(row) for row in rows])
        case (kind, *arguments) if kind in _BUILDERS:
            return _BUILDERS[kind](*arguments)
    raise MaskError(f"a pattern is one of {', '.join(_PREDICATES)}, rows", argument="pattern", value=pattern)


_BUILDERS: dict[str, Callable[..., Mask]] = {
    "full": full,
    "causal": causal,
    "window": sliding_window,
    "prefix": prefix,
    "documents": documents,
    "frames": frame_causal,
    "chunks": chunks,
    "blocks": blocks,
}


def parts_of(pattern: Pattern) -> tuple[Pattern, ...]:
    if pattern[0] in ("and", "or"):
        return (*parts_of(pattern[1]), *parts_of(pattern[2]))
    if pattern[0] == "rows":
        return tuple(part for row in pattern[1] for part in parts_of(row))
    return (pattern,)


def replace_part(pattern: Pattern, kind: str, change: Pattern | Callable[[Pattern], Pattern]) -> Pattern:
    """The pattern with every basic part of one kind changed, or replaced by a pattern."""
    if pattern[0] in ("and", "or"):
        return (pattern[0], replace_part(pattern[1], kind, change), replace_part(pattern[2], kind, change))
    if pattern[0] == "rows":
        return ("rows", tuple(replace_part(row, kind, change) for row in pattern[1]))
    if pattern[0] != kind:
        return pattern
    return change(pattern) if callable(change) else change


def format_pattern(pattern: Pattern) -> str:
    """As a reader would write it: `documents(5, 7) and causal`."""
    match pattern:
        case ("and" | "or", a, b):
            return f"{format_pattern(a)} {pattern[0]} {format_pattern(b)}"
        case ("rows", rows):
            return f"per row: {'; '.join(format_pattern(row) for row in rows)}"
        case ("documents", lengths):
            return f"documents({', '.join(map(str, lengths))})"
        case (kind, *arguments) if arguments:
            return f"{kind}({', '.join(map(str, arguments))})"
    return str(pattern[0])
