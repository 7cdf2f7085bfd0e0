"""Ranks that do not mean the same forward: an error on all of them that names the rank, never a wrong video."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

from collections.abc import Callable
from typing import Any

import torch

from ringspan.adapters.diffusers import parallelize
from ringspan.errors import LayoutError, RingspanError, TransportError, UnsupportedError
from support.diffused import on_ranks, run_alone


def errors_of(name: str, change: Callable[[Any, dict[str, Any], int], Any]) -> list[Exception]:
    """What each of two ranks raises when it calls the model after change(model, arguments, rank)."""
    alone = run_alone(name)

    def forward(model: Any, group: Any) -> Exception:
        arguments = dict(alone.arguments)
        with torch.no_grad(), parallelize(model, group, example=alone.arguments):
            change(model, arguments, group.rank)
            with pytest.raises((RingspanError, OSError)) as raised:
                model(**arguments)
        return raised.value

    return on_ranks(alone, 2, forward)


@pytest.mark.parametrize(
    ("argument", "other"),
    [
        ("hidden_states", torch.randn(2, 4, 3, 10, 14)),
        ("timestep", torch.tensor([500, 301])),
        ("encoder_hidden_states", torch.randn(2, 12, 16)),
    ],
)
def test_another_argument_on_one_rank(argument: str, other: torch.Tensor) -> None:
    def change(model: Any, arguments: dict[str, Any], rank: int) -> None:
        if rank == 1:
            arguments[argument] = other

    for error in errors_of("wan", change):
        assert isinstance(error, TransportError)
        assert f"{argument}: rank 0 has" in str(error)
        assert "give every rank the same noise" in str(error)


def test_other_weights_on_one_rank() -> None:
    alone = run_alone("wan")

    def forward(model: Any, group: Any) -> str:
        with torch.no_grad():
            next(model.parameters())[:] += group.rank
        with pytest.raises(TransportError) as raised:
            parallelize(model, group)
        return str(raised.value)

    for message in on_ranks(alone, 2, forward):
        assert "weights: rank 0 has" in message


def test_a_rank_that_raises_in_a_block_tells_the_other() -> None:
    def change(model: Any, arguments: dict[str, Any], rank: int) -> None:
        def fail(*_: Any) -> None:
            raise OSError("the disk is full")

        if rank == 1:
            model.blocks[1].register_forward_pre_hook(fail)

    first, second = errors_of("wan", change)
    assert isinstance(second, OSError)
    assert isinstance(first, TransportError)
    assert "rank 1: OSError: the disk is full" in str(first)


def test_a_rank_with_another_module() -> None:
    def change(model: Any, arguments: dict[str, Any], rank: int) -> None:
        if rank == 1:
            model.blocks = model.blocks[1:]

    for error in errors_of("wan", change):
        assert isinstance(error, TransportError)
        assert "changes of its modules: rank 0 has 0, rank 1 has 1" in str(error)


def test_a_rank_that_leaves_a_block_out() -> None:
    from diffusers import WanTransformer3DModel

    def change(model: Any, arguments: dict[str, Any], rank: int) -> None:
        model.__class__ = LeavingOut
        model.is_odd = rank == 1

    class LeavingOut(WanTransformer3DModel):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.blocks = self.blocks[1:] if self.is_odd else self.blocks
            return super().forward(*args, **kwargs)

    first, second = errors_of("wan", change)
    assert isinstance(second, UnsupportedError)
    assert "blocks.1 is called where blocks.0 was when the model was learned" in str(second)
    assert isinstance(first, TransportError)


def test_step_caches_are_refused() -> None:
    from diffusers import FirstBlockCacheConfig

    alone = run_alone("wan")
    alone.model.enable_cache(FirstBlockCacheConfig(threshold=0.2))
    with pytest.raises(UnsupportedError, match=r"step cache.*disable_cache"):
        on_ranks(alone, 2, lambda model, group: parallelize(model, group) and model(**alone.arguments))


def test_fewer_tokens_than_ranks() -> None:
    alone = run_alone("wan")
    few = alone.arguments | {"hidden_states": alone.arguments["hidden_states"][:, :, :1, :2, :4]}

    with pytest.raises(LayoutError, match="2 tokens on 3 ranks"):
        on_ranks(alone, 3, lambda model, group: parallelize(model, group, verify=False) and model(**few))


def test_another_attention_backend_is_refused() -> None:
    """One that joins tokens without scaled_dot_product_attention."""

    def forward(model: Any, group: Any) -> Any:
        attn = model.blocks[1].attn1
        attn.processor = Eager()
        with parallelize(model, group), torch.no_grad():
            return model(**alone.arguments)

    alone = run_alone("wan")
    with pytest.raises(UnsupportedError, match=r"blocks\.1\.attn1 joins tokens"):
        on_ranks(alone, 2, forward)


class Eager:
    """Attention by matrix products."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = attn.to_q(hidden_states), attn.to_k(hidden_states), attn.to_v(hidden_states)
        return attn.to_out[0]((q @ k.mT).softmax(-1) @ v)


def test_a_block_called_by_itself() -> None:
    alone = run_alone("wan")

    def forward(model: Any, group: Any) -> None:
        with parallelize(model, group):
            model.blocks[0](torch.zeros(1, 4, 96))

    with pytest.raises(UnsupportedError, match="outside of the model's forward"):
        on_ranks(alone, 2, forward)


def test_models_and_options_that_are_none() -> None:
    with pytest.raises(UnsupportedError, match="ModuleList"):
        parallelize(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedError, match="give a transformer or a pipeline"):
        parallelize("wan")
