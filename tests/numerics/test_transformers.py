"""Models of transformers on ranks in threads: masks, caches, training. The oracle is the model itself, unmodified."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import (
    BertForSequenceClassification,
    BertModel,
    DynamicCache,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlamaModel,
    PreTrainedModel,
)

import ringspan as rs
from families import FAMILIES, MORE, VOCABULARY
from live import Live
from ringspan.adapters.transformers import Handle, parallelize

torch.set_num_threads(1)

TOLERANCE = 1e-5
GREEDY = {"do_sample": False, "pad_token_id": 0, "eos_token_id": None}
WITH_AND_WITHOUT_WINDOWS = ["Llama", "gpt-oss"]


def tokens(rows: int = 2, seq_len: int = 23, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (rows, seq_len), generator=torch.Generator().manual_seed(seed))


IDS = tokens()


def on_ranks(
    model: PreTrainedModel, fn: Callable[[PreTrainedModel, Handle, Any], Any], world_size: int = 3, **options: Any
) -> list[Any]:
    """fn(model, handle, group) on every rank, with a model of its own."""

    def run(group: Any) -> Any:
        mine = copy.deepcopy(model)
        with parallelize(mine, group, **options) as handle:
            return fn(mine, handle, group)

    return rs.run_in_process(run, world_size, timeout_s=120)


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def sharded_logits(model: PreTrainedModel, handle: Handle, group: Any, batch: dict[str, Any]) -> torch.Tensor:
    part = handle.shard(batch)
    with torch.no_grad():
        logits = model(**part).logits
    return rs.gather(logits, part["ringspan"].layout, group, dim=1)


# Generation


def generate(model: PreTrainedModel, prompt: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out = model.generate(
        prompt,
        **GREEDY | {"max_new_tokens": 12, "return_dict_in_generate": True, "output_logits": True} | options,
    )
    return out.sequences, torch.stack(out.logits, 1)


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
}


def run_way(model: PreTrainedModel, way: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    options = dict(way)
    prompt = options.pop("prompt")
    if options.pop("own_cache", False):
        options["past_key_values"] = DynamicCache()
    if options.pop("by_embeddings", False):
        options["inputs_embeds"] = model.get_input_embeddings()(prompt).detach()
    return generate(model, prompt, **options)


@pytest.mark.parametrize("name", WITH_AND_WITHOUT_WINDOWS)
def test_generate_in_many_ways(name: str) -> None:
    """The same tokens from the same logits, on every rank."""
    model = FAMILIES[name].make()
    expected = {way: run_way(model, options) for way, options in WAYS.items()}
    results = on_ranks(model, lambda mine, *_: {way: run_way(mine, options) for way, options in WAYS.items()})
    for found in results:
        for way, (sequences, logits) in expected.items():
            assert torch.equal(found[way][0], sequences), way
            assert difference(found[way][1], logits) < TOLERANCE, way


@pytest.mark.parametrize("name", WITH_AND_WITHOUT_WINDOWS)
def test_a_second_turn_on_the_same_cache(name: str) -> None:
    """With whole inputs and with new tokens only; then some tokens are taken back."""
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
    """`crop`, as assisted decoding uses it: the cache goes on as if they had never been there."""
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


def test_whole_sequences_without_gradients() -> None:
    """Logits of all tokens, of the last ones, and the loss; the model's own outputs in form and number."""
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
        return [cached.logits, kept.logits, loss.loss, loss.logits, cached.past_key_values.get_seq_length()]

    expected = look(model)
    real = mask.bool()
    for found in on_ranks(model, lambda mine, *_: look(mine)):
        assert difference(found[0][real], expected[0][real]) < TOLERANCE
        assert difference(found[3][real], expected[3][real]) < TOLERANCE
        assert difference(found[1], expected[1]) < TOLERANCE
        assert difference(found[2], expected[2]) < TOLERANCE
        assert found[4] == expected[4]


# Masks


