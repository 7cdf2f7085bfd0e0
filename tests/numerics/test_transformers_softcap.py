"""Gemma 2, whose scores are capped: unmodified on one device, and on ranks."""

from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize, reference
from support.adapted import GREEDY, IDS, TOLERANCE, difference, generate, on_ranks, sharded_logits, tokens
from support.families import FAMILIES

GEMMA = FAMILIES["Gemma 2"]


def left_padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, :9] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


@pytest.mark.parametrize("softcap", [1.5, 50.0, None])
def test_what_parallelize_finds(softcap: float | None) -> None:
    with parallelize(GEMMA.make(attn_logit_softcapping=softcap)) as handle:
        assert {layer.softcap for layer in handle.layers} == {softcap}
        assert {str(layer.mask) for layer in handle.layers} == {"sliding_window(4, 0)", "causal()"}


def test_logits_of_padded_and_packed_batches() -> None:
    model, documents = GEMMA.make(), (torch.arange(23) % 11)[None]
    cases = {"padded": left_padded(), "packed": {"input_ids": tokens(1), "position_ids": documents}}
    with torch.no_grad():
        expected = {case: model(**batch, use_cache=False).logits for case, batch in cases.items()}
    run = lambda mine, handle, group: {  # noqa: E731
        case: sharded_logits(mine, handle, group, batch) for case, batch in cases.items()
    }
    for found in on_ranks(model, run):
        real = left_padded()["attention_mask"].bool()
        assert difference(found["padded"][real], expected["padded"][real]) < TOLERANCE
        assert difference(found["packed"], expected["packed"]) < TOLERANCE


def test_losses_and_gradients() -> None:
    model, batch = GEMMA.make().train(), {"input_ids": IDS, "labels": IDS}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    grads = [x.grad for x in model.parameters()]
    model.zero_grad()

    def run(mine: PreTrainedModel, handle: Handle, _: Any) -> list[torch.Tensor]:
        loss = mine(**handle.shard(batch)).loss
        loss.backward()
        return [loss.detach(), *(x.grad for x in mine.parameters())]

    ranks = on_ranks(model, run)
    torch.testing.assert_close(ranks[0][0], loss.detach())
    for i, grad in enumerate(grads, start=1):
        torch.testing.assert_close(sum(found[i] for found in ranks), grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_prefill_and_decode(world_size: int) -> None:
    """Left padding, more tokens than the window, and a second turn on the same cache."""
    model, more = GEMMA.make(), tokens(2, 6, seed=1)

    def converse(model: PreTrainedModel) -> list[torch.Tensor]:
        first = generate(model, tokens(), attention_mask=left_padded()["attention_mask"])
        cache = DynamicCache()
        one = model.generate(IDS, **GREEDY, max_new_tokens=5, past_key_values=cache)
        with torch.no_grad():
            second = model(torch.cat([one[:, cache.get_seq_length() :], more], 1), past_key_values=cache).logits
        return [*first, one, second]

    expected = converse(model)
    for found in on_ranks(model, lambda mine, *_: converse(mine), world_size):
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[2], expected[2])
        assert difference(found[1], expected[1]) < TOLERANCE
        assert difference(found[3], expected[3]) < TOLERANCE


def test_a_softcap_that_is_dropped_shows() -> None:
    """The logits change by more than 100 times the tolerance, so that the tests above can fail."""
    model = GEMMA.make()
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits

    uncapped = GEMMA.make(attn_logit_softcapping=None)
    with torch.no_grad():
        assert difference(uncapped(IDS, use_cache=False).logits, expected) > 100 * TOLERANCE


def test_a_softcap_that_changes_later_is_refused() -> None:
    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        mine.model.layers[1].self_attn.attn_logit_softcapping = 3.0
        return sharded_logits(mine, handle, group, {"input_ids": IDS})

    with pytest.raises(
        rs.UnsupportedError, match=r"layers\.1\.self_attn: scale, softcap, .*3\.0.* but parallelize found"
    ):
        on_ranks(GEMMA.make(), run, 2)


def test_all_sizes_of_the_config_are_crossed() -> None:
    """A window of 4096 is checked with 8 in its place."""
    model = GEMMA.make(sliding_window=4096)
    assert [size.name for size in reference.find_sizes(model.config)] == ["sliding_window"]
    with parallelize(model) as handle:
        assert {str(layer.mask) for layer in handle.layers} == {"sliding_window(4095, 0)", "causal()"}


def test_a_gemma_loaded_by_our_name() -> None:
    """Its own attention until then is eager: transformers has no sdpa for it."""
    with parallelize(GEMMA.make(attn_implementation="ringspan")) as handle:
        assert {layer.softcap for layer in handle.layers} == {1.5}
