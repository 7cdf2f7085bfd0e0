"""Which layer of a parallelized model differs first from the model in one process?"""

import pickle
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

from ringspan.errors import ShapeError
from ringspan.layout import Layout
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import session_of

_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


class ModelDifference(NamedTuple):
    """The first module, in the order of calls, whose output differs on any rank; `error` is relative to the largest."""

    module: str
    rank: int
    error: float
    num_compared: int

    def __str__(self) -> str:
        return f"{self.module} differs first, by {self.error:.1e} on rank {self.rank}"


def compare_models(
    model: nn.Module,
    parallel: nn.Module,
    batch: Mapping[str, Any],
    *,
    parallel_batch: Mapping[str, Any] | None = None,
    layout: Layout | None = None,
    group: Any = None,
    dim: int = 1,
    tolerance: float | None = None,
) -> ModelDifference | None:
    """Run both models and compare the output of every module that both have under the same name.

    All ranks must call this. Each compares its own rows: where an output of `parallel` is a shard, the rows of
    `layout` are taken from that of `model`.

    Args:
        model: As it runs in one process, with the same weights.
        parallel: The parallelized model.
        batch: Keyword arguments for `model`, whole.
        parallel_batch: Those for `parallel`, such as `handle.shard(batch)`; by default `batch`.
        layout: How sequences are cut. Without it only outputs of equal shapes are compared.
        group: As in `rs.attention`.
        dim: The dim of the sequence in outputs.
        tolerance: Relative to the largest number of an output; by default that of its type.

    Returns:
        None if no module differs.
    """
    session = session_of(group)
    with torch.no_grad(), _outputs_of(model) as whole:
        model(**batch)
    with torch.no_grad(), _outputs_of(parallel) as parts:
        parallel(**(batch if parallel_batch is None else parallel_batch))
    errors = []
    for order, (name, part) in enumerate(parts.items()):
        expected = _rows(whole.get(name), part, layout, session.transport.rank, dim)
        if expected is None:
            continue
        error = _error(part, expected)
        limit = _TOLERANCES.get(part.dtype, 0.0) if tolerance is None else tolerance
        errors.append((order, name, error, not error <= limit))
    with session.call() as call:
        if not errors:
            raise ShapeError("the models have no module whose outputs could be compared", argument="parallel")
        found = next(((order, name, error) for order, name, error, is_wrong in errors if is_wrong), None)
        everyone = call.gather(Signature.of({"call": "compare_models"}), pickle.dumps(found))
    firsts = [(pickle.loads(text), rank) for rank, text in enumerate(everyone)]  # noqa: S301 - from our own group
    wrong = [(found, rank) for found, rank in firsts if found is not None]
    if not wrong:
        return None
    (_, name, error), rank = min(wrong, key=lambda entry: entry[0][0])
    return ModelDifference(name, rank, error, len(errors))


@contextmanager
def _outputs_of(model: nn.Module) -> Iterator[dict[str, torch.Tensor]]:
    """The last output of every module, by name, in the order in which modules returned."""
    outputs: dict[str, torch.Tensor] = {}
    hooks = []
    here = threading.get_ident()  # ranks that are threads may share a model

    def keep(name: str) -> Any:
        def hook(_: nn.Module, __: Any, output: Any) -> None:
            if threading.get_ident() != here:
                return
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, torch.Tensor) and first.is_floating_point():
                outputs.setdefault(name, first.detach().clone())

        return hook

    for name, module in model.named_modules():
        if name:
            hooks.append(module.register_forward_hook(keep(name)))
    try:
        yield outputs
    finally:
        for handle in hooks:
            handle.remove()


def _rows(
    whole: torch.Tensor | None, part: torch.Tensor, layout: Layout | None, rank: int, dim: int
) -> torch.Tensor | None:
    """The reference with which a part is compared, or None."""
    if whole is None:
        return None
    if whole.shape == part.shape:
        return whole
    if layout is None or whole.ndim <= dim or whole.shape[dim] != layout.num_positions:
        return None
    own = layout.shard(whole, rank, dim)
    return own if own.shape == part.shape else None


def _error(part: torch.Tensor, expected: torch.Tensor) -> float:
    if not expected.numel():
        return 0.0
    largest = max(float(expected.abs().max()), 1e-30)
    return float((part.double() - expected.double()).abs().max()) / largest
