"""What does the adapter for transformers refuse?"""

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
    GenerationConfig,
    LlamaForCausalLM,
    LlamaForTokenClassification,
    LlamaModel,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
)

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize
from support.adapted import GREEDY, IDS, TOLERANCE, difference, on_ranks, sharded_logits, tokens
from support.families import FAMILIES, MORE


def refusal(name: str, **options: Any) -> str:
    with pytest.raises(rs.UnsupportedError) as error:
        parallelize(FAMILIES[name].make(**options))
    return str(error.value)


def test_what_parallelize_refuses_says_where_and_why() -> None:
    assert refusal("T5") == (
        "encoder.block.0.layer.0.SelfAttention, encoder.block.1.layer.0.SelfAttention … (6 layers): position_bias: a "
        "bias for relative positions is added to the scores, which no mask can express"
    )
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


def no_model() -> Any:
    return torch.nn.Linear(2, 2)


def without_weights() -> Any:
    with torch.device("meta"):
        return LlamaForCausalLM(FAMILIES["Llama"].make().config)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (no_model, "model is a Linear: give the model of transformers itself, before DDP, FSDP or compile"),
        (without_weights, "LlamaForCausalLM has weights on the meta device; load them first"),
    ],
)
def test_what_is_no_model_of_weights(make: Callable[[], Any], message: str) -> None:
    """One rank refuses, and the other learns it."""
    model = FAMILIES["Llama"].make()

    def run(group: Any) -> str:
        with pytest.raises(rs.UnsupportedError if group.rank == 1 else rs.TransportError) as error:
            parallelize(make() if group.rank == 1 else model, group, verify=False)
        return str(error.value)

    told = rs.run_in_process(run, 2, timeout_s=20)
    assert told == [f"the call was refused, on rank 1: UnsupportedError: {message}", message]


def test_a_refused_model_is_as_it_was() -> None:
    model = FAMILIES["T5"].make()
    before = model.config._attn_implementation
    with pytest.raises(rs.UnsupportedError):
        parallelize(model)
    assert model.config._attn_implementation == before
    assert not model._forward_hooks
    assert not model._forward_pre_hooks


def test_masks_are_taken_from_what_a_model_says_far_out() -> None:
    """Chunks of 8192 tokens look causal on a few tokens; so does a window of 100,000."""
    with parallelize(MORE["Llama 4"].make(attention_chunk_size=8192)) as handle:
        assert {layer.mask for layer in handle.layers} == {rs.chunks(8192) & rs.causal(), rs.causal()}
    with parallelize(FAMILIES["Mistral"].make(sliding_window=100_000)) as handle:
        assert {layer.mask for layer in handle.layers} == {rs.sliding_window(99_999, 0)}


