"""What is this rank's part of a whole batch, and what does its attention see?

Sequences are sharded along their tokens; every rank has all rows. The sequences of an encoder and of its decoder are
sharded separately. Padding and packed documents become part of the mask, which every rank knows because it gets the
whole batch. Labels are shifted before they are sharded.

A training forward on a whole batch returns the rows of all ranks on every rank, and each rank computes the same loss
from them. The gradient of a row goes once, to the rank that computed the row.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from ringspan.adapters.keys import by_row
from ringspan.adapters.transformers.encoder_decoder import Crossing
from ringspan.adapters.transformers.layers import AttentionLayer, Side
from ringspan.adapters.transformers.masks import Tokens, documents_mask, first_columns, padding_mask
from ringspan.adapters.transformers.wiring import Asked
from ringspan.algorithms import ALGORITHMS
from ringspan.arguments import TEXT, check_arguments
from ringspan.errors import LayoutError, ShapeError, UnsupportedError
from ringspan.layout import Layout, contiguous, striped, zigzag
from ringspan.mask import Mask, full
from ringspan.program.problem import local_rows
from ringspan.runtime.api import attention
from ringspan.runtime.contract import describe
from ringspan.runtime.session import Session, session_of
from ringspan.span import Span
from ringspan.training import IGNORE_INDEX, cross_rank_mean_loss, gather, next_token_labels

LAYOUTS: dict[str, Callable[..., Layout]] = {"zigzag": zigzag, "contiguous": contiguous, "striped": striped}
BY_TOKEN = (
    "input_ids",
    "inputs_embeds",
    "position_ids",
    "token_type_ids",
    "labels",
)  # inputs with a row for each token


class ShardOptions(NamedTuple):
    """The options of `parallelize` for one model."""

    group: Any
    layout: str
    algorithm: str
    kernel: str

    @property
    def session(self) -> Session:
        return session_of(self.group)

    @property
    def rank(self) -> int:
        return self.session.transport.rank

    @property
    def world_size(self) -> int:
        return self.session.transport.world_size

    def refuse(self, error: Exception) -> None:
        """Tell the other ranks, which are about to begin a call, that this rank refuses it."""
        self.session.call().tell(error)

    def layout_of(self, seq_len: int) -> Layout:
        """Return the layout; a sequence with fewer tokens than ranks is replicated on all ranks."""
        return _layout_of(self.layout, seq_len, self.world_size)


@lru_cache(maxsize=64)  # torch.compile recompiles for another layout object, even an equal one
def _layout_of(name: str, seq_len: int, world_size: int) -> Layout:
    if seq_len < world_size:
        return Layout(((),) * world_size, (Span(0, seq_len),))
    return LAYOUTS[name](seq_len, world_size)


@dataclass(slots=True)
class ShardRun:
    """A forward over this rank's part of a batch."""

    options: ShardOptions
    layers: Mapping[nn.Module, AttentionLayer]
    layout: Layout
    padding: Mask | None
    documents: Mask | None
    said: dict[str, str]  # the description of the batch on which the ranks agree
    firsts: tuple[int, ...] = ()  # by row, the column of its first token; empty if there is no padding
    num_labels: int = 0  # labels that count, on all ranks
    masks: dict[tuple[Mask, bool], Mask] = field(default_factory=dict)
    source: "ShardRun | None" = None  # the encoder's run, if this is the decoder's

    def attend(self, asked: Asked) -> torch.Tensor:
        """Attend to the tokens of all ranks."""
        layer = layer_of(self.layers, asked)
        if layer.side == "encoder" and self.source is not None:
            return self.source.attend(asked)
        try:
            options = layer.check(asked)
        except UnsupportedError as error:
            self.fail(error)
            raise
        mask, layout, kv_layout = self.seen_by(layer)
        q = asked.q if layer.scaling is None else layer.scaling.apply(asked.q, self.positions(layer.side))
        out = attention(
            q,
            asked.k,
            asked.v,
            mask=mask,
            layout=layout,
            kv_layout=kv_layout,
            group=self.options.group,
            algorithm=self.options.algorithm,
            kernel=self.options.kernel,
            scale=options.scale,
            softcap=options.softcap,
            sinks=options.sinks,
        )
        assert isinstance(out, torch.Tensor)
        return out

    def fail(self, error: Exception) -> None:
        """Tell the other ranks, which wait for this rank's next call."""
        self.options.refuse(error)

    def make_mask(self, options: Mapping[str, Any]) -> None:
        """Return None, because `attend` makes the mask."""
        del options

    def positions(self, side: Side) -> torch.Tensor:
        run = self.source if side == "encoder" and self.source is not None else self
        return torch.from_numpy(run.layout.positions(self.options.rank))

    def seen_by(self, layer: AttentionLayer) -> Crossing:
        """Return the mask and layouts of a layer on this batch."""
        if layer.side == "cross":
            assert self.source is not None
            return self.source.seen_from(self.layout)
        key = (layer.mask, layer.keeps_documents)
        if key not in self.masks:
            mask = by_row([layer.mask_from(first) for first in self.firsts]) or layer.mask
            mask = mask if self.padding is None else mask & self.padding
            if self.documents is not None and layer.keeps_documents:
                mask = mask & self.documents
            self.masks[key] = mask
        return Crossing(self.masks[key], self.layout, self.layout)

    def seen_from(self, layout: Layout) -> Crossing:
        """Return the mask and layouts of a decoder's cross-attention to this encoder's batch."""
        return Crossing(full() if self.padding is None else self.padding, layout, self.layout)


