"""Transformers of diffusers on ranks in threads, beside the same model in one process."""

import copy
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ringspan.adapters.diffusers import parallelize
from ringspan.transports.in_process import InProcessRank, run_in_process
from support.diffusers_models import build


class Alone(NamedTuple):
    """A model and what it makes of its arguments in one process."""

    model: torch.nn.Module
    arguments: dict[str, Any]
    output: torch.Tensor
    weights: torch.Tensor  # of the outputs, in a loss
    gradients: dict[str, torch.Tensor]


def run_alone(name: str, *, with_gradients: bool = False) -> Alone:
    """The model as it is."""
    model, arguments = build(name)
    with quiet(), torch.set_grad_enabled(with_gradients):
        output = whole(model(**arguments))
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(9))
    if with_gradients:
        (output * weights).sum().backward()
    gradients = {key: x.grad.clone() for key, x in model.named_parameters() if x.grad is not None}
    model.zero_grad()
    return Alone(model, arguments, output.detach(), weights, gradients)


def on_ranks(alone: Alone, world_size: int, run: Callable[[Any, InProcessRank], Any]) -> list[Any]:
    """Call run(model, group) on every rank, each with a model of its own."""
    models = [copy.deepcopy(alone.model) for _ in range(world_size)]
    with quiet():
        return run_in_process(lambda group: run(models[group.rank], group), world_size, timeout_s=250)


def outputs_on_ranks(alone: Alone, world_size: int, **options: Any) -> list[torch.Tensor]:
    """The output of every rank."""

    def run(model: Any, group: InProcessRank) -> torch.Tensor:
        with parallelize(model, group, **options), torch.no_grad():
            return whole(model(**alone.arguments))

    return on_ranks(alone, world_size, run)


def error_of(x: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error in units of the largest number."""
    return float((x - expected).abs().max() / expected.abs().max())


def whole(output: Any) -> torch.Tensor:
    """The first output; some models return a list of one tensor for each row of a batch."""
    first = output[0]
    return torch.cat([x.flatten() for x in first]) if isinstance(first, list) else first


class quiet(warnings.catch_warnings):
    """Without the warnings that models of diffusers give on a CPU."""

    def __enter__(self) -> Any:
        entered = super().__enter__()
        warnings.simplefilter("ignore")
        return entered
