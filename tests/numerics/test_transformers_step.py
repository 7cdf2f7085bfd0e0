"""Sequences of different lengths step through a model together, and each gets what it gets alone."""

import random

import pytest
import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

from ringspan.errors import CacheError, RingspanError, ShapeError
from support.adapted import on_ranks

SIZES = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.2,
}
CLOSE = {"atol": 2e-4, "rtol": 1e-4}


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def gemma() -> Gemma3ForCausalLM:
    """With a window of 8 in its first layer."""
    torch.manual_seed(1)
    kinds = ["sliding_attention", "full_attention"]
    return Gemma3ForCausalLM(
        Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=8, layer_types=kinds, query_pre_attn_scalar=8)
    ).eval()


def alone(model, tokens) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([tokens])).logits[0, -1]


@pytest.mark.parametrize("make", [llama, gemma])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_sequences_that_join_and_leave_get_what_they_get_alone(make, world_size):
    model = make()

    def run(mine, handle, group):
        rng, cache = random.Random(0), handle.cache()
        held: dict[int, list[int]] = {}
        compared = []
        for number in range(14):
            if number % 3 == 0:
                held[number] = []  # joins
            if number == 8:
                cache.drop(0)
                del held[0]
            new = {}
            for sequence, tokens in held.items():
                count = rng.choice([1, 1, 7, 19]) if number % 2 or not tokens else 1
                if rng.random() < 0.8 or not new or not tokens:
                    new[sequence] = [rng.randrange(90) for _ in range(count)]
            for sequence, tokens in new.items():
                held[sequence] += tokens
            logits = handle.step(cache, new)
            assert logits.keys() == new.keys()
            compared += [(logits[sequence], [*held[sequence]]) for sequence in new]
            assert cache.lengths == {sequence: len(tokens) for sequence, tokens in held.items()}
        return compared

    for compared in on_ranks(model, run, world_size, verify=False):
        for found, tokens in compared:
            torch.testing.assert_close(found, alone(model, tokens), **CLOSE)


def test_a_truncated_sequence_goes_on_from_there():
    model = llama()

    def run(mine, handle, group):
        cache = handle.cache()
        handle.step(cache, {3: range(20), 5: range(4)})
        cache.truncate(3, 11)
        return handle.step(cache, {3: [70, 71], 5: [8]}), handle.last_turn

    for found, turn in on_ranks(model, run, 2, verify=False):
        torch.testing.assert_close(found[3], alone(model, [*range(11), 70, 71]), **CLOSE)
        torch.testing.assert_close(found[5], alone(model, [0, 1, 2, 3, 8]), **CLOSE)
        assert turn.algorithm in ("pass_kv", "pass_q", "one_shot")


def test_rows_of_a_batch_can_go_on_as_sequences_and_not_back():
    model = llama()

    def run(mine, handle, group):
        cache = handle.cache()
        with torch.no_grad():
            mine(torch.tensor([[1, 2, 3], [4, 5, 6]]), past_key_values=cache)
        found = handle.step(cache, {1: [7], 0: [8, 9]})
        with pytest.raises(RingspanError, match=r"handle\.step"), torch.no_grad():
            mine(torch.tensor([[1], [2]]), past_key_values=cache)
        with pytest.raises(CacheError, match=r"handle\.step"):
            cache.crop(-1)
        return found

    for found in on_ranks(model, run, 2, verify=False):
        torch.testing.assert_close(found[1], alone(model, [4, 5, 6, 7]), **CLOSE)
        torch.testing.assert_close(found[0], alone(model, [1, 2, 3, 8, 9]), **CLOSE)


@pytest.mark.parametrize(("new", "error"), [({}, ShapeError), ({0: []}, ShapeError), ({0: [90]}, ShapeError)])
def test_a_bad_step_is_refused_and_the_next_one_is_right(new, error):
    model = llama()

    def run(mine, handle, group):
        cache = handle.cache()
        handle.step(cache, {0: [1, 2, 3]})
        with pytest.raises(error):
            handle.step(cache, new)
        return handle.step(cache, {0: [4]})

    for found in on_ranks(model, run, 1, verify=False):
        torch.testing.assert_close(found[0], alone(model, [1, 2, 3, 4]), **CLOSE)


def test_a_foreign_cache_is_refused():
    def run(mine, handle, group):
        with pytest.raises(CacheError, match=r"handle\.cache"):
            handle.step(DynamicCache(), {0: [1]})

    on_ranks(llama(), run, 1, verify=False)


def test_int8_storage_is_smaller_and_close():
    model = llama()

    def run(mine, handle, group):
        plain, small = handle.cache(), handle.cache(storage="int8")
        for cache in (plain, small):
            logits = handle.step(cache, {0: range(40)})[0]
        return plain.nbytes, small.nbytes, logits, plain.bytes_per_token

    for plain, small, logits, per_token in on_ranks(model, run, 2, verify=False):
        assert small < plain
        assert plain % per_token == 0
        assert per_token == 2 * 2 * (8 + 8) * 4
        exact = alone(model, list(range(40)))
        assert 0 < (logits - exact).abs().max() < 0.1 * exact.abs().max()


@pytest.mark.parametrize("storage", [None, "int8"])
def test_sequences_saved_on_two_ranks_go_on_on_three_beside_others(tmp_path, storage):
    model = llama()

    def save(mine, handle, group):
        cache = handle.cache(storage=storage)
        handle.step(cache, {0: range(30), 1: range(50, 60), 2: [5] * 9})
        cache.save(tmp_path, sequences=[1])
        return handle.step(cache, {1: [3, 4]})[1]

    def load(mine, handle, group):
        cache = handle.cache(storage=storage)
        handle.step(cache, {7: [1, 2, 3]})
        cache.load(tmp_path, numbers={1: 4})
        assert cache.lengths == {7: 3, 4: 10}
        with pytest.raises(CacheError, match="drop them first"):
            cache.load(tmp_path, numbers={1: 4})
        return handle.step(cache, {4: [3, 4], 7: [9]})

    (wanted, _) = on_ranks(model, save, 2, verify=False)
    for found in on_ranks(model, load, 3, verify=False):
        torch.testing.assert_close(found[4], wanted, **CLOSE)
        if storage is None:
            torch.testing.assert_close(found[4], alone(model, [*range(50, 60), 3, 4]), **CLOSE)
            torch.testing.assert_close(found[7], alone(model, [1, 2, 3, 9]), **CLOSE)
