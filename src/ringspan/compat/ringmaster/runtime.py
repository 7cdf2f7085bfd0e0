"""The ranks in use in this process, and the layout of their sequences."""

import os
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from ringspan.compat.ringmaster.config import Backend, LoadBalance, RingmasterConfig, RotateMethod
from ringspan.errors import ShapeError, UnsupportedError
from ringspan.layout import contiguous, zigzag
from ringspan.runtime.session import session_of

__all__ = ["CPRuntime", "get_runtime", "intra_node_size", "maybe_runtime", "set_runtime", "setup", "teardown"]

ALGORITHMS = {RotateMethod.ALLGATHER: "all_gather", RotateMethod.ALLTOALL: "pass_kv"}
_NAME = "ringmaster"
_ATTENTION: list[Any] = []  # of this process: none or one
_RUNTIME: list["CPRuntime"] = []  # none or one


@dataclass
class CPRuntime:
    """The ranks in use, and the layout of sequences.

    `varlen` describes packed documents of the next batch: their cumulative lengths over all rows of the padded batch,
    one row after the other, and the longest. `shard_batch` sets it from `position_ids` that restart.
    """

    config: RingmasterConfig
    cp_group: Any = None
    inner_attn: str = "sdpa"
    varlen: tuple[torch.Tensor, int] | None = None

    @property
    def cp_size(self) -> int:
        """How many ranks."""
        return session_of(self.cp_group).transport.world_size if self.config.enabled else 1

    @property
    def cp_rank(self) -> int:
        """This rank's number."""
        return session_of(self.cp_group).transport.rank if self.config.enabled else 0

    @property
    def ulysses_size(self) -> int:
        """Over how many ranks heads are spread."""
        return max(1, self.config.ulysses_size)

    @property
    def ring_size(self) -> int:
        """Over how many ranks the sequence stays cut."""
        return max(1, self.config.ring_size)

    @property
    def shard_load_balance(self) -> str:
        """The layout of shards, "head_tail" or "contiguous"; only a pure ring is balanced by it."""
        is_ring = self.ulysses_size == 1 and self.ring_size > 1
        return "head_tail" if is_ring and self.config.load_balance == LoadBalance.HEAD_TAIL else "contiguous"

    @property
    def attn_implementation(self) -> str:
        """The name for `model.set_attn_implementation`, with shards of `shard_batch`; registered at first use."""
        if not self.config.enabled:
            return self.inner_attn
        self._announced()
        return _NAME

    def attend(self, *args: Any, **options: Any) -> tuple[torch.Tensor, None]:
        """Attend as a model with `attn_implementation` does."""
        attended: tuple[torch.Tensor, None] = self._announced().attend(*args, **options)
        return attended

    def _announced(self) -> Any:
        from ringspan.compat.models import ShardAttention

        if not _ATTENTION:
            _ATTENTION.append(ShardAttention([_NAME], "setup"))
        _ATTENTION[0].announce(self._shards)
        return _ATTENTION[0]

    def _shards(self, shard_len: int) -> Any:
        from ringspan.compat.models import Shards

        build = zigzag if self.shard_load_balance == "head_tail" else contiguous
        total = shard_len * self.cp_size
        algorithm = {Backend.ULYSSES: "ulysses", Backend.RING: ALGORITHMS[RotateMethod(self.config.rotate_method)]}
        return Shards(
            self.cp_group,
            build(total, self.cp_size),
            None if self.varlen is None else lengths_by_row(self.varlen[0], total),
            algorithm.get(self.config.backend, "auto"),
            may_be_padded=True,
        )


def lengths_by_row(cu_seqlens: torch.Tensor, row_len: int) -> tuple[tuple[int, ...], ...]:
    """The lengths of the documents of each row, from cumulative ones over all rows."""
    ends = cu_seqlens.tolist()
    bounds = set(ends)
    if not ends or ends[0] != 0 or ends != sorted(bounds) or ends[-1] % row_len:
        raise ShapeError(f"expected cumulative lengths over rows of {row_len}", argument="varlen", value=ends)
    if missing := set(range(0, ends[-1], row_len)) - bounds:
        raise ShapeError(f"a document would go on in the next row, at {min(missing)}", argument="varlen", value=ends)
    rows: list[list[int]] = [[] for _ in range(ends[-1] // row_len)]
    for start, stop in pairwise(ends):
        rows[start // row_len].append(stop - start)
    return tuple(map(tuple, rows))


def maybe_runtime() -> CPRuntime | None:
    """The runtime of the last `setup` in this process, or None."""
    return _RUNTIME[0] if _RUNTIME else None


def get_runtime() -> CPRuntime:
    """The runtime of the last `setup` in this process; refused without one."""
    if not _RUNTIME:
        raise UnsupportedError("there is no runtime", argument="setup", remedy="call setup(config) first")
    return _RUNTIME[0]


def set_runtime(runtime: CPRuntime | None) -> None:
    """Put a runtime in place of that of this process; without one, models with its attention refuse."""
    _RUNTIME[:] = [] if runtime is None else [runtime]
    for attention_by_name in _ATTENTION:
        attention_by_name.announce(None)


def intra_node_size() -> int:
    """How many ranks a node has, as launchers say; without a word of theirs, the number of CUDA devices or 1."""
    for name in ("LOCAL_WORLD_SIZE", "NPROC_PER_NODE", "SLURM_NTASKS_PER_NODE"):
        if (text := os.environ.get(name, "")).isdecimal() and int(text):
            return int(text)
    return max(1, torch.cuda.device_count())


def setup(
    config: RingmasterConfig,
    *,
    num_kv_heads: int | None = None,
    device_mesh: Any = None,
    cp_dim: str = "cp",
    device_type: str = "cuda",
    inner_attn: str = "flash_attention_2",
) -> CPRuntime:
    """The ranks of `device_mesh[cp_dim]`, or of the default process group.

    Sizes and the backend that `config` leaves open are chosen, in place. `inner_attn` is what one rank attends with.
    """
    del device_type
    if config.load_balance in (LoadBalance.PER_DOCUMENT, LoadBalance.PTRR):
        raise UnsupportedError(
            "the original has no such layout yet", argument="load_balance", value=str(config.load_balance)
        )
    group = None
    if config.enabled:
        config.normalize(num_kv_heads=num_kv_heads, intra_node_size=intra_node_size())
        names = getattr(device_mesh, "mesh_dim_names", None) or ()
        group = device_mesh[cp_dim] if cp_dim in names else None
        world_size = session_of(group).transport.world_size
        if config.size != world_size:
            raise ShapeError(f"the group has {world_size} ranks", argument="config.size", value=config.size)
    runtime = CPRuntime(config, group, inner_attn)
    set_runtime(runtime)
    return runtime


def teardown() -> None:
    """Forget the runtime; models with its attention then refuse."""
    set_runtime(None)
