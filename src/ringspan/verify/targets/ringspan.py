"""This library's own attention as a target."""

import zlib
from collections.abc import Collection

import torch

from ringspan.errors import UnsupportedError
from ringspan.runtime.api import attention
from ringspan.verify.cases import FEATURES, VerifyCase
from ringspan.verify.targets.base import Target, TargetCall

ALGORITHMS = ("pass_kv", "pass_q", "all_gather", "ulysses")


class RingspanTarget(Target):
    """`rs.attention` with one algorithm, or with each in turn."""

    features: Collection[str] = FEATURES

    def __init__(self, algorithm: str | None = None) -> None:
        if algorithm is not None and algorithm not in ("auto", *ALGORITHMS):
            raise UnsupportedError(
                f"the verifier runs {', '.join(ALGORITHMS)} and auto", argument="target", value=f"ringspan:{algorithm}"
            )
        self.name = "ringspan" if algorithm is None else f"ringspan:{algorithm}"
        self._algorithm = algorithm
        if algorithm == "ulysses":
            self.features = tuple(name for name in self.features if name != "few_heads")

    def attend(self, call: TargetCall) -> tuple[torch.Tensor, torch.Tensor]:
        """Out and lse."""
        algorithm = self._algorithm or _choose(call.case)
        q, k = call.q, call.k
        if call.case.has_rope:
            q, k = _turn(q, call.positions), _turn(k, call.kv_positions)
        result = attention(
            *(q, k, call.v),
            mask=call.mask,
            layout=call.layout,
            kv_layout=call.kv_layout,
            group=call.group,
            algorithm=algorithm,
            scale=call.scale,
            sinks=call.sinks,
            softcap=call.softcap,
            return_lse=True,
        )
        assert isinstance(result, tuple)
        return result.out, result.lse


def _choose(case: VerifyCase) -> str:
    """One of the algorithms that can run a case, the same for the same case."""
    able = ALGORITHMS[:-1] if "few_heads" in case.features else ALGORITHMS
    return able[zlib.crc32(str(case).encode()) % len(able)]


def _turn(x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """RoPE by global positions."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 10000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)
