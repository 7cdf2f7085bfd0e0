"""The baselines of a measurement: one device, dense attention, and the ideal without messages.

The inputs do not depend on the layout, and no rank ever holds the whole sequence. One device is PyTorch's
`scaled_dot_product_attention`, which supports full and causal masks. Any other mask it takes as a dense matrix, and
then computes every pair, visible or not. So other masks are compared with this library on one rank, which is faster;
the dense matrix, a few rows at a time, checks the numbers.

In the ideal, ranks compute only attention, without messages and merging: the pieces that their own programs give them,
with the kernel of the call. Whose values they are makes no difference to the time, so one q, one k and so on of each
shape serves for all blocks. But q is not k: a core finds one tensor in its caches where it would not find three, which
is worth up to 4 % of the time.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from ringspan.bench.result import ResultCheck
from ringspan.bench.settings import Settings
from ringspan.kernels.base import Kernel, Merged
from ringspan.kernels.softmax import accumulator_dtype
from ringspan.layout import contiguous
from ringspan.mask import causal, full
from ringspan.program.bind import Compute
from ringspan.program.pieces import Piece
from ringspan.program.prepare import Prepared
from ringspan.program.problem import Problem, Shape
from ringspan.runtime.api import attention
from ringspan.schedule import Block
from ringspan.span import Positions
from ringspan.transports.base import ALONE

_CHUNK = 1024  # positions per random generator


class Inputs(NamedTuple):
    """q (batch, heads, seq, head_dim), k and v (batch, KV heads, seq, head_dim)."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor


class Drawn(NamedTuple):
    """The operands of a measurement. `dout`, the gradient of the output, is None without a backward pass."""

    inputs: Inputs
    dout: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(x.nbytes for x in (*self.inputs, self.dout) if x is not None)


def draw(settings: Settings, positions: Positions, device: torch.device) -> Drawn:
    """Normally distributed values for some positions, ascending."""
    dtype: torch.dtype = getattr(torch, settings.dtype)
    shapes = [
        (settings.batch, heads, _CHUNK, settings.head_dim)
        for heads in (settings.num_heads, settings.num_kv_heads, settings.num_kv_heads, settings.num_heads)
    ][: 4 if settings.has_backward else 3]
    tensors = [torch.empty((*b, len(positions), d), dtype=dtype, device=device) for *b, _, d in shapes]
    drawn = torch.float64 if dtype == torch.float64 else torch.float32
    for first in range(0, settings.seq_len, _CHUNK):
        start, stop = np.searchsorted(positions, [first, first + _CHUNK])
        if start == stop:
            continue
        generator = torch.Generator().manual_seed(settings.seed * 2**32 + first // _CHUNK)
        rows = torch.from_numpy(np.asarray(positions[start:stop]) - first)
        for x, shape in zip(tensors, shapes, strict=True):
            x[:, :, start:stop] = torch.randn(shape, generator=generator, dtype=drawn)[:, :, rows].to(device, dtype)
    return Drawn(Inputs(*tensors[:3]), tensors[3] if settings.has_backward else None)


class Operands(NamedTuple):
    """The operands of a kernel for one piece; `merged` only in the backward pass."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    merged: Merged | None
    piece: Piece


def own_pieces(prepared: Prepared[Problem], inputs: Inputs) -> Iterator[Operands]:
    """The pieces of a rank's program, forward or backward."""
    problem = prepared.problem
    tensors: dict[tuple[str, Shape], torch.Tensor] = {(name, tuple(x.shape)): x for name, x in inputs._asdict().items()}

    def tensor(name: str, shape: Shape) -> torch.Tensor:
        if (name, shape) not in tensors:
            tensors[name, shape] = inputs.q.new_empty(shape).normal_()
        return tensors[name, shape]

    def merged(block: Block) -> Merged | None:
        if block.kind == "q":
            return None
        _, dout, out, lse = problem.block_shapes(block)
        # About the lse of this many random keys: other magnitudes change the time of exp.
        typical = torch.full(
            lse[:-1], math.log(problem.kv_layout.num_positions), dtype=accumulator_dtype(inputs.q.dtype)
        )
        return Merged(tensor("dout", dout), tensor("out", out), typical.to(inputs.q.device))

    for instruction in prepared.program:
        for tile in instruction.tiles if isinstance(instruction, Compute) else ():
            q, whole = tensor("q", problem.block_shapes(tile.q)[0]), merged(tile.q)
            k, v = map(tensor, "kv", problem.block_shapes(tile.kv))
            for piece in tile.all_pieces():
                part = whole and Merged(*(x[:, :, piece.q] for x in whole))
                yield Operands(q[:, :, piece.q], k[:, :, piece.kv], v[:, :, piece.kv], part, piece)


def attend_pieces(kernel: Kernel, scale: float, pieces: Sequence[Operands]) -> None:
    """Compute the pieces one after the other and discard the results."""
    for q, k, v, merged, piece in pieces:
        if merged is None:
            kernel.forward(q, k, v, piece, scale)
        else:
            kernel.backward(q, k, v, merged, piece, scale)


SDPA = "scaled_dot_product_attention"

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 2**-5, torch.float16: 2**-8}
"""Largest accepted |difference| / max(1, |value|): four roundings of a half type; room for long sums in the others."""

