"""How do the ranks of a training loop keep the same weights?

Each rank's backward pass leaves its share of every gradient. `reduce_gradients` sums the shares in buckets with a
reduce-scatter and an all-gather, so that all ranks have the same bits. A digest of the weights shows a missing
reduction.
"""

import hashlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from ringspan.layout import contiguous
from ringspan.runtime.contract import Signature
from ringspan.runtime.session import session_of
from ringspan.training import gather

_BUCKET = 2**22  # elements
_EVERY = 100  # training forwards
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def reduce_gradients(model: nn.Module, group: Any) -> None:
    """Sum the gradients of a model's parameters over the ranks of a group, in place."""
    session = session_of(group)
    if session.transport.world_size == 1:
        return
    weights = [x for x in model.parameters() if x.requires_grad]
    # An expert without a token of this rank has no gradient here, but may have one on another rank.
    with session.call() as call:
        signature = Signature.of({"call": "reduce_gradients", "weights": len(weights)})
        has_grad = call.gather(signature, bytes(x.grad is not None for x in weights))
    for x, *have in zip(weights, *has_grad, strict=True):
        if any(have) and x.grad is None:
            x.grad = torch.zeros_like(x)
    grads = [x.grad for x in weights if x.grad is not None]
    for dtype, device in dict.fromkeys((x.dtype, x.device) for x in grads):
        for bucket in _buckets([x for x in grads if (x.dtype, x.device) == (dtype, device)]):
            flat = _sum(torch.cat([x.flatten() for x in bucket]), group, session.transport.world_size)
            for x, part in zip(bucket, torch.split(flat, [x.numel() for x in bucket]), strict=True):
                x.copy_(part.view_as(x))


def _buckets(grads: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    bucket: list[torch.Tensor] = []
    for grad in grads:
        if bucket and sum(x.numel() for x in bucket) + grad.numel() > _BUCKET:
            yield bucket
            bucket = []
        bucket.append(grad)
    if bucket:
        yield bucket


def _sum(flat: torch.Tensor, group: Any, size: int) -> torch.Tensor:
    length = flat.numel()
    flat = torch.nn.functional.pad(flat.detach(), (0, -length % size))
    layout = contiguous(flat.numel(), size)
    with torch.enable_grad():
        mine = flat.new_zeros(flat.numel() // size).requires_grad_()
        (part,) = torch.autograd.grad(gather(mine, layout, group, dim=0), mine, flat)  # a reduce-scatter
    with torch.no_grad():
        return gather(part, layout, group, dim=0)[:length]


def is_digest_due(num_forwards: int) -> bool:
    """Whether to compare weights: at training forwards 0, 1, 2, 4 … 64 and at every hundredth."""
    return not num_forwards % _EVERY or (num_forwards < _EVERY and not num_forwards & (num_forwards - 1))


def digest_weights(model: nn.Module) -> str:
    """Sum the bits of all weights that this rank holds whole; the sum does not depend on order."""
    said: list[Any] = []
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        said.append(f"{name} {tuple(x.shape)} {x.dtype}")
        if not hasattr(x, "to_local"):  # a DTensor has different rows on each rank
            said.append(str(int(x.detach().view(_INTEGERS[x.element_size()]).sum(dtype=torch.int64))))
    return f"#{hashlib.blake2b(str(said).encode(), digest_size=8).hexdigest()}"
