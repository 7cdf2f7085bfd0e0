"""What must be done differently when a rank sees a part of the sequence only: labels, positions and the loss.

A rank cannot know the label of its last token, nor where its first one stands, and a mean over its own tokens is not
that of all. So labels are shifted before anything is sharded, positions are the global ones, and the loss is a sum over
all ranks divided by a count over all ranks.
"""

import struct
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from ringspan.errors import ShapeError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.program.problem import local_rows
from ringspan.runtime.checks import check_tensor, check_world_size
from ringspan.runtime.compiled import outside_of_programs
from ringspan.runtime.contract import Signature, describe
from ringspan.runtime.session import RankCall, session_of
from ringspan.transports.base import Transport

IGNORE_INDEX = -100  # a label that does not count, as in torch and transformers
_SHARE = struct.Struct("<dq")  # a rank's sum of losses, and how many


def next_token_labels(tokens: torch.Tensor, *, document_lengths: Sequence[int] | None = None) -> torch.Tensor:
    """The label of every token of whole sequences, (…, seq): the next one, and -100 where there is none.

    They are int64 whatever the tokens are, as `cross_entropy` wants them: bytes have no -100.

    Args:
        tokens: The input_ids; or labels as transformers has them, each beside its own token, -100 among them.
        document_lengths: Of packed documents; the last token of each has no next one.
    """
    _check_whole_numbers("tokens", tokens)
    if not tokens.ndim:
        raise ShapeError("tokens.shape=(): sequences are (…, seq)")
    labels = torch.full_like(tokens, IGNORE_INDEX, dtype=torch.int64)
    labels[..., :-1] = tokens[..., 1:]
    if document_lengths is not None:
        ends = _document_ends(document_lengths, tokens.shape[-1])
        labels[..., torch.from_numpy(ends - 1).to(labels.device)] = IGNORE_INDEX
    return labels


@outside_of_programs("count positions")
def position_ids(
    layout: Layout,
    group: Any = None,
    *,
    document_lengths: Sequence[int] | None = None,
    device: torch.device | str | None = None,
) -> torch.Tensor:
    """The global position of each of this rank's tokens, (seq,): what RoPE must turn them by.

    With `document_lengths` they begin at 0 in each document.
    """
    session = session_of(group)
    check_world_size(layout, session.transport.world_size)
    positions = layout.positions(session.transport.rank)
    if document_lengths is not None:
        ends = _global_document_ends(document_lengths, layout)
        starts = np.concatenate([[0], ends[:-1]])
        positions = positions - starts[np.searchsorted(ends, positions, side="right")]
    return torch.from_numpy(positions).to(device)


@outside_of_programs("shard batches")
def shard_batch(
    batch: Mapping[str, torch.Tensor],
    layout: Layout,
    group: Any = None,
    *,
    document_lengths: Sequence[int] | None = None,
    contract: bool = True,
) -> dict[str, torch.Tensor]:
    """This rank's part of a batch that every rank holds: input_ids, labels, position_ids and all else in it.

    All ranks of the group must call this, with the same batch: parts of different ones would attend to each other, and
    nothing would tell. So data is drawn, and a sampler is seeded, by the number of the replica, not of the rank.

    Args:
        batch: `input_ids`, (…, seq), and any tensors with the sequence in the same dim. `labels`, if given, stand each
            beside its own token, as transformers has them, and are shifted here. `position_ids`, if given, are kept.
        layout: Who holds which token.
        group: As in `attention`.
        document_lengths: Of packed documents, the same in every row, from position 0 on: labels end and positions begin
            in each.
        contract: Check that all ranks have the same batch, by a digest of it. Without it no message is sent.

    Returns:
        The labels are those of the next token: compare them with the logits as they are, and do not hand them to a
        model that would shift them again. A token that all ranks hold counts on rank 0 only.
    """
    session = session_of(group)
    rank = session.transport.rank
    with session.call(contract=contract) as call:
        check_world_size(layout, session.transport.world_size)
        dim = _check_batch(batch, layout)
        input_ids = batch["input_ids"]
        lengths = None if document_lengths is None else _lengths_of_rows(document_lengths, layout)
        labels = next_token_labels(batch.get("labels", input_ids), document_lengths=lengths)
        if contract and session.transport.world_size > 1:
            fields = {"call": "shard_batch", "document_lengths": document_lengths, "layout": layout.fingerprint()}
            call.agree(Signature.of({**fields, **describe(batch)}), once=True)
    part = {name: layout.shard(x, rank, dim) for name, x in ({**batch, "labels": labels}).items()}
    if "position_ids" not in batch:
        positions = position_ids(layout, group, document_lengths=document_lengths, device=input_ids.device)
        part["position_ids"] = positions.expand(part["input_ids"].shape)
    if rank > 0 and layout.replicated:
        part["labels"][..., local_rows(layout, rank).replicated] = IGNORE_INDEX
    return part


