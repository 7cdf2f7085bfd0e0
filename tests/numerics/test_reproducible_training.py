"""Does an ordinary transformer train to the same bits on any number of ranks, and what does `convert` refuse?"""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import ringspan as rs
from ringspan.program.reproducible.tree import TILE
from support.reproducible_training import CAUSAL, SEQ_LEN, make_batches, train
from support.transformer import Transformer, whole_loss

ALONE = rs.contiguous(SEQ_LEN, 1)


def on_ranks(layout: rs.Layout, **options: Any) -> list[dict[str, torch.Tensor]]:
    return rs.run_in_process(lambda group: train(layout, group, **options), layout.world_size, timeout_s=200)


def differing(found: list[dict[str, torch.Tensor]], expected: dict[str, torch.Tensor]) -> list[str]:
    return [name for name, x in expected.items() if not all(torch.equal(part[name], x) for part in found)]


# Training


def test_a_few_steps_end_in_the_same_weights(subtests: pytest.Subtests) -> None:
    """Twenty steps run on processes: tests/distributed/test_gloo_reproducible.py."""
    alone = train(ALONE, None, steps=6)
    for layout in (rs.zigzag(SEQ_LEN, 2, align=TILE), rs.contiguous(SEQ_LEN, 4, align=TILE)):
        with subtests.test(layout=layout):
            assert differing(on_ranks(layout, steps=6), alone) == []


@pytest.mark.parametrize("world_size", [3, 4])
def test_a_few_steps_in_bfloat16(world_size: int) -> None:
    options = {"dtype": torch.bfloat16, "steps": 3}
    layout = rs.striped(SEQ_LEN, world_size, block=TILE)
    assert differing(on_ranks(layout, **options), train(ALONE, None, **options)) == []


def test_without_the_mode_of_attention_the_weights_differ() -> None:
    """The comparison notices a change of one bit."""
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
    """A norm of its own, as many models have."""

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


class Scaled(nn.SiLU):
    """An activation with a weight, unlike others of its kind."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))


class Doubled(nn.SiLU):
    """An activation without a weight that is not elementwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(2 * x)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Norm(), r"0 is a Norm with weights; supported are Linear, Embedding, LayerNorm, RMSNorm; .*`others`"),
        (Scaled(), "0 is a Scaled with weights"),
        (nn.PReLU(), "0 is a PReLU with weights"),
        (nn.Conv1d(2, 2, 1), "0 is a Conv1d"),
        (nn.Dropout(0.1), r"0 is Dropout\(p=0.1, inplace=False\).*set p=0"),
        (nn.LayerNorm((2, 3)), "over the last dim only"),
        (nn.Embedding(3, 2, padding_idx=0), "padding_idx is not supported"),
        (nn.Embedding(3, 2, sparse=True), "sparse is not supported"),
        (nn.SiLU(inplace=True), "inplace is not supported"),
        (Doubled(), r"0 is Doubled\(\): its results may depend on which tokens a rank holds; .*`others`"),
        (nn.GLU(), r"0 is GLU\(dim=-1\): its results may depend"),
        (nn.RReLU(), "0 is RReLU"),
        (nn.Softmax(dim=1), "0 is Softmax"),
        (nn.InstanceNorm1d(4), "0 is InstanceNorm1d"),
        (nn.BatchNorm1d(4, affine=False), "0 is BatchNorm1d"),
        (nn.CrossEntropyLoss(), "0 is CrossEntropyLoss"),
    ],
)
def test_a_model_with_anything_else_is_refused_as_a_whole(module: nn.Module, message: str) -> None:
    model = nn.Sequential(module, nn.Linear(4, 3))
    with pytest.raises(rs.UnsupportedError, match=message):
        rs.reproducible.convert(model, layout=rs.contiguous(5, 1))
    assert model[1](torch.ones(4)).shape == (3,)  # still a plain one


