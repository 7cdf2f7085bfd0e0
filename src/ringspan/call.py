"""The public call: exact attention over a sequence that no single rank holds.

Everything is checked before the first message: the arguments on this rank, then, by the contract, that all ranks mean
the same call. What cannot be computed exactly is refused, with the rule and the way out. No option is ever ignored.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from ringspan.algorithms import ALGORITHMS, Direction, Mesh, as_mesh
from ringspan.contract import Signature
from ringspan.errors import LayoutError, ShapeError, TransportError, UnsupportedError
from ringspan.execute import Event
from ringspan.kernels import choose_kernel
from ringspan.kernels.base import Kernel, Request
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.runtime import Prepared, TorchArithmetic, TransportWire, prepare, run_forward
from ringspan.schedule import Heads
from ringspan.session import Session, session_of
from ringspan.softmax import Partial, accumulator_dtype
from ringspan.tiles import Problem, Shapes, check_kinds, softmax_scale

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class Attention(NamedTuple):
    """What `attention` returns with `return_lse`: out (batch, heads, seq, v_head_dim) and lse (batch, heads, seq)."""

    out: torch.Tensor
    lse: torch.Tensor


class Options(NamedTuple):
    """What the caller asks for, apart from the tensors."""

    mask: Mask
    layout: Layout
    kv_layout: Layout
    algorithm: str
    mesh: Mesh | None
    direction: Direction | None
    kernel: str
    scale: float | None
    has_sinks: bool


class _Call(NamedTuple):
    """A call whose arguments are in order on this rank."""

    prepared: Prepared
    kernel: Kernel
    scale: float
    signature: Signature


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    mask: Mask,
    layout: Layout,
    kv_layout: Layout | None = None,
    group: Any = None,
    algorithm: str = "auto",
    mesh: tuple[int, int] | None = None,
    direction: Direction | None = None,
    kernel: str = "auto",
    scale: float | None = None,
    sinks: torch.Tensor | None = None,
    wire: str | None = None,
    reproducible: bool = False,
    return_lse: bool = False,
    timeout_s: float | None = None,
    contract: bool = True,
    record: Callable[[Event], None] | None = None,
) -> torch.Tensor | Attention:
    """Attend this rank's queries to the keys and values of all ranks.

    Args:
        q: This rank's queries, (batch, heads, seq, head_dim), in the order of `layout.positions(rank)`.
        k: This rank's keys, (batch, KV heads, seq, head_dim), in the order of `kv_layout.positions(rank)`.
        v: This rank's values, (batch, KV heads, seq, v_head_dim).
        mask: Who may attend to whom, in global positions.
        layout: Who holds which query.
        kv_layout: Who holds which key, if not as the queries.
        group: A ProcessGroup, a DeviceMesh (two dimensions for hybrid and double_ring, the last one inner), a rank of
            `run_in_process`, an MPI communicator; None is the default process group, or one rank if there is none.
        algorithm: "auto", "pass_kv", "pass_q", "all_gather", "ulysses", "hybrid" or "double_ring".
        mesh: (outer, inner) for hybrid and double_ring, if the group itself has one dimension.
        direction: "forward" or "reverse", which way a ring turns.
        kernel: "auto" or the name of a kernel.
        scale: Of the scores before the softmax; 1/sqrt(head_dim) by default.
        sinks: (heads,), a logit per head that takes its share of the softmax and gives nothing.
        wire: How K and V are encoded on their way; None is as they are.
        reproducible: The same bits for any number of ranks.
        return_lse: Also return the log-sum-exp, sinks included.
        timeout_s: The deadline of every wait for another rank; by default that of the group.
        contract: Check first that all ranks make the same call. Without it a rank that does not may leave wrong numbers
            or a crash instead of an error.
        record: Called with every event, in order, as the simulator records them.

    Returns:
        out in q's type, (batch, heads, seq, v_head_dim), or (out, lse).
    """
    session = session_of(group)
    deadline_s = session.transport.timeout_s
    try:
        deadline_s = _check_timeout(timeout_s, deadline_s)
        shapes = _check_tensors(q, k, v, sinks)
        check_kinds(mask, layout, kv_layout or layout)
        _refuse_unbuilt(q, k, v, sinks, wire, reproducible)
        has_sinks = sinks is not None
        options = Options(
            mask, layout, kv_layout or layout, algorithm, as_mesh(mesh), direction, kernel, scale, has_sinks
        )
        call = _plan(options, shapes, q.device, q.dtype, session.transport.rank, session.mesh)
        _check_rows(call.prepared.problem, session, q, k)
    except Exception as error:
        if contract and session.transport.world_size > 1:
            session.contract.refuse(f"{type(error).__name__}: {error}", deadline_s)
        raise
    if contract:
        session.contract.agree(call.signature, deadline_s)
    try:
        with torch.autocast(q.device.type, enabled=False):  # sums are kept in a type of our choice
            part = run_forward(
                call.prepared,
                q,
                k,
                v,
                arithmetic=TorchArithmetic(call.kernel, call.scale, q),
                wire=TransportWire(session.transport, session.buffers, call.prepared.problem, q, deadline_s),
                rank=session.transport.rank,
                record=record,
            )
        session.buffers.trim()
    except TransportError:
        raise  # the others know
    except Exception as error:
        # The other ranks are in the middle of this call; without a word they would wait for this one.
        session.transport.abort(f"rank {session.transport.rank} failed: {error}")
        raise
    out, lse = part if sinks is None else _with_sinks(part, sinks)
    out = out.to(q.dtype)
    return Attention(out, lse) if return_lse else out


def _with_sinks(part: Partial, sinks: torch.Tensor) -> Partial:
    """A sink joins the softmax after everything is merged: exp(lse) of exp(lse) + exp(sink) is left for the keys."""
    lse = torch.logaddexp(part.lse, sinks.to(part.lse.dtype)[:, None])
    # Neither a key nor a sink: -inf - -inf is NaN, where nothing is left for nobody.
    share = (part.lse - lse).exp_().nan_to_num_(nan=0.0)
    return Partial(part.out * share.unsqueeze(-1), lse)


def _refuse_unbuilt(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sinks: torch.Tensor | None,
    wire: str | None,
    reproducible: bool,
) -> None:
    """Options that are designed but not built yet are refused, never ignored."""
    if wire is not None:
        raise UnsupportedError(f"wire={wire!r}: K and V travel as they are; encodings are not built yet, leave it out")
    if reproducible:
        raise UnsupportedError("reproducible=True: not built yet; leave it out")
    tensors = {"q": q, "k": k, "v": v, "sinks": sinks}
    wanting = [name for name, x in tensors.items() if x is not None and x.requires_grad]
    if wanting and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{', '.join(wanting)} requires grad: the backward pass is not built yet; call under torch.no_grad()"
        )


def _check_tensors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks: torch.Tensor | None) -> Shapes:
    """What q, k and v have in common on all ranks; their lengths are for the layouts to say."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not isinstance(x, torch.Tensor):
            raise ShapeError(
                f"{name} is a {type(x).__name__}; give a tensor, or use simulate_attention for NumPy arrays"
            )
    shapes = f"q.shape={tuple(q.shape)}, k.shape={tuple(k.shape)}, v.shape={tuple(v.shape)}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ShapeError(f"{shapes}: q, k and v are (batch, heads, seq, dim)")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in _DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in _DTYPES)
        raise ShapeError(f"dtypes {q.dtype}, {k.dtype}, {v.dtype}: q, k and v have one dtype out of {names}")
    if not q.device == k.device == v.device:
        raise ShapeError(f"devices {q.device}, {k.device}, {v.device}: q, k and v are on one device")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3] or not q.shape[3]:
        raise ShapeError(
            f"{shapes}: batch is the same for all, head_dim the same for q and k and at least 1, and k and v differ in "
            "the last dim only"
        )
    heads = Heads(q.shape[1], k.shape[1])
    if not heads.num_heads or not heads.num_kv_heads or heads.num_heads % heads.num_kv_heads:
        raise ShapeError(f"{shapes}: the query heads are a multiple of the KV heads")
    if sinks is not None:
        _check_sinks(sinks, heads, q.device)
    return Shapes((q.shape[0],), heads, q.shape[3], v.shape[3], q.element_size(), accumulator_dtype(q.dtype).itemsize)


