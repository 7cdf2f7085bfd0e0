"""How are queries scaled by position, where a model counts the positions itself (Llama 4)?

Layers without RoPE multiply a query at column p by 1 + strength · log(1 + floor((p + 1) / floor)). The model counts p
from the tokens that it was given, which on a rank are a part of the sequence. So its own scaling is switched off while
it is parallelized, and queries are scaled by their columns in the whole sequence, padding included, as on one device.
The layers are known by their attributes; `reference.py` compares the results with those of the unchanged model.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import nn

_SWITCH = "attn_temperature_tuning"


class QueryScaling(NamedTuple):
    """The constants of a layer's scaling."""

    floor: float
    strength: float

    def apply(self, q: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Scale queries (batch, heads, seq, dim) of tokens at `columns` (seq,), in float32 as the model does."""
        steps = torch.floor((columns.to(q.device).float() + 1.0) / self.floor)
        scales = torch.log1p(steps) * self.strength + 1.0
        return (q * scales[:, None]).to(q.dtype)


def find_scaling(module: nn.Module) -> QueryScaling | None:
    """Return the scaling that an attention layer applies to its queries."""
    layer: Any = module
    if not getattr(layer, _SWITCH, False) or getattr(layer, "use_rope", True):
        return None
    if not hasattr(layer, "floor_scale") or not hasattr(layer, "attn_scale"):
        return None
    return QueryScaling(float(layer.floor_scale), float(layer.attn_scale))


class ScalingOff:
    """A layer whose own scaling is switched off until `remove`."""

    def __init__(self, module: nn.Module) -> None:
        self._module: Any = module
        setattr(self._module, _SWITCH, False)

    def remove(self) -> None:
        """Switch it on again."""
        setattr(self._module, _SWITCH, True)


def switch_off(modules: Iterable[nn.Module]) -> list[ScalingOff]:
    """Switch off the scaling of the layers that have one."""
    return [ScalingOff(module) for module in modules if find_scaling(module) is not None]