def layer_of(layers: Mapping[nn.Module, AttentionLayer], asked: Asked) -> AttentionLayer:
    if asked.module not in layers:
        raise UnsupportedError(
            f"{type(asked.module).__name__}: parallelize did not see this layer attend; restore the model and "
            "parallelize it again"
        )
    return layers[asked.module]


class ShardPart(NamedTuple):
    """This rank's part of a batch, and its run."""

    inputs: dict[str, torch.Tensor]
    run: ShardRun


def shard_inputs(
    batch: Mapping[str, torch.Tensor],
    options: ShardOptions,
    layers: Mapping[nn.Module, AttentionLayer],
    *,
    shifts_labels: bool = False,
    takes_positions: bool = True,
    pads_alike: bool = False,
    is_known: bool = False,
) -> ShardPart:
    """Cut a rank's part out of a batch that every rank holds; of a known batch only the padding is compared again."""
    size, seq_len = check_batch(batch)
    layout, rank = options.layout_of(seq_len), options.rank
    whole = {name: batch[name] for name in BY_TOKEN if name in batch}
    tokens = tokens_of(batch.get("attention_mask"), size, seq_len)
    documents = None
    if not takes_positions:
        assert "position_ids" not in whole
    elif "position_ids" not in whole:
        device = next(iter(whole.values())).device
        whole["position_ids"] = torch.arange(seq_len, device=device).expand(size, -1)
    elif "attention_mask" not in batch:  # as in transformers, an attention_mask overrides packed documents
        documents = documents_mask(batch["position_ids"].expand(size, -1).cpu().numpy())
    num_labels = 0
    if "labels" in whole:
        labels = next_token_labels(whole["labels"]) if shifts_labels else whole["labels"]
        if tokens is not None and not pads_alike:
            _check_labels(labels, tokens, shifts_labels)
        num_labels, whole["labels"] = int((labels != IGNORE_INDEX).sum()), labels
    part = {name: layout.shard(x, rank, 1) for name, x in whole.items()}
    if "labels" in part and rank > 0 and layout.replicated:
        part["labels"] = part["labels"].clone()
        part["labels"][:, local_rows(layout, rank).replicated] = IGNORE_INDEX
    padding = None if tokens is None else padding_mask(tokens)
    firsts = () if tokens is None else first_columns(tokens)
    said = describe({name: x for name, x in batch.items() if name == "attention_mask" or not is_known})
    return ShardPart(part, ShardRun(options, layers, layout, padding, documents, said, firsts, num_labels))


