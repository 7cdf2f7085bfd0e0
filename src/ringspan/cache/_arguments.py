"""Are the arguments of a cache in order? Checked on this rank, before any message."""

import itertools
import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import SupportsIndex

import numpy as np
import torch

from ringspan.arguments import ITERABLE, LIST, WHOLE
from ringspan.cache._state import CacheModel
from ringspan.errors import CacheError, MaskError, ShapeError, UnsupportedError
from ringspan.mask import Mask, causal
from ringspan.runtime.codec import Cast, Codec, Quantized
from ringspan.runtime.quantize import FORMATS

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def storage_codec(model: CacheModel, storage: str | None) -> Codec:
    if storage is None:
        return Cast(model.dtype)
    if storage in FORMATS:
        return Quantized(FORMATS[storage])
    if storage not in DTYPES:
        raise UnsupportedError(
            "no such storage of K and V",
            argument="storage",
            value=storage,
            remedy=f"use one of {', '.join([*DTYPES, *FORMATS])}, or None for the model's dtype",
        )
    return Cast(DTYPES[storage])


def layer_masks(mask: Mask | Sequence[Mask] | None, num_layers: int) -> tuple[Mask, ...]:
    masks = (mask,) * num_layers if isinstance(mask, Mask) else tuple(mask or (causal(),) * num_layers)
    if len(masks) != num_layers or not all(isinstance(mask, Mask) and mask.rows is None for mask in masks):
        raise MaskError(
            "the masks of a cache are in the positions of a single sequence",
            argument="mask",
            value=mask,
            remedy=f"give one mask that is not per_row, or one for each of the {num_layers} layers",
        )
    return masks


def refuse_looking_ahead(mask: Mask, starts: Mapping[int, int]) -> None:
    """Refuse masks by which cached tokens see new ones: their outputs were computed without them."""
    first_new = np.array([*starts.values()], np.int64)
    # Bands end no earlier for later tokens: if the last cached token sees no new one, no cached token does.
    reaches = [hi > first_new for _, hi in mask.bands(first_new - 1)]
    for sequence, start in itertools.compress(starts.items(), map(any, zip(*reaches, strict=True))):
        if any(((hi > start) & (hi > lo)).any() for lo, hi in mask.bands(np.arange(start))):
            raise MaskError(
                f"sequence {sequence} has {start} cached tokens, and by this mask some of them see new tokens",
                argument="mask",
                value=mask,
                remedy="give all tokens that a token sees in the same turn",
            )


def by_sequence(name: str, values: Mapping[int, int] | Iterable[int], least: int) -> dict[int, int]:
    if not isinstance(values, Mapping):
        if not ITERABLE.holds(values) and not LIST.holds(values):
            raise CacheError(
                "expected a number per sequence", argument=name, value=values, remedy="give a list or a dict"
            )
        values = dict(enumerate(values))
    return {
        whole_number(f"a key of {name}", sequence, 0): whole_number(f"{name}[{sequence}]", value, least)
        for sequence, value in values.items()
    }


def whole_number(name: str, value: SupportsIndex, least: int) -> int:
    number = operator.index(value) if WHOLE.holds(value) else least - 1
    if number < least:
        raise ShapeError("expected a whole number", argument=name, value=value, remedy=f"use {least} or more")
    return number