@outside_of_programs("compute the loss")
def cross_rank_mean_loss(losses: torch.Tensor, labels: torch.Tensor, group: Any = None) -> torch.Tensor:
    """The mean loss over the labels of all ranks that are not -100; the same number on every rank.

    All ranks must call this, and then all must call backward: those without a label too, since their keys were used by
    others. Such a rank adds nothing to the mean; without a label on any rank the loss is 0.

    **Gradients.** `backward()` gives a parameter, on each rank, this rank's share of its gradient: what comes by way of
    this rank's tokens. The SUM of the shares over the ranks of `group` is the gradient of the mean, as in one process.
    So where gradients are reduced by hand, sum them. DDP and FSDP take the average over all their ranks instead: there,
    differentiate `loss * n` with n the number of ranks in `group`. If `group` is the context-parallel one, the means of
    data-parallel replicas are then averaged, as is usual; if it is all ranks, the mean is over the labels of all.

    Args:
        losses: One for each label, such as `cross_entropy(logits.transpose(1, 2), labels, reduction="none")`.
        labels: This rank's, -100 where a loss does not count.
        group: As in `attention`; or the ranks of all replicas, for instance a DeviceMesh of both dimensions.
    """
    session = session_of(group)
    transport = session.transport
    with session.call() as call:
        _check_losses(losses, labels)
        return _mean(losses, labels, call, transport)


