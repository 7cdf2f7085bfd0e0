"""How fast does an attention kernel run on a device? From its peak, its exponentials and what kernels reach of both.

A pair of a query and a key costs 4·d FLOPs in matrix products and one exponential. A kernel reaches a share of the
peak, and hides all exponentials but a share (arXiv 2407.08608, section 3: they bound kernels on H100 as much as matrix
products do). So seconds per pair are 4·d/(share · peak) + softmax_share/exponentials per second, that is

    rate = limit · d/(d + softmax_dims)   limit = share · peak   softmax_dims = softmax_share · limit/(4 · exponentials)

FlashAttention-2 uses the matrix instructions of Ampere, which on later devices reach a share of what one multiprocessor
of H100 does in a clock, not of a peak that was cut down (H20) or raised. FlashAttention-3 needs Hopper,
FlashAttention-4 Blackwell; it computes a part of the exponentials on other units.
"""

from typing import Literal, NamedTuple

from ringspan.errors import UnsupportedError
from ringspan.planner.catalog.constants import Constants

Kernel = Literal["fa2", "fa3", "fa4"]
KERNELS: tuple[Kernel, ...] = ("fa2", "fa3", "fa4")
NEWEST: dict[str, Kernel] = {"hopper": "fa3", "blackwell": "fa4"}  # by family; FlashAttention-2 elsewhere
FLOPS_PER_EXPONENTIAL = 256  # of H100: 989e12 / 3.87e12, per multiprocessor and clock 4096 over 16
USUAL_FLOPS_PER_EXPONENTIAL = 128  # of A100; taken where the exponentials of a device are not known
FA4_EXPONENTIALS = 0.35  # that cost time, of those of FlashAttention-3: 1,613 TF/s on B200 (arXiv 2603.05451)
OLD_INSTRUCTIONS = ("hopper", "blackwell")  # where FlashAttention-2 cannot use the newest ones


class AttentionCurve(NamedTuple):
    """How fast a kernel attends on a device: see `cost.attention_flops_per_s`."""

    kernel: str
    flops_per_s: float  # long full tiles of infinitely wide heads
    softmax_dims: float
    ramp_full_tokens: float
    ramp_causal_tokens: float
    backward_ratio: float
    backward_ramp_full_tokens: float
    backward_ramp_causal_tokens: float
    wide_head_ratio: float
    call_s: float = 0.0


class Silicon(NamedTuple):
    """The rates of a device that bound its kernels."""

    family: str
    peak_flops_per_s: float
    exponentials_per_s: float | None


def attention_curve(name: str, kernel: str, silicon: Silicon, reached: Constants) -> AttentionCurve:
    """The curve of a kernel on a device, measured or not."""
    if kernel not in KERNELS:
        raise UnsupportedError(
            "no curve of this kernel is known",
            argument="kernel",
            value=kernel,
            remedy=f"use one of {', '.join(KERNELS)}",
        )
    is_old = kernel == "fa2"
    if not is_old and NEWEST.get(silicon.family) != kernel:
        newest = NEWEST.get(silicon.family, "fa2")
        raise UnsupportedError(
            f"it does not run on {name}, which is {silicon.family}",
            argument="kernel",
            value=kernel,
            remedy=f"use {newest}" if newest == "fa2" else f"use {newest} or fa2",
        )
    exponentials = silicon.exponentials_per_s or silicon.peak_flops_per_s / USUAL_FLOPS_PER_EXPONENTIAL
    softmax_share = reached.softmax_share * (FA4_EXPONENTIALS if kernel == "fa4" else 1.0)
    if not is_old:
        limit = reached.fa3_share * silicon.peak_flops_per_s
    else:
        share = reached.fa2_ada_share if silicon.family == "ada" else reached.fa2_share
        limit = share * silicon.peak_flops_per_s
        if silicon.family in OLD_INSTRUCTIONS:
            limit = min(limit, reached.fa2_hopper_share * FLOPS_PER_EXPONENTIAL * exponentials)
    return AttentionCurve(
        kernel=kernel,
        flops_per_s=limit,
        softmax_dims=softmax_share * limit / (4 * exponentials),
        ramp_full_tokens=reached.fa2_ramp_full_tokens if is_old else reached.fa3_ramp_full_tokens,
        ramp_causal_tokens=reached.fa2_ramp_causal_tokens if is_old else reached.fa3_ramp_causal_tokens,
        backward_ratio=reached.fa2_backward_ratio if is_old else reached.fa3_backward_ratio,
        backward_ramp_full_tokens=reached.fa2_backward_ramp_full_tokens,
        backward_ramp_causal_tokens=reached.fa2_backward_ramp_causal_tokens,
        wide_head_ratio=reached.fa2_wide_head_ratio if is_old else 1.0,
    )
