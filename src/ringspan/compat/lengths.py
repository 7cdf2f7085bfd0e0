"""Which lengths do the ranks' tensors have, and which layout is that?"""

from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch

from ringspan.layout import Layout
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import session_of
from ringspan.span import Span


def gather_lengths(x: torch.Tensor, dim: int, group: Any, what: str) -> list[int]:
    """The size of every rank's tensor along a dim; `what` is the name of the call in errors."""
    with session_of(group).call() as call:
        everyone = call.gather(Signature.of({"call": what}), x.shape[dim].to_bytes(8, "little"))
    return [int.from_bytes(length, "little") for length in everyone]


def layout_of_lengths(lengths: Sequence[int]) -> Layout:
    """A layout of consecutive shards with these lengths."""
    return Layout(tuple((Span(start, stop),) for start, stop in pairwise(accumulate(lengths, initial=0))))
