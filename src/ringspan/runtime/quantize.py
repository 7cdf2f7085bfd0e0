"""Keys and values in one byte per element: how large is the error at most?

An encoded tensor is values in int8 or float8_e4m3 and scales, x ≈ value · scale, with one scale per head and token.
Larger blocks would save one or two per cent of memory, but tokens arrive in a cache one at a time: with a scale of its
own, a token is encoded once. A scale makes the largest element just fit and is rounded up to bfloat16, so no element is
clipped and the scales bound the error.
"""

from typing import NamedTuple

import torch

from ringspan.errors import UnsupportedError

Encoded = tuple[torch.Tensor, torch.Tensor]
"""Values (…, tokens, dim) and scales (…, tokens, 1)."""

SCALE_DTYPE = torch.bfloat16


class Format(NamedTuple):
    """How elements are stored: the dtype, its largest value, and half the spacing of values there."""

    dtype: torch.dtype
    limit: float
    half_step: float


FORMATS = {"int8": Format(torch.int8, 127.0, 0.5), "float8_e4m3": Format(torch.float8_e4m3fn, 448.0, 16.0)}


def find_format(argument: str, name: str) -> Format:
    """The format of that name."""
    if name not in FORMATS:
        raise UnsupportedError(
            "no such encoding",
            argument=argument,
            value=name,
            remedy=f"use one of {', '.join(FORMATS)}, or None for none",
        )
    return FORMATS[name]


def encode(x: torch.Tensor, form: Format) -> Encoded:
    """Values and scales of x (…, tokens, dim). A token that contains NaN or infinity becomes NaN."""
    # amax refuses a dim of 0.
    largest = (x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)).float()
    # Rounding to bfloat16 lowers a scale by at most 2^-8 of it, so add 2^-7.
    scales = (largest * ((1 + 2**-7) / form.limit)).clamp_min_(torch.finfo(SCALE_DTYPE).tiny).to(SCALE_DTYPE)
    values = x.float() / scales
    if form.dtype is torch.int8:
        values = values.round_()
    values = values.clamp_(-form.limit, form.limit).nan_to_num_(nan=0.0)
    return values.to(form.dtype), scales.masked_fill_(scales.isinf(), torch.nan)


def encode_kv(k: torch.Tensor, v: torch.Tensor, form: Format) -> tuple[torch.Tensor, ...]:
    """(values of k, scales of k, values of v, scales of v), as they are stored and sent."""
    return (*encode(k, form), *encode(v, form))


def decode(values: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The rounded x in `dtype`; the multiplication is done in float32."""
    return values.to(torch.float32).mul_(scales).to(dtype)


def output_bound(
    q: torch.Tensor, k_scales: torch.Tensor, v_scales: torch.Tensor, form: Format, scale: float
) -> torch.Tensor:
    """(heads,): upper bound of the difference between attention over encoded and over original keys and values.

    q is (batch, heads, seq, dim); the scales are the largest of each KV head, (KV heads,). Every score moves by at most
    d = scale · |q|₁ · error of k. Weights p become p·w / sum(p·w) with w in [e^-d, e^d], which moves at most tanh(d/2)
    of the weight from one key to another; so the output moves by at most that times the range of v, plus the error of
    v. The output is rounded to q's dtype, and on a GPU decoded keys and values are as well; the bound is infinite for
    numbers that this dtype cannot hold.
    """
    if not q.shape[0] or not q.shape[2]:
        return torch.zeros(q.shape[1], dtype=torch.float64, device="cpu")
    info, group = torch.finfo(q.dtype), q.shape[1] // k_scales.shape[0]
    k_scales, v_scales = (x.double().repeat_interleave(group) for x in (k_scales, v_scales))
    step = form.half_step + (0.0 if q.device.type == "cpu" else form.limit * info.eps / 2)
    k_error, v_error = k_scales * step, v_scales * step
    largest_v = v_scales * form.limit + v_error
    moved = abs(scale) * q.double().abs().sum(-1).amax((0, 2)).cpu() * k_error
    bound = v_error + 2 * torch.tanh(moved / 2) * largest_v + largest_v * info.eps / 2
    return bound.masked_fill(largest_v > info.max, torch.inf)
