"""The names of axolotl-ringmaster (0.2.7) that a training script calls: `setup`, `shard_batch`, `ring_attention`.

    import ringspan.compat.ringmaster as rm
    runtime = rm.setup(rm.RingmasterConfig(size=2), device_mesh=mesh)
    batch, info = rm.shard_batch(batch, cp_rank=runtime.cp_rank, cp_size=runtime.cp_size)

Sequences are cut into equal shards, padded at the end as there. Attention over them is causal or full, with a window
if asked for; dropout is refused. A model that is set to `runtime.attn_implementation` takes the shards, and its loss is
that of this rank's labels, as there.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch

from ringspan.compat.sequence_first import FlashOptions, flash_mask
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import contiguous, zigzag
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.training import IGNORE_INDEX

__all__ = [
    "AUTO",
    "Backend",
    "CPRuntime",
    "LoadBalance",
    "RingmasterConfig",
    "RotateMethod",
    "ShardInfo",
    "context_parallel_region",
    "get_runtime",
    "maybe_runtime",
    "ring_attention",
    "setup",
    "shard_batch",
    "teardown",
]

AUTO = -1


class Backend(StrEnum):
    """The algorithm family: ring or Ulysses."""

    AUTO = "auto"
    ULYSSES = "ulysses"
    RING = "ring"
    USP = "usp"


class RotateMethod(StrEnum):
    """The transport of keys and values."""

    ALLGATHER = "allgather"
    ALLTOALL = "alltoall"


class LoadBalance(StrEnum):
    """The layout of a sequence."""

    NONE = "none"
    HEAD_TAIL = "head_tail"


@dataclass
class RingmasterConfig:
    """`size` ranks; `backend` chooses the algorithm, `load_balance` the layout."""

    size: int = 1
    backend: Backend = Backend.AUTO
    ulysses_size: int = AUTO
    ring_size: int = AUTO
    rotate_method: RotateMethod = RotateMethod.ALLGATHER
    load_balance: LoadBalance = LoadBalance.NONE

    @property
    def enabled(self) -> bool:
        """Whether there is more than one rank."""
        return self.size > 1


_NAME = "ringmaster"
_ATTENTION: list[Any] = []  # of this process: none or one
_RUNTIME: list["CPRuntime"] = []  # none or one
_ALGORITHMS = {RotateMethod.ALLGATHER: "all_gather", RotateMethod.ALLTOALL: "pass_kv"}


@dataclass(frozen=True, slots=True)
class CPRuntime:
    """The ranks in use, and the layout of sequences."""

    config: RingmasterConfig
    cp_group: Any
    cp_rank: int
    cp_size: int

    @property
    def shard_load_balance(self) -> str:
        """The load balance, as `shard_batch` takes it."""
        return "head_tail" if self.config.load_balance is LoadBalance.HEAD_TAIL else "contiguous"

    @property
    def attn_implementation(self) -> str:
        """The name for `model.set_attn_implementation`, with shards of `shard_batch`; registered at first use."""
        from ringspan.compat.models import ShardAttention

        if not _ATTENTION:
            _ATTENTION.append(ShardAttention([_NAME], "setup"))
        _ATTENTION[0].announce(self._shards)
        return _NAME

    def _shards(self, shard_len: int) -> Any:
        from ringspan.compat.models import Shards

        build = zigzag if self.config.load_balance is LoadBalance.HEAD_TAIL else contiguous
        layout = build(shard_len * self.cp_size, self.cp_size)
        algorithm = "ulysses" if self.config.backend is Backend.ULYSSES else _ALGORITHMS[self.config.rotate_method]
        return Shards(self.cp_group, layout, None, algorithm, may_be_padded=True)


@dataclass(frozen=True, slots=True)
class ShardInfo:
    """The length of the whole sequence, and the number of padding tokens after it."""

    original_seq_len: int
    pad_len: int


def setup(
    config: RingmasterConfig,
    *,
    num_kv_heads: int | None = None,
    device_mesh: Any = None,
    cp_dim: str = "cp",
    device_type: str = "cpu",
    inner_attn: str = "sdpa",
) -> CPRuntime:
    """The ranks of `device_mesh[cp_dim]`, or of the default process group."""
    del num_kv_heads, device_type, inner_attn
    if config.backend is Backend.USP:
        raise UnsupportedError(
            "both levels in one group need a 2-D mesh", argument="backend", value="usp", remedy="use rs.attention"
        )
    group = device_mesh
    if device_mesh is not None and device_mesh.mesh_dim_names and cp_dim in device_mesh.mesh_dim_names:
        group = device_mesh[cp_dim]
    transport = session_of(group).transport
    if config.size != transport.world_size:
        raise ShapeError(f"the group has {transport.world_size} ranks", argument="config.size", value=config.size)
    runtime = CPRuntime(config, group, transport.rank, transport.world_size)
    _RUNTIME[:] = [runtime]
    return runtime


def maybe_runtime() -> CPRuntime | None:
    """The runtime of the last `setup` in this process, or None."""
    return _RUNTIME[0] if _RUNTIME else None


def get_runtime() -> CPRuntime:
    """The runtime of the last `setup` in this process; refused without one."""
    if not _RUNTIME:
        raise UnsupportedError("there is no runtime", argument="setup", remedy="call setup(config) first")
    return _RUNTIME[0]


def teardown() -> None:
    """Forget the runtime; models with its attention then refuse."""
    _RUNTIME.clear()
    for attention_by_name in _ATTENTION:
        attention_by_name.announce(None)


@contextmanager
def context_parallel_region(batch: dict[str, torch.Tensor]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield this rank's part of a batch that all ranks hold, for the runtime of this process."""
    runtime = get_runtime()
    balance = runtime.config.load_balance.value
    yield shard_batch(batch, cp_rank=runtime.cp_rank, cp_size=runtime.cp_size, load_balance=balance)[0]


