"""Measured curves in the planner's form, and the file they are kept in. Needs no torch.

Two lines are fitted. Seconds of a full tile: a·n² + b·n + c, hence the limit, the ramp and the cost of a call; a causal
tile has the same limit and a ramp of its own. Seconds of a message: latency + bytes / rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ringspan.planner.catalog import AttentionCurve

Point = tuple[int, float, float]  # tokens, FLOPs, seconds


@dataclass(frozen=True, slots=True)
class Calibration:
    """What a rank of this machine reaches while the others are busy too."""

    attention: AttentionCurve
    link: tuple[float, float]  # bytes per second, latency
    steals: float  # seconds of compute lost per second of a message
    merge_bytes_per_s: float
    memory_bytes: float
    memory_bytes_per_s: float
    dense_flops_per_s: float
    node_size: int
    about: str
    tiles: tuple[tuple[str, int, float], ...]
    messages: tuple[tuple[int, float], ...]


def fit_attention(kernel: str, full: Sequence[Point], causal: Sequence[Point]) -> AttentionCurve:
    """The curve through measured tiles; relative errors count the same."""
    inverse, ramp_s, call_s = _solve([(flops, flops / n, 1.0) for n, flops, _ in full], [s for *_, s in full])
    limit = 1 / inverse
    rest = [max(0.0, seconds - call_s - flops * inverse) for _, flops, seconds in causal]
    (causal_ramp_s,) = _solve([(flops / n,) for n, flops, _ in causal], rest, [s for *_, s in causal])
    ramp_full, ramp_causal = ramp_s * limit, causal_ramp_s * limit
    return AttentionCurve(
        kernel=kernel,
        flops_per_s=limit,
        softmax_dims=0.0,  # the head_dim is the one that was measured
        ramp_full_tokens=ramp_full,
        ramp_causal_tokens=ramp_causal,
        backward_ratio=1.0,
        backward_ramp_full_tokens=ramp_full,
        backward_ramp_causal_tokens=ramp_causal,
        wide_head_ratio=1.0,
        call_s=call_s,
    )


def fit_link(messages: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """Rate and latency; one rank alone has no link, and gets one that costs nothing."""
    if not messages:
        return 1e12, 0.0
    per_byte_s, latency_s = _solve([(float(n), 1.0) for n, _ in messages], [s for _, s in messages])
    return 1 / per_byte_s, latency_s


def _solve(
    columns: Sequence[tuple[float, ...]], seconds: Sequence[float], scale: Sequence[float] | None = None
) -> tuple[float, ...]:
    """Least squares of relative errors with coefficients of at least 0: the worst negative one is left out."""
    weights = 1 / np.asarray(scale or seconds)
    matrix, target = np.asarray(columns) * weights[:, None], np.asarray(seconds) * weights
    used = list(range(matrix.shape[1]))
    while True:
        found, *_ = np.linalg.lstsq(matrix[:, used], target, rcond=None)
        if len(used) == 1 or found.min() >= 0:
            break
        used.pop(int(found.argmin()))
    values = dict(zip(used, found, strict=True))
    return tuple(max(float(values.get(i, 0.0)), 1e-30 if i == 0 else 0.0) for i in range(matrix.shape[1]))


def format_calibration(calibration: Calibration) -> str:
    """As TOML, for `ringspan plan`."""
    rate, latency_s = calibration.link
    lines = [
        "# Written by ringspan bench calibrate. SI units; what one rank reaches while the others are busy too.",
        f'about = "{calibration.about}"',
        *(
            f"{name} = {getattr(calibration, name):.6g}"
            for name in ("memory_bytes", "memory_bytes_per_s", "merge_bytes_per_s", "dense_flops_per_s")
        ),
        f"node_size = {calibration.node_size}",
        "",
        "[attention]",
        f'kernel = "{calibration.attention.kernel}"',
        *(
            f"{name} = {float(f'{getattr(calibration.attention, name):.6g}')!r}"
            for name in AttentionCurve._fields
            if name != "kernel"
        ),
        "",
        "[link]",
        f"bytes_per_s = {float(f'{rate:.6g}')!r}",
        f"latency_s = {float(f'{latency_s:.6g}')!r}",
        f"steals = {float(f'{calibration.steals:.6g}')!r}",
        "",
        "# What was measured: tiles of n × n tokens, and messages both ways at once.",
        *(f'[[tile]]\nkind = "{kind}"\ntokens = {n}\nseconds = {s:.6g}' for kind, n, s in calibration.tiles),
        *(f"[[message]]\nbytes = {n}\nseconds = {s:.6g}" for n, s in calibration.messages),
    ]
    return "\n".join(lines) + "\n"
