"""An ordinary transformer trains to the same bits on any number of ranks; and what cannot be converted is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ringspan as rs
from reproducible_training import CAUSAL, SEQ_LEN, make_batches, train
from ringspan.tree import TILE
from transformer import Transformer, whole_loss

torch.set_num_threads(1)

ALONE = rs.contiguous(SEQ_LEN, 1)


def on_ranks(layout: rs.Layout, **options: Any) -> list[dict[str, torch.Tensor]]:
    return rs.run_in_process(lambda group: train(layout, group, **options), layout.world_size, timeout_s=200)


def differing(found: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, x in expected.items() if not all(torch.equal(part[name], x) for part in found)]


# Training


def test_a_few_steps_end_in_the_same_weights() -> None:
    """Twenty are taken on processes: tests/distributed/test_gloo_reproducible.py."""
    alone = train(ALONE, None, steps=6)
    for layout in (rs.zigzag(SEQ_LEN, 2, align=TILE), rs.contiguous(SEQ_LEN, 4, align=TILE)):
        assert differing(on_ranks(layout, steps=6), alone) == []


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_few_steps_in_bfloat16(world_size: int) -> None:
    options = {"dtype": torch.bfloat16, "steps": 3}
    layout = rs.striped(SEQ_LEN, world_size, block=TILE)
    assert differing(on_ranks(layout, **options), train(ALONE, None, **options)) == []


def test_without_the_mode_of_attention_the_weights_differ() -> None:
    """So the comparison sees what it is made to see."""
    options = {"attend": partial(rs.attention, mask=CAUSAL), "steps": 2}
    found, expected = on_ranks(rs.zigzag(SEQ_LEN, 2, align=TILE), **options), train(ALONE, None, **options)
    assert differing(found, expected)
    for name, x in expected.items():
        torch.testing.assert_close(found[0][name], x, atol=1e-2, rtol=1e-2)


def test_every_rank_has_the_whole_gradient_of_the_plain_model() -> None:
    tokens = make_batches()[0]
    plain = Transformer()
    expected = torch.autograd.grad(whole_loss(plain, tokens), list(plain.parameters()))
    layout = rs.zigzag(SEQ_LEN, 3, align=TILE)

    def run(group: Any) -> tuple[torch.Tensor, ...]:
        on = {"layout": layout, "group": group}
        attend = partial(rs.attention, mask=CAUSAL, reproducible=True, **on)
        model = rs.reproducible.convert(Transformer(attend), **on)
        batch = rs.shard_batch({"input_ids": tokens}, layout, group)
        logits = model(batch["input_ids"], batch["position_ids"])
        loss = rs.reproducible.cross_entropy(logits, batch["labels"], **on)
        return torch.autograd.grad(loss, list(model.parameters()))

    for found in rs.run_in_process(run, 3):
        torch.testing.assert_close(found, expected)


# Conversion


class Norm(nn.Module):
    """As many models have one of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((4,), 2.0))


def test_modules_of_other_types_are_computed_by_others() -> None:
    layout = rs.contiguous(5, 1)
    model = nn.Sequential(nn.Embedding(7, 4), Norm(), nn.RMSNorm(4), nn.Linear(4, 3, bias=False))
    names = list(model.state_dict())

    def norm(module: Norm, x: torch.Tensor, **on: Any) -> torch.Tensor:
        return rs.reproducible.rms_norm(x, module.weight, eps=0.1, **on)

    assert rs.reproducible.convert(model, layout=layout, others={Norm: norm}) is model
    assert list(model.state_dict()) == names
    ids = torch.tensor([[1, 0, 6, 2, 2]])
    x = nn.functional.rms_norm(model[0].weight[ids], (4,), model[1].weight, 0.1)
    torch.testing.assert_close(model(ids), nn.functional.rms_norm(x, (4,), model[2].weight) @ model[3].weight.T)


def test_a_model_is_converted_anew_for_another_layout() -> None:
    model = rs.reproducible.convert(nn.Linear(4, 3), layout=rs.contiguous(5, 1))
    with pytest.raises(rs.ShapeError, match="5 positions"):
        model(torch.ones(1, 6, 4))
    assert rs.reproducible.convert(model, layout=rs.contiguous(6, 1))(torch.ones(1, 6, 4)).shape == (1, 6, 3)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Norm(), r"0 is a Norm with weights of its own; known are Linear, Embedding, LayerNorm, RMSNorm; .*`others`"),
        (nn.Conv1d(2, 2, 1), "0 is a Conv1d"),
        (nn.Dropout(0.1), r"0 is Dropout\(p=0.1, inplace=False\).*set p=0"),
        (nn.LayerNorm((2, 3)), "over the last dim only"),
        (nn.Embedding(3, 2, padding_idx=0), "padding_idx is not supported"),
        (nn.Embedding(3, 2, sparse=True), "sparse is not supported"),
    ],
)
def test_a_model_with_anything_else_is_refused_as_a_whole(module: nn.Module, message: str) -> None:
    model = nn.Sequential(module, nn.Linear(4, 3))
    with pytest.raises(rs.UnsupportedError, match=message):
        rs.reproducible.convert(model, layout=rs.contiguous(5, 1))
    assert model[1](torch.ones(4)).shape == (3,)  # still a plain one


def test_activations_are_converted_and_modules_without_weights_left_alone() -> None:
    model = nn.Sequential(nn.SiLU(), nn.GELU(approximate="tanh"), nn.Dropout(0.0), nn.GELU())
    x = torch.randn(1, 5, 7)
    expected = model(x)
    rs.reproducible.convert(model, layout=rs.contiguous(5, 1))
    assert ["forward" in vars(module) for module in model] == [True, True, False, False]
    torch.testing.assert_close(model(x), expected)
