"""How are batches sharded, and how is the loss of all ranks computed?

A rank does not know the label of its last token or the position of its first token, and a mean over its own tokens is
not the mean over all tokens. So labels are shifted before the batch is sharded, positions are global, and the loss is a
sum over all ranks divided by a count over all ranks.
"""

import struct
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np
import torch

from ringspan.arguments import FLAG, check_arguments, optional
from ringspan.errors import LayoutError, ShapeError
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import Layout
from ringspan.program.problem import local_rows
from ringspan.runtime.checks import DEVICE, check_tensor, check_world_size
from ringspan.runtime.compiled import outside_of_programs
from ringspan.runtime.contract import Signature, describe
from ringspan.runtime.session import RankCall, session_of
from ringspan.transports.base import Transport

IGNORE_INDEX = -100  # a label without a loss, as in torch and transformers
_SHARE = struct.Struct("<dq")  # a rank's sum of losses and number of labels


def next_token_labels(tokens: torch.Tensor, *, document_lengths: Sequence[int] | None = None) -> torch.Tensor:
    """Shift whole sequences by one token: each label is the next token, and -100 where there is none.

    Args:
        tokens: The input_ids, (…, seq), or unshifted labels as transformers takes them, with -100 to ignore a token.
        document_lengths: The lengths of packed documents; the last token of each document has no next token.

    Returns:
        Labels of the same shape, int64 for every dtype of tokens, as `cross_entropy` needs them.
    """
    _check_whole_numbers("tokens", tokens)
    if not tokens.ndim:
        raise ShapeError("sequences are (…, seq)", argument="tokens.shape", value=())
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
    """Return the global position of each of this rank's tokens, (seq,), for RoPE.

    With `document_lengths`, positions begin at 0 in each document.
    """
    check_arguments(device=(optional(DEVICE), device))
    session = session_of(group)
    check_world_size(layout, session.transport.world_size)
    positions = layout.positions(session.transport.rank)
    if document_lengths is not None:
        ends = _global_document_ends(document_lengths, layout)
        starts = np.concatenate([[0], ends[:-1]])
        positions = positions - starts[np.searchsorted(ends, positions, side="right")]
    return torch.from_numpy(positions).to(device)


@outside_of_programs("check positions")
def check_positions(positions: torch.Tensor, layout: Layout, group: Any = None) -> None:
    """Check that this rank's shard was cut by `layout`; a collective call for debugging.

    `rs.attention` sees the length of a shard, not which tokens are in it: a shard cut by another layout with the same
    lengths would give wrong numbers. Cut `torch.arange(seq_len)` as q, k and v are cut, and pass the result.

    Args:
        positions: The global position of each of this rank's rows, (seq,).
        layout: The layout that is passed to `rs.attention`.
        group: As in `rs.attention`.

    Raises:
        LayoutError: On the ranks whose positions differ; the other ranks raise a TransportError that says so.
    """
    session = session_of(group)
    rank = session.transport.rank
    with session.call() as call:
        check_tensor("positions", positions)
        check_world_size(layout, session.transport.world_size)
        found, expected = positions.detach().cpu().reshape(-1).numpy(), layout.positions(rank)
        if len(found) != len(expected):
            raise LayoutError(
                f"the layout gives rank {rank} {len(expected)} positions, and there are {len(found)}",
                argument="positions",
                remedy="cut the tensors with layout.shard, or pass the layout that they were cut with",
            )
        wrong = np.flatnonzero(found != expected)
        if len(wrong):
            row = int(wrong[0])
            raise LayoutError(
                f"on rank {rank} row {row} is position {found[row]}, and by the layout it is {expected[row]}; "
                f"{len(wrong)} of {len(expected)} rows differ",
                argument="positions",
                remedy="cut the tensors with layout.shard, or pass the layout that they were cut with",
            )
        call.agree(Signature.of({"call": "check_positions", "layout": layout.fingerprint()}), once=True)


