"""Which attention does each layer of a model ask for, and can it be computed exactly?

The model is called on a few tokens with a recorder in place of attention. The recorder keeps the options that each
layer passes: heads, mask, window, sinks, scale, softcap. An unknown option is refused by name, never ignored.

Layers of Llama 4 without RoPE multiply a query at column p by 1 + strength · log(1 + floor((p + 1) / floor)). The model
counts p from the tokens that it was given, which on a rank are a part of the sequence. So its own scaling is switched
off while it is parallelized, and queries are scaled by their columns in the whole sequence, padding included, as on one
device. These layers are known by their attributes; `reference.py` compares the results with the unchanged model's.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import nn

from ringspan.adapters.transformers.masks import FoundMask, MaskFunction, chunked, documents_mask, evaluate, find_mask
from ringspan.adapters.transformers.wiring import Asked
from ringspan.errors import UnsupportedError
from ringspan.mask import Mask, causal, full
from ringspan.schedule import Heads

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


# Options that layers pass and attention does not need: RoPE is applied already, the rest is for outputs or caches.
_OF_NO_USE = {"position_ids", "cache_position", "use_cache", "output_hidden_states", "return_dict"}
_REASONS = {
    "position_bias": "a bias for relative positions is added to the scores, which no mask can express",
    "output_attentions": "no rank has all attention weights",
}
_FUNCTION = "ringspan_mask_function"  # the attribute of a recorded mask that holds its function
_SIZE = "ringspan_mask_size"  # the attribute that holds the size of its window or chunk, 0 if it has none


Side = Literal["own", "encoder", "cross"]
"""The sequences of an attention layer: that of the outputs, that of an encoder, or cross-attention between them."""


class AttentionOptions(NamedTuple):
    """The keyword arguments of a call of attention."""

    scale: float | None
    softcap: float | None
    dropout: float
    window: int | None
    sinks: torch.Tensor | None
    is_causal: bool | None


def read_options(given: Mapping[str, Any]) -> AttentionOptions:
    """Read the options that a layer passes; refuse unknown ones by name."""
    given = {
        name: value
        for name, value in given.items()
        if value is not None and name not in _OF_NO_USE and not (name.startswith("output_") and value is False)
    }
    options = AttentionOptions(
        given.pop("scaling", None),
        given.pop("softcap", None),
        given.pop("dropout", 0.0),
        given.pop("sliding_window", None),
        given.pop("s_aux", None),
        given.pop("is_causal", None),
    )
    if given:
        name, value = next(iter(given.items()))
        shown = "" if isinstance(value, torch.Tensor) else f"={value!r}"
        raise UnsupportedError(f"{name}{shown}: {_REASONS.get(name, 'no such option of attention is known here')}")
    return options


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """The options that an attention layer uses in every call."""

    name: str
    side: Side
    mask: Mask  # within a document
    chunk: int | None  # the size of the mask's chunks
    keeps_documents: bool  # whether it keeps packed documents apart
    heads: Heads
    head_dim: int
    v_head_dim: int
    dtype: torch.dtype
    scale: float | None
    softcap: float | None
    window: int | None
    has_sinks: bool
    is_causal: bool | None
    dropout: float  # in training
    scaling: QueryScaling | None  # of queries by their columns

    def mask_from(self, start: int) -> Mask:
        """Return the mask of a row whose first token is at column `start`."""
        if self.chunk is None or not start:
            return self.mask
        return chunked(self.chunk, is_causal=self.mask != chunked(self.chunk, is_causal=False), start=start)

    def check(self, asked: Asked) -> AttentionOptions:
        """Return the options of a call; refuse options that differ from those of the dry call."""
        try:
            options = read_options(asked.options)
        except UnsupportedError as error:
            raise UnsupportedError(f"{self.name}: {error}") from None
        if asked.mask is not None:
            raise UnsupportedError(f"{self.name}: attends with a foreign mask", remedy="give a 2-D attention_mask")
        heads = Heads(asked.q.shape[1], asked.k.shape[1])
        scores = options.scale, options.softcap
        expected = (self.scale, self.softcap, self.window, self.has_sinks, self.is_causal, self.heads)
        found = (*scores, options.window, options.sinks is not None, _is_causal(asked, options), heads)
        if found != expected or options.dropout:
            raise UnsupportedError(
                f"{self.name}: scale, softcap, window, sinks, is_causal and heads are {found}, dropout "
                f"{options.dropout}, but parallelize found {expected} and no dropout; restore the model and "
                "parallelize it again"
            )
        return options


@dataclass(slots=True)
class Recorder:
    """A run that computes nothing and records what the layers ask for."""

    device: torch.device
    asked: list[Asked] = field(default_factory=list)
    cache_indices: dict[nn.Module, int] = field(default_factory=dict)
    pending: int | None = None  # the last updated layer of a cache

    def attend(self, asked: Asked) -> torch.Tensor:
        """Record a call and return zeros; the options of later layers do not depend on them."""
        self.asked.append(asked)
        if self.pending is not None:
            self.cache_indices[asked.module] = self.pending
            self.pending = None
        return asked.q.new_zeros(*asked.q.shape[:3], asked.v.shape[-1])

    def end(self, is_done: bool) -> None:
        """Do nothing; a dry call has no turn."""

    def positions(self, side: Side) -> None:
        del side

    def make_mask(self, options: Mapping[str, Any]) -> torch.Tensor:
        """Return a mask tagged with its function; the tag is lost if the model computes with the mask."""
        mask = torch.ones(1, 1, options["q_length"], options["kv_length"], dtype=torch.bool, device=self.device)
        setattr(mask, _FUNCTION, options["mask_function"])
        setattr(mask, _SIZE, options.get("local_size") or 0)
        return mask


class Refusal(NamedTuple):
    layer: str
    reason: str


def describe_layers(
    names: Mapping[nn.Module, str],
    plain: Recorder,
    packed: Recorder,
    packed_ids: torch.Tensor,
    trained: Recorder,
    num_encoded: int | None,
) -> dict[nn.Module, AttentionLayer]:
    """Describe the layers of a model from three dry calls: one document, packed documents, and training.

    An encoder gets another number of tokens, `num_encoded`, which identifies its layers.
    """
    layers: dict[nn.Module, AttentionLayer] = {}
    refusals: list[Refusal] = []
    masks: dict[tuple[MaskFunction, int], FoundMask | None] = {}  # layers share masks
    dropouts = {asked.module: asked.options.get("dropout", 0.0) for asked in trained.asked}
    for asked, asked_packed in zip(plain.asked, packed.asked, strict=True):
        name = names.get(asked.module, type(asked.module).__name__)
        try:
            side = _side_of(asked, num_encoded)
            layer = _describe(name, side, asked, asked_packed, packed_ids, dropouts.get(asked.module, 0.0), masks)
        except UnsupportedError as error:
            refusals.append(Refusal(name, str(error)))
            continue
        if layers.setdefault(asked.module, layer) != layer:
            refusals.append(Refusal(name, "it asks for different things within one forward"))
    if refusals:
        raise UnsupportedError(tell(refusals))
    return layers


def tell(refusals: Iterable[Refusal]) -> str:
    """Join the reasons, each with its layers."""
    by_reason: dict[str, list[str]] = {}
    for layer, reason in refusals:
        by_reason.setdefault(reason, []).append(layer)
    return "; ".join(f"{_some(layers)}: {reason}" for reason, layers in by_reason.items())


def _some(layers: list[str]) -> str:
    layers = list(dict.fromkeys(layers))
    return ", ".join(layers) if len(layers) <= 3 else f"{layers[0]}, {layers[1]} … ({len(layers)} layers)"


def _side_of(asked: Asked, num_encoded: int | None) -> Side:
    if num_encoded is None or asked.k.shape[2] != num_encoded:
        return "own"
    return "encoder" if asked.q.shape[2] == num_encoded else "cross"


def _describe(
    name: str,
    side: Side,
    asked: Asked,
    packed: Asked,
    packed_ids: torch.Tensor,
    dropout: float,
    masks: dict[tuple[MaskFunction, int], FoundMask | None],
) -> AttentionLayer:
    options = read_options(asked.options)
    mask, chunk = _mask_of(asked, options, masks)
    if side == "cross" and mask != full():
        raise UnsupportedError("cross-attention that hides some of an encoder's tokens is not supported")
    if options.window is not None and mask.allowed([4 * options.window], [0]).any():
        raise UnsupportedError(f"sliding_window={options.window}, but its mask has no such window")
    return AttentionLayer(
        name,
        side,
        mask,
        chunk,
        side == "own" and _keeps_documents(packed, mask, packed_ids),
        Heads(asked.q.shape[1], asked.k.shape[1]),
        asked.q.shape[3],
        asked.v.shape[3],
        asked.q.dtype,
        options.scale,
        options.softcap,
        options.window,
        options.sinks is not None,
        _is_causal(asked, options),
        dropout,
        find_scaling(asked.module),
    )


def _function_of(asked: Asked) -> MaskFunction | None:
    function: MaskFunction | None = getattr(asked.mask, _FUNCTION, None)
    if asked.mask is not None and function is None:
        raise UnsupportedError("it attends with a mask that the model changes itself")
    return function


def _mask_of(
    asked: Asked, options: AttentionOptions, masks: dict[tuple[MaskFunction, int], FoundMask | None]
) -> FoundMask:
    function, is_causal = _function_of(asked), _is_causal(asked, options)
    if function is not None:
        key = (function, max(options.window or 0, getattr(asked.mask, _SIZE)))
        found = masks[key] = masks[key] if key in masks else find_mask(function, key[1], asked.q.device)
        if found is None:
            raise UnsupportedError("its mask is neither full nor causal, a sliding window nor chunks")
        mask = found.mask
        if is_causal is not None and is_causal == mask.allowed([8], [9]).any():
            raise UnsupportedError(
                f"is_causal={is_causal}, but its mask is {mask}: which of them applies would depend on padding",
                remedy="use config.is_causal, which sets both",
            )
        return found
    if is_causal is None or options.window is not None:
        raise UnsupportedError("it asks for no mask and does not say whether it is causal")
    return FoundMask(causal() if is_causal else full())


def _is_causal(asked: Asked, options: AttentionOptions) -> bool | None:
    said: bool | None = getattr(asked.module, "is_causal", None)
    return said if options.is_causal is None else options.is_causal


def _keeps_documents(packed: Asked, mask: Mask, position_ids: torch.Tensor) -> bool:
    """Whether the layer's mask changes when positions restart."""
    function = _function_of(packed)
    if function is None:
        return False
    places = np.arange(position_ids.shape[1])
    seen = evaluate(function, places, places, packed.q.device)
    if np.array_equal(seen, mask.allowed(places, places)):
        return False
    apart = documents_mask(position_ids.cpu().numpy())
    assert apart is not None
    if np.array_equal(seen, (mask & apart).allowed(places, places)):
        return True
    raise UnsupportedError("its mask depends on position_ids in an unknown way")