def _mean(losses: torch.Tensor, labels: torch.Tensor, call: RankCall, transport: Transport) -> torch.Tensor:
    dtype = accumulator_dtype(losses.dtype)
    fields = {
        "call": "cross_rank_mean_loss",
        "dtype": dtype,
        "gradient": "wanted" if torch.is_grad_enabled() and losses.requires_grad else "not wanted",
    }
    call.agree(Signature.of(fields))
    counts = labels != IGNORE_INDEX
    own = losses.masked_fill(~counts, 0).sum(dtype=dtype)
    share = _SHARE.pack(own.item(), int(counts.sum()))
    sums, numbers = zip(*map(_SHARE.unpack, transport.all_gather_bytes(share, transport.timeout_s)), strict=True)
    mean: torch.Tensor = _Mean.apply(own, sum(sums), max(1, sum(numbers)))  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    """A sum over all ranks, in the same order on each, divided; its gradient goes to this rank's addend."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, total: float, number: int) -> torch.Tensor:
        ctx.number = number
        return own.new_tensor(total / number)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0] / ctx.number, None, None


def check_can_be_ignored(labels: torch.Tensor) -> None:
    """Refuse labels of a type that has no -100: theirs would be another number."""
    check_tensor("labels", labels)
    if not labels.dtype.is_signed or labels.is_floating_point() or labels.is_complex():
        raise ShapeError(f"labels are {labels.dtype}: they must be able to be {IGNORE_INDEX}; use torch.int64")


def _document_ends(lengths: Sequence[int], seq_len: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    _check_is_list("document_lengths", lengths)
    are_whole = all(isinstance(length, Integral) for length in lengths)
    if not are_whole or any(length < 1 for length in lengths) or sum(lengths) != seq_len:
        raise ShapeError(
            f"document_lengths={list(lengths)}: documents have at least one token and make up the whole sequence; "
            f"expected a sum of {seq_len}, with padding as a document of its own"
        )
    return np.cumsum(np.asarray(lengths, np.int64))


def _global_document_ends(lengths: Sequence[int], layout: Layout) -> np.ndarray[Any, np.dtype[np.int64]]:
    """In positions, which begin at 0, whether the layout does or not."""
    positions = layout.all_positions()
    return _document_ends(lengths, int(positions[-1]) + 1 if len(positions) else 0)


def _lengths_of_rows(lengths: Sequence[int], layout: Layout) -> list[int]:
    """Of each document the tokens that the layout has; those with none are left out."""
    ends = np.searchsorted(layout.all_positions(), _global_document_ends(lengths, layout))
    return [int(length) for length in np.diff(ends, prepend=0) if length]


def _check_batch(batch: Mapping[str, torch.Tensor], layout: Layout) -> int:
    """The dim of the sequence."""
    if not isinstance(batch, Mapping):
        raise ShapeError(f"batch is a {type(batch).__name__}: give tensors by name, input_ids (…, seq) among them")
    if "input_ids" not in batch:
        raise ShapeError(f"batch has {', '.join(batch) or 'nothing'}; it needs input_ids, (…, seq)")
    for name, x in batch.items():
        if not isinstance(x, torch.Tensor):
            raise ShapeError(f"batch[{name!r}] is a {type(x).__name__}: give tensors, as return_tensors='pt' does")
    if "attention_mask" in batch:
        raise ShapeError(
            "batch has an attention_mask: a rank sees a part of it only; leave it out and describe padding by the mask "
            "given to attention, such as per_row, and by labels of -100"
        )
    dim = batch["input_ids"].ndim - 1
    if dim < 0:
        raise ShapeError("batch['input_ids'].shape=(): sequences are (…, seq)")
    for name, x in batch.items():
        if x.ndim <= dim or x.shape[dim] != layout.num_positions:
            raise ShapeError(
                f"batch[{name!r}].shape={tuple(x.shape)}: dim {dim} is the sequence, as in input_ids, and the layout "
                f"has {layout.num_positions} positions; give whole tensors, or leave this one out"
            )
    if "labels" in batch:
        _check_labels(batch["labels"], batch["input_ids"])
    return dim


def _check_labels(labels: torch.Tensor, input_ids: torch.Tensor) -> None:
    """Beside their own tokens."""
    if labels.shape != input_ids.shape:
        raise ShapeError(
            f"batch['labels'].shape={tuple(labels.shape)}: one label for each of the input_ids, whose shape is "
            f"{tuple(input_ids.shape)}"
        )
    _check_whole_numbers("labels", labels)
    counts = labels.long() != IGNORE_INDEX
    is_next = (labels[..., :-1] == input_ids[..., 1:]) | ~counts[..., :-1]
    if counts[..., :-1].any() and is_next.all() and ((labels != input_ids) & counts).any():
        raise ShapeError(
            "batch['labels'] are those of the next token already, and would be shifted once more; give each beside its "
            "own token (labels=input_ids, -100 where none counts), or leave them out"
        )


def _check_whole_numbers(name: str, x: torch.Tensor) -> None:
    check_tensor(name, x)
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise ShapeError(f"{name} are {x.dtype}: tokens are whole numbers; use {name}.long()")


def _check_is_list(name: str, values: Any) -> None:
    """Or an array. A generator could be read only once, and a set has no order."""
    if not isinstance(values, Sequence) and np.ndim(values) != 1:
        raise ShapeError(f"{name}={values!r}: give a list of whole numbers, such as [300, 700]")


def _check_losses(losses: torch.Tensor, labels: torch.Tensor) -> None:
    check_tensor("losses", losses)
    check_can_be_ignored(labels)
    if losses.shape != labels.shape or not losses.is_floating_point():
        raise ShapeError(
            f"losses.shape={tuple(losses.shape)} ({losses.dtype}), labels.shape={tuple(labels.shape)}: one loss for "
            'each label; use reduction="none", since the mean of a rank says nothing about that of all'
        )