def _check_sinks(sinks: torch.Tensor, heads: Heads, device: torch.device) -> None:
    if not isinstance(sinks, torch.Tensor):
        raise ShapeError(f"sinks is a {type(sinks).__name__}; give a tensor of one logit per query head")
    if tuple(sinks.shape) != (heads.num_heads,):
        raise ShapeError(f"sinks.shape={tuple(sinks.shape)}: one logit per query head; expected ({heads.num_heads},)")
    if sinks.device != device:
        raise ShapeError(f"sinks are on {sinks.device} and q is on {device}; move them together")


def _check_timeout(timeout_s: float | None, default_s: float) -> float:
    if timeout_s is None:
        return default_s
    if not timeout_s > 0:
        raise ShapeError(
            f"timeout_s={timeout_s}: a deadline is a number of seconds above 0; leave it out for the group's"
        )
    return float(timeout_s)


def _check_rows(problem: Problem, session: Session, q: torch.Tensor, k: torch.Tensor) -> None:
    """This rank's shards have the lengths the layouts give it."""
    rank, world_size = session.transport.rank, session.transport.world_size
    for name, x, layout in (("q", q, problem.layout), ("k", k, problem.kv_layout)):
        if layout.world_size != world_size:
            raise LayoutError(f"the layout of {name} is for {layout.world_size} ranks; the group has {world_size}")
        if x.shape[2] != layout.shard_len(rank):
            raise ShapeError(
                f"{name}.shape={tuple(x.shape)} on rank {rank}: its layout gives this rank {layout.shard_len(rank)} "
                f"positions; pass layout.shard(whole, {rank}, dim=2)"
            )


