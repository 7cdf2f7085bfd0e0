"""Whose implementation is priced? What libraries do differently where an algorithm leaves it open.

The same ring takes longer where partial results are merged by elementwise operations, where every block is a kernel
call of its own, or where the host issues each operation in eager mode. Each record says what its source does;
none of its figures is fitted.
"""

from typing import NamedTuple

from ringspan.errors import UnsupportedError


class Software(NamedTuple):
    """How an implementation does what the algorithm leaves open.

    `kernel` is "fa2", "fa3" or "newest": the newest that the device has. `merge_bytes` are read and written per element
    of out when a part is merged, `gradient_bytes` per element of q when a backward tile adds to dq. `sum_itemsize` is
    the size of an element of a partial result on the wire, `gradient_itemsize` of dk and dv. `returns_after` says
    whether the partial results of pass-Q go home meanwhile or in one exchange after the ring; `joins_tiles`, whether
    blocks that arrived together are attended by one kernel. `is_eager`: elementwise operations are not fused.
    `host_free`: phases in which the host adds no time, because it replays a captured graph or runs ahead throughout.
    """

    name: str
    about: str
    kernel: str = "fa2"
    merge_bytes: float = 26
    gradient_bytes: float = 24
    sum_itemsize: int = 4
    gradient_itemsize: int = 4
    returns_after: bool = False
    joins_tiles: bool = True
    is_eager: bool = True
    host_free: tuple[str, ...] = ()
    recomputes_attention: bool = True  # where activations are computed anew in training
    algorithms: tuple[str, ...] = ()  # that it has; () for all


# Merging: the kernel's out widened (2 + 4), mul_ (4 + 4), addcmul_ (4 + 4 + 4) are 26 bytes; widen (2 + 4), subtract
# (4 + 4 + 4), multiply (4 + 4), subtract (4 + 4 + 4) are 38. A backward tile reads dout and out (2 + 2), clears and
# converts float32 dq (4, 4 + 2) and adds it to the sum (2 + 4 + 4): 24.
RINGSPAN = Software(
    "ringspan",
    "this library: torch's FlashAttention-2 operator, merges in place, float32 sums on the wire",
    joins_tiles=False,
)
RING_FLASH = Software(
    "ring-flash-attention",
    "zhuzilin/ring-flash-attention: FlashAttention-2, merges as four elementwise operations",
    merge_bytes=38,
    algorithms=("pass_kv", "all_gather"),
)
USP = Software(
    "usp",
    "yunchang and xDiT: FlashAttention-2, merges of ring-flash-attention, heads exchanged tensor by tensor",
    merge_bytes=38,
    algorithms=("pass_kv", "ulysses", "hybrid"),
)
DIFFUSERS = Software(
    "diffusers",
    "diffusers' context parallelism: torch's FlashAttention-2; its ring gathers all K and V",
    algorithms=("all_gather", "ulysses", "hybrid"),
)
MEGATRON = Software(
    "megatron",
    "Megatron with TransformerEngine: the newest FlashAttention, fused elementwise work, gradients in bf16 on the wire",
    kernel="newest",
    gradient_itemsize=2,
    is_eager=False,
    host_free=("prefill", "decode", "train", "denoise"),
    algorithms=("pass_kv", "all_gather", "ulysses", "hybrid"),
)
TORCH = Software(
    "torch",
    "torch's context_parallel: FlashAttention-2; all-gather or ring",
    algorithms=("pass_kv", "all_gather"),
)
PAPER = Software(
    "meta",
    "arXiv 2411.01783: FlashAttention-3; pass-Q sends partial results home by one exchange, in bf16; fused work; "
    "decode in CUDA graphs",
    kernel="newest",
    sum_itemsize=2,
    returns_after=True,
    is_eager=False,
    host_free=("decode",),
    algorithms=("pass_kv", "pass_q"),
)
SOFTWARE = {one.name: one for one in (RINGSPAN, USP, DIFFUSERS, MEGATRON, TORCH, RING_FLASH, PAPER)}


def find_software(name: str) -> Software:
    if name not in SOFTWARE:
        raise UnsupportedError(
            "it is not known", argument="software", value=name, remedy=f"use one of {', '.join(SOFTWARE)}"
        )
    return SOFTWARE[name]
