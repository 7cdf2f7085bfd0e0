"""What does a failed forward leave behind, and what do ranks learn of each other's failures?"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize
from ringspan.adapters.transformers.turns import Keep
from ringspan.cache import _layer as inference
from support.adapted import IDS, TOLERANCE, difference, on_ranks
from support.families import FAMILIES


def test_a_rank_that_fails_within_a_layer_leaves_the_cache_as_it_was() -> None:
    model = FAMILIES["Llama"].make()
    with parallelize(model), torch.no_grad():
        cache = DynamicCache()
        model(IDS, past_key_values=cache)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="broken"):
            model(IDS[:, :3], past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 23
        found = model(IDS[:, :3], past_key_values=cache).logits
    whole = DynamicCache()
    with torch.no_grad():
        model(IDS, past_key_values=whole)
        assert difference(found, model(IDS[:, :3], past_key_values=whole).logits) < TOLERANCE


def fail(*_: object) -> None:
    raise RuntimeError("broken")


@torch.no_grad()
def test_a_failure_of_all_ranks_leaves_the_group_usable() -> None:
    """A prompt longer than a model's table of positions."""
    model = FAMILIES["GPT-2"].make(n_positions=16)
    expected = model(IDS[:, :16]).logits

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        for call in (lambda: mine(IDS), lambda: mine(**handle.shard({"input_ids": IDS}))):
            with pytest.raises((IndexError, rs.TransportError), match="index out of range"):
                call()
        return mine(IDS[:, :16]).logits

    for found in on_ranks(model, run, 2):
        assert difference(found, expected) < TOLERANCE


@torch.no_grad()
def test_a_failure_of_one_rank_is_told_to_the_others() -> None:
    model = FAMILIES["Llama"].make()

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> list[str]:
        if group.rank == 1:
            mine.model.layers[0].input_layernorm.register_forward_pre_hook(fail)
        told = []
        for call in (lambda: mine(IDS), lambda: mine(**handle.shard({"input_ids": IDS}))):
            with pytest.raises(RuntimeError) as error:
                call()
            told.append(str(error.value))
        return told

    for told in on_ranks(model, run, 3)[::2]:
        assert all("rank 1: RuntimeError: broken" in text for text in told)


def no_room(*_: object) -> None:
    raise torch.OutOfMemoryError("no room")


