"""How does an existing model get the layers of this package?

`convert` replaces the forward of every module with weights, and refuses a model with an unknown one, because the
gradient of its weights would silently be this rank's share only. It also replaces activations, and refuses modules of
torch whose results are random or depend on which tokens a rank holds.
"""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any, TypeVar

import torch
from torch import nn

from ringspan.arguments import Kind, check_arguments, instance_of, optional
from ringspan.errors import UnsupportedError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.reproducible._activations import elementwise
from ringspan.reproducible._embedding import embedding
from ringspan.reproducible._linear import linear
from ringspan.reproducible._norms import layer_norm, rms_norm
from ringspan.runtime.arithmetic import without_autocast

Model = TypeVar("Model", bound=nn.Module)
Forwards = Mapping[type[nn.Module], Callable[..., torch.Tensor]]


def convert(
    model: Model, *, layout: Layout, group: Any = None, others: Forwards | None = None, timeout_s: float | None = None
) -> Model:
    """Replace the forward of the Linear, Embedding, LayerNorm and RMSNorm modules of a model, in place.

    Weights, names and state_dict do not change. Call it again for another layout. Activations that are modules of torch
    or transformers become `elementwise` where they need it. Other modules without weights, and functions, stay as they
    are. The model must call attention with `reproducible=True` itself.

    Args:
        model: A model whose modules take (batch, seq, …) with this rank's tokens in the order of the layout.
        layout: As in `linear`.
        group: As in `linear`.
        others: Functions for modules of other types, or replacements for these types: `forward(module, x, layout=…,
            group=…, timeout_s=…)`, built from the functions of this package.
        timeout_s: As in `linear`.

    Raises:
        UnsupportedError: The model has an unknown module with weights, an unknown module of torch, or a module with an
            option that the replacement does not have.
    """
    is_map = Kind("a dict", "give functions by the type of module", lambda value: isinstance(value, Mapping))
    check_arguments(model=(instance_of(nn.Module, "nn.Linear(4, 4)"), model), others=(optional(is_map), others))
    found = [(module, _find(name or "the model", module, others or {})) for name, module in model.named_modules()]
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
    return layer_norm(x, _scales(module, x), module.bias, eps=module.eps, **on)


def _rms_norm(module: nn.RMSNorm, x: torch.Tensor, **on: Any) -> torch.Tensor:
    eps = _default_eps(x.dtype, x.device) if module.eps is None else module.eps
    return rms_norm(x, _scales(module, x), eps=eps, **on)


@cache
def _default_eps(dtype: torch.dtype, device: torch.device) -> float:
    """Return the eps that torch uses for eps=None: that of the dtype or of the sums, depending on the version.

    It is measured with a number small enough to show the difference.
    """
    x = torch.full((1,), 2.0**-14, dtype=dtype, device=device)
    with without_autocast(device.type):
        for eps in (torch.finfo(dtype).eps, torch.finfo(accumulator_dtype(dtype)).eps):
            if torch.equal(nn.functional.rms_norm(x, (1,)), nn.functional.rms_norm(x, (1,), eps=eps)):
                return eps
    raise UnsupportedError(
        f"RMSNorm with eps=None in {dtype}: torch's default eps could not be determined",
        remedy="give the module an eps",
    )


def _scales(module: nn.LayerNorm | nn.RMSNorm, x: torch.Tensor) -> torch.Tensor:
    return x.new_ones(module.normalized_shape) if module.weight is None else module.weight


_FORWARDS: Forwards = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
    nn.LayerNorm: _layer_norm,
    nn.RMSNorm: _rms_norm,
}
_ACTIVATIONS = {
    nn.CELU,
    nn.ELU,
    nn.GELU,
    nn.Hardsigmoid,
    nn.Hardswish,
    nn.LogSigmoid,
    nn.Mish,
    nn.SELU,
    nn.Sigmoid,
    nn.SiLU,
    nn.Softplus,
    nn.Softsign,
    nn.Tanhshrink,
}
_LEFT_ALONE = {
    nn.Flatten,
    nn.Hardshrink,
    nn.Hardtanh,
    nn.Identity,
    nn.LeakyReLU,
    nn.ReLU,
    nn.ReLU6,
    nn.Softshrink,
    nn.Tanh,
    nn.Threshold,
    nn.Unflatten,
}
_CONTAINERS = (nn.ModuleDict, nn.ModuleList, nn.Sequential)
_REFUSED_OPTIONS = {  # options of Embedding and of activations
    "padding_idx": None,
    "max_norm": None,
    "scale_grad_by_freq": False,
    "sparse": False,
    "inplace": False,
}


def _find(name: str, module: nn.Module, others: Forwards) -> Callable[..., torch.Tensor] | None:
    """Return the function that replaces a module's forward; None if the module may stay as it is."""
    if type(module) in others:
        return others[type(module)]
    if isinstance(module, nn.modules.dropout._DropoutNd):
        if module.p > 0:
            raise UnsupportedError(f"{name} is {module}: which numbers it draws depends on the ranks", remedy="set p=0")
        return None
    forward = _activation if _is_activation(module) else _FORWARDS.get(type(module))
    if forward is not None:
        _check_options(name, module)
        return forward
    known = ", ".join(kind.__name__ for kind in {**_FORWARDS, **others})
    if _has_weights(module):
        raise UnsupportedError(
            f"{name} is a {type(module).__name__} with weights; supported are {known}",
            remedy="give a function for it in `others`",
        )
    if _is_of_torch(module) and type(module) not in _LEFT_ALONE and not isinstance(module, _CONTAINERS):
        raise UnsupportedError(
            f"{name} is {module}: its results may depend on which tokens a rank holds; supported are "
            f"{known}, and elementwise functions",
            remedy="give a function for it in `others`",
        )
    return None


def _is_activation(module: nn.Module) -> bool:
    """Whether the module is an elementwise function whose bits depend on the place in a tensor."""
    if type(module).__module__ == "transformers.activations":  # all of them are
        return not _has_weights(module)
    return type(module) in _ACTIVATIONS


def _has_weights(module: nn.Module) -> bool:
    return any(True for _ in module.parameters(recurse=False))


def _is_of_torch(module: nn.Module) -> bool:
    """Whether the module's class, or a base class other than Module, belongs to torch."""
    return any(kind is not nn.Module and kind.__module__.startswith("torch.") for kind in type(module).__mro__)


def _check_options(name: str, module: nn.Module) -> None:
    if len(getattr(module, "normalized_shape", (1,))) != 1:
        raise UnsupportedError(f"{name} is {module}: norms are over the last dim only")
    for option, default in _REFUSED_OPTIONS.items():
        if getattr(module, option, default) != default:
            raise UnsupportedError(f"{name} is {module}: {option} is not supported", remedy="leave it out")
