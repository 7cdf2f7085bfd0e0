"""Which arguments of a model with an encoder and a decoder belong to which sequence?

Each sequence becomes a batch of its own, as in models with one sequence, and is sharded like theirs. Encoder states
from the caller replace the encoder's inputs.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from ringspan.errors import ShapeError, UnsupportedError

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
