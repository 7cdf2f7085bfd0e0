"""Keys and values in one byte per element: what is lost, and how much at most?

An encoded tensor is values in int8 or float8_e4m3 and scales, one for each head and block of tokens: x ≈ value · scale.
A scale is what makes the largest element of its block just fit, rounded up to bfloat16, so nothing is ever cut off and
the bound of the error can be read from the scales alone. On their way K and V have a scale per BLOCK tokens. In a cache
a block is one token: tokens come one at a time, and a token is encoded once, whatever comes behind it.
"""

import math
from typing import NamedTuple

import torch

from ringspan.errors import UnsupportedError

BLOCK = 32  # tokens that share a scale on their way

Encoded = tuple[torch.Tensor, torch.Tensor]
"""Values (…, tokens, dim) and scales (…, blocks, 1)."""

SCALE_DTYPE = torch.bfloat16


class Format(NamedTuple):
    """How elements are stored: the type, its largest value, and half the distance of its neighbours there."""

    dtype: torch.dtype
    limit: float
    half_step: float


FORMATS = {"int8": Format(torch.int8, 127.0, 0.5), "float8_e4m3": Format(torch.float8_e4m3fn, 448.0, 16.0)}


def find_format(argument: str, name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise UnsupportedError(
            f"{argument}={name!r}: there is no such encoding; use one of {', '.join(FORMATS)}, or None for none"
        )
    return FORMATS[name]


def encode(x: torch.Tensor, form: Format, block: int = BLOCK) -> Encoded:
    """Values and scales of x (…, tokens, dim). A block with a NaN or an infinity becomes NaN as a whole."""
    tokens = x.shape[-2]
    num_blocks = -(-tokens // block)
    largest = x.abs().amax(-1, keepdim=True).float()
    if block > 1:
        padded = torch.nn.functional.pad(largest, (0, 0, 0, num_blocks * block - tokens))
        largest = padded.reshape(*x.shape[:-2], num_blocks, block, 1).amax(-2)
    # 2^-7 more than needed: rounding to bfloat16 takes off 2^-8 at most.
    scales = (largest * ((1 + 2**-7) / form.limit)).clamp_min(torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    values = x.float() / _per_token(scales, tokens)
    if form.dtype is torch.int8:
        values = values.round_()
    return values.clamp_(-form.limit, form.limit).nan_to_num_(nan=0.0).to(form.dtype), _nan_where_infinite(scales)


def decode(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is left of x, in a type of choice; the multiplication is done in float32."""
    return values.to(torch.float32).mul_(_per_token(scales, values.shape[-2])).to(dtype)


def narrow(values: torch.Tensor, scales: torch.Tensor, start: int, length: int) -> Encoded:
    """The tokens from `start` on, with scales that fit them; one scale per token unless they begin on a block."""
    if scales.shape[-2] != values.shape[-2]:
        scales = _per_token(scales, values.shape[-2])
    return values.narrow(-2, start, length), scales.narrow(-2, start, length)


def element_bound(scales: torch.Tensor, form: Format) -> torch.Tensor:
    """(heads,): how far any element of each head can be from what it was."""
    if not scales.numel():
        return torch.zeros(scales.shape[-3])
    return scales.float().amax((-1, -2)).reshape(-1, scales.shape[-3]).amax(0) * form.half_step


def output_bound(
    q: torch.Tensor, k_scales: torch.Tensor, v_scales: torch.Tensor, form: Format, scale: float
) -> torch.Tensor:
    """(heads,): how far attention over encoded keys and values can be from attention over what they were.

    q is (batch, heads, seq, dim); the scales are the largest of each KV head, (KV heads,). Let every score move by at
    most d = scale · |q|₁ · error of k. Weights p become p·w / sum(p·w) with w in [e^-d, e^d], which moves at most
    tanh(d/2) of the weight from one key to another; so the output moves by at most that times the range of v, and by
    the error of v.
    """
    group = q.shape[1] // k_scales.shape[0]
    k_error, v_error = (x.double().repeat_interleave(group) * form.half_step for x in (k_scales, v_scales))
    largest_v = v_scales.double().repeat_interleave(group) * form.limit + v_error
    if not q.shape[0] or not q.shape[2]:
        return torch.zeros(q.shape[1], dtype=torch.float64)
    moved = abs(scale) * q.double().abs().sum(-1).amax((0, 2)) * k_error
    return v_error + 2 * torch.tanh(moved / 2) * largest_v


def encoded_bytes(shape: tuple[int, ...], form: Format, block: int = BLOCK) -> int:
    """Bytes of an encoded tensor of this shape."""
    *lead, tokens, dim = shape
    return math.prod(lead) * (tokens * dim * form.dtype.itemsize + -(-tokens // block) * SCALE_DTYPE.itemsize)


def _per_token(scales: torch.Tensor, tokens: int) -> torch.Tensor:
    """Scales of blocks as scales of tokens."""
    if scales.shape[-2] == tokens:
        return scales
    return scales.repeat_interleave(BLOCK, -2).narrow(-2, 0, tokens)


def _nan_where_infinite(scales: torch.Tensor) -> torch.Tensor:
    return scales.masked_fill_(scales.isinf(), torch.nan)
