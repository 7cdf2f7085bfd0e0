"""`rs.shard` and `rs.gather`, forward and backward, against plain indexing and autograd in one process."""

import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ringspan as rs
import ringspan.training._collectives
from ringspan.transports.base import all_to_all
from ringspan.transports.in_process import InProcessRank
from support.cases import LAYOUTS

SEQ_LEN = 23
each_layout = pytest.mark.parametrize("name", LAYOUTS)
each_world_size = pytest.mark.parametrize("world_size", [1, 2, 3, 5])


def random(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make(name: str, world_size: int) -> rs.Layout:
    return LAYOUTS[name](SEQ_LEN, world_size, rs.causal())


def on_ranks(world_size: int, fn: Callable[[InProcessRank], Any], **options: Any) -> list[Any]:
    return rs.run_in_process(fn, world_size, **options)


def test_the_layouts_have_uneven_and_empty_shards_and_copies() -> None:
    lengths = {name: [make(name, 5).shard_len(rank) for rank in range(5)] for name in LAYOUTS}
    assert len(set(lengths["contiguous"])) > 1
    assert min(lengths["irregular"]) == 0
    assert make("replicated", 5).replicated


@each_layout
@each_world_size
@pytest.mark.parametrize("dim", [0, 1, -2, -1])
def test_gather_makes_whole_what_shard_took_apart(name: str, world_size: int, dim: int) -> None:
    layout = make(name, world_size)
    whole = random(0, 2, 3, 4).transpose(0, dim).contiguous()
    whole = whole.narrow(dim, 0, 1).repeat_interleave(layout.num_positions, dim)
    whole = whole + torch.arange(whole.numel()).view(whole.shape)

    def there_and_back(group: InProcessRank) -> tuple[torch.Tensor, torch.Tensor]:
        part = rs.shard(whole, layout, group, dim=dim)
        return part, rs.gather(part, layout, group, dim=dim)

    for rank, (part, back) in enumerate(on_ranks(world_size, there_and_back)):
        assert torch.equal(part, whole.index_select(dim, rows_of(layout, rank)))
        assert torch.equal(back, whole)


def rows_of(layout: rs.Layout, rank: int) -> torch.Tensor:
    everything = layout.all_positions().tolist()
    return torch.tensor([everything.index(position) for position in layout.positions(rank).tolist()], dtype=torch.long)


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.bfloat16, torch.complex64])
def test_any_type_and_memory_order(dtype: torch.dtype) -> None:
    layout = make("zigzag", 3)
    whole = random(1, 4, SEQ_LEN).mul(9).to(dtype).t().contiguous().t()

    def there_and_back(group: InProcessRank) -> torch.Tensor:
        part = rs.shard(whole, layout, group, dim=1)
        return rs.gather(part.t().contiguous().t(), layout, group, dim=1)

    assert all(torch.equal(back, whole) for back in on_ranks(3, there_and_back))