@torch.no_grad()
def test_outputs_that_were_not_returned_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The layers succeed, but there is no memory for the logits of all tokens: the prompt can be given again."""
    model, whole, failing = FAMILIES["Llama"].make(), Keep.whole, {0, 1}
    expected = model(IDS).logits

    def whole_or_fail(self: Keep, part: torch.Tensor, group: Any) -> torch.Tensor:
        if group.rank in failing:
            failing.remove(group.rank)
            no_room()
        return whole(self, part, group)

    def run(mine: PreTrainedModel, *_: Any) -> tuple[list[int], torch.Tensor]:
        cache = DynamicCache()
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            mine(IDS, past_key_values=cache)
        lengths = [cache.get_seq_length()]
        found = mine(IDS, past_key_values=cache).logits
        return [*lengths, cache.get_seq_length()], found

    monkeypatch.setattr(Keep, "whole", whole_or_fail)
    for lengths, found in on_ranks(model, run, 2, verify=False, algorithm="pass_kv"):
        assert lengths == [0, 23]
        assert difference(found, expected) < TOLERANCE


def interrupt(*_: object) -> None:
    raise KeyboardInterrupt


AFTERWARDS: dict[str, Callable[[Any], None]] = {
    "crop": lambda cache: cache.crop(-5),
    "reorder": lambda cache: cache.reorder_cache(torch.tensor([1, 1])),
    "select": lambda cache: cache.batch_select_indices(torch.tensor([1, 0])),
    "repeat": lambda cache: cache.batch_repeat_interleave(1),
    "reset": lambda cache: cache.reset(),
    "copy": lambda cache: cache.layers.__setitem__(slice(None), copy.deepcopy(cache).layers),
    "nothing": lambda _: None,
}


@pytest.mark.parametrize("what", AFTERWARDS)
@torch.no_grad()
def test_a_cache_after_an_interrupt(what: str) -> None:
    """Hooks do not run then, so the turn is still open: the next use of the cache ends it."""
    model = FAMILIES["Llama"].make()

    def converse(model: PreTrainedModel, *_: Any, is_interrupted: bool = True) -> tuple[int, torch.Tensor]:
        cache = DynamicCache()
        model(IDS, past_key_values=cache)
        if is_interrupted:
            hook = model.model.layers[1].mlp.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                model(IDS[:, :1], past_key_values=cache)
            hook.remove()
        AFTERWARDS[what](cache)
        return cache.get_seq_length(), model(IDS[:, 3:9], past_key_values=cache).logits

    num_columns, expected = converse(model, is_interrupted=False)
    for found in on_ranks(model, converse, 2, verify=False, algorithm="pass_kv"):
        assert found[0] == num_columns
        assert difference(found[1], expected) < TOLERANCE


@pytest.mark.parametrize("num_before", [0, 4])
@torch.no_grad()
def test_an_interrupted_decoder_forgets_its_encoder_only_if_it_was_new(num_before: int) -> None:
    model = FAMILIES["BART"].make()

    def converse(model: PreTrainedModel, *_: Any, is_interrupted: bool = True) -> list[torch.Tensor]:
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())

        def step(start: int, stop: int) -> torch.Tensor:
            return model(IDS, decoder_input_ids=IDS[:, start:stop], past_key_values=cache).logits

        before = [step(0, num_before)] if num_before else []
        if is_interrupted:
            hook = model.model.decoder.layers[1].fc1.register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt):
                step(num_before, num_before + 2)
            hook.remove()
        if num_before:
            cache.crop(-1)
        first = max(0, num_before - 1)
        after = [step(first, first + 3)]
        cache.reset()
        return [*before, *after, step(2, 5)]

    expected = converse(model, is_interrupted=False)
    for found in on_ranks(model, converse, 2, verify=False, algorithm="pass_kv"):
        for x, y in zip(found, expected, strict=True):
            assert difference(x, y) < TOLERANCE


@torch.no_grad()
def test_a_cache_that_lost_tokens_behind_its_back_is_refused() -> None:
    model, cache = FAMILIES["Llama"].make(), DynamicCache()
    with parallelize(model, verify=False):
        model(IDS, past_key_values=cache)
        cache.layers[0].conversation.kv.truncate(1, 20)
        for new in (IDS[:, :1], IDS[:, :3]):
            with pytest.raises(rs.CacheError, match=r"starts\[1\]=23: positions 20 to 22 would be missing"):
                model(new, past_key_values=cache)


@torch.no_grad()
def test_a_layer_that_is_skipped_leaves_the_cache_as_it_was() -> None:
    """As models with layerdrop or early exits might do it."""
    model, cache, whole = FAMILIES["Llama"].make(), DynamicCache(), DynamicCache()
    plain = copy.deepcopy(model)
    layer = model.model.layers[1]
    with parallelize(model):
        model(IDS, past_key_values=cache)
        layer.forward = lambda x, *_, **__: x
        for _ in range(2):
            with pytest.raises(rs.CacheError, match=r"commit without layers \[1\]"):
                model(IDS[:, :3], past_key_values=cache)
        del layer.forward
        assert cache.get_seq_length() == 23
        cache.crop(-4)
        found = model(IDS[:, :3], past_key_values=cache).logits
    plain(IDS, past_key_values=whole)
    whole.crop(-4)
    assert difference(found, plain(IDS[:, :3], past_key_values=whole).logits) < TOLERANCE


@torch.no_grad()
def test_a_failure_within_attention_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the ranks agree on a turn: they are in step afterwards, and the cause is raised."""
    model, write = FAMILIES["Llama"].make(), inference._write
    expected = model(IDS).logits
    failing = {1}

    def write_or_fail(turn: Any, *args: Any) -> None:
        if turn.state.rank in failing:
            failing.clear()
            no_room()
        write(turn, *args)

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> tuple[str, torch.Tensor]:
        cache = DynamicCache()
        with pytest.raises(RuntimeError) as error:
            mine(IDS, past_key_values=cache)
        assert cache.layers[0].conversation.run is None
        return str(error.value), mine(IDS, past_key_values=cache).logits

    monkeypatch.setattr(inference, "_write", write_or_fail)
    told, found = zip(*on_ranks(model, run, 2, verify=False, algorithm="pass_kv"), strict=True)
    assert told == ("the call was refused, on rank 1: OutOfMemoryError: no room", "no room")
    assert all(difference(x, expected) < TOLERANCE for x in found)


def test_what_fails_while_a_model_is_verified_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "_write", no_room)
    with pytest.raises(rs.UnsupportedError, match="LlamaForCausalLM fails on two ranks: OutOfMemoryError: no room"):
        parallelize(FAMILIES["Llama"].make())