def test_activations_are_converted_and_modules_without_weights_left_alone() -> None:
    model = nn.Sequential(nn.SiLU(), nn.GELU(approximate="tanh"), nn.Dropout(0.0), nn.ReLU())
    x = torch.randn(1, 5, 7)
    expected = model(x)
    rs.reproducible.convert(model, layout=rs.contiguous(5, 1))
    assert ["forward" in vars(module) for module in model] == [True, True, False, False]
    torch.testing.assert_close(model(x), expected)


def test_norms_without_weights_are_converted() -> None:
    model = nn.Sequential(nn.LayerNorm(7, elementwise_affine=False), nn.RMSNorm(7, elementwise_affine=False))
    x = torch.randn(1, 5, 7, dtype=torch.float64)
    expected = nn.functional.rms_norm(nn.functional.layer_norm(x, (7,)), (7,))
    rs.reproducible.convert(model, layout=rs.contiguous(5, 1))
    assert all("forward" in vars(module) for module in model)
    torch.testing.assert_close(model(x), expected)


def test_others_come_first() -> None:
    """`others` also replaces modules that are known, refused or left alone."""

    def negate(module: nn.Module, x: torch.Tensor, **_: Any) -> torch.Tensor:
        return -x

    kinds = (nn.Linear, nn.SiLU, nn.ReLU, nn.Dropout, nn.GLU)
    model = nn.Sequential(nn.Linear(4, 3), nn.SiLU(inplace=True), nn.ReLU(), nn.Dropout(0.1), nn.GLU())
    rs.reproducible.convert(model, layout=rs.contiguous(5, 1), others=dict.fromkeys(kinds, negate))
    assert model(torch.ones(1, 5, 4)).unique().tolist() == [-1.0]


OF_TORCH = {
    name: getattr(nn, name)(*{"Threshold": (0.1, 2.0), "MultiheadAttention": (4, 2)}.get(name, ()))
    for name in nn.modules.activation.__all__
}
REFUSED = {"GLU", "LogSoftmax", "MultiheadAttention", "PReLU", "RReLU", "Softmax", "Softmax2d", "Softmin"}


@pytest.mark.parametrize("name", OF_TORCH)
def test_activations_of_torch_have_the_same_bits_anywhere_or_are_refused(name: str) -> None:
    if name in REFUSED:
        with pytest.raises(rs.UnsupportedError, match=f"0 is (a )?{name}"):
            rs.reproducible.convert(nn.Sequential(OF_TORCH[name]), layout=rs.contiguous(5, 1))
    else:
        check_bits(OF_TORCH[name])


def test_activations_of_transformers_have_the_same_bits_anywhere_or_are_refused(subtests: pytest.Subtests) -> None:
    activations = pytest.importorskip("transformers.activations")
    for name in activations.ACT2CLS:
        with subtests.test(name):
            if name in ("prelu", "xielu"):
                with pytest.raises(rs.UnsupportedError, match="with weights"):
                    rs.reproducible.convert(activations.ACT2FN[name], layout=rs.contiguous(5, 1))
            else:
                check_bits(activations.ACT2FN[name])


def check_bits(module: nn.Module) -> None:
    """out and gradient do not depend on the place in the tensor or on threads; the numbers are torch's."""
    wide = torch.randn(70_007, generator=torch.Generator().manual_seed(0)) * 2

    def run(x: torch.Tensor) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = module(x)
        return torch.stack([out.detach(), *torch.autograd.grad(out, x, torch.full_like(out, 0.37))])

    expected = run(wide.double())
    rs.reproducible.convert(module, layout=rs.contiguous(5, 1))
    whole = run(wide)
    torch.testing.assert_close(whole, expected.float(), msg=str(module))
    for first, last in ((0, 1), (3, 67), (1, 40_000), (5, 70_001)):
        assert torch.equal(run(wide[first:last]), whole[:, first:last]), module
    torch.set_num_threads(3)
    try:
        assert torch.equal(run(wide), whole), module
        assert torch.equal(run(wide[5:]), whole[:, 5:]), module
    finally:
        torch.set_num_threads(1)
