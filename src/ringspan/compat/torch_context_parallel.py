"""PyTorch's `context_parallel`: inside the context, F.scaled_dot_product_attention attends over all ranks.

    with rs.context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out, = rs.context_parallel_unshard(mesh, [out], [2])

Sequences are cut as PyTorch's head-tail balancer does (`rs.zigzag`), and any length is balanced: PyTorch drops the
balance silently where the length is not a multiple of 2 * ranks. On the CPU, where PyTorch's own raises for causal
attention, this computes it.
"""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from ringspan.arguments import WHOLE, Kind, check_arguments, list_of, optional
from ringspan.compat.lengths import gather_lengths
from ringspan.errors import LayoutError, ShapeError, UnsupportedError
from ringspan.layout import Layout, zigzag
from ringspan.mask import causal, full
from ringspan.runtime.api import attention
from ringspan.runtime.session import session_of
from ringspan.training import gather

_ALGORITHMS = {"allgather": "all_gather", "alltoall": "pass_kv"}
_ALGORITHM: ContextVar[str] = ContextVar("ringspan_rotate_method", default="auto")


def _is_tensors(value: Any) -> bool:
    return isinstance(value, list | tuple | set | frozenset) and all(isinstance(x, torch.Tensor) for x in value)


_TENSORS = Kind("a list of tensors", "give [q, k, v]", _is_tensors)


class _Saved(NamedTuple):
    buffer: torch.Tensor
    whole: torch.Tensor | None  # None: not to be restored


@contextmanager
def context_parallel(
    mesh: Any,
    *,
    buffers: Sequence[torch.Tensor] | None = None,
    buffer_seq_dims: Sequence[int] | None = None,
    no_restore_buffers: set[torch.Tensor] | None = None,
) -> Iterator[None]:
    """Cut the buffers in place and attend over the ranks of `mesh` until the context ends.

    Args:
        mesh: A 1-D DeviceMesh, or another group as in `rs.attention`.
        buffers: Whole tensors that every rank holds; inside the context each is this rank's shard.
        buffer_seq_dims: The dim of the sequence in each buffer.
        no_restore_buffers: Those of the buffers that stay cut when the context ends.

    Inside, a call of F.scaled_dot_product_attention takes shards (batch, heads, seq, dim), `is_causal`, `scale` and
    `enable_gqa`; a mask or dropout is refused. torch.nn.MultiheadAttention attends over the ranks too, with
    need_weights=False; flex_attention is refused. Without buffers all ranks must hold shards of one length.
    """
    check_arguments(
        buffers=(optional(_TENSORS), buffers),
        buffer_seq_dims=(optional(list_of(WHOLE)), buffer_seq_dims),
        no_restore_buffers=(optional(_TENSORS), no_restore_buffers),
    )
    cut = list(buffers or ())
    dims = list(buffer_seq_dims or ())
    kept = list(no_restore_buffers or ())
    seq_len = _check_buffers(cut, dims, kept)
    transport = session_of(mesh).transport
    layout = None if seq_len is None else zigzag(seq_len, transport.world_size)
    saved = [_Saved(buffer, None if _is_in(buffer, kept) else buffer.clone()) for buffer in cut]
    try:
        if layout is not None:
            for buffer, dim in zip(cut, dims, strict=True):
                _replace(buffer, layout.shard(buffer, transport.rank, dim))
        with _Attending(mesh, layout, transport.world_size):
            yield
    finally:
        for buffer, whole in saved:
            if whole is not None:
                _replace(buffer, whole)


def context_parallel_unshard(
    mesh: Any, buffers: Sequence[torch.Tensor], seq_dims: Sequence[int], load_balancer: None = None
) -> list[torch.Tensor]:
    """The whole tensors, on every rank, of shards that were cut as `context_parallel` cuts."""
    if load_balancer is not None:
        raise UnsupportedError(
            "only the head-tail order can be undone",
            argument="load_balancer",
            value=load_balancer,
            remedy="leave it out",
        )
    check_arguments(buffers=(_TENSORS, buffers), seq_dims=(list_of(WHOLE), seq_dims))
    if len(buffers) != len(seq_dims):
        raise ShapeError("one dim for each buffer", argument="seq_dims", value=list(seq_dims))
    for number, (buffer, dim) in enumerate(zip(buffers, seq_dims, strict=True)):
        _check_dim(buffer, dim, f"seq_dims[{number}]")
    transport = session_of(mesh).transport
    whole = []
    for buffer, dim in zip(buffers, seq_dims, strict=True):
        lengths = gather_lengths(buffer, dim, mesh, "context_parallel_unshard")
        layout = zigzag(sum(lengths), transport.world_size)
        expected = [layout.shard_len(rank) for rank in range(transport.world_size)]
        if lengths != expected:
            raise LayoutError(
                f"a sequence of {sum(lengths)} is cut into shards of {expected}, and the ranks hold {lengths}",
                argument="buffers",
                remedy="give the shards that the context made, or outputs of their length",
            )
        whole.append(gather(buffer.contiguous(), layout, mesh, dim=dim))
    return whole