@outside_of_programs("shard batches")
def shard_batch(
    batch: Mapping[str, torch.Tensor],
    layout: Layout,
    group: Any = None,
    *,
    document_lengths: Sequence[int] | None = None,
    contract: bool = True,
) -> dict[str, torch.Tensor]:
    """Cut this rank's part out of a batch that every rank holds: input_ids, labels, position_ids and other tensors.

    All ranks of the group must call this with the same batch; parts of different batches would attend to each other.
    Seed a sampler by the number of the data-parallel replica, not by the rank.

    Args:
        batch: `input_ids`, (…, seq), and any tensors with the sequence in the same dim. `labels` are unshifted, as
            transformers takes them, and are shifted here. `position_ids` are kept.
        layout: Who holds which token.
        group: As in `attention`.
        document_lengths: The lengths of packed documents, the same in every row, from position 0 on. Labels end and
            positions restart at the end of each.
        contract: Compare a digest of the batch between the ranks. False sends no message.

    Returns:
        This rank's part. `labels[i]` belongs to `logits[i]`: do not pass the labels to a model that shifts them again.
        The label of a replicated token counts on rank 0 only.
    """
    check_arguments(contract=(FLAG, contract))
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
    """Return the mean loss over the labels of all ranks that are not -100, the same number on every rank.

    All ranks must call this function, and then all must call `backward()`, including ranks without a label, because
    other ranks used their keys. Such a rank adds nothing to the mean. Without a label on any rank the loss is 0.

    **Gradients.** After `backward()` each rank has its share of a parameter's gradient. The sum of the shares over the
    ranks of `group` is the gradient of one process. If you reduce gradients yourself, sum them. DDP and FSDP average
    over all their ranks: differentiate `loss * n` there, with n the number of ranks in `group`. If `group` is the
    context-parallel group, the means of data-parallel replicas are then averaged; if it is all ranks, the mean is over
    the labels of all replicas.

    Args:
        losses: One loss per label, such as `cross_entropy(logits.transpose(1, 2), labels, reduction="none")`.
        labels: This rank's labels, -100 where a loss does not count.
        group: As in `attention`, or the ranks of all replicas, for instance a DeviceMesh of both dimensions.
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
    sums, numbers = zip(*map(_SHARE.unpack, transport.all_gather_bytes(share, None)), strict=True)
    mean: torch.Tensor = _Mean.apply(own, sum(sums), max(1, sum(numbers)))  # type: ignore[no-untyped-call]
    return mean


class _Mean(torch.autograd.Function):
    """A total over all ranks divided by a count; the gradient goes to this rank's addend."""

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, total: float, number: int) -> torch.Tensor:
        ctx.number = number
        return own.new_tensor(total / number)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grads[0] / ctx.number, None, None


def check_can_be_ignored(labels: torch.Tensor) -> None:
    """Refuse labels of a dtype that cannot hold -100."""
    check_tensor("labels", labels)
    if not labels.dtype.is_signed or labels.is_floating_point() or labels.is_complex():
        raise ShapeError(
            f"labels are {labels.dtype}: their dtype must be able to hold {IGNORE_INDEX}", remedy="use torch.int64"
        )


