"""Are the gradients of `rs.reproducible` layers those of the same layer on every rank? Otherwise all ranks raise."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import ringspan as rs
from ringspan.program.reproducible.tree import TILE
from ringspan.transports.base import Transport

TWO = rs.contiguous(2 * TILE, 2, align=TILE)


class Layer(NamedTuple):
    """A layer with one 2-D weight, applied to the tokens of one tile."""

    ours: Callable[..., torch.Tensor]
    plain: Callable[[torch.Tensor], torch.Tensor]


def filled(rows: int, columns: int, number: float = 1.0) -> torch.Tensor:
    return torch.full((rows, columns), number, dtype=torch.float64)


def tokens(features: int) -> torch.Tensor:
    return torch.arange(TILE * features).view(1, TILE, features).double() % 7


IDS = torch.arange(TILE).view(1, TILE) % 3
LAYERS = {
    "linear": Layer(
        lambda weight, **on: rs.reproducible.linear(tokens(weight.shape[1]), weight, **on),
        lambda weight: tokens(weight.shape[1]) @ weight.T,
    ),
    "embedding": Layer(lambda weight, **on: rs.reproducible.embedding(IDS, weight, **on), lambda weight: weight[IDS]),
    "rms_norm": Layer(
        lambda weight, **on: rs.reproducible.rms_norm(tokens(4), weight[0], **on),
        lambda weight: F.rms_norm(tokens(4), (4,), weight[0], 1e-6),
    ),
    "layer_norm": Layer(
        lambda weight, **on: rs.reproducible.layer_norm(tokens(4), weight[0], weight[1], **on),
        lambda weight: F.layer_norm(tokens(4), (4,), weight[0], weight[1]),
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_gradients_in_another_order_on_one_rank_are_refused(name: str) -> None:
    """Two equal layers: in the same order each gets its own gradient; in another order no rank gets a wrong one."""

    def run(group: Any, orders: tuple[tuple[int, int], ...]) -> dict[int, torch.Tensor]:
        leaves = [filled(3, 4).requires_grad_() for _ in range(2)]
        one, other = (LAYERS[name].ours(leaf, layout=TWO, group=group).sum() for leaf in leaves)
        losses = [one, 10 * other]
        return {i: torch.autograd.grad(losses[i], leaves[i])[0] for i in orders[group.rank]}

    weight = filled(3, 4).requires_grad_()
    (of_one_rank,) = torch.autograd.grad(LAYERS[name].plain(weight).sum(), weight)
    for order in ((0, 1), (1, 0)):
        for gradients in rs.run_in_process(lambda group, order=order: run(group, (order, order)), 2):
            torch.testing.assert_close(gradients, {0: 2 * of_one_rank, 1: 20 * of_one_rank})
    with pytest.raises(rs.TransportError, match="layer: rank 0 has 1, rank 1 has 2"):
        rs.run_in_process(lambda group: run(group, ((0, 1), (1, 0))), 2)


@pytest.mark.parametrize(
    ("names", "weights", "message"),
    [
        (
            ("linear", "linear"),
            (filled(3, 4), filled(3, 4, 2.0)),
            r"rank 0 has \(3, 4\) #-?\d+, rank 1 has \(3, 4\)",
        ),
        (
            ("linear", "linear"),
            (filled(8, 4), filled(4, 8)),
            r"rank 0 has \(8, 4\) #-?\d+, rank 1 has \(4, 8\)",
        ),
        (
            ("embedding", "embedding"),
            (filled(3, 4), filled(3, 4, 0.0)),
            r"weights: rank 0 has \(3, 4\) #-?\d+, rank 1",
        ),
        (
            ("rms_norm", "layer_norm"),
            (filled(2, 4), filled(2, 4)),
            r"gradient of reproducible.rms_norm, rank 1",
        ),
    ],
    ids=["other experts", "other shapes", "other tables", "other norms"],
)
def test_different_layers_on_different_ranks_are_refused(
    names: tuple[str, str], weights: tuple[torch.Tensor, torch.Tensor], message: str
) -> None:
    def run(group: Any) -> None:
        weight = weights[group.rank].clone().requires_grad_()
        out = LAYERS[names[group.rank]].ours(weight, layout=TWO, group=group)
        with pytest.raises(rs.TransportError, match=message):
            out.sum().backward()

    rs.run_in_process(run, 2)


def check_two_steps(forward: Callable[..., torch.Tensor]) -> None:
    """`forward(x, weights, group)` is two products, computed in any way; compare with plain ones."""

    def run(group: Any) -> list[torch.Tensor | None]:
        weights = [
            torch.eye(4, dtype=torch.float64).requires_grad_(),
            filled(3, 4).requires_grad_(),
        ]
        for _ in range(2):
            forward(tokens(4).requires_grad_(), weights, group).sum().backward()
        return [weight.grad for weight in weights]

    one, other = (
        torch.eye(4, dtype=torch.float64).requires_grad_(),
        filled(3, 4).requires_grad_(),
    )
    (tokens(4) @ one.T @ other.T).sum().backward()
    for gradients in rs.run_in_process(run, 2):
        torch.testing.assert_close(gradients, [4 * one.grad, 4 * other.grad])  # two ranks, two steps


@pytest.mark.parametrize(("use_reentrant", "ranks"), [(True, (0, 1)), (False, (0, 1)), (False, (0,))])
def test_a_forward_that_runs_again_in_the_backward_pass(use_reentrant: bool, ranks: tuple[int, ...]) -> None:
    """With torch.utils.checkpoint; if the first pass is recorded too, only some ranks may use it."""

    def forward(x: torch.Tensor, weights: list[torch.Tensor], group: Any) -> torch.Tensor:
        for weight in weights:
            multiply = partial(rs.reproducible.linear, weight=weight, layout=TWO, group=group)
            x = checkpoint(multiply, x, use_reentrant=use_reentrant) if group.rank in ranks else multiply(x)
        return x

    check_two_steps(forward)


def test_a_rank_may_run_layers_without_gradients_more_often_than_others() -> None:
    def forward(x: torch.Tensor, weights: list[torch.Tensor], group: Any) -> torch.Tensor:
        for weight in weights:
            for _ in range(3 * group.rank):
                with torch.no_grad():
                    rs.reproducible.linear(x, weight, layout=TWO, group=group)
                rs.reproducible.linear(x, weight.detach(), layout=TWO, group=group)
            x = rs.reproducible.linear(x, weight, layout=TWO, group=group)
        return x

    check_two_steps(forward)


# One rank does something wrong


def test_a_refusal_on_one_rank_reaches_the_others_at_their_next_call() -> None:
    """The group stays usable, although one rank ran a layer that the other did not run."""

    def run(group: Any) -> None:
        weight = filled(3, 4).requires_grad_()
        x = tokens(4)[:, group.rank :]
        if group.rank == 1:
            with pytest.raises(rs.ShapeError, match="512 positions"):
                rs.reproducible.linear(x, weight, layout=TWO, group=group)
        else:
            out = rs.reproducible.linear(x, weight, layout=TWO, group=group)
            with pytest.raises(rs.TransportError, match=r"refused, on rank 1: ShapeError: x.shape=\(1, 511, 4\)"):
                out.sum().backward()
        rs.reproducible.linear(tokens(4), weight, layout=TWO, group=group).sum().backward()
        assert weight.grad is not None
        assert torch.equal(weight.grad, 2 * tokens(4)[0].sum(0).expand(3, 4))

    rs.run_in_process(run, 2)


@pytest.mark.parametrize(
    ("layer", "module", "function"), [("linear", "_ranks", "sum_over_tiles"), ("embedding", "_embedding", "all_to_all")]
)
def test_a_rank_that_fails_in_the_midst_of_a_gradient_tells_the_others(
    layer: str, module: str, function: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = importlib.import_module(f"ringspan.reproducible.{module}")
    compute = getattr(imported, function)

    def fail_on_one(transport: Transport, *args: Any) -> Any:
        if transport.rank == 1:
            raise MemoryError("no room")
        return compute(transport, *args)

    def run(group: Any) -> None:
        out = LAYERS[layer].ours(filled(3, 4).requires_grad_(), layout=TWO, group=group)
        told = pytest.raises(rs.TransportError, match="rank 1 failed: MemoryError: no room")
        with pytest.raises(MemoryError) if group.rank == 1 else told:
            out.sum().backward()

    monkeypatch.setattr(imported, function, fail_on_one)
    rs.run_in_process(run, 2)
