"""What happens before and after a forward of a parallelized transformer?

Before: all ranks agree that they mean the same forward with the same numbers, and the model is learned at the first
call of its kind. After: a rank that failed tells the others.
"""

import inspect
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from enum import Enum
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import nn

from ringspan.adapters.diffusers.learn import learn
from ringspan.adapters.diffusers.leaves import flatten, numbers_of
from ringspan.adapters.diffusers.plan import ForwardPlan
from ringspan.adapters.diffusers.run import RankOptions, TokenShardRun
from ringspan.adapters.diffusers.wiring import BlockWiring
from ringspan.adapters.gradients import digest_weights, is_digest_due
from ringspan.adapters.modes import in_mode
from ringspan.errors import TransportError, UnsupportedError
from ringspan.runtime.contract import Signature, describe

_PLAIN = (torch.Tensor, np.ndarray, bool, int, float, complex, str, bytes, torch.dtype, torch.device, Enum)
_ALIKE = (
    "give every rank the same noise (generator=torch.Generator().manual_seed(…) with one seed for all), prompt, "
    "timesteps and guidance"
)


class TransformerOnRanks:
    def __init__(self, model: nn.Module, options: RankOptions, is_verified: bool) -> None:
        self.model = model
        self.options = options
        self.wiring = BlockWiring(model)
        self.plans: list[tuple[object, ForwardPlan]] = []
        self._parts: list[object] | None = None  # of the model, as they were when it was learned
        self._num_changes = 0
        self._is_verified = is_verified
        self._names = [
            x.name for x in inspect.signature(model.forward).parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD
        ]
        self._under_way: ExitStack | None = None
        self._run: TokenShardRun | None = None
        self._num_trained = 0

    @property
    def is_under_way(self) -> bool:
        """Whether a forward on ranks is running."""
        return self._run is not None

    def arguments(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        return dict(zip(self._names, args, strict=False)) | dict(kwargs)

    def before(self, arguments: dict[str, Any]) -> None:
        """Agree with the other ranks and start the forward."""
        self._forget()
        with self.options.session.call():
            self._check(arguments)
        self.agree(arguments, self.options)
        plan = self.find_plan(arguments)
        self._run = TokenShardRun(plan, self.options)
        self._under_way = ExitStack()
        self._under_way.enter_context(self.wiring.running(self._run))

    def after(self, output: Any) -> None:
        """End the forward; `output` is None if it failed."""
        run = self._run
        self._forget()
        if run is None:
            return
        if output is None:
            error = sys.exc_info()[1]
            if error is not None:
                self.options.tell(error)
            return
        with self.options.session.call():
            run.check_complete()

    def find_plan(self, arguments: dict[str, Any]) -> ForwardPlan:
        """The plan for calls of this structure; the first such call learns it."""
        self._notice_changes()
        form = _form(arguments)
        numbers = numbers_of(arguments)
        for known, plan in self.plans:
            if known == form and all(numbers.get(place) == size for place, size in plan.fixed.items()):
                return plan
        with self.options.session.call() as call:
            plan = self._learn(arguments)
            fields = {"call": f"learned {type(self.model).__name__}", "plan": plan}
            call.agree(Signature.of(fields), once=True)
        self.plans.append((form, plan))
        return plan

    def close(self) -> None:
        """Remove the hooks from the blocks."""
        self._forget()
        self.wiring.remove()

    def _learn(self, arguments: dict[str, Any]) -> ForwardPlan:
        devices = {x.device for x in self.model.parameters() if x.device.type == "cuda"}
        is_quiet = _without_logs(self.model, self.wiring)
        with is_quiet, in_mode(self.model, training=False), torch.random.fork_rng(devices):
            return learn(self.model, self.wiring, arguments, is_verified=self._is_verified)

    def _check(self, arguments: dict[str, Any]) -> None:
        name = type(self.model).__name__
        for path, x in flatten(arguments):
            if x is not None and not isinstance(x, _PLAIN):
                raise UnsupportedError(
                    f"{path} of {name} is a {type(x).__name__}: ranks can neither compare nor split what such an "
                    "object holds, a cache of keys and values for instance; leave it out"
                )
        if getattr(self.model, "is_cache_enabled", False):
            raise UnsupportedError(
                f"{name} has a step cache, which decides from a rank's own rows which blocks to leave out",
                remedy="call disable_cache() first",
            )
        dropping = [x for x in self.model.modules() if isinstance(x, nn.Dropout) and x.p and x.training]
        if dropping:
            raise UnsupportedError(
                f"{name} has dropout in training, which ranks would draw apart", remedy="set it to 0"
            )

    def agree(self, arguments: dict[str, Any], options: RankOptions) -> None:
        """Agree that all ranks of a group call the model with these arguments."""
        self._notice_changes()
        trains = torch.is_grad_enabled() and self.model.training
        fields = {"call": f"forward of {type(self.model).__name__}", "training": self.model.training}
        fields |= {"gradient": torch.is_grad_enabled(), "changes of its modules": self._num_changes}
        fields |= describe(dict(flatten(arguments)))
        if trains:
            if is_digest_due(self._num_trained):
                fields["weights"] = digest_weights(self.model)
            self._num_trained += 1
        try:
            with options.session.call() as call:
                call.agree(Signature.of(fields), once=True)
        except TransportError as error:
            if "do not make the same call" in str(error):
                raise TransportError(f"{error}; {_ALIKE}") from None
            raise

    def _notice_changes(self) -> None:
        parts, before = _parts_of(self.model), self._parts
        if before is not None and len(parts) == len(before) and all(map(is_, parts, before)):
            return
        self._num_changes += before is not None
        self.plans, self._parts = [], parts

    def _forget(self) -> None:
        stack, self._under_way, self._run = self._under_way, None, None
        if stack is not None:
            stack.close()


def _parts_of(model: nn.Module) -> list[object]:
    """The modules and what they call, such as processors of attention: a model with others is learned anew."""
    own = vars(nn.Module())
    called = [x for module in model.modules() for name, x in vars(module).items() if name not in own and callable(x)]
    return [*model.modules(), *called]


def _form(arguments: dict[str, Any]) -> object:
    """The structure of a call without sizes and numbers; calls with the same structure share a plan."""
    return tuple(
        (path, _tensor_form(x) if isinstance(x, torch.Tensor) else x if isinstance(x, (bool, str)) else type(x))
        for path, x in flatten(arguments)
    )


def _tensor_form(x: torch.Tensor) -> tuple[object, ...]:
    """A model may leave out a mask that hides nothing, or an image that is all 0."""
    is_constant = [bool((x == value).all()) for value in (0, 1)] if x.ndim > 1 else []
    return x.ndim, x.dtype, *is_constant


@contextmanager
def _without_logs(model: nn.Module, wiring: BlockWiring) -> Iterator[None]:
    """Leave out what a model logs in the calls by which it is learned, in this thread and in those of two ranks."""
    handlers = logging.getLogger(type(model).__module__.partition(".")[0]).handlers

    def is_of_another_call(_: logging.LogRecord) -> bool:
        return wiring.run is None

    for handler in handlers:
        handler.addFilter(is_of_another_call)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(is_of_another_call)
