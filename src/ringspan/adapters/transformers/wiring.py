"""How does a model's attention find the forward that it belongs to?

transformers looks attention up by name. Every parallelized model has its own name, so that two models, or a restored
one, never interfere. The registered function passes each call to the current run: that of a shard, that of a turn of a
cache, or the recorder of a dry call. The run travels to the layers as a keyword argument if the model passes those on,
because activation checkpoints call layers again later, from any thread.

`attn_implementation="ringspan"` names a model that is to be parallelized. It is registered when this module is
imported: on a single rank it is PyTorch's attention, and on more than one it refuses, since a model that nobody
parallelized would see its own shard only and say nothing.
"""

import inspect
import itertools
import threading
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from ringspan.errors import UnsupportedError
from ringspan.runtime.session import session_of

RUN = "ringspan"  # the keyword argument
_OUTSIDE = (
    "outside of its forward: call the model itself, not a part of it; a model that shares the config of a parallelized "
    "one needs its own copy of the config"
)
_NAMES = (f"ringspan-{number}" for number in itertools.count(1))


class Asked(NamedTuple):
    """One call of attention by a layer: q, k and v are (batch, heads, seq, dim)."""

    module: nn.Module
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    mask: object
    options: dict[str, Any]


class ForwardRun(Protocol):
    def attend(self, asked: Asked) -> torch.Tensor:
        """Compute out, (batch, heads, seq, v_head_dim)."""

    def make_mask(self, options: Mapping[str, Any]) -> torch.Tensor | None:
        """Return the mask that the model requests."""

    def positions(self, side: Any) -> torch.Tensor | None:
        """Return the positions for a module that counts them, equal in all rows; None lets the module count."""


class Wiring:
    """The name of one parallelized model's attention, and the run of each thread."""

    def __init__(self) -> None:
        self.name = next(_NAMES)
        self._here = threading.local()
        # The registries keep their entries for ever, so the entries hold only weak references to the model.
        itself = weakref.ref(self)
        AttentionInterface.register(self.name, partial(_attend, itself))
        AttentionMaskInterface.register(self.name, partial(_make_mask, itself))

    @property
    def run(self) -> ForwardRun | None:
        """The forward in progress in this thread."""
        return getattr(self._here, "run", None)

    @run.setter
    def run(self, run: ForwardRun | None) -> None:
        self._here.run = run


def tell_positions(wiring: Wiring, counters: Mapping[nn.Module, Any]) -> list[RemovableHandle]:
    """Add hooks that pass positions to modules that would count them; each module belongs to one side of the model."""
    return [
        module.register_forward_pre_hook(_tell(wiring, side), with_kwargs=True) for module, side in counters.items()
    ]


def _tell(wiring: Wiring, side: Any) -> Callable[..., Any]:
    def tell(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], Any]:
        positions = None if wiring.run is None else wiring.run.positions(side)
        if positions is None:
            return args, kwargs
        given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        device = next(module.parameters()).device
        return (), given | {"position_ids": positions.to(device)}

    uncompiled: Callable[..., Any] = torch.compiler.disable(tell)  # type: ignore[no-untyped-call]
    return uncompiled


def is_wired(attention: str | None) -> bool:
    """Whether this is the name of a parallelized model's attention."""
    return (attention or "").startswith("ringspan-")


def _attend(
    wiring: "weakref.ref[Wiring]",
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: object = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """Attend as transformers calls it; out is (batch, seq, heads, dim)."""
    run = options.pop(RUN, None) or _run_of(wiring)
    if run is None:
        raise UnsupportedError(
            f"attention of a parallelized model {_OUTSIDE}; activation checkpoints need a model that passes keyword "
            "arguments on to its attention"
        )
    out = run.attend(Asked(module, query, key, value, attention_mask, options))
    return out.transpose(1, 2).contiguous(), None


def _make_mask(wiring: "weakref.ref[Wiring]", **options: Any) -> torch.Tensor | None:
    run = _run_of(wiring)
    if run is None:
        raise UnsupportedError(
            f"a mask of a parallelized model {_OUTSIDE}; a static cache makes masks ahead: leave out "
            "cache_implementation"
        )
    return run.make_mask(options)


def _run_of(wiring: "weakref.ref[Wiring]") -> ForwardRun | None:
    here = wiring()
    return None if here is None else here.run


NAME = "ringspan"


def _attend_alone(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if session_of(None).transport.world_size > 1:
        raise UnsupportedError(
            "the model was not parallelized, so each rank would attend to its own tokens only",
            argument="attn_implementation",
            value=NAME,
            remedy="call rs.adapters.transformers.parallelize(model) before its first forward",
        )
    for name in ("s_aux", "softcap"):
        if options.get(name) is not None:
            raise UnsupportedError(
                "PyTorch's attention does not compute this on one rank",
                argument=name,
                remedy="load the model with attn_implementation='eager', then parallelize it",
            )
    out, _ = sdpa_attention_forward(module, query, key, value, attention_mask, **options)
    return out, None


AttentionInterface.register(NAME, _attend_alone)
AttentionMaskInterface.register(NAME, sdpa_mask)
