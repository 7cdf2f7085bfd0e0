"""Models with an encoder and a decoder on ranks in threads: two sequences, each sharded on its own."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
from transformers import BartForCausalLM, DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import ringspan as rs
from ringspan.adapters.transformers import Handle, parallelize
from ringspan.adapters.transformers.wiring import tell_positions
from support.adapted import IDS, TOLERANCE, check_ways, difference, generate, sharded_logits, tokens
from support.adapted import on_ranks as on_ranks_that_verify
from support.families import FAMILIES

LABELS = tokens(2, 13, seed=1)


# Verifying a model and measuring the machine once is enough; comparing the families does both.
ONCE_IS_ENOUGH: dict[str, Any] = {"verify": False, "algorithm": "pass_kv"}
on_ranks = partial(on_ranks_that_verify, **ONCE_IS_ENOUGH)


def bart(**options: Any) -> PreTrainedModel:
    return FAMILIES["BART"].make(**options)


def mask(shape: torch.Size, *padding: tuple[int, slice]) -> torch.Tensor:
    made = torch.ones(shape, dtype=torch.long)
    for row, columns in padding:
        made[row, columns] = 0
    return made


def new_cache() -> EncoderDecoderCache:
    return EncoderDecoderCache(DynamicCache(), DynamicCache())


BEFORE, BEHIND = mask(IDS.shape, (1, slice(0, 9))), mask(IDS.shape, (0, slice(14, None)))
BATCHES: dict[str, dict[str, torch.Tensor]] = {
    "plain": {},
    "padding before": {"attention_mask": BEFORE},
    "padding behind": {"attention_mask": BEHIND},
    "padding on both sides": {"attention_mask": BEFORE & BEHIND},
    "tokens at other places": {"attention_mask": mask(IDS.shape, (0, slice(5, None)), (1, slice(0, 9)))},
    "nothing but padding": {"attention_mask": mask(IDS.shape, (1, slice(None)))},
    "padding of the decoder": {"decoder_attention_mask": mask(LABELS.shape, (1, slice(0, 4)))},
    "padding of both": {
        "attention_mask": BEHIND,
        "decoder_attention_mask": mask(LABELS.shape, (0, slice(8, None))),
    },
}


def whole(case: str) -> dict[str, torch.Tensor]:
    return {"input_ids": IDS, "decoder_input_ids": LABELS, **BATCHES[case]}


def real(case: str) -> torch.Tensor:
    return BATCHES[case].get("decoder_attention_mask", torch.ones_like(LABELS)).bool()


# Training


def test_padding_on_shards_and_over_a_cache() -> None:
    """Logits of shards and of whole sequences, with and without a cache, and encoder states."""
    model = bart()
    with torch.no_grad():
        expected = {case: model(**whole(case)) for case in BATCHES}

    @torch.no_grad()
    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> dict[str, Any]:
        return {
            case: [
                sharded_logits(mine, handle, group, whole(case)),
                mine(**whole(case), use_cache=False).logits,
                *(mine(**whole(case))[name] for name in ("logits", "encoder_last_hidden_state")),
            ]
            for case in BATCHES
        }

    for found in on_ranks(model, run):
        for case, (*logits, encoded) in found.items():
            for way in logits:
                assert difference(way[real(case)], expected[case].logits[real(case)]) < TOLERANCE, case
            assert difference(encoded, expected[case].encoder_last_hidden_state) < TOLERANCE, case


def drop_causal(run: Any) -> None:
    for layer in run.layers.values():
        run.masks[(layer.mask, layer.keeps_documents)] = rs.full()


def drop_padding_of_the_encoder(run: Any) -> None:
    run.source.padding = None


def drop_padding_in_cross_attention(run: Any) -> None:
    for layer in run.layers.values():
        if layer.side == "encoder":
            run.source.seen_by(layer)  # keep it alive
    run.source.padding = None


def drop_padding_of_the_decoder(run: Any) -> None:
    run.padding = None


@pytest.mark.parametrize(
    ("case", "drop"),
    [
        ("plain", drop_causal),
        ("padding behind", drop_padding_of_the_encoder),
        ("padding before", drop_padding_in_cross_attention),
        ("padding of the decoder", drop_padding_of_the_decoder),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_is_dropped_shows(case: str, drop: Callable[[Any], None]) -> None:
    model = bart()
    with torch.no_grad():
        expected = model(**whole(case)).logits

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        part = handle.shard(whole(case))
        drop(part["ringspan"])
        with torch.no_grad():
            return rs.gather(mine(**part).logits, part["ringspan"].layout, group, dim=1)

    found = on_ranks(model, run, 2)[0]
    assert difference(found[real(case)], expected[real(case)]) > 100 * TOLERANCE


@pytest.mark.parametrize("side", ["own", "encoder"])
@torch.no_grad()
def test_positions_that_are_counted_by_part_show(side: str) -> None:
    """The model would count by itself; without `verify` only this check notices."""
    model = bart()

    def tell_one(wiring: Any, counters: dict[Any, str]) -> Any:
        return tell_positions(wiring, {module: told for module, told in counters.items() if told != side})

    with mock.patch("ringspan.adapters.transformers.handle.tell_positions", tell_one):
        found = on_ranks(model, lambda *on: sharded_logits(*on, whole("plain")), 2)[0]
    assert difference(found, model(**whole("plain")).logits) > 100 * TOLERANCE
    with (
        mock.patch("ringspan.adapters.transformers.reference.tell_positions", tell_one),
        pytest.raises(
            rs.UnsupportedError, match=r"encoder_last_hidden_state|logits on shards .* positions that it counts"
        ),
    ):
        parallelize(model)


@pytest.mark.parametrize(("is_reentrant", "layout"), [(None, "contiguous"), (False, "striped"), (True, "zigzag")])
def test_training(is_reentrant: bool | None, layout: str) -> None:
    """Loss and gradients, with decoder_input_ids made from labels, with and without checkpoints."""
    model = bart().train()
    if is_reentrant is not None:
        model.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model.enable_input_require_grads()
    batch = {"input_ids": IDS, "attention_mask": BEFORE, "labels": LABELS.masked_fill(LABELS % 5 == 0, -100)}

    def learn(model: PreTrainedModel, batch: dict[str, Any]) -> list[torch.Tensor]:
        loss = model(**batch).loss
        loss.backward()
        grads = [x.grad for x in model.parameters()]
        model.zero_grad()
        return [loss.detach(), *grads]

    expected = learn(model, batch)
    found = on_ranks(model, lambda mine, handle, _: learn(mine, handle.shard(batch)), layout=layout)
    for loss, *_ in found:
        assert difference(loss, expected[0]) < TOLERANCE
    for i, grad in enumerate(expected[1:], start=1):
        torch.testing.assert_close(sum(rank[i] for rank in found), grad, rtol=1e-5, atol=1e-5)


def test_sequences_shorter_than_the_number_of_ranks() -> None:
    model = bart()
    batch = {"input_ids": IDS[:, :2], "labels": LABELS[:, :1]}
    expected = model(**batch).loss.detach()
    for found in on_ranks(model, lambda mine, handle, _: mine(**handle.shard(batch)).loss.detach()):
        assert difference(found, expected) < TOLERANCE


def test_the_decoder_as_a_model_of_its_own() -> None:
    """It takes no position_ids, but its table of positions does; its labels are not shifted."""
    model = BartForCausalLM(bart().config).eval()
    batch = {"input_ids": IDS, "labels": IDS}
    expected = model(**batch).loss.detach()
    sequences, logits = generate(model, IDS)

    def run(mine: PreTrainedModel, handle: Handle, _: Any) -> tuple[Any, ...]:
        return mine(**handle.shard(batch)).loss.detach(), *generate(mine, IDS)

    for found in on_ranks(model, run):
        assert difference(found[0], expected) < TOLERANCE
        assert torch.equal(found[1], sequences)
        assert difference(found[2], logits) < TOLERANCE


# generate()


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "one token on three ranks": {"prompt": IDS[:, :1]},
    "padding before": {"attention_mask": BEFORE},
    "padding behind": {"attention_mask": BEHIND},
    "without a cache": {"attention_mask": BEHIND, "use_cache": False, "max_new_tokens": 4},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "beams with padding": {"attention_mask": BEFORE & BEHIND, "num_beams": 3, "length_penalty": 0.5},
    "a prompt of the decoder": {"decoder_input_ids": LABELS, "attention_mask": BEHIND},
    "prompts with padding": {
        "decoder_input_ids": LABELS,
        "decoder_attention_mask": mask(LABELS.shape, (0, slice(0, 5))),
        "attention_mask": BEHIND,
    },
    "a cache of one's own": {"own_cache": True},
    "embeddings": {"by_embeddings": True},
    "encoded before": {"by_outputs": True, "attention_mask": BEHIND},
}


def run_way(model: PreTrainedModel, way: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    options = dict(way)
    prompt = options.pop("prompt", IDS)
    if options.pop("own_cache", False):
        options["past_key_values"] = new_cache()
    if options.pop("by_embeddings", False):
        options["inputs_embeds"], prompt = model.get_input_embeddings()(prompt).detach(), None
    if options.pop("by_outputs", False):
        with torch.no_grad():
            hidden = model.get_encoder()(prompt, attention_mask=options["attention_mask"]).last_hidden_state
        options["encoder_outputs"] = BaseModelOutput(last_hidden_state=hidden)
    return generate(model, prompt, **options)


def test_generate_in_many_ways() -> None:
    check_ways(bart(), WAYS, run_way, **ONCE_IS_ENOUGH)


@torch.no_grad()
def test_each_rank_keeps_its_part_of_the_encoder() -> None:
    model = bart()

    def run(mine: PreTrainedModel, _: Handle, group: Any) -> int:
        cache = new_cache()
        mine(input_ids=IDS, decoder_input_ids=LABELS, past_key_values=cache)
        assert cache.get_seq_length() == LABELS.shape[1]
        return int(cache.cross_attention_cache.layers[1].keys.shape[2])

    assert on_ranks(model, run, 4) == [5, 6, 6, 6]


@torch.no_grad()
def test_a_cache_is_cropped_reset_and_used_again() -> None:
    model = bart()

    def converse(model: PreTrainedModel) -> list[torch.Tensor]:
        cache = new_cache()
        given = {"input_ids": IDS, "attention_mask": BEHIND, "past_key_values": cache}
        model(**given, decoder_input_ids=LABELS[:, :9])
        cache.crop(-4)
        after_crop = model(**given, decoder_input_ids=LABELS[:, 5:]).logits
        cache.batch_select_indices(torch.tensor([1]))
        one_row = {name: x if name == "past_key_values" else x[1:] for name, x in given.items()}
        selected = model(**one_row, decoder_input_ids=LABELS[1:, :2]).logits
        return [after_crop, selected]

    def again(model: PreTrainedModel) -> torch.Tensor:
        cache = new_cache()
        model(input_ids=IDS, decoder_input_ids=LABELS, past_key_values=cache)
        cache.reset()
        return model(input_ids=IDS.flip(1)[:, :7], decoder_input_ids=LABELS, past_key_values=cache).logits

    expected = [*converse(model), model(input_ids=IDS.flip(1)[:, :7], decoder_input_ids=LABELS).logits]
    for found in on_ranks(model, lambda mine, *_: [*converse(mine), again(mine)]):
        for mine, alone in zip(found, expected, strict=True):
            assert difference(mine, alone) < TOLERANCE


@torch.no_grad()
def test_a_prefix_is_kept_and_copied() -> None:
    """Both halves of a cache, and how they refer to each other."""
    model = bart()

    def ask(model: PreTrainedModel) -> list[torch.Tensor]:
        prefix = new_cache()
        given = {"input_ids": IDS, "attention_mask": BEHIND}
        model(**given, decoder_input_ids=LABELS[:, :6], past_key_values=prefix)
        caches = [copy.deepcopy(prefix), copy.deepcopy(prefix), prefix]
        more = (LABELS[:, 6:], LABELS[:, 2:5], LABELS[:, 6:9])
        return [
            model(**given, decoder_input_ids=x, past_key_values=cache).logits
            for x, cache in zip(more, caches, strict=True)
        ]

    expected = ask(model)
    for found in on_ranks(model, lambda mine, *_: ask(mine)):
        assert all(difference(x, y) < TOLERANCE for x, y in zip(found, expected, strict=True))


@contextmanager
def broken(module: torch.nn.Module, error: BaseException) -> Iterator[None]:
    def fail(*_: object) -> None:
        raise error

    hook = module.register_forward_pre_hook(fail)
    yield
    hook.remove()


@torch.no_grad()
def test_a_failure_leaves_no_trace_of_the_encoder() -> None:
    """The first layer has stored its keys when the second one fails."""
    model, other = bart(), IDS.flip(1)
    expected = model(input_ids=other, decoder_input_ids=LABELS).logits
    with parallelize(model):
        cache = new_cache()
        with broken(model.get_decoder().layers[1].fc1, RuntimeError("broken")), pytest.raises(RuntimeError):
            model(input_ids=IDS, decoder_input_ids=LABELS, past_key_values=cache)
        found = model(input_ids=other, decoder_input_ids=LABELS, past_key_values=cache).logits
    assert difference(found, expected) < TOLERANCE


@pytest.mark.parametrize("part", ["encoder", "decoder"])
def test_an_interrupt_ends_the_wait(part: str) -> None:
    """No hook runs then, so the forward still seems to be in progress."""
    model = bart()
    expected = generate(model, IDS)[0]
    with parallelize(model, verify=False) as handle:
        layer = getattr(model.model, part).layers[1]
        with broken(layer, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            generate(model, IDS[:, :9])
        assert torch.equal(generate(model, IDS)[0], expected)
        with broken(layer, KeyboardInterrupt()), pytest.raises(KeyboardInterrupt):
            model(**handle.shard(whole("plain")))
        assert torch.equal(generate(model, IDS)[0], expected)


# Refusals


REFUSED_CALLS: dict[str, tuple[dict[str, Any], str]] = {
    "no decoder": ({"decoder_input_ids": None}, "no decoder_input_ids: give the decoder's tokens"),
    "rows": ({"decoder_input_ids": LABELS[:1]}, "the encoder and the decoder need the same number of rows"),
    "positions": ({"position_ids": torch.arange(23)[None]}, "position_ids: its effect .* is unknown"),
    "one cache": (
        {"past_key_values": "plain"},
        "DynamicCache: a model with an encoder .* needs an EncoderDecoderCache",
    ),
    "a filled cache": ({"past_key_values": "filled"}, "an encoder's tokens, whole on this rank"),
    "another encoder": ({"past_key_values": "used"}, "sequence of 23 tokens: the cache was made with one of 7"),
    "gap": ({"attention_mask": mask(IDS.shape, (0, slice(4, 5)))}, "padding between tokens"),
    "number of labels": ({"labels": LABELS, "num_items_in_batch": 3}, "num_items_in_batch: .* does not use it"),
    "weights": ({"cross_attn_head_mask": torch.ones(4)}, "cross_attn_head_mask: its effect .* is unknown"),
    "static cache": ({"generates": True, "cache_implementation": "static"}, "leave out cache_implementation"),
    "a prompt with padding behind": (
        {"generates": True, "decoder_attention_mask": mask(LABELS.shape, (0, slice(8, None)))},
        "decoder_attention_mask has padding in its last column, .* put padding before the tokens",
    ),
}


@pytest.mark.parametrize("what", REFUSED_CALLS)
@torch.no_grad()
def test_what_a_call_refuses(what: str) -> None:
    """All ranks raise, and the group is usable."""
    options, message = REFUSED_CALLS[what]
    model = bart()

    def run(mine: PreTrainedModel, handle: Handle, group: Any) -> torch.Tensor:
        asked = {"decoder_input_ids": LABELS, **options}
        if isinstance(asked.get("past_key_values"), str):
            asked["past_key_values"] = make_cache(asked["past_key_values"], mine)
        call = partial(generate, mine) if asked.pop("generates", False) else mine
        with pytest.raises(rs.RingspanError, match=message):
            call(IDS, **asked)
        return sharded_logits(mine, handle, group, whole("plain"))

    def make_cache(kind: str, mine: PreTrainedModel) -> Any:
        cache = DynamicCache() if kind == "plain" else new_cache()
        if kind != "plain":
            used = model if kind == "filled" else mine
            used(input_ids=IDS[:, :7], decoder_input_ids=LABELS, past_key_values=cache)
        return cache

    assert difference(on_ranks(model, run, 2)[0], model(**whole("plain")).logits) < TOLERANCE


def test_what_else_is_refused() -> None:
    with pytest.raises(rs.UnsupportedError, match="is random in training"):
        parallelize(bart(encoder_layerdrop=0.01).train())
    model = bart()
    with parallelize(model) as handle, torch.no_grad():
        with pytest.raises(rs.UnsupportedError, match="call the model itself, not a part of it"):
            model.get_decoder()(LABELS)
        with pytest.raises(rs.UnsupportedError, match="encoder_outputs"):
            handle.shard({"encoder_outputs": (torch.zeros(2, 23, 64),), "decoder_input_ids": LABELS})
        with torch.enable_grad(), pytest.raises(rs.UnsupportedError, match="with gradients: use model"):
            model.get_encoder()(IDS)
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


@torch.no_grad()
def test_ranks_with_other_sequences_are_named() -> None:
    def other_encoder(mine: PreTrainedModel, _: Handle, group: Any) -> None:
        generate(mine, tokens(seed=group.rank))

    def other_decoder(mine: PreTrainedModel, _: Handle, group: Any) -> None:
        mine(input_ids=IDS, decoder_input_ids=tokens(2, 3, seed=group.rank))

    def other_padding(mine: PreTrainedModel, _: Handle, group: Any) -> None:
        mine(input_ids=IDS, attention_mask=(BEFORE, BEHIND)[group.rank], decoder_input_ids=LABELS)

    for call, name in ((other_encoder, "input_ids"), (other_decoder, "input_ids"), (other_padding, "mask")):
        with pytest.raises(rs.TransportError, match=rf"{name}: rank 0 has .*, rank 1 has "):
            on_ranks(bart(), call, 2)