def _document_ends(lengths: Sequence[int], seq_len: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    _check_is_list("document_lengths", lengths)
    are_whole = all(isinstance(length, Integral) for length in lengths)
    if not are_whole or any(length < 1 for length in lengths) or sum(lengths) != seq_len:
        raise ShapeError(
            "every document has at least one token and their sum is the whole sequence; expected a sum "
            f"of {seq_len}, with padding as a document of its own",
            argument="document_lengths",
            value=list(lengths),
        )
    return np.cumsum(np.asarray(lengths, np.int64))


def _global_document_ends(lengths: Sequence[int], layout: Layout) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return the ends of documents as positions; the first document begins at position 0 for every layout."""
    positions = layout.all_positions()
    return _document_ends(lengths, int(positions[-1]) + 1 if len(positions) else 0)


def _lengths_of_rows(lengths: Sequence[int], layout: Layout) -> list[int]:
    """Return how many tokens of each document the layout has, without documents that have none."""
    ends = np.searchsorted(layout.all_positions(), _global_document_ends(lengths, layout))
    return [int(length) for length in np.diff(ends, prepend=0) if length]


def _check_batch(batch: Mapping[str, torch.Tensor], layout: Layout) -> int:
    """Check a batch and return the dim of the sequence."""
    if not isinstance(batch, Mapping):
        raise ShapeError(f"batch is a {type(batch).__name__}: give tensors by name, input_ids (…, seq) among them")
    if "input_ids" not in batch:
        raise ShapeError(f"batch has {', '.join(map(str, batch)) or 'nothing'}; it needs input_ids, (…, seq)")
    for name, x in batch.items():
        if not isinstance(x, torch.Tensor):
            raise ShapeError(f"batch[{name!r}] is a {type(x).__name__}: give tensors, as return_tensors='pt' does")
    if "attention_mask" in batch:
        raise ShapeError(
            "batch has an attention_mask: a rank would see only a part of it",
            remedy="leave it out, describe padding by the mask of attention, such as per_row, and set the "
            "labels of padding to -100",
        )
    dim = batch["input_ids"].ndim - 1
    if dim < 0:
        raise ShapeError("sequences are (…, seq)", argument="batch['input_ids'].shape", value=())
    for name, x in batch.items():
        if x.ndim <= dim or x.shape[dim] != layout.num_positions:
            raise ShapeError(
                f"dim {dim} is the sequence, as in input_ids, and the layout has {layout.num_positions} positions",
                argument=f"batch[{name!r}].shape",
                value=tuple(x.shape),
                remedy="give whole tensors, or leave this one out",
            )
    if "labels" in batch:
        _check_labels(batch["labels"], batch["input_ids"])
    return dim


def _check_labels(labels: torch.Tensor, input_ids: torch.Tensor) -> None:
    """Refuse labels of another shape and labels that are already shifted."""
    if labels.shape != input_ids.shape:
        raise ShapeError(
            f"one label for each of the input_ids, whose shape is {tuple(input_ids.shape)}",
            argument="batch['labels'].shape",
            value=tuple(labels.shape),
        )
    _check_whole_numbers("labels", labels)
    counts = labels.long() != IGNORE_INDEX
    is_next = (labels[..., :-1] == input_ids[..., 1:]) | ~counts[..., :-1]
    if counts[..., :-1].any() and is_next.all() and ((labels != input_ids) & counts).any():
        raise ShapeError(
            "batch['labels'] are shifted already, and shard_batch would shift them again",
            remedy="give unshifted labels (labels=input_ids, -100 to ignore a token), or leave them out",
        )


def _check_whole_numbers(name: str, x: torch.Tensor) -> None:
    check_tensor(name, x)
    if x.dtype == torch.bool or x.is_floating_point() or x.is_complex():
        raise ShapeError(f"{name} are {x.dtype}: tokens are whole numbers", remedy=f"use {name}.long()")


def _check_is_list(name: str, values: Any) -> None:
    """Accept a list or an array. A generator can be read only once, and a set has no order."""
    if not isinstance(values, Sequence) and np.ndim(values) != 1:
        raise ShapeError("give a list of whole numbers, such as [300, 700]", argument=name, value=values)


def _check_losses(losses: torch.Tensor, labels: torch.Tensor) -> None:
    check_tensor("losses", losses)
    check_can_be_ignored(labels)
    if losses.shape != labels.shape or not losses.is_floating_point():
        raise ShapeError(
            f"losses.shape={tuple(losses.shape)} ({losses.dtype}), labels.shape={tuple(labels.shape)}: "
            "expected one loss per label",
            remedy='use reduction="none", because the mean of all ranks needs the losses of each',
        )