class Mixes(torch.nn.Module):
    """A projection that also reads the previous token."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + 0.01 * x.roll(1, 1)


def test_whatever_else_joins_tokens_is_noticed() -> None:
    """An unknown model whose tokens mix outside of attention, or that has a pooler."""
    model = FAMILIES["Llama"].make()
    model.model.layers[1].mlp = Mixes(model.model.layers[1].mlp)
    with pytest.raises(rs.UnsupportedError, match=r"logits on shards of a small batch differ by .* mixes tokens"):
        parallelize(model)
    parallelize(model, verify=False).restore()
    with pytest.raises(
        rs.UnsupportedError, match="BertModel fails on two ranks: UnsupportedError: BertModel returns pooler_output"
    ):
        parallelize(BertModel(FAMILIES["BERT"].make().config))
    with pytest.raises(rs.UnsupportedError, match="no output with a row for each token"):
        parallelize(BertForSequenceClassification(FAMILIES["BERT"].make().config))


@pytest.mark.parametrize("name", ["Llama", "gpt-oss", "Qwen3-Next", "RoBERTa"])
def test_half_types_are_told_by_their_rounding(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another choice of experts because of rounding is no reason for a refusal; mixing tokens is."""
    monkeypatch.setattr(torch.backends.mkldnn, "enabled", False)  # bfloat16 may need missing instructions
    family = (FAMILIES | MORE)[name]
    model = family.make().to(torch.bfloat16)
    if family.refused:
        with pytest.raises(rs.UnsupportedError, match=family.refused):
            parallelize(model)
    else:
        parallelize(model).restore()


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
    "weights": ({"output_attentions": True}, "output_attentions=True: no rank has all attention weights"),
    "hidden states": ({"output_hidden_states": True}, "output_hidden_states of whole sequences"),
    "unknown": ({"cu_seq_lens_q": torch.tensor([0, 5])}, "cu_seq_lens_q: its effect on a shard .* is unknown"),
    "tuple": ({"return_dict": False}, "return_dict=False"),
    "4-D mask": ({"attention_mask": torch.ones(2, 1, 23, 23)}, r"attention_mask.shape=\(2, 1, 23, 23\)"),
    "segments": ({"attention_mask": torch.arange(46).view(2, 23)}, "values other than 0 and 1"),
    "gap": (
        {"attention_mask": torch.tensor([[1, 0, 1] + [1] * 20] * 2), "use_cache": False},
        "padding between tokens",
    ),
    "static cache": ({"cache_implementation": "static"}, "static cache .* leave out cache_implementation"),
    "positions": ({"position_ids": torch.zeros(3, 2, 23, dtype=torch.long)}, "position_ids.shape"),
    "another cache": ({"past_key_values": "filled"}, "has 4 tokens, whole on this rank"),
    "padding behind": (
        {"attention_mask": (torch.arange(23) < torch.tensor([[23], [14]])).long(), "logits_to_keep": 1},
        r"attention_mask\[1\] has padding after its tokens, .* put padding before the tokens",
    ),
    "packed": (
        {"position_ids": torch.arange(23)[None] % 9, "labels": IDS},
        "position_ids restart, .* pass use_cache=False to keep packed documents apart",
    ),
    "types": ({"token_type_ids": torch.zeros_like(IDS)}, "token_type_ids: a decoder may derive masks"),
    "labels of some": ({"labels": IDS, "logits_to_keep": 2}, "labels with"),
    "kept": ({"logits_to_keep": torch.tensor([1])}, "logits_to_keep as a tensor"),
    "kept but for the first": ({"logits_to_keep": -3}, "logits_to_keep=-3: .* use 1 or more, or 0 for all tokens"),
    "the same without a cache": ({"logits_to_keep": -3, "use_cache": False}, "logits_to_keep=-3: .* use 1 or more"),
}


@pytest.mark.parametrize("what", REFUSED_CALLS)
def test_what_a_call_refuses(what: str) -> None:
    """All ranks raise, and the group is usable."""
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


@torch.no_grad()
def test_rows_that_a_model_cannot_be_asked_for() -> None:
    """transformers ignores logits_to_keep silently, and generate() does not pass it to such a model."""
    model = LlamaModel(FAMILIES["Llama"].make().config).eval()
    assert torch.equal(model(IDS, logits_to_keep=1).last_hidden_state, model(IDS).last_hidden_state)
    expected = model(IDS).last_hidden_state

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> list[torch.Tensor]:
        for options in ({}, {"use_cache": False}):
            with pytest.raises(
                rs.UnsupportedError, match=r"logits_to_keep=1: LlamaModel.forward has no such .*; leave it out"
            ):
                mine(IDS, logits_to_keep=1, **options)
        return [mine(IDS, logits_to_keep=0, **options).last_hidden_state for options in ({}, {"use_cache": False})]

    for found in on_ranks(model, run, 2, verify=False, algorithm="pass_kv"):
        assert all(difference(x, expected) < TOLERANCE for x in found)


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


