"""All of `rs.reproducible` in one chain, as one rank runs it: for threads and for processes."""

from typing import Any, NamedTuple

import torch
from torch.nn.functional import gelu

import ringspan as rs
from ringspan.program.reproducible.tree import TILE

SEQ_LEN = 6 * TILE + 77
VOCABULARY, FEATURES, WIDE = 37, 32, 80
BATCH = 2


class Inputs(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor
    weights: dict[str, torch.Tensor]


def make_inputs(dtype: torch.dtype) -> Inputs:
    """The same numbers in every dtype, up to rounding."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(VOCABULARY, (2, BATCH, SEQ_LEN), generator=generator)
    labels[:, ::5] = -100
    shapes = {
        "table": (VOCABULARY, FEATURES),
        "scale": (FEATURES,),
        "shift": (FEATURES,),
        "up": (WIDE, FEATURES),
        "up bias": (WIDE,),
        "root scale": (WIDE // 4,),
        "down": (VOCABULARY, WIDE),
    }
    weights = {
        name: (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(torch.bfloat16).to(dtype)
        for name, shape in shapes.items()
    }
    return Inputs(ids, labels, weights)


def run_layers(layout: rs.Layout, rank: int, group: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Loss, gradients of the weights, and results for this rank's tokens, whose names begin with "token "."""
    inputs = make_inputs(dtype)
    ids, labels = (layout.shard(x, rank, 1) for x in (inputs.ids, inputs.labels))
    weights = {name: weight.requires_grad_() for name, weight in inputs.weights.items()}
    on = {"layout": layout, "group": group}
    embedded = rs.reproducible.embedding(ids, weights["table"], **on)
    normal = rs.reproducible.layer_norm(embedded, weights["scale"], weights["shift"], **on)
    wide = rs.reproducible.linear(normal, weights["up"], weights["up bias"], **on)
    heads = rs.reproducible.rms_norm(wide.unflatten(-1, (4, -1)), weights["root scale"], **on)
    logits = rs.reproducible.linear(rs.reproducible.elementwise(gelu, heads.flatten(2)), weights["down"], **on)
    loss = rs.reproducible.cross_entropy(logits, labels, **on)
    tokens = {"embedded": embedded, "normal": normal, "wide": wide, "heads": heads, "logits": logits}
    gradients = torch.autograd.grad(loss, [*weights.values(), *tokens.values()])
    return (
        {"loss": loss.detach()}
        | {f"token {name}": x.detach() for name, x in tokens.items()}
        | dict(zip((*(f"d{name}" for name in weights), *(f"token d{name}" for name in tokens)), gradients, strict=True))
    )
