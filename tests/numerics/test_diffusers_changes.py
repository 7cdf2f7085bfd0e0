"""Models that change: before a call, during it and between calls; adapters, processors and handles that come and go."""

import pytest

pytest.importorskip("diffusers", reason="needs diffusers: pip install '.[diffusers]'")

import copy
import logging
from types import SimpleNamespace
from typing import Any

import torch

from ringspan.adapters.diffusers import parallelize
from ringspan.errors import UnsupportedError
from support.diffused import Alone, error_of, on_ranks, outputs_on_ranks, run_alone, whole


def alone_with(alone: Alone, model: torch.nn.Module, **more: Any) -> Alone:
    arguments = alone.arguments | more
    with torch.no_grad():
        output = whole(copy.deepcopy(model)(**copy.deepcopy(arguments)))
    return alone._replace(model=model, arguments=arguments, output=output)


def test_a_lora_with_a_scale_which_the_forward_sets_in_its_modules():
    peft = pytest.importorskip("peft")
    alone = run_alone("wan")
    torch.manual_seed(3)
    config = peft.LoraConfig(r=4, target_modules=["to_q", "to_v"], init_lora_weights=False)
    alone.model.add_adapter(config)
    alone = alone_with(alone, alone.model, attention_kwargs={"scale": 0.3})
    for output in outputs_on_ranks(alone, 2):
        assert error_of(output, alone.output) <= 2e-6


def test_a_model_that_writes_to_its_arguments():
    alone = run_alone("wan")

    class Halving(type(alone.model)):
        def forward(self, hidden_states, **others):
            return super().forward(hidden_states.mul_(0.5), **others)

    alone.model.__class__ = Halving
    alone = alone_with(alone, alone.model)

    def run(model, group):
        with parallelize(model, group), torch.no_grad():
            return whole(model(**copy.deepcopy(alone.arguments)))

    for output in on_ranks(alone, 2, run):
        assert error_of(output, alone.output) <= 2e-6


class Averaging:
    """Attention beside a mean over all tokens."""

    def __call__(self, attn: Any, hidden_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        q, k, v = (
            x(hidden_states).unflatten(-1, (attn.heads, -1)).transpose(1, 2) for x in (attn.to_q, attn.to_k, attn.to_v)
        )
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return attn.to_out[0](out + hidden_states.mean(1, keepdim=True))


def test_a_processor_of_attention_that_is_replaced_after_the_model_was_learned():
    alone = run_alone("wan")

    def run(model, group):
        with parallelize(model, group), torch.no_grad():
            model(**alone.arguments)
            model.blocks[1].attn1.processor = Averaging()
            model(**alone.arguments)

    with pytest.raises(UnsupportedError, match=r"blocks\.1\.attn1 joins tokens"):
        on_ranks(alone, 2, run)


def test_a_model_that_is_parallelized_already():
    alone = run_alone("wan")

    def run(model, group):
        with parallelize(model, group):
            with pytest.raises(UnsupportedError, match="parallelized already"):
                parallelize(model, group)
            with torch.no_grad():
                before = whole(model(**alone.arguments))
        with parallelize(model, group), torch.no_grad():
            return before, whole(model(**alone.arguments))

    for before, after in on_ranks(alone, 2, run):
        assert error_of(before, alone.output) <= 2e-6
        assert torch.equal(before, after)


def test_a_transformer_that_stands_in_two_places_of_a_pipeline():
    alone = run_alone("wan")

    def run(model, group):
        pipe = SimpleNamespace(components={"transformer": model, "transformer_2": model})
        with parallelize(pipe, group) as handle, torch.no_grad():
            return whole(model(**alone.arguments)), list(handle.plans)

    for output, names in on_ranks(alone, 2, run):
        assert names == ["transformer"]
        assert error_of(output, alone.output) <= 2e-6


def test_an_argument_that_is_an_object_with_state():
    alone = run_alone("wan")

    class Cache:
        pass

    with pytest.raises(UnsupportedError, match=r"attention_kwargs\.cache .* is a Cache"):
        outputs_on_ranks(alone_with(alone, alone.model, attention_kwargs={"cache": Cache()}), 2)


def test_a_model_that_was_compiled():
    alone = run_alone("wan")
    with pytest.raises(UnsupportedError, match="is compiled already"):
        parallelize(torch.compile(alone.model, backend="eager"))


def test_a_mask_that_hides_nothing_and_one_that_does():
    """A model leaves the first one out, so that its blocks have other arguments."""
    alone = run_alone("lumina2_padded")
    visible = alone.arguments | {"encoder_attention_mask": torch.ones_like(alone.arguments["encoder_attention_mask"])}
    with torch.no_grad():
        expected = whole(alone.model(**visible))

    def run(model, group):
        with parallelize(model, group), torch.no_grad():
            return whole(model(**visible)), whole(model(**alone.arguments))

    for first, second in on_ranks(alone, 2, run):
        assert error_of(first, expected) <= 2e-6
        assert error_of(second, alone.output) <= 2e-6


def test_what_a_model_logs_is_logged_once(caplog):
    alone = run_alone("wan")

    class Logging(type(alone.model)):
        def forward(self, *args, **kwargs):
            diffusers_logger.warning("a warning of the model")
            return super().forward(*args, **kwargs)

    diffusers_logger = logging.getLogger("diffusers")
    diffusers_logger.addHandler(caplog.handler)
    alone.model.__class__ = Logging
    Logging.__module__ = "diffusers.models"
    try:
        outputs_on_ranks(alone, 2)
    finally:
        diffusers_logger.removeHandler(caplog.handler)
    assert [record.message for record in caplog.records] == ["a warning of the model"] * 2
