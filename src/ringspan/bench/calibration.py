"""Measured curves in the planner's form, and the file they are kept in. Needs no torch.

Seconds of a full tile: a·n² + b·n + c, hence the limit, the ramp and the cost of a call; a causal tile has the same
limit and a ramp of its own. Backward tiles have their own limit and ramps. Seconds of a message:
latency + bytes / rate.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from ringspan.planner.catalog import AttentionCurve

Point = tuple[int, float, float]  # tokens, FLOPs, seconds


@dataclass(frozen=True, slots=True)
class Calibration:
    """Rates that a rank of this machine reaches while the other ranks are busy too."""

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


class Tiles(NamedTuple):
    """Measured tiles of one pass."""

    full: Sequence[Point]
    causal: Sequence[Point]


def fit_attention(kernel: str, forward: Tiles, backward: Tiles) -> AttentionCurve:
    """The curve through measured tiles; relative errors count the same."""
    limit, ramp_full, call_s = _fit_limit(forward.full)
    backward_limit, backward_ramp_full, _ = _fit_limit(backward.full, call_s)
    return AttentionCurve(
        kernel=kernel,
        flops_per_s=limit,
        softmax_dims=0.0,  # the head_dim is the one that was measured
        ramp_full_tokens=ramp_full,
        ramp_causal_tokens=_fit_ramp(forward.causal, limit, call_s),
        backward_ratio=backward_limit / limit,
        backward_ramp_full_tokens=backward_ramp_full,
        backward_ramp_causal_tokens=_fit_ramp(backward.causal, backward_limit, call_s),
        wide_head_ratio=1.0,
        call_s=call_s,
    )


def _fit_limit(full: Sequence[Point], call_s: float | None = None) -> tuple[float, float, float]:
    """FLOP/s, ramp in tokens and seconds of a call, the last of them as given or fitted."""
    seconds = [s for *_, s in full]
    if call_s is None:
        inverse, ramp_s, call_s = _solve([(flops, flops / n, 1.0) for n, flops, _ in full], seconds)
    else:
        rest = [max(0.0, s - call_s) for s in seconds]
        inverse, ramp_s = _solve([(flops, flops / n) for n, flops, _ in full], rest, seconds)
    return 1 / inverse, ramp_s / inverse, call_s


def _fit_ramp(causal: Sequence[Point], limit: float, call_s: float) -> float:
    rest = [max(0.0, seconds - call_s - flops / limit) for _, flops, seconds in causal]
    (ramp_s,) = _solve([(flops / n,) for n, flops, _ in causal], rest, [s for *_, s in causal])
    return ramp_s * limit


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
    """The calibration as TOML, for `ringspan plan`."""
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