def packed(lengths: list[int]) -> torch.Tensor:
    return torch.cat([torch.arange(length) for length in lengths])


def batches() -> dict[str, dict[str, torch.Tensor]]:
    left, right = torch.ones(2, 23, dtype=torch.long), torch.ones(2, 23, dtype=torch.long)
    left[1, :9] = 0
    right[0, 14:] = 0
    documents = torch.stack([packed([5, 11, 7]), packed([23])])
    return {
        "plain": {},
        "padding before": {"attention_mask": left},
        "padding behind": {"attention_mask": right},
        "documents": {"position_ids": documents},
        "the same documents": {"position_ids": packed([9, 14])[None]},
    }


@pytest.mark.parametrize("name", ["Mistral", "gpt-oss", "GPT-2", "BERT"])
def test_padding_and_documents_on_shards(name: str) -> None:
    model, ids = FAMILIES[name].make(), tokens()
    cases = {case: {"input_ids": ids, **batch} for case, batch in batches().items()}
    with torch.no_grad():
        expected = {case: model(**batch, **without_cache(model)).logits for case, batch in cases.items()}
    found = on_ranks(
        model,
        lambda mine, handle, group: {case: sharded_logits(mine, handle, group, batch) for case, batch in cases.items()},
    )
    for case, batch in cases.items():
        real = batch.get("attention_mask", torch.ones_like(ids)).bool()
        assert difference(found[0][case][real], expected[case][real]) < TOLERANCE, case


def without_cache(model: PreTrainedModel) -> dict[str, bool]:
    return {} if model.config.model_type == "bert" else {"use_cache": False}


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
    """Each part of a mask moves the logits by more than 100 times the tolerance, so no test passes without it."""
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
    """Two batches forward, then backward in one go."""
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
    """Layers are called again in the backward pass, each for its own batch."""
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


# Refusals


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(rs.UnsupportedError) as error:
        parallelize(FAMILIES[name].make(**options))
    return str(error.value)


def test_what_parallelize_refuses_says_where_and_why() -> None:
    assert refusal("Gemma 2") == (
        "model.layers.0.self_attn, model.layers.1.self_attn: softcap=50.0: scores are capped before the softmax, which "
        "no kernel here does"
    )
    assert "encoder with a decoder" in refusal("T5")
    assert "encoder with a decoder" in refusal("BART")
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    assert "model.rotary_emb: rope_type='dynamic' depends on the length" in refusal("Llama", rope_parameters=scaled)
    assert "output_router_logits=True" in refusal("Mixtral", output_router_logits=True)
    assert "output_attentions=True" in refusal("Llama", output_attentions=True, attn_implementation="eager")
    with pytest.raises(
        rs.UnsupportedError, match=r"GPT2LMHeadModel is random in training .transformer.drop and 6 more"
    ):
        parallelize(FAMILIES["GPT-2"].make(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1).train())
    with pytest.raises(rs.LayoutError, match=r"layout='zagzig'.*zigzag, contiguous, striped"):
        parallelize(FAMILIES["Llama"].make(), layout="zagzig")


def test_a_refused_model_is_as_it_was() -> None:
    model = FAMILIES["Gemma 2"].make()
    before = model.config._attn_implementation
    with pytest.raises(rs.UnsupportedError):
        parallelize(model)
    assert model.config._attn_implementation == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_masks_are_taken_from_what_a_model_says_far_out() -> None:
    """Chunks of 8192 tokens look causal on a few tokens; a window of 100,000 too."""
    with pytest.raises(rs.UnsupportedError, match=r"self_attn: its mask is neither .* \(such as chunked attention\)"):
        parallelize(MORE["Llama 4"].make(attention_chunk_size=8192))
    with parallelize(FAMILIES["Mistral"].make(sliding_window=100_000)) as handle:
        assert {layer.mask for layer in handle.layers} == {rs.sliding_window(99_999, 0)}


