"""Which mask does a model mean, and which tokens does a batch keep apart?

A model of transformers describes its masks by functions of a query's and a key's index. The function's values for one
distant query give the window, and those of the first key the chunk; the resulting mask is then compared with the
function at many other places. So a mask is never inferred from a name, and a mask that has no equal here (images,
prefixes) is detected.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ringspan.adapters.keys import Keys, by_row
from ringspan.errors import MaskError
from ringspan.mask import Mask, causal, chunks, documents, full, sliding_window

MaskFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Tokens = npt.NDArray[np.bool_]  # (batch, columns): False is padding

_FAR = 2**20


def evaluate(function: MaskFunction, q: Any, kv: Any, device: torch.device) -> npt.NDArray[np.bool_]:
    """Evaluate a mask function for the first row and head, (q, kv)."""
    zero = torch.zeros(1, 1, 1, 1, dtype=torch.long, device=device)
    q, kv = (torch.as_tensor(x, dtype=torch.long, device=device) for x in (q, kv))
    allowed = function(zero, zero, q.view(1, 1, -1, 1), kv.view(1, 1, 1, -1))
    seen: npt.NDArray[np.bool_] = allowed.expand(1, 1, len(q), len(kv))[0, 0].cpu().numpy()
    return seen


class FoundMask(NamedTuple):
    """A mask, and the size of its chunks, which begin at the first token of a row."""

    mask: Mask
    chunk: int | None = None


def find_mask(function: MaskFunction, size: int, device: torch.device) -> FoundMask | None:
    """Return the mask that equals the function, or None if there is none; `size` is at least its window or chunk."""
    far = max(_FAR, 4 * size)
    for found in (_find_window(function, far, device), _find_chunks(function, far, device)):
        if found is not None:
            return found
    return None


def chunked(size: int, *, is_causal: bool, start: int = 0) -> Mask:
    """Chunks counted from the first token of a row, at column `start`."""
    return chunks(size, start) & causal() if is_causal else chunks(size, start)


def _find_chunks(function: MaskFunction, far: int, device: torch.device) -> FoundMask | None:
    """The first key is seen by the queries of its chunk."""
    size = int(np.argmin(evaluate(function, np.arange(2 * far + 1), [0], device)[:, 0]))
    if not size:
        return None
    mask = chunked(size, is_causal=size == 1 or not evaluate(function, [0], [1], device).any())
    return FoundMask(mask, size) if _is_equal(mask, function, far, [size], device) else None


def _find_window(function: MaskFunction, far: int, device: torch.device) -> FoundMask | None:
    seen = np.flatnonzero(evaluate(function, [far], np.arange(2 * far + 1), device))
    if not len(seen):
        return None
    left = None if seen[0] == 0 else far - int(seen[0])
    right = None if seen[-1] == 2 * far else int(seen[-1]) - far
    mask = _window(left, right)
    ends = [end for end in (left, right) if end]
    return FoundMask(mask) if _is_equal(mask, function, far, ends, device) else None


def _is_equal(mask: Mask, function: MaskFunction, far: int, ends: list[int], device: torch.device) -> bool:
    places = _places(far, ends)
    return np.array_equal(mask.allowed(places, places), evaluate(function, places, places, device))


def _window(left: int | None, right: int | None) -> Mask:
    if left is None:
        return {None: full(), 0: causal()}.get(right) or sliding_window(None, right)
    return sliding_window(left, right)


def _places(far: int, ends: list[int]) -> npt.NDArray[np.int64]:
    """Return positions where different masks differ: small ones, powers of two, multiples of the window."""
    marks = [2**i for i in range(far.bit_length())] + [n * end for end in ends for n in (1, 2, 3)]
    near = {mark + by for mark in marks for by in (-1, 0, 1)} | set(range(24))
    return np.array(sorted(place for place in near if 0 <= place < 2 * far))


def padding_mask(tokens: Tokens) -> Mask | None:
    """Return a mask that hides padding keys; None if there is no padding.

    Padding queries still attend to tokens, as in transformers' sdpa, so that labels at padding positions count the
    same. Padding before the tokens of a causal row sees no key, and its output is 0.
    """
    return by_row([_padding(row, number) for number, row in enumerate(tokens)])


def _padding(tokens: npt.NDArray[np.bool_], number: int) -> Mask:
    found = np.flatnonzero(tokens)
    if len(found) == len(tokens):
        return full()
    if not len(found):
        return Keys(0, 0)
    first, last = int(found[0]), int(found[-1])
    if len(found) != last - first + 1:
        raise MaskError(
            f"attention_mask[{number}] has padding between tokens: padding may be before or after the tokens; remove it"
        )
    return Keys(first, last + 1)


def first_columns(tokens: Tokens) -> tuple[int, ...]:
    """Return the column of each row's first token; the number of columns if it has none."""
    return tuple(int(np.argmax(row)) if row.any() else len(row) for row in tokens)


def documents_mask(position_ids: npt.NDArray[np.int64]) -> Mask | None:
    """Return the mask of packed documents, (batch, seq): one begins wherever positions do not increase by one."""
    cuts = [np.flatnonzero(np.diff(row) != 1) + 1 for row in position_ids]
    length = position_ids.shape[1]
    rows = [documents(np.diff([0, *found, length]).tolist()) if len(found) else full() for found in cuts]
    return by_row(rows)
