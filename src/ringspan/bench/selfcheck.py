"""Which kernels and transports compute the right numbers on this machine?

Every kernel with every type it takes, and every algorithm on every transport, forward and backward, small and against
dense attention in float64. What cannot be run here is listed too, with the reason, so that a table from another machine
can fill it in.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ringspan.algorithms import ALGORITHMS
from ringspan.bench.baselines import TOLERANCE, Inputs, largest_error
from ringspan.bench.group import gather_values
from ringspan.bench.launch import Progress
from ringspan.bench.rank import describe
from ringspan.bench.result import PathCheck
from ringspan.bench.settings import Job
from ringspan.errors import UnsupportedError
from ringspan.kernels import KERNELS
from ringspan.kernels.base import Kernel, KernelRequest, Merged
from ringspan.kernels.softmax import Partial, accumulator_dtype
from ringspan.layout import zigzag
from ringspan.mask import causal
from ringspan.program.pieces import Piece, PieceKind
from ringspan.runtime.api import attention
from ringspan.runtime.engine import Attention
from ringspan.runtime.session import session_of

_HEADS, _KV_HEADS, _ROWS, _KEYS, _HEAD_DIM = 8, 4, 200, 200, 64  # row counts that make operators pad
_SCALE = 1 / math.sqrt(_HEAD_DIM)


def check_alone(job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]) -> list[PathCheck]:
    """Check every kernel on rank 0, on the CPU and on a GPU if there is one; then the transport of threads."""
    report(Progress(0, 2, "kernels"))
    kernels = list(_check_kernels()) if group.rank == 0 else []
    report(Progress(1, 2, "threads"))
    return kernels + check_group(job, group, device, report)


def _check_kernels() -> Iterator[PathCheck]:
    for kernel in KERNELS:
        for place in ("cpu", "cuda"):
            for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
                if kernel.refuses(KernelRequest(torch.device(place), dtype, _HEAD_DIM, _HEAD_DIM)) is None:
                    where = f"{str(dtype).removeprefix('torch.')}, {place}"
                    yield _check_kernel(f"kernel {kernel.name}, {where}", _kernel_error, kernel, place, dtype)
                    yield _check_kernel(
                        f"kernel {kernel.name} backward, {where}", _gradient_error, kernel, place, dtype
                    )


def _check_kernel(
    path: str,
    error_of: Callable[[Kernel, torch.device, torch.dtype, PieceKind], float],
    kernel: Kernel,
    place: str,
    dtype: torch.dtype,
) -> PathCheck:
    if place == "cuda" and not torch.cuda.is_available():
        return PathCheck(path, "not available", note="no GPU")
    try:
        errors = [error_of(kernel, torch.device(place), dtype, kind) for kind in PieceKind]
    except Exception as failure:
        return PathCheck(path, "failed", note=describe(failure))
    return _judged(path, errors, dtype)


def _kernel_error(kernel: Kernel, device: torch.device, dtype: torch.dtype, kind: PieceKind) -> float:
    q, k, v = _random(dtype)
    piece, allowed = _piece(kind)
    part = kernel.forward(q.to(device), k.to(device), v.to(device), piece, _SCALE)
    return _error(part, _dense(q, k, v, allowed))


def _gradient_error(kernel: Kernel, device: torch.device, dtype: torch.dtype, kind: PieceKind) -> float:
    inputs, dout = _random(dtype), _random_dout(dtype)
    piece, allowed = _piece(kind)
    out, lse = _dense(*inputs, allowed)
    lse = lse.masked_fill(lse == -torch.inf, torch.inf).to(accumulator_dtype(dtype))
    q, k, v, dout, out, lse = (x.to(device) for x in (*inputs, dout, out.to(dtype), lse))
    found = kernel.backward(q, k, v, Merged(dout, out, lse), piece, _SCALE)
    return _largest(found, _dense_gradients(*inputs, allowed, dout))


def _piece(kind: PieceKind) -> tuple[Piece, torch.Tensor]:
    """A piece of a kind, and the dense mask it stands for."""
    allowed = np.ones((_ROWS, _KEYS), np.bool_)
    if kind is PieceKind.CAUSAL:
        allowed = np.tri(_ROWS, _KEYS, dtype=np.bool_)
    elif kind is PieceKind.ANTICAUSAL:
        allowed = np.tri(_ROWS, _KEYS, dtype=np.bool_).T
    elif kind is PieceKind.MASKED:
        allowed = np.random.default_rng(0).random((_ROWS, _KEYS)) < 0.5
        allowed[1] = False  # a row without visible keys
    own = allowed if kind is PieceKind.MASKED else None
    return Piece(slice(0, _ROWS), slice(0, _KEYS), kind, own, None), torch.from_numpy(allowed)


def check_group(job: Job, group: Any, device: torch.device, report: Callable[[Progress], None]) -> list[PathCheck]:
    """Check every algorithm on a group. Returns the same rows on all ranks."""
    transport = session_of(group).transport
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    paths: list[PathCheck] = []
    for done, algorithm in enumerate(ALGORITHMS):
        report(Progress(done, len(ALGORITHMS), algorithm))
        for direction, error_of in (("", _group_error), (" backward", _group_gradient_error)):
            path = f"{job.carrier}, {transport.world_size} ranks, {algorithm.replace('_', '-')}{direction}"
            attend = _attend(group, transport.world_size, algorithm, job.timeout_s)
            try:
                error = error_of(attend, transport.rank, transport.world_size, device, dtype)
                paths.append(_judged(path, gather_values(transport, error, job.timeout_s), dtype))
            except UnsupportedError as refusal:  # such as heads that cannot be split over so many ranks
                paths.append(PathCheck(path, "not available", note=str(refusal)))
            except Exception as failure:
                return [*paths, PathCheck(path, "failed", note=describe(failure))]  # the group may be unusable now
    return paths


def _attend(group: Any, world_size: int, algorithm: str, timeout_s: float) -> Callable[..., Attention]:
    inner = 2 if world_size % 2 == 0 else 1

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> Attention:
        result = attention(
            *(q, k, v),
            mask=causal(),
            layout=zigzag(_ROWS, world_size),
            group=group,
            algorithm=algorithm,
            mesh=(world_size // inner, inner) if "mesh" in ALGORITHMS[algorithm].options else None,
            return_lse=True,
            timeout_s=timeout_s,
        )
        assert isinstance(result, Attention)
        return result

    return attend


def _group_error(
    attend: Callable[..., Attention], rank: int, world_size: int, device: torch.device, dtype: torch.dtype
) -> float:
    layout, inputs = zigzag(_ROWS, world_size), _random(dtype)
    part = attend(*(layout.shard(x, rank, 2).to(device) for x in inputs))
    expected = _dense(*inputs, _piece(PieceKind.CAUSAL)[1])
    return _error(Partial(*part), Partial(*(layout.shard(x, rank, 2) for x in expected)))


def _group_gradient_error(
    attend: Callable[..., Attention], rank: int, world_size: int, device: torch.device, dtype: torch.dtype
) -> float:
    layout, inputs, dout = zigzag(_ROWS, world_size), _random(dtype), _random_dout(dtype)
    leaves = [layout.shard(x, rank, 2).to(device).requires_grad_() for x in inputs]
    found = torch.autograd.grad(attend(*leaves).out, leaves, layout.shard(dout, rank, 2).to(device))
    expected = _dense_gradients(*inputs, _piece(PieceKind.CAUSAL)[1], dout)
    return _largest(found, [layout.shard(x, rank, 2) for x in expected])


def _random(dtype: torch.dtype) -> Inputs:
    generator = torch.Generator().manual_seed(0)
    heads = (_HEADS, _KV_HEADS, _KV_HEADS)
    return Inputs(*(torch.randn(2, num, _ROWS, _HEAD_DIM, generator=generator).to(dtype) for num in heads))


def _random_dout(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(2, _HEADS, _ROWS, _HEAD_DIM, generator=torch.Generator().manual_seed(1)).to(dtype)


def _dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor) -> Partial:
    """Attention by its definition, in float64."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(_HEADS // _KV_HEADS, dim=1) for x in (k, v))
    scores = (q @ k.mT * _SCALE).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1)
    return Partial(torch.exp(scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)) @ v, lse)


def _dense_gradients(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, allowed: torch.Tensor, dout: torch.Tensor
) -> Sequence[torch.Tensor]:
    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(_dense(q, k, v, allowed).out, (q, k, v), dout.double().cpu())


def _error(part: Partial, expected: Partial) -> float:
    """The larger of the errors of out and lse; NaN if there is one. Rows without keys must be -inf in both."""
    lse, expected_lse = part.lse.double().cpu(), expected.lse
    if not torch.equal(lse == -torch.inf, expected_lse == -torch.inf):
        return math.nan
    sees = expected_lse > -torch.inf
    return _largest((part.out, lse[sees]), (expected.out, expected_lse[sees]))


def _largest(found: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> float:
    return torch.stack([largest_error(x, y) for x, y in zip(found, expected, strict=True)]).max().item()


def _judged(path: str, errors: Sequence[float], dtype: torch.dtype) -> PathCheck:
    error, limit = float(np.max(errors)), TOLERANCE[dtype]
    if not math.isfinite(error):
        return PathCheck(path, "failed", note="not finite, or a row without visible keys has a result")
    return PathCheck(path, "ok" if error <= limit else "failed", error, "" if error <= limit else f"limit {limit:.1e}")
