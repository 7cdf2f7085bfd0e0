"""How does an ordinary model get the layers of this package, without being written anew?

`convert` replaces the forward of every module that has weights of its own, and refuses a model with one it does not
know: its gradient would be this rank's share only, and nothing would say so.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from ringspan.errors import UnsupportedError
from ringspan.layout import Layout
from ringspan.reproducible.activations import elementwise
from ringspan.reproducible.embedding import embedding
from ringspan.reproducible.linear import linear
from ringspan.reproducible.norms import layer_norm, rms_norm

Model = TypeVar("Model", bound=nn.Module)
Forwards = Mapping[type[nn.Module], Callable[..., torch.Tensor]]


def convert(
    model: Model, *, layout: Layout, group: Any = None, others: Forwards | None = None, timeout_s: float | None = None
) -> Model:
    """Let the Linear, Embedding, LayerNorm and RMSNorm modules of a model compute as this package does, in place.

    Weights, names and state_dict stay what they are. Call it again for another layout. Activations that are modules
    (Mish, Sigmoid, SiLU, Softplus, GELU by tanh) become `elementwise`; others, and functions, are left alone. Attention
    is the model's own, to be called with `reproducible=True`.

    Args:
        model: Its modules get (batch, seq, …) with this rank's tokens in the order of the layout.
        layout: As in `linear`.
        group: As in `linear`.
        others: What computes modules of other types: `forward(module, x, layout=…, group=…, timeout_s=…)`, made of the
            functions of this package.
        timeout_s: As in `linear`.

    Raises:
        UnsupportedError: A module has weights and is none of these, or has an option they do not have.
    """
    forwards = {**_FORWARDS, **(others or {})}
    found = [(module, _find(name, module, forwards)) for name, module in model.named_modules()]
    for module, forward in found:
        if forward is not None:
            module.forward = partial(forward, module, layout=layout, group=group, timeout_s=timeout_s)
    return model


def _activation(module: nn.Module, x: torch.Tensor, **_: Any) -> torch.Tensor:
    return elementwise(partial(type(module).forward, module), x)


def _linear(module: nn.Linear, x: torch.Tensor, **on: Any) -> torch.Tensor:
    return linear(x, module.weight, module.bias, **on)


def _embedding(module: nn.Embedding, ids: torch.Tensor, **on: Any) -> torch.Tensor:
    return embedding(ids, module.weight, **on)


def _layer_norm(module: nn.LayerNorm, x: torch.Tensor, **on: Any) -> torch.Tensor:
    return layer_norm(x, module.weight, module.bias, eps=module.eps, **on)


def _rms_norm(module: nn.RMSNorm, x: torch.Tensor, **on: Any) -> torch.Tensor:
    return rms_norm(x, module.weight, eps=torch.finfo(x.dtype).eps if module.eps is None else module.eps, **on)


_FORWARDS: Forwards = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
}
_ACTIVATIONS = (nn.Mish, nn.Sigmoid, nn.SiLU, nn.Softplus)
_REFUSED_OPTIONS = {"padding_idx": None, "max_norm": None, "scale_grad_by_freq": False, "sparse": False}  # of Embedding


def _find(name: str, module: nn.Module, forwards: Forwards) -> Callable[..., torch.Tensor] | None:
    """What computes a module; None if it may stay as it is."""
    if isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0:
        raise UnsupportedError(f"{name} is {module}: which numbers it draws depends on the ranks; set p=0")
    if isinstance(module, _ACTIVATIONS) or (isinstance(module, nn.GELU) and module.approximate == "tanh"):
        return _activation
    if not any(True for _ in module.parameters(recurse=False)):
        return None
    forward = forwards.get(type(module))
    if forward is None:
        raise UnsupportedError(
            f"{name or 'the model'} is a {type(module).__name__} with weights of its own; known are "
            f"{', '.join(kind.__name__ for kind in forwards)}; give a function for it in `others`"
        )
    if type(module) not in _FORWARDS:
        return forward
    if len(getattr(module, "normalized_shape", (1,))) != 1:
        raise UnsupportedError(f"{name} is {module}: norms are over the last dim only")
    for option, default in _REFUSED_OPTIONS.items():
        if getattr(module, option, default) != default:
            raise UnsupportedError(f"{name} is {module}: {option} is not supported; leave it out")
    return forward