def test_what_would_be_wrong_in_silence() -> None:
    """A copy, gradients of inputs only, skipped layers, changed attention, a compiled model."""
    model, batch = FAMILIES["Llama"].make(), {"input_ids": IDS, "labels": IDS}
    with parallelize(model) as handle:
        with pytest.raises(rs.UnsupportedError, match="parallelize did not see this layer attend"):
            copy.deepcopy(model)(**handle.shard(batch))
        model.requires_grad_(False)
        learned = model.get_input_embeddings()(IDS).requires_grad_()
        with pytest.raises(rs.UnsupportedError, match="a forward on whole sequences with gradients"):
            model(inputs_embeds=learned)
        with pytest.raises(rs.ShapeError, match="input_ids is a list: give tensors"):
            handle.shard({"input_ids": IDS.tolist()})
        with pytest.raises(
            rs.UnsupportedError, match=r"num_hidden_layers=1: it was 2 .* leave out assistant_early_exit"
        ):
            model.generate(IDS[:1], **GREEDY, max_new_tokens=4, assistant_early_exit=1)
        model.config.num_hidden_layers = 2
        model.set_attn_implementation("sdpa")
        with pytest.raises(rs.UnsupportedError, match="was set to 'sdpa', which sees a rank's own tokens only"):
            model(**handle.shard(batch))
    model.compile(backend="eager")
    with pytest.raises(rs.UnsupportedError, match="is compiled already: parallelize it first"):
        parallelize(model)


def test_labels_of_padding_where_attention_makes_something_else_of_it() -> None:
    """In eager attention a padding query that sees no key gets the mean of all values."""
    mask = torch.ones_like(IDS)
    mask[1, :6] = 0
    batch = {"input_ids": IDS, "attention_mask": mask, "labels": IDS.masked_fill(mask == 0, -100)}
    model = FAMILIES["Llama"].make(attn_implementation="eager")
    with parallelize(model, verify=False) as handle:
        with pytest.raises(rs.UnsupportedError, match=r"labels\[1, 6\] .* attention_mask\[1, 5\]=0: .* label to -100"):
            handle.shard(batch)
        batch["labels"][1, 6] = -100
        found = model(**handle.shard(batch)).loss.detach()
    assert difference(found, model(**batch).loss.detach()) < TOLERANCE


