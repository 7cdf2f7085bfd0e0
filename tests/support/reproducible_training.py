"""A seeded training run of an ordinary transformer with reproducible layers, as one rank runs it."""

import functools
from collections.abc import Callable
from typing import Any

import torch

import ringspan as rs
from ringspan.program.reproducible.tree import TILE
from support.transformer import Transformer, make_tokens

SEQ_LEN = 3 * TILE + 100
STEPS = 20
BATCH = 2
CAUSAL = rs.causal()


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **on: Any) -> torch.Tensor:
    return rs.attention(q, k, v, mask=CAUSAL, reproducible=True, **on)


def train(
    layout: rs.Layout,
    group: Any,
    dtype: torch.dtype = torch.float32,
    *,
    attend: Callable[..., torch.Tensor] = attend,
    steps: int = STEPS,
) -> dict[str, torch.Tensor]:
    """Return the weights after some steps, and the losses of all steps."""
    on = {"layout": layout, "group": group}
    model = rs.reproducible.convert(Transformer(functools.partial(attend, **on), dtype=dtype), **on)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for tokens in make_batches()[:steps]:
        batch = rs.shard_batch({"input_ids": tokens}, layout, group)
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = rs.reproducible.cross_entropy(logits, batch["labels"], **on)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return {"losses": torch.stack(losses), **model.state_dict()}


@functools.cache
def make_batches() -> list[torch.Tensor]:
    return [make_tokens(step, BATCH, SEQ_LEN) for step in range(STEPS)]