def set_rotate_method(rotate_method: str) -> None:
    """Choose how keys and values travel: "allgather" or "alltoall" (a ring). Without a call it is chosen for speed."""
    if not isinstance(rotate_method, str) or rotate_method not in _ALGORITHMS:
        raise UnsupportedError("expected 'allgather' or 'alltoall'", argument="rotate_method", value=rotate_method)
    _ALGORITHM.set(_ALGORITHMS[rotate_method])


def _check_dim(buffer: torch.Tensor, dim: int, argument: str) -> None:
    if not -buffer.ndim <= dim < buffer.ndim:
        raise ShapeError(f"the buffer has {buffer.ndim} dims", argument=argument, value=dim)


def _check_buffers(buffers: list[torch.Tensor], dims: list[int], kept: list[torch.Tensor]) -> int | None:
    """The length of the sequence, None without buffers."""
    if len(buffers) != len(dims):
        raise ShapeError("one dim for each buffer", argument="buffer_seq_dims", value=dims)
    if any(not _is_in(buffer, buffers) for buffer in kept):
        raise ShapeError("no_restore_buffers must be a subset of buffers", argument="no_restore_buffers")
    lengths = set()
    for number, (buffer, dim) in enumerate(zip(buffers, dims, strict=True)):
        if buffer.requires_grad:
            raise UnsupportedError(
                "a buffer is cut in place, which a tensor with gradients does not allow",
                argument=f"buffers[{number}]",
                remedy="set requires_grad inside the context",
            )
        _check_dim(buffer, dim, f"buffer_seq_dims[{number}]")
        lengths.add(buffer.shape[dim])
    if len(lengths) > 1:
        raise ShapeError(f"all buffers have one sequence length; found {sorted(lengths)}", argument="buffers")
    return lengths.pop() if lengths else None


def _is_in(tensor: torch.Tensor, tensors: Sequence[torch.Tensor]) -> bool:
    return any(tensor is other for other in tensors)


def _replace(buffer: torch.Tensor, values: torch.Tensor) -> None:
    """Replace a tensor's shape and contents in place."""
    values = values.clone()
    with torch.no_grad():
        if buffer.shape != values.shape:
            buffer.resize_(values.shape)
        elif torch.equal(buffer, values):  # an expanded tensor could not be written
            return
        buffer.copy_(values)


class _Attending(TorchFunctionMode):
    """Intercepts F.scaled_dot_product_attention in this thread."""

    def __init__(self, mesh: Any, layout: Layout | None, world_size: int) -> None:
        super().__init__()
        self._mesh = mesh
        self._layout = layout
        self._world_size = world_size

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Run attention over ranks, and every other function unchanged."""
        if func is F.scaled_dot_product_attention:
            return self._attend(*args, **(kwargs or {}))
        if func is F.multi_head_attention_forward:
            return self._attend_multi_head(*args, **(kwargs or {}))
        if getattr(func, "__name__", None) == "flex_attention":
            raise UnsupportedError(
                "it would attend to the keys of this rank only",
                argument="flex_attention",
                remedy="call rs.attention with a mask such as rs.documents",
            )
        return func(*args, **(kwargs or {}))

    def _attend_multi_head(self, *args: Any, **kwargs: Any) -> Any:
        """Run a copy of torch's function that finds this attention: within a mode's call no mode is active."""
        function = F.multi_head_attention_forward
        given = inspect.signature(function).bind(*args, **kwargs)
        given.apply_defaults()
        if given.arguments["need_weights"]:
            raise UnsupportedError(
                "a rank would return the weights of its own keys only",
                argument="need_weights",
                value=True,
                remedy="pass need_weights=False to the module",
            )
        own_names = function.__globals__ | {"scaled_dot_product_attention": self._attend}
        copy = FunctionType(function.__code__, own_names, closure=function.__closure__)
        return copy(*given.args, **given.kwargs)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> torch.Tensor:
        if attn_mask is not None:
            raise UnsupportedError(
                "a mask given as a tensor holds this rank's rows and keys only",
                argument="attn_mask",
                remedy="use is_causal, or rs.attention with a mask such as rs.sliding_window",
            )
        if dropout_p:
            raise UnsupportedError(
                "ranks would drop other weights than one process", argument="dropout_p", value=dropout_p
            )
        if query.ndim < 4:  # PyTorch takes (seq, dim) and (batch, seq, dim) too
            expand = (None,) * (3 - query.ndim)
            query, key, value = (x[expand].unsqueeze(1) for x in (query, key, value))
            return self._attend(query, key, value, is_causal=is_causal, scale=scale)[(0,) * len(expand)].squeeze(-3)
        if query.shape[1] != key.shape[1] and not enable_gqa:
            raise ShapeError("fewer key than query heads need enable_gqa=True", argument="enable_gqa", value=False)
        layout = self._layout
        if layout is None:
            layout = zigzag(query.shape[-2] * self._world_size, self._world_size)
        mask = causal() if is_causal else full()
        algorithm = _ALGORITHM.get()
        out = attention(query, key, value, mask=mask, layout=layout, group=self._mesh, algorithm=algorithm, scale=scale)
        assert isinstance(out, torch.Tensor)
        return out