@pytest.mark.parametrize("view", [torch.conj, torch._neg_view], ids=["conjugate", "negative"])
def test_numbers_that_are_not_those_in_memory(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """torch makes views of conjugates and negatives, forward and backward."""
    layout = rs.contiguous(SEQ_LEN, 3)
    whole, *weights = (torch.complex(random(i, SEQ_LEN, 4), random(10 + i, SEQ_LEN, 4)) for i in range(4))
    expected = torch.empty_like(whole).copy_(view(whole))
    expected_grad = sum(torch.empty_like(weight).copy_(view(weight)) for weight in weights)

    def there_and_back(group: InProcessRank) -> tuple[torch.Tensor, torch.Tensor]:
        part = view(rs.shard(whole, layout, group, dim=0)).requires_grad_()
        assert part.is_conj() or part.is_neg()
        gathered = rs.gather(part, layout, group, dim=0)
        (grad,) = torch.autograd.grad(gathered, part, view(weights[group.rank]))
        return gathered.detach(), grad

    for rank, (gathered, grad) in enumerate(on_ranks(3, there_and_back)):
        assert torch.equal(gathered, expected)
        torch.testing.assert_close(grad, layout.shard(expected_grad, rank, 0))


@each_layout
@each_world_size
def test_gradients_are_those_of_autograd_in_one_process(name: str, world_size: int) -> None:
    """Every rank uses the whole in its own way, and the loss is the sum over all ranks."""
    layout = make(name, world_size)
    parts = [random(rank, 2, layout.shard_len(rank), 3) for rank in range(world_size)]
    weights = [random(100 + rank, 2, layout.num_positions, 3) for rank in range(world_size)]

    def loss(whole: torch.Tensor, rank: int) -> torch.Tensor:
        return (whole.square() * weights[rank]).sum() + (whole.sin() * weights[rank]).sum()

    def on_rank(group: InProcessRank) -> torch.Tensor:
        part = parts[group.rank].clone().requires_grad_()
        loss(rs.gather(part, layout, group, dim=1), group.rank).backward()
        assert part.grad is not None
        return part.grad

    leaves = [part.clone().requires_grad_() for part in parts]
    whole = plain_unshard(layout, leaves)
    expected = torch.autograd.grad(sum(loss(whole, rank) for rank in range(world_size)), leaves, materialize_grads=True)
    for rank, grad in enumerate(on_ranks(world_size, on_rank)):
        torch.testing.assert_close(grad, expected[rank], rtol=0, atol=1e-12)


def plain_unshard(layout: rs.Layout, parts: list[torch.Tensor]) -> torch.Tensor:
    """Take each row from the rank that holds it, or from the first rank if all do."""
    rows = []
    for position in layout.all_positions().tolist():
        rank = next(rank for rank in range(layout.world_size) if position in layout.positions(rank))
        rows.append(parts[rank][:, layout.positions(rank).tolist().index(position)])
    return torch.stack(rows, 1)


@each_layout
def test_sharding_and_gathering_inside_a_model(name: str) -> None:
    """Each rank holds the whole weights and input; the ranks' gradients add up to those of one process."""
    layout = make(name, 3)
    x, weight = random(0, layout.num_positions, 4), random(1, 4, 4)
    target = random(2, layout.num_positions, 4)

    def on_rank(group: InProcessRank) -> list[torch.Tensor]:
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        part = rs.shard(leaves[0], layout, group, dim=0)
        whole = rs.gather((part @ leaves[1]).tanh(), layout, group, dim=0)
        # All ranks compute the same loss; to count it once, divide by the number of ranks.
        ((whole - target).square().sum() / group.world_size).backward()
        return [leaf.grad for leaf in leaves if leaf.grad is not None]

    leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
    expected = torch.autograd.grad(((leaves[0] @ leaves[1]).tanh() - target).square().sum(), leaves)
    for grads, wanted in zip(zip(*on_ranks(3, on_rank), strict=True), expected, strict=True):
        torch.testing.assert_close(torch.stack(grads).sum(0), wanted, rtol=0, atol=1e-11)


def test_numerical_gradients() -> None:
    """Move one element of one rank's part a little, and measure the sum of all ranks' losses."""
    layout = rs.zigzag(7, 3)
    parts = [random(rank, layout.shard_len(rank)) for rank in range(3)]
    weights = [random(9 + rank, 7) for rank in range(3)]

    def losses(given: list[torch.Tensor]) -> list[tuple[float, torch.Tensor]]:
        def on_rank(group: InProcessRank) -> tuple[float, torch.Tensor]:
            part = given[group.rank].clone().requires_grad_()
            loss = (rs.gather(part, layout, group, dim=0).exp() * weights[group.rank]).sum()
            loss.backward()
            assert part.grad is not None
            return float(loss.detach()), part.grad

        return on_ranks(3, on_rank)

    grads = [grad for _, grad in losses(parts)]
    for rank in range(3):
        for row in range(len(parts[rank])):
            totals = []
            for sign in (1, -1):
                moved = [part.clone() for part in parts]
                moved[rank][row] += sign * 1e-6
                totals.append(sum(loss for loss, _ in losses(moved)))
            assert (totals[0] - totals[1]) / 2e-6 == pytest.approx(float(grads[rank][row]), abs=1e-7)


def test_no_gradient_is_kept_where_none_is_wanted() -> None:
    layout = rs.zigzag(8, 2)

    def on_rank(group: InProcessRank) -> bool:
        part = random(0, 4)
        return rs.gather(part, layout, group, dim=0).requires_grad

    assert on_ranks(2, on_rank) == [False, False]


# Errors


def errors_of(world_size: int, fn: Callable[[InProcessRank], object]) -> list[Exception]:
    """Return the error of every rank, and check that the group is usable afterwards."""
    layout = rs.zigzag(8, world_size)

    def on_rank(group: InProcessRank) -> Exception:
        began = time.monotonic()
        with pytest.raises(rs.RingspanError) as raised:
            fn(group)
        assert time.monotonic() - began < 10, "no rank is left waiting"
        part = torch.arange(8.0)[layout.positions(group.rank)]
        assert torch.equal(rs.gather(part, layout, group, dim=0), torch.arange(8.0))
        return raised.value

    return on_ranks(world_size, on_rank, timeout_s=20)


def test_a_layout_for_another_world_size_is_refused(subtests: pytest.Subtests) -> None:
    for call in (rs.shard, rs.gather):
        with subtests.test(f"{call}"):
            for error in errors_of(2, lambda group, call=call: call(torch.zeros(8), rs.zigzag(8, 3), group, dim=0)):
                assert isinstance(error, rs.LayoutError)
                assert "3 ranks" in str(error)
                assert "2" in str(error)


def test_a_part_of_the_wrong_length_is_refused_on_all_ranks() -> None:
    layout = rs.zigzag(8, 3)

    def gather(group: InProcessRank) -> None:
        rs.gather(torch.zeros(layout.shard_len(group.rank) + (group.rank == 1)), layout, group, dim=0)

    first, second, third = errors_of(3, gather)
    assert isinstance(second, rs.ShapeError)
    assert "part.shape=(4,)" in str(second)
    assert isinstance(first, rs.TransportError)
    assert str(first) == str(third)
    assert "rank 1" in str(first)
    assert "part.shape=(4,)" in str(first)


def test_one_rank_with_a_layout_for_another_world_size() -> None:
    layout = rs.zigzag(8, 3)

    def gather(group: InProcessRank) -> None:
        of = rs.zigzag(8, 4) if group.rank == 1 else layout
        rs.gather(torch.zeros(layout.shard_len(group.rank)), of, group, dim=0)

    first, second, third = errors_of(3, gather)
    assert isinstance(second, rs.LayoutError)
    assert isinstance(first, rs.TransportError)
    assert str(first) == str(third)
    assert "rank 1" in str(first)
    assert "4 ranks" in str(first)


def test_an_error_is_sent_within_the_deadline_of_the_call() -> None:
    """One rank never comes; the test is over long before the group's deadline."""
    is_told = threading.Event()

    def gather(group: InProcessRank) -> None:
        if group.rank == 1:
            is_told.wait(20)
            return
        group.timeout_s = 60.0
        try:
            with pytest.raises(rs.ShapeError, match=r"part.shape=\(5,\)"):
                rs.gather(torch.zeros(5), rs.zigzag(8, 2), group, dim=0, timeout_s=0.1)
        finally:
            is_told.set()

    on_ranks(2, gather, timeout_s=5)


@pytest.mark.parametrize("error", [MemoryError("no room"), KeyboardInterrupt()], ids=["memory", "interrupt"])
@pytest.mark.parametrize("is_backward", [False, True], ids=["forward", "backward"])
def test_a_rank_that_fails_in_mid_call_tells_the_others(
    error: BaseException, is_backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The failure comes after all ranks have agreed, so only the call itself can tell the others."""
    number = itertools.count()

    def exchange(transport: Any, *args: Any) -> list[torch.Tensor]:
        if transport.rank == 1 and next(number) == is_backward:
            raise error
        return all_to_all(transport, *args)

    monkeypatch.setattr(ringspan.training._collectives, "all_to_all", exchange)

    def gather(group: InProcessRank) -> BaseException:
        part = torch.ones(2, requires_grad=True)
        with pytest.raises((type(error), rs.TransportError)) as raised:
            rs.gather(part, rs.contiguous(4, 2), group, dim=0).sum().backward()
        return raised.value

    first, second = on_ranks(2, gather, timeout_s=20)
    assert type(second) is type(error)
    assert isinstance(first, rs.TransportError)
    assert f"rank 1 failed: {type(error).__name__}{': ' if str(error) else ''}{error}" in str(first)


@pytest.mark.parametrize("call", [rs.shard, rs.gather])
def test_a_dim_out_of_range_is_refused(call: Callable[..., torch.Tensor]) -> None:
    for error in errors_of(2, lambda group: call(torch.zeros(4), rs.zigzag(8, 2), group, dim=1)):
        assert isinstance(error, rs.ShapeError)
        assert "dim=1" in str(error)


def test_gather_along_another_dim_says_which_one_fits() -> None:
    for error in errors_of(2, lambda group: rs.gather(torch.zeros(2, 4, 3), rs.zigzag(8, 2), group, dim=2)):
        assert "4 positions along dim 2; use dim=1" in str(error)
    for error in errors_of(2, lambda group: rs.gather(torch.zeros(2, 5, 3), rs.zigzag(8, 2), group, dim=1)):
        assert "pass the layout that the part was made with" in str(error)


@pytest.mark.parametrize(("call", "name"), [(rs.shard, "whole"), (rs.gather, "part")])
def test_a_single_number_has_no_dim_at_all(call: Callable[..., torch.Tensor], name: str) -> None:
    for error in errors_of(2, lambda group: call(torch.tensor(1.0), rs.zigzag(8, 2), group, dim=0)):
        assert isinstance(error, rs.ShapeError)
        assert str(error) == f"{name}.shape=(): a single number has no dim of positions; use {name}[None] for one"


def test_a_part_that_is_not_a_tensor_is_refused_on_all_ranks() -> None:
    def gather(group: InProcessRank) -> None:
        part = torch.zeros(4)
        rs.gather(part.numpy() if group.rank else part, rs.zigzag(8, 2), group, dim=0)

    first, second = errors_of(2, gather)
    assert isinstance(second, rs.ShapeError)
    assert str(second) == "part: expected a tensor, got ndarray; give a tensor"
    assert str(second) in str(first)


@pytest.mark.parametrize("call", [rs.shard, rs.gather])
def test_a_value_that_is_not_a_layout_is_refused(call: Callable[..., torch.Tensor]) -> None:
    for error in errors_of(2, lambda group: call(torch.zeros(4), None, group, dim=0)):
        assert isinstance(error, rs.LayoutError)
        assert (
            str(error)
            == "layout=None: expected a Layout, got NoneType; use a layout such as rs.zigzag(seq_len, world_size)"
        )


@pytest.mark.parametrize("timeout_s", [0, -1.0, float("nan")])
def test_a_deadline_that_is_not_positive_is_refused(timeout_s: float) -> None:
    part = torch.zeros(4)
    for error in errors_of(2, lambda group: rs.gather(part, rs.zigzag(8, 2), group, dim=0, timeout_s=timeout_s)):
        assert isinstance(error, rs.ShapeError)
        assert f"timeout_s={timeout_s}" in str(error)


@pytest.mark.parametrize(
    ("field", "value", "odd"),
    [
        ("dtype", "torch.float64", lambda part, layout: (part.double(), layout, 0)),
        ("shape", "(9, 2)", lambda part, layout: (part[:, :2], layout, 0)),
        ("layout", "striped", lambda part, layout: (part, rs.striped(9, 3), 0)),
    ],
)
def test_a_rank_that_gathers_something_else_is_named_on_all(
    field: str, value: str, odd: Callable[[torch.Tensor, rs.Layout], tuple[torch.Tensor, rs.Layout, int]]
) -> None:
    layout = rs.contiguous(9, 3)
    value = rs.striped(9, 3).fingerprint() if value == "striped" else value

    def gather(group: InProcessRank) -> None:
        part, of, dim = torch.zeros(3, 4), layout, 0
        if group.rank == 2:
            part, of, dim = odd(part, of)
        rs.gather(part, of, group, dim=dim)

    messages = {str(error) for error in errors_of(3, gather)}
    (message,) = messages
    assert f"{field}: rank 2 has {value}, ranks 0, 1 have" in message


@pytest.mark.parametrize("name", ["zigzag", "replicated"])
def test_second_derivatives(name: str) -> None:
    """The gradient of a loss that every rank computes, summed over the ranks, is that of one process."""
    replicated = rs.Layout(((rs.Span(0, 3),), (rs.Span(5, 7),), ()), (rs.Span(3, 5),))
    layout = rs.zigzag(7, 3) if name == "zigzag" else replicated
    whole = torch.linspace(-1, 2, 7, dtype=torch.float64)
    weights = torch.linspace(1, 2, 21, dtype=torch.float64).view(3, 7)

    def on_rank(group: InProcessRank) -> torch.Tensor:
        part = layout.shard(whole, group.rank, 0).clone().requires_grad_()
        loss = (rs.gather(part, layout, group, dim=0) ** 3) @ weights[group.rank]
        (grad,) = torch.autograd.grad(loss, part, create_graph=True)
        return torch.autograd.grad((grad**2).sum(), part)[0]

    x = whole.clone().requires_grad_()
    (grad,) = torch.autograd.grad(((x**3) * weights).sum(), x, create_graph=True)
    (expected,) = torch.autograd.grad((grad**2).sum(), x)
    parts = rs.run_in_process(on_rank, 3)
    torch.testing.assert_close(layout.unshard(parts, 0), expected)


def test_a_gradient_that_one_rank_does_not_want_is_refused_at_once() -> None:
    """Otherwise the rank would wait for the other one in the backward pass."""
    layout = rs.contiguous(4, 2)

    def gather(group: InProcessRank) -> None:
        rs.gather(torch.ones(2, requires_grad=group.rank == 0), layout, group, dim=0)

    for error in errors_of(2, gather):
        assert "gradient: rank 0 has wanted, rank 1 has not wanted" in str(error)


def test_attention_on_one_rank_and_gather_on_another() -> None:
    layout = rs.zigzag(8, 2)

    def differ(group: InProcessRank) -> None:
        x = torch.zeros(1, 1, 4, 2)
        if group.rank == 0:
            rs.attention(x, x, x, mask=rs.causal(), layout=layout, group=group)
        else:
            rs.gather(x, layout, group, dim=2)

    messages = {str(error) for error in errors_of(2, differ)}
    assert len(messages) == 1
    assert "gather" in messages.pop()


def test_gradients_in_another_order_on_one_rank_are_refused(subtests: pytest.Subtests) -> None:
    """Two equal gathers: in the same order each gets its own gradient; in another order no rank gets a wrong one."""

    def run(group: InProcessRank, orders: tuple[tuple[int, int], ...]) -> dict[int, list[float]]:
        leaves = [torch.ones(2, requires_grad=True) for _ in range(2)]
        one, other = (rs.gather(x, rs.contiguous(4, 2), group, dim=0) for x in leaves)
        losses = [one.sum(), (10 * other).sum()]
        return {i: torch.autograd.grad(losses[i], leaves[i])[0].tolist() for i in orders[group.rank]}

    for order in ((0, 1), (1, 0)):
        with subtests.test(f"{order}"):
            for gradients in rs.run_in_process(lambda group, order=order: run(group, (order, order)), 2):
                assert gradients == {0: [2.0, 2.0], 1: [20.0, 20.0]}
    with pytest.raises(rs.TransportError, match="gradient of call: rank"):
        rs.run_in_process(lambda group: run(group, ((0, 1), (1, 0))), 2)
