"""Other libraries from PyPI, each called as its documents say for the case nearest to the point."""

from types import SimpleNamespace

import torch
import torch.distributed as dist

from comparison.case import Case, Contender, with_gradients
from comparison.points import PEERS


def ring_attention_pytorch(case: Case) -> Contender:
    """Its ring in plain PyTorch (the fast one needs CUDA), contiguous: it computes hidden blocks in any layout."""
    from ring_attention_pytorch.ring_flash_attention import ring_flash_attn

    rows = case.contiguous_rows()
    own = case.whole.rows(rows)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        operands = [x.transpose(1, 2) for x in qkv]
        return ring_flash_attn(*operands, causal=case.point.is_causal, ring_reduce_col=True).transpose(1, 2)

    return Contender(lambda: with_gradients(case, attend, own), rows)


def ringmaster_ulysses(case: Case) -> Contender:
    """All-to-all around PyTorch's own attention."""
    import ringmaster
    from ringmaster.strategies.ulysses import make_ulysses_attention

    config = ringmaster.RingmasterConfig(size=case.point.world_size, backend=ringmaster.Backend.ULYSSES)
    ringmaster.setup(config, num_kv_heads=case.whole.k.shape[1], device_type="cpu", inner_attn="sdpa")
    call = make_ulysses_attention("sdpa")
    rows = case.contiguous_rows()
    own = case.whole.rows(rows)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out, _ = call(SimpleNamespace(), *qkv, None, is_causal=case.point.is_causal)
        return out.transpose(1, 2)

    return Contender(lambda: with_gradients(case, attend, own), rows)


def ringmaster_ring(case: Case) -> Contender:
    """Its ring with blocks in plain PyTorch, its only block kernel for CPUs."""
    from ringmaster.ring.p2p_attn import ring_p2p_attention

    rows = case.contiguous_rows()
    own = case.whole.rows(rows)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        out = ring_p2p_attention(*qkv, group=dist.group.WORLD, causal=case.point.is_causal, scaling=None)
        return out.transpose(1, 2)

    return Contender(lambda: with_gradients(case, attend, own), rows)


def ringmaster_zigzag(case: Case) -> Contender:
    """Its balanced ring, for causal attention only."""
    from ringmaster.ring.zigzag import zigzag_ring_attention

    rows = case.own_rows()
    own = case.whole.rows(rows)

    def attend(*qkv: torch.Tensor) -> torch.Tensor:
        return zigzag_ring_attention(*qkv, group=dist.group.WORLD, scaling=None).transpose(1, 2)

    return Contender(lambda: with_gradients(case, attend, own), rows)


CONTENDERS = dict(
    zip(PEERS, (ring_attention_pytorch, ringmaster_ulysses, ringmaster_ring, ringmaster_zigzag), strict=True)
)
