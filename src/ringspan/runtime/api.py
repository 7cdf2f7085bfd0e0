"""The public call: exact attention over a sequence that no single rank holds.

What cannot be computed exactly is refused before the first message, with the rule and the way out. No option is ever
ignored.
"""

from collections.abc import Callable
from typing import Any

import torch

from ringspan.algorithms import Direction
from ringspan.layout import Layout
from ringspan.mask import Mask
from ringspan.program.execute import Event
from ringspan.runtime.autograd import attend
from ringspan.runtime.compiled import attend_compiled
from ringspan.runtime.engine import Attention, Call
from ringspan.runtime.plan import CallOptions


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
    softcap: float | None = None,
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
        algorithm: "pass_kv", "pass_q", "all_gather", "ulysses", "hybrid" or "double_ring"; "auto" is the one of the
            first two that should be faster here, measured if need be, with the reason in the log.
        mesh: (outer, inner) for hybrid and double_ring, if the group itself has one dimension.
        direction: "forward" or "reverse", which way a ring turns.
        kernel: "auto" or the name of a kernel.
        scale: Of the scores before the softmax; 1/sqrt(head_dim) by default.
        sinks: (heads,), a logit per head that takes its share of the softmax and gives nothing. A rank's gradient of
            them is its share, to be summed over the ranks; with `reproducible` it is the whole sum, on every rank.
        softcap: Caps the scores: s becomes softcap · tanh(s / softcap) before the mask and the softmax, so the lse is
            that of the capped scores. PyTorch's fused operators have none; the "reference" kernel computes it.
        wire: "int8" or "float8_e4m3" rounds K and V for all ranks alike and sends bytes; None sends them as they are.
        reproducible: The same bits for any number of ranks and any algorithm; takes layouts with `align=rs.TILE`.
        return_lse: Also return the log-sum-exp, sinks included.
        timeout_s: The deadline of every wait for another rank; by default that of the group.
        contract: Check first that all ranks make the same call. Without it a rank that does not may leave wrong numbers
            or a crash instead of an error.
        record: Called with every event, in order, as the simulator records them.

    Returns:
        out in q's type, (batch, heads, seq, v_head_dim), or (out, lse).
    """
    q, k, v = _autocast(q, k, v)
    kv_layout = layout if kv_layout is None else kv_layout
    mesh = tuple(mesh) if isinstance(mesh, list) else mesh
    scores = scale, softcap
    options = CallOptions(mask, layout, kv_layout, algorithm, mesh, direction, kernel, *scores, wire, reproducible)
    call = Call(options, group, timeout_s, contract, record, return_lse)
    run = attend_compiled if torch.compiler.is_compiling() else attend
    result = run(call, q, k, v, sinks)
    return result if return_lse else result.out


def _autocast(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Cast to autocast's dtype inside its region, as PyTorch's own attention does."""
    for x in tensors:
        if not isinstance(x, torch.Tensor) or x.device.type == "meta":
            return tensors  # refused below
    device = tensors[0].device.type
    if not torch.is_autocast_enabled(device):
        return tensors
    dtype = torch.get_autocast_dtype(device)
    return tuple(x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 else x for x in tensors)
