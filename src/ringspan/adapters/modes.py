"""A model in another mode for a while, so that it can be tried out and is left as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_mode(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Put a model into training or evaluation mode inside a `with` block."""
    before = [(module, module.training) for module in model.modules()]
    model.train(training)
    try:
        yield
    finally:
        for module, was_training in before:
            module.training = was_training