def check_batch(batch: Mapping[str, torch.Tensor]) -> tuple[int, int]:
    """Check that whole tensors fit each other, and return (batch, seq)."""
    for name, x in batch.items():
        if not isinstance(x, torch.Tensor):
            raise ShapeError(f"{name} is a {type(x).__name__}: give tensors, (batch, seq)")
    given = [name for name in ("input_ids", "inputs_embeds") if name in batch]
    if len(given) != 1:
        raise ShapeError(f"a batch of {', '.join(batch) or 'nothing'}: give either input_ids or inputs_embeds")
    x = batch[given[0]]
    if x.ndim < 2 or not x.numel():
        raise ShapeError("give at least one token, (batch, seq)", argument=f"{given[0]}.shape", value=tuple(x.shape))
    size, seq_len = x.shape[:2]
    for name, tensor in batch.items():
        rows = (1, size) if name == "position_ids" else (size,)
        if name != "attention_mask" and (tensor.ndim < 2 or tensor.shape[0] not in rows or tensor.shape[1] != seq_len):
            raise ShapeError(
                f"{given[0]} has {size} rows of {seq_len} tokens, and every tensor of the batch must match",
                argument=f"{name}.shape",
                value=tuple(tensor.shape),
            )
    if "position_ids" in batch and batch["position_ids"].ndim != 2:
        raise UnsupportedError(
            "expected one position per token, (batch, seq)",
            argument="position_ids.shape",
            value=tuple(batch["position_ids"].shape),
        )
    return size, seq_len


def tokens_of(attention_mask: torch.Tensor | None, size: int, seq_len: int) -> Tokens | None:
    """Return which columns are tokens, by the 2-D attention mask."""
    if attention_mask is None:
        return None
    if tuple(attention_mask.shape) != (size, seq_len):
        raise UnsupportedError(
            f"expected a padding mask ({size}, {seq_len})",
            argument="attention_mask.shape",
            value=tuple(attention_mask.shape),
            remedy="leave out other masks, or use rs.attention with your own",
        )
    is_token = attention_mask == 1
    if not (is_token | (attention_mask == 0)).all():
        raise UnsupportedError("attention_mask has values other than 0 and 1; mark documents by position_ids instead")
    tokens: Tokens = is_token.cpu().numpy()  # bool, because NumPy lacks some dtypes of masks
    return tokens


def _check_labels(labels: torch.Tensor, tokens: Tokens, are_shifted: bool) -> None:
    """Refuse a label at a padding position if the model's own attention computes padding differently."""
    beside = np.argwhere((labels.cpu().numpy() != IGNORE_INDEX) & ~tokens)
    if len(beside):
        row, column = beside[0].tolist()
        raise UnsupportedError(
            f"labels[{row}, {column + are_shifted}] is for the logits of padding, attention_mask[{row}"
            f", {column}]=0: the model's own attention computes padding differently",
            remedy="set the label to -100 (after padding also the label of a row's first token), or load the "
            'model with attn_implementation="sdpa"',
        )


def mean_loss(logits: torch.Tensor, labels: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the mean loss over the labels of all ranks, as transformers computes it on one rank."""
    losses = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="none", ignore_index=IGNORE_INDEX)
    return cross_rank_mean_loss(losses.view(labels.shape), labels, group)


def check_options(layout: str, algorithm: str) -> None:
    check_arguments(layout=(TEXT, layout), algorithm=(TEXT, algorithm))
    known = ("auto", *ALGORITHMS)
    if algorithm not in known:
        meant = str(algorithm).replace("-", "_")
        hint = f"did you mean {meant!r}?" if meant in known else f"use one of {', '.join(known)}"
        raise UnsupportedError("there is no such algorithm", argument="algorithm", value=algorithm, remedy=hint)
    if layout not in LAYOUTS:
        raise LayoutError(
            "there is no such layout", argument="layout", value=layout, remedy=f"use one of {', '.join(LAYOUTS)}"
        )


FUSED = "fused_lm_head"  # with this argument a model of TRL's trainers returns these rows, and no logits
FUSED_ROWS = ("log_probs", "entropy", "log_sum_sq_probs", "mean_logits", "is_top1", "label_mask")


def whole_rows(part: torch.Tensor, layout: Layout, group: Any) -> torch.Tensor:
    """Return the rows of all ranks, (batch, seq, …); this rank's rows keep their gradient."""
    whole = gather(part.detach(), layout, group, dim=1)
    if not part.requires_grad:
        return whole
    positions = torch.from_numpy(layout.positions(session_of(group).transport.rank)).to(part.device)
    return whole.index_copy(1, positions, part)