def shard_batch(
    batch: dict[str, torch.Tensor], *, cp_rank: int, cp_size: int, load_balance: str | None = None
) -> tuple[dict[str, torch.Tensor], ShardInfo]:
    """This rank's part of a batch that all ranks hold, with `shift_labels` and global `position_ids`.

    Tensors with the sequence in dim 1 are padded to equal shards: labels by -100, positions by counting on, all else by
    zeros. `attention_mask` is refused; drop the mask of right padding, which causal attention does not need.
    """
    if "attention_mask" in batch:
        raise UnsupportedError(
            "a shard of a mask says nothing of other shards", argument="batch['attention_mask']", remedy="leave it out"
        )
    tokens = batch["input_ids"]
    seq_len = tokens.shape[1]
    whole = dict(batch)
    if whole.get("labels") is not None and "shift_labels" not in whole:
        shifted = torch.full_like(whole["labels"], IGNORE_INDEX)
        shifted[:, :-1] = whole["labels"][:, 1:]
        whole["shift_labels"] = shifted
    if whole.get("position_ids") is None:
        whole["position_ids"] = torch.arange(seq_len, device=tokens.device).expand(tokens.shape[0], -1)
    if cp_size == 1:
        return whole, ShardInfo(seq_len, 0)
    build = zigzag if load_balance == "head_tail" else contiguous
    multiple = 2 * cp_size if load_balance == "head_tail" else cp_size
    pad_len = -seq_len % multiple
    layout = build(seq_len + pad_len, cp_size)
    part = {
        name: layout.shard(_padded(name, x, pad_len), cp_rank, 1).contiguous()
        if x.ndim > 1 and x.shape[1] == seq_len
        else x
        for name, x in whole.items()
    }
    return part, ShardInfo(seq_len, pad_len)


def _padded(name: str, x: torch.Tensor, pad_len: int) -> torch.Tensor:
    if not pad_len:
        return x
    shape = [x.shape[0], pad_len, *x.shape[2:]]
    if name == "position_ids":
        return torch.cat([x, x[:, -1:] + torch.arange(1, pad_len + 1, device=x.device)], 1)
    return torch.cat([x, x.new_full(shape, IGNORE_INDEX if name in ("labels", "shift_labels") else 0)], 1)


def ring_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    group: Any,
    causal: bool,
    scaling: float | None,
    dropout: float = 0.0,
    provider: str = "math",
    rotate_method: RotateMethod | str = RotateMethod.ALLGATHER,
    attn_implementation: str = "math",
    window: tuple[int, int] | int | None = None,
) -> torch.Tensor:
    """Contiguous shards (batch, heads, seq, dim) in, (batch, seq, heads, dim) out, as transformers has them.

    A `window` is computed with every `rotate_method`; the original refuses it for rings.
    """
    del provider, attn_implementation
    world_size = session_of(group).transport.world_size
    if isinstance(window, int):
        window = (window, 0 if causal else window)
    options = FlashOptions(dropout, scaling, causal, window or (-1, -1), None, return_attn_probs=False)
    layout = contiguous(q.shape[2] * world_size, world_size)
    algorithm = _ALGORITHMS[RotateMethod(rotate_method)]
    out = attention(q, k, v, mask=flash_mask(options), layout=layout, group=group, algorithm=algorithm, scale=scaling)
    assert isinstance(out, torch.Tensor)
    return out.transpose(1, 2)
