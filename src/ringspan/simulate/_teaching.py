"""How does ring attention work, in two plain functions for lessons and exercises?

Their signatures and units (rounded results, MB of 1024² bytes) are published, so they differ from the rest of the
library. The first function runs the same schedule and simulator as everything else.
"""

import operator
from typing import TypedDict

import numpy as np
import numpy.typing as npt

from ringspan.errors import ShapeError
from ringspan.layout import contiguous
from ringspan.mask import full
from ringspan.simulate._simulator import simulate_attention

_MB = 1024**2


def ring_attention_simulate(
    Q: npt.ArrayLike,  # noqa: N803 - published names
    K: npt.ArrayLike,  # noqa: N803
    V: npt.ArrayLike,  # noqa: N803
    num_devices: int,
) -> tuple[npt.NDArray[np.float64], list[list[int]]]:
    """Compute full attention of (seq_len, d) arrays on a ring of devices.

    Returns:
        (output, comm_schedule). The output is rounded to 4 decimals. `comm_schedule[s][d]` is the device whose K and V
        device d attends in step s. Blocks move to the next device, so it is (d - s) mod num_devices.
    """
    devices = _check_count("num_devices", num_devices)
    q, k, v = (_check_matrix(name, x) for name, x in (("Q", Q), ("K", K), ("V", V)))
    if not q.shape == k.shape == v.shape:
        raise ShapeError(f"Q, K and V have shapes {q.shape}, {k.shape} and {v.shape}; all three must be (seq_len, d)")
    if len(q) % devices:
        raise ShapeError(
            f"the seq_len {len(q)} must divide by it",
            argument="num_devices",
            value=devices,
            remedy=f"pad the sequence or use {_nearest_divisor(len(q), devices)} devices",
        )
    run = simulate_attention(q, k, v, mask=full(), layout=contiguous(len(q), devices))
    comm_schedule = [[rank.attended[0].blocks[1].owner for rank in step] for step in run.trace]
    if not np.isfinite(run.out).all():
        raise ShapeError("Q and K are so large that their products overflow", remedy="scale them down")
    return np.asarray(np.round(run.out, 4) + 0.0, np.float64), comm_schedule  # -0.0 becomes 0.0


class RingCosts(TypedDict):
    """The memory and traffic of ring attention per GPU. In each ring step a GPU attends one block of K and V."""

    chunk_length: int
    ring_steps: int
    memory_per_gpu_bytes: int
    memory_per_gpu_mb: float
    full_kv_memory_bytes: int
    per_step_comm_bytes: int
    total_comm_bytes: int
    total_comm_mb: float
    memory_savings_fraction: float


def ring_attention_context_parallel(
    total_seq_len: int, num_gpus: int, hidden_dim: int, num_heads: int, bytes_per_element: int = 2
) -> RingCosts:
    """Compute memory and traffic of one GPU when a sequence is split over a ring.

    A GPU holds a chunk of Q, K and V with total_seq_len // num_gpus tokens; a remainder is not counted. It attends
    num_gpus chunks of K and V in num_gpus steps, and each step but the last sends one chunk of K and V.
    """
    seq_len, gpus, width, heads, element_bytes = (
        _check_count(name, value)
        for name, value in (
            ("total_seq_len", total_seq_len),
            ("num_gpus", num_gpus),
            ("hidden_dim", hidden_dim),
            ("num_heads", num_heads),
            ("bytes_per_element", bytes_per_element),
        )
    )
    if width % heads:
        raise ShapeError(
            f"hidden_dim={width} must divide by it, so that every head has the same size",
            argument="num_heads",
            value=heads,
        )
    if seq_len < gpus:
        raise ShapeError(
            f"total_seq_len={seq_len} leaves some without a token",
            argument="num_gpus",
            value=gpus,
            remedy=f"use at most {seq_len}",
        )
    chunk = seq_len // gpus
    tensor, chunk_tensor = seq_len * width * element_bytes, chunk * width * element_bytes
    memory, total_comm = 3 * chunk_tensor, 2 * chunk_tensor * (gpus - 1)
    return RingCosts(
        chunk_length=chunk,
        ring_steps=gpus,
        memory_per_gpu_bytes=memory,
        memory_per_gpu_mb=round(memory / _MB, 2),
        full_kv_memory_bytes=2 * tensor,
        per_step_comm_bytes=2 * chunk_tensor,
        total_comm_bytes=total_comm,
        total_comm_mb=round(total_comm / _MB, 2),
        memory_savings_fraction=round(1 - memory / (3 * tensor), 4),
    )


def _check_count(name: str, value: int) -> int:
    try:
        count = operator.index(value)
    except TypeError:
        raise ShapeError("expected a count", argument=name, value=value, remedy="give a whole number") from None
    if isinstance(value, bool) or count < 1:
        raise ShapeError("expected a count", argument=name, value=value, remedy="give a whole number of at least 1")
    return count


def _check_matrix(name: str, x: npt.ArrayLike) -> npt.NDArray[np.float64]:
    try:
        array = np.asarray(x).astype(np.float64, casting="same_kind" if np.iscomplexobj(x) else "unsafe")
    except (TypeError, ValueError):
        raise ShapeError(f"{name} is not an array of numbers", remedy="give one of shape (seq_len, d)") from None
    if array.ndim != 2 or not array.size:
        raise ShapeError(f"{name} has shape {array.shape}; it must be (seq_len, d), both at least 1")
    if not np.isfinite(array).all():
        row, column = np.argwhere(~np.isfinite(array))[0]
        raise ShapeError(f"{name}[{row}, {column}] is {array[row, column]}; all entries must be finite")
    return array


def _nearest_divisor(seq_len: int, devices: int) -> int:
    return next(count for count in range(min(devices, seq_len), 0, -1) if seq_len % count == 0)
