"""Llama 4, which attends within chunks and scales queries by position: unmodified on one device, and on ranks."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize
from ringspan.adapters.transformers.layers import QueryScaling, find_scaling
from ringspan.adapters.transformers.masks import find_mask
from support.adapted import IDS, TOLERANCE, difference, generate, on_ranks, sharded_logits, tokens
from support.families import MORE

LLAMA = MORE["Llama 4"]
CPU = torch.device("cpu")


def padded() -> dict[str, torch.Tensor]:
    """Chunks begin at a row's first token."""
    mask = torch.ones(2, 23, dtype=torch.long)
    mask[1, :9] = 0
    return {"input_ids": tokens(), "attention_mask": mask}


CASES = {
    "plain": {"input_ids": tokens()},
    "padded": padded(),
    "packed": {"input_ids": tokens(1), "position_ids": (torch.arange(23) % 11)[None]},
}


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
def test_logits(layout: str) -> None:
    model = LLAMA.make()
    with torch.no_grad():
        expected = {case: model(**batch, use_cache=False).logits for case, batch in CASES.items()}
    run = lambda mine, handle, group: {  # noqa: E731
        case: sharded_logits(mine, handle, group, batch) for case, batch in CASES.items()
    }
    for found in on_ranks(model, run, layout=layout):
        for case, batch in CASES.items():
            real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
            assert difference(found[case][real], expected[case][real]) < TOLERANCE, case


def test_losses_and_gradients() -> None:
    model, batch = LLAMA.make().train(), {"input_ids": IDS, "labels": IDS}
    loss = model(**batch, use_cache=False).loss
    loss.backward()
    grads = [x.grad for x in model.parameters()]
    model.zero_grad()

    def run(mine: PreTrainedModel, handle: Handle, _: Any) -> list[torch.Tensor]:
        loss = mine(**handle.shard(batch)).loss
        loss.backward()
        return [loss.detach(), *(torch.zeros_like(x) if x.grad is None else x.grad for x in mine.parameters())]

    ranks = on_ranks(model, run)
    torch.testing.assert_close(ranks[0][0], loss.detach())
    for i, grad in enumerate(grads, start=1):
        torch.testing.assert_close(sum(found[i] for found in ranks), grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_prefill_and_decode(world_size: int) -> None:
    """Left padding, several chunks, and more tokens on the same cache, many at once and one by one."""
    model = LLAMA.make()
    mask = torch.cat([padded()["attention_mask"], torch.ones(2, 10, dtype=torch.long)], 1)

    def converse(model: PreTrainedModel) -> list[torch.Tensor]:
        first = generate(model, tokens(), attention_mask=padded()["attention_mask"], past_key_values=DynamicCache())
        cache, logits = DynamicCache(), []
        with torch.no_grad():
            for start, stop in ((0, 20), (20, 28), (28, 29), (29, 30)):
                new = tokens(2, 33)[:, start:stop]
                part = model(new, attention_mask=mask[:, :stop], past_key_values=cache).logits
                logits.append(part[0] if start < 9 else part)
        return [*first, *logits]

    expected = converse(model)
    for found in on_ranks(model, lambda mine, *_: converse(mine), world_size):
        assert torch.equal(found[0], expected[0])
        assert all(difference(x, y) < TOLERANCE for x, y in zip(found[1:], expected[1:], strict=True))


def test_generate_with_the_cache_that_transformers_makes() -> None:
    model = LLAMA.make()
    sequences, logits = generate(model, IDS)
    for found in on_ranks(model, lambda mine, *_: generate(mine, IDS)):
        assert torch.equal(found[0], sequences)
        assert difference(found[1], logits) < TOLERANCE


def drop_chunks(handle: Handle) -> None:
    change(handle, chunk=None, mask=rs.causal())


def count_chunks_from_padding(handle: Handle) -> None:
    change(handle, chunk=None)


def scale_by_shards(handle: Handle) -> None:
    change(handle, scaling=None)


def change(handle: Handle, **fields: Any) -> None:
    layers = handle._adapter.found.layers
    layers |= {module: replace(layer, **fields) for module, layer in layers.items()}


@pytest.mark.parametrize("drop", [drop_chunks, count_chunks_from_padding, scale_by_shards], ids=lambda x: x.__name__)
def test_what_is_dropped_shows(drop: Any) -> None:
    """Each part changes the logits by more than 100 times the tolerance, so that the tests above can fail."""
    model, real = LLAMA.make(), padded()["attention_mask"].bool()
    with torch.no_grad():
        expected = model(**padded(), use_cache=False).logits

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        drop(handle)
        return sharded_logits(mine, handle, group, padded())

    assert difference(on_ranks(model, run)[0][real], expected[real]) > 100 * TOLERANCE


def test_its_own_scaling_is_off_while_it_is_parallelized_only() -> None:
    model = LLAMA.make()
    layer = model.model.layers[3].self_attn
    assert find_scaling(layer) == QueryScaling(7.0, 0.5)
    assert all(find_scaling(other.self_attn) is None for other in model.model.layers[:3])
    with parallelize(model):
        assert not layer.attn_temperature_tuning
    assert layer.attn_temperature_tuning
    with pytest.raises(rs.LayoutError):
        parallelize(model, layout="none")
    assert layer.attn_temperature_tuning


def test_chunks_that_are_found_and_masks_that_are_none(subtests: pytest.Subtests) -> None:
    """Chunks of any size, also beyond the tokens that are looked at without a hint."""

    def chunk(size: int, is_causal: bool = True) -> Any:
        return lambda _b, _h, q, kv: (q // size == kv // size) & ((kv <= q) | (not is_causal))

    for size in (1, 6, 8192, 2**20, 2**20 + 1):
        with subtests.test(f"{size}"):
            found = find_mask(chunk(size), 0, CPU)
            assert found is not None
            assert found.mask == (rs.chunks(size) & rs.causal() if size > 1 else rs.sliding_window(0, 0))
    found = find_mask(chunk(5, is_causal=False), 0, CPU)
    assert found is not None
    assert found == (rs.chunks(5), 5)
    found = find_mask(chunk(3_000_000), 3_000_000, CPU)
    assert found is not None
    assert found.chunk == 3_000_000
    shifted = lambda b, h, q, kv: chunk(6)(b, h, q + 2, kv + 2)  # noqa: E731
    assert find_mask(shifted, 0, CPU) is None
    assert find_mask(lambda b, h, q, kv: chunk(6)(b, h, q, kv) | (kv < 2), 0, CPU) is None
