"""generate() and whole sequences on ranks in threads. The oracle is the model itself, unmodified."""

import copy
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

from support.adapted import GREEDY, TOLERANCE, check_ways, difference, generate, on_ranks, tokens
from support.families import FAMILIES

WITH_AND_WITHOUT_WINDOWS = ["Llama", "gpt-oss"]


def padded() -> dict[str, torch.Tensor]:
    ids = tokens(3, 17)
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :11] = 0
    return {"prompt": ids.masked_fill(mask == 0, 0), "attention_mask": mask}


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": tokens()},
    "one token on three ranks": {"prompt": tokens(1, 1)},
    "left padding": padded(),
    "chunks": {"prompt": tokens(1, 19), "prefill_chunk_size": 5},
    "chunks with padding": padded() | {"prefill_chunk_size": 7},
    "without a cache": {"prompt": tokens(2, 7), "use_cache": False, "max_new_tokens": 4},
    "beams": {"prompt": tokens(), "num_beams": 3, "num_return_sequences": 2},
    "beams with padding": padded() | {"num_beams": 3, "length_penalty": 0.5},
    "a cache of one's own": {"prompt": tokens(), "own_cache": True},
    "embeddings": {"prompt": tokens(), "by_embeddings": True},
    "prompt lookup": {"prompt": tokens(1, 5).repeat(1, 4), "prompt_lookup_num_tokens": 3},
    "an assistant": {"prompt": tokens(1), "assisted": True},
}


def run_way(model: PreTrainedModel, way: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    options = dict(way)
    prompt = options.pop("prompt")
    if options.pop("own_cache", False):
        options["past_key_values"] = DynamicCache()
    if options.pop("by_embeddings", False):
        options["inputs_embeds"] = model.get_input_embeddings()(prompt).detach()
    if options.pop("assisted", False):
        options["assistant_model"] = FAMILIES["Llama"].make()
    return generate(model, prompt, **options)


@pytest.mark.parametrize("name", WITH_AND_WITHOUT_WINDOWS)
def test_generate_in_many_ways(name: str) -> None:
    check_ways(FAMILIES[name].make(), WAYS, run_way)


@pytest.mark.parametrize("name", WITH_AND_WITHOUT_WINDOWS)
def test_a_second_turn_on_the_same_cache(name: str) -> None:
    """With whole inputs and with new tokens only; then some tokens are cropped."""
    model, more = FAMILIES[name].make(), tokens(3, 6, seed=1)

    def converse(model: PreTrainedModel) -> list[torch.Tensor]:
        first = model.generate(**prompt(padded()), **GREEDY, max_new_tokens=5, return_dict_in_generate=True)
        cache = first.past_key_values
        whole = torch.cat([first.sequences, more], 1)
        mask = torch.cat([padded()["attention_mask"], torch.ones(3, whole.shape[1] - 17, dtype=torch.long)], 1)
        second = model.generate(
            whole, attention_mask=mask, past_key_values=cache, **GREEDY, max_new_tokens=5, return_dict_in_generate=True
        )
        length = cache.get_seq_length()
        new = torch.cat([second.sequences[:, length:], more], 1)
        mask = torch.cat([mask, torch.ones(3, length + new.shape[1] - mask.shape[1], dtype=torch.long)], 1)
        with torch.no_grad():
            third = model(new, attention_mask=mask, past_key_values=cache, position_ids=positions_of(mask, new)).logits
        return [first.sequences, second.sequences, third, torch.tensor(cache.get_seq_length())]

    expected = converse(model)
    for found in on_ranks(model, lambda mine, *_: converse(mine)):
        assert all(torch.equal(found[i], expected[i]) for i in (0, 1, 3))
        assert difference(found[2], expected[2]) < TOLERANCE


def prompt(way: dict[str, Any]) -> dict[str, Any]:
    return {"inputs": way["prompt"], "attention_mask": way["attention_mask"]}


def positions_of(mask: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]


def test_tokens_are_taken_back() -> None:
    """`crop`, as assisted decoding uses it: the cache continues as if the tokens had never been there."""
    model, ids = FAMILIES["Llama"].make(), tokens(2, 20)

    def roll_back(model: PreTrainedModel) -> torch.Tensor:
        cache = DynamicCache()
        with torch.no_grad():
            model(ids[:, :15], past_key_values=cache)
            cache.crop(-6)
            return model(ids[:, 9:], past_key_values=cache).logits

    expected = roll_back(model)
    for found in on_ranks(model, lambda mine, *_: roll_back(mine)):
        assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("name", WITH_AND_WITHOUT_WINDOWS)
def test_a_prefix_is_kept_and_copied(name: str) -> None:
    """Two questions after one prompt, each on a copy of its cache, then one on the cache itself."""
    model, ids = FAMILIES[name].make(), tokens(2, 29)

    def ask(model: PreTrainedModel) -> list[torch.Tensor]:
        prefix = DynamicCache()
        with torch.no_grad():
            model(ids[:, :20], past_key_values=prefix)
        caches = [copy.deepcopy(prefix), copy.deepcopy(prefix), prefix]
        prompts = [ids, torch.cat([ids[:, :20], ids[:, 3:7]], 1), ids[:, :24]]
        answers = [generate(model, x, past_key_values=cache) for x, cache in zip(prompts, caches, strict=True)]
        return [x for answer in answers for x in answer]

    expected = ask(model)
    for found in on_ranks(model, lambda mine, *_: ask(mine), verify=False, algorithm="pass_kv"):
        assert all(torch.equal(x, y) for x, y in zip(found[::2], expected[::2], strict=True))
        assert all(difference(x, y) < TOLERANCE for x, y in zip(found[1::2], expected[1::2], strict=True))


def test_whole_sequences_without_gradients() -> None:
    """Logits of all tokens, of the last ones, and the loss; outputs like the model's own."""
    model, ids = FAMILIES["Gemma 3"].make(), tokens()
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    batch = {"input_ids": ids, "attention_mask": mask}
    labels = ids.masked_fill(mask == 0, -100)
    labels[1, 6] = -100

    @torch.no_grad()
    def look(model: PreTrainedModel) -> list[Any]:
        cached, kept = model(**batch), model(**batch, logits_to_keep=4)
        loss = model(**batch, labels=labels)
        packed = model(ids, position_ids=torch.arange(23)[None] % 9, labels=ids, use_cache=False).loss
        return [cached.logits, kept.logits, loss.loss, loss.logits, cached.past_key_values.get_seq_length(), packed]

    expected = look(model)
    real = mask.bool()
    for found in on_ranks(model, lambda mine, *_: look(mine)):
        assert difference(found[0][real], expected[0][real]) < TOLERANCE
        assert difference(found[3][real], expected[3][real]) < TOLERANCE
        assert difference(found[1], expected[1]) < TOLERANCE
        assert difference(found[2], expected[2]) < TOLERANCE
        assert found[4] == expected[4]
        assert difference(found[5], expected[5]) < TOLERANCE
