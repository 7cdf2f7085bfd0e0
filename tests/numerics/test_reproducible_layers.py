"""`rs.reproducible` on ranks as threads: equal bits for any world size and layout, and the numbers of plain torch."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import ringspan as rs
from ringspan.program.reproducible.tree import TILE
from ringspan.transports.base import CountingTransport
from support.reproducible_layers import FEATURES, SEQ_LEN, VOCABULARY, make_inputs, run_layers

LAYOUTS: dict[str, Callable[[int], rs.Layout]] = {
    "contiguous": lambda world_size: rs.contiguous(SEQ_LEN, world_size, align=TILE),
    "zigzag": lambda world_size: rs.zigzag(SEQ_LEN, world_size, align=TILE),
    "striped": lambda world_size: rs.striped(SEQ_LEN, world_size, block=TILE),
}
each_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])


def on_ranks(layout: rs.Layout, dtype: torch.dtype) -> list[dict[str, torch.Tensor]]:
    return rs.run_in_process(lambda group: run_layers(layout, group.rank, group, dtype), layout.world_size)


@pytest.fixture(scope="module")
def alone() -> dict[torch.dtype, dict[str, torch.Tensor]]:
    layout = rs.contiguous(SEQ_LEN, 1)
    return {dtype: run_layers(layout, 0, None, dtype) for dtype in (torch.float32, torch.bfloat16)}


# Bits


@each_dtype
@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 8])
def test_the_number_of_ranks_does_not_change_a_bit(
    world_size: int, name: str, dtype: torch.dtype, alone: dict[torch.dtype, dict[str, torch.Tensor]]
) -> None:
    layout = LAYOUTS[name](world_size)
    parts = on_ranks(layout, dtype)
    for field, expected in alone[dtype].items():
        if field.startswith("token "):
            assert torch.equal(layout.unshard([part[field] for part in parts], 1), expected), field
        else:
            assert all(torch.equal(part[field], expected) for part in parts), field


def test_a_plain_linear_with_an_all_reduce_does_change_bits() -> None:
    """The usual sums do not have the property: the test can fail."""
    x, dout = torch.randn(2, SEQ_LEN, 1, FEATURES, generator=torch.Generator().manual_seed(0)).unbind(0)
    whole, halves = (
        sum(layout.shard(dout, rank, 0)[:, 0].T @ layout.shard(x, rank, 0)[:, 0] for rank in range(layout.world_size))
        for layout in (rs.contiguous(SEQ_LEN, 1), rs.contiguous(SEQ_LEN, 2, align=TILE))
    )
    torch.testing.assert_close(halves, whole)
    assert not torch.equal(halves, whole)


def test_every_matrix_product_is_the_same_one_wherever_it_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A product with other rows may have other bits, but not on every machine, so the test checks its shape."""
    shapes: list[tuple[object, ...]] = []

    def record(multiply: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def run(*tensors: torch.Tensor, **options: Any) -> torch.Tensor:
            shapes.append((multiply.__name__, *(tuple(x.shape) for x in tensors), options.get("beta")))
            return multiply(*tensors, **options)

        return run

    monkeypatch.setattr(torch, "mm", record(torch.mm))
    monkeypatch.setattr(torch, "addmm", record(torch.addmm))
    monkeypatch.setattr(torch.Tensor, "addmm_", record(torch.Tensor.addmm_))
    shapes_by_world_size = []
    for world_size in (1, 3):
        on_ranks(LAYOUTS["zigzag"](world_size), torch.float32)
        shapes_by_world_size.append(sorted(shapes, key=repr))
        shapes.clear()
    assert shapes_by_world_size[0] == shapes_by_world_size[1]
    assert {shape[0] for shape in shapes_by_world_size[0]} == {"mm", "addmm", "addmm_"}


@pytest.mark.parametrize("layout", [rs.contiguous(TILE + 1, 1, start=5), rs.contiguous(1, 1), rs.contiguous(0, 1)])
def test_short_sequences(layout: rs.Layout) -> None:
    x = torch.randn(2, layout.num_positions, 6, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    out = rs.reproducible.linear(x, weight, layout=layout)
    out.backward(torch.ones_like(out))
    torch.testing.assert_close(out, x @ weight.T)
    torch.testing.assert_close(weight.grad, x.detach().sum((0, 1)).expand(3, 6))


def test_a_tensor_that_is_aligned_otherwise_has_the_same_bits() -> None:
    layout = rs.contiguous(TILE + 3, 1)
    x, weight = torch.randn(1, TILE + 3, FEATURES), torch.randn(7, FEATURES)
    moved = torch.empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    spread = torch.stack([x, x], dim=-1)[..., 0]
    expected = rs.reproducible.linear(x, weight, layout=layout)
    assert moved.data_ptr() % 64
    for other in (moved, spread):
        assert torch.equal(rs.reproducible.linear(other, weight, layout=layout), expected)


ACTIVATIONS: dict[str, Callable[..., torch.Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softplus": F.softplus,
    "gelu": F.gelu,
    "tanh gelu": lambda x: F.gelu(x, approximate="tanh"),
    "power": lambda x: x.abs().pow(0.3),
    "gate": lambda x, y=None: F.silu(x) * (x if y is None else y),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_elementwise_functions_have_the_same_bits_wherever_a_number_stands(
    subtests: pytest.Subtests, name: str
) -> None:
    """At any place of tensors of any length, also lengths that threads share; the numbers are torch's."""
    fn = ACTIVATIONS[name]
    x = torch.randn(70_007, generator=torch.Generator().manual_seed(0))

    def run(x: torch.Tensor, compute: Callable[..., torch.Tensor]) -> torch.Tensor:
        x = x.clone().requires_grad_()
        out = compute(x)
        return torch.stack([out.detach(), *torch.autograd.grad(out, x, torch.full_like(out, 0.37))])

    def ours(x: torch.Tensor) -> torch.Tensor:
        return rs.reproducible.elementwise(fn, x)

    whole = run(x, ours)
    torch.testing.assert_close(whole, run(x, fn))
    for first, last in ((0, 1), (3, 67), (1, 40_000), (5, 70_001)):
        with subtests.test(f"{first}, {last}"):
            assert torch.equal(run(x[first:last], ours), whole[:, first:last])
    torch.set_num_threads(3)
    try:
        assert torch.equal(run(x, ours), whole)
        assert torch.equal(run(x[5:], ours), whole[:, 5:])
    finally:
        torch.set_num_threads(1)


def test_elementwise_of_several_tensors_of_which_one_has_no_gradient() -> None:
    x, y = torch.randn(2, 3, 7, requires_grad=True), torch.randn(7, 3, 2).permute(2, 1, 0)
    out = rs.reproducible.elementwise(ACTIVATIONS["gate"], x, y)
    torch.testing.assert_close(out, F.silu(x) * y)
    torch.testing.assert_close(*(torch.autograd.grad(z.sum(), x) for z in (out, F.silu(x) * y)))
    assert rs.reproducible.elementwise(torch.sigmoid, x[:, :0]).shape == (2, 0, 7)


def test_a_function_that_is_not_elementwise_is_refused() -> None:
    for fn, tensors in ((torch.sigmoid, (X, X[0])), (torch.sum, (X,)), (torch.sigmoid, (X.long(),))):
        with pytest.raises(rs.ShapeError, match="dtype"):
            rs.reproducible.elementwise(fn, *tensors)


def test_elementwise_without_tensors_or_of_other_values_is_refused() -> None:
    with pytest.raises(rs.ShapeError, match=r"tensors=\(\): .* at least one tensor"):
        rs.reproducible.elementwise(torch.sigmoid)
    with pytest.raises(rs.ShapeError, match=r"tensors\[1\]: expected a tensor, got float"):
        rs.reproducible.elementwise(torch.add, X, 1.0)


def test_elementwise_functions_with_weights_of_their_own_are_refused() -> None:
    """With and without a gradient of the tensor; without any gradient none can be lost."""
    beta = torch.tensor(2.0, requires_grad=True)

    def swish(x: torch.Tensor) -> torch.Tensor:
        return x * torch.sigmoid(beta * x)

    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(rs.UnsupportedError, match=r"its gradient would be lost; detach that tensor in fn"):
            rs.reproducible.elementwise(swish, x)
    with torch.no_grad():
        torch.testing.assert_close(rs.reproducible.elementwise(swish, X), X * torch.sigmoid(2 * X))


# Numbers


def plain_layers() -> dict[str, torch.Tensor]:
    """The same layers with torch's own functions in float64."""
    inputs = make_inputs(torch.float64)
    weights = {name: weight.requires_grad_() for name, weight in inputs.weights.items()}
    embedded = F.embedding(inputs.ids, weights["table"])
    normal = F.layer_norm(embedded, (FEATURES,), weights["scale"], weights["shift"])
    wide = F.linear(normal, weights["up"], weights["up bias"])
    heads = F.rms_norm(wide.unflatten(-1, (4, -1)), (weights["root scale"].shape[0],), weights["root scale"], 1e-6)
    logits = F.linear(F.gelu(heads.flatten(2)), weights["down"])
    loss = F.cross_entropy(logits.flatten(0, 1), inputs.labels.flatten())
    tokens = {"embedded": embedded, "normal": normal, "wide": wide, "heads": heads, "logits": logits}
    gradients = torch.autograd.grad(loss, [*weights.values(), *tokens.values()])
    return (
        {"loss": loss.detach()}
        | {f"token {name}": x.detach() for name, x in tokens.items()}
        | dict(zip((*(f"d{name}" for name in weights), *(f"token d{name}" for name in tokens)), gradients, strict=True))
    )


def check_numbers(found: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    expected = plain_layers()
    assert expected.keys() == found.keys()
    for name, x in found.items():
        error = (x - expected[name]).norm() / expected[name].norm()
        assert error < (2e-6 if dtype == torch.float32 else 2e-2), name


@each_dtype
def test_the_numbers_are_those_of_plain_torch(
    dtype: torch.dtype, alone: dict[torch.dtype, dict[str, torch.Tensor]]
) -> None:
    check_numbers(alone[dtype], dtype)


@each_dtype
def test_autocast_around_both_passes_does_not_change_the_numbers(dtype: torch.dtype) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        found = run_layers(rs.contiguous(SEQ_LEN, 1), 0, None, dtype)
    assert {x.dtype for name, x in found.items() if name != "loss"} == {dtype}
    check_numbers(found, dtype)


@each_dtype
def test_products_of_odd_sizes_inside_autocast(dtype: torch.dtype) -> None:
    """If rows of a gradient are not contiguous, they are copied."""
    layout, generator = rs.contiguous(77, 1), torch.Generator().manual_seed(0)
    x, weight, dout = (torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 77, 7), (5, 7), (2, 77, 5)))
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    with torch.autocast("cpu", torch.bfloat16):
        rs.reproducible.linear(*leaves, layout=layout).backward(dout)
    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    (wide[0] @ wide[1].T).backward(dout.double())
    for leaf, expected in zip(leaves, wide, strict=True):
        assert leaf.grad is not None
        assert leaf.grad.dtype == dtype
        torch.testing.assert_close(leaf.grad, expected.grad.to(dtype))


def test_autocast_does_not_change_the_dtype_of_elementwise_functions() -> None:
    """Autocast would make float32 of this one, and fn runs in both passes."""

    def squares(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(x, y, reduction="none")

    x, y = torch.randn(2, 3, 70).bfloat16()
    x.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        assert squares(x, y).dtype == torch.float32
        out = rs.reproducible.elementwise(squares, x, y)
        out.sum().backward()
    torch.testing.assert_close(out, (x - y) ** 2)
    torch.testing.assert_close(x.grad, 2 * (x - y))


@pytest.mark.parametrize("is_centred", [True, False])
def test_gradients_of_norms_by_finite_differences(is_centred: bool) -> None:
    layout = rs.contiguous(3, 1)
    x, weight, bias = (torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((2, 3, 5), 5, 5))
    if is_centred:
        layer_norm = rs.reproducible.layer_norm
        assert torch.autograd.gradcheck(lambda *args: layer_norm(*args, layout=layout), (x, weight, bias))
    else:
        rms_norm = rs.reproducible.rms_norm
        assert torch.autograd.gradcheck(lambda *args: rms_norm(*args, layout=layout), (x, weight))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("size", [1.0, 0.05, 1e-4])
@pytest.mark.parametrize("has_weight", [True, False])
def test_a_converted_rms_norm_without_eps_is_that_of_torch(dtype: torch.dtype, size: float, has_weight: bool) -> None:
    """If numbers are small, eps is most of their mean square."""
    x, dout = torch.randn(2, 2, 5, 64, generator=torch.Generator().manual_seed(0)).unbind(0)
    x, dout = (size * x).to(dtype), dout.to(dtype)
    module = torch.nn.RMSNorm(64, elementwise_affine=has_weight, dtype=dtype)
    results = []
    for norm in (copy.deepcopy(module), rs.reproducible.convert(module, layout=rs.contiguous(5, 1))):
        leaves = [x.clone().requires_grad_(), *norm.parameters()]
        out = norm(leaves[0])
        results.append([out, *torch.autograd.grad(out, leaves, dout)])
    limit = {torch.float64: 1e-14, torch.float32: 2e-6}.get(dtype, 2e-2)
    for expected, found in zip(*results, strict=True):
        assert (found.double() - expected.double()).norm() / expected.double().norm() < limit


def test_an_unknown_default_eps_of_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another version of torch may use another eps; none is guessed."""
    plain = F.rms_norm

    def other(x: torch.Tensor, shape: tuple[int, ...], weight: Any = None, eps: float | None = None) -> torch.Tensor:
        return plain(x, shape, weight, 0.5 if eps is None else eps)

    convert = importlib.import_module("ringspan.reproducible._convert")
    convert._default_eps.cache_clear()
    monkeypatch.setattr(F, "rms_norm", other)
    norm = rs.reproducible.convert(torch.nn.RMSNorm(4), layout=rs.contiguous(5, 1))
    with pytest.raises(rs.UnsupportedError, match=r"eps=None in torch.float32: .* give the module an eps"):
        norm(X)


def test_sum_of_losses_and_no_label_at_all() -> None:
    layout = rs.contiguous(5, 1)
    logits = torch.randn(2, 5, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.tensor([[3, -100, 0, 10, 7], [-100, -100, 1, 1, 1]])
    assert torch.autograd.gradcheck(
        lambda x: rs.reproducible.cross_entropy(x, labels, layout=layout, reduction="sum"), (logits,)
    )
    total = rs.reproducible.cross_entropy(logits, labels, layout=layout, reduction="sum")
    torch.testing.assert_close(total, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    nothing = rs.reproducible.cross_entropy(logits, torch.full((2, 5), -100), layout=layout)
    (gradient,) = torch.autograd.grad(nothing, logits)
    assert nothing == 0
    assert not gradient.any()


@pytest.mark.parametrize("frozen", ["weight", "bias", "both", "x"])
def test_only_what_asks_for_it_has_a_gradient(frozen: str) -> None:
    layout = rs.contiguous(2 * TILE, 2, align=TILE)
    whole = torch.randint(-9, 9, (1, 2 * TILE, 4)).float()  # sums of integers are exact in any order

    def run(group: Any) -> tuple[torch.Tensor | None, ...]:
        x = rs.shard(whole, layout, group, dim=1).clone().requires_grad_(frozen != "x")
        weight = torch.ones(3, 4, requires_grad=frozen not in ("weight", "both"))
        bias = torch.ones(3, requires_grad=frozen not in ("bias", "both"))
        rs.reproducible.linear(x, weight, bias, layout=layout, group=group).sum().backward()
        return x.grad, weight.grad, bias.grad

    for dx, dweight, dbias in rs.run_in_process(run, 2):
        assert (dx is None) == (frozen == "x")
        if frozen in ("weight", "both"):
            assert dweight is None
        else:
            torch.testing.assert_close(dweight, whole.sum((0, 1)).expand(3, 4))
        if frozen in ("bias", "both"):
            assert dbias is None
        else:
            assert dbias.tolist() == [2 * TILE] * 3


# Bytes


@pytest.mark.parametrize("world_size", [2, 4, 8])
def test_a_contiguous_layout_sends_the_bytes_of_an_all_reduce(
    world_size: int, counted: dict[int, CountingTransport]
) -> None:
    layout = rs.contiguous(8 * TILE, world_size, align=TILE)

    def run(group: Any) -> None:
        weight = torch.ones(16, 8, requires_grad=True)
        x = torch.ones(1, 8 * TILE // world_size, 8)
        rs.reproducible.linear(x, weight, layout=layout, group=group).sum().backward()

    rs.run_in_process(run, world_size)
    assert [sum(transport.bytes_sent) for transport in counted.values()] == [
        2 * (world_size - 1) * 16 * 8 * 4 // world_size
    ] * world_size


# Refusals


def test_a_layout_off_the_grid_is_refused_on_all_ranks() -> None:
    layout = rs.contiguous(1300, 2)

    def run(group: Any) -> None:
        with pytest.raises(
            rs.LayoutError, match=r"two ranks; use the nearest such layout, rs.contiguous\(1300, 2, align"
        ):
            rs.reproducible.linear(torch.ones(1, 650, 4), torch.ones(3, 4), layout=layout, group=group)

    rs.run_in_process(run, 2)


def test_replicated_positions_are_refused() -> None:
    layout = rs.Layout(((rs.Span(512, 600),),), replicated=(rs.Span(0, 3),))
    with pytest.raises(rs.UnsupportedError, match="replicated positions"):
        rs.reproducible.linear(torch.ones(1, 91, 4), torch.ones(3, 4), layout=layout)


X = torch.ones(1, 5, 4)
REFUSED: dict[str, Callable[[rs.Layout], object]] = {
    "x.shape=.*5 positions": lambda layout: rs.reproducible.linear(X[:, :4], torch.ones(3, 4), layout=layout),
    "in_features": lambda layout: rs.reproducible.linear(X, torch.ones(4, 3), layout=layout),
    "bias.shape": lambda layout: rs.reproducible.linear(X, torch.ones(3, 4), torch.ones(4), layout=layout),
    "autocast": lambda layout: rs.reproducible.linear(X, torch.ones(3, 4).bfloat16(), layout=layout),
    "batch of 1": lambda layout: rs.reproducible.linear(X[:0], torch.ones(3, 4), layout=layout),
    "weight.shape": lambda layout: rs.reproducible.rms_norm(X, torch.ones(3), layout=layout),
    "give a tensor": lambda layout: rs.reproducible.layer_norm(X.tolist(), torch.ones(4), layout=layout),
    "ids has 9": lambda layout: rs.reproducible.embedding(torch.full((1, 5), 9), torch.ones(9, 2), layout=layout),
    "int64 or int32": lambda layout: rs.reproducible.embedding(X[..., 0], torch.ones(9, 2), layout=layout),
    "vocabulary, features": lambda layout: rs.reproducible.embedding(X[..., 0].long(), torch.ones(9), layout=layout),
    "labels has 4": lambda layout: rs.reproducible.cross_entropy(X, torch.full((1, 5), 4), layout=layout),
    "labels.shape": lambda layout: rs.reproducible.cross_entropy(X, torch.ones(5).long(), layout=layout),
    'use "mean" or "sum"': lambda layout: rs.reproducible.cross_entropy(
        X, X[..., 0].long(), layout=layout, reduction="none"
    ),
    "labels: expected a tensor, got list": lambda layout: rs.reproducible.cross_entropy(X, [[1] * 5], layout=layout),
    "weight: expected a tensor, got NoneType": lambda layout: rs.reproducible.linear(X, None, layout=layout),
    "weight: expected a tensor, got list": lambda layout: rs.reproducible.rms_norm(X, [1.0] * 4, layout=layout),
    "weight: expected a tensor, got float": lambda layout: rs.reproducible.embedding(
        X[..., 0].long(), 1.0, layout=layout
    ),
    "bias: expected a tensor, got float": lambda layout: rs.reproducible.linear(
        X, torch.ones(3, 4), 1.0, layout=layout
    ),
    "timeout_s=0": lambda layout: rs.reproducible.linear(X, torch.ones(3, 4), layout=layout, timeout_s=0),
}


@pytest.mark.parametrize("message", REFUSED)
def test_arguments_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(rs.ShapeError, match=message):
        REFUSED[message](rs.contiguous(5, 1))


OF_LAYOUT: dict[str, Callable[[Any], object]] = {
    "linear": lambda layout: rs.reproducible.linear(X, torch.ones(3, 4), layout=layout),
    "rms_norm": lambda layout: rs.reproducible.rms_norm(X, torch.ones(4), layout=layout),
    "layer_norm": lambda layout: rs.reproducible.layer_norm(X, torch.ones(4), layout=layout),
    "embedding": lambda layout: rs.reproducible.embedding(X[..., 0].long(), torch.ones(9, 2), layout=layout),
    "cross_entropy": lambda layout: rs.reproducible.cross_entropy(X, X[..., 0].long(), layout=layout),
    "convert": lambda layout: rs.reproducible.convert(torch.nn.Linear(4, 3), layout=layout)(X),
}


@pytest.mark.parametrize("name", OF_LAYOUT)
def test_a_value_that_is_not_a_layout_is_refused(name: str) -> None:
    with pytest.raises(rs.LayoutError, match=r"layout=None: expected a Layout, got NoneType; use"):
        OF_LAYOUT[name](None)


def test_weights_of_different_sizes_are_noticed_before_anything_is_received() -> None:
    layout = rs.contiguous(2 * TILE, 2, align=TILE)

    def run(group: Any) -> None:
        weight = torch.ones(3 + group.rank, 4, requires_grad=True)
        out = rs.reproducible.linear(torch.ones(1, TILE, 4), weight, layout=layout, group=group)
        with pytest.raises(rs.TransportError, match="length: rank 0 has 12, rank 1 has 16"):
            out.sum().backward()

    rs.run_in_process(run, 2)


def test_second_derivatives_are_refused() -> None:
    weight = torch.ones(3, 4, requires_grad=True)
    out = rs.reproducible.linear(X, weight, layout=rs.contiguous(5, 1))
    (gradient,) = torch.autograd.grad(out.square().sum(), weight, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def test_autocast_leaves_the_dtype_alone() -> None:
    layout = rs.contiguous(5, 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert rs.reproducible.linear(X, torch.ones(3, 4), layout=layout).dtype == torch.float32


def test_the_vocabulary_is_odd() -> None:
    """No row of logits ends with a full vector."""
    assert VOCABULARY % 8