@lru_cache(maxsize=256)
def _plan(
    options: Options, shapes: Shapes, device: torch.device, dtype: torch.dtype, rank: int, group_mesh: Mesh | None
) -> _Call:
    """All that depends on the kind of call only, not on its numbers."""
    problem = Problem(options.mask, options.layout, options.kv_layout, shapes)
    algorithm = "pass_kv" if options.algorithm == "auto" else options.algorithm
    if algorithm not in ALGORITHMS:
        choices = ", ".join(["auto", *ALGORITHMS])
        raise UnsupportedError(f"algorithm={algorithm!r}: there is no such algorithm; use one of {choices}")
    if options.mesh is not None and group_mesh is not None and options.mesh != group_mesh:
        raise LayoutError(f"mesh={tuple(options.mesh)}: the group's own mesh is {tuple(group_mesh)}; leave mesh out")
    # A group of two dimensions serves the algorithms of one as well.
    takes = ALGORITHMS[algorithm].options
    mesh = options.mesh or (group_mesh if "mesh" in takes else None)
    direction: Direction | None = options.direction or ("forward" if "direction" in takes else None)
    kernel = choose_kernel(options.kernel, Request(device, dtype, shapes.head_dim, shapes.v_head_dim))
    scale = softmax_scale(options.scale, shapes.head_dim)
    fields = {
        "batch": shapes.batch[0],
        "heads": f"{shapes.heads.num_heads} over {shapes.heads.num_kv_heads}",
        "head_dim": f"{shapes.head_dim}, {shapes.v_head_dim} for v",
        "dtype": dtype,
        "mask": problem.mask,
        "layout": problem.layout.fingerprint(),
        "kv_layout": problem.kv_layout.fingerprint(),
        "algorithm": " ".join(map(str, filter(None, (algorithm, mesh and tuple(mesh), direction)))),
        "scale": scale,
        "kernel": kernel.name,
        "sinks": "given" if options.has_sinks else "none",
    }
    prepared = prepare(problem, rank, algorithm, mesh, direction)
    return _Call(prepared, kernel, scale, Signature.of(fields))
