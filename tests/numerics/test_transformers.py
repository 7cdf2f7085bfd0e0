"""Models of transformers on ranks in threads: masks, training, families, memory. The oracle is the model itself."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    PreTrainedModel,
)

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize
from ringspan.bench.memory import LiveStorages
from support.adapted import IDS, TOLERANCE, difference, generate, on_ranks, sharded_logits, tokens
from support.families import FAMILIES, MORE, table

# Masks


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def batches() -> dict[str, dict[str, torch.Tensor]]:
    left, right = torch.ones(2, 23, dtype=torch.long), torch.ones(2, 23, dtype=torch.long)
    left[1, :9] = 0
    right[0, 14:] = 0
    none = torch.ones(2, 23, dtype=torch.long)
    none[0] = 0
    documents = torch.stack([packed([5, 11, 7]), packed([23])])
    return {
        "plain": {},
        "padding before": {"attention_mask": left},
        "padding behind": {"attention_mask": right},
        "nothing but padding": {"attention_mask": none},
        "documents": {"position_ids": documents},
        "the same documents": {"position_ids": packed([9, 14])[None]},
    }


@pytest.mark.parametrize("name", ["Mistral", "gpt-oss", "GPT-2", "BERT"])
def test_padding_and_documents_on_shards(subtests: pytest.Subtests, name: str) -> None:
    """Padding queries are compared with the model too: where they see tokens and where they see none."""
    model, ids = FAMILIES[name].make(), tokens()
    cases = {case: {"input_ids": ids, **batch} for case, batch in batches().items()}
    with torch.no_grad():
        expected = {case: model(**batch, **without_cache(model)).logits for case, batch in cases.items()}
    found = on_ranks(
        model,
        lambda mine, handle, group: {case: sharded_logits(mine, handle, group, batch) for case, batch in cases.items()},
    )
    for case in cases:
        with subtests.test(f"{case}"):
            assert difference(found[0][case], expected[case]) < TOLERANCE, case


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    return {} if model.config.model_type == "bert" else {"use_cache": False}


@pytest.mark.parametrize("dtype", [torch.bool, torch.float32, torch.bfloat16])
@torch.no_grad()
def test_a_mask_may_have_any_type(dtype: torch.dtype) -> None:
    model, mask = FAMILIES["Llama"].make(), batches()["padding before"]["attention_mask"]
    batch = {"input_ids": tokens(), "attention_mask": mask.to(dtype)}
    expected = model(**batch).logits

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> list[torch.Tensor]:
        with pytest.raises(rs.UnsupportedError, match="attention_mask has values other than 0 and 1"):
            mine(tokens(), attention_mask=2.0 * mask.to(torch.bfloat16))
        return [sharded_logits(mine, handle, group, batch), mine(**batch).logits]

    for found in on_ranks(model, run, 2, verify=False, algorithm="pass_kv"):
        assert all(difference(x[mask.bool()], expected[mask.bool()]) < TOLERANCE for x in found)


def drop_window(adapter: Any, run: Any) -> None:
    drop_mask(run, rs.causal())


def drop_causal(adapter: Any, run: Any) -> None:
    drop_mask(run, rs.full())


def drop_mask(run: Any, mask: rs.Mask) -> None:
    for layer in run.layers.values():
        run.masks[(layer.mask, layer.keeps_documents)] = mask


def drop_sinks(adapter: Any, run: Any) -> None:
    for layer in adapter.model.model.layers:
        layer.self_attn.sinks.data.fill_(-1e9)


def drop_padding(adapter: Any, run: Any) -> None:
    run.padding = None


def drop_documents(adapter: Any, run: Any) -> None:
    run.documents = None


@pytest.mark.parametrize(
    ("name", "case", "drop"),
    [
        ("Llama", "plain", drop_causal),
        ("Mistral", "plain", drop_window),
        ("gpt-oss", "plain", drop_sinks),
        ("Llama", "padding before", drop_padding),
        ("BERT", "padding behind", drop_padding),
        ("Llama", "documents", drop_documents),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_dropped_shows(name: str, case: str, drop: Callable[..., None]) -> None:
    """Each part of a mask changes the logits by more than 100 times the tolerance, so that tests can fail."""
    model, batch = FAMILIES[name].make(), {"input_ids": tokens(), **batches()[case]}
    real = batch.get("attention_mask", torch.ones_like(batch["input_ids"])).bool()
    with torch.no_grad():
        expected = model(**batch, **without_cache(model)).logits

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        part = handle.shard(batch)
        drop(handle._adapter, part["ringspan"])
        with torch.no_grad():
            return rs.gather(mine(**part).logits, part["ringspan"].layout, group, dim=1)

    assert difference(on_ranks(model, run)[0][real], expected[real]) > 100 * TOLERANCE


# Training


def losses_and_gradients(model: PreTrainedModel, batches: list[dict[str, Any]]) -> list[torch.Tensor]:
    """Two batches forward, then both backward."""
    loss = sum(model(**batch).loss for batch in batches)
    assert isinstance(loss, torch.Tensor)
    loss.backward()
    grads = [x.grad for x in model.parameters() if x.grad is not None]
    model.zero_grad()
    assert len(grads) == len(list(model.parameters()))
    return [loss.detach(), *grads]


@pytest.mark.parametrize("name", ["Llama", "GPT-2"])
@pytest.mark.parametrize("is_reentrant", [None, False, True])
def test_training_with_and_without_checkpoints(name: str, is_reentrant: bool | None) -> None:
    """Layers run again in the backward pass, each for its own batch."""
    model = FAMILIES[name].make().train()
    if is_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
    whole = []
    for seed, number in ((1, None), (2, 50)):
        ids = tokens(seed=seed)
        mask = torch.ones_like(ids)
        mask[seed - 1, -4 * seed :] = 0
        labels = ids.masked_fill(mask == 0, -100)
        whole.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
        if number is not None:
            whole[-1]["num_items_in_batch"] = number
    expected = losses_and_gradients(model, [batch | {"use_cache": False} for batch in whole])
    found = on_ranks(
        model, lambda mine, handle, _: losses_and_gradients(mine, [handle.shard(batch) for batch in whole])
    )
    for loss, *_ in found:
        assert difference(loss, expected[0]) < TOLERANCE
    for i, expected_grad in enumerate(expected[1:], start=1):
        torch.testing.assert_close(sum(rank[i] for rank in found), expected_grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Llama", "Mistral"])
def test_labels_beside_padding(name: str) -> None:
    """Labels at padding positions, and labels of first tokens that follow padding, as collators make them."""
    model, ids = FAMILIES[name].make(), tokens()
    padding = [batches()[case]["attention_mask"] for case in ("padding behind", "padding before")]
    labels = [ids, ids.masked_fill(padding[1] == 0, -100)]
    whole = [
        {"input_ids": ids, "attention_mask": mask, "labels": own} for mask, own in zip(padding, labels, strict=True)
    ]
    expected = losses_and_gradients(model, whole)
    found = on_ranks(
        model, lambda mine, handle, _: losses_and_gradients(mine, [handle.shard(batch) for batch in whole])
    )
    assert difference(found[0][0], expected[0]) < TOLERANCE
    for i, grad in enumerate(expected[1:], start=1):
        torch.testing.assert_close(sum(rank[i] for rank in found), grad, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous", "striped"])
@pytest.mark.parametrize("algorithm", ["pass_q", "all_gather"])
def test_layouts_and_algorithms(layout: str, algorithm: str) -> None:
    model, batch = FAMILIES["Gemma 3"].make(), {"input_ids": tokens(1, 2), "labels": tokens(1, 2)}
    longer = {"input_ids": tokens(), "labels": tokens()}
    expected = [model(**x).loss.detach() for x in (batch, longer)]
    for found in on_ranks(
        model,
        lambda mine, handle, _: [mine(**handle.shard(x)).loss.detach() for x in (batch, longer)],
        layout=layout,
        algorithm=algorithm,
    ):
        torch.testing.assert_close(found, expected)


# More families


@pytest.mark.parametrize("name", [name for name, family in MORE.items() if not family.refused])
def test_more_families(name: str) -> None:
    model, batch = MORE[name].make(), {"input_ids": IDS, "labels": IDS}
    expected = model(**batch)
    sequences, logits = generate(model, IDS)

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> tuple[Any, ...]:
        return mine(**handle.shard(batch)).loss.detach(), *generate(mine, IDS)

    for found in on_ranks(model, run, 2):
        torch.testing.assert_close(found[0], expected.loss.detach())
        assert torch.equal(found[1], sequences)
        assert difference(found[2], logits) < TOLERANCE


@pytest.mark.parametrize("name", [name for name, family in MORE.items() if family.refused])
def test_more_families_that_are_refused(name: str) -> None:
    with pytest.raises(rs.UnsupportedError, match=MORE[name].refused):
        parallelize(MORE[name].make())


def test_the_table_of_the_document() -> None:
    document = Path(__file__).parents[2] / "docs" / "transformers.md"
    assert table() in document.read_text()


# Memory


LONG = 2048


def step_bytes(model: PreTrainedModel, handle: Handle, group: Any) -> int:
    """Peak bytes alive in a training step, ring buffers included, without weights and their gradients."""
    ids = tokens(1, LONG)
    model.requires_grad_(True)
    with torch.enable_grad(), LiveStorages() as live:
        model(**handle.shard({"input_ids": ids, "labels": ids})).loss.backward()
    return live.peak - sum(x.nbytes for x in model.parameters())


def kv_bytes(model: PreTrainedModel, handle: Handle, group: Any) -> int:
    """Bytes of the cache that a rank keeps of a long prompt."""
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens(1, 4 * LONG), past_key_values=cache, logits_to_keep=1)
    return cache.layers[0].conversation.kv.nbytes


@pytest.mark.parametrize("measure", [step_bytes, kv_bytes])
def test_memory_falls_with_the_number_of_ranks(subtests: pytest.Subtests, measure: Callable[..., int]) -> None:
    """Activations and gradients of a step, and keys and values: 1/P of one rank's, within 15 %."""
    model = FAMILIES["Llama"].make(max_position_embeddings=8192)
    (alone,) = on_ranks(model, measure, 1, algorithm="pass_kv")
    for world_size in (2, 4):
        with subtests.test(world_size=world_size):
            for found in on_ranks(model, measure, world_size, algorithm="pass_kv"):
                assert found == pytest.approx(alone / world_size, rel=0.15)
