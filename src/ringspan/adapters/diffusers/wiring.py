"""How do a model's blocks and its attention find out which call they are part of?

Hooks stand on the model's blocks, and a TorchFunctionMode stands around its forward. Both pass what they see to the run
under way in this thread: the trace of a dry call, or a forward on ranks. Blocks are the members of the model's
outermost ModuleLists. All of this is public in torch, and nothing of diffusers is touched.
"""

import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from ringspan.errors import UnsupportedError

SDPA = torch.nn.functional.scaled_dot_product_attention


class SdpaCall(NamedTuple):
    """A call of torch's scaled_dot_product_attention; q, k and v are (batch, heads, seq, dim)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_mask: torch.Tensor | None = None
    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = None
    enable_gqa: bool = False

    def alone(self) -> torch.Tensor:
        """Compute the call with torch's own attention."""
        return SDPA(
            self.query,
            self.key,
            self.value,
            self.attn_mask,
            self.dropout_p,
            self.is_causal,
            scale=self.scale,
            enable_gqa=self.enable_gqa,
        )


class CallRun(Protocol):
    """A running call of the model; it decides what blocks and attention receive and return."""

    def enter(self, name: str, arguments: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments that a block receives instead."""

    def leave(self, name: str, output: Any) -> Any:
        """Return the outputs that a block returns instead."""

    def attend(self, asked: SdpaCall) -> torch.Tensor:
        """Compute a call of attention."""

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call any other function of torch."""


class BlockWiring:
    """The blocks of one model, and the run of each thread."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.blocks = dict(_outermost_members(model))
        if not self.blocks:
            raise UnsupportedError(
                f"{type(model).__name__} has no ModuleList of blocks, between which its tokens could be split"
            )
        self._here = threading.local()
        self._hooks: list[RemovableHandle] = []
        for name, block in self.blocks.items():
            self._hooks += self._hook(name, block)

    @property
    def run(self) -> CallRun | None:
        """The running call of this thread."""
        return getattr(self._here, "run", None)

    @contextmanager
    def running(self, run: CallRun) -> Iterator[None]:
        """Pass the calls of this thread's blocks to `run`."""
        self._here.run = run
        try:
            with _Watch(run):
                yield
        finally:
            self._here.run = None

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _hook(self, name: str, block: nn.Module) -> list[RemovableHandle]:
        names = _positional_names(block)

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def enter(_: object, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if self.run is None:
                raise UnsupportedError(
                    f"{name} of a parallelized {type(self.model).__name__} was called outside of the model's forward: "
                    "call the model itself, and turn gradient checkpointing off, which calls blocks again later"
                )
            given = dict(zip(names, args, strict=False))
            taken = self.run.enter(name, given | kwargs)
            return tuple(taken.pop(x) for x in given), taken

        @torch.compiler.disable  # type: ignore[untyped-decorator]
        def leave(_: object, __: object, output: Any) -> Any:
            return output if self.run is None else self.run.leave(name, output)

        return [
            block.register_forward_pre_hook(enter, with_kwargs=True),
            block.register_forward_hook(leave),
        ]


class _Watch(TorchFunctionMode):
    """Intercepts every function of torch that this thread calls."""

    def __init__(self, run: CallRun) -> None:
        super().__init__()
        self._run = run

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is SDPA:
            return self._run.attend(SdpaCall(*args, **(kwargs or {})))
        return self._run.call(func, args, dict(kwargs or {}))


def _outermost_members(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        where = f"{path}.{name}" if path else name
        if isinstance(child, nn.ModuleList):
            yield from ((f"{where}.{number}", member) for number, member in enumerate(child))
        else:
            yield from _outermost_members(child, where)


def _positional_names(block: nn.Module) -> list[str]:
    parameters = inspect.signature(block.forward).parameters.values()
    names = [x.name for x in parameters if x.kind in (x.POSITIONAL_ONLY, x.POSITIONAL_OR_KEYWORD)]
    return [*names, *(f"argument {number}" for number in range(len(names), 64))]
