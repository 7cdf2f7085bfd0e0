"""Causal ring attention in plain PyTorch, to read beside the library: post, compute, merge, wait.

torchrun --nproc-per-node 4 docs/reference_ring.py
"""

import torch
import torch.distributed as dist


def attend(q, k, v, allowed):
    """Attention over some of the keys: out (batch, heads, seq, dim), lse (batch, heads, seq, 1)."""
    scores = (q @ k.mT / q.shape[-1] ** 0.5).masked_fill(~allowed, -torch.inf)
    lse = scores.logsumexp(-1, keepdim=True)
    return share(scores, lse) @ v, lse


def merge(out, lse, other_out, other_lse):
    """Two partial results over different keys: each counts by its share of the joint softmax sum."""
    joint = torch.logaddexp(lse, other_lse)
    return share(lse, joint) * out + share(other_lse, joint) * other_out, joint


def share(part, lse):
    """exp(part - lse); 0 for a row that sees no key, where lse is -inf."""
    return (part - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()


def ring_attention(q, k, v, positions):
    """This rank's q, k, v; `positions[r]` are the global positions of the tokens of rank r."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    out, lse = torch.zeros_like(q), torch.full_like(q[..., :1], -torch.inf)
    for step in range(world_size):
        owner, next_owner = (rank - step) % world_size, (rank - step - 1) % world_size
        is_last = step == world_size - 1
        if not is_last:  # post: the block travels while it is computed with
            arriving = [x.new_empty(*x.shape[:2], len(positions[next_owner]), x.shape[3]) for x in (k, v)]
            sends = [dist.P2POp(dist.isend, x, (rank + 1) % world_size) for x in (k, v)]
            receives = [dist.P2POp(dist.irecv, x, (rank - 1) % world_size) for x in arriving]
            pending = dist.batch_isend_irecv(sends + receives)
        allowed = positions[rank][:, None] >= positions[owner][None, :]
        out, lse = merge(out, lse, *attend(q, k, v, allowed))
        if not is_last:
            for work in pending:
                work.wait()
            k, v = arriving
    return out


if __name__ == "__main__":
    import ringspan as rs

    dist.init_process_group("gloo")
    layout = rs.zigzag(1001, dist.get_world_size())
    whole = torch.randn(3, 1, 4, 1001, 32, generator=torch.Generator().manual_seed(0))
    q, k, v = (x.contiguous() for x in layout.shard(whole, dist.get_rank(), dim=3))
    positions = [torch.as_tensor(layout.positions(rank)) for rank in range(dist.get_world_size())]
    difference = ring_attention(q, k, v, positions) - rs.attention(q, k, v, mask=rs.causal(), layout=layout)
    print(f"rank {dist.get_rank()}: differs from rs.attention by {difference.abs().max():.0e} at most")