class Adapted(torch.nn.Module):
    """A fresh LoRA: its output is 0, so its dropout does not show."""

    def __init__(self, inner: torch.nn.Linear, dropout: float) -> None:
        super().__init__()
        self.inner, self.dropout = inner, torch.nn.Dropout(dropout)
        self.a = torch.nn.Linear(inner.in_features, 2)
        self.b = torch.nn.Linear(2, inner.out_features, bias=False)
        torch.nn.init.zeros_(self.b.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.b(self.a(self.dropout(x)))


def test_dropout_that_does_not_show_yet() -> None:
    """Dropout of an adapter that is there already or comes later; harmless in evaluation or at p=0."""
    message = r"random in training \(model.layers.0.mlp.up_proj.dropout and 0 more .* or call model.eval\(\)"
    model, batch = FAMILIES["Llama"].make().train(), {"input_ids": IDS, "labels": IDS}
    mlp = model.model.layers[0].mlp
    with parallelize(model, verify=False) as handle:
        mlp.up_proj = Adapted(mlp.up_proj, 0.1)
        with pytest.raises(rs.UnsupportedError, match=message):
            model(**handle.shard(batch))
        model.eval()(**handle.shard(batch))
        mlp.up_proj.dropout.p = 0.0
        model.train()(**handle.shard(batch))
        mlp.up_proj.dropout.p = 0.1
    with pytest.raises(rs.UnsupportedError, match=message):
        parallelize(model, verify=False)


def test_a_closed_handle_shards_nothing() -> None:
    with parallelize(FAMILIES["Llama"].make(), verify=False) as handle:
        handle.shard({"input_ids": IDS})
    with pytest.raises(
        rs.UnsupportedError, match=r"closed handle: LlamaForCausalLM was restored, .* parallelize it again"
    ):
        handle.shard({"input_ids": IDS})


@torch.no_grad()
def test_a_layer_that_is_not_causal_or_no_longer() -> None:
    """Without padding transformers makes no mask and uses is_causal."""
    contrary = FAMILIES["Llama"].make()
    contrary.model.layers[1].self_attn.is_causal = False
    with pytest.raises(rs.UnsupportedError, match=r"layers.1.self_attn: is_causal=False, but its mask is causal\(\)"):
        parallelize(contrary)
    model = FAMILIES["Llama"].make()
    with parallelize(model, verify=False) as handle:
        model.config.is_causal = False
        for call in (partial(model, IDS), partial(model, **handle.shard({"input_ids": IDS}))):
            with pytest.raises(
                rs.UnsupportedError, match=r"layers.0.self_attn: scale, softcap, window, sinks, is_causal and heads"
            ):
                call()


def test_a_cache_is_cropped_by_a_negative_number() -> None:
    """As in transformers, where a positive number once was the length to keep."""
    model, cache = FAMILIES["Llama"].make(), DynamicCache()
    with parallelize(model, verify=False), torch.no_grad():
        model(IDS, past_key_values=cache)
        with pytest.raises(rs.CacheError, match=r"crop\(5\): .* to keep 5, crop\(5 - cache.get_seq_length\(\)\)"):
            cache.crop(5)
        cache.crop(5 - cache.get_seq_length())
    assert cache.get_seq_length() == 5


LIMITS: dict[str, Callable[[PreTrainedModel], dict[str, Any]]] = {
    "an option": lambda _: {"max_time": 1.0},
    "a config": lambda _: {"generation_config": GenerationConfig(max_time=1.0)},
    "the model's": lambda model: setattr(model.generation_config, "max_time", 1.0) or {},
    "a criterion": lambda _: {"stopping_criteria": StoppingCriteriaList([MaxTimeCriteria(1.0)])},
}


@pytest.mark.parametrize("limit", LIMITS)
def test_a_limit_of_time_is_refused(limit: str) -> None:
    """One rank refuses, and the other learns it; a restored model has its own generate() again."""
    model = FAMILIES["Llama"].make()

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> str:
        options = LIMITS[limit](mine) if group.rank == 1 else {}
        with pytest.raises(rs.RingspanError) as error:
            mine.generate(IDS, **GREEDY, max_new_tokens=1, **options)
        handle.restore()
        assert "generate" not in vars(mine)
        return str(error.value)

    for told in on_ranks(model, run, 2, verify=False, algorithm="pass_kv"):
        assert "max_time=1.0: each rank would stop by its own clock" in told


def test_the_generate_of_a_copy_is_its_own() -> None:
    model = FAMILIES["Llama"].make()
    with parallelize(model, verify=False):
        other = copy.deepcopy(model)
        with pytest.raises(rs.UnsupportedError, match="parallelize did not see this layer attend"):
            other.generate(IDS, **GREEDY, max_new_tokens=1)


@pytest.mark.parametrize("name", ["Llama", "BERT"])
def test_a_loss_that_is_not_a_mean_over_the_labels_of_a_batch(name: str) -> None:
    """num_items_in_batch is for models that use it: BERT accepts it and uses the mean."""
    model, batch = FAMILIES[name].make(), {"input_ids": IDS, "labels": IDS, "num_items_in_batch": 100}
    assert (model(**batch).loss == model(input_ids=IDS, labels=IDS).loss) == (name == "BERT")
    with parallelize(model) as handle:
        if name == "BERT":
            with pytest.raises(rs.UnsupportedError, match="BertForMaskedLM does not use it"):
                handle.shard(batch)
        else:
            assert difference(model(**handle.shard(batch)).loss.detach(), model_loss(name, batch)) < TOLERANCE


def test_a_number_of_items_that_is_a_tensor() -> None:
    """The Trainer moves it to each rank's device, so only its value is compared."""
    model, batch = FAMILIES["Llama"].make(), {"input_ids": IDS, "labels": IDS}

    def loss(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        number = torch.tensor(100) if group.rank else 100
        return mine(**handle.shard(batch | {"num_items_in_batch": number})).loss.detach()

    for found in on_ranks(model, loss, 2, verify=False, algorithm="pass_kv"):
        assert difference(found, model_loss("Llama", batch | {"num_items_in_batch": 100})) < TOLERANCE

    @torch.no_grad()
    def other(mine: PreTrainedModel, handle: Handle, group: Any) -> None:
        mine(**batch, num_items_in_batch=100 + group.rank)

    with pytest.raises(rs.TransportError, match="num_items_in_batch: rank 0 has 100, rank 1 has 101"):
        on_ranks(model, other, 2, verify=False, algorithm="pass_kv")


def model_loss(name: str, batch: dict[str, Any]) -> torch.Tensor:
    return FAMILIES[name].make()(**batch).loss.detach()


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