_DENSE_ROWS = 256  # of the dense mask in memory at a time

Results = tuple[torch.Tensor, ...]
"""out, and with a backward pass dq, dk and dv."""


class OneDevice(NamedTuple):
    """A way to compute the whole call on one device."""

    method: str
    run: Callable[[], Results]


def with_gradients(attend: Callable[..., torch.Tensor], drawn: Drawn) -> Results:
    """`attend(q, k, v)`, and its gradients if there is one of the output."""
    if drawn.dout is None:
        return (attend(*drawn.inputs),)
    inputs = [x.detach().requires_grad_() for x in drawn.inputs]
    out = attend(*inputs)
    return (out.detach(), *torch.autograd.grad(out, inputs, drawn.dout))


def one_device(settings: Settings, drawn: Drawn) -> OneDevice:
    """The fastest exact way on one device."""
    if _is_plain(settings):
        return OneDevice(SDPA, lambda: _plain(settings, drawn))
    return OneDevice("ringspan on one rank", lambda: _alone(settings, drawn))


def _alone(settings: Settings, drawn: Drawn) -> Results:
    """This library on one rank, in the same mode."""
    layout = contiguous(settings.seq_len, 1)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out = attention(
            *(q, k, v),
            mask=settings.mask,
            layout=layout,
            group=ALONE,
            kernel=settings.kernel,
            reproducible=settings.reproducible,
        )
        assert isinstance(out, torch.Tensor)
        return out

    return with_gradients(attend, drawn)


def check(settings: Settings, drawn: Drawn, results: Results, of_one_device: Results) -> ResultCheck:
    """Whether the results are what one device computes with PyTorch's own operator, in float32 at least.

    In the reproducible mode also whether they are, to the bit, what this library computes on one device.
    """
    dtype, wide = drawn.inputs.q.dtype, accumulator_dtype(drawn.inputs.q.dtype)
    name = SDPA if dtype == wide else f"{SDPA} in {str(wide).removeprefix('torch.')}"
    given = drawn
    if dtype != wide:  # in half types the operator's own gradients have larger errors than the tolerance
        drawn = Drawn(Inputs(*(x.to(wide) for x in drawn.inputs)), None if drawn.dout is None else drawn.dout.to(wide))
    if not _is_plain(settings):
        name, expected = f"{name} with a dense mask", _with_dense_mask(settings, drawn)
    else:
        expected = of_one_device if dtype == wide else _plain(settings, drawn)
    same_bits = None
    if settings.reproducible:
        same_bits = all(torch.equal(x, y) for x, y in zip(results, _alone(settings, given), strict=True))
    worst = torch.zeros((), dtype=torch.float64)
    for result, right in zip(results, expected, strict=True):
        worst = torch.maximum(worst, largest_error(result, right))  # a NaN stays one
    return ResultCheck(worst.item() if worst.isfinite() else None, TOLERANCE[dtype], name, same_bits)


def largest_error(x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """The largest |difference| / max(1, |value|); NaN if there is one."""
    x, expected = x.double().cpu(), expected.double().cpu()
    return ((x - expected).abs() / expected.abs().clamp(min=1)).max()


def _is_plain(settings: Settings) -> bool:
    return settings.mask in (full(), causal())


def _plain(settings: Settings, drawn: Drawn) -> Results:
    return with_gradients(partial(_sdpa, settings, is_causal=settings.mask == causal()), drawn)


def _with_dense_mask(settings: Settings, drawn: Drawn) -> Results:
    """Compute a few rows at a time: out and dq are concatenated, dk and dv are summed."""
    positions = np.arange(settings.seq_len)
    (q, k, v), dout = drawn
    by_rows: list[Results] = []
    totals = () if dout is None else tuple(torch.zeros_like(x, dtype=torch.float64) for x in (k, v))
    for first in range(0, settings.seq_len, _DENSE_ROWS):
        rows = slice(first, min(first + _DENSE_ROWS, settings.seq_len))
        allowed = torch.from_numpy(settings.mask.allowed(positions[rows], positions)).to(q.device)
        sees = allowed.any(-1, keepdim=True)
        # A row without visible keys would be NaN: it attends everything, and its result is set to 0.
        attend = partial(_sdpa, settings, attn_mask=allowed | ~sees)
        part = Drawn(Inputs(q[:, :, rows], k, v), None if dout is None else dout[:, :, rows] * sees)
        out, *gradients = with_gradients(attend, part)
        by_rows.append((out * sees, *gradients[:1]))
        for total, gradient in zip(totals, gradients[1:], strict=True):
            total += gradient
    return *(torch.cat(parts, dim=2) for parts in zip(*by_rows, strict=True)), *totals


def _sdpa(
    settings: Settings,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    is_causal: bool = False,
    attn_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    has_groups = settings.num_heads != settings.num_kv_heads
    return scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal, enable_gqa=has_groups)