class Mixes(torch.nn.Module):
    """A projection that also looks at the token before."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.01 * x.roll(1, 1)


def test_whatever_else_joins_tokens_is_noticed() -> None:
    """A model nobody knows: tokens see each other outside of attention, or it has a pooler."""
    model = FAMILIES["Llama"].make()
    model.model.layers[1].mlp = Mixes(model.model.layers[1].mlp)
    with pytest.raises(rs.UnsupportedError, match=r"logits on shards of a small batch differ by .* joins tokens"):
        parallelize(model)
    parallelize(model, verify=False).restore()
    with pytest.raises(
        rs.UnsupportedError, match="BertModel fails on two ranks: UnsupportedError: BertModel returns pooler_output"
    ):
        parallelize(BertModel(FAMILIES["BERT"].make().config))
    with pytest.raises(rs.UnsupportedError, match="nothing that has a row for each token"):
        parallelize(BertForSequenceClassification(FAMILIES["BERT"].make().config))


def test_base_models_and_models_of_token_classes() -> None:
    ids = tokens()
    config = FAMILIES["Llama"].make(num_labels=5).config
    base, classes = LlamaModel(copy.deepcopy(config)).eval(), LlamaForTokenClassification(copy.deepcopy(config)).eval()
    labels = ids % 5
    with torch.no_grad():
        expected = base(ids).last_hidden_state
        expected_loss = classes(ids, labels=labels).loss
        for found in on_ranks(base, lambda mine, *_: mine(ids).last_hidden_state):
            assert difference(found, expected) < TOLERANCE
        batch = {"input_ids": ids, "labels": labels}
        for found in on_ranks(classes, lambda mine, handle, _: mine(**handle.shard(batch)).loss):
            torch.testing.assert_close(found, expected_loss)


REFUSED_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "gradients": ({"grad": True}, "with gradients: use model.*handle.shard"),
    "weights": ({"output_attentions": True}, "output_attentions=True: attention weights are never in one place"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states of whole sequences"),
    "unknown": ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q: what it does to a part .* is not known"),
    "tuple": ({"return_dict": False}, "return_dict=False"),
    "4-D mask": ({"attention_mask": torch.ones(2, 1, 23, 23)}, r"attention_mask.shape=\(2, 1, 23, 23\)"),
    "segments": ({"attention_mask": torch.arange(46).view(2, 23)}, "other values than 0 and 1"),
    "gap": (
        {"attention_mask": torch.tensor([[1, 0, 1] + [1] * 20] * 2), "use_cache": False},
        "padding between tokens",
    ),
    "static cache": ({"cache_implementation": "static"}, "static cache .* leave out cache_implementation"),
    "positions": ({"position_ids": torch.zeros(3, 2, 23, dtype=torch.long)}, "position_ids.shape"),
    "another cache": ({"past_key_values": "filled"}, "has 4 tokens, whole on this rank"),
    "kept": ({"logits_to_keep": torch.tensor([1])}, "logits_to_keep as a tensor"),
}


@pytest.mark.parametrize("what", REFUSED_CALLS)
def test_what_a_call_refuses(what: str) -> None:
    """All ranks say so, and the group is still usable."""
    options, message = REFUSED_CALLS[what]
    model = FAMILIES["Llama"].make()

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        asked = dict(options)
        if asked.get("past_key_values") == "filled":
            asked["past_key_values"] = DynamicCache()
            model(IDS[:, :4], past_key_values=asked["past_key_values"])
        call = partial(mine.generate, **GREEDY, max_new_tokens=2) if "cache_implementation" in asked else mine
        with torch.set_grad_enabled(asked.pop("grad", False)), pytest.raises(rs.RingspanError, match=message):
            call(IDS, **asked)
        return sharded_logits(mine, handle, group, {"input_ids": IDS})

    with torch.no_grad():
        expected = model(IDS).logits
    assert difference(on_ranks(model, run, 2)[0], expected) < TOLERANCE


def test_layers_are_not_called_behind_the_models_back() -> None:
    model = FAMILIES["Llama"].make()
    other = LlamaForCausalLM(model.config)  # shares its config
    with parallelize(model), torch.no_grad():
        with pytest.raises(rs.UnsupportedError, match="call the model itself, not a part of it"):
            model.model(IDS)
        with pytest.raises(rs.UnsupportedError, match="shares the config"):
            other(IDS)
        with pytest.raises(rs.UnsupportedError, match="parallelized already"):
            parallelize(model)


def test_two_models_at_once_and_one_restored() -> None:
    models = [FAMILIES[name].make() for name in ("Llama", "Mistral")]
    with torch.no_grad():
        expected = [model(IDS).logits for model in models]
        handles = [parallelize(model) for model in models]
        assert [difference(model(IDS).logits, x) < TOLERANCE for model, x in zip(models, expected, strict=True)]
        handles[0].restore()
        handles[0].restore()
        assert torch.equal(models[0](IDS).logits, expected[0])
        assert difference(models[1](IDS).logits, expected[1]) < TOLERANCE
        with parallelize(models[0]):
            assert difference(models[0](IDS).logits, expected[0]) < TOLERANCE
        handles[1].restore()


def test_ranks_that_disagree_are_named() -> None:
    model = FAMILIES["Llama"].make()

    def other_weights(group: Any) -> None:
        mine = copy.deepcopy(model)
        if group.rank == 1:
            mine.lm_head.weight.data[0, 0] += 1e-3
        parallelize(mine, group)

    with pytest.raises(rs.TransportError, match=r"weights: rank 0 has #\w+, rank 1 has #\w+"):
        rs.run_in_process(other_weights, 2)

    def other_batch(mine: PreTrainedModel, handle: Handle, group: Any) -> None:
        mine(**handle.shard({"input_ids": tokens(seed=group.rank)}))

    with pytest.raises(rs.TransportError, match=r"input_ids: rank 0 has .* #\w+, rank 1 has .* #\w+"):
        on_ranks(model, other_batch, 2)

    @torch.no_grad()
    def other_token(mine: PreTrainedModel, handle: Handle, group: Any) -> None:
        cache = DynamicCache()
        mine(IDS[:1], past_key_values=cache)
        mine(torch.tensor([[5 + group.rank]]), past_key_values=cache)

    with pytest.raises(rs.TransportError, match=r"input_ids: rank 0 has \[\[5\]\], rank 1 has \[\[6\]\]"):
        on_ranks(model, other_token, 2)


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


# Memory


LONG = 2048


def step_bytes(model: PreTrainedModel, handle: Handle, group: Any) -> int:
    """The most a training step has alive at once, besides the weights."""
    ids = tokens(1, LONG)
    model.requires_grad_(True)
    with torch.enable_grad():
        for _ in range(2):  # at first buffers are made that stay
            part = handle.shard({"input_ids": ids, "labels": ids})
            with Live() as live:
                model(**part).loss.backward()
    return live.peak


def kv_bytes(model: PreTrainedModel, handle: Handle, group: Any) -> int:
    """What a rank keeps of a long prompt."""
    cache = DynamicCache()
    with torch.no_grad():
        model(tokens(1, 4 * LONG), past_key_values=cache, logits_to_keep=1)
    return cache.layers[0].conversation.kv.nbytes


@pytest.mark.parametrize("measure", [step_bytes, kv_bytes])
def test_memory_falls_with_the_number_of_ranks(measure: Callable[..., int]) -> None:
    """Activations and gradients of a step, and keys and values: 1/P of one rank's, within 15 %."""
    model = FAMILIES["Llama"].make(max_position_embeddings=8192)
    (alone,) = on_ranks(model, measure, 1, algorithm="pass_kv")
    for world_size in (2, 4):
        for found in on_ranks(model, measure, world_size, algorithm="pass_kv"):
            assert found == pytest.approx(alone / world_size, rel=0.15)
