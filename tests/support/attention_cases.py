"""Cases of the table on tensors: one rank's inputs, its call, and the expected result.

All tests of the runtime use them, with threads, gloo or MPI.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

import ringspan as rs
from support import oracle
from support.cases import CASES, ROWS, Case, make_arrays, make_mask, meshes
from support.oracle import MaskSpec

BATCH = 2
DOUBLE_TOLERANCE = 1e-12


class Job(NamedTuple):
    """Whole tensors and the options of their attention, with the oracle's result in float64."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    spec: MaskSpec
    layout: rs.Layout
    kv_layout: rs.Layout
    options: dict[str, Any]
    out: torch.Tensor
    lse: torch.Tensor

    def shards(self, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the rank's part of q, k and v."""
        q = self.layout.shard(self.q, rank, 2)
        k, v = (self.kv_layout.shard(x, rank, 2) for x in (self.k, self.v))
        return q, k, v

    def attend(
        self, group: Any, rank: int, tensors: Sequence[torch.Tensor] | None = None, **options: Any
    ) -> rs.Attention:
        """Compute the rank's result from its shards, or from given tensors in their place."""
        result = rs.attention(
            *(tensors or self.shards(rank)),
            mask=make_mask(self.spec),
            layout=self.layout,
            kv_layout=self.kv_layout,
            group=group,
            return_lse=True,
            **self.options | options,
        )
        assert isinstance(result, rs.Attention)
        return result

    def check(self, rank: int, got: rs.Attention, what: object = "") -> None:
        """Compare with the oracle: up to rounding in float64, else with the defaults of assert_close."""
        tolerance = {"rtol": 0.0, "atol": DOUBLE_TOLERANCE} if self.q.dtype == torch.float64 else {}
        pairs = (("out", got.out, self.out, self.q.dtype), ("lse", got.lse, self.lse, lse_dtype(self.q.dtype)))
        for name, mine, whole, dtype in pairs:
            theirs = self.layout.shard(whole, rank, 2).to(dtype)
            torch.testing.assert_close(
                mine, theirs, **tolerance, msg=lambda text, name=name: f"{what}, {name} of rank {rank}: {text}"
            )


class Gradients(NamedTuple):
    """The gradients of one rank."""

    dq: torch.Tensor
    dk: torch.Tensor
    dv: torch.Tensor


def differentiate(job: Job, group: Any, rank: int, **options: Any) -> tuple[rs.Attention, Gradients]:
    """Run both passes on a rank, for its part of `make_dout(job)`, in which each row counts once."""
    leaves = [x.clone().requires_grad_() for x in job.shards(rank)]
    dout = job.layout.shard(make_dout(job), rank, 2)
    if rank > 0 and job.layout.replicated:
        dout[:, :, torch.from_numpy(np.isin(job.layout.positions(rank), job.layout.replicated_positions()))] = 0
    got = job.attend(group, rank, tensors=leaves, **options)
    gradients = torch.autograd.grad(got.out, leaves, dout)
    return rs.Attention(*(x.detach() for x in got)), Gradients(*gradients)


def run_both(job: Job, **options: Any) -> list[tuple[rs.Attention, Gradients]]:
    """Run both passes on all ranks, as threads."""
    return rs.run_in_process(lambda group: differentiate(job, group, group.rank, **options), job.layout.world_size)


def make_dout(job: Job) -> torch.Tensor:
    """Return a gradient for every element of the output, in its dtype."""
    return torch.linspace(-1.0, 1.0, job.out.numel(), dtype=torch.float64).sin_().view(job.out.shape).to(job.q.dtype)


def check_gradients(
    job: Job, of_ranks: list[Gradients], what: object = "", tolerance: dict[str, float] | None = None
) -> None:
    """Compare the results of all ranks with the oracle; replicated rows count by their sum over the ranks."""
    allowed = oracle.dense_mask(job.spec, job.layout.all_positions(), job.kv_layout.all_positions())
    arrays = [x.double().numpy() for x in (job.q, job.k, job.v)]
    scores = job.options.get("scale"), job.options.get("softcap")
    wanted = oracle.dense_gradients(*arrays, allowed, make_dout(job).double().numpy(), *scores)
    if tolerance is None:
        tolerance = {"rtol": 0.0, "atol": DOUBLE_TOLERANCE} if job.q.dtype == torch.float64 else {}
    for name, layout, whole, *parts in zip(
        Gradients._fields, (job.layout, job.kv_layout, job.kv_layout), wanted, *of_ranks, strict=True
    ):
        shared = layout.replicated_positions()
        rows = [np.isin(layout.positions(rank), shared) for rank in range(layout.world_size)]
        total = sum(part[:, :, torch.from_numpy(row)] for part, row in zip(parts, rows, strict=True))
        for part, row in zip(parts, rows, strict=True):
            part[:, :, torch.from_numpy(row)] = total
        torch.testing.assert_close(
            layout.unshard(parts, 2),
            torch.from_numpy(whole).to(job.q.dtype),
            **tolerance,
            msg=lambda text, name=name: f"{what}, {name}: {text}",
        )


def dense_sink_gradients(job: Job, sinks: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Compute dq, dk, dv and dsinks by autograd on the definition: a sink is one more column of scores."""
    positions = job.layout.all_positions()
    allowed = torch.from_numpy(oracle.dense_mask(job.spec, positions, positions))
    q, k, v, sinks = (x.clone().requires_grad_() for x in (job.q, job.k, job.v, sinks))
    group = q.shape[1] // k.shape[1]
    scores = q @ k.repeat_interleave(group, 1).mT / math.sqrt(q.shape[-1])
    if (softcap := job.options.get("softcap")) is not None:
        scores = softcap * (scores / softcap).tanh()
    column = sinks[None, :, None, None].expand(*scores.shape[:-1], 1)
    # exp by hand: softmax has no derivative where everything is -inf
    weights = torch.cat([scores.exp().masked_fill(~allowed, 0.0), column.exp()], -1)
    total = weights.sum(-1, keepdim=True)
    weights = weights / total.masked_fill(total == 0, 1.0)
    out = weights[..., :-1] @ v.repeat_interleave(group, 1)
    return torch.autograd.grad(out, (q, k, v, sinks), make_dout(job))


def run(job: Job, **options: Any) -> list[rs.Attention]:
    """Compute the results of all ranks, as threads."""
    return rs.run_in_process(lambda group: job.attend(group, group.rank, **options), job.layout.world_size)


def options_of(algorithm: str, world_size: int) -> dict[str, Any]:
    """Return the algorithm, with the squarest mesh if it takes one."""
    row = next(row for row in ROWS if row.algorithm == algorithm)
    mesh = min(meshes(row, world_size), key=lambda mesh: 0 if mesh is None else abs(mesh.outer - mesh.inner))
    return {"algorithm": algorithm, "mesh": mesh}


def lse_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of the log-sum-exp for inputs of a dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def make_job(
    seed: str,
    spec: MaskSpec,
    layout: rs.Layout,
    heads: rs.Heads,
    *,
    kv_layout: rs.Layout | None = None,
    dtype: torch.dtype = torch.float64,
    batch: int = BATCH,
    scale: float | None = None,
    **options: Any,
) -> Job:
    """Make random tensors for any mask and layouts."""
    kv_layout = kv_layout or layout
    arrays = make_arrays(seed, heads, layout.num_positions, kv_layout.num_positions, batch=(batch,))
    q, k, v = (torch.from_numpy(x).to(dtype) for x in arrays[:3])
    if scale is not None:
        options["scale"] = scale
    return job_of(q, k, v, spec, layout, kv_layout, options)


def job_of(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    spec: MaskSpec,
    layout: rs.Layout,
    kv_layout: rs.Layout,
    options: dict[str, Any],
) -> Job:
    """Make a job of given whole tensors."""
    allowed = oracle.dense_mask(spec, layout.all_positions(), kv_layout.all_positions())
    scores = options.get("scale"), options.get("softcap")
    out, lse = oracle.dense_attention(*(x.double().numpy() for x in (q, k, v)), allowed, *scores)
    return Job(q, k, v, spec, layout, kv_layout, options, torch.from_numpy(out), torch.from_numpy(lse))


def job_of_case(case: Case, dtype: torch.dtype = torch.float64, **options: Any) -> Job:
    """Make a job of a case of the table."""
    return make_job(str(case), case.spec, case.make_layout(), case.heads, dtype=dtype, **case.options, **options)


def covering_third(part: int) -> list[Case]:
    """Return one third of the table; in each third every algorithm, layout and mask meet at two of six world sizes."""
    sizes = sorted({case.world_size for case in CASES})
    combinations = list(dict.fromkeys((case.layout, case.mask) for case in CASES))
    return [
        case
        for case in CASES
        if (sizes.index(case.world_size) + combinations.index((case.layout, case.mask)) + part) % 3 == 0
    ]
