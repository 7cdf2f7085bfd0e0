"""How does a model with an encoder and a decoder run: which arguments belong to which sequence, and cross-attention?

Each sequence becomes a batch of its own, as in models with one sequence, and is sharded like theirs. Encoder states
from the caller replace the encoder's inputs.

Every token of a decoder sees every token of the encoder, so the mask only hides padding keys. Over a cache every rank
has all queries: it attends to the keys that it holds, and the parts are merged on all ranks.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ringspan.algorithms.choose import DEFAULT_ALGORITHM
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout, contiguous
from ringspan.mask import Mask
from ringspan.runtime.api import attention
from ringspan.runtime.engine import Attention
from ringspan.span import Span
from ringspan.training import gather
from ringspan.transports.base import ALONE

_PREFIX = "decoder_"
_OF_EACH = ("input_ids", "inputs_embeds", "attention_mask")
BOTH = {*_OF_EACH, *(_PREFIX + name for name in _OF_EACH), "labels"}
ENCODED = "encoder_outputs"


class Apart(NamedTuple):
    """The batches of the two sequences, under the names of models that have one."""

    encoder: dict[str, torch.Tensor]
    decoder: dict[str, torch.Tensor]


def apart(model: PreTrainedModel, given: Mapping[str, Any]) -> Apart:
    """Separate the two batches; without decoder_input_ids the decoder's tokens are made from labels."""
    encoder = {name: given[name] for name in _OF_EACH if name in given}
    decoder = {name: given[_PREFIX + name] for name in _OF_EACH if _PREFIX + name in given}
    if ENCODED in given:
        encoder = {name: x for name, x in encoder.items() if name == "attention_mask"}
        encoder["inputs_embeds"] = encoded_by_caller(given)
    if "labels" in given:
        decoder["labels"] = given["labels"]
        shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
        if shift is not None and not decoder.keys() & {"input_ids", "inputs_embeds"}:
            decoder["input_ids"] = shift(given["labels"])
    if not decoder.keys() & {"input_ids", "inputs_embeds"}:
        raise ShapeError("no decoder_input_ids: give the decoder's tokens, or labels to a model that shifts them")
    rows = {len(x) for batch in (encoder, decoder) for x in batch.values()}
    if len(rows) > 1:
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in given.items() if isinstance(x, torch.Tensor))
        raise ShapeError(f"{shapes}: the encoder and the decoder need the same number of rows")
    return Apart(encoder, decoder)


def together(encoder: Mapping[str, Any], decoder: Mapping[str, Any], is_encoded: bool) -> dict[str, Any]:
    """Join the parts of both batches under the model's own names."""
    joined = {name: x for name, x in encoder.items() if name in _OF_EACH}
    if is_encoded:
        joined = {ENCODED: BaseModelOutput(last_hidden_state=joined["inputs_embeds"])}
    return joined | {name if name == "labels" else _PREFIX + name: x for name, x in decoder.items()}


def encoded_by_caller(given: Mapping[str, Any]) -> Any:
    """Return encoder states from the caller, (batch, seq, dim); None if the encoder must run."""
    if ENCODED not in given:
        return None
    hidden = given[ENCODED][0]
    if not isinstance(hidden, torch.Tensor) or hidden.ndim != 3:
        raise UnsupportedError(f"{ENCODED}: its first element must be a tensor (batch, seq, dim)")
    return hidden


class Crossing(NamedTuple):
    """The mask and layouts of cross-attention, in positions of both sequences."""

    mask: Mask
    layout: Layout  # of the decoder
    kv_layout: Layout  # of the encoder

    def on_rank(self, rank: int) -> "Crossing":
        layouts = (Layout((_spans(layout, rank),)) for layout in (self.layout, self.kv_layout))
        return Crossing(self.mask, *layouts)


def _spans(layout: Layout, rank: int) -> tuple[Span, ...]:
    assert not (layout.replicated and any(layout.spans_by_rank))
    return layout.replicated or layout.spans_by_rank[rank]


def attend_to_parts(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    crossing: Crossing,
    *,
    rank: int,
    group: Any,
    kernel: str,
    scale: float | None,
    softcap: float | None,
) -> torch.Tensor:
    """Attend replicated queries (batch, heads, seq, dim) to keys and values that are spread over the ranks."""
    mask, layout, kv_layout = crossing.on_rank(rank)
    part = attention(
        q,
        k,
        v,
        mask=mask,
        layout=layout,
        kv_layout=kv_layout,
        group=ALONE,
        algorithm=DEFAULT_ALGORITHM,
        kernel=kernel,
        scale=scale,
        softcap=softcap,
        return_lse=True,
        contract=False,
    )
    assert isinstance(part, Attention)
    if crossing.kv_layout.replicated:
        return part.out
    dtype = accumulator_dtype(part.out.dtype)
    packed = torch.cat([part.out.to(dtype), part.lse.to(dtype).unsqueeze(-1)], -1)
    world_size = crossing.kv_layout.world_size
    parts = gather(packed.unsqueeze(0), contiguous(world_size, world_size), group, dim=0)
    # The weight of a part is its exp(lse) over the sum of all; a row that sees no key on any rank has weights of 0.
    shares = torch.softmax(parts[..., -1:], 0).nan_to_num()
    return (parts[..., :-1] * shares).sum(0).to(part.out.dtype)
