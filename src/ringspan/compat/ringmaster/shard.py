"""How a batch is cut into equal shards, padded at the end."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from ringspan.arguments import WHOLE, Kind, check_arguments, optional
from ringspan.compat.ringmaster.runtime import get_runtime, maybe_runtime
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import contiguous, zigzag
from ringspan.training import IGNORE_INDEX

__all__ = ["ShardInfo", "context_parallel_region", "cu_seqlens_from_position_ids", "shard_batch", "varlen_meta"]

_WHOLE_BATCH = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "cu_seqlens", "max_seqlen")

Batch = dict[str, torch.Tensor]

_POSITIONS = Kind(
    "a tensor (batch, seq)",
    "give batch['position_ids']",
    lambda value: isinstance(value, torch.Tensor) and value.ndim == 2 and value.numel() > 0,
)


@dataclass
class ShardInfo:
    """The length of the whole sequence, and the number of padding tokens after it."""

    original_seq_len: int
    pad_len: int


@contextmanager
def context_parallel_region(batch: Batch) -> Iterator[Batch]:
    """Yield this rank's part of a batch that all ranks hold, for the runtime of this process."""
    runtime = get_runtime()
    runtime.varlen = None
    yield shard_batch(batch, cp_rank=runtime.cp_rank, cp_size=runtime.cp_size)[0]


def shard_batch(
    batch: Batch, *, cp_rank: int, cp_size: int, load_balance: str | None = None
) -> tuple[Batch, ShardInfo]:
    """This rank's part of a batch that all ranks hold, with `shift_labels` and global `position_ids`.

    Tensors with the sequence in dim 1 are padded to equal shards: labels by -100, positions by counting on, all else by
    zeros. Without `load_balance` the layout is that of the runtime, contiguous if there is none. The `attention_mask`
    of right padding is left out, since causal attention does not need it; another one is refused. Packed documents,
    whose `position_ids` restart, are announced to the runtime, so that they attend to themselves only.
    """
    tokens = batch["input_ids"]
    seq_len = tokens.shape[1]
    if cp_size == 1:
        return batch, ShardInfo(seq_len, 0)
    runtime = maybe_runtime()
    if load_balance is None:
        load_balance = "contiguous" if runtime is None else runtime.shard_load_balance
    whole = _without_whole_batch_keys(batch)
    if whole.get("labels") is not None and "shift_labels" not in whole:
        shifted = torch.full_like(whole["labels"], IGNORE_INDEX)
        shifted[:, :-1] = whole["labels"][:, 1:]
        whole["shift_labels"] = shifted
    if runtime is not None and runtime.varlen is not None and whole.get("position_ids") is None:
        raise UnsupportedError(
            "the runtime has documents, and nothing says whether they are those of this batch",
            argument="batch['position_ids']",
            remedy="give position_ids, or set runtime.varlen = None",
        )
    packed = whole.get("position_ids")
    if packed is None:
        whole["position_ids"] = torch.arange(seq_len, device=tokens.device).expand(tokens.shape[0], -1)
    build = zigzag if load_balance == "head_tail" else contiguous
    multiple = 2 * cp_size if load_balance == "head_tail" else cp_size
    pad_len = -seq_len % multiple
    layout = build(seq_len + pad_len, cp_size)
    if runtime is not None and packed is not None and packed.ndim == 2:
        runtime.varlen = varlen_meta(packed, seq_len + pad_len)
    part = {
        name: layout.shard(_padded(name, x, pad_len), cp_rank, 1).contiguous()
        if isinstance(x, torch.Tensor) and x.ndim > 1 and x.shape[1] == seq_len
        else x
        for name, x in whole.items()
    }
    return part, ShardInfo(seq_len, pad_len)


def varlen_meta(global_position_ids: torch.Tensor | None, total_padded_len: int) -> tuple[torch.Tensor, int] | None:
    """Return `CPRuntime.varlen` for whole `position_ids` (batch, seq) that restart with each packed document.

    None if no document is packed. Padding behind a row is a document of its own.
    """
    check_arguments(
        global_position_ids=(optional(_POSITIONS), global_position_ids), total_padded_len=(WHOLE, total_padded_len)
    )
    if global_position_ids is None:
        return None
    starts = global_position_ids == 0
    starts[:, 0] = True
    if starts.sum() == len(starts):
        return None
    seq_len = starts.shape[1]
    if total_padded_len < seq_len:
        raise ShapeError(f"the rows have {seq_len} tokens", argument="total_padded_len", value=total_padded_len)
    padded = torch.nn.functional.pad(starts, (0, total_padded_len - seq_len))
    if total_padded_len > seq_len:
        padded[:, seq_len] = True
    ends = torch.cat([padded.flatten().nonzero().flatten(), torch.tensor([padded.numel()], device=padded.device)])
    return ends.to(torch.int32), int(ends.diff().max())


def cu_seqlens_from_position_ids(position_ids: torch.Tensor) -> tuple[torch.Tensor, int] | None:
    """`varlen_meta` of a batch without padding."""
    return varlen_meta(position_ids, position_ids.shape[1])


def _zigzag_shard(batch: Batch, cp_rank: int, cp_size: int) -> tuple[Batch, ShardInfo]:
    """Cut as load_balance="head_tail" does; tests of the original call it."""
    return shard_batch(batch, cp_rank=cp_rank, cp_size=cp_size, load_balance="head_tail")


def _without_whole_batch_keys(batch: Batch) -> Batch:
    """Without what describes the whole batch, if it says no more than the rest."""
    whole = dict(batch)
    mask = whole.pop("attention_mask", None)
    if mask is not None:
        is_right_padded = mask.ndim == 2 and bool(((mask == 0) | (mask == 1)).all() and (mask.diff(dim=1) <= 0).all())
        if not is_right_padded:
            raise UnsupportedError(
                "only a (batch, seq) mask of ones, and zeros behind them, is not needed by causal attention",
                argument="batch['attention_mask']",
                remedy="pad on the right; describe packed documents by position_ids that restart",
            )
    for name in _WHOLE_BATCH:
        if whole.pop(name, None) is not None and whole.get("position_ids") is None:
            raise UnsupportedError(
                "packed documents are described by position_ids that restart",
                argument=f"batch[{name!r}]",
                remedy="add position_ids",
            )
    return whole


def _padded(name: str, x: torch.Tensor, pad_len: int) -> torch.Tensor:
    if not pad_len:
        return x
    if name == "position_ids":
        return torch.cat([x, x[:, -1:] + torch.arange(1, pad_len + 1, device=x.device)], 1)
    shape = [x.shape[0], pad_len, *x.shape[2:]]
    return torch.cat([x, x.new_full(shape, IGNORE_INDEX if name in ("labels", "shift_labels") else 0)], 1)
